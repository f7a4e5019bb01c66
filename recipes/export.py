"""`lightning export CHECKPOINT OUTPUT`: the weights of a checkpoint as a Hugging Face directory.

Reads a Lightning `.ckpt` file or the folder that FSDP2 writes, the weights only: optimizer states stay on the disk. The
output appears complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import UserError
from .rundir import TOKENIZER_FOLDER

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
STATE_PREFIX = "state_dict."  # of the weights in a sharded checkpoint


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `lightning export --help` lists the options.")


def main(arguments: list[str]) -> int:
    """Export as the command line asks; returns the exit code."""
    parser = _Parser(prog="lightning export", description="A checkpoint's weights as a Hugging Face directory.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a .ckpt file, or the folder that FSDP2 writes")
    parser.add_argument("output", metavar="OUTPUT", help="the directory to make")
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer to put beside (default: the run's)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights (default: as stored)")
    options = parser.parse_args(arguments)
    try:
        output = export_checkpoint(options.checkpoint, options.output, tokenizer=options.tokenizer, dtype=options.dtype)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    print(f"{output}: load it by transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")
    return 0


def export_checkpoint(
    checkpoint: str | Path, output: str | Path, *, tokenizer: str | Path | None = None, dtype: str | None = None
) -> Path:
    """Write the weights of `checkpoint` as a Hugging Face directory; returns it.

    Args:
        checkpoint: Lightning `.ckpt` file, or a folder written by `torch.distributed.checkpoint`.
        output: the directory to make.
        tokenizer: directory of a tokenizer to save beside; default: `tokenizer/` of the checkpoint's run, if there.
        dtype: "float32", "bfloat16" or "float16"; default: each tensor's own.

    Raises:
        FileNotFoundError: no checkpoint there.
        FileExistsError: `output` is there already.
        ValueError: the checkpoint is damaged, or holds no causal LM.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ..callbacks.checkpoint_files import fsync_directory, fsync_tree, temporary_path, verify_checkpoint
    from ..lightning_modules.exporting import huggingface_state_dict

    disable_progress_bar()
    checkpoint, output = Path(checkpoint).absolute(), Path(output).absolute()
    if output.exists():
        raise FileExistsError(f"{output} is there already: choose another directory, or remove it.")
    verify_checkpoint(checkpoint)
    meta, weights = _read_folder(checkpoint) if checkpoint.is_dir() else _read_file(checkpoint)
    if "causal_lm" not in meta:
        raise ValueError(f"{checkpoint} holds no causal LM of this project: it has no Hugging Face config.")
    if dtype is not None:
        target = getattr(torch, dtype)
        weights = {name: value.to(target) if value.is_floating_point() else value for name, value in weights.items()}
    model = _empty_model(meta["causal_lm"]["config"], next(iter(weights.values())).dtype)
    temporary = temporary_path(output)
    try:
        model.save_pretrained(temporary, state_dict=huggingface_state_dict(model, weights))
        folder = Path(tokenizer) if tokenizer is not None else _run_tokenizer(checkpoint)
        if folder is not None:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(folder).save_pretrained(temporary)
        fsync_tree(temporary)
        os.replace(temporary, output)
        fsync_directory(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def complete_directory(directory: Path, checkpoint: Path) -> None:
    """Give a directory of weights what makes it loadable: `config.json`, and the tokenizer of the checkpoint's run."""
    checkpoint = checkpoint.absolute()
    if not (directory / "config.json").exists() and not _is_huggingface(checkpoint):
        import torch

        path = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
        if path.suffix not in (".ckpt", ".pt") or not path.is_file():
            return
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if "causal_lm" not in content:
            return
        model = _empty_model(content["causal_lm"]["config"], None)
        model.config.save_pretrained(directory)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(directory)
    folder = _run_tokenizer(checkpoint)
    if folder is not None and not (directory / "tokenizer_config.json").exists():
        shutil.copytree(folder, directory, dirs_exist_ok=True)


def _is_huggingface(path: Path) -> bool:
    return path.suffix == ".safetensors" or (path / "config.json").is_file()


def _empty_model(config: dict[str, Any], dtype: Any) -> Any:
    """The architecture without memory: it says which keys there are and which are tied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model.tie_weights()
    return model


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    import torch

    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content, content["state_dict"]


def _read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    import torch
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ..callbacks.distributed_metadata import SafeReader

    if not (path / "meta.pt").is_file():
        raise ValueError(f"{path} is not a checkpoint that Lightning wrote: it has no meta.pt.")
    content = torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
    reader = SafeReader(path)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(STATE_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return content, {name.removeprefix(STATE_PREFIX): value for name, value in state.items()}


def _run_tokenizer(checkpoint: Path) -> Path | None:
    """`<run>/tokenizer` of the run that a checkpoint lies in."""
    for directory in checkpoint.parents[:2]:
        if (directory / TOKENIZER_FOLDER).is_dir():
            return directory / TOKENIZER_FOLDER
    return None
