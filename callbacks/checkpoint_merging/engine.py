"""The streaming pass of an off-line merge: a small window of elements moves through all checkpoints at once.

Each chunk is read from every checkpoint into a reused buffer (hashed there while it is hot), summed tile by tile in the
processor's cache, cast once, and written. While one chunk is summed the next one is read. Memory does not depend on the
size of tensors or models: about 2 x 24 MB of buffers and a little scratch.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from .io import Checkpoint, common_row, iter_chunks
from .numerics import accumulation_dtype

_BUFFER_BYTES = 24 << 20  # for all checkpoints together
_CHUNK_LIMITS = (64 << 10, 4 << 20)
_TILE = 1 << 16  # elements summed at a time: inputs, base, difference and sum of a tile stay in the L2 cache
_MAX_READERS = 8


@dataclass(frozen=True)
class Job:
    """One output tensor: averaged over the checkpoints, or copied from the newest."""

    name: str
    averaged: bool
    dtype: torch.dtype
    target: torch.dtype


@dataclass(frozen=True)
class _Chunk:
    job: Job
    start: int
    stop: int


def run(
    jobs: Sequence[Job],
    checkpoints: Sequence[Checkpoint],
    c: Sequence[float],
    at_least: torch.dtype,
    write: Callable[[str, int, memoryview], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Merge every job's tensor over the checkpoints (oldest first, weights c) and hand the bytes to `write`.

    Raises:
        ValueError: a number that is not finite; names tensor and file.
    """
    limits = _CHUNK_LIMITS
    chunk_bytes = max(limits[0], min(limits[1], _BUFFER_BYTES // len(checkpoints)))
    chunks = list(_plan(jobs, checkpoints, chunk_bytes))
    if not chunks:
        return
    total = sum((k.stop - k.start) * k.job.dtype.itemsize * _num_read(k.job, checkpoints) for k in chunks)
    largest = max((k.stop - k.start) * k.job.dtype.itemsize for k in chunks)
    output_bytes = max((k.stop - k.start) * k.job.target.itemsize for k in chunks)
    buffers = [[torch.empty(largest, dtype=torch.uint8) for _ in checkpoints] for _ in range(2)]
    output = torch.empty(output_bytes, dtype=torch.uint8)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads, num_readers = min(num_cores, _MAX_READERS), min(len(checkpoints), _MAX_READERS)
    done = 0
    pending: list[Future[None]] = []
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiles are spread over our own threads
    with ThreadPoolExecutor(num_readers) as readers, ThreadPoolExecutor(num_threads) as workers:
        try:
            pending = _start_reading(readers, chunks[0], checkpoints, buffers[0])
            for index, chunk in enumerate(chunks):
                for future in pending:
                    future.result()
                if index + 1 < len(chunks):
                    pending = _start_reading(readers, chunks[index + 1], checkpoints, buffers[(index + 1) % 2])
                _merge_chunk(workers, num_threads, chunk, checkpoints, buffers[index % 2], c, at_least, output)
                size = (chunk.stop - chunk.start) * chunk.job.target.itemsize
                write(chunk.job.name, chunk.start, memoryview(output.numpy())[:size])
                done += (chunk.stop - chunk.start) * chunk.job.dtype.itemsize * _num_read(chunk.job, checkpoints)
                if on_progress is not None:
                    on_progress(done, total)
        finally:
            for future in pending:  # let go of the buffers and files before an error goes up
                future.cancel()
            torch.set_num_threads(threads_before)


def _plan(jobs: Sequence[Job], checkpoints: Sequence[Checkpoint], chunk_bytes: int) -> Iterator[_Chunk]:
    for job in jobs:
        entries = [checkpoint.tensors[job.name] for checkpoint in checkpoints]
        for start, stop in iter_chunks(entries[0], common_row(entries), chunk_bytes):
            yield _Chunk(job, start, stop)


def _num_read(job: Job, checkpoints: Sequence[Checkpoint]) -> int:
    return len(checkpoints) if job.averaged else 1


def _start_reading(
    readers: ThreadPoolExecutor, chunk: _Chunk, checkpoints: Sequence[Checkpoint], buffers: Sequence[Tensor]
) -> list[Future[None]]:
    """Fill `buffers`; files are dealt out to threads, so that each is read in order by one thread at a time."""
    size = (chunk.stop - chunk.start) * chunk.job.dtype.itemsize
    wanted = range(len(checkpoints)) if chunk.job.averaged else [len(checkpoints) - 1]

    def read(indices: Sequence[int]) -> None:
        for i in indices:
            view = memoryview(buffers[i].numpy())[:size]
            checkpoints[i].read(chunk.job.name, chunk.start, chunk.stop, view)

    shares = [wanted[share::_MAX_READERS] for share in range(min(_MAX_READERS, len(wanted)))]
    return [readers.submit(read, share) for share in shares]


def _merge_chunk(
    workers: ThreadPoolExecutor,
    num_threads: int,
    chunk: _Chunk,
    checkpoints: Sequence[Checkpoint],
    buffers: Sequence[Tensor],
    c: Sequence[float],
    at_least: torch.dtype,
    output: Tensor,
) -> None:
    job, count = chunk.job, chunk.stop - chunk.start
    inputs = [buffer[: count * job.dtype.itemsize].view(job.dtype) for buffer in buffers]
    out = output[: count * job.target.itemsize].view(job.target)
    if not job.averaged:
        out.copy_(inputs[-1])
        return
    num_tiles = -(-count // _TILE)
    share = -(-num_tiles // num_threads) * _TILE
    futures = [
        workers.submit(
            _sum_tiles, inputs, c, accumulation_dtype(job.dtype, at_least), out, low, min(low + share, count)
        )
        for low in range(0, count, share)
    ]
    finite = [future.result() for future in futures]  # all of them: none may still write
    if all(finite):
        return
    for checkpoint, values in zip(checkpoints, inputs, strict=True):
        if not torch.isfinite(values).all():
            raise ValueError(f"{checkpoint.path}: {job.name} holds a number that is not finite (NaN or infinity)")
    raise ValueError(f"{job.name}: the merge exceeds the range of {job.target}; choose a wider output_dtype")


@torch.no_grad()
def _sum_tiles(
    inputs: Sequence[Tensor], c: Sequence[float], wide: torch.dtype, out: Tensor, low: int, high: int
) -> bool:
    """`DifferenceSum` of elements [low, high) without allocation; whether all results are finite."""
    scratch, delta, difference = (torch.empty(min(_TILE, high - low), dtype=wide) for _ in range(3))
    finite = True
    for start in range(low, high, _TILE):
        stop = min(start + _TILE, high)
        length = stop - start
        first = inputs[0][start:stop]
        base = first if first.dtype == wide else scratch[:length].copy_(first)
        total, step = delta[:length].zero_(), difference[:length]
        for values, weight in zip(inputs[1:], c[1:], strict=True):
            if values.dtype == wide:
                torch.sub(values[start:stop], base, out=step)
            else:
                step.copy_(values[start:stop]).sub_(base)
            total.add_(step, alpha=weight)
        merged = torch.where(total == 0, base, torch.add(base, total, out=step))
        finite = finite and bool(torch.isfinite(out[start:stop].copy_(merged)).all())
    return finite
