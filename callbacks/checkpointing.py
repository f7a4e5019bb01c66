"""Checkpoints that survive: written atomically, checked by a hash, found again after a crash, with all random states.

- `AtomicCheckpointIO` writes a temporary file in the same folder, hashes it while it is being written, flushes it to
  the disk and renames it; `<checkpoint>.sha256` beside it (the format of `sha256sum`) holds the digest.
- `CheckpointSafety` is the callback around it: it refuses to start a run whose checkpoint folder is read-only or too
  small, sweeps what a killed run left half-written, makes a failed save fail on every rank, and gives the folders that
  sharded strategies write (`torch.distributed.checkpoint`) the same guarantees through a manifest.
- `verify_checkpoint` and `find_resumable` read those digests; `RNGState` keeps the random generators of every rank.

A save that fails (disk full, read-only folder) stops the run with an error that names the last good checkpoint: going
on would spend compute that nothing can bring back. The files written before are never touched by a failing save.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import shutil
import socket
import time
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

log = logging.getLogger(__name__)

SIDECAR_SUFFIX = ".sha256"
MANIFEST_NAME = "manifest.sha256"
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]{8}$")
_READ_BYTES = 1 << 22
_FOREIGN_TEMPORARY_SECONDS = 600  # a live writer on another machine touches its file more often than this


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the message says why, what is left and what to do."""


# ---------------------------------------------------------------------------------------------------- files and digests


class _HashingWriter:
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


