"""Order among callbacks: who must see a step boundary after all others."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


def run_last(trainer: pl.Trainer, callback: Callback) -> None:
    """Moves `callback` behind all others: what they do at a boundary must be in the checkpoint that it saves there."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # a new list, because Lightning is iterating over the old one
    trainer.callbacks = [other for other in callbacks if other is not callback] + [callback]  # type: ignore[attr-defined]
