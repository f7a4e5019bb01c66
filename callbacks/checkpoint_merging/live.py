"""The live side of merging while training: which tensors are merged, how ranks share them, what the LR does."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .checks import check_lora, check_not_quantised

_BUCKET_BYTES = 32 << 20
_TOLERANCE = 1e-9  # relative change of the learning rate that counts as one


def reshard(module: nn.Module) -> None:
    """Put FSDP2 parameters back into their sharded state, in which alone they may be read and written.

    FSDP2 leaves the root's parameters gathered after a forward pass without backward; the next forward would then use
    the gathered copy, whatever the shards hold by now.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def merged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a merge covers: trainable parameters (tied ones once) and persistent buffers, by name.

    Frozen parameters are the same in every checkpoint: they keep their live value and cost nothing.
    """
    reshard(module)
    tensors: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def local(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's shard of a DTensor; it shares memory with it."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def refuse_unmergeable(tensors: Mapping[str, Tensor]) -> None:
    """Errors that averaging would hide.

    Raises:
        ValueError: nothing is trained, or LoRA factors are (the mean of A and of B is not the mean of B @ A).
        TypeError: quantised weights.
    """
    if not any(t.is_floating_point() for t in tensors.values()):
        raise ValueError("CheckpointMerge found no trainable floating-point parameter to merge")
    check_lora("the model", tensors, None)
    check_not_quantised("the model", {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})


@torch.no_grad()
def broadcast_from_rank_zero(tensors: Mapping[str, Tensor]) -> None:
    """Overwrite `tensors` on all ranks with those of rank 0, a bucket at a time, whatever their dtypes."""
    bucket: list[Tensor] = []
    size = 0
    # wide dtypes first: every tensor then starts at a multiple of its element size
    for tensor in [*sorted(tensors.values(), key=lambda t: -t.element_size()), None]:
        if tensor is not None:
            bucket.append(tensor.detach())
            size += tensor.numel() * tensor.element_size()
        if bucket and (tensor is None or size >= _BUCKET_BYTES):
            flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in bucket])
            dist.broadcast(flat, src=0)
            for t, part in zip(bucket, flat.split([t.numel() * t.element_size() for t in bucket]), strict=True):
                t.copy_(part.view(t.dtype).view(t.shape))
            bucket, size = [], 0


def gather(value: Any) -> list[Any]:
    """One value a rank, on every rank; a list of one outside distributed runs."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_zero(trainer: "pl.Trainer", action: Callable[[], None]) -> None:
    """Run `action` on rank 0; a failure is raised on all ranks, so that none waits for the others in vain.

    Raises:
        Exception: on rank 0, what `action` raised.
        OSError, RuntimeError: on the other ranks, with its type and message.
    """
    failure: Exception | None = None
    if trainer.is_global_zero:
        try:
            action()
        except Exception as error:
            failure = error
    message = None if failure is None else f"rank 0 failed with {type(failure).__name__}: {failure}"
    message, is_os_error = trainer.strategy.broadcast((message, isinstance(failure, OSError)))
    if message is not None:
        raise failure or (OSError if is_os_error else RuntimeError)(message)


def learning_rate(trainer: "pl.Trainer") -> float:
    """Present learning rate of parameter group 0 of the first optimizer."""
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else 0.0


@dataclass
class LearningRateWatch:
    """Follows the learning rate of parameter group 0 through the window.

    Attributes:
        current: rate of the latest update.
        first, total, count, highest: since the latest snapshot, the first rate, the sum of differences to it (so that
            the mean of a constant is that constant), number and maximum.
        previous: rate of the window's latest update, None before its first.
        lowered: whether the rate has fallen inside the window.
    """

    current: float = 0.0
    first: float = 0.0
    total: float = 0.0
    count: int = 0
    highest: float = 0.0
    previous: float | None = None
    lowered: bool = False

    def update(self, in_window: bool) -> str | None:
        """Count one optimizer update made at `current`. Returns "rose" or "fell" on a change inside the window."""
        self.first = self.first if self.count else self.current
        self.total += self.current - self.first
        self.count += 1
        self.highest = max(self.highest, self.current)
        if not in_window:
            return None
        previous, self.previous = self.previous, self.current
        if previous is None or abs(self.current - previous) <= _TOLERANCE * max(self.current, previous):
            return None
        return "rose" if self.current > previous else "fell"

    def still_rising(self, upcoming: float) -> bool:
        """Whether the next update will be made at a higher rate than the latest."""
        return upcoming > self.current * (1.0 + _TOLERANCE)

    def interval(self) -> dict[str, float]:
        """Mean and maximum rate since the latest snapshot; starts the next interval."""
        summary = {"lr_mean": self.first + self.total / max(self.count, 1), "lr_max": self.highest}
        self.total, self.count, self.highest = 0.0, 0, 0.0
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class Window:
    """What every rank knows of the snapshots in the merge, oldest first (the tensors are the holder's)."""

    snapshots: list[dict[str, Any]] = field(default_factory=list)

    def positions(self) -> list[int]:
        """Optimizer updates after which the snapshots were taken."""
        return [snapshot["step"] for snapshot in self.snapshots]

    def learning_rates(self, w: list[float]) -> dict[str, Any]:
        """Mean rate of each interval, the window's highest, and the factors w_i lr_i / peak that they amount to."""
        rates = [snapshot["lr_mean"] for snapshot in self.snapshots[1:]]
        peak = max((snapshot["lr_max"] for snapshot in self.snapshots[1:]), default=0.0)
        factors = [w_i * (rate / peak) if peak else w_i for w_i, rate in zip(w, rates, strict=True)]
        return {"learning_rates": rates, "peak_learning_rate": peak, "effective_decay": factors}
