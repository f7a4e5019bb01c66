"""The sum itself: difference form, wide accumulation, one rounding at the end.

    sum_j c_j theta_j  =  theta_0 + sum_j c_j (theta_j - theta_0)        (sum_j c_j = 1)

(which is theta_0 + sum_i w_i (theta_i - theta_{i-1}), the same differences counted from the base). The differences are
small and nearly exact, so their sum is too, and the base is added once: identical checkpoints come back bit for bit,
which a plain sum of c_j theta_j does not do (5 ulps off at n = 20).
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

EXTRA_STATE = "_extra_state"  # torch's name for a module's opaque state (quantiser scales): copied, never averaged


def is_averaged(name: str, dtype: torch.dtype) -> bool:
    """Whether a state-dict entry is averaged: floats and complex numbers are; counters, masks, extra state are not."""
    return (dtype.is_floating_point or dtype.is_complex) and name.rpartition(".")[2] != EXTRA_STATE


def accumulation_dtype(dtype: torch.dtype, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """Dtype to sum tensors of `dtype` in: the wider of the two.

    Raises:
        ValueError: `at_least` is narrower than float32.
    """
    if at_least not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate in float32 or float64, got {at_least}: half precision loses the differences")
    return torch.promote_types(dtype, at_least)


class DifferenceSum:
    """Running `theta_0 + sum_j c_j (theta_j - theta_0)` of one tensor, fed oldest first.

    Args:
        base: theta_0; it is read, never written.
        dtype: accumulation dtype.
    """

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        self.base = base.to(dtype)
        self.delta: Tensor | None = None

    def add(self, tensor: Tensor, c: float) -> None:
        """Add one checkpoint with its merge weight."""
        if c == 0.0:
            return
        difference = tensor.to(self.base.dtype) - self.base
        if self.delta is None:
            self.delta = difference.mul_(c)
        else:
            self.delta.add_(difference, alpha=c)

    def fork(self) -> "DifferenceSum":
        """A sum of its own that starts from this one's terms."""
        twin = copy.copy(self)
        twin.delta = None if self.delta is None else self.delta.clone()
        return twin

    def result(self) -> Tensor:
        """The sum, in the accumulation dtype; it shares no memory with a checkpoint unless nothing was added."""
        if self.delta is None:
            return self.base
        # Where nothing changed the base is returned itself: -0.0 + 0.0 would be +0.0.
        return torch.where(self.delta == 0, self.base, self.delta.add(self.base))


def weighted_sum(tensors: Iterable[Tensor], c: Sequence[float], dtype: torch.dtype) -> Tensor:
    """`sum_j c_j theta_j` of the tensors of one name, oldest first, in `dtype`; c sums to 1."""
    iterator = iter(tensors)
    total = DifferenceSum(next(iterator), dtype)
    for tensor, weight in zip(iterator, c[1:], strict=True):
        total.add(tensor, weight)
    return total.result()
