"""Signals: saving at the next optimizer-step boundary that all ranks agree on, and requeueing a SLURM job.

Nothing is ever saved inside a signal handler.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from .boundary import finish_batch, run_last
from .checkpointing import checkpoint_directories

log = logging.getLogger(__name__)

_CODES = {signal.SIGINT: 1, signal.SIGTERM: 2, signal.SIGUSR1: 3}  # ranks agree on the largest


class Preempted(SystemExit):
    """Training stopped at a signal. As a `SystemExit` it ends the process with 128 + signal, or 0 after a requeue."""

    def __init__(self, signum: int, checkpoint: Path | None, requeued: bool, is_global_zero: bool = True) -> None:
        # Lightning's launcher kills the main process when a child ends with an error: only rank 0 reports one
        super().__init__(0 if requeued or not is_global_zero else 128 + signum)
        self.signum = signal.Signals(signum)
        self.checkpoint = checkpoint
        self.requeued = requeued

    def __str__(self) -> str:
        saved = f"saved {self.checkpoint}" if self.checkpoint else "nothing saved"
        return f"stopped by {self.signum.name}, {saved}" + (", requeued" if self.requeued else "")


class PreemptionGuard(Callback):
    """Saves and stops cleanly at SIGUSR1, SIGTERM and Ctrl-C.

    A signal sets a flag. At the end of the batch that completes an optimizer step the ranks agree (a CPU all-reduce of
    one number, started at one boundary and read at the next, so that nothing waits for it), all save
    `preempted-step=N.ckpt` into the run's checkpoint folder, and `Preempted` is raised. It resumes bit for bit. A long
    validation is not waited for: it is broken off, and what is saved is the state from before it. As with every
    checkpoint of Lightning at such a step, resuming does not repeat that validation.

    - SIGUSR1 inside a SLURM job (`#SBATCH --signal=SIGUSR1@90`): rank 0 runs `scontrol requeue`; exit status 0.
    - SIGTERM (`scancel`, preemption by SLURM, which requeues by itself): exit status 143.
    - Ctrl-C: exit status 130. A second Ctrl-C stops at once without saving.

    It replaces Lightning's own handlers, which save inside the handler, perhaps amid an accumulation and on one rank.

    Args:
        directory: where to save; default that of the first `ModelCheckpoint`, or `<default_root_dir>/checkpoints`.
        requeue: whether SIGUSR1 requeues the SLURM job.
    """

    def __init__(self, directory: str | Path | None = None, requeue: bool = True) -> None:
        self.directory = Path(directory) if directory is not None else None
        self.requeue = requeue
        self._phase: Literal["idle", "preparing", "training", "stopping"] = "idle"
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._group: Any = None
        self._pending: tuple[Any, Tensor] | None = None
        self._last_step = -1
        self._at_boundary = False
        self._val_polls = 0.0  # validation batches after which to look at the flag: those that every rank has
        self._before_validation: dict[str, Any] | None = None  # state of the fit loop

    # ---- signals

    def _handle(self, signum: int, frame: Any) -> None:
        """Only sets the flag (and, before training or at a second Ctrl-C, stops)."""
        if self._phase == "idle":
            _call_previous(self._previous.get(signum), signum, frame)
        elif self._phase == "preparing" and signum in (signal.SIGINT, signal.SIGTERM):
            raise Preempted(signum, None, False)
        elif signum == signal.SIGINT and self._received:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends the process whatever it does
            raise Preempted(signum, None, False)
        elif self._phase != "stopping":
            self._received = max(self._received, _CODES.get(signal.Signals(signum), 3))
            again = "; Ctrl-C again stops at once without saving" if signum == signal.SIGINT else ""
            # logging takes locks, which a handler must not
            os.write(2, f"\n{signal.Signals(signum).name}: saving at the end of this optimizer step{again}.\n".encode())

    def _install(self, signums: list[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in signums:
            current = signal.getsignal(signum)
            if current != self._handle:
                self._previous.setdefault(signum, current)
                signal.signal(signum, self._handle)

    def _restore(self) -> None:
        self._phase = "idle"
        if threading.current_thread() is threading.main_thread():
            for signum, previous in self._previous.items():
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, previous if previous is not None else signal.SIG_DFL)

    # ---- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes SIGUSR1 now: its default would kill the process, and Lightning leaves a taken signal alone."""
        if stage != "fit":
            return
        run_last(trainer, self)
        self._phase, self._received, self._pending, self._previous, self._group = "preparing", 0, None, {}, None
        self._install([signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
        if trainer.world_size > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
            # Lightning broadcasts its own SIGTERM flag at every batch and waits for it; ours replaces it
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning has registered its handlers by now: take the signals back."""
        self._install(list(_CODES))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on a signal only sets the flag."""
        self._install(list(_CODES))
        self._phase, self._last_step = "training", trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """The boundary: only when this batch completed an optimizer step."""
        self._at_boundary = trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        if self._at_boundary and (code := self._agree(trainer)):
            finish_batch(trainer, args)
            self._stop(trainer, code)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes where the loop stood before validation, if it may be broken off."""
        self._before_validation = None
        averages = any(isinstance(other, WeightAveraging) for other in trainer.callbacks)  # type: ignore[attr-defined]
        if self._phase != "training" or trainer.sanity_checking or not self._at_boundary or averages:
            return  # averaging callbacks have put other weights into the module by now
        batches = trainer.num_val_batches
        polls = torch.tensor(float(sum(batches) if isinstance(batches, list) else batches))
        if self._group is not None:
            dist.all_reduce(polls, op=dist.ReduceOp.MIN, group=self._group)
        self._val_polls = float(polls) if torch.isfinite(polls) else 0.0
        state = copy.deepcopy(trainer.fit_loop.state_dict())
        for count in ("total", "current"):  # as at the end of the batch: not completed yet
            state["epoch_loop.batch_progress"][count]["completed"] -= 1
        self._before_validation = state

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        """A boundary too, as nothing changes during validation."""
        if self._before_validation is not None and self._val_polls > 0:
            self._val_polls -= 1
            if code := self._agree(trainer):
                self._stop(trainer, code)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on the loop's own state is right again."""
        self._before_validation = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Amid validation: the loop's state from before it."""
        if self._before_validation is not None:
            checkpoint["loops"]["fit_loop"] = self._before_validation

    def _stop(self, trainer: pl.Trainer, code: int) -> None:
        """Saves, requeues if it is time, and raises; at the last step of the run it does nothing."""
        if 0 <= trainer.max_steps <= trainer.global_step:
            return
        self._phase = "stopping"
        signum = next(number for number, value in _CODES.items() if value == code)
        folder = self.directory or checkpoint_directories(trainer)[0]
        path = folder / f"preempted-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        for old in folder.glob("preempted-step=*.ckpt"):
            if old != path:
                trainer.strategy.remove_checkpoint(old)
        requeued = False
        if signum == signal.SIGUSR1 and self.requeue and "SLURM_JOB_ID" in os.environ:
            requeued = trainer.strategy.broadcast(_requeue() if trainer.is_global_zero else False)
        raise Preempted(signum, path, requeued, trainer.is_global_zero)

    def _agree(self, trainer: pl.Trainer) -> int:
        """The largest code that any rank had at the previous boundary (one process: at this one)."""
        if self._group is None:
            return self._received
        code = 0
        if self._pending is not None:
            work, tensor = self._pending
            work.wait()
            code = int(tensor)
        tensor = torch.tensor([self._received])
        self._pending = (dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True), tensor)
        return code

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads the last agreement, so that no message is left in flight."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the signals back."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keeps swallowing signals after a requeue (SLURM sends SIGTERM then); otherwise gives them back."""
        if not (isinstance(exception, Preempted) and exception.requeued):
            self._restore()


def _call_previous(previous: Any, signum: int, frame: Any) -> None:
    if callable(previous):
        previous(signum, frame)
    elif previous != signal.SIG_IGN:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def slurm_job_id() -> str:
    """This job's id as `scontrol` wants it: `<array job>_<task>` for a task of an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def _requeue() -> bool:
    """Puts the job back into the queue, or leaves that to the script of `lightning submit`: whether it runs again."""
    job = slurm_job_id()
    if not re.fullmatch(r"[0-9_+]+", job):
        log.error("SLURM job id %r is not a number: the job was not requeued.", job)
        return False
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        problem = (done.stderr or done.stdout).strip()
        # scontrol repeats a request whose answer was late, and is told then that the job is pending already
        if done.returncode == 0 or "pending" in problem.lower():
            rank_zero_info(f"Requeued SLURM job {job}.")
            return True
    if marker := os.environ.get("FULGURITE_REQUEUE_FILE"):  # scontrol is seldom inside a container
        with contextlib.suppress(OSError):
            Path(marker).touch()
            log.info("`scontrol requeue %s` failed (%s): the job's script does it.", job, problem)
            return True
    log.error(
        "`scontrol requeue %s` failed: %s. The checkpoint is saved; submit again with `--resume auto` to go on.",
        job,
        problem,
    )
    return False
