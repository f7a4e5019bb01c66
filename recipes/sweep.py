"""`lightning run merge/sweep`: many simulated anneals of one run, from its checkpoints, without training."""

import csv
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..callbacks.checkpoint_files import write_text_atomic
from ..callbacks.checkpoint_merging.byte_ranges import Checkpoint
from ..callbacks.checkpoint_merging.offline import merge_into
from ..callbacks.checkpoint_merging.plots import (
    plot_heat_map,
    plot_lines,
    plot_weights,
    save_figure,
)
from ..callbacks.checkpoint_merging.weights import MergeWeights, merge_weights
from ..callbacks.checkpoint_merging.windows import locate, open_inputs, select_window
from ..callbacks.mlflow_logger import BufferedMLFlowLogger
from .errors import UserError

log = logging.getLogger(__name__)

_CACHE = Path("merge_sweep") / "cells.json"
_CURVE = re.compile(r"\s*(?P<name>[\w-]+)\s*(?:\((?P<args>[^()]*)\))?\s*")


@dataclass
class Cell:
    """One merge of the grid: where it stands, what it merges, and the loss (None: it cannot be made, see `note`)."""

    curve: str
    duration: float
    interval: float
    num_checkpoints: int
    first: float = float("nan")
    last: float = float("nan")
    loss: float | None = None
    gain: float | None = None
    note: str = ""


