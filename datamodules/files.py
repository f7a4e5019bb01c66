"""Cache folders that survive a kill at any moment, and content hashes remembered by stat signature."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_RACY_NS = 2_000_000_000  # a file touched this shortly before it was hashed may change again without a new timestamp
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO}
)

log = logging.getLogger(__name__)


class CorruptCacheError(RuntimeError):
    """A cache entry does not match its own description; the message names the file."""


def fsync_path(path: Path) -> None:
    """Flushes a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomically(path: Path, content: object) -> None:
    """Writes JSON so that readers see the old content or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)


class FileHashes:
    """sha256 of files, read again only if size, mtime, ctime or inode changed since they were hashed.

    ctime cannot be set by a program, so that a file rewritten with its old mtime is noticed; and a file touched less
    than two seconds before it was hashed is never trusted (the same rule as git's index).

    Args:
        store: JSON file to remember hashes in; None remembers nothing.
    """

    def __init__(self, store: Path | None) -> None:
        self._store = store
        self._known: dict[str, list] = {}
        self._changed = False
        if store is not None:
            with contextlib.suppress(OSError, ValueError):
                self._known = json.loads(store.read_text())

    @staticmethod
    def _signature(path: Path) -> list[int]:
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def sha256(self, path: Path) -> str:
        """Hex digest of the file's content."""
        key = str(path.resolve())
        signature = self._signature(path)
        known = self._known.get(key)
        if known is not None and known[0] == signature:
            return known[1]
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time_ns() - max(signature[1], signature[2]) > _RACY_NS and self._signature(path) == signature:
            self._known[key] = [signature, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Keeps what was learnt; a read-only store is no error, it only costs time in the next run."""
        if self._store is None or not self._changed:
            return
        with contextlib.suppress(OSError):
            self._store.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self._store, self._known)
            self._changed = False


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
    """`final`, built if it is absent or does not pass `check` (which raises `CorruptCacheError`).

    Safe for any number of processes on one file system.

    Raises:
        OSError: the cache cannot be written; the message says where it is and how to move it.
    """

    def usable() -> bool:
        if not final.is_dir():
            return False
        try:
            check(final)
        except CorruptCacheError as error:
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
