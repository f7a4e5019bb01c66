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
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from .checkpoint_files import (
    MANIFEST_NAME,
    HashingWriter,
    digest_text,
    explain_write_error,
    file_digest,
    find_resumable,
    format_bytes,
    fsync_directory,
    read_digests_if_whole,
    remove_leftovers,
    sidecar_path,
    temporary_path,
    verify_checkpoint,
    write_text_atomic,
)
from .rng_state import RNGState

__all__ = [
    "AtomicCheckpointIO",
    "CheckpointSafety",
    "CheckpointWriteError",
    "RNGState",
    "checkpoint_directories",
    "estimate_checkpoint_bytes",
    "find_resumable",
    "remove_leftovers",
    "verify_checkpoint",
]


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the message says why, what is left and what to do."""


def _save_failure(error: OSError, target: Path, last_good: Path | None) -> CheckpointWriteError:
    with warnings.catch_warnings(action="ignore"):
        last_good = last_good or find_resumable(target.parent)
    last = f"The last good checkpoint is {last_good}." if last_good else "No checkpoint was written before."
    return CheckpointWriteError(
        error.errno or errno.EIO,
        f"The checkpoint {target} could not be written: {explain_write_error(error, target)}. {last}"
        " Make room (or choose another trainer.default_root_dir), then go on with `--resume auto`",
    )


def _notes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a sidecar says about its checkpoint beside the digest."""
    resumable = int("optimizer_states" in checkpoint)
    return {"step": checkpoint.get("global_step", ""), "time": time.time_ns(), "resumable": resumable}


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
        notes = _notes(checkpoint)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(checkpoint, target, notes)
        except OSError as error:
            raise _save_failure(error, target, self.last_good) from error
        self.last_good = target

    def _write(self, checkpoint: dict[str, Any], target: Path, notes: dict[str, Any]) -> None:
        temporary, sidecar = temporary_path(target), sidecar_path(target)
        try:
            with open(temporary, "wb") as file:
                writer = HashingWriter(file)
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
            known = read_digests_if_whole(sidecar)[1].get(target.name, set())
            if known and target.is_file() and not target.is_symlink():
                write_text_atomic(sidecar, digest_text({}, entries + [(digest, target.name) for digest in known]))
            os.replace(temporary, target)
            write_text_atomic(sidecar, digest_text(notes, entries))
            fsync_directory(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads with `weights_only=True` by default; a damaged file is reported by name (`verify_checkpoint`)."""
        weights_only = True if weights_only is None else weights_only
        map_location = "cpu" if map_location is None else map_location
        try:
            return super().load_checkpoint(path, map_location, weights_only)
        except Exception:  # torch and fsspec name a damaged file in many ways
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
            doomed = temporary_path(target, "tmp")
            os.rename(target, doomed)
            shutil.rmtree(doomed)
        else:
            target.unlink(missing_ok=True)
        sidecar_path(target).unlink(missing_ok=True)


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
        if stage != "fit" or _is_fast_dev_run(trainer):
            return
        folders = [Path(trainer.default_root_dir), *checkpoint_directories(trainer)]
        self._on_rank_zero(trainer, lambda: self._prepare(folders))
        if not isinstance(trainer.strategy.save_checkpoint, _GuardedSave):
            trainer.strategy.save_checkpoint = _GuardedSave(trainer.strategy)  # type: ignore[method-assign]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Once the model and the optimizers exist: is there room for one checkpoint?"""
        if self.check_space and not _is_fast_dev_run(trainer):
            self._on_rank_zero(trainer, lambda: self._check_space(trainer, pl_module))

    @staticmethod
    def _prepare(folders: list[Path]) -> None:
        for folder in folders:
            probe = temporary_path(folder / "probe")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"\0" * 4096)
                probe.unlink()
            except OSError as error:
                raise CheckpointWriteError(
                    error.errno,
                    f"The run cannot write to its folder {folder}: {explain_write_error(error, folder / 'probe')}."
                    " Choose a folder that you can write with --trainer.default_root_dir",
                ) from error
            for path in remove_leftovers(folder):
                rank_zero_info(f"Removed {path}, left by an interrupted run.")

    @staticmethod
    def _check_space(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        needed = estimate_checkpoint_bytes(pl_module, trainer.optimizers)
        for folder in checkpoint_directories(trainer):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free
            if free < needed:
                raise CheckpointWriteError(
                    errno.ENOSPC,
                    f"One checkpoint of this run takes about {format_bytes(needed)}, but {folder} has only"
                    f" {format_bytes(free)} free. Make room or choose another trainer.default_root_dir",
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


def _is_fast_dev_run(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))  # `ModelCheckpoint` writes nothing then


def estimate_checkpoint_bytes(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of one full checkpoint: parameters and buffers, two states a parameter for Adam's family, else one."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            states = 2 if "betas" in group else int(bool(group.get("momentum")))
            total += states * sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
    return total


class _GuardedSave:
    """A strategy's `save_checkpoint`: fails on all ranks when it fails on one, and is atomic for sharded folders."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.original = strategy.save_checkpoint
        self.last_good: Path | None = None

    def __call__(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        strategy = self.strategy
        if not _is_local_file_protocol(filepath):
            self.original(checkpoint, filepath, storage_options=storage_options)
            return
        target = Path(strategy.broadcast(str(filepath)))
        if not _writes_folders(strategy):
            self._agree(lambda: self.original(checkpoint, target, storage_options=storage_options), target)
        else:
            notes = _notes(checkpoint)
            temporary = Path(strategy.broadcast(str(temporary_path(target))))
            try:
                self._agree(lambda: self.original(checkpoint, temporary, storage_options=storage_options), target)
                entries = self._agree(lambda: self._digests(temporary), target)
                self._agree(lambda: self._publish(temporary, target, notes, entries), target)
            except CheckpointWriteError:
                if strategy.is_global_zero:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        self.last_good = target

    def _agree(self, action: Callable[[], Any], target: Path) -> list[Any]:
        """Runs `action` on each rank; all ranks get all results, or raise if one of them failed."""
        from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

        failure: BaseException | None = None
        result = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
        outcome = (result, _problem(failure, target, self.last_good) if failure is not None else None)
        outcomes: list[Any] = [outcome]
        if self.strategy.world_size > 1:
            outcomes *= self.strategy.world_size
            torch.distributed.all_gather_object(outcomes, outcome)
        problem = next((item[1] for item in outcomes if item[1] is not None), None)
        if problem is not None:
            raise CheckpointWriteError(*problem) from failure
        return [item[0] for item in outcomes]

    def _digests(self, folder: Path) -> list[tuple[str, str]]:
        """Digests of the files that this rank wrote, so that no other machine need read them; rank 0 does the rest."""
        prefix = f"__{self.strategy.global_rank}_"
        names = [path.name for path in folder.iterdir()]
        mine = [name for name in names if name.startswith(prefix)]
        if self.strategy.is_global_zero:
            mine += [name for name in names if not name.startswith("__")]
        return [(file_digest(folder / name), name) for name in mine]

    def _publish(self, temporary: Path, target: Path, notes: dict[str, Any], entries: list[Any]) -> None:
        if self.strategy.is_global_zero:
            everyone = sorted((entry for part in entries for entry in part), key=lambda entry: entry[1])
            write_text_atomic(temporary / MANIFEST_NAME, digest_text(notes, everyone))
            _replace_folder(temporary, target)


def _problem(failure: BaseException, target: Path, last_good: Path | None) -> tuple[int, str]:
    """(errno, message) of a failed save, for every rank."""
    for inner, _ in getattr(failure, "failures", {}).values():  # of torch's CheckpointException: rank -> error
        failure = inner
        break
    if isinstance(failure, CheckpointWriteError):
        return failure.args[0], failure.args[1]
    if isinstance(failure, OSError):
        return _save_failure(failure, target, last_good).args
    return errno.EIO, f"The checkpoint {target} could not be written: {type(failure).__name__}: {failure}"


def _writes_folders(strategy: Any) -> bool:
    """Whether the strategy writes a folder with one file a rank, past the checkpoint plugin."""
    sharded_state = getattr(strategy, "_state_dict_type", None) == "sharded"
    return bool(getattr(strategy, "_save_distributed_checkpoint", False)) or sharded_state


def _replace_folder(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`; an old `target` is moved aside first and put back by `remove_leftovers`."""
    aside = temporary_path(target, "old") if os.path.lexists(target) else None
    if aside is not None:
        os.rename(target, aside)
    os.rename(temporary, target)
    fsync_directory(target.parent)
    if aside is not None:
        shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
