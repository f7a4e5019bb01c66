"""Files that survive a kill at any moment: atomic publication, and content hashes remembered by stat signature."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from pathlib import Path

_RACY_NS = 2_000_000_000  # a file touched this shortly before it was hashed may change again without a new timestamp


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
