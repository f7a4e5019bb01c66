"""One global order of training samples, and its exact partition over ranks, workers and accumulation.

The order is an endless stream: position `p` lies in pass `p // n` over the `n` samples and maps to sample
`permute(p % n)`, a keyed permutation of [0, n). Nothing is materialised: memory does not grow with the corpus, and
starting anywhere costs nothing. A micro-batch of rank r is `stream[p + r*B : p + (r+1)*B]`, so that the samples of
one optimizer step are one contiguous range of the stream, however they are laid out over ranks and micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

_ROUNDS = 8
_CHUNK = 1024  # samples of one rank permuted at a time: large enough for numpy, small enough to start at once


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 finaliser: a bijective hash of uint64 in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    base = _mix(_mix(words[:1]) + words[1:])
    return _mix(base + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `indices` under the permutation of [0, n) that (seed, epoch) selects.

    An alternating Feistel network on the smallest power of two >= n, with cycle walking: an image outside [0, n) is
    encrypted again until it falls inside, which keeps the map a bijection (Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002, method 2). Less than two rounds of walking on average.

    Args:
        indices: integers in [0, n), any shape.
        n: size of the domain, at least 1.
        seed: any integer; taken modulo 2**64.
        epoch: pass over the data.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << bits // 2) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    keys = _round_keys(seed, epoch)

    def encrypt(x: np.ndarray) -> np.ndarray:
        high, low = x >> low_bits, x & low_mask
        for i, key in enumerate(keys):
            if i % 2:
                low = low ^ (_mix(high + key) & low_mask)
            else:
                high = high ^ (_mix(low + key) & high_mask)
        return (high << low_bits) | low

    out = encrypt(np.asarray(indices).astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = encrypt(out[outside])
    return out.astype(np.int64)


@dataclass(frozen=True)
class SampleStream:
    """Endless order over `num_samples` samples: a pure function of (seed, position).

    With `shuffle=False` every pass is 0, 1, ..., n-1.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Sample indices at stream `positions` (int64, any shape)."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        if not self.shuffle:
            return offsets
        out = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permute(offsets[here], self.num_samples, self.seed, int(epoch))
        return out


@dataclass(frozen=True)
class Segment:
    """A run of `num_batches` micro-batches read from `stream` at `position`; `offset` is added to sample indices."""

    stream: SampleStream
    position: int
    num_batches: int
    offset: int = 0


class StreamSampler(DistributedSampler):
    """Yields one rank's share of the segments that `plan()` names when iteration really starts.

    A `DistributedSampler` only so that Lightning leaves it in place; the order never comes from `set_epoch`, because
    Lightning calls `iter()` on the first epoch's loader before `set_epoch` and before its own counters are final.

    Args:
        dataset: what the indices refer to.
        plan: called as the first index is asked for with the sampler's epoch; returns the segments still to be read
            in this epoch.
        num_batches: micro-batches of one full epoch on this rank (the sampler's length is `num_batches * batch_size`).
        batch_size: samples of one micro-batch on one rank.
        num_replicas: data-parallel ranks.
        rank: index of this one.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Callable[[int], list[Segment]],
        *,
        num_batches: int,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.plan = plan
        self.batch_size = batch_size
        self.num_samples = num_batches * batch_size
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        global_batch = self.batch_size * self.num_replicas
        within = self.rank * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
        batches_a_chunk = max(1, _CHUNK // self.batch_size)
        for segment in self.plan(self.epoch):
            for first in range(0, segment.num_batches, batches_a_chunk):
                batches = np.arange(first, min(first + batches_a_chunk, segment.num_batches), dtype=np.int64)
                positions = segment.position + batches[:, None] * global_batch + within
                yield from (segment.stream(positions) + segment.offset).ravel().tolist()


class ShardedEvalSampler(DistributedSampler):
    """In order, each sample once over all ranks; -1 fills the last global batch (the data set turns it into labels of
    -100 only), so that every rank runs the same number of batches and a token-weighted mean is right at any rank count.
    """

    def __init__(self, dataset: Dataset, *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.batch_size = batch_size
        self.num_batches = -(-len(dataset) // (batch_size * num_replicas))  # type: ignore[arg-type]
        self.num_samples = self.num_batches * batch_size
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        total = len(self.dataset)  # type: ignore[arg-type]
        for batch in range(self.num_batches):
            start = (batch * self.num_replicas + self.rank) * self.batch_size
            for index in range(start, start + self.batch_size):
                yield index if index < total else -1


class ResumableDataLoader(DataLoader):
    """A `DataLoader` that asks its sampler for indices only when the first batch is wanted.

    `iter()` alone starts no worker and reads no index: Lightning calls it while it restores a checkpoint, before the
    position in the stream is settled. `state_dict` marks the loader as resumable for Lightning; the position itself
    is kept by the data module. Pass a `generator`, so that iterating draws nothing from the global random state.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a worker inherits the variable: tokenizers then neither warns about the fork nor risks its locks there
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        if self.num_workers:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            iterator = super().__iter__()
        finally:
            if self.num_workers:
                if before is None:
                    del os.environ["TOKENIZERS_PARALLELISM"]
                else:
                    os.environ["TOKENIZERS_PARALLELISM"] = before
        yield from iterator

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load: see the class."""


def identity_collate(batch: Any) -> Any:
    """The data sets here build whole batches in `__getitems__`."""
    return batch
