"""Where a causal LM comes from: a config to start from at random, a local directory, a hub id or a GGUF file.

`resolve_model` looks only at names and files, so that a wrong value is refused before any data is prepared;
`load_config` and `weights_directory` do the reading.
"""

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Fields that transformers accepts and stores under another name.
_LEGACY_FIELDS = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "torch_dtype",
    "attn_implementation",
    "model_type",
}


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A checked `model` value: `kind` says how `value` is read."""

    kind: Literal["config", "directory", "gguf", "hub"]
    value: Any


def cache_directory() -> Path:
    """`$FULGURITE_CACHE`, else `~/.cache/fulgurite`."""
    return Path(os.environ.get("FULGURITE_CACHE") or Path.home() / ".cache" / "fulgurite")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else ""


def _check_config(fields: Mapping[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    model_type = fields.get("model_type")
    if model_type is None:
        raise ValueError(
            "model={...} is a config without `model_type`; add the Hugging Face architecture, for example"
            " model_type: llama"
        )
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={model_type!r} is not an architecture of transformers{_nearest(model_type, CONFIG_MAPPING)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = _LEGACY_FIELDS | set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        if dataclasses.is_dataclass(base):
            known |= {field.name for field in dataclasses.fields(base)}
        known |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    if unknown := sorted(set(fields) - known):
        # transformers would store a misspelt field and train the default architecture instead.
        raise ValueError(f"model has no field {unknown[0]!r} in a {model_type} config{_nearest(unknown[0], known)}")


def _check_directory(path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model={str(path)!r} is a directory without config.json (it holds {held}); give a Hugging Face model"
            " directory (`lightning export` writes one from a checkpoint), or a .gguf file"
        )
    if not any((path / name).is_file() for name in _WEIGHT_FILES):
        raise ValueError(
            f"model={str(path)!r} has config.json but no weights ({', '.join(_WEIGHT_FILES)}); to start from random"
            " weights, give the config's fields as a dictionary instead"
        )
    return ModelSource("directory", path)


def _cached_hub_ids() -> list[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return [path.name.removeprefix("models--").replace("--", "/") for path in Path(HF_HUB_CACHE).glob("models--*")]


def _check_hub(name: str) -> ModelSource:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import is_offline_mode
    from transformers import CONFIG_MAPPING

    if is_offline_mode() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        siblings = [path.name for path in Path(name).parent.glob("*")] if Path(name).parent.is_dir() else []
        hint = f"; for random weights give a dictionary: model_type: {name}, ..." if name in CONFIG_MAPPING else ""
        raise ValueError(
            f"model={name!r}: there is no local directory or file of that name, and the hub cannot be asked (offline)"
            f" and has no copy in its cache{_nearest(Path(name).name, [*_cached_hub_ids(), *siblings])}{hint}"
        )
    return ModelSource("hub", name)


def resolve_model(model: Mapping[str, Any] | str | Path) -> ModelSource:
    """Checks a `model` value by looking at names and files only.

    Args:
        model: a Hugging Face config as a dictionary (`model_type` and fields), a model directory, a `.gguf` file or a
            hub id, tried in this order.

    Raises:
        ValueError: names the value, what was tried and the nearest names that exist.
        TypeError: not a dictionary or string.
    """
    if isinstance(model, Mapping):
        _check_config(model)
        return ModelSource("config", dict(model))
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a config dictionary, a path or a hub id, got {type(model).__name__}: {model!r}")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            siblings = path.parent.glob("*.gguf") if path.parent.is_dir() else []
            raise ValueError(
                f"model={str(model)!r}: there is no such GGUF file{_nearest(path.name, [p.name for p in siblings])}"
            )
        return ModelSource("gguf", path)
    if path.is_dir():
        return _check_directory(path)
    if path.is_file():
        raise ValueError(
            f"model={str(model)!r} is a file; give the Hugging Face directory that holds it, or a .gguf file"
            " (a Lightning .ckpt is resumed with --resume, or turned into a directory by `lightning export`)"
        )
    if not _HUB_ID.fullmatch(str(model)):
        siblings = path.parent.iterdir() if path.parent.is_dir() else []
        raise ValueError(
            f"model={str(model)!r}: there is no such directory, and it is not a hub id (name or owner/name)"
            f"{_nearest(path.name, [p.name for p in siblings])}"
        )
    return _check_hub(str(model))


def load_config(source: ModelSource) -> "PretrainedConfig":
    """The configuration of a source; GGUF files must have been converted (`weights_directory`) first.

    Raises:
        ValueError: the values do not make an architecture, or the hub has no such model.
    """
    from transformers import AutoConfig

    if source.kind == "config":
        fields = {key: value for key, value in source.value.items() if key != "model_type"}
        try:
            return AutoConfig.for_model(source.value["model_type"], **fields)
        except Exception as error:
            raise ValueError(f"model={source.value!r} does not make a config: {error}") from error
    directory = weights_directory(source)
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise ValueError(
            f"model={str(source.value)!r}: no readable configuration; tried {directory!r} as a"
            f" {'hub id' if source.kind == 'hub' else 'local directory'}: {error}"
        ) from error


def load_tokenizer(source: ModelSource, name: str | None) -> "PreTrainedTokenizerBase | None":
    """The tokenizer called `name` (a directory or hub id), else the model's own; None if there is none.

    Raises:
        ValueError: `name` cannot be read.
    """
    from transformers import AutoTokenizer

    if name is None and source.kind == "config":
        return None
    try:
        return AutoTokenizer.from_pretrained(name or weights_directory(source))
    except (OSError, ValueError) as error:
        if name is None:
            rank_zero_warn(f"{source.value} holds no tokenizer: exports will have none either")
            return None
        raise ValueError(f"tokenizer={name!r} could not be read as a directory or hub id: {error}") from error


def complete_source(source: ModelSource, tokenizer: "PreTrainedTokenizerBase | None") -> ModelSource:
    """A config with what the tokenizer knows filled in (vocabulary size, first and last token); others as they are.

    Raises:
        ValueError: no vocabulary size, or one that is smaller than the tokenizer's.
    """
    size = None if tokenizer is None else len(tokenizer)
    if source.kind == "config":
        fields = dict(source.value)
        if "vocab_size" not in fields:
            if size is None:
                raise ValueError(
                    "model has no vocab_size, and there is no tokenizer to take it from: set model.vocab_size, or"
                    " use a data module with a tokenizer"
                )
            fields["vocab_size"] = size
        if tokenizer is not None:
            for key in ("bos_token_id", "eos_token_id"):
                fields.setdefault(key, getattr(tokenizer, key))
        source = ModelSource("config", fields)
    vocab_size = load_config(source).get_text_config().vocab_size
    if size is not None and size > vocab_size:
        raise ValueError(
            f"the tokenizer has {size} tokens but the model's vocab_size is {vocab_size}: set model.vocab_size to at"
            f" least {size}, or use the model's own tokenizer"
        )
    return source


def weights_directory(source: ModelSource) -> str:
    """What `from_pretrained` takes: the directory, the hub id, or the converted copy of a GGUF file."""
    return str(convert_gguf(source.value)) if source.kind == "gguf" else str(source.value)


@functools.lru_cache
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(path: Path, *, directory: Path | None = None) -> Path:
    """Dequantises a GGUF file once into a cached safetensors directory (bfloat16) with its tokenizer.

    The cache's key is the file's content. The directory appears under its name only when complete.

    Args:
        path: the GGUF file.
        directory: parent of the result; default `<cache>/models`.
    """
    status = path.stat()
    digest = _sha256(path, status.st_size, status.st_mtime_ns)
    parent = directory or cache_directory() / "models"
    target = parent / f"{path.stem}-{digest[:16]}"
    if (target / "source.json").is_file():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("Converting %s to %s (once)", path.name, target)
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
        # The weights are plain tensors by now; what remembers the quantised file would stop save_pretrained.
        model.hf_quantizer = None
        for attribute in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, attribute):
                delattr(model.config, attribute)
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(temporary)
        (temporary / "source.json").write_text(json.dumps({"file": path.name, "sha256": digest}))
        try:
            os.replace(temporary, target)
        except OSError:
            if not (target / "source.json").is_file():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