def _temporary_path(path: Path, kind: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{kind}-{_hostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it; the rename is still atomic
        pass
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces `path` by a file with this text, so that a reader or a crash sees the old or the new one whole."""
    temporary = _temporary_path(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR_SUFFIX)


def _read_digests(path: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Reads a `sha256sum` file: ({note: value} of its comment line, {file name: accepted digests})."""
    notes: dict[str, str] = {}
    digests: dict[str, set[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            notes.update(item.split("=", 1) for item in line[1:].split() if "=" in item)
        elif line.strip():
            digest, _, name = line.partition("  ")
            digests.setdefault(name, set()).add(digest)
    return notes, digests


def _digest_text(notes: dict[str, Any], entries: list[tuple[str, str]]) -> str:
    comment = "# " + " ".join(f"{key}={value}" for key, value in notes.items())
    return "\n".join([comment, *(f"{digest}  {name}" for digest, name in entries)]) + "\n"


def _explain(error: OSError, path: Path, needed: int | None = None) -> str:
    """One sentence for a failed write: what happened to which path, in words."""
    parent = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
    size = f" (about {_gigabytes(needed)} needed)" if needed else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _gigabytes(shutil.disk_usage(parent).free)
        return f"the disk or quota of {parent} is full: {free} free{size}"
    if error.errno == errno.EFBIG:
        return f"the file would exceed the largest file size allowed here{size} (see `ulimit -f`)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{parent} is read-only or not yours to write ({os.strerror(error.errno)})"
    return f"{error.strerror or error}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


# ------------------------------------------------------------------------------------------------------------- writing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning checkpoint plugin: `Trainer(plugins=[AtomicCheckpointIO()])`.

    A checkpoint is complete or absent, never half there, and its SHA-256 lies beside it in `<checkpoint>.sha256`. The
    digest is computed while the file is written. Overwriting is safe too: between the first and the last rename the
    sidecar accepts the old and the new content. Loading uses `weights_only=True` unless the caller says otherwise.
    Remote paths (`s3://…`) are left to Lightning's own writer and get no sidecar.

    Raises:
        CheckpointWriteError: when the file cannot be written; names the last checkpoint that could.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_good: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes `checkpoint` to `path`, atomically; see the class."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        notes = {
            "step": checkpoint.get("global_step", ""),
            "time": time.time_ns(),
            "resumable": int("optimizer_states" in checkpoint),
        }
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(checkpoint, target, notes)
        except OSError as error:
            raise self._failure(error, target) from error
        self.last_good = target

    def _write(self, checkpoint: dict[str, Any], target: Path, notes: dict[str, Any]) -> None:
        temporary, sidecar = _temporary_path(target), _sidecar(target)
        try:
            with open(temporary, "wb") as file:
                writer = _HashingWriter(file)
                try:
                    torch.save(checkpoint, writer)  # type: ignore[arg-type]  # `write` is all that it uses
                except BaseException as error:
                    if writer.error is not None and not isinstance(error, OSError):
                        raise writer.error from error
                    raise
                file.flush()
                os.fsync(file.fileno())
            entries = [(writer.hexdigest(), target.name)]
            notes = {"size": writer.size, **notes}
            if target.is_file() and not target.is_symlink() and sidecar.is_file():
                known = _read_digests(sidecar)[1].get(target.name, set())
                write_text_atomic(sidecar, _digest_text({}, entries + [(digest, target.name) for digest in known]))
            os.replace(temporary, target)
            write_text_atomic(sidecar, _digest_text(notes, entries))
            _fsync_directory(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _failure(self, error: OSError, target: Path) -> CheckpointWriteError:
        last = (
            f"The last good checkpoint is {self.last_good}." if self.last_good else "No checkpoint was written before."
        )
        return CheckpointWriteError(
            error.errno,
            f"The checkpoint {target} could not be written: {_explain(error, target)}. {last}"
            " Make room (or choose another trainer.default_root_dir), then go on with `--resume auto`",
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads with `weights_only=True` by default; a damaged file is reported by name (`verify_checkpoint`)."""
        weights_only = True if weights_only is None else weights_only
        map_location = "cpu" if map_location is None else map_location
        try:
            return super().load_checkpoint(path, map_location, weights_only)
        except (RuntimeError, EOFError, zipfile.BadZipFile):
            if _is_local_file_protocol(path):
                verify_checkpoint(path)
            raise

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint (file, link or folder) and its sidecar; nothing happens when it is already gone."""
        if not _is_local_file_protocol(path):
            super().remove_checkpoint(path)
            return
        target = Path(path)
        if target.is_dir() and not target.is_symlink():
            # the name goes first, in one step: a crash half-way must not leave a folder that looks complete
            doomed = _temporary_path(target, "tmp")
            os.rename(target, doomed)
            shutil.rmtree(doomed)
        else:
            target.unlink(missing_ok=True)
        _sidecar(target).unlink(missing_ok=True)


def remove_leftovers(directory: str | Path) -> list[Path]:
    """Removes what a killed writer left in `directory`: temporary files and folders, and sidecars without checkpoint.

    Files of a process that is still alive stay. A folder that was moved aside and never replaced is put back.
    Returns the removed paths.
    """
    directory = Path(directory)
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _TEMPORARY.match(path.name)
        if match and not _writer_alive(match["host"], int(match["pid"]), path):
            final = directory / match["name"]
            if match["kind"] == "old" and not final.exists():
                os.rename(path, final)
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            removed.append(path)
        elif path.name.endswith(".ckpt" + SIDECAR_SUFFIX) and not os.path.lexists(path.with_suffix("")):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


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


# ------------------------------------------------------------------------------------------------------------- reading


def verify_checkpoint(path: str | Path) -> None:
    """Checks a checkpoint against its digest: a Lightning `.ckpt` file, a link to one, or a sharded folder.

    A file without sidecar (written by other tools) is checked through the CRC of every record it holds; a folder
    without manifest through the sizes its own metadata asks for.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: names the file, and says whether it is truncated, changed or incomplete.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    path = path.resolve()  # a link (`save_last="link"`) is checked through what it points to
    if path.is_dir():
        _verify_directory(path)
        return
    sidecar = _sidecar(path)
    if not sidecar.is_file():
        _verify_zip(path)
        return
    notes, digests = _read_digests(sidecar)
    _verify_file(path, digests.get(path.name, set()), int(notes["size"]) if notes.get("size") else None)


def _verify_file(path: Path, accepted: set[str], size: int | None = None) -> None:
    actual = path.stat().st_size
    if size is not None and actual < size:
        raise ValueError(f"The checkpoint {path} is truncated: {actual} of {size} bytes are there.")
    if _file_digest(path) not in accepted:
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
    manifest = path / MANIFEST_NAME
    if manifest.is_file():
        for name, accepted in _read_digests(manifest)[1].items():
            if not (path / name).is_file():
                raise ValueError(f"The checkpoint {path} is incomplete: {name} is missing.")
            _verify_file(path / name, accepted)
        return
    if not (path / ".metadata").is_file():
        raise ValueError(f"The checkpoint folder {path} is incomplete: it has neither {MANIFEST_NAME} nor .metadata.")
    from torch.distributed.checkpoint import FileSystemReader

    needed: dict[str, int] = {}
    for info in FileSystemReader(path).read_metadata().storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else 0
        if actual < size:
            raise ValueError(f"The checkpoint {path} is truncated: {name} has {actual} of {size} bytes.")


def _candidates(directory: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """(save time, step) and path of each checkpoint, links resolved so that none comes twice."""
    seen = set()
    for path in directory.glob("*.ckpt"):
        real = path.resolve()
        if path.name.startswith(".") or not real.exists() or real in seen:
            continue
        seen.add(real)
        digest_file = real / MANIFEST_NAME if real.is_dir() else _sidecar(real)
        notes = _read_digests(digest_file)[0] if digest_file.is_file() else {}
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


# ----------------------------------------------------------------------------------------------------------- callbacks


def checkpoint_directories(trainer: pl.Trainer) -> list[Path]:
    """Local folders into which this trainer's `ModelCheckpoint`s write (`<default_root_dir>/checkpoints` if none)."""
    found = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [Path(folder) for folder in found if folder and _is_local_file_protocol(folder)]
    return list(dict.fromkeys(folders)) or [Path(trainer.default_root_dir) / "checkpoints"]


class CheckpointSafety(Callback):
    """Callback that checks the checkpoint folder before training and guards every save; see the module's text.

    Args:
        check_space: also ask for room for one checkpoint (weights, and the optimizer's states) before training.

    Raises:
        CheckpointWriteError: from `setup` or `on_fit_start` (before training), or from a save during it; on every rank.
    """

    def __init__(self, check_space: bool = True) -> None:
        self.check_space = check_space

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Probes the folders for writing, removes leftovers, and wraps the strategy's `save_checkpoint`."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._on_rank_zero(trainer, lambda: self._prepare(checkpoint_directories(trainer)))
        if not hasattr(trainer.strategy.save_checkpoint, "_fulgurite_original"):
            trainer.strategy.save_checkpoint = _guarded_save(trainer.strategy)  # type: ignore[method-assign]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Once the model and the optimizers exist: is there room for one checkpoint?"""
        if not trainer.fast_dev_run and self.check_space:
            self._on_rank_zero(trainer, lambda: self._check_space(trainer, pl_module))

    @staticmethod
    def _prepare(folders: list[Path]) -> None:
        for folder in folders:
            probe = _temporary_path(folder / "probe")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"\0" * 4096)
                probe.unlink()
            except OSError as error:
                raise CheckpointWriteError(
                    error.errno,
                    f"The run cannot write its checkpoints to {folder}: {_explain(error, folder / 'probe')}."
                    " Choose a folder that you can write with --trainer.default_root_dir",
                ) from error
            for path in remove_leftovers(folder):
                log.info("Removed %s, left by an interrupted run.", path)

    @staticmethod
    def _check_space(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        needed = estimate_checkpoint_bytes(pl_module, trainer.optimizers)
        for folder in checkpoint_directories(trainer):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free
            if free < needed:
                raise CheckpointWriteError(
                    errno.ENOSPC,
                    f"One checkpoint of this run takes about {_gigabytes(needed)}, but {folder} has only"
                    f" {_gigabytes(free)} free. Make room or choose another trainer.default_root_dir",
                )

    @staticmethod
    def _on_rank_zero(trainer: pl.Trainer, check: Callable[[], None]) -> None:
        """Runs `check` on rank 0 and raises its error on every rank, so that none waits for the others in vain."""
        failure: CheckpointWriteError | None = None
        if trainer.is_global_zero:
            try:
                check()
            except CheckpointWriteError as error:
                failure = error
        problem = trainer.strategy.broadcast(failure.args if failure else None)
        if problem is not None:
            raise failure or CheckpointWriteError(*problem)


def estimate_checkpoint_bytes(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of one full checkpoint: parameters and buffers, two states a parameter for Adam's family, else one."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            states = 2 if "betas" in group else int(bool(group.get("momentum")))
            total += states * sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
    return total


def _guarded_save(strategy: Any) -> Callable[..., None]:
    """`strategy.save_checkpoint`, made to fail on all ranks when it fails on one, and atomic for sharded folders."""
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        sharded = _writes_folders(strategy) and _is_local_file_protocol(filepath)
        problem: tuple[Any, ...] | None = None
        failure: Exception | None = None
        notes = {"step": checkpoint.get("global_step", ""), "time": time.time_ns()}
        notes["resumable"] = int("optimizer_states" in checkpoint)
        target = Path(strategy.broadcast(str(filepath))) if sharded else filepath
        temporary = Path(strategy.broadcast(str(_temporary_path(target)))) if sharded else filepath
        try:
            original(checkpoint, temporary, storage_options=storage_options)
        except Exception as error:
            failure, problem = error, (getattr(error, "errno", None), str(error))
        if strategy.world_size > 1:
            problem = _first_problem(problem)
        if problem is None and sharded:
            problem = _publish_folder(strategy, temporary, target, notes)
        if problem is None:
            return
        if sharded and strategy.is_global_zero:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(failure, CheckpointWriteError):
            raise failure
        code, text = problem
        raise CheckpointWriteError(
            code or errno.EIO, f"The checkpoint {target} could not be written: {text}"
        ) from failure

    save_checkpoint._fulgurite_original = original  # type: ignore[attr-defined]
    return save_checkpoint


def _writes_folders(strategy: Any) -> bool:
    """Whether the strategy writes a folder with one file a rank, past the checkpoint plugin."""
    return bool(getattr(strategy, "_save_distributed_checkpoint", False)) or (
        getattr(strategy, "_state_dict_type", None) == "sharded"
    )


def _first_problem(problem: Any) -> Any:
    problems: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return next((item for item in problems if item is not None), None)


def _publish_folder(strategy: Any, temporary: Path, target: Path, notes: dict[str, Any]) -> Any:
    """Hashes the folder (each rank its share), writes the manifest and puts the folder in place. Returns a problem."""
    names = sorted(path.name for path in temporary.iterdir())
    problem: tuple[Any, ...] | None = None
    mine: list[tuple[str, str]] = []
    try:
        mine = [(_file_digest(temporary / name), name) for name in names[strategy.global_rank :: strategy.world_size]]
    except OSError as error:
        problem = (error.errno, str(error))
    gathered: list[Any] = [(problem, mine)]
    if strategy.world_size > 1:
        gathered *= strategy.world_size
        torch.distributed.all_gather_object(gathered, (problem, mine))
    problem = next((item[0] for item in gathered if item[0] is not None), None)
    if problem is None and strategy.is_global_zero:
        try:
            entries = sorted((entry for _, part in gathered for entry in part), key=lambda entry: entry[1])
            write_text_atomic(temporary / MANIFEST_NAME, _digest_text(notes, entries))
            _replace_folder(temporary, target)
        except OSError as error:
            problem = (error.errno, _explain(error, target))
    return strategy.broadcast(problem)


def _replace_folder(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`; an old `target` is moved aside first and put back by `remove_leftovers`."""
    aside = _temporary_path(target, "old") if os.path.lexists(target) else None
    if aside is not None:
        os.rename(target, aside)
    os.rename(temporary, target)
    _fsync_directory(target.parent)
    if aside is not None:
        shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()


class RNGState(Callback):
    """Keeps the random generators (Python, NumPy, torch, CUDA) of every rank in each checkpoint and restores them.

    Validation is fenced off: the numbers it draws (also the data loader's worker seed) are taken back afterwards, so
    that a run resumed from a checkpoint at a validation step, which does not repeat the validation, goes on bit for bit.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None
        self._last_batch: dict[str, Any] | None = None
        self._mid_epoch = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds `rng_states`: one entry a rank."""
        own = _get_rng_state() if self._last_batch is None or not trainer.validating else self._last_batch
        states = [own]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, own)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        checkpoint["rng_states"] = {"ranks": states, "mid_epoch": not progress.is_last_batch}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores at once (an epoch's sampler may draw from it) and, mid-epoch, again when training starts."""
        saved = checkpoint.get("rng_states")
        if saved is None or trainer.state.fn != "fit":
            return
        if len(saved["ranks"]) != trainer.world_size:
            warnings.warn(
                f"The checkpoint holds the random states of {len(saved['ranks'])} ranks, this run has"
                f" {trainer.world_size}: they start afresh from the seed instead.",
                stacklevel=2,
            )
            return
        self._states, self._mid_epoch = saved["ranks"], saved["mid_epoch"]
        _set_rng_state(self._states[trainer.global_rank])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undoes what setting up the model and the loaders drew."""
        if self._states is not None and self._mid_epoch:
            _set_rng_state(self._states[trainer.global_rank])
        self._states = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Notes the state to which a validation that follows returns (a few microseconds)."""
        self._last_batch = _get_rng_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes back what validation drew."""
        if self._last_batch is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            _set_rng_state(self._last_batch)


def _get_rng_state() -> dict[str, Any]:
    """State of this process's generators, in types that `torch.load(weights_only=True)` accepts."""
    import numpy

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    import numpy

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
