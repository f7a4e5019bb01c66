"""CheckpointMerge across processes: a resumed run merges what an unbroken one does, bit for bit."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fulgurite.callbacks.checkpoint_merging import CheckpointMerge, merge_weights
from fulgurite.callbacks.rng_state import RNGState

_spec = importlib.util.spec_from_file_location("merge_toy", Path(__file__).with_name("toy.py"))
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)
run, same, snapshot = toy.run, toy.same, toy.snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODES = {
    "anytime": {},
    "anytime-floor": {"curve": "1-sqrt", "min_ratio": 0.2},
    "anytime-disk": {"curve": "polynomial", "curve_args": {"p": 2}, "storage": "disk"},
    "anytime-cpu": {"storage": "cpu"},
    "sliding-device": {"num_checkpoints": 3, "curve": "cosine", "storage": "device"},
    "sliding-cpu": {"num_checkpoints": 3, "curve": "cosine", "storage": "cpu"},
    "sliding-disk": {"num_checkpoints": 3, "curve": "cosine", "storage": "disk"},
    "fixed": {"num_checkpoints": 5, "curve": "cosine", "mode": "fixed"},
}
# Three batches a step and a snapshot every second step. After batches 13 and 20 gradients are half accumulated; after
# 18 a snapshot was just taken; 30 is on a step without one.
SETTINGS = {"accumulate_grad_batches": 3, "max_steps": 12, "val_check_interval": 4}
BATCHES = (13, 18, 20, 30)


def merge_run(root, settings, **kwargs):
    callback = CheckpointMerge(2, export_dir="merged", **settings)
    module, trainer = run(root, callback, callbacks=[RNGState()], **{**SETTINGS, **kwargs})
    return callback, module, trainer


def exported(root):
    return load_file(root / "merged" / "model.safetensors")


@pytest.mark.parametrize("mode", MODES)
def test_resume_at_any_batch_gives_the_same_merge_bit_for_bit(tmp_path, mode):
    whole, module, trainer = merge_run(tmp_path / "whole", MODES[mode], save_at=BATCHES)
    for batch in BATCHES:
        root = tmp_path / f"resumed-{batch}"
        path = tmp_path / "whole" / "checkpoints" / f"batch={batch}.ckpt"
        if "disk" in mode:  # files of the two latest checkpoints only: run up to this one
            merge_run(root, MODES[mode], save_at=BATCHES[: BATCHES.index(batch) + 1], max_steps=(batch + 2) // 3)
            path = root / "checkpoints" / f"batch={batch}.ckpt"
        resumed, module_again, trainer_again = merge_run(root, MODES[mode], ckpt_path=path)
        if batch % 3 == 0:  # Lightning does not save half-accumulated gradients: from there the run itself differs
            assert same(snapshot(module), snapshot(module_again))
            assert same(whole.merged_state_dict(), resumed.merged_state_dict())
            assert same(exported(tmp_path / "whole"), exported(root))
            assert resumed.history == whole.history
            assert trainer.callback_metrics["val_loss_merged"] == trainer_again.callback_metrics["val_loss_merged"]
        assert resumed.positions == whole.positions
        assert resumed.merge_info() == whole.merge_info()


def test_mid_accumulation_the_merge_at_resume_is_the_saved_one(tmp_path):
    seen = {}

    class Look(toy.pl.Callback):
        def __init__(self, callback, label):
            self.callback, self.label = callback, label

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if self.callback.ready:
                seen.setdefault((self.label, trainer.global_step), self.callback.merged_state_dict())

        def on_train_start(self, trainer, pl_module):
            if self.label == "resumed":
                seen["start"] = self.callback.merged_state_dict()

    first = CheckpointMerge(2)
    run(tmp_path / "a", first, save_at=[20], callbacks=[Look(first, "whole")], **SETTINGS)
    second = CheckpointMerge(2)
    path = tmp_path / "a" / "checkpoints" / "batch=20.ckpt"
    run(tmp_path / "b", second, callbacks=[Look(second, "resumed")], ckpt_path=path, **SETTINGS)
    assert same(seen["start"], seen["whole", 6])


def test_a_checkpoint_written_before_the_snapshot_of_its_step_loses_nothing(tmp_path):
    def early(root, **kwargs):
        callback = CheckpointMerge(2, num_checkpoints=3, curve="cosine")
        saver = toy.SaveAt([8], root / "checkpoints")  # before the callback, which snapshots after batch 8
        run(root, None, callbacks=[RNGState(), saver, callback], **kwargs)
        return callback

    whole = early(tmp_path / "a")
    resumed = early(tmp_path / "b", ckpt_path=tmp_path / "a" / "checkpoints" / "batch=8.ckpt")
    assert resumed.merge_info() == whole.merge_info()
    assert same(resumed.merged_state_dict(), whole.merged_state_dict())
    after_one = early(tmp_path / "c", ckpt_path=tmp_path / "a" / "checkpoints" / "batch=8.ckpt", max_steps=9)
    assert after_one.positions == [4, 6, 8]


def test_validation_right_after_a_resume_uses_the_restored_merge(tmp_path):
    whole = CheckpointMerge(2)
    run(tmp_path / "a", whole, callbacks=[RNGState()], save_at=[8], val_check_interval=9, max_steps=9)
    resumed = CheckpointMerge(2)
    path = tmp_path / "a" / "checkpoints" / "batch=8.ckpt"
    run(tmp_path / "b", resumed, callbacks=[RNGState()], ckpt_path=path, val_check_interval=9, max_steps=9)
    assert [entry["step"] for entry in whole.history] == [9]
    assert resumed.history == whole.history


@pytest.mark.parametrize("mode", MODES)
def test_state_is_plain_and_small_with_disk(tmp_path, mode):
    merge_run(tmp_path, MODES[mode], save_at=[20])
    saved = torch.load(tmp_path / "checkpoints" / "batch=20.ckpt", weights_only=True)
    state = saved["callbacks"]["CheckpointMerge[merged]"]
    assert [s["step"] for s in state["snapshots"]] == [2, 4, 6]
    assert state["step"] == 6

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [t for part in parts for t in tensors(part)]

    assert bool(tensors(state)) is ("disk" not in mode)
    assert not any("optimizer" in key for key in state)


def sliding_disk(root, **kwargs):
    callback = CheckpointMerge(2, num_checkpoints=4, curve="1-sqrt", storage="disk")
    run(root, callback, callbacks=[RNGState()], **kwargs)
    return callback


def snapshot_files(root):
    return sorted(root.glob("merge_snapshots/merged-*/snapshot-*.safetensors"))


def test_snapshots_newer_than_the_restored_step_and_torn_files_are_dropped(tmp_path):
    whole = sliding_disk(tmp_path / "a", save_at=[12])
    root = tmp_path / "b"
    sliding_disk(root, save_at=[12], max_steps=15)
    assert [int(p.name.split("-")[1]) for p in snapshot_files(root)] == [6, 8, 10, 12, 14]
    torn = snapshot_files(root)[0].parent / ".snapshot-000000000016-rank00000.safetensors.tmp-gone-1-deadbeef"
    torn.write_bytes(b"half")
    os.utime(torn, (0, 0))
    resumed = sliding_disk(root, ckpt_path=root / "checkpoints" / "batch=12.ckpt", max_steps=13)
    assert resumed.positions == [6, 8, 10, 12]
    assert [int(p.name.split("-")[1]) for p in snapshot_files(root)] == [6, 8, 10, 12]
    assert not torn.exists()
    resumed = sliding_disk(root, ckpt_path=root / "checkpoints" / "batch=12.ckpt")
    assert same(resumed.merged_state_dict(), whole.merged_state_dict())
    assert len(list((root / "merge_snapshots").iterdir())) == 1


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_snapshot_is_named_and_the_newer_ones_are_used(tmp_path, damage):
    sliding_disk(tmp_path, save_at=[12], max_steps=12)
    lost = snapshot_files(tmp_path)[1]
    if damage == "missing":
        lost.unlink()
    else:
        lost.write_bytes(lost.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=rf"snapshot-0+8-rank.* is {damage}.*the 2 newest"):
        resumed = sliding_disk(tmp_path, ckpt_path=tmp_path / "checkpoints" / "batch=12.ckpt", max_steps=14)
    assert resumed.positions == [10, 12, 14]
    assert resumed.merge_info()["c"] == pytest.approx(list(merge_weights([10, 12, 14], "1-sqrt").c))


def test_a_lost_accumulator_starts_a_new_window_with_a_warning(tmp_path):
    settings = {"storage": "disk"}
    merge_run(tmp_path, settings, save_at=[18], max_steps=6)
    for path in tmp_path.glob("merge_snapshots/*/accumulator-*"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"accumulator-.* is missing.*the 0 newest"):
        resumed, _, _ = merge_run(tmp_path, settings, ckpt_path=tmp_path / "checkpoints" / "batch=18.ckpt")
    assert resumed.positions == [8, 10, 12]


def test_a_fork_in_another_folder_leaves_the_first_run_s_snapshots_alone(tmp_path):
    whole = sliding_disk(tmp_path / "a", save_at=[12])
    sliding_disk(tmp_path / "b", save_at=[12], max_steps=17)
    before = {p: p.read_bytes() for p in snapshot_files(tmp_path / "b")}
    fork = sliding_disk(tmp_path / "fork", ckpt_path=tmp_path / "b" / "checkpoints" / "batch=12.ckpt")
    assert same(fork.merged_state_dict(), whole.merged_state_dict())
    assert before == {p: p.read_bytes() for p in snapshot_files(tmp_path / "b")}


def test_a_run_folder_that_was_moved_resumes(tmp_path):
    whole = sliding_disk(tmp_path / "a", save_at=[12])
    sliding_disk(tmp_path / "b", save_at=[12], max_steps=13)
    shutil.move(tmp_path / "b", tmp_path / "moved")
    resumed = sliding_disk(tmp_path / "moved", ckpt_path=tmp_path / "moved" / "checkpoints" / "batch=12.ckpt")
    assert same(resumed.merged_state_dict(), whole.merged_state_dict())


def test_both_of_the_last_two_checkpoints_can_be_resumed_from_disk(tmp_path):
    whole = sliding_disk(tmp_path / "a")
    for batch in (11, 15):
        root = tmp_path / str(batch)
        sliding_disk(root, save_at=[7, 11, 15], max_steps=18)
        resumed = sliding_disk(root, ckpt_path=root / "checkpoints" / f"batch={batch}.ckpt")
        assert same(resumed.merged_state_dict(), whole.merged_state_dict())


def test_a_smaller_window_and_another_curve_may_be_chosen_at_resume(tmp_path):
    run(tmp_path, CheckpointMerge(2, num_checkpoints=4, curve="cosine"), save_at=[12], max_steps=12)
    callback = CheckpointMerge(2, num_checkpoints=2, curve="linear")
    run(tmp_path / "b", callback, ckpt_path=tmp_path / "checkpoints" / "batch=12.ckpt", max_steps=14)
    assert callback.positions == [12, 14]


def test_another_curve_in_one_accumulator_is_refused_at_resume(tmp_path):
    run(tmp_path, CheckpointMerge(2), save_at=[12], max_steps=12)
    with pytest.raises(ValueError, match="an accumulator commits to its curve"):
        run(tmp_path / "b", CheckpointMerge(2, curve="1-sqrt"), ckpt_path=tmp_path / "checkpoints" / "batch=12.ckpt")


def test_a_checkpoint_without_the_callback_starts_a_window(tmp_path):
    run(tmp_path, None, save_at=[9])
    callback = CheckpointMerge(2)
    run(tmp_path / "b", callback, ckpt_path=tmp_path / "checkpoints" / "batch=9.ckpt")
    assert callback.positions == [10, 12, 14, 16, 18, 20]


def test_shards_of_another_number_of_ranks_are_refused():
    callback, trainer = CheckpointMerge(2), toy.pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    callback._sharded = True
    with pytest.raises(ValueError, match=r"shards of 4 ranks, this run has 1: resume on as many"):
        callback._take_up(trainer, toy.Toy(), {"world_size": 4, "directory": "/snapshots"})


def test_another_model_is_refused_at_resume(tmp_path):
    run(tmp_path, CheckpointMerge(2), save_at=[12], max_steps=12)
    path = tmp_path / "checkpoints" / "batch=12.ckpt"
    saved = torch.load(path, weights_only=True)
    merge = saved["callbacks"]["CheckpointMerge[merged]"]["merge"]
    merge["layout"]["net.0.weight"] = [[8, 9], [8, 9], "float32"]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"does not fit this run.*net\.0\.weight"):
        run(tmp_path / "b", CheckpointMerge(2), ckpt_path=path)
