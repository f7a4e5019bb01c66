"""A checkpoint as byte ranges: which tensors it holds and where their bytes lie, whatever wrote it.

No tensor is loaded: a caller reads any range of elements into its own buffer, and a file can hash bytes as they pass.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_files import MANIFEST_NAME, read_digests, sidecar_path

MERGE_MARK = "fulgurite_merge"  # key by which an artifact says that it already is a merge
SIDECAR = "merge.json"

_BLOCK = 4 << 20


class OrderedDigest:
    """SHA-256 of a file whose bytes arrive in ascending order, in pieces; gaps are read from the file.

    Bytes that arrive out of order switch it to one separate pass at the end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sha = hashlib.sha256()
        self._position = 0
        self._ordered = True

    def feed(self, offset: int, view: memoryview) -> None:
        """Take in the bytes at `offset`."""
        if not self._ordered or offset < self._position:
            self._ordered = False
            return
        self._skip_to(offset)
        self._sha.update(view)
        self._position = offset + len(view)

    def hexdigest(self, size: int) -> str:
        """Digest of the file's first `size` bytes."""
        if not self._ordered:
            self._sha, self._position, self._ordered = hashlib.sha256(), 0, True
        self._skip_to(size)
        return self._sha.hexdigest()

    def _skip_to(self, offset: int) -> None:
        while self._position < offset:
            block = os.pread(self._descriptor, min(_BLOCK, offset - self._position), self._position)
            if not block:
                raise ValueError(f"file ends at byte {self._position}, {offset} were expected")
            self._sha.update(block)
            self._position += len(block)


class CheckpointFile:
    """One open file of a checkpoint.

    Attributes:
        path: where it is.
        size: bytes.
        known_digest: SHA-256 from the sidecar or manifest that its writer left, if any.
    """

    def __init__(self, path: Path, known_digest: str | None = None) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        if hasattr(os, "posix_fadvise"):  # a larger read-ahead: many files are read at once, a little of each in turn
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self.known_digest = known_digest
        self._digest: OrderedDigest | None = None

    @property
    def hashes(self) -> bool:
        """Whether bytes read from it are hashed, and so must be read in order."""
        return self._digest is not None

    def start_hashing(self) -> None:
        """Hash what is read from now on, unless the writer already recorded the digest."""
        if self.known_digest is None:
            self._digest = OrderedDigest(self.descriptor)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`."""
        done = 0
        while done < len(view):
            count = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not count:
                raise ValueError(f"{self.path} is truncated: it ends at byte {offset + done}")
            done += count
        if self._digest is not None:
            self._digest.feed(offset, view)

    def hexdigest(self) -> str:
        """SHA-256 of the whole file."""
        if self.known_digest is not None:
            return self.known_digest
        return (self._digest or OrderedDigest(self.descriptor)).hexdigest(self.size)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class Segment:
    """A box of a tensor that lies contiguously in a file."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and place of one stored tensor; `held` is set when it could not be addressed by byte range."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    held: Tensor | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Elements that must be read together: 1, or a row where the tensor lies in several boxes."""
        return 1 if len(self.segments) < 2 else math.prod(self.shape[1:])


@dataclass
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: as given.
        kind: "lightning", "torch", "safetensors" or "distributed".
        tensors: canonical name -> entry, in file order.
        aliases: tied name -> canonical name.
        extra: entries of the state dict that are not tensors.
        step, tokens: progress recorded by the writer, or None.
        is_merge: the artifact is itself a merge.
        header: plain values to carry over into a Lightning artifact (hyper-parameters, versions).
        directory: the Hugging Face directory it lies in, whose config and tokenizer files belong to it.
        config: the Hugging Face config that a Lightning checkpoint carries.
    """

    path: Path
    kind: str
    files: list[CheckpointFile] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    tokens: int | None = None
    is_merge: bool = False
    header: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    config: Mapping[str, Any] | None = None

    def read(self, name: str, start: int, stop: int, buffer: memoryview) -> None:
        """Read elements [start, stop) of the flattened tensor into `buffer`; multiples of `TensorEntry.row`."""
        entry = self.tensors[name]
        if entry.held is not None:
            buffer[:] = tensor_bytes(entry.held.reshape(-1)[start:stop])
        elif len(entry.segments) == 1:
            segment, size = entry.segments[0], entry.dtype.itemsize
            self.files[segment.file].read_into(segment.offset + start * size, buffer)
        else:
            self._read_boxes(entry, start, stop, buffer)

    def load(self, name: str) -> Tensor:
        """The whole tensor."""
        entry = self.tensors[name]
        flat = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.nbytes:
            self.read(name, 0, entry.numel, memoryview(flat.numpy()))
        return flat.view(entry.dtype).view(entry.shape) if entry.nbytes else flat.view(entry.dtype).reshape(entry.shape)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each file, by its path relative to the checkpoint."""
        base = self.path if self.path.is_dir() else self.path.parent
        return {os.path.relpath(file.path, base): file.hexdigest() for file in self.files}

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _read_boxes(self, entry: TensorEntry, start: int, stop: int, buffer: memoryview) -> None:
        size, row = entry.dtype.itemsize, entry.row
        first, last = start // row, stop // row
        target = torch.frombuffer(buffer, dtype=torch.uint8).view(last - first, *entry.shape[1:-1], -1)
        for box in entry.segments:
            low, high = max(first, box.start[0]), min(last, box.start[0] + box.shape[0])
            if low >= high:
                continue
            box_row = math.prod(box.shape[1:]) * size
            inner = [slice(s, s + n) for s, n in zip(box.start[1:], box.shape[1:], strict=True)]
            if inner:
                inner[-1] = slice(box.start[-1] * size, (box.start[-1] + box.shape[-1]) * size)
            else:  # one-dimensional: the byte axis is the row itself
                offset = box.offset + (low - box.start[0]) * size
                self.files[box.file].read_into(offset, buffer[(low - first) * size : (high - first) * size])
                continue
            piece = torch.empty((high - low) * box_row, dtype=torch.uint8)
            self.files[box.file].read_into(box.offset + (low - box.start[0]) * box_row, memoryview(piece.numpy()))
            shape = (high - low, *box.shape[1:-1], box.shape[-1] * size)
            target[(slice(low - first, high - first), *inner)] = piece.view(shape)


def iter_chunks(entry: TensorEntry, row: int, num_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of the flattened tensor, each about `num_elements` and whole rows."""
    rows = max(1, num_elements // row) * row
    for start in range(0, entry.numel, rows):
        yield start, min(start + rows, entry.numel)


def common_row(entries: Sequence[TensorEntry]) -> int:
    """Elements that all of the checkpoints can read together."""
    return max(entry.row for entry in entries)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def recorded_digest(path: Path) -> str | None:
    """Digest that the writer left: `<file>.sha256` beside it, or the folder's manifest; None when unsure."""
    path = path.resolve()
    for record in (sidecar_path(path), path.parent / MANIFEST_NAME):
        if not record.is_file():
            continue
        notes, digests = read_digests(record)
        found = digests.get(path.name, set())
        # Two digests: an overwrite was under way. A size that differs: the file changed since.
        same_size = record.name == MANIFEST_NAME or int(notes.get("size") or -1) in (-1, path.stat().st_size)
        if len(found) == 1 and same_size and record.stat().st_mtime_ns >= path.stat().st_mtime_ns:
            return next(iter(found))
    return None
