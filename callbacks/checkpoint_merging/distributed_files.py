"""Directories of `torch.distributed.checkpoint` (FSDP2, tensor parallelism) as byte ranges."""

import io
import math
import os
from pathlib import Path
from typing import Any

import torch

from .byte_ranges import Checkpoint, CheckpointFile, Segment, TensorEntry, recorded_digest
from .torch_files import STATE_KEYS, describe_content, load_plan


class _Slice(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + position
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        data = os.pread(self._descriptor, count, self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_distributed(path: Path) -> Checkpoint:
    """Open a directory of `.distcp` files, with the `meta.pt` that Lightning puts beside them.

    Raises:
        ValueError: truncated or incomplete, compressed, or an index that holds more than torch's own records.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # not for every merge

    from ..distributed_metadata import read_metadata

    checkpoint = Checkpoint(path, "distributed")
    metadata = read_metadata(path / ".metadata")
    header = path / "meta.pt"  # what Lightning's ModelParallelStrategy writes beside the shards
    if header.is_file():
        describe_content(checkpoint, load_plan(header, header), header)
        checkpoint.kind = "distributed"
    names = list(metadata.state_dict_metadata)
    prefix = next((f"{key}." for key in STATE_KEYS if any(n.startswith(f"{key}.") for n in names)), "")
    files: dict[str, int] = {}
    boxes: dict[str, list[tuple[Any, Any]]] = {}
    for key, info in metadata.storage_data.items():
        shard = path / info.relative_path
        size = shard.stat().st_size if shard.is_file() else 0
        if info.offset + info.length > size:
            raise ValueError(f"{shard} is truncated: {key.fqn} ends at byte {info.offset + info.length} of {size}")
        if key.fqn.startswith(prefix) and key.offset is not None:
            boxes.setdefault(key.fqn, []).append((key, info))
    for fqn, parts in boxes.items():
        record = metadata.state_dict_metadata.get(fqn)
        if not isinstance(record, TensorStorageMetadata):
            raise ValueError(f"{path}: the index says where {fqn} is, but not what tensor it is")
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in record.chunks}
        segments = []
        for key, info in parts:
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{path}: {fqn} is stored compressed, which is not read here")
            if info.relative_path not in files:
                files[info.relative_path] = len(checkpoint.files)
                shard = path / info.relative_path
                checkpoint.files.append(CheckpointFile(shard, recorded_digest(shard)))
            index = files[info.relative_path]
            start = tuple(key.offset)
            segments.append(
                _distributed_box(checkpoint, index, info, start, sizes[start], record.properties.dtype, fqn)
            )
        entry = TensorEntry(record.properties.dtype, tuple(record.size), tuple(sorted(segments, key=lambda s: s.start)))
        if sum(math.prod(s.shape) for s in segments) != entry.numel:
            raise ValueError(f"{path}: the shards of {fqn} do not cover its shape {entry.shape}")
        checkpoint.tensors[fqn.removeprefix(prefix)] = entry
    order = {name: (e.segments[0].file, e.segments[0].offset) for name, e in checkpoint.tensors.items()}
    checkpoint.tensors = {name: checkpoint.tensors[name] for name in sorted(order, key=order.__getitem__)}
    return checkpoint


def _distributed_box(
    checkpoint: Checkpoint,
    index: int,
    info: Any,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
) -> Segment:
    """Place of one shard: each is a small `torch.save` file inside the rank's file."""
    file = checkpoint.files[index]
    tensor = load_plan(_Slice(file.descriptor, info.offset, info.length), file.path)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{file.path}: the shard of {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
        )
    inside: int = tensor.untyped_storage()._checkpoint_offset  # type: ignore[attr-defined]
    return Segment(index, info.offset + inside + tensor.storage_offset() * dtype.itemsize, start, shape)
