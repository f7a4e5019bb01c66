"""Resuming goes on bit for bit: random states of every rank, validation steps, epoch ends, sharded folders."""

import importlib.util
import json
import logging
import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fulgurite.callbacks.checkpointing import CheckpointSafety, RNGState, find_resumable, verify_checkpoint

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("tiny_run", HERE / "tiny_run.py")
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


class Draws(tiny.TinyModule):
    """Also draws from Python's and NumPy's generators while training."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def fit(root, ckpt_path=None, callbacks=(), seed=5, accumulate=1):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(seed, verbose=False)
    module = Draws(val_random=True)
    checkpoints = ModelCheckpoint(root / "checkpoints", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = tiny.make_trainer(
        root,
        [*callbacks, checkpoints],
        max_steps=20,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=tiny.TinyData(), ckpt_path=ckpt_path)
    return module


def same(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


# an epoch has 16 batches; validation runs every 4 and draws random numbers
@pytest.mark.parametrize(("accumulate", "steps"), [(1, [1, 4, 7, 16, 17]), (3, [1, 4, 6, 7, 12])])
def test_resume_is_bit_identical_at_any_step(tmp_path, accumulate, steps):
    whole = fit(tmp_path / "whole", callbacks=[RNGState()], accumulate=accumulate)
    for step in steps:
        path = tmp_path / "whole" / "checkpoints" / f"step={step}.ckpt"
        resumed = fit(tmp_path / f"from-{step}", path, [RNGState()], seed=99, accumulate=accumulate)
        assert resumed.losses == whole.losses[-len(resumed.losses) :], step
        assert same(whole, resumed), step


def test_without_the_callback_it_is_not(tmp_path):
    """The test above can fail: random states do matter to this module."""
    whole = fit(tmp_path / "whole")
    resumed = fit(tmp_path / "resumed", tmp_path / "whole" / "checkpoints" / "step=7.ckpt", seed=99)
    assert not same(whole, resumed)


def test_validation_does_not_shift_the_random_numbers_of_training(tmp_path):
    losses = []
    for num_val_batches in (0, 4):
        pl.seed_everything(5, verbose=False)
        module = Draws(val_random=True)
        trainer = tiny.make_trainer(
            tmp_path,
            [RNGState()],
            max_steps=10,
            limit_val_batches=num_val_batches,
            val_check_interval=4,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=tiny.TinyData())
        losses.append(module.losses)
    assert losses[0] == losses[1]


def test_checkpoint_loads_with_weights_only_and_other_world_size_warns(tmp_path):
    fit(tmp_path, callbacks=[RNGState()])
    path = tmp_path / "checkpoints" / "step=7.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert len(checkpoint["rng_states"]["ranks"]) == 1
    checkpoint["rng_states"]["ranks"] *= 2
    torch.save(checkpoint, tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match="random states of 2 ranks, this run has 1"):
        fit(tmp_path / "resumed", tmp_path / "two.ckpt", [RNGState()])


# ------------------------------------------------------------------------------------------------------- several ranks


@pytest.mark.distributed
def test_two_ranks_resume_bit_identically(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    tiny.launch(whole, "--max-steps", "12", ranks=2)
    tiny.launch(broken, "--max-steps", "7", "--every", "7", ranks=2)
    states = torch.load(broken / "checkpoints" / "step=7.ckpt", weights_only=True)["rng_states"]["ranks"]
    assert len(states) == 2
    tiny.launch(broken, "--max-steps", "12", "--resume", ranks=2)
    assert json.loads((broken / "result.json").read_text())["resumed"].endswith("step=7.ckpt")
    first, second = (torch.load(root / "final.pt", weights_only=True) for root in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_failed_save_stops_all_ranks_at_once(tmp_path, strategy):
    """Rank 0's disk fails; the other rank must not wait for it in a barrier until a time-out of half an hour."""
    arguments = ("--strategy", strategy, "--break-disk-at", "6", "--every", "2")
    output = tiny.launch(tmp_path, *arguments, ranks=2, expect=1)
    assert "rank 0: CheckpointWriteError" in output
    assert "rank 1: CheckpointWriteError" in output
    assert "step=6.ckpt could not be written" in output
    folder = tmp_path / "checkpoints"
    assert find_resumable(folder) == folder / "step=4.ckpt"
    assert not [path for path in folder.iterdir() if ".tmp-" in path.name]


@pytest.mark.distributed
def test_sharded_folders_have_a_manifest_and_resume_bit_identically(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    tiny.launch(whole, "--strategy", "fsdp2", "--max-steps", "12", ranks=2)
    tiny.launch(broken, "--strategy", "fsdp2", "--max-steps", "8", ranks=2)
    folder = broken / "checkpoints" / "step=8.ckpt"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.sha256", "meta.pt"]
    verify_checkpoint(folder)
    assert find_resumable(broken / "checkpoints") == folder
    tiny.launch(broken, "--strategy", "fsdp2", "--max-steps", "12", "--resume", ranks=2)
    first, second = (torch.load(root / "final.pt", weights_only=True) for root in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)

    # every kind of damage is seen and named
    for name in ("__1_0.distcp", ".metadata", "meta.pt"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=rf"{name} is damaged|{name} is truncated"):
            verify_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            verify_checkpoint(folder)
        (folder / name).write_bytes(content)
    verify_checkpoint(folder)
    # without a manifest (a folder that plain Lightning wrote) the metadata says what must be there
    (folder / "manifest.sha256").unlink()
    verify_checkpoint(folder)
    content = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"truncated: __1_0\.distcp has \d+ of \d+ bytes"):
        verify_checkpoint(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match="neither"):
        verify_checkpoint(folder)


@pytest.mark.distributed
def test_overwriting_a_sharded_folder_replaces_it_whole(tmp_path):
    tiny.launch(tmp_path, "--strategy", "fsdp2", "--max-steps", "8", "--every", "4", "--overwrite", ranks=2)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["same.ckpt"]
    verify_checkpoint(folder / "same.ckpt")
    assert "step=8" in (folder / "same.ckpt" / "manifest.sha256").read_text().splitlines()[0]


def test_the_callback_order_leaves_random_states_after_other_callbacks(tmp_path):
    trainer = tiny.make_trainer(tmp_path, [RNGState(), CheckpointSafety()], max_steps=1)
    trainer.fit(tiny.TinyModule(), datamodule=tiny.TinyData())
    assert isinstance(trainer.callbacks[-1], RNGState)
