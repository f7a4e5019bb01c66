"""Two gloo ranks, DDP and FSDP2, against one process: same initial weights, gradients, losses; checkpoints resume.

Starting two ranks costs more than all that they then compute, so each strategy's runs share one start.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

pytestmark = pytest.mark.distributed
STILL = {"learning_rate": 1e-12, "weight_decay": 0.0, "keep_gradients": True}
STEPS = {"batches": 10, "clip": 0.5, "weight_decay": 0.1}
RESUME = {"batches": 6, "schedule": "inverse_sqrt", "warmup_steps": 2, "clip": 1.0, "activation_checkpointing": True}
JOBS = {
    "accumulate 1": {"batches": 8, "accumulate": 1, **STILL},
    "accumulate 3": {"batches": 8, "accumulate": 3, **STILL},  # the last window of the epoch is short
    "uniform": {"batches": 8, "accumulate": 3, "uniform": True, **STILL},
    "bf16-mixed": {"batches": 4, "precision": "bf16-mixed", **STILL},
    "bf16-true": {"batches": 4, "precision": "bf16-true", **STILL},
    "llama": {**STEPS, "model": tiny.LLAMA, "export": "llama"},
    "qwen-tied": {**STEPS, "model": tiny.QWEN, "export": "qwen-tied"},
    "directory": {**STILL, "batches": 2, "model": "base"},
    "whole": {**RESUME, "max_epochs": 3},
    "first": {**RESUME, "max_epochs": 1, "save": "saved.ckpt"},
    "rest": {**RESUME, "max_epochs": 3, "resume": "saved.ckpt"},
}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def runs(request, tmp_path_factory):
    """(strategy, folder, {job: what rank 0 recorded}) of all jobs, run once by two processes."""
    folder = tmp_path_factory.mktemp(request.param)
    here = os.getcwd()
    os.chdir(folder)
    tiny.train(model=tiny.QWEN, batches=2, export="base")
    os.chdir(here)
    jobs = {name: {**job, "strategy": request.param, "devices": 2} for name, job in JOBS.items()}
    if request.param == "fsdp":
        jobs["compiled"] = {**jobs["llama"], "compile": True, "activation_checkpointing": True, "export": None}
        jobs["refused"] = {"batches": 2, "strategy": "fsdp-tp", "devices": 2}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, str(Path(tiny.__file__)), "jobs.json", "results.pt"]
            ranks.append(
                subprocess.Popen(
                    command,
                    env={**environment, "LOCAL_RANK": str(rank)},
                    cwd=folder,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [rank.wait(timeout=500) for rank in ranks]
    assert codes == [0, 0], "".join(log.read_text()[-4000:] for log in logs)
    return request.param, folder, torch.load(folder / "results.pt", weights_only=True)


def losses(result):
    return [row["train_loss"] for row in result["rows"] if "train_loss" in row]


def assert_close(actual, expected, tolerance):
    """Largest difference of any tensor, relative to the largest number of all."""
    assert actual.keys() == expected.keys()
    scale = max(tensor.abs().max() for tensor in expected.values())
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("job", ["accumulate 1", "accumulate 3", "uniform"])
def test_gradients_are_those_of_the_global_batch(runs, job):
    """One process accumulates, in one window, what two ranks see in theirs."""
    two = runs[2][job]
    one = tiny.train(**{**JOBS[job], "accumulate": 2 * JOBS[job]["accumulate"]})
    assert len(two["gradients"]) == len(one["gradients"]) == -(-4 // JOBS[job]["accumulate"])
    for actual, expected in zip(two["gradients"], one["gradients"], strict=True):
        assert_close(actual, expected, 1e-6)
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    assert two["tokens_seen"] == one["tokens_seen"]
    validation = [next(row["val_loss"] for row in result["rows"] if "val_loss" in row) for result in (one, two)]
    assert validation[0] == pytest.approx(validation[1], rel=1e-6)


@pytest.mark.parametrize("job", ["bf16-mixed", "bf16-true"])
def test_half_precision_agrees_with_one_process_in_float32(runs, job):
    two = runs[2][job]
    one = tiny.train(**{**JOBS[job], "accumulate": 2, "precision": "32-true"})
    for actual, expected in zip(two["gradients"], one["gradients"], strict=True):
        assert_close(actual, expected, 0.05)
    assert losses(two) == pytest.approx(losses(one), rel=5e-3)


@pytest.mark.parametrize("job", ["llama", "qwen-tied"])
def test_training_equals_one_process_and_exports(runs, job, tmp_path):
    """Five clipped AdamW steps at a real learning rate: losses, norms and weights to float32 rounding."""
    _, folder, results = runs
    two = results[job]
    one = tiny.train(**{**JOBS[job], "accumulate": 2, "export": str(tmp_path / "hf")})
    assert losses(two) == pytest.approx(losses(one), rel=2e-6)
    norms = [[row["grad_norm"] for row in result["rows"] if "grad_norm" in row] for result in (two, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(two["weights"], one["weights"], 1e-4)  # AdamW amplifies rounding where a gradient is near 0

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / job, dtype="auto")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, two["weights"]["model." + name]), name
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == (job == "qwen-tied")


def test_resume_is_bit_for_bit(runs):
    strategy, folder, results = runs
    for name, weight in results["whole"]["weights"].items():
        assert torch.equal(weight, results["rest"]["weights"][name]), name
    assert losses(results["whole"])[3:] == losses(results["rest"])
    assert results["whole"]["tokens_seen"] == results["rest"]["tokens_seen"]
    assert (folder / "saved.ckpt").is_dir() == (strategy == "fsdp")  # a distributed checkpoint


def test_a_directory_gives_every_rank_its_weights(runs, monkeypatch):
    """Under FSDP2 they are sharded while they are read."""
    _, folder, results = runs
    monkeypatch.chdir(folder)
    one = tiny.train(**{**JOBS["directory"], "accumulate": 2})
    assert losses(results["directory"]) == pytest.approx(losses(one), rel=1e-6)
    assert_close(results["directory"]["weights"], one["weights"], 1e-9)


def test_compiled_and_recomputed_layers_train_alike_when_sharded(runs):
    if runs[0] == "fsdp":
        assert losses(runs[2]["compiled"]) == pytest.approx(losses(runs[2]["llama"]), rel=1e-5)


def test_tensor_parallelism_is_refused_with_the_mend(runs):
    if runs[0] == "fsdp":
        message = "ValueError: tensor_parallel_size=2 is not supported: set ModelParallelStrategy(data_parallel_size="
        assert runs[2]["refused"].startswith(message)
