"""Files of `torch.save` (Lightning `.ckpt`, `.pt`, `.bin`) as byte ranges, read by the `weights_only` loader alone."""

import logging
import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .byte_ranges import MERGE_MARK, Checkpoint, CheckpointFile, Segment, TensorEntry, recorded_digest

log = logging.getLogger(__name__)

STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")
# What a Lightning checkpoint says about the model, as opposed to the training: carried over into a merged one.
_HEADER_KEYS = (
    "pytorch-lightning_version",
    "epoch",
    "global_step",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "causal_lm",
)
_FAKE_MODE_LOCK = threading.Lock()


def load_plan(file: Any, path: Path) -> Any:
    """What `torch.load` would return, with tensors that carry shapes and file offsets but no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with _FAKE_MODE_LOCK, FakeTensorMode():
            return torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects that are not plain data, and is not loaded for safety: {_first_line(error)}. If you "
            "trust it, allow their classes with torch.serialization.add_safe_globals, or save its state_dict alone"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{path} is truncated or not a checkpoint: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def add_torch_file(checkpoint: Checkpoint, path: Path) -> None:
    """Add the tensors of one file, and what it says about itself.

    Raises:
        ValueError: truncated, not loadable with `weights_only=True`, no state dict, or already an average.
        TypeError: a tensor that cannot be averaged.
    """
    index, file = len(checkpoint.files), CheckpointFile(path, recorded_digest(path))
    checkpoint.files.append(file)
    is_zip = os.pread(file.descriptor, 4, 0) == b"PK\x03\x04"
    if is_zip:
        content = load_plan(path, path)
    else:
        log.warning("%s has torch's old format, which can only be read as a whole: merging holds all of it", path)
        try:
            content = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # a file of other content fails in as many ways as there are opcodes
            raise ValueError(f"{path} is truncated or not a checkpoint: {_first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict")
    state = describe_content(checkpoint, content, path)
    storages: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            checkpoint.extra[name] = value
            continue
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"{path}: {name} is a {value.layout} / quantized tensor, which cannot be averaged")
        # Tensors that share memory are stored once: they have one place in the file (or one address, if loaded).
        place = value.untyped_storage()._checkpoint_offset if is_zip else value.untyped_storage().data_ptr()
        key = (place, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and storages.setdefault(key, name) != name:
            checkpoint.aliases[name] = storages[key]
        else:
            checkpoint.tensors[name] = _torch_entry(value, index, file) if is_zip else _held(value)


def describe_content(checkpoint: Checkpoint, content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Fill in what the file says about itself, and return its live state dict."""
    if "pytorch-lightning_version" in content:
        checkpoint.kind = "lightning"
        checkpoint.header = {key: content[key] for key in _HEADER_KEYS if key in content}
    if "averaging_state" in content and "current_model_state" not in content:
        raise ValueError(
            f"{path} is already an average (averaging_state without current_model_state): merge live weights"
        )
    checkpoint.is_merge = checkpoint.is_merge or MERGE_MARK in content
    for key in ("global_step", "step", "iteration"):
        if checkpoint.step is None and isinstance(content.get(key), int):
            checkpoint.step = int(content[key])
    # A module's own record: at the top, or in the entry that it keeps ("causal_lm").
    records = [content, *(value for value in content.values() if isinstance(value, Mapping))]
    tokens = next((r["tokens_seen"] for r in records if isinstance(r.get("tokens_seen"), int)), None)
    checkpoint.tokens = None if tokens is None else int(tokens)
    if isinstance(content.get("causal_lm"), Mapping):
        checkpoint.config = content["causal_lm"].get("config")
    if isinstance(content.get("current_model_state"), Mapping):
        log.info("%s holds an average and the live weights: the live ones are merged", path)
        return content["current_model_state"]
    for key in STATE_KEYS:
        if isinstance(content.get(key), Mapping):
            return content[key]
    return content


def _torch_entry(tensor: Tensor, index: int, file: CheckpointFile) -> TensorEntry:
    """Place of a tensor whose data `load_plan` left in the file."""
    storage = tensor.untyped_storage()
    offset: int = storage._checkpoint_offset or 0  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    if offset + storage.nbytes() > file.size:
        raise ValueError(f"{file.path} is truncated: a tensor ends at byte {offset + storage.nbytes()} of {file.size}")
    if tensor.is_contiguous():
        box = Segment(index, offset + int(tensor.storage_offset()) * tensor.dtype.itemsize, (0,) * len(shape), shape)
        return TensorEntry(tensor.dtype, shape, (box,))
    data = torch.empty(storage.nbytes(), dtype=torch.uint8)
    file.read_into(offset, memoryview(data.numpy()))
    strided = data.view(tensor.dtype).as_strided(shape, tensor.stride(), tensor.storage_offset())
    return _held(strided)


def _held(tensor: Tensor) -> TensorEntry:
    return TensorEntry(tensor.dtype, tuple(tensor.shape), held=tensor.detach().contiguous())
