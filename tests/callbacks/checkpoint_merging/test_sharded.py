"""Two ranks with DTensors: streaming merges shard by shard, and the files that they leave merge off-line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fulgurite.callbacks.checkpoint_merging import merge_checkpoints, merge_state_dicts, merge_weights
from fulgurite.callbacks.checkpoint_merging.io import open_checkpoint

from .sharded_ranks import STEPS, full_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints that two ranks wrote; the ranks check their streaming merges themselves."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("sharded_ranks.py")
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, output
    return folder


@pytest.mark.distributed
def test_shards_of_two_ranks_merge_into_whole_tensors(folder, tmp_path):
    paths = [folder / f"step={step}.ckpt" for step in STEPS]
    assert len(list(paths[0].glob("*.distcp"))) == 2
    result = merge_checkpoints(paths, tmp_path / "merged.safetensors", curve="1-sqrt")
    merged = load_file(result.output)
    expected = merge_state_dicts([full_state(step) for step in STEPS], merge_weights(STEPS, "1-sqrt").c)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.distributed
def test_checkpoints_of_other_numbers_of_ranks_merge(folder, tmp_path):
    """A run that was resumed on one rank: the same tensors, cut otherwise."""
    alone = tmp_path / "step=40.ckpt"
    dcp.save({"state_dict": full_state(40)}, checkpoint_id=alone)
    paths = [*(folder / f"step={step}.ckpt" for step in STEPS), alone]
    merged = load_file(merge_checkpoints(paths, tmp_path / "merged.safetensors", curve="cosine").output)
    expected = merge_state_dicts([full_state(s) for s in (*STEPS, 40)], merge_weights(4, "cosine").c)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.distributed
def test_reading_a_sharded_tensor_back(folder):
    checkpoint = open_checkpoint(folder / "step=20.ckpt")
    for name, tensor in full_state(20).items():
        assert torch.equal(checkpoint.load(name), tensor)
    assert {name: len(entry.segments) for name, entry in checkpoint.tensors.items()} == {
        "rows": 2, "columns": 2, "vector": 2, "whole": 1,
    }  # fmt: skip
    checkpoint.close()
