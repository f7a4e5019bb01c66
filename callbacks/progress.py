"""Progress of a training run: loss, tokens per second and time left; a live bar on a terminal, lines in a log file.

On a terminal one `rich` bar counts optimizer steps and a second one validation batches. Elsewhere (SLURM's output file,
`nohup`, a pipe) a plain line is written at most every few seconds, so that a log of days stays readable.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar

_TERMINAL_SECONDS = 0.5  # reading a metric waits for the device: not at every step


class ThroughputProgressBar(ProgressBar):
    """Lightning progress bar with loss, tokens per second and ETA.

    Tokens are counted from `batch["input_ids"]` over all ranks; a module that logs `tokens_per_second` is believed
    instead.
    The ETA is to `max_steps` (else to the end of the last epoch) at the pace of the recent past, validation included.

    Args:
        line_seconds: seconds between plain lines when the output is not a terminal.
    """

    def __init__(self, line_seconds: float = 10.0) -> None:
        super().__init__()
        if line_seconds <= 0:
            raise ValueError(f"ThroughputProgressBar(line_seconds={line_seconds}): must be positive.")
        self.line_seconds = line_seconds
        self._enabled = True
        self._bar: Any = None
        self._train_task: Any = None
        self._val_task: Any = None
        self._tokens = 0
        self._last_report = 0.0
        self._marks: list[tuple[float, int, int]] = []  # (time, optimizer step, tokens) of recent reports
        self._val_done, self._val_total = 0, 0.0
        self._validated_at: int | None = None

    # ---- switched by the Trainer

    def disable(self) -> None:
        """Silent (every rank but 0)."""
        self._enabled = False

    def enable(self) -> None:
        """Speaks again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Writes a line above the bar."""
        text = " ".join(str(item) for item in args)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._enabled:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    # ---- training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock and, on a terminal, the bar."""
        now = time.monotonic()
        self._tokens, self._last_report = 0, now
        self._marks = [(now, trainer.global_step, 0)]
        if not self._enabled:
            return
        if sys.stdout.isatty():
            self._start_bar(trainer)
        else:
            total = _total_steps(trainer)
            end = str(int(total)) if math.isfinite(total) else "the end"
            self.print(f"training from step {trainer.global_step} to {end}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, and reports when it is time."""
        if not self._enabled:
            return
        self._print_validation(trainer)
        if isinstance(batch, dict) and isinstance(batch.get("input_ids"), torch.Tensor):
            self._tokens += batch["input_ids"].numel() * trainer.world_size
        period = _TERMINAL_SECONDS if self._bar is not None else self.line_seconds
        if time.monotonic() - self._last_report >= period:
            self._report(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last state stays readable."""
        if self._enabled:
            self._print_validation(trainer)
            self._report(trainer)
        self._stop_bar()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the terminal in order."""
        self._stop_bar()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the terminal in order."""
        self._stop_bar()

    # ---- validation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the second bar."""
        batches = trainer.num_val_batches
        self._val_done, self._val_total = 0, float(sum(batches) if isinstance(batches, list) else batches)
        if self._bar is not None and not trainer.sanity_checking:
            total = self._val_total if math.isfinite(self._val_total) else None
            self._val_task = self._bar.add_task("validation", total=total, info="")

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Advances it; off a terminal a long validation writes lines too."""
        if trainer.sanity_checking or not self._enabled:
            return
        self._val_done += 1
        if self._bar is not None:
            self._bar.advance(self._val_task)
        elif time.monotonic() - self._last_report >= self.line_seconds:
            self._last_report = time.monotonic()
            of = f"/{int(self._val_total)}" if math.isfinite(self._val_total) else ""
            self.print(f"step {trainer.global_step}: validation batch {self._val_done}{of}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the second bar away. The losses are printed later: other callbacks may still measure some."""
        if self._val_task is not None:
            self._bar.remove_task(self._val_task)
            self._val_task = None
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._validated_at = trainer.global_step

    def _print_validation(self, trainer: pl.Trainer) -> None:
        """The validation losses, live and merged (where a callback measures it), of a validation just done."""
        step, self._validated_at = self._validated_at, None
        if step is None:
            return
        shown = [(name, trainer.callback_metrics.get(name)) for name in ("val_loss", "val_loss_merged")]
        if text := ", ".join(f"{name} {float(value):.4f}" for name, value in shown if value is not None):
            self.print(f"step {step}: {text}")

    # ---- the report

    def _report(self, trainer: pl.Trainer) -> None:
        now, step = time.monotonic(), trainer.global_step
        self._last_report = now
        self._marks = [*self._marks[-20:], (now, step, self._tokens)]
        start_time, start_step, start_tokens = self._marks[0]
        seconds = max(now - start_time, 1e-9)
        total = _total_steps(trainer)
        pace = (step - start_step) / seconds
        metrics = self.get_metrics(trainer, trainer.lightning_module)
        parts = []
        loss = metrics.get("train_loss", metrics.get("loss", trainer.callback_metrics.get("train_loss")))
        if loss is not None:
            parts.append(f"loss {float(loss):.4f}")  # type: ignore[arg-type]  # waits for the device
        logged = trainer.callback_metrics.get("tokens_per_second")
        rate = float(logged) if logged is not None else (self._tokens - start_tokens) / seconds
        if rate > 0:
            parts.append(f"{_short(rate)} tokens/s")
        for name in ("val_loss", "val_loss_merged"):
            if name in trainer.callback_metrics:
                parts.append(f"{name} {float(trainer.callback_metrics[name]):.4f}")
        if math.isfinite(total) and pace > 0:
            parts.append(f"ETA {format_seconds((total - step) / pace)}")
        if self._bar is not None:
            self._bar.update(self._train_task, completed=step, info="  ".join(parts))
        else:
            of = f"/{int(total)}" if math.isfinite(total) else ""
            self.print(", ".join([f"step {step}{of}", *parts]))

    def _start_bar(self, trainer: pl.Trainer) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        total = _total_steps(trainer)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[info]}"),
            refresh_per_second=4,
            expand=True,
        )
        self._train_task = self._bar.add_task(
            "training", total=total if math.isfinite(total) else None, completed=trainer.global_step, info=""
        )
        self._bar.start()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._train_task = self._val_task = None


def _total_steps(trainer: pl.Trainer) -> float:
    """Optimizer step at which training ends; infinite when nothing limits it."""
    total = trainer.estimated_stepping_batches
    return float(total) if total is not None else math.inf


def _short(number: float) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """3725 -> 1:02:05; days are named."""
    whole = int(seconds + 0.5)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    text = f"{hours}:{minutes:02d}:{secs:02d}" if hours or days else f"{minutes}:{secs:02d}"
    return f"{days}d {text}" if days else text
