"""The end of a batch, as callbacks see it: who comes last, and what Lightning has still to do after them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call


def run_last(trainer: pl.Trainer, callback: Callback) -> None:
    """Moves `callback` behind all others: what they do at a boundary must be in the checkpoint that it saves there."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # a new list, because Lightning is iterating over the old one
    trainer.callbacks = [other for other in callbacks if other is not callback] + [callback]  # type: ignore[attr-defined]


def finish_batch(trainer: pl.Trainer, hook_arguments: tuple[Any, ...]) -> None:
    """What Lightning still does for this batch after the callbacks: the module's own hook, and the step's metrics."""
    call._call_lightning_module_hook(trainer, "on_train_batch_end", *hook_arguments)
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()
