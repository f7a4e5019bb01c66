"""The random generators of every rank, kept in the checkpoint."""

from __future__ import annotations

import random
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from .boundary import run_last


class RNGState(Callback):
    """Keeps the random generators (Python, NumPy, torch, CUDA) of every rank in each checkpoint and restores them.

    Validation is fenced off: the numbers it draws (also the data loader's worker seed) are taken back afterwards. So a
    run resumed from a checkpoint at a validation step, which does not repeat the validation, goes on bit for bit.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None
        self._mid_epoch = True
        self._first_batch: dict[str, Any] | None = None
        self._last_batch: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes its place behind the others, which may draw numbers at the end of a batch too."""
        if stage == "fit":
            run_last(trainer, self)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds `rng_states`: one entry a rank."""
        own = _pack(_get_rng_state() if self._last_batch is None or not trainer.validating else self._last_batch)
        states = [own]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, own)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        checkpoint["rng_states"] = {"ranks": states, "mid_epoch": not progress.is_last_batch}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores at once (the sampler of a new epoch draws from it) and, mid-epoch, again when training starts."""
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
        self._restored, self._mid_epoch = _unpack(saved["ranks"][trainer.global_rank]), saved["mid_epoch"]
        _set_rng_state(self._restored)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undoes what setting up the model and the loaders drew."""
        if self._restored is None:
            return
        if self._mid_epoch:
            _set_rng_state(self._restored)
        self._restored = None
        self._first_batch = _get_rng_state()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Undoes what the validation loader drew, which Lightning winds forward when resuming at a validation step."""
        if self._first_batch is not None:
            _set_rng_state(self._first_batch)
            self._first_batch = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Notes the state to which a validation that follows returns (a few microseconds)."""
        self._last_batch = _get_rng_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes back what validation drew."""
        if self._last_batch is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            _set_rng_state(self._last_batch)


def _get_rng_state() -> dict[str, Any]:
    """State of this process's generators as they give it (tens of microseconds)."""
    import numpy

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _pack(state: dict[str, Any]) -> dict[str, Any]:
    """The state in types that `torch.load(weights_only=True)` accepts."""
    version, numbers, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": state["torch"],
        "cuda": state["cuda"],
    }


def _unpack(packed: dict[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = packed["python"]
    name, keys, position, has_gauss, cached = packed["numpy"]
    return {
        "python": (version, tuple(numbers.tolist()), gauss),
        "numpy": (name, keys.numpy().astype("uint32"), position, has_gauss, cached),
        "torch": packed["torch"],
        "cuda": packed["cuda"],
    }
