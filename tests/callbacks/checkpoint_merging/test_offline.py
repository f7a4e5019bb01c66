"""Merging files: every format gives the same numbers, the artifact is complete or absent, and mistakes are named."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fulgurite.callbacks.checkpoint_merging import merge_checkpoints, merge_state_dicts, merge_weights
from fulgurite.callbacks.checkpoint_merging import offline as offline_module
from fulgurite.callbacks.checkpoint_merging.io import open_checkpoint, step_from_name

from .checkpoints import STEPS, save_lightning, save_sharded, state_dicts, untied, write

KINDS = ("lightning", "torch", "legacy", "safetensors", "sharded", "distributed")
OUTPUTS = ("merged.ckpt", "merged.pt", "merged.safetensors", "merged")


def read_artifact(path):
    if path.suffix == ".ckpt":
        return torch.load(path, weights_only=True)["state_dict"]
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return load_file(path if path.is_file() else path / "model.safetensors")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_format_gives_the_same_numbers(kind, output, tmp_path):
    states = state_dicts()
    paths = write(kind, tmp_path / "in", states)
    result = merge_checkpoints(paths, tmp_path / output, curve="1-sqrt")
    expected = merge_state_dicts(states, merge_weights(STEPS, "1-sqrt").c)
    merged = read_artifact(result.output)
    prefix = "model." if output in ("merged.safetensors", "merged") and kind in ("lightning", "distributed") else ""
    names = {name.removeprefix(prefix): name for name in expected}
    if output in ("merged.safetensors", "merged") or kind in ("safetensors", "sharded", "distributed"):
        del names[f"{'' if prefix else 'model.'}lm_head.weight"]
    assert set(merged) == set(names)
    for name, original in names.items():
        assert torch.equal(merged[name], expected[original]), name
        assert merged[name].dtype == expected[original].dtype


@pytest.mark.parametrize("suffix", [".ckpt", ".pt"])
def test_tied_weights_stay_tied_in_torch_files(suffix, tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    merged = read_artifact(merge_checkpoints(paths, tmp_path / f"merged{suffix}").output)
    assert merged["model.lm_head.weight"].data_ptr() == merged["model.embed.weight"].data_ptr()


def test_tied_weights_are_stored_once_in_safetensors(tmp_path):
    from safetensors.torch import load_model

    paths = write("lightning", tmp_path / "in", state_dicts(2), STEPS[:2])
    output = merge_checkpoints(paths, tmp_path / "merged.safetensors").output
    reopened = open_checkpoint(output)
    assert reopened.aliases == {"lm_head.weight": "embed.weight"}
    assert output.stat().st_size < 120 + 2000 + 40

    class Model(torch.nn.Module):  # safetensors' own loader understands the tie
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(6, 5), torch.nn.Linear(5, 6, bias=False)
            self.lm_head.weight = self.embed.weight

    model = Model()
    missing, _ = load_model(model, output, strict=False)
    assert not missing


def test_splitting_files_into_shards_changes_nothing(tmp_path):
    states = [untied(s) for s in state_dicts()]
    whole = write("safetensors", tmp_path / "whole", states)
    parts = []
    for state, step in zip(states, STEPS, strict=True):
        parts.append(tmp_path / f"checkpoint-{step}")
        save_sharded(parts[-1], state, num_shards=5)
    one = read_artifact(merge_checkpoints(whole, tmp_path / "one.safetensors", curve="cosine").output)
    result = merge_checkpoints(parts, tmp_path / "many", curve="cosine", max_shard_size=60)
    shards = sorted(p.name for p in result.output.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((result.output / "model.safetensors.index.json").read_text())
    many = {name: load_file(result.output / file)[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_directory_gets_the_configuration_of_the_newest_and_nothing_of_the_training(tmp_path):
    paths = write("sharded", tmp_path, [untied(s) for s in state_dicts()])
    (paths[-1] / "config.json").write_text('{"model_type": "llama", "newest": true}')
    output = merge_checkpoints(paths, tmp_path / "merged").output
    assert sorted(p.name for p in output.iterdir()) == [
        "config.json",
        "merge.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((output / "config.json").read_text())["newest"] is True


def test_a_merged_checkpoint_carries_no_optimizer_scheduler_or_loop_state(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    output = merge_checkpoints(paths, tmp_path / "merged.ckpt").output
    content = torch.load(output, weights_only=True)
    assert set(content) == {
        "epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name",
        "state_dict", "fulgurite_merge",
    }  # fmt: skip
    assert content["global_step"] == 130
    assert content["hyper_parameters"] == {"width": 5}


def test_a_merged_checkpoint_loads_into_a_lightning_module_but_cannot_be_resumed(tmp_path):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(width, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    modules = [Module(3) for _ in range(2)]
    paths = []
    for step, module in enumerate(modules, start=1):
        paths.append(tmp_path / f"step={step}.ckpt")
        save_lightning(paths[-1], module.state_dict(), step, hyper_parameters={"width": 3}, hparams_name="kwargs")
    output = merge_checkpoints(paths, tmp_path / "merged.ckpt").output
    loaded = Module.load_from_checkpoint(output, weights_only=True)
    torch.testing.assert_close(loaded.net.weight, (modules[0].net.weight + modules[1].net.weight) / 2)
    trainer = pl.Trainer(
        max_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    with pytest.raises(KeyError, match="optimizer state"):
        trainer.fit(Module(3), torch.utils.data.DataLoader(torch.randn(8, 3)), ckpt_path=output, weights_only=True)


def test_live_weights_are_merged_when_the_state_dict_is_an_average(tmp_path):
    states = state_dicts(3)
    paths = []
    for state, step in zip(states, STEPS, strict=False):
        average = {name: torch.zeros_like(t) for name, t in state.items()}
        paths.append(tmp_path / f"step={step}.ckpt")
        save_lightning(
            paths[-1], average, step, current_model_state=state, averaging_state={"n_averaged": torch.tensor(3)}
        )
    merged = read_artifact(merge_checkpoints(paths, tmp_path / "merged.ckpt").output)
    expected = merge_state_dicts(states, [1 / 3] * 3)
    assert torch.equal(merged["model.layer.weight"], expected["model.layer.weight"])
    save_lightning(paths[0], states[0], STEPS[0], averaging_state={"n_averaged": torch.tensor(3)})
    with pytest.raises(ValueError, match=rf"{paths[0]} is already an average \(averaging_state"):
        merge_checkpoints(paths, tmp_path / "other.ckpt")


def test_checkpoints_of_lightnings_weight_averaging_really_have_that_layout(tmp_path):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(3, 1)
            self.live = {}

        def training_step(self, batch, batch_idx):
            return self.net(batch).pow(2).mean()

        def on_train_batch_end(self, *_):
            self.live[self.trainer.global_step] = self.net.weight.detach().clone()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Module()
    saver = ModelCheckpoint(tmp_path / "ckpts", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    pl.Trainer(
        max_steps=6, logger=False, accelerator="cpu", callbacks=[WeightAveraging(), saver], enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(torch.randn(12, 3)))  # fmt: skip
    result = merge_checkpoints(tmp_path / "ckpts", tmp_path / "merged.ckpt")
    assert [c["step"] for c in json.loads(result.sidecar.read_text())["inputs"]] == [2, 4, 6]
    merged = read_artifact(result.output)["net.weight"]
    torch.testing.assert_close(merged, (module.live[2] + module.live[4] + module.live[6]) / 3)


# ---------------------------------------------------------------------------------------------------- provenance


@pytest.mark.parametrize("kind", ["lightning", "sharded", "distributed"])
def test_sidecar_tells_inputs_digests_weights_and_version(kind, tmp_path):
    paths = write(kind, tmp_path / "in", state_dicts())
    result = merge_checkpoints(
        paths, tmp_path / "merged", curve="polynomial", p=2, min_ratio=0.1, output_dtype="bfloat16"
    )
    assert result.sidecar == tmp_path / "merged" / "merge.json"
    found = json.loads(result.sidecar.read_text())
    weights = merge_weights(STEPS, "polynomial", p=2, min_ratio=0.1)
    assert found["c"] == weights.c.tolist()
    assert found["w"] == weights.w.tolist()
    assert (found["curve"], found["curve_args"], found["grid"], found["min_ratio"]) == (
        "polynomial", {"p": 2.0}, "virtual_end", 0.1,
    )  # fmt: skip
    assert (found["steps"], found["unit"]) == (STEPS, "steps")
    assert found["dtype"] == {"accumulate": "torch.float32", "output": "torch.bfloat16"}
    assert found["tool"].startswith("fulgurite ")
    for described, path in zip(found["inputs"], paths, strict=True):
        assert described["path"] == str(path)
        if path.is_file():
            assert described["sha256"] == sha256(path)
        else:
            assert described["sha256"] == {name: sha256(path / name) for name in described["sha256"]}
            assert len(described["sha256"]) == (3 if kind == "sharded" else 1)
    assert found["output"] == {"model.safetensors": (tmp_path / "merged" / "model.safetensors").stat().st_size}


def test_a_digest_that_the_writer_recorded_is_used_and_a_stale_one_is_not(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    for path in paths[:2]:
        size = path.stat().st_size + (path == paths[1])  # the second record is of another file
        path.with_name(f"{path.name}.sha256").write_text(f"# size={size}\n{'ab' * 32}  {path.name}\n")
    inputs = json.loads(merge_checkpoints(paths, tmp_path / "merged").sidecar.read_text())["inputs"]
    assert inputs[0]["sha256"] == "ab" * 32
    assert inputs[1]["sha256"] == sha256(paths[1])


def test_checkpoints_written_by_our_own_io_have_the_right_digest(tmp_path):
    from fulgurite.callbacks.checkpointing import AtomicCheckpointIO, verify_checkpoint

    paths = []
    for state, step in zip(state_dicts(2), STEPS, strict=False):
        paths.append(tmp_path / f"step={step}.ckpt")
        AtomicCheckpointIO().save_checkpoint({"state_dict": state, "global_step": step, "epoch": 0}, paths[-1])
    result = merge_checkpoints(paths, tmp_path / "merged.ckpt")
    assert [i["sha256"] for i in json.loads(result.sidecar.read_text())["inputs"]] == [sha256(p) for p in paths]
    verify_checkpoint(result.output)  # the artifact has a record of its own
    result.output.write_bytes(result.output.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged"):
        verify_checkpoint(result.output)


def test_inputs_stay_as_they_were(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    before = [sha256(p) for p in paths]
    merge_checkpoints(paths, tmp_path / "merged")
    assert [sha256(p) for p in paths] == before
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == sorted(p.name for p in paths)


# ---------------------------------------------------------------------------------------------------- selection


def test_window_from_a_folder(tmp_path):
    steps = list(range(10, 110, 10))
    paths = write("lightning", tmp_path / "run" / "checkpoints", state_dicts(10), steps)
    (paths[-1].parent / "last.ckpt").symlink_to(paths[-1])
    save_lightning(paths[-1].parent / "preempted-step=100.ckpt", state_dicts(10)[-1], 100)
    (paths[-1].parent / ".hidden.ckpt").write_bytes(b"half")

    def chosen(number=[0], **arguments):  # noqa: B006
        number[0] += 1
        result = merge_checkpoints(tmp_path / "run", tmp_path / f"merged-{number[0]}", **arguments)
        return [int(p) for p in result.weights.positions]

    assert chosen() == steps
    assert chosen(num_checkpoints=3) == [80, 90, 100]
    assert chosen(duration=40) == [70, 80, 90, 100]
    assert chosen(duration=60, num_checkpoints=3) == [60, 80, 100]
    assert chosen(duration=60, interval=20) == [60, 80, 100]
    assert chosen(num_checkpoints=3, interval=30) == [40, 70, 100]
    with pytest.raises(ValueError, match="11 checkpoints were asked for, 10 were found"):
        chosen(num_checkpoints=11)
    with pytest.raises(ValueError, match=r"a duration of 150 .* the 10 checkpoints found \(10 to 100\) cover 100"):
        chosen(duration=150)
    with pytest.raises(ValueError, match=r"4 checkpoints every 15 were asked for, and there is none at 55"):
        chosen(duration=60, num_checkpoints=4)
    with pytest.raises(ValueError, match="duration 60 with 3 checkpoints is interval 20, not 30"):
        chosen(duration=60, num_checkpoints=3, interval=30)
    with pytest.raises(ValueError, match="num_checkpoints must be positive, got 0"):
        chosen(num_checkpoints=0)


def test_order_of_inputs_does_not_matter(tmp_path):
    paths = write("lightning", tmp_path, state_dicts())
    sorted_ = merge_checkpoints(paths, tmp_path / "a.safetensors", curve="1-sqrt")
    shuffled = merge_checkpoints([paths[i] for i in (2, 0, 3, 1)], tmp_path / "b.safetensors", curve="1-sqrt")
    assert shuffled.inputs == sorted_.inputs == paths
    assert sha256(sorted_.output) == sha256(shuffled.output)


def test_tokens_are_positions_when_asked(tmp_path):
    paths = []
    for state, step, tokens in zip(state_dicts(), STEPS, [1000, 3000, 4000, 8000], strict=True):
        paths.append(tmp_path / f"step={step}.ckpt")
        save_lightning(paths[-1], state, step, causal_lm={"tokens_seen": tokens})
    result = merge_checkpoints(paths, tmp_path / "merged", curve="1-sqrt", unit="tokens", duration=5000)
    assert result.weights.positions.tolist() == [4000, 8000]
    everything = merge_checkpoints(paths, tmp_path / "all", curve="1-sqrt", unit="tokens")
    assert everything.weights.c.tolist() == merge_weights([1000, 3000, 4000, 8000], "1-sqrt").c.tolist()
    described = json.loads(everything.sidecar.read_text())
    assert (described["unit"], described["positions"]) == ("tokens", [1000, 3000, 4000, 8000])
    without = write("torch", tmp_path / "pt", state_dicts())
    with pytest.raises(ValueError, match=rf"{without[0]} has no tokens_seen: pass positions"):
        merge_checkpoints(without, tmp_path / "none", unit="tokens")


def test_step_comes_from_the_file_then_from_its_name_then_must_be_given(tmp_path):
    states = state_dicts(2)
    recorded = tmp_path / "step=999.ckpt"
    save_lightning(recorded, states[0], 100)
    named = tmp_path / "weights-step_200.pt"
    torch.save(states[1], named)
    result = merge_checkpoints([named, recorded], tmp_path / "merged")
    assert result.weights.positions.tolist() == [100, 200]
    nameless = tmp_path / "final.pt"
    torch.save(states[1], nameless)
    with pytest.raises(ValueError, match=rf"{nameless} has no global_step and no number in its name"):
        merge_checkpoints([nameless, recorded], tmp_path / "no")
    given = merge_checkpoints([nameless, recorded], tmp_path / "yes", positions=[7, 3])
    assert given.inputs == [recorded, nameless]
    with pytest.raises(ValueError, match="1 positions for 2 checkpoints"):
        merge_checkpoints([nameless, recorded], tmp_path / "no", positions=[7])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=4000.ckpt", 4000), ("checkpoint-500", 500), ("step_12.pt", 12), ("0400.pt", 400),
        ("iter_0000100.safetensors", 100), ("weights-step=10-v2.ckpt", 10), ("last.ckpt", None),
        ("ema_0.9999_7.pt", None), ("model-00001-of-00002.safetensors", None),
    ],
)  # fmt: skip
def test_step_from_name(name, step):
    assert step_from_name(Path("/nowhere") / name) == step


def test_step_of_a_generic_name_is_its_folders():
    assert step_from_name(Path("/nowhere/checkpoint-500/model.safetensors")) == 500
    assert step_from_name(Path("/nowhere/checkpoint-500/weights.safetensors")) is None


def test_a_duplicate_step_names_both_files(tmp_path):
    paths = write("lightning", tmp_path, state_dicts())
    with pytest.raises(ValueError, match=rf"{paths[1]} and {paths[1]} are both at position 110: .*increase strictly"):
        merge_checkpoints([paths[0], paths[1], paths[1]], tmp_path / "merged")


def test_a_single_checkpoint_can_only_be_copied(tmp_path):
    (path,) = write("lightning", tmp_path, state_dicts(1), STEPS[:1])
    with pytest.raises(ValueError, match=r"at least 2 checkpoint\(s\), got 1: .*c=\[1.0\]"):
        merge_checkpoints([path], tmp_path / "no.pt")
    merged = read_artifact(merge_checkpoints([path], tmp_path / "copy.pt", c=[1.0]).output)
    original = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(merged[name], tensor) for name, tensor in original.items())


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_existing_output_is_never_overwritten(output, tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    merge_checkpoints(paths, tmp_path / output)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=rf"{output} exists: a merge never overwrites"):
        merge_checkpoints(paths, tmp_path / output)
    with pytest.raises(FileExistsError):
        merge_checkpoints(paths, paths[0])
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_appears_meanwhile_is_not_overwritten(output, tmp_path, monkeypatch):
    paths = write("lightning", tmp_path / "in", state_dicts())
    target = tmp_path / output

    def run(*arguments, **settings):
        if target.suffix:
            target.write_text("mine")
        else:
            target.mkdir()
            (target / "mine").write_text("mine")

    monkeypatch.setattr(offline_module, "run", run)
    with pytest.raises(FileExistsError):
        merge_checkpoints(paths, target)
    assert (target if target.suffix else target / "mine").read_text() == "mine"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_merge_that_fails_leaves_nothing(output, tmp_path):
    states = state_dicts()
    states[2]["model.norm.running_mean"][1] = float("nan")
    paths = write("lightning", tmp_path / "in", states)
    with pytest.raises(ValueError, match=rf"{paths[2]}: model.norm.running_mean holds a number that is not finite"):
        merge_checkpoints(paths, tmp_path / output)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_killed_in_the_middle_leaves_no_artifact(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    code = f"""
