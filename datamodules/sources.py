"""Text corpora as streams of documents: the standard library, local files, data sets on the Hugging Face hub.

Documents are read one at a time, in a fixed order; a plain-text file above 8 MiB comes in pieces. Every document has
the sha256 of its UTF-8 text, which decides its split, and every source a fingerprint of its whole content.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from .files import FileHashes, write_json_atomically

TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_PIECE = 1 << 20  # characters of a large plain-text document handled at a time
_WHOLE = 8 << 20  # bytes up to which a plain-text file is read at once
_TEST_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One document: `digest` is the sha256 of its UTF-8 text, `pieces` are read once, `location` is for messages."""

    digest: bytes
    pieces: Iterable[str]
    location: str


class Source(Protocol):
    """What the token cache needs of a corpus."""

    label: str
    total_bytes: int | None  # of text, about; None: not known before reading

    def fingerprint(self, hashes: FileHashes) -> str: ...

    def documents(self) -> Iterator[Document]: ...


def _document(text: str, location: str, encoding_errors: str) -> Document:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # lone surrogates, which JSON can carry
        if encoding_errors == "strict":
            raise ValueError(
                f"{location}: not valid Unicode ({error.reason}); fix it or set encoding_errors='replace'"
            ) from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        data = text.encode()
    return Document(hashlib.sha256(data).digest(), (text,), location)


@dataclass
class FileSource:
    """Local files, each with the name under which it counts in the fingerprint (relative to the given folder)."""

    files: list[tuple[str, Path]]
    label: str
    text_key: str = "text"
    document_separator: str | None = None
    encoding_errors: str = "strict"
    total_bytes: int | None = field(init=False)

    def __post_init__(self) -> None:
        compressed = (".gz", ".parquet")  # expand about threefold; only a progress bar and a sampling rate depend on it
        self.total_bytes = sum(path.stat().st_size * (3 if path.suffix in compressed else 1) for _, path in self.files)

    def fingerprint(self, hashes: FileHashes) -> str:
        """sha256 over names, sizes and the sha256 of the contents."""
        rows = [[name, path.stat().st_size, hashes.sha256(path)] for name, path in self.files]
        hashes.save()
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        for _, path in self.files:
            name = path.name.removesuffix(".gz")
            if name.endswith(".parquet"):
                yield from self._parquet(path)
            elif name.endswith(".jsonl"):
                yield from self._jsonl(path)
            else:
                yield from self._text(path)

    def _open(self, path: Path) -> IO[bytes]:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]

    def _decoding_error(self, path: Path, error: UnicodeDecodeError) -> ValueError:
        return ValueError(
            f"{path}: not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}); "
            "convert it, or set encoding_errors='replace' to put U+FFFD in such places"
        )

    def _text(self, path: Path) -> Iterator[Document]:
        try:
            if self.document_separator:
                yield from self._separated(path, self.document_separator)
                return
            with self._open(path) as stream:
                head = stream.read(_WHOLE + 1)
                if len(head) <= _WHOLE:
                    text = head.decode("utf-8", self.encoding_errors).removeprefix("\ufeff")
                    yield _document(text, str(path), self.encoding_errors)
                    return
                digest = hashlib.sha256(head)
                while block := stream.read(_PIECE):
                    digest.update(block)
            yield Document(digest.digest(), self._pieces(path), str(path))
        except UnicodeDecodeError as error:
            raise self._decoding_error(path, error) from error

    def _blocks(self, path: Path) -> Iterator[str]:
        with self._open(path) as stream:
            reader = io.TextIOWrapper(stream, "utf-8-sig", errors=self.encoding_errors, newline="")
            while block := reader.read(_PIECE):
                yield block

    def _pieces(self, path: Path) -> Iterator[str]:
        """Pieces cut after the last line end of each block, so that hardly any token is split."""
        rest = ""
        try:
            for block in self._blocks(path):
                block = rest + block
                cut = block.rfind("\n") + 1 or len(block)
                rest = block[cut:]
                yield block[:cut]
        except UnicodeDecodeError as error:
            raise self._decoding_error(path, error) from error
        if rest:
            yield rest

    def _separated(self, path: Path, separator: str) -> Iterator[Document]:
        rest, number = "", 0
        for block in self._blocks(path):
            *whole, rest = (rest + block).split(separator)
            for text in whole:
                number += 1
                yield _document(text, f"{path}: document {number}", self.encoding_errors)
        yield _document(rest, f"{path}: document {number + 1}", self.encoding_errors)

    def _jsonl(self, path: Path) -> Iterator[Document]:
        with self._open(path) as stream:
            for number, line in enumerate(stream, 1):
                where = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8", self.encoding_errors)
                except UnicodeDecodeError as error:
                    raise self._decoding_error(Path(where), error) from error
                if not text.strip():
                    continue
                try:
                    record = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not JSON ({error.msg}); one JSON object a line is expected") from error
                if not isinstance(record, dict) or self.text_key not in record:
                    keys = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise ValueError(f"{where}: no key {self.text_key!r}; it has {keys}: set text_key")
                if (value := record[self.text_key]) is not None:
                    yield self._value(value, where)

    def _parquet(self, path: Path) -> Iterator[Document]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        with file:
            names = file.schema_arrow.names
            if self.text_key not in names:
                raise ValueError(f"{path}: no column {self.text_key!r}; it has {sorted(names)}: set text_key")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[self.text_key]):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield self._value(value, f"{path}: row {row}")
                    row += 1

    def _value(self, value: Any, where: str) -> Document:
        if not isinstance(value, str):
            raise ValueError(f"{where}: {self.text_key!r} is {type(value).__name__}, expected a string: set text_key")
        return _document(value, where, self.encoding_errors)


