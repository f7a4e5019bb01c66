"""What a `torch.distributed.checkpoint` folder holds beside tensors, read without running what it says.

torch reads the index (`.metadata`) by plain `pickle.load`, and entries that are no tensors by
`torch.load(weights_only=False)`: both call whatever the file names. Here a pickle of anything but torch's own record
classes and plain data is refused.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata


class _MetadataUnpickler(pickle.Unpickler):
    """Of what a pickle may name, only torch's record classes are allowed."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
    _NAMES = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")})

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._NAMES or (module in self._MODULES and "." not in name):
            found = super().find_class(module, name)
            if module not in self._MODULES or isinstance(found, type):
                return found
        raise ValueError(f"it holds {module}.{name}, which does not belong there")


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The content of an index file.

    Raises:
        ValueError: names the file: damaged, or it holds more than torch's own records.
    """
    with open(path, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ValueError(f"The index {path} of a distributed checkpoint is refused: {error}.") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"The index {path} of a distributed checkpoint is refused: it is a {type(metadata).__name__}.")
    return metadata


def check_metadata(folder: Path) -> None:
    """Reads every index in `folder`, those of single ranks too, and every entry that is no tensor.

    To be called before torch or Lightning reads them.

    Raises:
        ValueError: names the file that is damaged, or holds more than torch's own records and plain data.
    """
    for path in sorted(folder.glob("*.metadata")):
        metadata = read_metadata(path)
        for key, info in (metadata.storage_data or {}).items():
            if not isinstance(metadata.state_dict_metadata.get(key.fqn), TensorStorageMetadata):
                _check_entry(folder / info.relative_path, key.fqn, info)


def _check_entry(path: Path, name: str, info: Any) -> None:
    with open(path, "rb") as file:
        file.seek(info.offset)
        content = file.read(info.length)
    try:
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is compressed")
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path}: the entry {name} is refused, as it is no plain data: {error}") from error


class SafeReader(FileSystemReader):
    """`FileSystemReader` that takes the index from `read_metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the folder, or that of one `rank`."""
        metadata = read_metadata(self._get_metadata_path(kwargs.get("rank")))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
