"""Where a sliding window of snapshots lives: device memory, host memory, or files written behind the training loop."""

import logging
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from .safetensors_files import write_safetensors

log = logging.getLogger(__name__)

_STAGING_SETS = 2  # host copies that may wait for the disk: bounds memory, and lets one write overlap the next copy
_PROTECTED_STATES = 2  # saved states whose files are kept: the newest checkpoint, and the one before in case it is torn


def clone_into(destination: dict[str, Tensor] | None, source: Mapping[str, Tensor], device: Any, pin: bool) -> dict:
    """Copy `source` into `destination` (allocated when None); the result never aliases a live tensor."""
    if destination is None:
        destination = {
            name: torch.empty(t.shape, dtype=t.dtype, device=device or t.device, pin_memory=pin)
            for name, t in source.items()
        }
    for name, tensor in source.items():
        destination[name].copy_(tensor.detach(), non_blocking=pin)
    return destination


class Ring(Protocol):
    """The newest `capacity` snapshots, oldest first."""

    @property
    def positions(self) -> list[float]: ...

    def push(self, position: float, tensors: Mapping[str, Tensor]) -> None: ...
    def read(self, index: int, name: str) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class MemoryRing:
    """Snapshots as tensors on the parameters' device or, `on_cpu`, in (pinned) host memory."""

    def __init__(self, capacity: int, on_cpu: bool) -> None:
        self.capacity = capacity
        self.positions: list[float] = []
        self._snapshots: list[dict[str, Tensor]] = []
        self._lent = 0  # the oldest snapshots, whose tensors a state holds: never written again
        self._device = "cpu" if on_cpu else None
        self._pin = on_cpu and torch.cuda.is_available()

    def push(self, position: float, tensors: Mapping[str, Tensor]) -> None:
        recycled = None
        if len(self._snapshots) == self.capacity:
            recycled = self._snapshots.pop(0)
            del self.positions[0]
            if self._lent:
                self._lent, recycled = self._lent - 1, None
        self._snapshots.append(clone_into(recycled, tensors, self._device, self._pin))
        self.positions.append(position)

    def read(self, index: int, name: str) -> Tensor:
        self.flush()
        return self._snapshots[index][name]

    def state_dict(self) -> dict[str, Any]:
        """Positions and the snapshots' own tensors, which stay as they are from here on."""
        self.flush()
        self._lent = len(self._snapshots)
        return {"positions": list(self.positions), "snapshots": [dict(s) for s in self._snapshots]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.positions = list(state["positions"])
        self._snapshots = [clone_into(None, s, self._device, self._pin) for s in state["snapshots"]]
        self._lent = 0

    def flush(self) -> None:
        if self._pin:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._snapshots.clear()
        self.positions.clear()
        self._lent = 0


@dataclass
class _Entry:
    position: float
    staged: dict[str, Tensor] | None = None
    copied: Any = None  # CUDA event after which `staged` holds the values
    written: threading.Event = field(default_factory=threading.Event)


class DiskRing:
    """Snapshots as safetensors files, one a position and rank, written by a thread.

    `push` copies to host memory and returns; it waits only when two snapshots are still unwritten. A file appears under
    its name complete or not at all. Files that left the window stay as long as one of the last two saved states names
    them, so that a run can resume from either.
    """

    def __init__(self, capacity: int, directory: str | os.PathLike[str], rank: int = 0) -> None:
        self.capacity = capacity
        self.directory = Path(directory)
        self.rank = rank
        self._entries: list[_Entry] = []
        self._evicted: list[float] = []
        self._saved: list[set[float]] = []
        self._files: dict[float, Any] = {}
        self._idle: queue.Queue[dict[str, Tensor] | None] = queue.Queue()
        for _ in range(_STAGING_SETS):
            self._idle.put(None)
        self._work: queue.Queue[_Entry | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._warned = False

    @property
    def positions(self) -> list[float]:
        return [entry.position for entry in self._entries]

    def path(self, position: float) -> Path:
        """File of one snapshot."""
        return self.directory / f"snapshot-{int(position):015d}-rank{self.rank:05d}.safetensors"

    def push(self, position: float, tensors: Mapping[str, Tensor]) -> None:
        if position != int(position):
            raise ValueError(f"snapshots on disk are named by whole steps or tokens, got position {position}")
        self._raise_pending()
        if self._idle.empty() and not self._warned:
            self._warned = True
            log.warning(
                "Snapshots are taken faster than %s takes them: training now waits for the disk", self.directory
            )
        buffers = self._idle.get()
        on_cuda = any(t.is_cuda for t in tensors.values())
        entry = _Entry(position, clone_into(buffers, tensors, "cpu", on_cuda))
        if on_cuda:
            entry.copied = torch.cuda.Event()
            entry.copied.record()
        self._entries.append(entry)
        if len(self._entries) > self.capacity:
            self._evicted.append(self._entries.pop(0).position)
            self._files.pop(self._evicted[-1], None)
            self._collect()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="snapshot-writer", daemon=True)
            self._thread.start()
        self._work.put(entry)

    def read(self, index: int, name: str) -> Tensor:
        entry = self._entries[index]
        staged = entry.staged
        if staged is not None:
            if entry.copied is not None:
                entry.copied.synchronize()
            return staged[name]
        self._raise_pending()
        if entry.position not in self._files:
            self._files[entry.position] = safe_open(self.path(entry.position), framework="pt")
        return self._files[entry.position].get_tensor(name)

    def state_dict(self) -> dict[str, Any]:
        """Positions only; the files are complete when this returns."""
        self.flush()
        if not self._saved or self._saved[-1] != set(self.positions):
            self._saved = [*self._saved, set(self.positions)][-_PROTECTED_STATES:]
        self._collect()
        return {"positions": self.positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the window of a saved state, and delete the files of newer snapshots, which a resumed run replaces.

        Raises:
            FileNotFoundError: a snapshot of that window is gone.
        """
        positions = list(state["positions"])
        missing = [str(self.path(p)) for p in positions if not self.path(p).is_file()]
        if missing:
            raise FileNotFoundError(
                f"snapshot(s) of the merge window are missing: {', '.join(missing[:5])}. "
                "Resume from a newer checkpoint, or restore these files"
            )
        self._entries = []
        self._files.clear()
        for position in positions:
            entry = _Entry(position)
            entry.written.set()
            self._entries.append(entry)
        self._saved, self._evicted = [set(positions)], []
        newest = self.path(positions[-1]).name if positions else ""
        prefix, suffix = "snapshot-", f"-rank{self.rank:05d}.safetensors"
        for path in self.directory.glob(f"{prefix}*{suffix}"):
            position = float(path.name[len(prefix) : -len(suffix)])
            if path.name > newest:
                log.info("Dropping %s: it is newer than the restored step", path)
                path.unlink(missing_ok=True)
            elif position not in positions:
                self._evicted.append(position)  # older than the window: a killed process had no time to delete it

    def flush(self) -> None:
        """Wait until every snapshot is on disk; raises what the writer met."""
        for entry in self._entries:
            entry.written.wait()
        self._raise_pending()

    def close(self) -> None:
        """Finish the writes and stop the thread; the files stay."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        self._files.clear()
        self._raise_pending()

    def _collect(self) -> None:
        """Delete files that left the window and that no recent saved state names."""
        kept = []
        for position in self._evicted:
            if any(position in saved for saved in self._saved):
                kept.append(position)
            else:
                self.path(position).unlink(missing_ok=True)
        self._evicted = kept

    def _raise_pending(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise OSError(f"writing a snapshot to {self.directory} failed: {error}") from error

    def _write_all(self) -> None:
        while (entry := self._work.get()) is not None:
            staged = entry.staged
            try:
                if entry.copied is not None:
                    entry.copied.synchronize()
                assert staged is not None
                write_safetensors(self.path(entry.position), staged)
                # Only a written snapshot is read from its file; a failed one stays readable in memory.
                entry.staged = None
            except BaseException as error:
                self._error = error
            self._idle.put(staged if entry.staged is None else None)
            entry.written.set()