class MergeSweep:
    """Validation loss of merges over a grid of curves, durations and intervals.

    Args:
        run_dir: folder of a run (with `config.yaml` and `checkpoints/`), or "latest": the newest under `runs/`.
        curves: names with parameters in brackets, e.g. "ema(r=0.3)"; see `decay_coefficients`.
        durations: merge windows in `unit`; None: 2, 4, 8 ... checkpoints, and all.
        intervals: distances between merged checkpoints; None: the run's own, twice and four times that.
        grid: how curves are sampled.
        min_ratio: floor of every curve.
        unit: "steps" or "tokens".
        limit_val_batches: batches (int) or share (float) of the validation data; None: as in the run.
        metric: what the run's module logs in validation.

    Raises:
        UserError: no such run, no checkpoints, an unknown curve.
    """

    def __init__(
        self,
        run_dir: str = "latest",
        curves: Sequence[str] = ("linear", "cosine", "one_minus_sqrt", "ema"),
        durations: list[float] | None = None,
        intervals: list[float] | None = None,
        grid: str = "virtual_end",
        min_ratio: float = 0.0,
        unit: str = "steps",
        limit_val_batches: int | float | None = None,
        metric: str = "val_loss",
    ) -> None:
        self.run_dir = find_run(run_dir)
        self.curves = {text: parse_curve(text) for text in curves}
        self.durations, self.intervals = durations, intervals
        self.grid, self.min_ratio, self.unit = grid, min_ratio, unit
        self.limit_val_batches, self.metric = limit_val_batches, metric
        self.output = Path(os.environ.get("FULGURITE_RUN_DIR") or self.run_dir / "merge_sweep")
        for text, (name, args) in self.curves.items():
            try:  # positions that suit every curve
                merge_weights([1, 2], name, grid=grid, min_ratio=min_ratio, **args)
            except ValueError as error:
                raise UserError(f"curve {text!r}: {error}") from error

    def run(self) -> list[Cell]:
        """Compute every cell that is not known yet, print and save the results; returns the cells, best first."""
        with ExitStack() as stack:
            opened = open_inputs(self.run_dir, stack)
            try:
                located = locate(opened, self.unit, None, single=False)
            except ValueError as error:
                raise UserError(str(error)) from error
            if len(located) < 2:
                raise UserError(f"{self.run_dir} has {len(located)} checkpoint(s): a merge needs two or more")
            evaluate = Evaluation(self.run_dir, self.limit_val_batches, self.metric)
            cache = Cache(self.run_dir, self.output, evaluate.identity)
            newest = located[-1:]
            live = cache.get(newest, [1.0], evaluate)
            cells = self._fill(located, cache, evaluate, live)
        done = sorted((cell for cell in cells if cell.loss is not None), key=lambda cell: cell.loss or 0.0)
        if not done:
            notes = "; ".join(sorted({cell.note for cell in cells}))
            raise UserError(f"no cell of the grid can be made from the checkpoints of {self.run_dir}: {notes}")
        self._report(cells, done[0], live, [position for position, _ in located])
        return [*done, *(cell for cell in cells if cell.loss is None)]

    # ------------------------------------------------------------------ the grid

    def _fill(
        self, located: Sequence[tuple[float, Checkpoint]], cache: "Cache", evaluate: "Evaluation", live: float
    ) -> list[Cell]:
        positions = [position for position, _ in located]
        spacing = typical_spacing(positions)
        intervals = self.intervals or [spacing * factor for factor in (1, 2, 4)]
        durations = self.durations or default_durations(spacing, len(positions))
        grid = [(c, d, i) for i in intervals for c in self.curves for d in durations if d / i >= 2 or self.durations]
        cells = []
        with progress(len(grid)) as advance:
            for curve, duration, interval in grid:
                cell, window = self._window(positions, curve, duration, interval)
                cells.append(cell)
                if window is not None:
                    chosen = [located[i] for i in window]
                    weights = self._weights([position for position, _ in chosen], curve)
                    cell.loss = cache.get(chosen, weights.c.tolist(), evaluate)
                    cell.gain = live - cell.loss
                advance(f"{curve}, {duration:g} {self.unit} every {interval:g}")
        return cells

    def _window(
        self, positions: Sequence[float], curve: str, duration: float, interval: float
    ) -> tuple[Cell, list[int] | None]:
        cell = Cell(curve, duration, interval, round(duration / interval))
        if cell.num_checkpoints < 2:
            cell.note = f"{duration:g} {self.unit} every {interval:g} are fewer than two checkpoints"
            return cell, None
        try:
            window = select_window(positions, num_checkpoints=cell.num_checkpoints, interval=interval)
        except ValueError as error:
            cell.note = str(error)
            return cell, None
        cell.first, cell.last = positions[window[0]], positions[window[-1]]
        return cell, window

    def _weights(self, positions: Sequence[float], curve: str) -> MergeWeights:
        name, args = self.curves[curve]
        return merge_weights(positions, name, grid=self.grid, min_ratio=self.min_ratio, **args)

    # ------------------------------------------------------------------ what comes out

    def _report(self, cells: Sequence[Cell], best: Cell, live: float, positions: Sequence[float]) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        record = {
            "run": str(self.run_dir),
            "metric": self.metric,
            "unit": self.unit,
            "grid": self.grid,
            "min_ratio": self.min_ratio,
            "live": live,
            "last": positions[-1],
            "cells": [{k: v for k, v in asdict(cell).items() if v == v} for cell in cells],
        }
        write_text_atomic(self.output / "sweep.json", json.dumps(record, indent=2) + "\n")
        write_text_atomic(self.output / "sweep.csv", to_csv(cells))
        figures = self._figures(cells, best, live, positions)
        for name, figure in figures.items():
            save_figure(figure, self.output / "plots" / name)
        console = Console()
        for interval in dict.fromkeys(cell.interval for cell in cells):
            console.print(self._table([cell for cell in cells if cell.interval == interval], interval, best))
        for note in dict.fromkeys(cell.note for cell in cells if cell.note):
            console.print(f"  – {note}", style="dim", highlight=False)
        self._summarise(console, best, live)
        self._track(cells, live, figures)

    def _table(self, cells: Sequence[Cell], interval: float, best: Cell) -> Table:
        table = Table(title=f"{self.metric} of merges every {interval:g} {self.unit}", title_justify="left")
        table.add_column("curve")
        durations = sorted({cell.duration for cell in cells})
        for duration in durations:
            table.add_column(f"{duration:g}\nn={round(duration / interval)}", justify="right")
        for curve in self.curves:
            row = {cell.duration: cell for cell in cells if cell.curve == curve}
            texts = []
            for duration in durations:
                cell = row.get(duration)
                text = "–" if cell is None or cell.loss is None else f"{cell.loss:.4f}"
                texts.append(f"[bold green]{text}[/]" if cell is best else text)
            table.add_row(curve, *texts)
        return table

    def _summarise(self, console: Console, best: Cell, live: float) -> None:
        name, args = self.curves[best.curve]
        options = [f"--curve {name}", *(f"--{key} {value:g}" for key, value in args.items())]
        options += [f"--num_checkpoints {best.num_checkpoints}", f"--interval {best.interval:g}"]
        options += [f"--grid {self.grid}"] if self.grid != "virtual_end" else []
        options += [f"--min_ratio {self.min_ratio:g}"] if self.min_ratio else []
        options += [f"--unit {self.unit}"] if self.unit != "steps" else []
        say = lambda text: console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
        say(f"live weights {live:.4f}; best merge {best.loss:.4f} ({best.curve}, {best.duration:g} {self.unit})")
        say(f"results {self.output}/sweep.csv, sweep.json, plots/")
        say(f"make it  lightning merge {self.run_dir} merged-best {' '.join(options)}")

    def _figures(self, cells: Sequence[Cell], best: Cell, live: float, positions: Sequence[float]) -> dict[str, Any]:
        finest = [cell for cell in cells if cell.interval == min(c.interval for c in cells)]
        window = select_window(positions, num_checkpoints=best.num_checkpoints, interval=best.interval)
        figures = {
            "best_weights.png": plot_weights(self._weights([positions[i] for i in window], best.curve), self.unit)
        }
        figures["durations.png"] = plot_lines(
            {
                curve: [(c.duration, c.loss) for c in finest if c.curve == curve and c.loss is not None]
                for curve in self.curves
                if any(c.curve == curve and c.loss is not None for c in finest)
            },
            xlabel=f"merge duration ({self.unit})",
            title=f"Merges every {finest[0].interval:g} {self.unit}",
            baseline=("live weights", live),
        )
        figures["heat_map.png"] = self._heat_map(
            cells, "curve", list(self.curves), lambda c: c.curve, lambda c: c.interval == finest[0].interval
        )
        intervals = list(dict.fromkeys(cell.interval for cell in cells))
        if len(intervals) > 1:
            figures["intervals.png"] = self._heat_map(
                cells, f"interval ({self.unit})", intervals, lambda c: c.interval, lambda c: c.curve == best.curve
            )
        return figures

    def _heat_map(self, cells: Sequence[Cell], label: str, rows: Sequence[Any], row: Any, keep: Any) -> Any:
        kept = [cell for cell in cells if keep(cell)]
        durations = sorted({cell.duration for cell in kept})
        table = [[float("nan")] * len(durations) for _ in rows]
        for cell in kept:
            if cell.loss is not None:
                table[rows.index(row(cell))][durations.index(cell.duration)] = cell.loss
        title = f"Merges every {kept[0].interval:g} {self.unit}" if label == "curve" else f"Merges by {kept[0].curve}"
        return plot_heat_map(
            table,
            [r if isinstance(r, str) else f"{r:g}" for r in rows],
            [f"{d:g}" for d in durations],
            title=title,
            row_label=label,
            column_label=f"merge duration ({self.unit})",
        )

    def _track(self, cells: Sequence[Cell], live: float, figures: Mapping[str, Any]) -> None:
        source = _read_json(self.run_dir / "run.json")
        logger = BufferedMLFlowLogger("merge/sweep", run_name=self.output.name, run_dir=self.output)
        logger.set_tags({"merged_run": str(self.run_dir), "merged_mlflow_run": source.get("mlflow_run_id") or ""})
        logger.log_hyperparams(
            {
                "run": str(self.run_dir),
                "curves": list(self.curves),
                "grid": self.grid,
                "min_ratio": self.min_ratio,
                "unit": self.unit,
            }
        )
        logger.log_metrics({f"{self.metric}_live": live})
        for cell in cells:
            if cell.loss is not None:
                name = re.sub(r"[^\w.-]+", "_", f"{self.metric}_{cell.curve}_every_{cell.interval:g}").strip("_")
                logger.log_metrics({name: cell.loss}, step=int(cell.duration))
        for name, figure in figures.items():
            logger.log_figure(figure, f"plots/{name}")
        for name in ("sweep.csv", "sweep.json"):
            logger.log_artifact(self.output / name)
        logger.finalize("success")


