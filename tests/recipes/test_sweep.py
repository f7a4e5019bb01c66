"""merge/sweep: the table holds what merging and validating by hand give, and nothing is computed twice."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from fulgurite.callbacks.checkpoint_merging import merge_state_dicts, merge_weights
from fulgurite.recipes import sweep as sweep_module
from fulgurite.recipes.errors import UserError
from fulgurite.recipes.sweep import MergeSweep, default_durations, parse_curve, typical_spacing

CURVES = ["linear", "polynomial(p=1)", "1-sqrt", "ema(r=0.3)"]


@pytest.fixture(scope="module")
def made():
    """Where the one run of this file is kept."""
    return {}


@pytest.fixture
def run_dir(tiny, lightning, made, tmp_path, tmp_path_factory):
    """A finished run with checkpoints after steps 2, 4, ... 12; trained once, copied for each test."""
    if not made:
        result = lightning(
            "run", tiny, "--trainer.max_steps", "12", "--trainer.val_check_interval", "6",
            "--trainer.callbacks.1.init_args.every_n_train_steps", "2",
        )  # fmt: skip
        assert result.code == 0, result.err
        made["copy"] = tmp_path_factory.mktemp("run") / "copy"
        shutil.copytree(next(Path("runs/tiny").iterdir()), made["copy"])
        shutil.rmtree("runs")
    return Path(shutil.copytree(made["copy"], tmp_path / "runs" / "tiny" / "one")).resolve()


def by_hand(run_dir, steps, c):
    """Validation loss of a merge without any of the sweep's code: weights into the model, batches through it."""
    config = sweep_module.yaml.safe_load((run_dir / "config.yaml").read_text())
    import lightning.pytorch as pl

    from fulgurite.datamodules.text import TextDataModule
    from fulgurite.lightning_modules.pretraining import PretrainingModule

    states = [
        torch.load(run_dir / "checkpoints" / f"resume-step={step}.ckpt", weights_only=True)["state_dict"]
        for step in steps
    ]
    module, data = PretrainingModule(**config["model"]["init_args"]), TextDataModule(**config["data"]["init_args"])
    merged = merge_state_dicts(states, c)

    class Load(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            pl_module.load_state_dict(merged)

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, limit_val_batches=2, logger=False, enable_progress_bar=False, callbacks=[Load()],
        enable_checkpointing=False, enable_model_summary=False, precision=config["trainer"]["precision"],
    )  # fmt: skip
    return trainer.validate(module, data, verbose=False)[0]["val_loss"]


