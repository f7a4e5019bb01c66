"""Memory-mapped token shards: written once, published atomically, checked on every later use.

A cache entry is a folder `tokens/<key>/` with, for each split, `<split>-00000.bin ...` (token ids, uint16 or uint32,
all shards but the last of equal length), `<split>.docs.bin` (int64: end of each document in the split's token stream,
its EOS included) and `meta.json` (sizes and sha256 of all of these, written last). The folder appears under its final
name by one rename after everything in it reached the disk: a kill at any moment leaves the whole entry or none.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import FileHashes, fsync_path, write_json_atomically
from .tokenizer import document_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .sources import Document

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 26
_ENCODE_CHARS = 4 << 20  # text handed to the tokenizer's threads at a time
_FLUSH_TOKENS = 1 << 20

_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO}
)

log = logging.getLogger(__name__)


class CorruptShardError(RuntimeError):
    """A cache entry does not match its own description; the message names the file."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest of uint16 and uint32 that holds every token id."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    if vocab_size <= 1 << 32:
        return np.dtype(np.uint32)
    raise ValueError(f"vocab_size={vocab_size}: token ids above 2**32 - 1 are not supported")


def split_position(digest: bytes) -> float:
    """Where a document's content hash falls in [0, 1); below `val_fraction` means held out."""
    return int.from_bytes(digest[:8], "big") / 2**64


class _SplitWriter:
    """Appends documents of one split to its shards and its index."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._tokens = array.array("H" if dtype.itemsize == 2 else "I")
        self._ends = array.array("q")
        self._files: list[dict[str, Any]] = []
        self._in_shard = 0
        self.num_tokens = 0
        self.num_documents = 0

    def extend(self, ids: Sequence[int]) -> None:
        self._tokens.extend(ids)
        self.num_tokens += len(ids)
        if len(self._tokens) >= _FLUSH_TOKENS:
            self.flush()

    def end_document(self) -> None:
        self._ends.append(self.num_tokens)
        self.num_documents += 1

    def _append(self, name: str, data: memoryview | bytes) -> None:
        if not self._files or self._files[-1]["name"] != name:
            known = next((f for f in self._files if f["name"] == name), None)
            if known is None:
                known = {"name": name, "size": 0, "hash": hashlib.sha256()}
            else:
                self._files.remove(known)
            self._files.append(known)
        with (self._folder / name).open("ab") as stream:
            stream.write(data)
        self._files[-1]["size"] += len(data)
        self._files[-1]["hash"].update(data)

    def flush(self) -> None:
        data = memoryview(np.frombuffer(self._tokens, dtype=self._dtype)) if self._tokens else memoryview(b"")
        start = 0
        while start < len(data):
            shard, used = divmod(self._in_shard, self._shard_tokens)
            take = min(len(data) - start, self._shard_tokens - used)
            self._append(f"{self._split}-{shard:05d}.bin", data[start : start + take].tobytes())
            self._in_shard += take
            start += take
        del data
        self._tokens = array.array(self._tokens.typecode)
        self._append(f"{self._split}.docs.bin", self._ends.tobytes())
        self._ends = array.array("q")

    def close(self) -> dict[str, Any]:
        self.flush()
        for file in self._files:
            fsync_path(self._folder / file["name"])
        files = [{"name": f["name"], "size": f["size"], "sha256": f["hash"].hexdigest()} for f in self._files]
        return {"num_tokens": self.num_tokens, "num_documents": self.num_documents, "files": files}


def write_shards(
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    val_fraction: float,
    total_bytes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Tokenises documents into the shards of `folder`, which must be empty, and returns the content of `meta.json`.

    Memory is bounded by a few megabytes of text or one document, whichever is larger. Special tokens that occur
    literally in the text are encoded as ordinary text, so that an EOS id is always a document's end. Documents without
    a token are left out.
    """
    from tqdm import tqdm

    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encode_special_before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    dtype = token_dtype(max(tokenizer.get_vocab().values()) + 1)
    prefix, eos = document_prefix(tokenizer), tokenizer.eos_token_id
    writers = {split: _SplitWriter(folder, split, dtype, shard_tokens) for split in ("train", "val")}
    pending: list[tuple[str, str, bool]] = []  # (split, text, whether the document ends here)
    chars = in_document = 0
    lowest = 1.0

    def encode_pending() -> None:
        nonlocal in_document
        encoded = backend.encode_batch_fast([text for _, text, _ in pending], add_special_tokens=False)
        for (split, _, last), encoding in zip(pending, encoded, strict=True):
            writer, ids = writers[split], encoding.ids
            if ids and not in_document:
                writer.extend(prefix)
            in_document += len(ids)
            writer.extend(ids)
            if last:
                if in_document:
                    writer.extend([eos])
                    writer.end_document()
                in_document = 0
        pending.clear()

    bar = tqdm(total=total_bytes, desc="tokenising", unit="B", unit_scale=True, delay=3, disable=None)
    try:
        for document in documents:
            position = split_position(document.digest)
            lowest = min(lowest, position)
            split = "val" if position < val_fraction else "train"
            for piece in document.pieces:
                pending.append((split, piece, False))
                chars += len(piece)
                if chars >= _ENCODE_CHARS:
                    encode_pending()
                    bar.update(chars)
                    chars = 0
            pending.append((split, "", True))
        encode_pending()
        bar.update(chars)
    finally:
        bar.close()
        backend.encode_special_tokens = encode_special_before
    splits = {split: writer.close() for split, writer in writers.items()}
    num_documents = sum(split["num_documents"] for split in splits.values())
    if num_documents == 0:
        raise ValueError("the corpus is empty: no document has any text")
    if val_fraction > 0 and not splits["val"]["num_documents"]:
        raise ValueError(
            f"val_fraction={val_fraction} holds out none of the {num_documents} documents; {lowest + 1e-4:.4f} would "
            "hold out one. Raise it, cut the files into documents with document_separator, or set val_fraction=0"
        )
    if not splits["train"]["num_documents"]:
        raise ValueError(f"val_fraction={val_fraction} holds out all {num_documents} documents: lower it")
    return {"format": FORMAT_VERSION, "dtype": dtype.name, "shard_tokens": shard_tokens, "splits": splits}