class Evaluation:
    """Validates weights in the run's own model on its own data.

    Attributes:
        identity: text that changes whenever the loss of the same weights may.
    """

    def __init__(self, run_dir: Path, limit_val_batches: int | float | None, metric: str) -> None:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8")) or {}
        for key in ("model", "data"):
            if not isinstance(config.get(key), dict):
                raise UserError(f"{run_dir / 'config.yaml'} has no {key}: it is not the folder of a training run")
        trainer = config.get("trainer") or {}
        limit = trainer.get("limit_val_batches") if limit_val_batches is None else limit_val_batches
        self.metric = metric
        self.identity = json.dumps([config["model"], config["data"], trainer.get("precision"), limit, metric])
        self._config, self._precision, self._limit = config, trainer.get("precision"), limit
        self._accelerator = trainer.get("accelerator") or "auto"
        self._parts: tuple[pl.Trainer, pl.LightningModule, pl.LightningDataModule, _MergedWeights] | None = None

    def __call__(self, window: Sequence[tuple[float, Checkpoint]], c: Sequence[float]) -> float:
        """The metric of the merge of a window with weights c."""
        trainer, module, data, weights = self._parts = self._parts or self._build()
        weights.window, weights.c = [checkpoint for _, checkpoint in window], c
        trainer.validate(module, datamodule=data, verbose=False)
        metrics = trainer.callback_metrics
        if self.metric not in metrics:
            raise UserError(f"the run's module logs no {self.metric} in validation: it logs {', '.join(metrics)}")
        return float(metrics[self.metric])

    def _build(self) -> tuple[pl.Trainer, pl.LightningModule, pl.LightningDataModule, "_MergedWeights"]:
        from lightning.pytorch.cli import LightningArgumentParser

        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(pl.LightningModule, "model", required=True)
        parser.add_subclass_arguments(pl.LightningDataModule, "data", required=True)
        parts = {key: self._config[key] for key in ("model", "data")}
        built = parser.instantiate_classes(parser.parse_object(parts))
        weights = _MergedWeights()
        trainer = pl.Trainer(
            accelerator=self._accelerator,
            devices=1,
            precision=self._precision,
            limit_val_batches=self._limit,
            callbacks=[weights],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return trainer, built.model, built.data, weights


class _MergedWeights(pl.Callback):
    """Puts a merge into the model when validation starts: by then the module has been built."""

    def __init__(self) -> None:
        self.window: list[Checkpoint] = []
        self.c: Sequence[float] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        merge_into(self.window, self.c, pl_module.state_dict())


class Cache:
    """Losses by what was merged, in the run's folder: a second sweep, or one that was killed, goes on from there."""

    def __init__(self, run_dir: Path, output: Path, identity: str) -> None:
        self._path, self._identity = run_dir / _CACHE, identity
        try:
            self._path.parent.mkdir(exist_ok=True)
        except OSError:
            self._path = output / _CACHE.name
            log.warning("%s cannot be written: the losses are kept in %s", run_dir, self._path)
        self._losses: dict[str, float] = _read_json(self._path)

    def get(self, window: Sequence[tuple[float, Checkpoint]], c: Sequence[float], evaluate: Evaluation) -> float:
        """The loss of a merge, computed unless the same checkpoints were merged with the same weights before."""
        used = [(p, checkpoint, round(weight, 12)) for (p, checkpoint), weight in zip(window, c, strict=True)]
        merged = [[_file_identity(checkpoint), weight] for _, checkpoint, weight in used if weight]
        key = hashlib.sha256(json.dumps([self._identity, merged]).encode()).hexdigest()[:24]
        if key not in self._losses:
            self._losses[key] = evaluate(window, c)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self._path, json.dumps(self._losses, indent=1) + "\n")
        return self._losses[key]


