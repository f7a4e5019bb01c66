"""CheckpointMerge on two gloo ranks: DDP (rank 0 holds the snapshots) and FSDP2 (each rank merges its shards)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fulgurite.callbacks.checkpoint_merging import merge_weights

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("merge_toy", HERE / "toy.py")
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)

pytestmark = pytest.mark.distributed


DDP = [("ddp", {"curve": "1-sqrt"}), ("ddp", {"num_checkpoints": 3, "curve": "cosine", "storage": "disk"})]
SHARDED = [
    ("fsdp", {"curve": "linear"}),
    ("fsdp", {"curve": "1-sqrt", "min_ratio": 0.1}),
    ("fsdp", {"num_checkpoints": 3, "curve": "cosine"}),
    ("tp", {"num_checkpoints": 3, "curve": "cosine"}),
    ("llama", {"curve": "1-sqrt"}),
]
REFUSED = ("fsdp", {"storage": "device"})


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Two ranks run all cases, once; returns a function case -> (reports of both ranks, folder of the case)."""
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(HERE / "distributed_run.py"), str(root), json.dumps([*DDP, *SHARDED, REFUSED])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment, cwd=root, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]

    def reports(case):
        name = f"{case[0]}-{json.dumps(case[1])}"
        return [torch.load(root / f"{name}-report-{rank}.pt", weights_only=False) for rank in (0, 1)], root / name

    return reports


def mean(report, steps, settings):
    """Reference merge in float64 of the weights that the run had at `steps`."""
    c = merge_weights(steps, settings["curve"], min_ratio=settings.get("min_ratio", 0.0)).c
    merged = {}
    for name, newest in report["weights"][steps[-1]].items():
        parts = [report["weights"][step][name].double() for step in steps]
        total = sum(c_j * part for c_j, part in zip(c, parts, strict=True))
        merged[name] = total if newest.is_floating_point() else newest
    return merged


@pytest.mark.parametrize("case", [*DDP, *SHARDED], ids=str)
def test_the_run_is_untouched_merged_right_and_resumed_bit_for_bit(launched, case):
    ranks, root = launched(case)
    kind, settings = case
    steps = list(range(2, 17, 2))[-settings.get("num_checkpoints", 99) :]
    first = ranks[0]
    reference = mean(first, steps, settings)
    for name, tensor in first["merged"].items():
        torch.testing.assert_close(tensor.double(), reference[name].double(), rtol=0, atol=1e-6, msg=name)
    for report in ranks:
        assert report["untouched"], "validation of the merge changed the training run"
        assert report["resumed_run"]
        assert toy.same(report["model"], report["weights"][16])
        assert toy.same(report["merged"], report["merged_resumed"])
        assert report["info"] == report["info_resumed"]
        assert report["history"] == report["history_resumed"] == first["history"]
        assert report["val_loss_merged"] == first["val_loss_merged"]
        assert [entry["step"] for entry in report["history"]] == [5, 10, 15]
    exported = load_file(root / "whole" / "merged" / "model.safetensors")
    prefix = "model." if kind == "llama" else ""  # a Hugging Face directory
    assert all(torch.equal(exported[n.removeprefix(prefix)], tensor) for n, tensor in first["merged"].items())
    assert json.loads((root / "whole" / "merged" / "merge.json").read_text())["positions"] == steps
    if kind == "ddp":
        assert [report["holds"] for report in ranks] == [True, False]
        assert not any("rank00001" in name for name in first["files"])
    else:
        assert all(report["holds"] for report in ranks)
        assert any("rank00001" in name for name in first["files"])  # each rank's shards are in its own files
        assert toy.same(ranks[0]["merged"], ranks[1]["merged"])


@pytest.mark.parametrize("case", DDP, ids=str)
def test_ddp_ranks_validate_the_same_merge_each_on_its_share(launched, case):
    ranks, _ = launched(case)
    settings = case[1]
    steps = list(range(2, 15, 2))[-settings.get("num_checkpoints", 99) :]
    reference = toy.Toy()
    reference.load_state_dict(mean(ranks[0], steps, settings))
    with torch.no_grad():
        loss = float(reference.eval().loss(ranks[0]["val"]))
    assert ranks[0]["history"][-1]["val_loss_merged"] == pytest.approx(loss, rel=1e-5)


def test_a_sharded_model_needs_its_snapshots_on_disk(launched):
    ranks, _ = launched(REFUSED)
    for report in ranks:
        assert "storage='device' cannot be resumed with a sharded model" in report["error"]
