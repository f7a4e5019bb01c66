"""Counts of one global batch, so that its loss is a mean over its tokens, and the clock of tokens a second."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from .token_loss import IGNORE_INDEX


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum over all ranks, in place; without a process group the tensor itself."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def utf8_bytes(targets: Tensor, token_byte_lengths: Tensor | None) -> Tensor:
    """UTF-8 bytes of the target tokens, a float64 scalar; 0 when the tokens' lengths are not known."""
    if token_byte_lengths is None:
        return torch.zeros((), dtype=torch.float64, device=targets.device)
    lengths = token_byte_lengths[targets.clamp(min=0)]
    return torch.where(targets != IGNORE_INDEX, lengths, 0).sum().double()


class GlobalBatch:
    """Sums over the micro-batches of one accumulation window, on this rank until `reduce` is called.

    Attributes:
        sums: (5,) float64 on the device: loss in nats, target tokens, input tokens, UTF-8 bytes, squared log-partition.
        rows: sequences, a Python number.
        tokens: places in `input_ids`, padding included, a Python number.
    """

    LOSS, TARGETS, TOKENS, BYTES, Z = range(5)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts a new window."""
        self.sums: Tensor | None = None
        self.rows = 0
        self.tokens = 0
        self._reduced = False

    def add(self, input_ids: Tensor, attention_mask: Tensor | None, values: list[Tensor]) -> None:
        """Adds a micro-batch; `values`: scalars loss, targets, bytes, squared log-partition. Never waits."""
        loss, targets, num_bytes, z = (value.detach().double() for value in values)
        tokens = torch.full_like(loss, input_ids.numel()) if attention_mask is None else attention_mask.sum().double()
        sums = torch.stack((loss, targets, tokens, num_bytes, z))
        self.sums = sums if self.sums is None else self.sums.add_(sums)
        self.rows += input_ids.shape[0]
        self.tokens += input_ids.numel()

    def reduce(self) -> Tensor:
        """The sums over all ranks (communicates once a window)."""
        if self.sums is None:
            raise RuntimeError("no micro-batch was added to this window")
        if not self._reduced:
            all_reduce_sum(self.sums)
            self._reduced = True
        return self.sums


class Stopwatch:
    """Wall time between calls of `lap`, without what lies between `pause` and `resume` (validation)."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts a lap now."""
        self._begin = time.perf_counter()
        self._paused_at: float | None = None

    def pause(self) -> None:
        """Stops the clock."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Lets the clock run on."""
        if self._paused_at is not None:
            self._begin += time.perf_counter() - self._paused_at
            self._paused_at = None

    def lap(self) -> float:
        """Seconds since the last lap; starts the next."""
        now = time.perf_counter()
        seconds, self._begin = now - self._begin, now
        return seconds
