"""Opening checkpoints of every supported format.

Lightning `.ckpt`, plain `.pt` / `.bin` state dicts, safetensors (single, sharded, Hugging Face directories) and
`torch.distributed.checkpoint` directories. Nothing is unpickled but by torch's `weights_only` loader (or, for the
index of a distributed checkpoint, by one that knows only torch's record classes).
"""

import json
import os
import re
from pathlib import Path

from .byte_ranges import SIDECAR, Checkpoint
from .distributed_files import open_distributed
from .safetensors_files import add_safetensors
from .torch_files import add_torch_file

_STEP_IN_NAME = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt|snapshot)s?[=_-]?(\d+)", re.IGNORECASE)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any supported format; its tensors stay on disk.

    Of a file written by Lightning's `WeightAveraging` the live weights (`current_model_state`) are taken: its
    `state_dict` is already an average.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: not a checkpoint, truncated, unreadable with `weights_only=True`, or already an average.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if path.is_dir():
        checkpoint = open_distributed(path) if (path / ".metadata").is_file() else _open_folder(path)
    elif path.name.endswith(".index.json"):
        checkpoint = _open_index(path)
    elif path.suffix == ".safetensors":
        checkpoint = Checkpoint(path, "safetensors")
        add_safetensors(checkpoint, path)
    else:
        checkpoint = Checkpoint(path, "torch")
        add_torch_file(checkpoint, path)
    if not checkpoint.tensors:
        raise ValueError(f"{path} holds no tensors")
    if checkpoint.step is None:
        checkpoint.step = step_from_name(path)
    provenance = path / SIDECAR if path.is_dir() else path.with_name(f"{path.name}.{SIDECAR}")
    checkpoint.is_merge = checkpoint.is_merge or provenance.is_file()
    return checkpoint


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like a checkpoint, by its name and the files in it; nothing is opened."""
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return (path / ".metadata").is_file() or _weights_in(path) is not None
    if path.name.startswith(("optimizer", "scheduler", "rng_state", "training_args")):  # beside the model's own files
        return False
    return path.suffix in (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def step_from_name(path: Path) -> int | None:
    """Step in a name: "epoch=1-step=400.ckpt", "checkpoint-500", "0400.pt"; of "model.safetensors" its folder's."""
    names = [path.name if path.is_dir() else path.stem]
    if re.match(r"(model|pytorch_model|adapter_model|consolidated)\b", path.name):
        names.append(path.resolve().parent.name)
    for name in names:
        found = _STEP_IN_NAME.findall(name)
        if found:
            return int(found[-1])
        numbers = re.findall(r"\d+", name)
        if len(numbers) == 1 and not re.search(r"of-?\d|v\d", name):
            return int(numbers[0])
    return None


def _weights_in(folder: Path) -> Path | None:
    """The weights file (or index) of a Hugging Face directory."""
    for name in ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        for candidate in (folder / f"{name}.index.json", folder / name):
            if candidate.is_file():
                return candidate
    for pattern in ("*.safetensors.index.json", "*.bin.index.json"):
        found = sorted(p for p in folder.glob(pattern) if not p.name.startswith("."))
        if len(found) == 1:
            return found[0]
    return None


def _open_folder(path: Path) -> Checkpoint:
    weights = _weights_in(path)
    if weights is None:
        raise ValueError(
            f"{path} is not a checkpoint: it has no .metadata (torch.distributed.checkpoint), no model.safetensors and "
            "no pytorch_model.bin"
        )
    checkpoint = open_checkpoint(weights)
    checkpoint.path, checkpoint.directory = path, path
    return checkpoint


def _open_index(path: Path) -> Checkpoint:
    weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    checkpoint = Checkpoint(path, "safetensors" if ".safetensors" in path.name else "torch", directory=path.parent)
    for shard in sorted(set(weight_map.values())):
        file = path.parent / shard
        if not file.is_file():
            raise ValueError(f"{path} names the shard {shard}, which is not there")
        add_safetensors(checkpoint, file) if file.suffix == ".safetensors" else add_torch_file(checkpoint, file)
    missing = sorted(set(weight_map) - set(checkpoint.tensors) - set(checkpoint.aliases))
    if missing:
        raise ValueError(f"{path} promises tensors that its shards lack: {', '.join(missing[:5])}")
    checkpoint.step = None
    return checkpoint