def test_the_command_fills_table_figures_and_mlflow(run_dir, lightning):
    result = lightning(
        "run", "merge/sweep", "--task.run_dir", str(run_dir), "--task.curves", "[linear, ema(r=0.3)]",
        "--task.durations", "[4, 12, 40]", "--task.intervals", "[2, 4]",
    )  # fmt: skip
    assert result.code == 0, result.err
    (output,) = Path("runs/merge-sweep").iterdir()
    found = json.loads((output / "sweep.json").read_text())
    assert found["live"] == pytest.approx(by_hand(run_dir, [12], [1.0]), abs=1e-6)
    cells = {(c["curve"], c["duration"], c["interval"]): c for c in found["cells"]}
    assert len(cells) == 12
    assert (cells["linear", 12.0, 4.0]["first"], cells["linear", 12.0, 4.0]["last"]) == (4, 12)
    for curve, args in (("linear", {}), ("ema(r=0.3)", {"r": 0.3})):
        weights = merge_weights([4, 8, 12], curve.partition("(")[0], **args)
        assert cells[curve, 12.0, 4.0]["loss"] == pytest.approx(by_hand(run_dir, [4, 8, 12], weights.c), abs=1e-6)
    assert "fewer than two" in cells["linear", 4.0, 4.0]["note"]
    assert "20 checkpoints every 2 were asked for" in cells["linear", 40.0, 2.0]["note"]
    rows = list(csv.DictReader((output / "sweep.csv").open()))
    assert len(rows) == 12
    assert float(rows[0]["loss"]) == cells["linear", 4.0, 2.0]["loss"]
    for name in ("heat_map.png", "durations.png", "intervals.png", "best_weights.png"):
        assert (output / "plots" / name).read_bytes().startswith(b"\x89PNG")
    losses = [c["loss"] for c in found["cells"] if c["loss"] is not None]
    for text in ("n=6", "ema(r=0.3)", f"{min(losses):.4f}", f"live weights {found['live']:.4f}", "–"):
        assert text in result.out

    from mlflow.tracking import MlflowClient

    client = MlflowClient("sqlite:///mlruns/mlflow.db")
    (logged,) = client.search_runs([client.get_experiment_by_name("merge/sweep").experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.tags["merged_mlflow_run"] == json.loads((run_dir / "run.json").read_text())["mlflow_run_id"]
    history = client.get_metric_history(logged.info.run_id, "val_loss_linear_every_2")
    assert {m.step: m.value for m in history} == {
        d: cells["linear", float(d), 2.0]["loss"] for d in (4, 12)
    }  # the duration is the axis
    artifacts = {a.path for a in client.list_artifacts(logged.info.run_id)}
    assert {"sweep.csv", "sweep.json", "plots"} <= artifacts

    # the printed command makes the best merge
    (command,) = (line for line in result.out.splitlines() if line.startswith("make it"))
    made = lightning(*command.removeprefix("make it  lightning ").split())
    assert made.code == 0, made.err
    best = min((c for c in found["cells"] if c["loss"] is not None), key=lambda c: c["loss"])
    provenance = json.loads(Path("merged-best/merge.json").read_text())
    assert (provenance["steps"][0], len(provenance["steps"])) == (best["first"], best["num_checkpoints"])
    assert provenance["curve"] == best["curve"].partition("(")[0]


def test_nothing_is_computed_twice_and_a_broken_sweep_goes_on(run_dir, monkeypatch):
    calls, limit = [], 3
    evaluate = sweep_module.Evaluation.__call__

    def counted(self, window, c):
        if len(calls) == limit:
            raise KeyboardInterrupt
        calls.append([position for position, _ in window])
        return evaluate(self, window, c)

    monkeypatch.setattr(sweep_module.Evaluation, "__call__", counted)
    arguments = {"run_dir": str(run_dir), "curves": CURVES, "durations": [8.0], "intervals": [2.0]}
    with pytest.raises(KeyboardInterrupt):
        MergeSweep(**arguments).run()
    assert calls == [[12], [6, 8, 10, 12], [6, 8, 10, 12]]  # live, linear (= polynomial(p=1)), 1-sqrt
    calls.clear()
    limit = 100
    cells = {cell.curve: cell.loss for cell in MergeSweep(**arguments).run()}
    assert calls == [[6, 8, 10, 12]]  # only what was missing: ema
    assert cells["linear"] == cells["polynomial(p=1)"]
    assert len(set(cells.values())) == 3
    calls.clear()
    again = {cell.curve: cell.loss for cell in MergeSweep(**arguments).run()}
    assert (calls, again) == ([], cells)
    MergeSweep(**arguments, limit_val_batches=1).run()  # another evaluation is another loss
    assert len(calls) == 4


def test_tokens_are_positions_when_asked(run_dir):
    cells = MergeSweep(str(run_dir), ["linear"], unit="tokens", limit_val_batches=1).run()
    steps = MergeSweep(str(run_dir), ["linear"], limit_val_batches=1).run()
    tokens_a_step = cells[0].last / 12
    assert [c.duration / tokens_a_step for c in cells] == [c.duration for c in steps]
    assert [c.loss for c in cells] == [c.loss for c in steps]


def test_a_curve_that_needs_positive_positions_is_no_mistake_before_they_are_known(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    assert MergeSweep(str(tmp_path), ["inv_sqrt"]).curves == {"inv_sqrt": ("inv_sqrt", {})}


def test_defaults_of_the_grid():
    assert typical_spacing([10, 20, 30, 35, 45]) == 10
    assert default_durations(10, 12) == [20, 40, 80, 120]
    assert default_durations(10, 2) == [20]
    assert parse_curve("ema( r=0.3 )") == ("ema", {"r": 0.3})
    assert parse_curve("1-sqrt") == ("1-sqrt", {})


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="there is no run with two or more checkpoints under runs/: start with"):
        MergeSweep()
    with pytest.raises(UserError, match=r"nowhere is not the folder of a run \(it has no config.yaml\)"):
        MergeSweep("nowhere")
    (tmp_path / "config.yaml").write_text("task: {}\n")
    for curve, message in (
        ("sqrt", "curve 'sqrt': unknown curve 'sqrt': known are linear"),
        ("ema(r=2)", r"curve 'ema\(r=2\)': r must lie strictly between 0 and 1"),
        ("ema(r)", r"curve 'ema\(r\)': 'r' is not name=number"),
        ("ema(", r"curve 'ema\(' does not look like"),
    ):
        with pytest.raises(UserError, match=message):
            MergeSweep(str(tmp_path), [curve])
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        torch.save({"state_dict": {"w": torch.ones(1)}, "global_step": step}, tmp_path / "checkpoints" / f"{step}.ckpt")
    with pytest.raises(UserError, match=r"config.yaml has no model: it is not the folder of a training run"):
        MergeSweep(str(tmp_path)).run()
