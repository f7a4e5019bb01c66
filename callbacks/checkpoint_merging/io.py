"""Checkpoints as byte ranges: which tensors a checkpoint holds and where their bytes lie, whatever wrote it.

Read here: Lightning `.ckpt`, plain `.pt` / `.bin` state dicts, safetensors (single, sharded, Hugging Face directories)
and `torch.distributed.checkpoint` directories. Nothing is unpickled but by torch's `weights_only` loader (or, for the
index of a distributed checkpoint, by one that knows only torch's record classes), and no tensor is loaded: a caller
reads any range of elements into its own buffer, and each file can hash its bytes as they pass.
"""

import hashlib
import io
import json
import logging
import math
import os
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_files import MANIFEST_NAME, fsync_directory, read_digests, sidecar_path, temporary_path

log = logging.getLogger(__name__)

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
MERGE_MARK = "fulgurite_merge"  # key by which an artifact says that it already is a merge
SIDECAR = "merge.json"

_READAHEAD = 8 << 20
_BLOCK = 4 << 20
_MAX_HEADER = 100 << 20
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
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")
_STEP_IN_NAME = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt|snapshot)s?[=_-]?(\d+)", re.IGNORECASE)


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
        self.known_digest = known_digest
        self._digest: OrderedDigest | None = None
        self._ahead = 0

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
        self._advise(offset + len(view))
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

    def _advise(self, end: int) -> None:
        """Ask the kernel for the bytes that come next, so that reading does not wait for the disk."""
        if end + _READAHEAD // 2 > self._ahead or end + 4 * _READAHEAD < self._ahead:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.descriptor, end, _READAHEAD, os.POSIX_FADV_WILLNEED)
            self._ahead = end + _READAHEAD


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
        checkpoint = _open_distributed(path) if (path / ".metadata").is_file() else _open_folder(path)
    elif path.name.endswith(".index.json"):
        checkpoint = _open_index(path)
    elif path.suffix == ".safetensors":
        checkpoint = Checkpoint(path, "safetensors")
        _add_safetensors(checkpoint, path)
    else:
        checkpoint = Checkpoint(path, "torch")
        _add_torch_file(checkpoint, path)
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


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


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


# ---------------------------------------------------------------------------------------------------- safetensors


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
        _add_safetensors(checkpoint, file) if file.suffix == ".safetensors" else _add_torch_file(checkpoint, file)
    missing = sorted(set(weight_map) - set(checkpoint.tensors) - set(checkpoint.aliases))
    if missing:
        raise ValueError(f"{path} promises tensors that its shards lack: {', '.join(missing[:5])}")
    checkpoint.step = None
    return checkpoint


def _add_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    index, file = len(checkpoint.files), CheckpointFile(path, _recorded_digest(path))
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


# ---------------------------------------------------------------------------------------------------- torch.save files

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


def _add_torch_file(checkpoint: Checkpoint, path: Path) -> None:
    index, file = len(checkpoint.files), CheckpointFile(path, _recorded_digest(path))
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
    state = _describe_torch_content(checkpoint, content, path)
    storages: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            checkpoint.extra[name] = value
            continue
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"{path}: {name} is a {value.layout} / quantized tensor, which cannot be averaged")
        key = (value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and storages.setdefault(key, name) != name:
            checkpoint.aliases[name] = storages[key]
        else:
            checkpoint.tensors[name] = _torch_entry(value, index, file) if is_zip else _held(value)


def _describe_torch_content(checkpoint: Checkpoint, content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
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
    for key in _STATE_KEYS:
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


def _recorded_digest(path: Path) -> str | None:
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


# ---------------------------------------------------------------------------------------------------- distributed


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint: a pickle, of which only torch's own record classes are allowed."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
    _NAMES = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")})

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._NAMES or (module in self._MODULES and "." not in name):
            found = super().find_class(module, name)
            if module not in self._MODULES or isinstance(found, type):
                return found
        raise ValueError(f"the index of a distributed checkpoint holds {module}.{name}, which does not belong there")


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


def _open_distributed(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(path, "distributed")
    with open(path / ".metadata", "rb") as handle:
        metadata = _MetadataUnpickler(handle).load()
    header = path / "meta.pt"  # what Lightning's ModelParallelStrategy writes beside the shards
    if header.is_file():
        _describe_torch_content(checkpoint, load_plan(header, header), header)
        checkpoint.kind = "distributed"
    names = list(metadata.state_dict_metadata)
    prefix = next((f"{key}." for key in _STATE_KEYS if any(n.startswith(f"{key}.") for n in names)), "")
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
        record = metadata.state_dict_metadata[fqn]
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in record.chunks}
        segments = []
        for key, info in parts:
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{path}: {fqn} is stored compressed, which is not read here")
            if info.relative_path not in files:
                files[info.relative_path] = len(checkpoint.files)
                shard = path / info.relative_path
                checkpoint.files.append(CheckpointFile(shard, _recorded_digest(shard)))
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


def iter_chunks(entry: TensorEntry, row: int, num_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of the flattened tensor, each about `num_elements` and whole rows."""
    rows = max(1, num_elements // row) * row
    for start in range(0, entry.numel, rows):
        yield start, min(start + rows, entry.numel)


def common_row(entries: Sequence[TensorEntry]) -> int:
    """Elements that all of the checkpoints can read together."""
    return max(entry.row for entry in entries)
