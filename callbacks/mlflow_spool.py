"""The spool: a file of entries for MLflow in the run's folder, and the run's `run.json`. No heavy import here.

See `mlflow_logger.py` for the guarantees.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import shutil
import threading
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from .checkpoint_files import write_text_atomic

log = logging.getLogger(__name__)

SPOOL_NAME = "mlflow-spool.jsonl"
STAGING_NAME = "mlflow-spool-files"
REJECTED_NAME = "mlflow-rejected.jsonl"
_run_json_lock = threading.Lock()


DEFAULT_STORE = "mlruns"


def default_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, else the SQLite store `mlruns/mlflow.db` in the current directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(DEFAULT_STORE).absolute() / 'mlflow.db'}"


def read_run_json(run_dir: str | Path) -> dict[str, Any]:
    """The run's `run.json`, or an empty dict."""
    path = Path(run_dir) / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def update_run_json(run_dir: str | Path, **fields: Any) -> dict[str, Any]:
    """Sets fields of `run.json`, atomically. Only rank 0 calls it."""
    with _run_json_lock:
        content = {**read_run_json(run_dir), **fields}
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        write_text_atomic(Path(run_dir) / "run.json", json.dumps(content, indent=2) + "\n")
        return content


class Spool:
    """Append-only file of entries, one JSON object a line, with one reader; whole lines only are ever read.

    Where the disk is full, entries stay in memory (the newest 100,000) and are read after those of the file.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / SPOOL_NAME
        self._lock = threading.Lock()
        self._overflow: deque[bytes] = deque(maxlen=100_000)
        self._warned = False
        self._offset = 0
        self._file = self._open()
        if self.path.name == SPOOL_NAME:
            self._remove_unreferenced()

    def _remove_unreferenced(self) -> None:
        """Staged artifacts whose entry was never written, because the process was killed in between."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        staging = self.path.parent / STAGING_NAME
        for folder in staging.iterdir() if staging.is_dir() else []:
            if folder.name not in text:
                shutil.rmtree(folder, ignore_errors=True)

    def _open(self) -> io.FileIO:
        file = io.FileIO(self.path, "a+")
        if not lock_file(file):  # another live process writes there
            file.close()
            self.path = self.path.with_name(f"mlflow-spool-{uuid.uuid4().hex[:8]}.jsonl")
            file = io.FileIO(self.path, "a+")
            lock_file(file)
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            with contextlib.suppress(OSError):
                file.write(b"\n")  # a writer was killed within a line
        return file

    def append(self, entry: dict[str, Any]) -> None:
        """Adds an entry; one `write`, so that a crash leaves it whole or absent."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            self._overflow.append(line)
            self._write_overflow()

    def _write_overflow(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        while self._overflow:
            try:
                written = os.write(self._file.fileno(), self._overflow[0])
                if written < len(self._overflow[0]):
                    os.ftruncate(self._file.fileno(), size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                if not self._warned:
                    log.warning("The MLflow spool %s cannot be written (%s): entries stay in memory.", self.path, error)
                self._warned = True
                return
            size += written
            self._overflow.popleft()

    def read(self, max_entries: int = 2000) -> tuple[list[dict[str, Any]], int, int]:
        """Up to `max_entries` unsent entries, the file position behind them, and how many came from memory instead."""
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size
            if self._offset == size:
                lines = list(self._overflow)[:max_entries]
                return parse_lines(lines, self.path), self._offset, len(lines)
            data = os.pread(self._file.fileno(), 4 << 20, self._offset)
            if b"\n" not in data:  # one long line
                data = os.pread(self._file.fileno(), size - self._offset, self._offset)
        lines = [line for line in data.splitlines(keepends=True)[:max_entries] if line.endswith(b"\n")]
        return parse_lines(lines, self.path), self._offset + sum(map(len, lines)), 0

    def done(self, position: int, num_from_memory: int) -> None:
        """Everything before `position` has been sent; the file is emptied once all of it has."""
        with self._lock:
            for _ in range(num_from_memory):
                self._overflow.popleft()
            self._offset = position
            if self._offset and self._offset == os.fstat(self._file.fileno()).st_size:
                os.ftruncate(self._file.fileno(), 0)
                self._offset = 0
            self._write_overflow()

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be sent."""
        with self._lock:
            return not self._overflow and os.fstat(self._file.fileno()).st_size == self._offset

    def close(self) -> None:
        """Closes, and removes the file when it is empty."""
        if self.empty:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.path.parent / STAGING_NAME).rmdir()
        self._file.close()


def parse_lines(lines: list[bytes], path: Path) -> list[dict[str, Any]]:
    """The entries of whole lines; a line that a crash cut in two is passed over."""
    entries = []
    for line in lines:
        if line.strip():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                log.warning("Passed over an unreadable line of %s.", path)
    return entries


def lock_file(file: io.FileIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
