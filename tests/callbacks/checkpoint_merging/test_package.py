"""The package's names, and its parts that read and hash bytes."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fulgurite.callbacks.checkpoint_merging as package
from fulgurite.callbacks.checkpoint_merging import merge_state_dicts, merge_weights
from fulgurite.callbacks.checkpoint_merging.artifacts import parse_size
from fulgurite.callbacks.checkpoint_merging.byte_ranges import OrderedDigest
from fulgurite.callbacks.checkpoint_merging.io import open_checkpoint
from fulgurite.callbacks.checkpoint_merging.numerics import weighted_sum
from fulgurite.callbacks.checkpoint_merging.offline import merge_into
from fulgurite.callbacks.checkpoint_merging.safetensors_files import write_safetensors

from .checkpoints import STEPS, write


def test_the_maths_needs_neither_torch_nor_lightning():
    code = """
import sys
for name in ("torch", "lightning", "matplotlib", "safetensors", "mlflow", "transformers"):
    sys.modules[name] = None  # importing it fails
from fulgurite.callbacks.checkpoint_merging import decay_coefficients, merge_weights
print(merge_weights(4, "cosine").c.sum(), decay_coefficients(3).tolist()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[0] == "1.0", done.stderr


def test_every_public_name_is_there():
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'merge_everything'"):
        _ = package.merge_everything


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2], [1], [3, 1, 0], []])
def test_digest_of_pieces_gaps_and_disorder_is_the_files(order, tmp_path):
    content = np.random.default_rng(0).bytes(4000)
    path = tmp_path / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    digest = OrderedDigest(descriptor)
    for piece in order:
        digest.feed(1000 * piece, memoryview(content)[1000 * piece : 1000 * piece + 800])
    assert digest.hexdigest(4000) == hashlib.sha256(content).hexdigest()
    os.close(descriptor)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def test_our_safetensors_are_everyones(tmp_path):
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype) if dtype != torch.bool else torch.tensor([True, False])
        for dtype in DTYPES
    } | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "strided": torch.arange(12.0).reshape(3, 4).t()}
    write_safetensors(tmp_path / "ours.safetensors", tensors)
    loaded = load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].to(torch.complex64), tensor.to(torch.complex64))
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [p.name for p in tmp_path.iterdir()] == ["ours.safetensors"]
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "theirs.safetensors")
    checkpoint = open_checkpoint(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name).to(torch.complex64), tensor.to(torch.complex64))
    checkpoint.close()


def test_strided_and_overlapping_tensors_of_torch_files_are_read_right(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "t": base.t(),
        "rows": base[1:3],
        "column": base[:, 2],
        "base": base,
        "expanded": torch.ones(1, 3).expand(2, 3),
    }
    torch.save(state, tmp_path / "1.pt")
    checkpoint = open_checkpoint(tmp_path / "1.pt")
    assert checkpoint.aliases == {}
    for name, tensor in state.items():
        assert torch.equal(checkpoint.load(name), tensor), name
    checkpoint.close()


def test_complex_parameters_are_averaged():
    values = [torch.tensor([1 + 2j, -3j]), torch.tensor([3 + 0j, 1 + 1j])]
    assert torch.equal(weighted_sum(values, [0.5, 0.5], torch.complex64), torch.tensor([2 + 1j, 0.5 - 1j]))


@pytest.mark.parametrize("kind", ["lightning", "safetensors"])
def test_merge_into_a_module_keeps_its_ties(kind, tmp_path):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(6, 5), torch.nn.Linear(5, 6, bias=False)
            self.lm_head.weight = self.embed.weight
            self.register_buffer("count", torch.tensor(0))

    states = []
    for j in range(3):
        module = Module()
        module.count += j
        states.append(module.state_dict())
    paths = write(kind, tmp_path, states, STEPS[:3])
    opened = [open_checkpoint(path) for path in paths]
    c = merge_weights(3, "1-sqrt").c.tolist()
    module = Module()
    merge_into(opened, c, module.state_dict())
    expected = merge_state_dicts(states, c)
    assert module.lm_head.weight is module.embed.weight
    assert torch.equal(module.embed.weight, expected["embed.weight"])
    assert module.count == 2
    module.lm_head.weight = torch.nn.Parameter(torch.zeros(6, 5))
    with pytest.raises(ValueError, match=r"lm_head.weight is missing from .*"):
        merge_into(opened, c, module.state_dict())
    for checkpoint in opened:
        checkpoint.close()


def test_sizes():
    assert [parse_size(x) for x in (7, "5GB", "500 MB", "1.5KB", "2GiB")] == [7, 5 * 10**9, 5 * 10**8, 1500, 2 << 30]