import os
from fulgurite.callbacks.checkpoint_merging import merge_checkpoints
kill = lambda done, total: os.kill(os.getpid(), 9)
merge_checkpoints({[str(p) for p in paths]!r}, {str(tmp_path / "merged")!r}, on_progress=kill)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9
    assert not (tmp_path / "merged").exists()
    merge_checkpoints(paths, tmp_path / "merged")  # and the next attempt is not in its way
    assert (tmp_path / "merged" / "merge.json").is_file()


def test_a_merge_is_not_merged_again_unless_asked(tmp_path):
    paths = write("lightning", tmp_path, state_dicts())
    for output in OUTPUTS:
        merged = merge_checkpoints(paths[:2], tmp_path / output).output
        with pytest.raises(ValueError, match=rf"{output} is itself a merge"):
            merge_checkpoints([merged, merged], tmp_path / "no", positions=[1, 2])
    again = merge_checkpoints([tmp_path / "merged.ckpt", paths[3]], tmp_path / "again.ckpt", allow_merged=True)
    assert [p.name for p in again.inputs] == ["merged.ckpt", paths[3].name]
    found = merge_checkpoints(tmp_path, tmp_path / "folder.ckpt")  # a folder's merges are not its checkpoints
    assert found.inputs == paths


def test_mismatch_names_the_files(tmp_path):
    states = state_dicts(2)
    del states[1]["model.scalar"]
    states[1]["model.norm.running_mean"] = torch.zeros(4)
    paths = write("lightning", tmp_path, states, STEPS[:2])
    with pytest.raises(ValueError) as error:
        merge_checkpoints(paths, tmp_path / "merged")
    assert f"model.scalar is missing from {paths[1]}" in str(error.value)
    assert f"model.norm.running_mean has shape (4,) in {paths[1]}, (5,) in {paths[0]}" in str(error.value)


