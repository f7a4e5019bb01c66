"""The streaming pass of an off-line merge: a small window of elements moves through all checkpoints at once.

Each worker takes the next chunk of elements, reads it from one checkpoint after the other into a buffer that fits the
processor's cache, adds it to the sum there, casts once and writes. Memory does not depend on the size of tensors or
models. Files that are hashed on the way need their bytes in order: chunk i + 1 of a file waits for chunk i of the same
file, so workers follow each other through the files like a wave.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .byte_ranges import Checkpoint, common_row, iter_chunks, tensor_bytes
from .numerics import accumulation_dtype

_TILE = 1 << 16  # elements summed at a time: input, base, difference and sum of a tile stay in a 2 MB L2 cache
_MAX_WORKERS = 16
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Job:
    """One output tensor: averaged over the checkpoints, or copied from the newest."""

    name: str
    averaged: bool
    dtype: torch.dtype
    target: torch.dtype


class _Turnstile:
    """Lanes that admit chunk after chunk in order."""

    def __init__(self, num_lanes: int) -> None:
        self._next = [0] * num_lanes
        self._changed = threading.Condition()
        self._broken = False

    @contextmanager
    def turn(self, lane: int, number: int) -> Iterator[None]:
        """Body of chunk `number` in this lane, after all lower numbers."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._next[lane] == number)
            if self._broken:
                raise _Stopped
        yield
        with self._changed:
            self._next[lane] = number + 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Stopped(Exception):
    """Another worker failed first."""


