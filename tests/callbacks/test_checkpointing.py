"""Checkpoint files: atomic, hashed, verified, found again; a full disk, a read-only folder, kill -9."""

import contextlib
import errno
import hashlib
import importlib.util
import logging
import multiprocessing
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fulgurite.callbacks import checkpoint_files, checkpointing
from fulgurite.callbacks.checkpointing import (
    AtomicCheckpointIO,
    CheckpointSafety,
    CheckpointWriteError,
    find_resumable,
    remove_leftovers,
    verify_checkpoint,
)

_spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def checkpoint(step=3, size=1000, value=1.0):
    return {"global_step": step, "state_dict": {"w": torch.full((size,), value)}, "optimizer_states": [{}]}


def save(path, **kwargs):
    AtomicCheckpointIO().save_checkpoint(checkpoint(**kwargs), path)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Writes beyond this size fail with EFBIG, as a full disk's fail with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def as_ordinary_user():
    """Root may write anywhere: be somebody else meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# --------------------------------------------------------------------------------------------------------------- files


def test_sidecar_is_the_sha256_of_the_file(tmp_path):
    path = save(tmp_path / "a.ckpt")
    comment, line = (tmp_path / "a.ckpt.sha256").read_text().splitlines()
    assert line == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  a.ckpt"
    assert f"size={path.stat().st_size} step=3 " in comment
    assert comment.endswith("resumable=1")
    subprocess.run(["sha256sum", "--check", "--quiet", "a.ckpt.sha256"], cwd=tmp_path, check=True)
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.sha256"]


def test_digest_is_computed_while_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "file_digest", lambda path: pytest.fail("the file was read again"))
    monkeypatch.setattr(checkpointing, "file_digest", lambda path: pytest.fail("the file was read again"))
    save(tmp_path / "a.ckpt", size=1_000_000)


def test_loads_what_was_saved_with_weights_only(tmp_path):
    path = save(tmp_path / "a.ckpt", value=2.5)
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((1000,), 2.5))
    torch.save({"code": os.system}, tmp_path / "evil.ckpt")
    with pytest.raises(Exception, match="weights_only"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")


@pytest.mark.parametrize("with_sidecar", [True, False])
def test_truncated_file_is_named(tmp_path, with_sidecar):
    path = save(tmp_path / "a.ckpt")
    if not with_sidecar:
        (tmp_path / "a.ckpt.sha256").unlink()
    verify_checkpoint(path)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    expected = (
        rf"a\.ckpt is truncated: {size - 100} of {size} bytes" if with_sidecar else r"a\.ckpt is truncated or not"
    )
    with pytest.raises(ValueError, match=expected):
        verify_checkpoint(path)
    with pytest.raises(ValueError, match=expected):
        AtomicCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("with_sidecar", [True, False])
def test_flipped_bit_is_named(tmp_path, with_sidecar):
    path = save(tmp_path / "a.ckpt")
    if not with_sidecar:
        (tmp_path / "a.ckpt.sha256").unlink()
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.ckpt is damaged"):
        verify_checkpoint(path)


def test_missing_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*a\.ckpt"):
        verify_checkpoint(tmp_path / "a.ckpt")


def test_newest_is_by_time_of_saving_not_of_copying(tmp_path):
    for name, step in (("b.ckpt", 10), ("a.ckpt", 20), ("c.ckpt", 15)):
        save(tmp_path / name, step=step)
    os.utime(tmp_path / "a.ckpt", ns=(10**19, 10**19))
    assert find_resumable(tmp_path) == tmp_path / "c.ckpt"


def test_damaged_checkpoints_are_passed_over_with_a_warning_each(tmp_path):
    paths = [save(tmp_path / f"step={step}.ckpt", step=step) for step in (1, 2, 3)]
    os.truncate(paths[2], 50)
    os.truncate(paths[1], 0)
    with pytest.warns(UserWarning, match="truncated") as caught:
        assert find_resumable(tmp_path) == paths[0]
    texts = [str(warning.message) for warning in caught]
    assert [name in text for name, text in zip(["step=3.ckpt", "step=2.ckpt"], texts, strict=True)] == [True, True]
    os.truncate(paths[0], 10)
    with pytest.warns(UserWarning, match="truncated"):
        assert find_resumable(tmp_path) is None
    assert find_resumable(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe broken", r"b\.ckpt\.sha256 is damaged: it is not UTF-8 text\. Going on without it"),
        (
            b"# step=x1 time=5\n0  b.ckpt\n",
            r"b\.ckpt\.sha256 is damaged: its step is 'x1'\. Going on without it",
        ),
        (
            b"# step=1 time=5e\n0  b.ckpt\n",
            r"b\.ckpt\.sha256 is damaged: its time is '5e'\. Going on without it",
        ),
    ],
)
def test_a_damaged_sidecar_is_named_and_its_checkpoint_checked_without_it(tmp_path, content, problem):
    save(tmp_path / "a.ckpt", step=1)
    newest = save(tmp_path / "b.ckpt", step=2)
    sidecar = tmp_path / "b.ckpt.sha256"
    sidecar.write_bytes(content)
    with pytest.warns(UserWarning, match=problem):
        assert find_resumable(tmp_path) == newest
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"b\.ckpt is truncated.*Passing over it"):
        assert find_resumable(tmp_path) == tmp_path / "a.ckpt"
    with pytest.warns(UserWarning, match=problem):
        save(newest, step=3)  # overwriting mends it
    verify_checkpoint(newest)
    assert b"step=3" in sidecar.read_bytes()


def test_weights_only_and_half_written_files_are_no_candidates(tmp_path):
    good = save(tmp_path / "good.ckpt")
    AtomicCheckpointIO().save_checkpoint({"global_step": 9, "state_dict": {}}, tmp_path / "weights.ckpt")
    (tmp_path / ".x.ckpt.tmp-host-1-00000000").write_bytes(b"half")
    assert find_resumable(tmp_path) == good


def test_links_are_followed_and_dangling_ones_ignored(tmp_path):
    good = save(tmp_path / "step=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    (tmp_path / "gone.ckpt").symlink_to("step=0.ckpt")
    verify_checkpoint(tmp_path / "last.ckpt")
    assert find_resumable(tmp_path) == good


def test_removal_takes_the_sidecar_and_only_the_link_of_a_link(tmp_path):
    io = AtomicCheckpointIO()
    for name in ("a.ckpt", "b.ckpt"):
        save(tmp_path / name)
    (tmp_path / "last.ckpt").symlink_to("b.ckpt")
    folder = tmp_path / "folder.ckpt"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.ckpt", "last.ckpt", "folder.ckpt", "never-was.ckpt"):
        io.remove_checkpoint(tmp_path / name)
    assert names(tmp_path) == ["b.ckpt", "b.ckpt.sha256"]


@pytest.mark.parametrize("crash_at", range(1, 5))
def test_a_crash_at_any_rename_of_an_overwrite_leaves_a_valid_checkpoint(tmp_path, monkeypatch, crash_at):
    path = save(tmp_path / "last.ckpt", value=1.0)
    calls, real = [], os.replace

    def replace(source, target):
        calls.append(target)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with contextlib.suppress(KeyboardInterrupt):
        save(path, value=2.0)
    verify_checkpoint(path)
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["w"][0].item() in (1.0, 2.0)
    assert len(calls) == min(crash_at, 3)


def test_full_disk_says_so_and_spares_the_last_good_checkpoint(tmp_path):
    io = AtomicCheckpointIO()
    good = tmp_path / "good.ckpt"
    io.save_checkpoint(checkpoint(), good)
    with file_size_limit(100_000), pytest.raises(CheckpointWriteError) as caught:
        io.save_checkpoint(checkpoint(size=1_000_000), tmp_path / "bad.ckpt")
    assert caught.value.errno == errno.EFBIG
    assert "bad.ckpt could not be written" in str(caught.value)
    assert f"The last good checkpoint is {good}." in str(caught.value)
    assert names(tmp_path) == ["good.ckpt", "good.ckpt.sha256"]
    verify_checkpoint(good)
    with file_size_limit(100_000), pytest.raises(CheckpointWriteError):
        io.save_checkpoint(checkpoint(size=1_000_000), good)  # overwriting it fails too, and leaves it
    verify_checkpoint(good)
    assert io.load_checkpoint(good)["state_dict"]["w"].numel() == 1000


def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        good = save(disk / "good.ckpt")
        with pytest.raises(CheckpointWriteError, match=r"the disk or quota of .*/disk is full: .* free") as caught:
            save(disk / "bad.ckpt", size=1_000_000)
        assert caught.value.errno == errno.ENOSPC
        verify_checkpoint(good)
        assert names(disk) == ["good.ckpt", "good.ckpt.sha256"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_leftovers_of_the_dead_go_and_of_the_living_stay(tmp_path):
    host = checkpoint_files._hostname()
    dead = subprocess.Popen(["true"])
    dead.wait()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        gone = tmp_path / f".a.ckpt.tmp-{host}-{dead.pid}-0123abcd"
        gone_folder = tmp_path / f".b.ckpt.tmp-{host}-{dead.pid}-0123abcd"
        aside = tmp_path / f".c.ckpt.old-{host}-{dead.pid}-0123abcd"
        replaced = tmp_path / f".d.ckpt.old-{host}-{dead.pid}-0123abcd"
        alive = tmp_path / f".a.ckpt.tmp-{host}-{sleeper.pid}-0123abcd"
        foreign_old = tmp_path / ".a.ckpt.tmp-other.node-1-0123abcd"
        foreign_new = tmp_path / ".a.ckpt.tmp-other.node-2-0123abcd"
        for path in (gone, alive, foreign_old, foreign_new):
            path.write_bytes(b"half")
        for path in (gone_folder, aside, replaced, tmp_path / "d.ckpt"):
            path.mkdir()
            (path / "x").write_bytes(b"1")
        os.utime(foreign_old, (time.time() - 3600,) * 2)
        save(tmp_path / "kept.ckpt")
        (tmp_path / "orphan.ckpt.sha256").write_text("# \n")
        removed = remove_leftovers(tmp_path)
        assert sorted(removed) == sorted([gone, gone_folder, replaced, foreign_old, tmp_path / "orphan.ckpt.sha256"])
        assert (tmp_path / "c.ckpt" / "x").read_bytes() == b"1"  # moved aside, never replaced: put back
        expected = [alive.name, foreign_new.name, "c.ckpt", "d.ckpt", "kept.ckpt", "kept.ckpt.sha256"]
        assert names(tmp_path) == sorted(expected)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("writer", ["this.process", "other.node"])
def test_what_was_set_aside_is_put_back_though_its_writer_seems_alive(tmp_path, monkeypatch, writer):
    host = checkpoint_files._hostname() if writer == "this.process" else writer
    aside = tmp_path / f".a.ckpt.old-{host}-{os.getpid()}-0123abcd"
    waited = []
    monkeypatch.setattr(checkpoint_files.time, "sleep", waited.append)
    aside.mkdir()
    assert remove_leftovers(tmp_path) == []
    assert names(tmp_path) == ["a.ckpt"]
    # but not where a living writer was between its two renames
    (tmp_path / "a.ckpt").rename(aside)
    monkeypatch.setattr(checkpoint_files.time, "sleep", lambda _: (tmp_path / "a.ckpt").mkdir())
    assert remove_leftovers(tmp_path) == []
    assert names(tmp_path) == [aside.name, "a.ckpt"]
    assert waited == [1.0]


def _overwrite_for_ever(path, started):
    io, step = AtomicCheckpointIO(), 0
    while True:
        step += 1
        io.save_checkpoint(checkpoint(step, size=3_000_000, value=float(step)), path)
        started.set()


def test_kill_9_while_overwriting(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        started = context.Event()
        process = context.Process(target=_overwrite_for_ever, args=(tmp_path / "last.ckpt", started))
        process.start()
        assert started.wait(30)
        time.sleep(0.01 + 0.017 * attempt)
        process.kill()
        process.join()
        verify_checkpoint(tmp_path / "last.ckpt")
        loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
        assert loaded["state_dict"]["w"].unique().tolist() == [loaded["global_step"]]
        remove_leftovers(tmp_path)
        assert names(tmp_path) == ["last.ckpt", "last.ckpt.sha256"]


# ---------------------------------------------------------------------------------------------------- in a training run


def fit(root, *callbacks, ckpt_path=None, module=None, data=None, **kwargs):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(5, verbose=False)
    module = module or tiny.TinyModule()
    trainer = tiny.make_trainer(root, callbacks, **{"max_steps": 8, **kwargs})
    trainer.fit(module, datamodule=data or tiny.TinyData(), ckpt_path=ckpt_path)
    return trainer, module


def every(root, n=1, **kwargs):
    return ModelCheckpoint(
        root / "checkpoints", **{"filename": "{step}", "save_top_k": -1, "every_n_train_steps": n, **kwargs}
    )


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_and_pruned_checkpoints_keep_their_sidecars_in_step(tmp_path, save_last):
    fit(tmp_path, CheckpointSafety(), every(tmp_path, 2, save_top_k=1, save_last=save_last))
    folder = tmp_path / "checkpoints"
    last = ["last.ckpt"] if save_last == "link" else ["last.ckpt", "last.ckpt.sha256"]
    assert names(folder) == [*last, "step=8.ckpt", "step=8.ckpt.sha256"]
    assert (folder / "last.ckpt").is_symlink() == (save_last == "link")
    for name in ("last.ckpt", "step=8.ckpt"):
        verify_checkpoint(folder / name)


def test_a_link_is_replaced_not_followed(tmp_path):
    save(tmp_path / "a.ckpt", value=1.0)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    save(tmp_path / "last.ckpt", value=2.0)
    assert not (tmp_path / "last.ckpt").is_symlink()
    for name, value in (("a.ckpt", 1.0), ("last.ckpt", 2.0)):
        verify_checkpoint(tmp_path / name)
        assert AtomicCheckpointIO().load_checkpoint(tmp_path / name)["state_dict"]["w"][0] == value


def test_full_disk_during_training_names_the_checkpoint_to_resume_from(tmp_path):
    class Growing(tiny.TinyModule):
        def on_save_checkpoint(self, checkpoint):  # grows beyond what "the disk" holds
            checkpoint["ballast"] = torch.zeros(1 if self.trainer.global_step < 6 else 100_000)

    with file_size_limit(100_000), pytest.raises(CheckpointWriteError, match=r"step=6\.ckpt could not be") as caught:
        fit(tmp_path, CheckpointSafety(), every(tmp_path, 2), module=Growing())
    good = tmp_path / "checkpoints" / "step=4.ckpt"
    assert f"The last good checkpoint is {good}." in str(caught.value)
    assert "--resume auto" in str(caught.value)
    assert find_resumable(tmp_path / "checkpoints") == good
    trainer, _ = fit(tmp_path, every(tmp_path, 2), ckpt_path=good)
    assert trainer.global_step == 8


def test_read_only_folder_stops_before_training(tmp_path):
    root = tmp_path / "readonly"
    root.mkdir(mode=0o555)
    module = tiny.TinyModule()
    for folder in tmp_path.parents:  # pytest's folders are closed to others
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    tmp_path.chmod(0o755)
    with as_ordinary_user(), pytest.raises(CheckpointWriteError, match="cannot write to its folder") as caught:
        fit(root, CheckpointSafety(), every(root), module=module)
    assert f"{root} is read-only or not yours to write" in str(caught.value)
    assert caught.value.errno == errno.EACCES
    assert module.losses == []


def test_folder_that_becomes_read_only_during_training(tmp_path):
    folder = tmp_path / "checkpoints"

    class Lock(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 5:
                folder.chmod(0o555)

    fit(tmp_path / "before", CheckpointSafety(), every(tmp_path / "before", 2))  # late imports may be closed to others
    for parent in (tmp_path, *tmp_path.parents):
        if "pytest" in str(parent) and parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        os.chown(tmp_path, 65534, 65534)  # the run's folder is tried as well
    with as_ordinary_user(), pytest.raises(CheckpointWriteError, match="is read-only or not yours to write"):
        fit(tmp_path, Lock(), CheckpointSafety(), every(tmp_path, 2))
    folder.chmod(0o755)
    assert find_resumable(folder) == folder / "step=4.ckpt"


def test_too_little_space_stops_before_training(tmp_path, monkeypatch):
    module = tiny.TinyModule()
    needed = checkpointing.estimate_checkpoint_bytes(module, module.configure_optimizers()[0])
    assert needed == 3 * 4 * sum(parameter.numel() for parameter in module.parameters())
    usage = shutil._ntuple_diskusage(10**9, 10**9 - needed + 1, needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointWriteError, match=r"One checkpoint of this run takes about 0\.00 MB, but .*0\.00 MB free"
    ):
        fit(tmp_path, CheckpointSafety(), every(tmp_path), module=module)
    assert module.losses == []


def test_estimate_counts_tied_weights_once_and_the_optimizer_by_kind():
    module = torch.nn.Linear(10, 10, bias=False)
    module.tied = module.weight
    sgd = torch.optim.SGD(module.parameters(), lr=1)
    momentum = torch.optim.SGD(module.parameters(), lr=1, momentum=0.9)
    adam = torch.optim.AdamW(module.parameters())
    sizes = [checkpointing.estimate_checkpoint_bytes(module, [optimizer]) for optimizer in (sgd, momentum, adam)]
    assert sizes == [400, 800, 1200]


def test_leftovers_go_at_the_next_start(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = folder / f".step=3.ckpt.tmp-{checkpoint_files._hostname()}-{dead.pid}-0123abcd"
    left.write_bytes(b"half")
    said = []
    monkeypatch.setattr(checkpointing, "rank_zero_info", said.append)
    fit(tmp_path, CheckpointSafety(), every(tmp_path, 8))
    assert said == [f"Removed {left}, left by an interrupted run."]
    assert names(folder) == ["step=8.ckpt", "step=8.ckpt.sha256"]


def test_fast_dev_run_writes_nothing(tmp_path):
    fit(tmp_path, CheckpointSafety(), fast_dev_run=2)
    assert names(tmp_path) == []
