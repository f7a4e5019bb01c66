"""Memory-mapped token shards: written once, published atomically, checked on every later use.

A cache entry is a folder `tokens/<key>/` with, for each split, `<split>-00000.bin ...` (token ids, uint16 or uint32,
all shards but the last of equal length), `<split>.docs.bin` (int64: end of each document in the split's token stream,
its EOS included) and `meta.json` (sizes and sha256 of all of these, written last). The folder appears under its final
name by one rename after everything in it reached the disk: a kill at any moment leaves the whole entry or none.
"""

from __future__ import annotations

import array
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from .files import CorruptCacheError, FileHashes, fsync_path, write_json_atomically
from .tokenizer import document_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .sources import Document

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 26
_ENCODE_CHARS = 2 << 20  # text handed to the tokenizer's threads at a time
_FLUSH_TOKENS = 1 << 20
_TELL_SECONDS = 30.0


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


class _Progress:
    """A bar on a terminal; elsewhere a line now and then, with the time that is left."""

    def __init__(self, total_bytes: int | None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total_bytes, desc="tokenising", unit="B", unit_scale=True, delay=3, disable=None)
        self._total, self._done = total_bytes, 0
        self._started = self._told = time.monotonic()

    def update(self, num_bytes: int) -> None:
        self._bar.update(num_bytes)
        self._done += num_bytes
        now = time.monotonic()
        if self._bar.disable and now - self._told > _TELL_SECONDS:
            self._told = now
            share = self._done / max(self._total or 0, self._done)
            left = f", {(now - self._started) * (1 / share - 1) / 60:.0f} min left" if self._total else ""
            rank_zero_info(f"tokenised {self._done / 1e6:,.0f} MB{left}")

    def close(self) -> None:
        self._bar.close()


def _batches(documents: Iterator[Document], val_fraction: float) -> Iterator[list[tuple[str, str | None]]]:
    """(split, text) of successive pieces, about _ENCODE_CHARS at a time; text None: the document ends here."""
    batch: list[tuple[str, str | None]] = []
    chars = 0
    for document in documents:
        split = "val" if split_position(document.digest) < val_fraction else "train"
        for piece in document.pieces:
            batch.append((split, piece))
            chars += len(piece)
            if chars >= _ENCODE_CHARS:
                yield batch
                batch, chars = [], 0
        batch.append((split, None))
    yield batch


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

    The tokenizer's threads encode one batch of texts while the next is read and the one before is written. Memory is
    bounded by these batches or by one document, whichever is larger. Special tokens that occur literally in the text
    are encoded as ordinary text, so that an EOS id is always a document's end. Documents without a token are left out.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encode_special_before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    dtype = token_dtype(max(tokenizer.get_vocab().values()) + 1)
    prefix, eos = document_prefix(tokenizer), tokenizer.eos_token_id
    writers = {split: _SplitWriter(folder, split, dtype, shard_tokens) for split in ("train", "val")}
    progress = _Progress(total_bytes)
    in_document = 0
    lowest = 1.0

    def noted() -> Iterator[Document]:
        nonlocal lowest
        for document in documents:
            lowest = min(lowest, split_position(document.digest))
            yield document

    def encode(batch: list[tuple[str, str | None]]) -> list[Any]:
        return backend.encode_batch_fast([text for _, text in batch if text is not None], add_special_tokens=False)

    def write(batch: list[tuple[str, str | None]], encodings: list[Any]) -> None:
        nonlocal in_document
        encoded = iter(encodings)
        for split, text in batch:
            writer = writers[split]
            if text is not None:
                ids = next(encoded).ids
                if ids and not in_document:
                    writer.extend(prefix)
                in_document += len(ids)
                writer.extend(ids)
            elif in_document:
                writer.extend([eos])
                writer.end_document()
                in_document = 0
        progress.update(sum(len(text) for _, text in batch if text is not None))

    try:
        with ThreadPoolExecutor(1) as pool:
            before: tuple[list[tuple[str, str | None]], Future[list[Any]]] | None = None
            for batch in _batches(noted(), val_fraction):
                encoding = pool.submit(encode, batch)
                if before is not None:
                    write(before[0], before[1].result())
                before = (batch, encoding)
            if before is not None:
                write(before[0], before[1].result())
    finally:
        progress.close()
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
        CorruptCacheError: names the first file that is missing, truncated or altered.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
        intact = meta["checksum"] == _meta_checksum(meta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCacheError(f"{path} cannot be read ({error})") from error
    if not intact:
        raise CorruptCacheError(f"{path} does not match its checksum")
    for split in meta["splits"].values():
        for file in split["files"]:
            shard = folder / file["name"]
            size = shard.stat().st_size if shard.is_file() else -1
            if size != file["size"]:
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise CorruptCacheError(f"{shard} {found}, expected {file['size']} bytes")
            if hashes is not None and hashes.sha256(shard) != file["sha256"]:
                raise CorruptCacheError(f"{shard} does not match its sha256")
    return meta


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
    rank_zero_info(f"tokenised {tokens:,} tokens in {time.monotonic() - started:.1f} s")


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