def _meta_checksum(meta: dict[str, Any]) -> str:
    content = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path, hashes: FileHashes | None = None) -> dict[str, Any]:
    """Content of `meta.json` after checking it and, when `hashes` is given, the sha256 of every file it lists.

    Raises:
        CorruptShardError: names the first file that is missing, truncated or altered.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
        intact = meta["checksum"] == _meta_checksum(meta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(f"{path} cannot be read ({error})") from error
    if not intact:
        raise CorruptShardError(f"{path} does not match its checksum")
    for split in meta["splits"].values():
        for file in split["files"]:
            shard = folder / file["name"]
            size = shard.stat().st_size if shard.is_file() else -1
            if size != file["size"]:
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise CorruptShardError(f"{shard} {found}, expected {file['size']} bytes")
            if hashes is not None and hashes.sha256(shard) != file["sha256"]:
                raise CorruptShardError(f"{shard} does not match its sha256")
    return meta


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock that the system releases when the process dies; gives False where the file system has no locks."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another process is building %s; waiting for it", path.stem)
            lock.acquire()
    except NotImplementedError:
        log.warning("%s: the file system has no locks; processes that start together may do the same work", path.parent)
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _publish(final: Path, build: Callable[[Path], None]) -> None:
    """Runs `build` on an empty folder beside `final` and gives that folder its final name once it is on the disk.

    If `final` appears in the meantime (on a file system without locks), the one that is there wins.
    """
    partial = final.parent / f"{final.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            fsync_path(path)
        fsync_path(partial)
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        fsync_path(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_about(filename: object, folder: Path) -> bool:
    """Whether an error names a path inside or above `folder`, or none at all (a write to an open file)."""
    path = None if filename is None else Path(str(filename))
    return path is None or path.is_relative_to(folder) or folder.is_relative_to(path)


def cached_folder(
    final: Path, build: Callable[[Path], None], check: Callable[[Path], None], what: str = "the cache entry"
) -> Path:
    """`final`, built if it is absent or does not pass `check` (which raises `CorruptShardError`).

    Safe for any number of processes on one file system.

    Raises:
        OSError: the cache cannot be written; the message says where it is and how to move it.
    """

    def usable() -> bool:
        if not final.is_dir():
            return False
        try:
            check(final)
        except CorruptShardError as error:
            log.warning("%s; building %s again", error, what)
            return False
        return True

    if usable():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(final.name + ".lock")) as locked:
            if usable():  # another process has built it while this one waited
                return final
            for leftover in final.parent.glob(f"{final.name}.*.partial") if locked else ():  # of killed builders
                shutil.rmtree(leftover, ignore_errors=True)
            if final.is_dir():
                doomed = final.with_name(f"{final.name}.{secrets.token_hex(4)}.partial")
                final.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            _publish(final, build)
    except OSError as error:
        if error.errno not in _DISK_ERRORS or not _is_about(error.filename, final.parent):
            raise  # an input file or the network, not the cache
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)} while writing {what} under {final.parent}; nothing was left behind. Free some "
            "space, or point cache_dir or FULGURITE_CACHE to another folder",
        ) from error
    return final


def build_shards(
    folder: Path,
    documents: Callable[[], Iterator[Document]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    val_fraction: float,
    total_bytes: int | None,
    info: dict[str, str],
) -> None:
    """Writes a whole cache entry into an empty folder; `info` is kept in `meta.json`."""
    started = time.monotonic()
    meta = write_shards(documents(), tokenizer, folder, val_fraction=val_fraction, total_bytes=total_bytes)
    meta["info"] = info
    meta["checksum"] = _meta_checksum(meta)
    write_json_atomically(folder / "meta.json", meta)
    tokens = sum(split["num_tokens"] for split in meta["splits"].values())
    log.info("tokenised %s tokens in %.1f s", f"{tokens:,}", time.monotonic() - started)


class TokenShards:
    """Random access to one split's token stream; opens its memory maps on first use, also after pickling."""

    def __init__(self, folder: Path, split: str, meta: dict[str, Any]) -> None:
        self.folder, self.split = folder, split
        self.num_tokens: int = meta["splits"][split]["num_tokens"]
        self.num_documents: int = meta["splits"][split]["num_documents"]
        self._dtype = np.dtype(meta["dtype"])
        self._shard_tokens: int = meta["shard_tokens"]
        self._maps: list[np.ndarray] | None = None
        self._ends: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None, "_ends": None}

    def _open(self) -> list[np.ndarray]:
        if self._maps is None:
            count = -(-self.num_tokens // self._shard_tokens)
            self._maps = [
                np.memmap(self.folder / f"{self.split}-{i:05d}.bin", dtype=self._dtype, mode="r") for i in range(count)
            ]
        return self._maps

    @property
    def document_ends(self) -> np.ndarray:
        """(num_documents,) int64, memory-mapped: one past each document's EOS."""
        if self._ends is None:
            path = self.folder / f"{self.split}.docs.bin"
            self._ends = np.memmap(path, dtype=np.int64, mode="r") if self.num_documents else np.empty(0, np.int64)
        return self._ends

    def read(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Tokens `[start, start + length)` for each start: (len(starts), length) int64."""
        maps = self._open()
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            shard, first = divmod(start, self._shard_tokens)
            filled = 0
            while filled < length:
                part = maps[shard][first : first + length - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                shard, first = shard + 1, 0
        return out
