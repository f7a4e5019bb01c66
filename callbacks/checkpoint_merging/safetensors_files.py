"""The safetensors format: reading its header as byte ranges, laying out a file, writing one."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_files import fsync_directory, temporary_path
from .byte_ranges import MERGE_MARK, Checkpoint, CheckpointFile, Segment, TensorEntry, recorded_digest, tensor_bytes

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_MAX_HEADER = 100 << 20


def safetensors_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Header bytes of a safetensors file, the file offset of each tensor, and the file's size.

    Raises:
        ValueError: a dtype that the format cannot hold.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets, position = {}, 0
    # Wide dtypes first, as the reference writer does: every tensor is then aligned to its own element size.
    for name, (dtype, shape) in sorted(entries.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name}: safetensors cannot hold {dtype}; write a .pt or .ckpt file")
        end = position + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        offsets[name] = position
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + offset for name, offset in offsets.items()}, len(prefix) + position


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors to one safetensors file; the file appears under its name complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix, offsets, _ = safetensors_header({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb", buffering=0) as file:
            file.write(prefix)
            for name in sorted(offsets, key=offsets.__getitem__):
                view = tensor_bytes(tensors[name].contiguous())
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def add_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    """Add the tensors of one file.

    Raises:
        ValueError: truncated, or of another format.
    """
    index, file = len(checkpoint.files), CheckpointFile(path, recorded_digest(path))
    checkpoint.files.append(file)
    length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
    if file.size < 8 or length > min(_MAX_HEADER, file.size - 8):
        raise ValueError(f"{path} is truncated or not a safetensors file: {file.size} bytes, header of {length}")
    header: dict[str, Any] = json.loads(os.pread(file.descriptor, length, 8))
    metadata = header.pop("__metadata__", None) or {}
    checkpoint.is_merge = checkpoint.is_merge or MERGE_MARK in metadata
    # Tied weights as safetensors.torch.save_model records them: alias -> stored name.
    checkpoint.aliases |= {alias: name for alias, name in metadata.items() if name in header and alias not in header}
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        if info["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {info['dtype']}, which torch cannot hold")
        dtype, shape = _DTYPES[info["dtype"]], tuple(info["shape"])
        begin, end = info["data_offsets"]
        if end - begin != dtype.itemsize * math.prod(shape) or 8 + length + end > file.size:
            raise ValueError(f"{path} is truncated: {name} ends at byte {8 + length + end} of {file.size}")
        box = Segment(index, 8 + length + begin, (0,) * len(shape), shape)
        checkpoint.tensors[name] = TensorEntry(dtype, shape, (box,))