def test_quantised_files_are_refused(tmp_path):
    paths = [tmp_path / f"step_{i}.safetensors" for i in (1, 2)]
    for path in paths:
        save_file({"l.weight": torch.zeros(4, dtype=torch.uint8), "l.weight.absmax": torch.ones(1)}, path)
    with pytest.raises(TypeError, match=rf"{paths[0]}: l.weight \(torch.uint8\) is quantised \(see l.weight.absmax\)"):
        merge_checkpoints(paths, tmp_path / "merged")


def test_lora_adapters(tmp_path):
    generator = torch.Generator().manual_seed(0)
    adapters = []
    for step in (1, 2, 3):
        state = {
            "base_model.model.q.lora_A.weight": torch.randn(2, 6, generator=generator),
            "base_model.model.q.lora_B.weight": torch.randn(4, 2, generator=generator),
        }
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(state, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "rank_pattern": {}}))
        adapters.append((folder, state))
    folders = [folder for folder, _ in adapters]
    with pytest.raises(ValueError, match="averaging A and B separately is not averaging B @ A"):
        merge_checkpoints(folders, tmp_path / "no")
    result = merge_checkpoints(folders, tmp_path / "merged", curve="1-sqrt", lora="merge_delta")
    merged = read_artifact(result.output)
    config = json.loads((result.output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (6, 24)  # alpha / r, the adapter's scale, is what it was
    a, b = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"
    expected = sum(
        float(c) * s[b].double() @ s[a].double() for c, (_, s) in zip(result.weights.c, adapters, strict=True)
    )
    torch.testing.assert_close((merged[b].double() @ merged[a].double()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["lightning", "safetensors", "distributed"])
def test_a_truncated_checkpoint_is_named(kind, tmp_path):
    paths = write(kind, tmp_path / "in", state_dicts())
    victim = paths[1] if paths[1].is_file() else next(paths[1].glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-300])
    with pytest.raises(ValueError, match=rf"{victim} is truncated"):
        merge_checkpoints(paths, tmp_path / "merged")


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere.ckpt"):
        merge_checkpoints([tmp_path / "nowhere.ckpt"], tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no checkpoints"):
        merge_checkpoints(tmp_path / "empty", tmp_path / "m")
    (tmp_path / "a.ckpt").write_text("hello")
    with pytest.raises(ValueError, match=r"a.ckpt is truncated or not a checkpoint"):
        merge_checkpoints([tmp_path / "a.ckpt"], tmp_path / "m")
    torch.save(3, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match=r"b.ckpt holds a int, not a state dict"):
        merge_checkpoints([tmp_path / "b.ckpt"], tmp_path / "m")
    with pytest.raises(ValueError, match="inputs is empty"):
        merge_checkpoints([], tmp_path / "m")


class _Surprise:
    def __reduce__(self):
        return os.mkdir, ("surprise",)


@pytest.mark.parametrize("kind", ["lightning", "distributed"])
def test_pickled_code_is_not_run(kind, tmp_path):
    import pickle

    paths = write(kind, tmp_path / "in", state_dicts())
    if kind == "lightning":
        save_lightning(paths[0], state_dicts()[0], 100, callbacks={"x": _Surprise()})
        message = r"holds objects that are not plain data"
    else:
        (paths[0] / ".metadata").write_bytes(pickle.dumps(_Surprise()))
        message = r"holds (posix|nt).mkdir, which does not belong there"
    with pytest.raises(ValueError, match=message):
        merge_checkpoints(paths, tmp_path / "merged")
    assert not (tmp_path / "surprise").exists()


def test_unknown_names_are_refused_before_anything_is_read(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts())
    for arguments, message in (
        ({"curve": "sqrt"}, "unknown curve 'sqrt': known are linear"),
        ({"unit": "epochs"}, "unit must be 'steps' or 'tokens', got 'epochs'"),
        ({"strip_prefix": "net."}, r"strip_prefix='net.', but model.\S+ does not start with it"),
        ({"max_shard_size": "5 potatoes"}, "a size looks like 5GB or 500MB"),
        ({"output_dtype": "int4"}, "'int4' is no dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_checkpoints(paths, tmp_path / "merged", **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    paths = write("lightning", tmp_path / "in", state_dicts())

    def full(descriptor, view, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"cannot write the merge to .*merged: the disk or quota of .* is full"):
        merge_checkpoints(paths, tmp_path / "merged")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# ---------------------------------------------------------------------------------------------------- memory, reading


def big_checkpoints(directory, num, rows):
    states = [
        {"a.weight": torch.full((rows, 1024), float(j)), "b.weight": torch.full((rows, 1024), -1.0)} for j in range(num)
    ]
    return write("safetensors", directory, states, list(range(1, num + 1)))


def test_memory_stays_below_two_tensors_and_100_mb(tmp_path):
    paths = big_checkpoints(tmp_path / "in", 6, 16384)  # 2 x 64 MB each
    code = f"""
from pathlib import Path
from fulgurite.callbacks.checkpoint_merging import merge_checkpoints
def status(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field))
paths = {[str(p) for p in paths]!r}
merge_checkpoints(paths[:2], {str(tmp_path / "warm.ckpt")!r})
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
merge_checkpoints(paths, {str(tmp_path / "merged.ckpt")!r}, curve="1-sqrt")
print(status("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * 64 * 2**20 + 100e6
    assert int(done.stdout) < 50e6  # in fact it does not grow with the tensor
    merged = read_artifact(tmp_path / "merged.ckpt")["a.weight"]
    expected = sum(float(c) * j for j, c in enumerate(merge_weights(6, "1-sqrt").c))
    assert merged.min() == merged.max() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_each_byte_is_read_once(recorded, tmp_path, monkeypatch):
    paths = big_checkpoints(tmp_path / "in", 3, 300)
    if recorded:
        for path in paths:
            path.with_name(path.name + ".sha256").write_text(f"{sha256(path)}  {path.name}\n")
    count = {"bytes": 0}
    lock = threading.Lock()
    preadv, pread = os.preadv, os.pread

    def counted_v(descriptor, buffers, offset):
        done = preadv(descriptor, buffers, offset)
        with lock:
            count["bytes"] += done
        return done

    def counted(descriptor, size, offset):
        data = pread(descriptor, size, offset)
        with lock:
            count["bytes"] += len(data)
        return data

    monkeypatch.setattr(os, "preadv", counted_v)
    monkeypatch.setattr(os, "pread", counted)
    result = merge_checkpoints(paths, tmp_path / "merged.safetensors")
    total = sum(path.stat().st_size for path in paths)
    assert total <= count["bytes"] + 3 * 300
    assert count["bytes"] < total + 10_000  # headers are read to find the tensors, and again for the digest
    assert [i["sha256"] for i in json.loads(result.sidecar.read_text())["inputs"]] == [sha256(p) for p in paths]


def test_progress_reaches_the_total(tmp_path):
    seen = []
    paths = big_checkpoints(tmp_path / "in", 3, 300)
    merge_checkpoints(paths, tmp_path / "merged", on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * 3 * 300 * 1024 * 4,) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_number_of_workers_changes_nothing(cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    generator = torch.Generator().manual_seed(0)
    states = [{f"p{i}": torch.randn(200, 777, generator=generator) for i in range(3)} for _ in range(4)]
    paths = write("safetensors", tmp_path / "in", states)
    result = merge_checkpoints(paths, tmp_path / "merged.ckpt", curve="cosine")
    merged, expected = read_artifact(result.output), merge_state_dicts(states, merge_weights(STEPS, "cosine").c)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    described = json.loads(result.sidecar.read_text())
    assert [i["sha256"] for i in described["inputs"]] == [sha256(p) for p in paths]
    record = result.output.with_name("merged.ckpt.sha256").read_text()
    assert record.splitlines()[1] == f"{sha256(result.output)}  merged.ckpt"


def test_explicit_weights_need_inputs_listed_oldest_first(tmp_path):
    paths = write("lightning", tmp_path / "in", state_dicts(3), STEPS[:3])
    shuffled = [paths[1], paths[0], paths[2]]
    for explicit in ({"c": [0.5, 0.25, 0.25]}, {"w": [0.5, 0.25]}, {"curve": [0.5, 0.25]}):
        with pytest.raises(ValueError, match="inputs lists positions 110, 100, 120: list them"):
            merge_checkpoints(shuffled, tmp_path / "no.safetensors", **explicit)
    listed = merge_checkpoints(paths, tmp_path / "a.safetensors", c=[0.5, 0.25, 0.25])
    folder = merge_checkpoints([tmp_path / "in"], tmp_path / "b.safetensors", c=[0.5, 0.25, 0.25])
    assert listed.inputs == folder.inputs == paths


def test_copied_floats_keep_their_dtype_in_files_too(tmp_path):
    states = state_dicts(2)
    paths = write("safetensors", tmp_path, [untied(state) for state in states], STEPS[:2])
    options = {"exclude": ["*.running_mean"], "output_dtype": "bfloat16"}
    merged = read_artifact(merge_checkpoints(paths, tmp_path / "merged.safetensors", **options).output)
    expected = merge_state_dicts(states, [0.5, 0.5], **options)
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype
    assert merged["model.norm.running_mean"].dtype == torch.float32


@pytest.mark.parametrize("ties", [(True, False), (False, True), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("output", ["merged.pt", "merged.safetensors"])
def test_files_may_differ_in_what_is_tied(ties, output, tmp_path):
    states = [state_dicts(len(ties), tied=tied)[j] for j, tied in enumerate(ties)]
    c = merge_weights(len(ties), "1-sqrt").c
    paths = write("torch", tmp_path, states, STEPS[: len(ties)])
    result = merge_checkpoints(paths, tmp_path / output, c=c)
    merged, expected = read_artifact(result.output), merge_state_dicts(states, c)
    head, embedding = "model.lm_head.weight", "model.embed.weight"
    assert torch.equal(merged[embedding], expected[embedding])
    if output == "merged.pt" or not ties[-1]:
        assert torch.equal(merged[head], expected[head])
    assert torch.equal(expected[head], expected[embedding]) == ties[-1]
    assert json.loads(result.sidecar.read_text())["inputs"][0]["sha256"] == sha256(paths[0])