def find_run(run: str) -> Path:
    """Folder of a run, or the newest under `runs/` that can be swept.

    Raises:
        UserError: there is none.
    """
    if run != "latest":
        path = Path(run)
        if not (path / "config.yaml").is_file():
            known = ", ".join(str(p) for p in _runs()[:3]) or "none yet"
            raise UserError(f"{path} is not the folder of a run (it has no config.yaml). The newest runs: {known}")
        return path.resolve()
    runs = _runs()
    if not runs:
        raise UserError(
            "there is no run with two or more checkpoints under runs/: start with `lightning run pretrain/wsm`"
        )
    return runs[0].resolve()


def parse_curve(text: str) -> tuple[str, dict[str, Any]]:
    """("ema", {"r": 0.3}) of "ema(r=0.3)".

    Raises:
        UserError: another form.
    """
    match = _CURVE.fullmatch(text)
    args: dict[str, Any] = {}
    for part in filter(None, ((match["args"] if match else None) or "").split(",")):
        key, _, value = part.partition("=")
        try:
            args[key.strip()] = float(value)
        except ValueError as error:
            raise UserError(f"curve {text!r}: {part.strip()!r} is not name=number") from error
    if not match:
        raise UserError(f"curve {text!r} does not look like linear or ema(r=0.3)")
    return match["name"], args


