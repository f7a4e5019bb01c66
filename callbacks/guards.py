"""Guards of a training run: a non-finite loss never reaches the weights, and a signal costs at most one step.

`NonFiniteGuard` looks at the loss and the gradients once per optimizer step, before the update, and drops the update or
stops. `PreemptionGuard` (`preemption.py`, re-exported here) takes SIGUSR1, SIGTERM and Ctrl-C.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from .checkpointing import checkpoint_directories
from .preemption import Preempted, PreemptionGuard, slurm_job_id

__all__ = ["NonFiniteError", "NonFiniteGuard", "Preempted", "PreemptionGuard", "slurm_job_id"]
from .boundary import finish_batch, run_last

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or a gradient was NaN or infinite; the message names step, samples and the checkpoint to go on from."""


class NonFiniteGuard(Callback):
    """Keeps NaN and infinity out of the weights.

    Every micro-batch loss and, before each update, the norm of the gradients are checked. All ranks agree (one tiny
    all-reduce). A bad update is dropped exactly: the gradients are discarded before the optimizer sees them, so neither
    weights nor optimizer states change; the step still counts in `global_step`, the schedule and the data position.

    The check costs one device synchronisation an optimizer step. It cannot lag behind, because an update that has been
    applied cannot be taken back; the flags of all micro-batches of the step are collected without synchronising.

    Args:
        action: "stop" saves `nonfinite-step=N.ckpt`, which holds the weights from before the bad update and is
            positioned behind the bad batch, and raises `NonFiniteError`: resuming it equals having skipped. "skip"
            goes on.
        max_consecutive_skips: with "skip", this many dropped updates in a row stop the run after all.
        check_gradients: also check the gradients (a backward pass in bf16 may overflow under a finite loss).
            Ignored with fp16 loss scaling, where the scaler meets infinite gradients on purpose.

    Raises:
        NonFiniteError: names the step, and rank, batch and samples of each bad loss.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", max_consecutive_skips: int = 10, check_gradients: bool = True
    ) -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f'NonFiniteGuard(action={action!r}): choose "stop" or "skip".')
        if max_consecutive_skips < 1:
            raise ValueError(f"NonFiniteGuard(max_consecutive_skips={max_consecutive_skips}): must be at least 1.")
        self.action = action
        self.max_consecutive_skips = max_consecutive_skips
        self.check_gradients = check_gradients
        self.num_skipped = 0
        self._consecutive = 0
        self._window: list[tuple[int, Any, Tensor]] = []  # (batch index, sample ids, finite flag on the device)
        self._batch: tuple[int, Any] = (0, None)
        self._problem: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes its place behind the other callbacks."""
        if stage == "fit":
            run_last(trainer, self)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes whose loss comes next."""
        self._batch = (batch_idx, batch.get("sample_ids") if isinstance(batch, dict) else None)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Keeps the micro-batch's flag on its device."""
        self._window.append((*self._batch, torch.isfinite(loss.detach()).all()))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The one check of this step; discards the gradients when it fails."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        flags = [flag.float() for _, _, flag in self._window]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self.check_gradients and scaler is None:
            flags.append(_gradients_finite(parameters).to(pl_module.device))
        if not flags:
            return
        finite = torch.stack(flags).min()
        if trainer.world_size > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if finite.item() == 1.0:
            self._window.clear()
            self._consecutive = 0
            return
        for parameter in parameters:
            parameter.grad = None  # optimizers pass over such parameters: no decay, no momentum, no step count
        self._problem = self._describe(trainer)
        self._window.clear()
        self.num_skipped += 1
        self._consecutive += 1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """At the boundary, where the loop's counters are consistent: reports, and saves and raises if it is time."""
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if self.action == "skip" and self._consecutive < self.max_consecutive_skips:
            pl_module.log("skipped_updates", float(self.num_skipped))
            if trainer.is_global_zero:
                log.warning("%s This update was dropped (%d so far).", problem, self.num_skipped)
            return
        finish_batch(trainer, args)
        path = checkpoint_directories(trainer)[0] / f"nonfinite-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        many = f" {self._consecutive} updates in a row were dropped." if self.action == "skip" else ""
        raise NonFiniteError(
            f"{problem}{many} The weights from before this update are in {path}; `--resume auto` goes on from there,"
            " behind the bad batch. If it happens again, lower the learning rate or clip the gradients; to drop such"
            ' updates and go on, use NonFiniteGuard(action="skip").'
        )

    def _describe(self, trainer: pl.Trainer) -> str:
        bad = []
        for batch_idx, sample_ids, flag in self._window:
            if not flag.item():
                samples = sample_ids.flatten().tolist() if isinstance(sample_ids, Tensor) else sample_ids
                named = f", samples {samples}" if samples is not None else ""
                bad.append(f"rank {trainer.global_rank}, batch {batch_idx}{named}")
        everyone: list[Any] = [bad]
        if trainer.world_size > 1:
            everyone *= trainer.world_size
            dist.all_gather_object(everyone, bad)
        where = "; ".join(line for part in everyone for line in part)
        step = trainer.global_step + 1
        if where:
            return f"The loss of optimizer step {step} is not finite ({where})."
        batches = sorted({batch_idx for batch_idx, _, _ in self._window})
        ids = [value for _, ids, _ in self._window if isinstance(ids, Tensor) for value in ids.flatten().tolist()]
        return (
            f"The loss of optimizer step {step} is finite but its gradients are not (batch {batches}, samples {ids})."
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of dropped updates."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self.num_skipped = state_dict["num_skipped"]


def _gradients_finite(parameters: list[Tensor]) -> Tensor:
    """1.0 if every gradient (this rank's shard of it) is finite, on the device, without synchronising."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    local = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in local if gradient.numel()]
    if not local:
        return torch.ones(())
    # a 2-norm, because on CPUs torch computes others fifty times slower; where it overflows, clipping would fail too
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in local) else torch.float32
    norms = torch._foreach_norm(local, ord=2.0, dtype=wide)
    return torch.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms])).all().float()
