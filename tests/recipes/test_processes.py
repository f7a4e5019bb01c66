"""The command in processes of its own: several ranks, Ctrl-C, kill -9."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

COMMAND = [shutil.which("lightning", path=str(Path(sys.executable).parent)) or "lightning"]
DDP = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]


def environment():
    taken = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
    return {**taken, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def call(*words, prefix=(), timeout=300):
    done = subprocess.run(
        [*prefix, *COMMAND, *words], capture_output=True, text=True, timeout=timeout, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def only_run(recipe="tiny"):
    (path,) = (path for path in Path("runs", recipe).iterdir())
    return path


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_two_ranks_share_one_run(tiny, launcher):
    """Lightning's own launcher repeats the command for the second rank; torchrun starts both."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = call("run", tiny, *DDP, prefix=torchrun if launcher == "torchrun" else ())
    run = only_run()
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert step_of(run / "checkpoints/resume-step=6.ckpt") == 6
    assert "steps                    6, 384 tokens" in done.stdout  # 2 ranks x 2 sequences x 16 tokens x 6
    assert done.stdout.count("validation loss, live") == 1


@pytest.mark.distributed
def test_two_ranks_resume_from_the_same_checkpoint(tiny):
    call("run", tiny, *DDP, "--trainer.max_steps", "3")
    run = only_run()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    call("run", tiny, "--resume", "auto", "--trainer.max_steps", "6")
    assert only_run() == run
    rng = torch.load(run / "checkpoints/resume-step=6.ckpt", weights_only=True)["rng_states"]["ranks"]
    assert len(rng) == 2


@pytest.mark.distributed
def test_a_mistake_under_torchrun_stops_all_ranks(tiny):
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = subprocess.run(
        [*torchrun, *COMMAND, "run", tiny, "--model.lrr", "3"], capture_output=True, text=True, timeout=300,
        env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "error: tiny has no key model.lrr." in done.stderr
    assert not Path("runs").exists()


@pytest.mark.distributed
def test_the_large_recipe_trains_scaled_down_under_fsdp2(tiny):
    """pretrain/wsm-7b as it is, FSDP2 and all, with small numbers: two steps on two gloo ranks."""
    small = {
        "data.source": "text", "data.tokenizer": "null", "data.vocab_size": 300, "data.sequence_length": 16,
        "data.val_fraction": 0.3, "data.num_workers": 0, "trainer.num_nodes": 1, "trainer.devices": 2,
        "trainer.accelerator": "cpu", "trainer.max_steps": 2, "trainer.accumulate_grad_batches": 2,
        "trainer.val_check_interval": 4, "model.compile": "false", "model.warmup_steps": 0,
        "model.model.vocab_size": 300, "model.model.hidden_size": 32, "model.model.intermediate_size": 64,
        "model.model.num_hidden_layers": 2,
        "model.model.num_attention_heads": 4, "model.model.num_key_value_heads": 2,
        "trainer.callbacks.CheckpointMerge.every_n_steps": 1,
        "trainer.callbacks.ModelCheckpoint.every_n_train_steps": 1,
    }  # fmt: skip
    done = call("run", "pretrain/wsm-7b", *(f"--{key}={value}" for key, value in small.items()))
    run = only_run("pretrain-wsm-7b")
    assert "steps                    2, 256 tokens" in done.stdout
    checkpoint = run / "checkpoints/resume-step=2.ckpt"
    assert len(list(checkpoint.glob("*.distcp"))) == 2
    config = json.loads((run / "merged/config.json").read_text())
    assert (config["num_key_value_heads"], config["vocab_size"]) == (2, 300)
    call("export", str(checkpoint), "exported")
    from safetensors.torch import load_file

    exported = load_file("exported/model.safetensors")
    assert exported["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    assert (Path("exported") / "tokenizer.json").is_file()
    call("run", "pretrain/wsm-7b", "--resume", str(run), "--trainer.max_steps", "3")
    assert json.loads((run / "run.json").read_text())["global_step"] == 3


def started(*words):
    """A run in a process (group) of its own, once it has trained its first steps."""
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(Path("runs").glob("*/*/checkpoints/resume-step=3.ckpt.sha256")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return process


def test_ctrl_c_saves_and_exits_130(tiny):
    process = started(
        "run", tiny, "--trainer.max_steps", "1000000", "--trainer.callbacks.ModelCheckpoint.every_n_train_steps", "3"
    )
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    run = only_run()
    assert process.returncode == 130, out
    (saved,) = (run / "checkpoints").glob("preempted-step=*.ckpt")
    assert f"lightning run {Path(tiny).absolute()} --resume {run}" in out
    assert "Traceback" not in out
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    steps = step_of(saved)
    call("run", tiny, "--resume", "auto", "--trainer.max_steps", str(steps + 3))
    assert only_run() == run
    assert json.loads((run / "run.json").read_text())["global_step"] == steps + 3


def test_kill_9_leaves_a_run_that_resumes(tiny):
    process = started(
        "run", tiny, "--trainer.max_steps", "1000000", "--trainer.callbacks.ModelCheckpoint.save_top_k", "1"
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    run = only_run()
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    newest = max(step_of(path) for path in (run / "checkpoints").glob("*.ckpt"))
    done = call("run", tiny, "--resume", "auto", "--trainer.max_steps", str(newest + 3))
    assert "Resuming from" in done.stderr
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["global_step"]) == ("finished", newest + 3)
    assert [attempt["status"] for attempt in record["attempts"]] == ["killed", "finished"]
