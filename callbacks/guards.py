"""Guards: a non-finite loss never reaches the weights, and a signal never costs more than one optimizer step.

`NonFiniteGuard` looks at the loss and the gradients once per optimizer step, before the update, and drops the update or
stops. `PreemptionGuard` takes SIGUSR1 (SLURM's warning before a time limit), SIGTERM and Ctrl-C, and saves at the next
optimizer-step boundary that all ranks agree on; it never saves inside a signal handler.
"""

from __future__ import annotations

import contextlib
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
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from .checkpointing import checkpoint_directories
from .ordering import run_last

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or a gradient was NaN or infinite; the message names step, samples and the checkpoint to go on from."""


class NonFiniteGuard(Callback):
    """Keeps NaN and infinity out of the weights.

    Every micro-batch loss and, before each update, the norm of the gradients are checked. All ranks agree (one tiny
    all-reduce). A bad update is dropped exactly: the gradients are discarded before the optimizer sees them, so neither
    weights nor optimizer states change; the step still counts in `global_step`, the schedule and the data position.

    The check costs one device synchronisation an optimizer step. It cannot lag behind, because an update that has been
    applied cannot be taken back; the flags of all micro-batches of the step are collected without synchronising.

    Args:
        action: "stop" saves `nonfinite-step=N.ckpt`, which holds the weights from before the bad update and is
            positioned behind the bad batch, and raises `NonFiniteError`: resuming it equals having skipped. "skip"
            goes on.
        max_consecutive_skips: with "skip", this many dropped updates in a row stop the run after all.
        check_gradients: also check the gradients (a backward pass in bf16 may overflow under a finite loss).
            Ignored with fp16 loss scaling, where the scaler meets infinite gradients on purpose.

    Raises:
        NonFiniteError: names the step, and rank, batch and samples of each bad loss.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", max_consecutive_skips: int = 10, check_gradients: bool = True
    ) -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f'NonFiniteGuard(action={action!r}): choose "stop" or "skip".')
        if max_consecutive_skips < 1:
            raise ValueError(f"NonFiniteGuard(max_consecutive_skips={max_consecutive_skips}): must be at least 1.")
        self.action = action
        self.max_consecutive_skips = max_consecutive_skips
        self.check_gradients = check_gradients
        self.num_skipped = 0
        self._consecutive = 0
        self._window: list[tuple[int, Any, Tensor]] = []  # (batch index, sample ids, finite flag on the device)
        self._batch: tuple[int, Any] = (0, None)
        self._problem: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes its place behind the other callbacks."""
        if stage == "fit":
            run_last(trainer, self)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes whose loss comes next."""
        self._batch = (batch_idx, batch.get("sample_ids") if isinstance(batch, dict) else None)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Keeps the micro-batch's flag on its device."""
        self._window.append((*self._batch, torch.isfinite(loss.detach()).all()))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The one check of this step; discards the gradients when it fails."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        flags = [flag.float() for _, _, flag in self._window]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self.check_gradients and scaler is None:
            flags.append(_gradients_finite(parameters).to(pl_module.device))
        if not flags:
            return
        finite = torch.stack(flags).min()
        if trainer.world_size > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if finite.item() == 1.0:
            self._window.clear()
            self._consecutive = 0
            return
        for parameter in parameters:
            parameter.grad = None  # optimizers pass over such parameters: no decay, no momentum, no step count
        self._problem = self._describe(trainer)
        self._window.clear()
        self.num_skipped += 1
        self._consecutive += 1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """At the boundary, where the loop's counters are consistent: reports, and saves and raises if it is time."""
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if self.action == "skip" and self._consecutive < self.max_consecutive_skips:
            pl_module.log("skipped_updates", float(self.num_skipped))
            if trainer.is_global_zero:
                log.warning("%s This update was dropped (%d so far).", problem, self.num_skipped)
            return
        _finish_batch(trainer, args)
        path = checkpoint_directories(trainer)[0] / f"nonfinite-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        many = f" {self._consecutive} updates in a row were dropped." if self.action == "skip" else ""
        raise NonFiniteError(
            f"{problem}{many} The weights from before this update are in {path}; `--resume auto` goes on from there,"
            " behind the bad batch. If it happens again, lower the learning rate or clip the gradients; to drop such"
            ' updates and go on, use NonFiniteGuard(action="skip").'
        )

    def _describe(self, trainer: pl.Trainer) -> str:
        bad = []
        for batch_idx, sample_ids, flag in self._window:
            if not flag.item():
                samples = sample_ids.flatten().tolist() if isinstance(sample_ids, Tensor) else sample_ids
                named = f", samples {samples}" if samples is not None else ""
                bad.append(f"rank {trainer.global_rank}, batch {batch_idx}{named}")
        everyone: list[Any] = [bad]
        if trainer.world_size > 1:
            everyone *= trainer.world_size
            dist.all_gather_object(everyone, bad)
        where = "; ".join(line for part in everyone for line in part)
        step = trainer.global_step + 1
        if where:
            return f"The loss of optimizer step {step} is not finite ({where})."
        batches = sorted({batch_idx for batch_idx, _, _ in self._window})
        ids = [value for _, ids, _ in self._window if isinstance(ids, Tensor) for value in ids.flatten().tolist()]
        return (
            f"The loss of optimizer step {step} is finite but its gradients are not (batch {batches}, samples {ids})."
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of dropped updates."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self.num_skipped = state_dict["num_skipped"]


def _gradients_finite(parameters: list[Tensor]) -> Tensor:
    """1.0 if every gradient (this rank's shard of it) is finite, on the device, without synchronising."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    local = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in local if gradient.numel()]
    if not local:
        return torch.ones(())
    norms = torch._foreach_norm(local, ord=float("inf"))  # the largest magnitude cannot overflow, a 2-norm can
    return torch.isfinite(torch.stack([norm.float().to(norms[0].device) for norm in norms])).all().float()


# ----------------------------------------------------------------------------------------------------------- preemption

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
    `preempted-step=N.ckpt` into the run's checkpoint folder, and `Preempted` is raised. It resumes bit for bit.

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
        self._phase, self._received, self._pending, self._previous = "preparing", 0, None, {}
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
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        code = self._agree(trainer)
        if code == 0 or 0 <= trainer.max_steps <= trainer.global_step:
            return
        self._phase = "stopping"
        _finish_batch(trainer, args)
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


def _finish_batch(trainer: pl.Trainer, hook_arguments: tuple[Any, ...]) -> None:
    """What Lightning still does for this batch after the callbacks: the module's own hook, and the step's metrics."""
    call._call_lightning_module_hook(trainer, "on_train_batch_end", *hook_arguments)
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


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