@dataclass
class HubSource:
    """A data set of the hub, streamed by `datasets`; identified by the commit that the hub resolves it to."""

    name: str
    split: str
    text_key: str = "text"
    encoding_errors: str = "strict"
    pointer: Path | None = None  # where the last resolved commit is kept, for later runs without a network
    total_bytes: int | None = None
    label: str = field(init=False)
    _revision: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.label = f"{self.name}[{self.split}]"

    def _unreachable(self, error: Exception) -> ValueError:
        return ValueError(
            f"source={self.name!r} is no local path, and as a hub data set it cannot be read "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); "
            "check the spelling, the network and HF_HUB_OFFLINE, or give a local path"
        )

    def fingerprint(self, hashes: FileHashes) -> str:
        """sha256 of name, split and commit. Without a network the commit of the last run with one is used."""
        from huggingface_hub import HfApi

        dataset_id = self.name.partition(":")[0]
        try:
            self._revision = HfApi().dataset_info(dataset_id).sha
        except Exception as error:
            if self.pointer is None or not self.pointer.is_file():
                raise self._unreachable(error) from error
            self._revision = json.loads(self.pointer.read_text())
        else:
            if self.pointer is not None and self._revision:
                self.pointer.parent.mkdir(parents=True, exist_ok=True)
                write_json_atomically(self.pointer, self._revision)
        return hashlib.sha256(json.dumps(["hub", self.name, self.split, self._revision]).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f"source={self.name!r} needs the `datasets` package: pip install 'fulgurite[hub]', or give a path"
            ) from error
        dataset_id, _, config = self.name.partition(":")
        try:
            rows = datasets.load_dataset(
                dataset_id, config or None, split=self.split, streaming=True, revision=self._revision
            )
        except Exception as error:
            raise self._unreachable(error) from error
        for number, row in enumerate(rows):
            where = f"{self.label}: row {number}"
            if self.text_key not in row:
                raise ValueError(f"{where}: no key {self.text_key!r}; it has {sorted(row)}: set text_key")
            if (value := row[self.text_key]) is None:
                continue
            if not isinstance(value, str):
                raise ValueError(f"{where}: {self.text_key!r} is {type(value).__name__}, expected a string")
            yield _document(value, where, self.encoding_errors)


def standard_library_files() -> list[tuple[str, Path]]:
    """The running interpreter's standard library: `.py` files in name order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _TEST_FOLDERS)
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(f"source='stdlib': no .py file under {root}; give a path of your own as source")
    return sorted((path.relative_to(root).as_posix(), path) for path in found)


def _local_files(item: str) -> list[tuple[str, Path]]:
    """Files that a path, folder or glob names, sorted; [] when it names nothing."""
    path = Path(item).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        every = sorted(p for p in path.rglob("*") if p.is_file())
        files = [(p.relative_to(path).as_posix(), p) for p in every if p.name.endswith(TEXT_SUFFIXES)]
        if not files:
            seen = sorted({p.suffix or p.name for p in every})[:8]
            raise ValueError(
                f"source={item!r}: the folder holds no {', '.join(TEXT_SUFFIXES)} file (it has {seen or 'no file'}); "
                f"name other text files by a glob such as {item.rstrip('/')}/**/*.md"
            )
        return files
    if glob.has_magic(item):
        paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        root = Path(re.split(r"[*?\[]", str(path))[0])
        root = root if root.is_dir() else root.parent
        return [(p.relative_to(root).as_posix(), p) for p in paths if p.is_file()]
    return []


def _looks_like_hub_id(item: str) -> bool:
    name = item.partition(":")[0]
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not name.endswith(TEXT_SUFFIXES) and name[0] not in "./~"


def resolve_source(
    source: str | Path | Sequence[str | Path],
    *,
    text_key: str = "text",
    document_separator: str | None = None,
    encoding_errors: str = "strict",
    hub_split: str = "train",
    cache_dir: Path | None = None,
) -> Source:
    """Turns the `source` argument of `TextDataModule` into a source; see there.

    Raises:
        ValueError: nothing at that path, or an argument out of range.
    """
    if encoding_errors not in ("strict", "replace"):
        raise ValueError(f"encoding_errors={encoding_errors!r}: expected 'strict' or 'replace'")
    items = [str(source)] if isinstance(source, (str, Path)) else [str(item) for item in source]
    if not items:
        raise ValueError("source=[]: name at least one path")
    if items == ["stdlib"]:
        version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        return FileSource(standard_library_files(), label=f"stdlib-{version}")
    files: list[tuple[str, Path]] = []
    for item in items:
        found = _local_files(item)
        if not found and len(items) == 1 and _looks_like_hub_id(item):
            pointer = None
            if cache_dir is not None:
                pointer = cache_dir / "hub" / hashlib.sha256(item.encode()).hexdigest()[:32]
            return HubSource(item, hub_split, text_key, encoding_errors, pointer)
        if not found:
            raise ValueError(
                f"source={item!r}: no such file, folder or match (relative to {Path.cwd()}); "
                "expected 'stdlib', a path, a glob or a hub data set id"
            )
        files += found
    label = items[0] if len(items) == 1 else f"{items[0]} and {len(items) - 1} more"
    return FileSource(files, label, text_key, document_separator, encoding_errors)
