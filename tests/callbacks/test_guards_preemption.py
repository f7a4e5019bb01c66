"""Signals: saved at an optimizer step that all ranks agree on, resumed bit for bit, with the right exit status."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fulgurite.callbacks.checkpointing import find_resumable, verify_checkpoint
from fulgurite.callbacks.guards import Preempted, PreemptionGuard, slurm_job_id

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("tiny_run", HERE / "tiny_run.py")
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

STEPS = ("--max-steps", "14", "--every", "100")


def preempted(root):
    """The one checkpoint and its step."""
    (path,) = (root / "checkpoints").glob("*.ckpt")
    verify_checkpoint(path)
    return path, int(path.stem.removeprefix("preempted-step="))


def final(root):
    return torch.load(root / "final.pt", weights_only=True)


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Final weights of unbroken runs, by (ranks, accumulate)."""
    cache = {}

    def get(ranks=1, accumulate=1):
        if (ranks, accumulate) not in cache:
            root = tmp_path_factory.mktemp("whole")
            tiny.launch(root, *STEPS, "--accumulate", accumulate, ranks=ranks)
            cache[ranks, accumulate] = final(root)
        return cache[ranks, accumulate]

    return get


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A stand-in that writes down how it was called."""

    def install(script="exit 0"):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        (folder / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return tmp_path / "calls"

    return install


@pytest.mark.parametrize(
    ("signum", "accumulate", "status"), [(signal.SIGTERM, 1, 143), (signal.SIGINT, 3, 130), (signal.SIGUSR1, 1, 138)]
)
def test_saves_at_the_boundary_and_resumes_bit_for_bit(tmp_path, whole, signum, accumulate, status):
    arguments = (*STEPS, "--accumulate", accumulate)
    run = tiny.Ranks(tmp_path, *arguments, "--sleep", "0.05")
    run.wait_for("batch 4]")
    run.signal(signum)
    assert run.join() == [status]
    path, step = preempted(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == step * accumulate
    assert f"{signum.name}: saving at the end of this optimizer step" in run.output
    tiny.launch(tmp_path, *arguments, "--resume")
    assert json.loads((tmp_path / "result.json").read_text())["resumed"] == str(path)
    assert equal(final(tmp_path), whole(1, accumulate))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_long_validation_is_broken_off(tmp_path, whole, ranks):
    arguments = (*STEPS, "--val-every", "4")
    run = tiny.Ranks(tmp_path, *arguments, "--val-sleep", "0.5", ranks=ranks)
    run.wait_for("validating")
    run.signal(signal.SIGTERM)
    started = time.monotonic()
    assert run.join() == [143, 0][:ranks]
    assert time.monotonic() - started < 1.9, "4 batches take 2 s"
    path, step = preempted(tmp_path)
    progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert (step, progress["ready"], progress["completed"]) == (4, 4, 3)  # as saved at the end of batch 4
    tiny.launch(tmp_path, *arguments, "--resume", ranks=ranks)
    assert equal(final(tmp_path), whole(ranks))


def test_a_validation_amid_an_accumulation_is_not(tmp_path, whole):
    arguments = (*STEPS, "--val-every", "4", "--accumulate", "3")
    run = tiny.Ranks(tmp_path, *arguments, "--val-sleep", "0.1")
    run.wait_for("validating")  # after batch 4: step 2 needs batches 5 and 6
    run.signal(signal.SIGTERM)
    assert run.join() == [143]
    assert preempted(tmp_path)[1] == 2
    tiny.launch(tmp_path, *arguments, "--resume")
    assert equal(final(tmp_path), whole(1, 3))


def test_repeated_preemptions_keep_one_checkpoint_and_end_at_the_same_weights(tmp_path, whole):
    for attempt in range(3):
        run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "0.05", *(["--resume"] if attempt else []))
        run.wait_for("[rank 0")
        run.signal(signal.SIGTERM)
        assert run.join() == [143]
        preempted(tmp_path)
    tiny.launch(tmp_path, *STEPS, "--resume")
    assert equal(final(tmp_path), whole())


@pytest.mark.distributed
def test_ranks_stop_at_the_same_step_when_one_gets_the_signal(tmp_path, whole):
    run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "0.05", "--accumulate", "2", ranks=2)
    run.wait_for("[rank 1 step 2")
    run.signal(signal.SIGTERM, rank=1)
    assert run.join() == [143, 0]
    _, step = preempted(tmp_path)
    assert step < 14
    states = torch.load(preempted(tmp_path)[0], weights_only=True)["rng_states"]["ranks"]
    assert not torch.equal(states[0]["torch"], states[1]["torch"])
    tiny.launch(tmp_path, *STEPS, "--resume", "--accumulate", "2", ranks=2)
    assert equal(final(tmp_path), whole(2, 2))


@pytest.mark.distributed
def test_sharded_run_saves_its_folder(tmp_path):
    arguments = (*STEPS, "--strategy", "fsdp2")
    tiny.launch(tmp_path / "whole", *arguments, ranks=2)
    run = tiny.Ranks(tmp_path / "broken", *arguments, "--sleep", "0.05", ranks=2)
    run.wait_for("[rank 1 step 2")
    run.signal(signal.SIGUSR1)
    assert run.join() == [138, 0]
    path, _ = preempted(tmp_path / "broken")
    assert path.is_dir()
    tiny.launch(tmp_path / "broken", *arguments, "--resume", ranks=2)
    assert equal(final(tmp_path / "broken"), final(tmp_path / "whole"))


def test_signals_before_training(tmp_path):
    """SIGUSR1, whose default would kill, waits for the first boundary; SIGTERM and Ctrl-C stop at once."""
    run = tiny.Ranks(tmp_path / "usr1", *STEPS, "--setup-sleep", "0.5")
    run.wait_for("setting up")
    run.signal(signal.SIGUSR1)
    assert run.join() == [138]
    assert preempted(tmp_path / "usr1")[1] == 1
    for signum, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        run = tiny.Ranks(tmp_path / signum.name, *STEPS, "--setup-sleep", "30")
        run.wait_for("setting up")
        run.signal(signum)
        assert run.join(timeout=10) == [status]
        assert find_resumable(tmp_path / signum.name / "checkpoints") is None


def test_second_ctrl_c_stops_at_once_without_saving(tmp_path):
    run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "20")
    run.wait_for("training from step")
    time.sleep(0.3)
    run.signal(signal.SIGINT)
    run.wait_for("Ctrl-C again stops at once without saving")
    started = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.join() == [130]
    assert time.monotonic() - started < 5
    assert find_resumable(tmp_path / "checkpoints") is None


# --------------------------------------------------------------------------------------------------------------- SLURM

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_JOB_NAME": "tiny",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}


@pytest.mark.parametrize(
    ("extra", "job"), [({}, "4711"), ({"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}, "4700_11")]
)
def test_slurm_job_requeues_itself(tmp_path, whole, scontrol, extra, job):
    # the real scontrol makes SLURM send SIGTERM to the job's processes: so does this one
    calls = scontrol("kill -TERM $PPID; exit 0")
    run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "0.05", environment={**JOB, **extra})
    run.wait_for("step 2")
    run.signal(signal.SIGUSR1)
    assert run.join() == [0]
    assert calls.read_text() == f"requeue {job}\n"
    preempted(tmp_path)
    assert not list(tmp_path.rglob("hpc_ckpt*")), "Lightning's own handler saved too"
    tiny.launch(tmp_path, *STEPS, "--resume", environment={**JOB, **extra})
    assert equal(final(tmp_path), whole())


def test_failed_requeue_says_what_to_do(tmp_path, scontrol):
    scontrol("echo 'Requested operation is presently disabled' >&2; exit 1")
    run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "0.05", environment=JOB)
    run.wait_for("step 2")
    run.signal(signal.SIGUSR1)
    assert run.join() == [138]
    assert "`scontrol requeue 4711` failed: Requested operation is presently disabled." in run.output
    assert "submit again with `--resume auto`" in run.output
    preempted(tmp_path)


def test_sigterm_inside_a_job_does_not_requeue(tmp_path, scontrol):
    calls = scontrol()
    run = tiny.Ranks(tmp_path, *STEPS, "--sleep", "0.05", environment=JOB)
    run.wait_for("step 2")
    run.signal(signal.SIGTERM)
    assert run.join() == [143]
    assert not calls.exists()


def test_job_id(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert slurm_job_id() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm_job_id() == "7_3"


# ---------------------------------------------------------------------------------------------------------- in general


def test_handlers_are_given_back(tmp_path):
    reached = []

    def mine(signum, frame):
        reached.append(signum)

    signums = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {signum: signal.signal(signum, mine) for signum in signums}
    try:
        trainer = tiny.make_trainer(tmp_path, [PreemptionGuard()], max_steps=2)
        trainer.fit(tiny.TinyModule(), datamodule=tiny.TinyData())
        assert [signal.getsignal(signum) for signum in signums] == [mine] * 3

        class Interrupts(tiny.TinyModule):
            def training_step(self, batch, batch_idx):
                signal.raise_signal(signal.SIGTERM)
                return super().training_step(batch, batch_idx)

        trainer = tiny.make_trainer(tmp_path, [PreemptionGuard()], max_steps=2)
        with pytest.raises(Preempted) as caught:
            trainer.fit(Interrupts(), datamodule=tiny.TinyData())
        assert (caught.value.code, caught.value.signum, caught.value.requeued) == (143, signal.SIGTERM, False)
        assert caught.value.checkpoint == tmp_path / "checkpoints" / "preempted-step=1.ckpt"
        reached.clear()
        for signum in signums:  # Lightning may have put our handler back: it passes everything on
            signal.raise_signal(signum)
        assert reached == list(signums)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_a_signal_at_the_last_step_changes_nothing(tmp_path):
    class AtTheEnd(tiny.TinyModule):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                signal.raise_signal(signal.SIGTERM)

    trainer = tiny.make_trainer(tmp_path, [PreemptionGuard()], max_steps=4)
    trainer.fit(AtTheEnd(), datamodule=tiny.TinyData())
    assert trainer.global_step == 4
    assert trainer.state.status == "finished"


@pytest.mark.distributed
@pytest.mark.slow
def test_ctrl_c_with_lightnings_own_launcher(tmp_path):
    """`python script.py` starts rank 1 itself and kills everything when a child reports an error: none may."""
    command = [sys.executable, str(HERE / "tiny_run.py"), str(tmp_path), *STEPS, "--sleep", "0.2", "--devices", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    for line in process.stderr:
        if "[rank 1 step 2" in line:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            break
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert preempted(tmp_path)[1] >= 3
    deadline = time.monotonic() + 20
    while (left := _group_exists(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _group_exists(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
