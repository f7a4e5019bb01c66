"""How a preempted run gets its SLURM job back into the queue when scontrol is missing, or answers late."""

import pytest

from fulgurite.callbacks import preemption


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Puts the only scontrol that there is on the PATH; None means that there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("SLURM_ARRAY_JOB_ID", "FULGURITE_REQUEUE_FILE"):
        monkeypatch.delenv(name, raising=False)

    def make(script):
        if script is not None:
            (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "scontrol").chmod(0o755)

    return make


@pytest.mark.parametrize("script", [None, "echo 'Unable to contact slurm controller' >&2; exit 1"])
def test_the_jobs_script_is_asked_where_scontrol_does_not_work(scontrol, script, tmp_path, monkeypatch):
    scontrol(script)
    monkeypatch.setenv("FULGURITE_REQUEUE_FILE", str(tmp_path / ".requeue"))
    assert preemption._requeue()
    assert (tmp_path / ".requeue").exists()


@pytest.mark.parametrize("script", [None, "echo 'Requested operation is presently disabled' >&2; exit 1"])
def test_without_such_a_script_the_run_is_not_requeued(scontrol, script):
    scontrol(script)
    assert not preemption._requeue()


def test_a_repeated_request_counts_as_granted(scontrol, tmp_path, monkeypatch):
    """What scontrol says when the first answer came late, seen on a busy cluster."""
    scontrol("echo 'Job is pending execution for job 4711' >&2; exit 1")
    monkeypatch.setenv("FULGURITE_REQUEUE_FILE", str(tmp_path / ".requeue"))
    assert preemption._requeue()
    assert not (tmp_path / ".requeue").exists()
