"""Reading and writing checkpoints tensor by tensor."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def safetensors_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Header bytes of a safetensors file, the file offset of each tensor, and the file's size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets, position = {}, 0
    # Wide dtypes first, as the reference writer does: every tensor is then aligned to its own element size.
    for name in sorted(entries, key=lambda n: (-entries[n][0].itemsize, list(entries).index(n))):
        dtype, shape = entries[name]
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name}: safetensors cannot hold {dtype}")
        size = dtype.itemsize
        for length in shape:
            size *= length
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        offsets[name] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + offset for name, offset in offsets.items()}, len(prefix) + position


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors to one safetensors file; the file appears under its name complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix, offsets, _ = safetensors_header({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
