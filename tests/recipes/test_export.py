"""`lightning export` and `lightning merge`: checkpoints of a run as directories that transformers loads."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulgurite.recipes import export


@pytest.fixture
def run(lightning, tiny):
    assert lightning("run", tiny, "--trainer.logger", "false").code == 0
    (path,) = Path("runs/tiny").iterdir()
    return path


def state_of(run, step):
    return torch.load(run / f"checkpoints/resume-step={step}.ckpt", weights_only=True)["state_dict"]


def loaded(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


def test_an_exported_checkpoint_is_the_checkpoint(run, lightning):
    result = lightning("export", f"{run}/checkpoints/resume-step=6.ckpt", "model")
    assert result.code == 0, result.err
    model, state = loaded("model"), state_of(run, 6)
    assert {f"model.{name}" for name in model.state_dict()} == set(state)
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained("model")) == model.config.vocab_size == 300
    assert sorted(path.name for path in Path("model").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert not list(Path().glob(".model.tmp*"))


def test_the_output_appears_when_all_of_it_is_on_the_disk(run, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def spying_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def spying_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spying_fsync)
    monkeypatch.setattr(os, "replace", spying_replace)
    output = export.export_checkpoint(f"{run}/checkpoints/resume-step=6.ckpt", "model")
    before, after = events[: events.index("replace")], events[events.index("replace") + 1 :]
    assert re.fullmatch(r"\.model\.tmp-[^-]+-\d+-[0-9a-f]{8}", before[-1].name)
    assert {path.name for path in before[:-1]} == {path.name for path in output.iterdir()}
    assert after == [output.parent]


def test_export_casts(run, lightning):
    assert lightning("export", f"{run}/checkpoints/resume-step=6.ckpt", "half", "--dtype", "bfloat16").code == 0
    model = loaded("half")
    assert model.dtype == torch.bfloat16
    expected = state_of(run, 6)["model.model.embed_tokens.weight"].to(torch.bfloat16)
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_exported_weights_give_the_runs_own_logits(run, lightning):
    from fulgurite.lightning_modules.pretraining import PretrainingModule

    checkpoint = f"{run}/checkpoints/resume-step=6.ckpt"
    lightning("export", checkpoint, "model")
    module = PretrainingModule.load_from_checkpoint(checkpoint, weights_only=True).eval()
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded("model")(ids).logits, module.model(ids).logits)


def test_export_refuses(run, refusal):
    checkpoint = f"{run}/checkpoints/resume-step=6.ckpt"
    Path("there").mkdir()
    assert "there is there already: choose another directory, or remove it." in refusal("export", checkpoint, "there")
    assert "There is no checkpoint at" in refusal("export", "nothing.ckpt", "out")
    assert "invalid choice: 'int4'" in refusal("export", checkpoint, "out", "--dtype", "int4")
    torch.save({"state_dict": {"a": torch.ones(1)}}, "other.ckpt")
    assert "holds no causal LM of this project" in refusal("export", "other.ckpt", "out")
    content = Path(checkpoint).read_bytes()
    Path(checkpoint).write_bytes(content[:-9])
    assert "is truncated" in refusal("export", checkpoint, "out")
    assert not Path("out").exists()


def test_merge_makes_a_model_that_loads(run, lightning):
    """The mean of two checkpoints, with configuration and tokenizer beside it."""
    result = lightning("merge", str(run), "merged", "--curve", "linear")
    assert result.code == 0, result.err
    assert "2 checkpoints, oldest first with weights 0.5, 0.5" in result.out
    model = loaded("merged")
    states = [state_of(run, step) for step in (3, 6)]
    for name, value in model.state_dict().items():
        mean = (states[0][f"model.{name}"].double() + states[1][f"model.{name}"].double()) / 2
        assert torch.allclose(value.double(), mean, rtol=0, atol=1e-7)
    assert len(AutoTokenizer.from_pretrained("merged")) == 300
    record = json.loads(Path("merged/merge.json").read_text())
    assert record["positions"] == [3, 6]


def test_merge_takes_options_paths_and_explicit_weights(run, lightning):
    paths = [f"{run}/checkpoints/resume-step={step}.ckpt" for step in (3, 6)]
    result = lightning("merge", *paths, "out.safetensors", "--c=[0.25, 0.75]", "--output_dtype", "bfloat16")
    assert result.code == 0, result.err
    assert "weights 0.25, 0.75" in result.out
    from safetensors.torch import load_file

    value = load_file("out.safetensors")["model.norm.weight"]
    assert value.dtype == torch.bfloat16
    newest_first = paths[::-1]
    assert "in increasing order" in lightning("merge", *newest_first, "other", "--c=[0.25, 0.75]").err
    assert lightning("merge", *newest_first, "--curve", "polynomial", "--p", "2", "quadratic").code == 0
    assert json.loads(Path("quadratic/merge.json").read_text())["c"] == pytest.approx([0.25, 0.75])


def test_merge_refuses(run, refusal):
    assert (
        refusal("merge", str(run), "out", "--curv", "ema")
        == "`lightning merge` has no option --curv. Did you mean --curve?"
    )
    assert refusal("merge", str(run)).startswith("`lightning merge` needs checkpoints and an output")
    assert "unknown curve 'emma'" in refusal("merge", str(run), "out", "--curve", "emma")
    assert refusal("merge", "nowhere", "out") == "there is no checkpoint at nowhere"
    Path("there").mkdir()
    assert refusal("merge", str(run), "there").startswith("there exists")
    assert not Path("out").exists()


class Surprise:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("surprise",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_code_in_a_sharded_checkpoint_is_neither_exported_nor_resumed(tiny, refusal):
    folder = Path("step=1.ckpt")
    torch.distributed.checkpoint.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    torch.save({"global_step": 1}, folder / "meta.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(Surprise()))
    assert ".metadata of a distributed checkpoint is refused" in refusal("export", str(folder), "out")
    message = refusal("run", tiny, "--resume", str(folder))
    assert message.startswith("Cannot resume: The index ")
    assert "is refused" in message
    with pytest.raises(ValueError, match="is refused"):  # also without the check before
        export._read_folder(folder)
    assert not Path("surprise").exists()
    assert not Path("runs").exists()