def run(
    jobs: Sequence[Job],
    checkpoints: Sequence[Checkpoint],
    c: Sequence[float],
    at_least: torch.dtype,
    write: Callable[[str, int, memoryview], None],
    *,
    ordered_output: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Merge every job's tensor over the checkpoints (oldest first, weights c) and hand the bytes to `write`.

    Args:
        jobs: output tensors, in the order of the first checkpoint's file.
        checkpoints: open, with the same tensors.
        c: merge weights.
        at_least: accumulation dtype, widened for wider tensors.
        write: called with name, index of the first element, bytes; by several threads unless `ordered_output`.
        ordered_output: call `write` in ascending order, one at a time.
        on_progress: called with (bytes merged, bytes to merge).

    Raises:
        ValueError: a number that is not finite; names tensor and file.
    """
    _Pass(jobs, checkpoints, c, at_least, write, ordered_output, on_progress).run()


class _Pass:
    def __init__(
        self,
        jobs: Sequence[Job],
        checkpoints: Sequence[Checkpoint],
        c: Sequence[float],
        at_least: torch.dtype,
        write: Callable[[str, int, memoryview], None],
        ordered_output: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.checkpoints, self.c, self.at_least = checkpoints, c, at_least
        self.write, self.ordered_output, self.on_progress = write, ordered_output, on_progress
        self.chunks = enumerate(_chunks(jobs, checkpoints))
        self.taking = threading.Lock()
        # One lane a checkpoint whose bytes are hashed in order, and one for the output.
        self.ordered = [any(file.hashes for file in checkpoint.files) for checkpoint in checkpoints]
        self.turnstile = _Turnstile(len(checkpoints) + 1)
        self.done = 0
        self.total = sum(
            checkpoint.tensors[job.name].nbytes
            for job in jobs
            for checkpoint in (checkpoints if job.averaged else checkpoints[-1:])
        )

    def run(self) -> None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_workers = min(num_cores, _MAX_WORKERS)
        threads_before = torch.get_num_threads()
        torch.set_num_threads(1)  # the workers are the threads
        try:
            with ThreadPoolExecutor(num_workers, thread_name_prefix="merge") as pool:
                futures = [pool.submit(self._work) for _ in range(num_workers)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        finally:
            torch.set_num_threads(threads_before)
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error

    @torch.no_grad()
    def _work(self) -> None:
        torch.set_num_threads(1)
        buffers = _Buffers()
        try:
            while True:
                with self.taking:
                    item = next(self.chunks, None)
                if item is None:
                    return
                self._merge(item[0], *item[1], buffers)
        except BaseException:
            self.turnstile.stop()
            raise

    def _merge(self, number: int, job: Job, start: int, stop: int, buffers: "_Buffers") -> None:
        count, last = stop - start, len(self.checkpoints) - 1
        source = buffers.get("input", count, job.dtype)
        out = buffers.get("output", count, job.target)
        view = tensor_bytes(source)
        if job.averaged:
            total = _Sum(count, accumulation_dtype(job.dtype, self.at_least), buffers)
            if job.dtype == total.base.dtype:
                self._read(number, 0, job, start, stop, tensor_bytes(total.base))
            else:
                self._read(number, 0, job, start, stop, view)
                total.base.copy_(source)
            for index, weight in enumerate(self.c[1:], start=1):
                self._read(number, index, job, start, stop, view)
                total.add(source, weight)
            total.finish(out)
            self._check_finite(job, start, stop, out)
        else:
            for index in range(last):
                self._pass_by(number, index)
            self._read(number, last, job, start, stop, view)
            out.copy_(source)
        if self.ordered_output:
            with self.turnstile.turn(last + 1, number):
                self.write(job.name, start, tensor_bytes(out))
        else:
            self.write(job.name, start, tensor_bytes(out))
        with self.taking:
            self.done += count * job.dtype.itemsize * (last + 1 if job.averaged else 1)
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)

    def _read(self, number: int, index: int, job: Job, start: int, stop: int, view: memoryview) -> None:
        if not self.ordered[index]:
            self.checkpoints[index].read(job.name, start, stop, view)
            return
        with self.turnstile.turn(index, number):
            self.checkpoints[index].read(job.name, start, stop, view)

    def _pass_by(self, number: int, index: int) -> None:
        if self.ordered[index]:
            with self.turnstile.turn(index, number):
                pass

    def _check_finite(self, job: Job, start: int, stop: int, out: Tensor) -> None:
        # A sum is finite when its terms are (and do not overflow); only a suspicious one is looked at closely.
        if torch.isfinite(out.sum(dtype=accumulation_dtype(out.dtype))) or torch.isfinite(out).all():
            return
        for checkpoint in self.checkpoints:
            flat = torch.empty(stop - start, dtype=job.dtype)
            checkpoint.read(job.name, start, stop, tensor_bytes(flat))
            if not torch.isfinite(flat).all():
                raise ValueError(f"{checkpoint.path}: {job.name} holds a number that is not finite (NaN or infinity)")
        raise ValueError(f"{job.name}: the merge exceeds the range of {job.target}; choose a wider output_dtype")


def _chunks(jobs: Sequence[Job], checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Job, int, int]]:
    for job in jobs:
        entries = [checkpoint.tensors[job.name] for checkpoint in checkpoints]
        for start, stop in iter_chunks(entries[0], common_row(entries), _TILE):
            yield job, start, stop


class _Buffers:
    """A worker's scratch memory, reused from chunk to chunk."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return memory[:size].view(dtype)


class _Sum:
    """`numerics.DifferenceSum` of one chunk in reused memory; the same operations in the same order."""

    def __init__(self, count: int, dtype: torch.dtype, buffers: _Buffers) -> None:
        self.base = buffers.get("base", count, dtype)
        self.delta = buffers.get("delta", count, dtype).zero_()
        self.step = buffers.get("step", count, dtype)

    def add(self, values: Tensor, weight: float) -> None:
        if values.dtype == self.step.dtype:
            torch.sub(values, self.base, out=self.step)
        else:
            self.step.copy_(values).sub_(self.base)
        self.delta.add_(self.step, alpha=weight)

    def finish(self, out: Tensor) -> None:
        total = torch.add(self.base, self.delta, out=out if out.dtype == self.step.dtype else self.step)
        # -0.0 + 0.0 would lose its sign; as an integer of its width, -0.0 is the smallest of all.
        bits = _SIGNED.get(self.base.dtype.itemsize)
        if bits is None or self.base.view(bits).amin() == torch.iinfo(bits).min:
            total = torch.where(self.delta == 0, self.base, total)
        if total is not out:
            out.copy_(total)
