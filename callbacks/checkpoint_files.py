"""The files behind the checkpoints: atomic writes, SHA-256 sidecars, verification, and finding the newest whole one.

A sidecar `<checkpoint>.sha256` and the `manifest.sha256` of a sharded folder have the format of `sha256sum`, with one
comment line before: `# size=… step=… time=… resumable=…`. During an overwrite a sidecar lists two digests for one name.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import time
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIDECAR_SUFFIX = ".sha256"
MANIFEST_NAME = "manifest.sha256"
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]{8}$")
_READ_BYTES = 1 << 22
_RENAME_SECONDS = 1.0
_FOREIGN_TEMPORARY_SECONDS = 600  # a live writer on another machine touches its file more often than this


class HashingWriter:
    """File object that hashes what passes through it, so that no byte is read again for the digest."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:  # torch's C++ writer turns it into a RuntimeError without errno
            self.error = error
            raise
        self._digest.update(data)
        self.size += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _hostname() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"


def temporary_path(path: Path, kind: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{kind}-{_hostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it; the rename is still atomic
        pass
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flushes a directory with all that is below it to the disk."""
    for path in directory.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    fsync_directory(directory)


def write_text_atomic(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces `path` by a file with this text, so that a reader or a crash sees the old or the new one whole.

    `mode`: the file's permissions, less the umask's; 0o600 for what may hold secrets.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR_SUFFIX)


def read_digests(path: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Reads a `sha256sum` file: ({note: value} of its comment line, {file name: accepted digests}).

    Raises:
        ValueError: damaged; names the file.
    """
    notes: dict[str, str] = {}
    digests: dict[str, set[str]] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The digest file {path} is damaged: it is not UTF-8 text.") from error
    for line in text.splitlines():
        if line.startswith("#"):
            notes |= dict(item.split("=", 1) for item in line[1:].split() if "=" in item)
        elif line.strip():
            digest, _, name = line.partition("  ")
            digests.setdefault(name, set()).add(digest)
    for name in ("size", "step", "time"):
        if notes.get(name) and not notes[name].isdecimal():
            raise ValueError(f"The digest file {path} is damaged: its {name} is {notes[name]!r}.")
    return notes, digests


def read_digests_if_whole(path: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """`read_digests`; of a missing file nothing, and of a damaged one nothing and a warning that names it."""
    if path.is_file():
        try:
            return read_digests(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"{error} Going on without it.", stacklevel=2)
    return {}, {}


def digest_text(notes: dict[str, Any], entries: list[tuple[str, str]]) -> str:
    comment = "# " + " ".join(f"{key}={value}" for key, value in notes.items())
    return "\n".join([comment, *(f"{digest}  {name}" for digest, name in entries)]) + "\n"


def explain_write_error(error: OSError, path: Path, needed: int | None = None) -> str:
    """One sentence for a failed write: what happened to which path, in words."""
    parent = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
    size = f" (about {format_bytes(needed)} needed)" if needed else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(shutil.disk_usage(parent).free)
        return f"the disk or quota of {parent} is full: {free} free{size}"
    if error.errno == errno.EFBIG:
        return f"the file would exceed the largest file size allowed here{size} (see `ulimit -f`)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{parent} is read-only or not yours to write ({os.strerror(error.errno)})"
    return f"{error.strerror or error}"


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def remove_leftovers(directory: str | Path) -> list[Path]:
    """Removes what a killed writer left in `directory`: temporary files and folders, and sidecars without checkpoint.

    Files of a process that is still alive stay. A folder that was moved aside and not replaced is put back, whatever
    its process does: another may have that number now.
    Returns the removed paths.
    """
    directory = Path(directory)
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _TEMPORARY.match(path.name)
        alive = match is not None and _writer_alive(match["host"], int(match["pid"]), path)
        if match and match["kind"] == "old" and not (directory / match["name"]).exists():
            _restore(path, directory / match["name"], alive)
        elif match and not alive:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            removed.append(path)
        elif path.name.endswith(".ckpt" + SIDECAR_SUFFIX) and not os.path.lexists(path.with_suffix("")):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _restore(aside: Path, final: Path, writer_alive: bool) -> None:
    if writer_alive:  # it may be between its two renames, which takes no time
        time.sleep(_RENAME_SECONDS)
    if aside.exists() and not final.exists():
        os.rename(aside, final)


def _writer_alive(host: str, pid: int, path: Path) -> bool:
    if host != _hostname():
        return time.time() - path.lstat().st_mtime < _FOREIGN_TEMPORARY_SECONDS
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def verify_checkpoint(path: str | Path) -> None:
    """Checks a checkpoint against its digest: a Lightning `.ckpt` file, a link to one, or a sharded folder.

    A file without sidecar (written by other tools), or whose sidecar is damaged, is checked through the CRC of every
    record it holds; a folder
    without manifest through the sizes its own metadata asks for. What a folder pickles beside tensors, which torch and
    Lightning load as it is, must be torch's own records and plain data.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: names the file, and says whether it is truncated, changed, incomplete or not to be trusted.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    path = path.resolve()  # a link (`save_last="link"`) is checked through what it points to
    if path.is_dir():
        _verify_directory(path)
        return
    notes, digests = read_digests_if_whole(sidecar_path(path))
    if not digests:
        _verify_zip(path)
        return
    _verify_file(path, digests.get(path.name, set()), int(notes["size"]) if notes.get("size") else None)


def _verify_file(path: Path, accepted: set[str], size: int | None = None) -> None:
    actual = path.stat().st_size
    if size is not None and actual < size:
        raise ValueError(f"The checkpoint {path} is truncated: {actual} of {size} bytes are there.")
    if file_digest(path) not in accepted:
        raise ValueError(f"The checkpoint {path} is damaged: its SHA-256 differs from the one recorded when written.")


def _verify_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(f"The checkpoint {path} is truncated or not a checkpoint: {error}.") from error
    if bad is not None:
        raise ValueError(f"The checkpoint {path} is damaged: record {bad!r} fails its checksum.")


def _verify_directory(path: Path) -> None:
    from .distributed_metadata import check_metadata, read_metadata  # imports torch, which this module does without

    manifest = path / MANIFEST_NAME
    if manifest.is_file():
        for name, accepted in read_digests(manifest)[1].items():
            if not (path / name).is_file():
                raise ValueError(f"The checkpoint {path} is incomplete: {name} is missing.")
            _verify_file(path / name, accepted)
        check_metadata(path)
        return
    if not (path / ".metadata").is_file():
        raise ValueError(f"The checkpoint folder {path} is incomplete: it has neither {MANIFEST_NAME} nor .metadata.")
    needed: dict[str, int] = {}
    for info in read_metadata(path / ".metadata").storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else 0
        if actual < size:
            raise ValueError(f"The checkpoint {path} is truncated: {name} has {actual} of {size} bytes.")
    check_metadata(path)


def _candidates(directory: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """(save time, step) and path of each checkpoint, links resolved so that none comes twice."""
    seen = set()
    for path in directory.glob("*.ckpt"):
        real = path.resolve()
        if path.name.startswith(".") or not real.exists() or real in seen:
            continue
        seen.add(real)
        digest_file = real / MANIFEST_NAME if real.is_dir() else sidecar_path(real)
        notes = read_digests_if_whole(digest_file)[0]
        if notes.get("resumable") == "0":
            continue
        step = notes.get("step") or (re.findall(r"step=(\d+)", real.name) or ["-1"])[-1]
        yield (int(notes.get("time") or real.stat().st_mtime_ns), int(step)), real


def find_resumable(directory: str | Path) -> Path | None:
    """The newest checkpoint in `directory` that is whole, or None; warns about each damaged one it passes over.

    "Newest" is the time of saving recorded in the sidecar (of the file system where there is none). Checkpoints of
    weights only cannot be resumed and are left out.
    """
    for _, path in sorted(_candidates(Path(directory)), reverse=True):
        try:
            verify_checkpoint(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"{error} Passing over it to the one before.", stacklevel=2)
            continue
        return path
    return None
