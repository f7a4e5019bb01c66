"""Whole runs of a tiny recipe through the command, in this process."""

import json
import shlex
import threading
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.recipes import rundir


def only_run(recipe="tiny"):
    (path,) = Path("runs", recipe).iterdir()
    return path


def record(path):
    return json.loads((path / "run.json").read_text())


@pytest.fixture
def finished(lightning, tiny):
    result = lightning("run", tiny)
    assert result.code == 0, result.err
    return result


def test_a_run_leaves_everything_in_its_folder(finished):
    run = only_run()
    assert record(run)["status"] == "finished"
    assert record(run)["recipe"] == "tiny"
    assert record(run)["command"] == "lightning run tiny.yaml"
    assert record(run)["mlflow_run_id"]
    assert sorted(path.name for path in (run / "checkpoints").glob("*.ckpt")) == [
        "resume-step=3.ckpt",
        "resume-step=6.ckpt",
    ]
    assert {"config.json", "model.safetensors", "tokenizer.json", "merge.json"} <= {
        path.name for path in (run / "merged").iterdir()
    }
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    assert Path("mlruns/mlflow.db").is_file()
    assert not (run / rundir.ERROR_FILE).exists()


def test_the_saved_recipe_is_complete_and_runs_again(finished, lightning):
    """What is kept is the resolved recipe: the same checkpoints follow from it alone."""
    first = only_run()
    config = yaml.safe_load((first / "config.yaml").read_text())
    assert config["data"]["init_args"]["num_workers"] == 0  # a default that the recipe does not name
    Path("again.yaml").write_text((first / "config.yaml").read_text())
    assert lightning("run", "again.yaml").code == 0
    second = only_run("again")
    weights = [
        torch.load(run / "checkpoints/resume-step=6.ckpt", weights_only=True)["state_dict"] for run in (first, second)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_summary_is_printed_and_kept(finished):
    run = only_run()
    kept = (run / "summary.txt").read_text()
    for text in (kept, finished.out):
        assert f"merged model             {run}/merged" in text
        assert f"checkpoint               {run}/checkpoints/resume-step=6.ckpt" in text
        assert "steps                    6, 192 tokens" in text
        assert f"MLflow run               {record(run)['mlflow_run_id']} in mlruns/mlflow.db  (lightning ui)" in text
        lines = text.splitlines()
        live, merged = (
            next(float(line.split()[3]) for line in lines if f"loss, {kind}" in line) for kind in ("live", "merged")
        )
        gap = next(line for line in lines if line.startswith("gap"))
        assert float(gap.split()[1].rstrip(":")) == pytest.approx(live - merged, abs=2e-4)
        assert record(run)["metrics"]["val_loss_merged"] == pytest.approx(merged, abs=1e-4)


def test_the_three_next_commands_are_real(finished, lightning, monkeypatch):
    """Each is parsed by the command it names; the one that trains on is run."""
    commands = [line for line in finished.out.splitlines() if line.startswith("lightning ")]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "run":
            assert lightning(*words, "--print_config").code == 0, command
    longer = next(command for command in commands if "--resume" in command)
    assert lightning(*shlex.split(longer)[1:]).code == 0
    assert torch.load(only_run() / "checkpoints/resume-step=12.ckpt", weights_only=True)["global_step"] == 12


def test_print_config_is_complete_yaml_and_runs_nothing(lightning, tiny):
    result = lightning("run", tiny, "--model.learning_rate", "5e-3", "--print_config")
    config = yaml.safe_load(result.out)
    assert result.code == 0
    assert config["model"]["init_args"]["learning_rate"] == 5e-3
    assert config["trainer"]["use_distributed_sampler"] is False
    assert config["trainer"]["callbacks"][0]["init_args"]["grid"] == "virtual_end"
    assert not Path("runs").exists()


def test_print_config_can_be_run(lightning, tiny):
    Path("printed.yaml").write_text(lightning("run", tiny, "--print_config").out)
    assert lightning("run", "printed.yaml", "--trainer.max_steps", "3").code == 0


def test_seed_reaches_weights_and_data(lightning, tiny):
    config = yaml.safe_load(lightning("run", tiny, "--seed", "3", "--print_config").out)
    assert config["seed_everything"] == 3
    assert config["data"]["init_args"]["seed"] == 3
    config = yaml.safe_load(lightning("run", tiny, "--seed", "3", "--data.seed", "5", "--print_config").out)
    assert config["data"]["init_args"]["seed"] == 5


def test_two_seeds_give_two_models_and_one_seed_one(lightning, tiny):
    weights = []
    for seed in (3, 3, 4):
        assert (
            lightning("run", tiny, "--seed", str(seed), "--trainer.max_steps", "3", "--trainer.logger", "false").code
            == 0
        )
        newest = max(Path("runs/tiny").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        weights.append(torch.load(newest / "checkpoints/resume-step=3.ckpt", weights_only=True)["state_dict"])
    name = "model.model.embed_tokens.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_a_recipe_may_bring_its_own_parts(lightning, tiny):
    """What the recipe already has is not added a second time, and `logger: false` is obeyed."""
    text = Path(tiny).read_text()
    guard = "    - class_path: fulgurite.callbacks.guards.NonFiniteGuard\n      init_args: {action: skip}\nmodel:"
    Path(tiny).write_text(text.replace("\nmodel:", guard, 1).replace("log_every", "logger: false\n  log_every"))
    assert lightning("run", tiny).code == 0
    assert not Path("mlruns").exists()
    state = torch.load(only_run() / "checkpoints/resume-step=6.ckpt", weights_only=True)["callbacks"]
    assert [key for key in state if "NonFiniteGuard" in key] == ["NonFiniteGuard"]


def test_default_root_dir_chooses_the_folder(lightning, tiny, tmp_path):
    assert lightning("run", tiny, "--trainer.default_root_dir", str(tmp_path / "mine")).code == 0
    assert record(tmp_path / "mine")["status"] == "finished"
    assert not Path("runs").exists()


def test_a_folder_with_checkpoints_is_not_used_for_a_new_run(finished, refusal, monkeypatch):
    monkeypatch.setenv("FULGURITE_RUN_DIR", str(only_run().absolute()))
    message = "already holds a run: add --resume auto to go on with it, or choose another folder."
    monkeypatch.delenv("FULGURITE_RUN_DIR")
    assert message in refusal("run", "tiny.yaml", "--trainer.default_root_dir", str(only_run()))


def test_a_failed_training_is_marked_and_keeps_its_traceback(lightning, tiny):
    """A loss that is not a number: exit code 1, one line, and a checkpoint to go on from."""
    result = lightning("run", tiny, "--model.learning_rate", "1e30")
    run = only_run()
    assert result.code == 1
    assert len(result.errors) == 1
    assert "The loss of optimizer step" in result.errors[0]
    assert record(run)["status"] == "failed"
    assert "NonFiniteError" in (run / rundir.ERROR_FILE).read_text()


def test_a_bug_keeps_its_traceback(lightning, tiny, tmp_path, monkeypatch):
    (tmp_path / "buggy.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n"
        "class Buggy(Callback):\n"
        "    def on_train_start(self, trainer, pl_module):\n"
        "        raise KeyError('a bug')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    Path(tiny).write_text(Path(tiny).read_text().replace("\nmodel:", "    - class_path: buggy.Buggy\nmodel:", 1))
    with pytest.raises(KeyError, match="a bug"):
        lightning("run", tiny)
    assert record(only_run())["status"] == "failed"


TASK = """\
import os, json, pathlib
class Task:
    def __init__(self, words: list[str], times: int = 2):
        self.words, self.times = words, times
    def run(self):
        out = pathlib.Path(os.environ["FULGURITE_RUN_DIR"]) / "out.json"
        out.write_text(json.dumps(self.words * self.times))
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "task.yaml").write_text("# Repeats\ntask:\n  class_path: my_task.Task\n  init_args:\n    words: [a]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "task.yaml"


def test_a_recipe_without_trainer_runs_its_task(lightning, task):
    assert lightning("run", task, "--task.times", "3").code == 0
    run = only_run("task")
    assert json.loads((run / "out.json").read_text()) == ["a", "a", "a"]
    assert record(run)["status"] == "finished"
    assert record(run)["overrides"] == ["task.times=3"]


def test_mistakes_in_a_task(refusal, task):
    assert refusal("run", task, "--task.time", "3") == "task has no key task.time. Did you mean task.times?"
    assert refusal("run", task, "--task.words", "3") == "task: task.words is '3'; expected list of string."
    assert refusal("run", task, "--trainer.max_steps", "3").startswith("task has no key trainer.max_steps.")


def test_no_thread_is_left(finished):
    assert [thread.name for thread in threading.enumerate() if "mlflow" in thread.name and thread.is_alive()] == []


def test_ctrl_c_before_training_exits_130(lightning, tiny, monkeypatch):
    from fulgurite.datamodules.text import TextDataModule

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(TextDataModule, "prepare_data", interrupted)
    result = lightning("run", tiny)
    assert result.code == 130
    assert "Interrupted; nothing saved." in result.err
    assert record(only_run())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("units", "words", "precision"),
    [
        (False, [], "32-true"),
        (True, [], "bf16-mixed"),
        (False, ["--trainer.precision", "bf16-mixed"], "bf16-mixed"),
    ],
)
def test_bf16_needs_a_processor_with_bf16_units(lightning, tiny, monkeypatch, recwarn, units, words, precision):
    """Without them the recipe's bf16-mixed becomes float32, and says so, unless it is asked for on the command line."""
    Path(tiny).write_text(Path(tiny).read_text().replace("  devices: 1", "  devices: 1\n  precision: bf16-mixed"))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    result = lightning("run", tiny, *words, "--print_config")
    assert yaml.safe_load(result.out)["trainer"]["precision"] == precision
    warned = any("no bfloat16 units" in str(warning.message) for warning in recwarn)
    assert warned == (precision == "32-true")


def test_output_settings_are_put_back(lightning, tiny):
    import logging
    import warnings

    before = warnings.formatwarning, logging.getLogger("fulgurite").propagate, list(warnings.filters)
    lightning("run", tiny, "--print_config")
    assert (warnings.formatwarning, logging.getLogger("fulgurite").propagate, list(warnings.filters)) == before


def test_the_summary_says_when_the_losses_are_older_than_the_weights(lightning, tiny):
    """Five steps, validated at the third."""
    lines = lightning("run", tiny, "--trainer.max_steps", "5", "--trainer.logger", "false").out.splitlines()
    assert next(line for line in lines if line.startswith("validation loss, live")).endswith("at step 3")
    assert next(line for line in lines if line.startswith("steps")).split()[1] == "5,"