def typical_spacing(positions: Sequence[float]) -> float:
    """Median distance between checkpoints."""
    gaps = sorted(b - a for a, b in pairwise(positions))
    return gaps[len(gaps) // 2]


def default_durations(spacing: float, count: int) -> list[float]:
    """2, 4, 8 ... checkpoints, and all of them."""
    numbers = [2**i for i in range(1, count.bit_length()) if 2**i < count]
    return [spacing * n for n in [*numbers, count]]


def to_csv(cells: Sequence[Cell]) -> str:
    """The cells as a table with a header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(Cell.__dataclass_fields__))
    writer.writeheader()
    for cell in cells:
        writer.writerow({k: "" if v is None or v != v else v for k, v in asdict(cell).items()})
    return buffer.getvalue()


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, a line now and then elsewhere; yields a function that is called after each cell."""
    console = Console(stderr=True)
    if not console.is_terminal:
        done = 0

        def line(text: str) -> None:
            nonlocal done
            done += 1
            if done == total or done % max(1, total // 10) == 0:
                log.info("%d of %d merges: %s", done, total, text)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _runs() -> list[Path]:
    """Runs that can be swept, newest first."""
    found = [
        path.parent
        for path in Path("runs").glob("*/*/config.yaml")
        if len(list((path.parent / "checkpoints").glob("*.ckpt"))) >= 2
    ]
    return sorted(found, key=lambda p: (p / "config.yaml").stat().st_mtime, reverse=True)


def _file_identity(checkpoint: Checkpoint) -> list[Any]:
    """What tells a checkpoint from another without reading it."""
    files = []
    for file in checkpoint.files:
        known = [file.path.name, file.size]
        files.append([*known, file.known_digest or os.fstat(file.descriptor).st_mtime_ns])
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
