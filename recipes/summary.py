"""What a finished training prints: one screen with the losses, the speed, where everything is, and what to try next."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from .catalog import Recipe

Row = tuple[str, str]


def print_summary(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    directory: Path,
    recipe: Recipe,
    validated_step: int | None = None,
) -> None:
    """Print the summary, and write it to `summary.txt` in the run's folder.

    Args:
        trainer, module: as training left them.
        directory: the run's folder.
        recipe: what was run.
        validated_step: step of the last validation; None if there was none.
    """
    from rich.console import Console

    blocks = [losses(trainer, validated_step), speed(trainer, module), places(trainer, directory)]
    commands = next_commands(trainer, directory, recipe)
    plain = io.StringIO()
    for console in (Console(highlight=False), Console(file=plain, width=120, highlight=False)):
        _render(console, f"{recipe.name}  {directory.name}", blocks, commands)
    (directory / "summary.txt").write_text(plain.getvalue(), encoding="utf-8")


def _render(console: Any, title: str, blocks: list[list[Row]], commands: list[Row]) -> None:
    from rich.text import Text

    def say(*parts: tuple[str, str] | str) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)  # paths and commands must survive copy and paste

    width = max(len(name) for block in blocks for name, _ in block)
    console.print()
    console.rule(Text(title, style="bold"))
    for index, block in enumerate(block for block in blocks if block):
        if index:
            say()
        for name, text in block:
            say((f"{name:<{width}}", "bold"), f"  {text}")
    console.rule("next")
    for comment, command in commands:
        say((f"# {comment}", "dim"))
        say(command)
    console.rule()


def losses(trainer: pl.Trainer, validated_step: int | None) -> list[Row]:
    """Validation loss of the live and of the merged weights, and how far apart they are."""
    when = "" if validated_step in (None, trainer.global_step) else f"  at step {validated_step:,}"
    live, merged = _metric(trainer, "val_loss"), _metric(trainer, "val_loss_merged")
    rows: list[Row] = []
    if live is None:
        train = _metric(trainer, "train_loss")
        return [("training loss", f"{train:.4f}")] if train is not None else rows
    live_bpb, merged_bpb = _metric(trainer, "val_bpb"), _metric(trainer, "val_bpb_merged")
    rows.append(("validation loss, live", f"{live:.4f}{_bits(live_bpb)}{when}"))
    if merged is not None:
        rows.append(("validation loss, merged", f"{merged:.4f}{_bits(merged_bpb)}{when}"))
        word = "lower" if merged < live else "higher"
        rows.append(("gap", f"{live - merged:+.4f}: merged is {abs(live - merged) / live:.1%} {word}"))
    return rows


def speed(trainer: pl.Trainer, module: pl.LightningModule) -> list[Row]:
    """Steps, tokens, tokens per second and model FLOPs utilisation."""
    rows: list[Row] = []
    tokens = getattr(module, "tokens_seen", None)
    steps = f"{trainer.global_step:,}"
    rows.append(("steps", steps + (f", {int(tokens):,} tokens" if tokens else "")))
    rate, mfu = _metric(trainer, "tokens_per_second"), _metric(trainer, "mfu")
    if rate is not None:
        rows.append(("tokens per second", f"{rate:,.0f}"))
    if mfu is not None:
        rows.append(("MFU", f"{mfu:.1%}"))
    return rows


def places(trainer: pl.Trainer, directory: Path) -> list[Row]:
    """Where checkpoint, merged model, plots and records are."""
    rows: list[Row] = [("run", shown(directory))]
    checkpoint = newest_checkpoint(trainer)
    if checkpoint is not None:
        rows.append(("checkpoint", shown(checkpoint)))
    merged = merged_model(directory)
    if merged is not None:
        rows.append(("merged model", shown(merged)))
    plots = sorted((directory / "plots").glob("*.png"))
    if plots:
        rows.append(("plots", f"{shown(directory / 'plots')} ({', '.join(plot.name for plot in plots)})"))
    record = _read_json(directory / "run.json")
    if (directory / "mlflow-spool.jsonl").is_file():
        command = f"lightning sync {shlex.quote(shown(directory))}"
        rows.append(("MLflow run", f"the server was away, send it later:  {command}"))
    elif record.get("mlflow_run_id"):
        rows.append(("MLflow run", f"{record['mlflow_run_id']} in {_store(record)}  (lightning ui)"))
    return rows


def next_commands(trainer: pl.Trainer, directory: Path, recipe: Recipe) -> list[Row]:
    """Three commands that work now: (what it does, the command)."""
    name = shlex.quote(recipe.name if "/" in recipe.name else str(recipe.path))
    run = shlex.quote(shown(directory))
    commands: list[Row] = []
    merged, checkpoint = merged_model(directory), newest_checkpoint(trainer)
    if merged is not None:
        commands.append(
            (
                "other curves and windows from the same checkpoints, no training",
                f"lightning run merge/sweep --task.run_dir {run}",
            )
        )
        commands.append(
            (
                "fine-tune the merged model",
                f"lightning run finetune/sft-from-merged --model.model {shlex.quote(shown(merged))}",
            )
        )
    elif checkpoint is not None:
        output = shlex.quote(shown(directory / "huggingface"))
        commands.append(
            ("the model as a Hugging Face directory", f"lightning export {shlex.quote(shown(checkpoint))} {output}")
        )
    if checkpoint is not None and trainer.max_steps > 0:
        longer = f"lightning run {name} --resume {run} --trainer.max_steps {trainer.max_steps * 2}"
        commands.append(("train on, twice as long", longer))
    if not commands:
        commands.append(("another seed", f"lightning run {name} --seed 1"))
    commands.append(("curves and figures in the browser", "lightning ui"))
    return commands[:3]


def newest_checkpoint(trainer: pl.Trainer) -> Path | None:
    """The newest checkpoint that this run wrote or found."""
    folders = {Path(path) for callback in trainer.checkpoint_callbacks if (path := getattr(callback, "dirpath", None))}
    found = [path for folder in folders for path in folder.glob("*.ckpt")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def merged_model(directory: Path) -> Path | None:
    """The merged Hugging Face directory of the run: the newest with a `merge.json`."""
    found = [path.parent for path in directory.glob("merged*/**/merge.json")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def shown(path: Path) -> str:
    """A path as short as it can be written from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _metric(trainer: pl.Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return float(value) if value is not None else None


def _bits(value: float | None) -> str:
    return f"  ({value:.4f} bits per byte)" if value is not None else ""


def _store(record: dict[str, Any]) -> str:
    uri = str(record.get("mlflow_tracking_uri", ""))
    return shown(Path(uri.removeprefix("sqlite:///"))) if uri.startswith("sqlite:///") else uri


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
