"""The merged model on disk: laid out first, filled in any order, published in one step, never over something else."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_files import (
    digest_text,
    explain_write_error,
    format_bytes,
    fsync_directory,
    sidecar_path,
    temporary_path,
    write_text_atomic,
)
from .byte_ranges import MERGE_MARK, SIDECAR, OrderedDigest
from .safetensors_files import safetensors_header
from .torch_files import load_plan

_TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_FLUSH_BYTES = 16 << 20
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class OutputFile:
    """A file being filled at known offsets, and hashed as it is where its format has a place for the digest."""

    path: Path
    size: int
    descriptor: int
    flusher: ThreadPoolExecutor
    digest: OrderedDigest | None = None
    _unflushed: int = 0

    def write(self, offset: int, view: memoryview) -> None:
        """Write `view` at `offset`."""
        done = 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], offset + done)
        if self.digest is not None:
            self.digest.feed(offset, view)
        self._unflushed += done  # not exact when threads meet, and need not be
        if self._unflushed >= _FLUSH_BYTES:  # so that finishing does not wait for the whole file to reach the disk
            self._unflushed = 0
            self.flusher.submit(os.fdatasync, self.descriptor)

    def finish(self) -> str | None:
        """Put the file on the disk for good; its SHA-256 if it was hashed."""
        digest = None if self.digest is None else self.digest.hexdigest(self.size)
        os.fsync(self.descriptor)
        self.close()
        return digest

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Artifact:
    """One merged model: a safetensors file, a `.ckpt` / `.pt` file, or a Hugging Face directory, by `output`'s name.

    Optimizer, scheduler, loop and RNG state have no place in it. Use as a context manager: leaving it by an exception
    removes what was written.

    Args:
        output: where it will appear.
        entries: name -> (dtype, shape), in the order in which they will be written.
        aliases: tied name -> name.
        extra: entries that are not tensors (`.pt` and `.ckpt` only).
        header: plain values of a Lightning checkpoint.
        max_shard_size: bytes, or "5GB", above which a directory is sharded.

    Raises:
        FileExistsError: `output` exists.
        OSError: not enough room, or not writable.
        ValueError: an entry that the format cannot hold.
    """

    def __init__(
        self,
        output: Path,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        aliases: Mapping[str, str],
        extra: Mapping[str, Any],
        header: Mapping[str, Any],
        max_shard_size: int | str = "5GB",
    ) -> None:
        check_output(output)
        self.output = output
        self.entries, self.aliases, self.extra, self.header = entries, aliases, extra, header
        self.is_hashed = output.suffix == ".ckpt"  # the format whose digest our trainer records and checks
        self.is_directory = output.suffix not in (*_TORCH_SUFFIXES, ".safetensors")
        self.places: dict[str, tuple[OutputFile, int]] = {}
        self._files: list[OutputFile] = []
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="merge-flush")
        self._max_shard_size = parse_size(max_shard_size)
        self._temporary = temporary_path(output)
        self._index: dict[str, Any] | None = None

    def __enter__(self) -> "Artifact":
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            needed = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.entries.values())
            free = shutil.disk_usage(self.output.parent).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{format_bytes(needed)} are needed, {format_bytes(free)} are free")
            if self.output.suffix in _TORCH_SUFFIXES:
                self._lay_out_torch()
            else:
                self._lay_out_safetensors()
        except BaseException as error:
            self._discard()
            raise self._explained(error) from error
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._discard()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise self._explained(error) from error

    def write(self, name: str, start: int, view: memoryview) -> None:
        """Write elements of the flattened tensor from index `start`."""
        file, offset = self.places[name]
        file.write(offset + start * self.entries[name][0].itemsize, view)

    def publish(self, provenance: Mapping[str, Any], companions: Mapping[str, bytes]) -> Path:
        """Finish the files and let them appear; returns the path of `merge.json`.

        Args:
            provenance: content of `merge.json`; the output's files and sizes are added.
            companions: further files of a directory (config, tokenizer), name -> content.
        """
        self._flusher.shutdown(cancel_futures=True)
        digests = [file.finish() for file in self._files]
        names = [file.path.name for file in self._files] if self.is_directory else [self.output.name]
        sizes = {name: file.size for name, file in zip(names, self._files, strict=True)}
        text = json.dumps({**provenance, "output": sizes}, indent=2) + "\n"
        if self.is_directory:
            for name, content in companions.items():
                _write_synced(self._temporary / name, content)
            if self._index is not None:
                _write_synced(
                    self._temporary / "model.safetensors.index.json",
                    (json.dumps(self._index, indent=2) + "\n").encode(),
                )
            _write_synced(self._temporary / SIDECAR, text.encode())
            fsync_directory(self._temporary)
            check_output(self.output)
            os.rename(self._temporary, self.output)
            fsync_directory(self.output.parent)
            return self.output / SIDECAR
        sidecar = self.output.with_name(f"{self.output.name}.{SIDECAR}")
        write_text_atomic(sidecar, text)
        if self.is_hashed:
            notes = {"size": self._files[0].size, "step": self.header.get("global_step", ""), "resumable": 0}
            write_text_atomic(sidecar_path(self.output), digest_text(notes, [(str(digests[0]), self.output.name)]))
        try:
            os.link(self._temporary, self.output)  # fails where a rename would overwrite
            self._temporary.unlink()
        except FileExistsError:
            check_output(self.output)
            raise
        except OSError:  # a file system without hard links
            check_output(self.output)
            os.rename(self._temporary, self.output)
        fsync_directory(self.output.parent)
        return sidecar

    # ------------------------------------------------------------------ layout

    def _open(self, path: Path, size: int) -> OutputFile:
        file = OutputFile(path, size, os.open(path, os.O_RDWR | os.O_CREAT, 0o666), self._flusher)
        if self.is_hashed:
            file.digest = OrderedDigest(file.descriptor)
        self._files.append(file)
        return file

    def _lay_out_safetensors(self) -> None:
        unstorable = [name for name, value in self.extra.items() if value is not None]
        if unstorable:
            raise ValueError(f"safetensors cannot hold {unstorable[0]}, which is no tensor: write a .pt or .ckpt file")
        if self.is_directory:
            self._temporary.mkdir()
        shards = self._shards() if self.is_directory else [list(self.entries)]
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            label = "model.safetensors"
            if len(shards) > 1:
                label = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            path = self._temporary / label if self.is_directory else self._temporary
            metadata = {alias: name for alias, name in self.aliases.items() if name in names} | {MERGE_MARK: "1"}
            prefix, offsets, size = safetensors_header({n: self.entries[n] for n in names}, metadata)
            file = self._open(path, size)
            os.truncate(path, size)
            file.write(0, memoryview(prefix))
            self.places |= {name: (file, offset) for name, offset in offsets.items()}
            weight_map |= dict.fromkeys(names, label)
        if len(shards) > 1:
            total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.entries.values())
            self._index = {"metadata": {"total_size": total}, "weight_map": weight_map}

    def _shards(self) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        filled = 0
        for name, (dtype, shape) in self.entries.items():
            size = dtype.itemsize * math.prod(shape)
            if shards[-1] and filled + size > self._max_shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        return shards

    def _lay_out_torch(self) -> None:
        # `skip_data` writes everything but the numbers; torch.empty reserves address space, not memory.
        state: dict[str, Any] = {n: torch.empty(shape, dtype=dtype) for n, (dtype, shape) in self.entries.items()}
        state |= {alias: state[name] for alias, name in self.aliases.items()} | dict(self.extra)
        is_lightning = self.output.suffix == ".ckpt"
        content = {**self.header, "state_dict": state, MERGE_MARK: True} if is_lightning else state
        with torch.serialization.skip_data():
            torch.save(content, self._temporary)
        plan = load_plan(self._temporary, self._temporary)
        file = self._open(self._temporary, self._temporary.stat().st_size)
        for name in self.entries:
            storage = (plan["state_dict"] if is_lightning else plan)[name].untyped_storage()
            self.places[name] = (file, storage._checkpoint_offset or 0)

    def _discard(self) -> None:
        self._flusher.shutdown()
        for file in self._files:
            file.close()
        if self._temporary.is_dir():
            shutil.rmtree(self._temporary, ignore_errors=True)
        else:
            self._temporary.unlink(missing_ok=True)

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError) or isinstance(error, FileExistsError):
            return error
        needed = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.entries.values())
        reason = explain_write_error(error, self.output, needed)
        return OSError(error.errno, f"cannot write the merge to {self.output}: {reason}")


def check_output(output: Path) -> None:
    """Nothing is at `output` yet.

    Raises:
        FileExistsError: something is.
    """
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists: a merge never overwrites; choose another output or remove it first")


def parse_size(size: int | str) -> int:
    """Bytes of 1000000 or "5GB" (powers of 1000; KiB, MiB, GiB are powers of 1024)."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", size, re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"a size looks like 5GB or 500MB, got {size!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def companion_files(directory: Path | None) -> dict[str, bytes]:
    """Configuration and tokenizer files of a Hugging Face directory: everything small that is not weights."""
    if directory is None:
        return {}
    found = {}
    for path in sorted(directory.iterdir()):
        kept = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if path.is_file() and kept and path.name not in (SIDECAR, "trainer_state.json"):
            found[path.name] = path.read_bytes()
    return found


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
