"""The random generators of every rank, kept in the checkpoint."""

from __future__ import annotations

import random
import warnings
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class RNGState(Callback):
    """Keeps the random generators (Python, NumPy, torch, CUDA) of every rank in each checkpoint and restores them.

    Validation is fenced off: the numbers it draws (also the data loader's worker seed) are taken back afterwards. So a
    run resumed from a checkpoint at a validation step, which does not repeat the validation, goes on bit for bit.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None
        self._last_batch: dict[str, Any] | None = None
        self._mid_epoch = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds `rng_states`: one entry a rank."""
        own = _get_rng_state() if self._last_batch is None or not trainer.validating else self._last_batch
        states = [own]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, own)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        checkpoint["rng_states"] = {"ranks": states, "mid_epoch": not progress.is_last_batch}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores at once (an epoch's sampler may draw from it) and, mid-epoch, again when training starts."""
        saved = checkpoint.get("rng_states")
        if saved is None or trainer.state.fn != "fit":
            return
        if len(saved["ranks"]) != trainer.world_size:
            warnings.warn(
                f"The checkpoint holds the random states of {len(saved['ranks'])} ranks, this run has"
                f" {trainer.world_size}: they start afresh from the seed instead.",
                stacklevel=2,
            )
            return
        self._states, self._mid_epoch = saved["ranks"], saved["mid_epoch"]
        _set_rng_state(self._states[trainer.global_rank])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undoes what setting up the model and the loaders drew."""
        if self._states is not None and self._mid_epoch:
            _set_rng_state(self._states[trainer.global_rank])
        self._states = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Notes the state to which a validation that follows returns (a few microseconds)."""
        self._last_batch = _get_rng_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes back what validation drew."""
        if self._last_batch is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            _set_rng_state(self._last_batch)


def _get_rng_state() -> dict[str, Any]:
    """State of this process's generators, in types that `torch.load(weights_only=True)` accepts."""
    import numpy

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple, numpy.random.get_state(legacy=True))
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    import numpy

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
