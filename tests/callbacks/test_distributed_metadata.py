"""Folders of `torch.distributed.checkpoint`: code that hides in their pickles is refused, not run."""

import os
import pickle

import pytest
import torch
from torch.distributed import checkpoint as dcp

from fulgurite.callbacks.checkpoint_files import (
    MANIFEST_NAME,
    digest_text,
    file_digest,
    find_resumable,
    verify_checkpoint,
)
from fulgurite.callbacks.distributed_metadata import SafeReader, read_metadata


class Surprise:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoints" / "step=1.ckpt"
    state = {"state_dict": {"w": torch.arange(6.0)}, "optimizer_0": {"lr": 0.1, "betas": (0.9, 0.95), "name": "x"}}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.save({"global_step": 1}, path / "meta.pt")
    return path


def sign(folder):
    """A manifest that fits: whoever can write a folder can write that too."""
    entries = [(file_digest(path), path.name) for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME]
    (folder / MANIFEST_NAME).write_text(digest_text({"step": 1, "resumable": 1}, entries))


@pytest.mark.parametrize("manifest", [False, True])
def test_an_honest_folder_is_read(folder, manifest):
    if manifest:
        sign(folder)
    verify_checkpoint(folder)
    assert find_resumable(folder.parent) == folder
    state = {"state_dict": {"w": torch.zeros(6)}}
    dcp.load(state, storage_reader=SafeReader(folder), no_dist=True)
    assert torch.equal(state["state_dict"]["w"], torch.arange(6.0))


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_code_in_an_index_is_refused(folder, tmp_path, name, manifest):
    (folder / name).write_bytes(pickle.dumps(Surprise(tmp_path / "surprise")))
    if manifest:
        sign(folder)
    with pytest.raises(ValueError, match=rf"{name} of a distributed checkpoint is refused: it holds \w+\.mkdir"):
        verify_checkpoint(folder)
    with pytest.warns(UserWarning, match=r"is refused.*Passing over it"):
        assert find_resumable(folder.parent) is None
    with pytest.raises(ValueError, match="is refused"):
        SafeReader(folder).read_metadata(**({} if name == ".metadata" else {"rank": 0}))
    assert not (tmp_path / "surprise").exists()


@pytest.mark.parametrize("manifest", [False, True])
def test_code_in_an_entry_is_refused(folder, tmp_path, manifest):
    """torch loads entries that are no tensors by `weights_only=False`."""
    state = {"state_dict": {"w": torch.zeros(2)}, "optimizer_0": {"lr": Surprise(tmp_path / "surprise")}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if manifest:
        sign(folder)
    with pytest.raises(ValueError, match=r"the entry optimizer_0\.lr is refused"):
        verify_checkpoint(folder)
    assert not (tmp_path / "surprise").exists()


def test_what_is_no_index_is_named(tmp_path):
    (tmp_path / "a.metadata").write_bytes(b"nothing of the kind")
    (tmp_path / "b.metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match=r"a\.metadata of a distributed checkpoint is refused"):
        read_metadata(tmp_path / "a.metadata")
    with pytest.raises(ValueError, match=r"b\.metadata .* is refused: it is a list"):
        read_metadata(tmp_path / "b.metadata")
