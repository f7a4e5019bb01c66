"""Writing the model that a module holds now as a directory, complete or not at all."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint_files import explain_write_error, format_bytes, fsync_directory, fsync_tree, temporary_path
from .artifacts import SIDECAR
from .byte_ranges import MERGE_MARK
from .live import is_sharded

log = logging.getLogger(__name__)


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """State dict without `torch.compile`'s prefixes; of a sharded model the whole tensors, on rank 0.

    A collective call when the model is sharded. Tensors of an unsharded model are the live ones.
    """
    if any(is_sharded(p) for p in module.parameters()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    else:
        state = module.state_dict()
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def check_target(directory: Path) -> None:
    """Whether a directory can be published at `directory`; meant for before training.

    Raises:
        FileExistsError: something other than an earlier merge is there.
        OSError: the parent cannot be written.
    """
    if directory.exists() and not (directory / SIDECAR).is_file() and (directory.is_file() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and holds no {SIDECAR}: choose another export_dir for the merge")
    probe = temporary_path(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, f"cannot write export_dir: {explain_write_error(error, directory)}") from error


def publish(module: nn.Module, state: Mapping[str, Any], directory: Path, info: Mapping[str, Any]) -> None:
    """Write a Hugging Face directory (where the module has `save_pretrained`) or `model.safetensors`, and `merge.json`.

    The directory appears under its name when all of it is on disk; an earlier one is replaced.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    temporary = temporary_path(directory)
    needed = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))
    try:
        temporary.mkdir(parents=True)
        save_pretrained: Any = getattr(module, "save_pretrained", None)
        if save_pretrained is not None:
            save_pretrained(temporary, {k: v for k, v in state.items() if k.startswith("model.")})
        else:
            _save_safetensors(state, temporary / "model.safetensors")
        (temporary / SIDECAR).write_text(json.dumps(info, indent=2) + "\n")
        fsync_tree(temporary)
        _replace(temporary, directory)
    except Exception as error:
        free = shutil.disk_usage(next(f for f in directory.parents if f.exists())).free
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors wraps the operating system's errors in a class of its own
        if not isinstance(error, OSError) and not any(t in str(error) for t in ("No space left", "I/O error")):
            raise
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"could not write the merged model to {directory} ({format_bytes(needed)} needed, {format_bytes(free)} "
            f"were free): {error}. Checkpoints are not affected: merge them with `lightning merge` once there is room",
        ) from error


def _save_safetensors(state: Mapping[str, Any], path: Path) -> None:
    """One file; of tensors that share memory (tied weights) one is stored and the others named in the metadata."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt", MERGE_MARK: "1"}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            log.warning("%s is no tensor and is left out of %s", name, path.name)
            continue
        owner = owners.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
        if owner == name or not value.numel():
            tensors[name] = value.detach().to("cpu", memory_format=torch.contiguous_format)
        else:
            metadata[name] = owner  # the convention of safetensors.torch.save_model
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata=metadata)


def _replace(temporary: Path, directory: Path) -> None:
    aside = temporary_path(directory, "old") if directory.exists() else None
    if aside is not None:
        os.rename(directory, aside)
    os.rename(temporary, directory)
    fsync_directory(directory.parent)
    if aside is not None:
        shutil.rmtree(aside)
