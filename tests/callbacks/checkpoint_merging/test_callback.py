"""CheckpointMerge in one process: what enters the merge and when, validation and export of the merged weights."""

import importlib.util
import json
import random
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader

from fulgurite.callbacks.checkpoint_merging import CheckpointMerge, merge_weights

_spec = importlib.util.spec_from_file_location("merge_toy", Path(__file__).with_name("toy.py"))
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)
run, same, snapshot = toy.run, toy.same, toy.snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Recorder(pl.Callback):
    """Weights after every optimizer update, by `global_step`."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights.setdefault(trainer.global_step, snapshot(pl_module))


def weighted_mean(states, c):
    """Reference merge in float64; integer tensors of the newest."""
    newest = states[-1]
    return {
        name: sum(c_j * state[name].double() for c_j, state in zip(c, states, strict=True))
        if newest[name].is_floating_point()
        else newest[name]
        for name in newest
    }


def assert_close(merged, reference, tolerance=1e-6):
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.double(), reference[name].double(), rtol=0, atol=tolerance, msg=name)


# ---------------------------------------------------------------------------------------------- what enters the merge


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [4, 8, 12, 16, 20]),
        ({"curve": "1-sqrt"}, [4, 8, 12, 16, 20]),
        ({"curve": "polynomial", "curve_args": {"p": 2.0}, "min_ratio": 0.1}, [4, 8, 12, 16, 20]),
        ({"curve": "ema", "curve_args": {"beta": 0.7}}, [4, 8, 12, 16, 20]),
        ({"curve": "sma"}, [4, 8, 12, 16, 20]),
        ({"curve": "wma"}, [4, 8, 12, 16, 20]),
        ({"num_checkpoints": 3, "curve": "ema"}, [12, 16, 20]),
        ({"num_checkpoints": 3, "curve": "cosine", "grid": "schedule"}, [12, 16, 20]),
        ({"num_checkpoints": 3, "curve": "lawa", "storage": "cpu"}, [12, 16, 20]),
        ({"num_checkpoints": 3, "curve": [0.8, 0.3], "storage": "disk"}, [12, 16, 20]),
        ({"num_checkpoints": 3, "curve": "cosine", "mode": "fixed"}, [4, 8, 12]),
        ({"start_step": 10, "num_checkpoints": 8, "grid": "interval_mean"}, [12, 16, 20]),
    ],
)
def test_merge_is_the_weighted_mean_of_the_run_s_own_weights(tmp_path, settings, steps):
    recorder, callback = Recorder(), CheckpointMerge(4, **settings)
    run(tmp_path, callback, callbacks=[recorder], limit_val_batches=0)
    assert callback.positions == steps
    arguments = {k: v for k, v in settings.items() if k in ("curve", "grid", "min_ratio")}
    c = merge_weights(steps, **arguments, **settings.get("curve_args", {})).c
    reference = weighted_mean([recorder.weights[step] for step in steps], c)
    merged = callback.merged_state_dict()
    assert_close(merged, reference)
    assert merged["net.1.num_batches_tracked"] == recorder.weights[steps[-1]]["net.1.num_batches_tracked"]
    assert callback.merge_info()["c"] == pytest.approx(list(c), abs=1e-12)
    # the newest snapshot is a copy: had it been the live tensor, it would have moved with the run
    assert recorder.weights[20]["net.0.weight"].ne(merged["net.0.weight"]).any()


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_batches_make_one_snapshot_a_step(tmp_path, accumulate):
    recorder, callback = Recorder(), CheckpointMerge(2)
    updates = []
    original = callback._after_update
    callback._after_update = lambda *a: (updates.append(a[0].global_step), original(*a))
    run(tmp_path, callback, callbacks=[recorder], accumulate_grad_batches=accumulate, max_steps=9)
    assert updates == list(range(1, 10))
    assert callback.positions == [2, 4, 6, 8]
    assert_close(callback.merged_state_dict(), weighted_mean([recorder.weights[s] for s in (2, 4, 6, 8)], [0.25] * 4))


class TwoOptimizers(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[:3].parameters(), 0.1), torch.optim.SGD(self.net[3].parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_two_optimizers_make_one_step_a_batch(tmp_path):
    recorder, callback = Recorder(), CheckpointMerge(3)
    run(tmp_path, callback, TwoOptimizers(), callbacks=[recorder], max_steps=20)
    assert callback.positions == [3, 6, 9]
    assert callback.merge_info()["global_steps"] == [6, 12, 18]
    assert_close(callback.merged_state_dict(), weighted_mean([recorder.weights[s] for s in (6, 12, 18)], [1 / 3] * 3))


def test_frozen_parameters_are_not_stored(tmp_path):
    module = toy.Toy()
    module.net[0].requires_grad_(False)
    callback = CheckpointMerge(4)
    run(tmp_path, callback, module)
    assert "net.0.weight" not in callback.merged_state_dict()
    assert "net.3.weight" in callback.merged_state_dict()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_precision_of_the_parameters_is_kept_and_accumulation_is_wide(tmp_path, precision, dtype):
    recorder, callback = Recorder(), CheckpointMerge(1, export_dir="merged")
    run(tmp_path, callback, callbacks=[recorder], precision=precision, max_steps=16)
    merged = callback.merged_state_dict()
    assert merged["net.0.weight"].dtype == dtype
    reference = weighted_mean([recorder.weights[s] for s in range(1, 17)], [1 / 16] * 16)
    for name in ("net.0.weight", "net.3.weight"):
        exact = reference[name]
        if dtype == torch.float64:
            torch.testing.assert_close(merged[name], exact, rtol=0, atol=1e-15)
        else:  # the exact mean rounded once (bf16 accumulation is not)
            assert (merged[name] == exact.to(dtype)).double().mean() > 0.97


# ---------------------------------------------------------------------------------------------------- learning rate


def warmup(length):
    return lambda step: min(1.0, step / length)


def test_no_snapshot_before_the_learning_rate_has_stopped_rising(tmp_path):
    callback = CheckpointMerge(1)
    run(tmp_path, callback, toy.Toy(warmup(7)), max_steps=12)
    # updates 1..7 were made at lr 0..6/7; update 8 is the first at the peak, so theta_8 is known to be past the warmup
    assert callback.positions == [8, 9, 10, 11, 12]
    info = callback.merge_info()
    assert info["learning_rates"] == [0.05] * 4
    assert info["effective_decay"] == info["w"]


def test_explicit_start_may_be_the_last_warmup_step_but_not_earlier(tmp_path):
    callback = CheckpointMerge(1, start_step=7)
    run(tmp_path / "a", callback, toy.Toy(warmup(7)), max_steps=12)
    assert callback.positions == [7, 8, 9, 10, 11, 12]
    with pytest.raises(ValueError, match=r"rose from 0\.0428571 to 0\.05 at step 8.*start_step=6 lies in the warmup"):
        run(tmp_path / "b", CheckpointMerge(1, start_step=6), toy.Toy(warmup(7)), max_steps=12)


def test_a_later_rise_starts_a_new_window(tmp_path):
    callback = CheckpointMerge(2)
    rates = lambda step: 1.0 if step < 8 else 1.0 + (min(step, 12) - 8) / 4  # noqa: E731
    with pytest.warns(UserWarning, match="window starts anew"):
        run(tmp_path, callback, toy.Toy(rates), max_steps=20)
    assert callback.positions == [14, 16, 18, 20]
    assert callback.merge_info()["peak_learning_rate"] == pytest.approx(0.1)


def test_a_fall_inside_the_window_warns_once_and_is_recorded(tmp_path):
    callback = CheckpointMerge(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, callback, toy.Toy(lambda step: 1.0 if step < 10 else 1.0 - (step - 9) / 20), max_steps=20)
    assert len([w for w in caught if "learning rate fell" in str(w.message)]) == 1
    info = callback.merge_info()
    means = [0.05, 0.05 * np.mean([0.95, 0.9, 0.85, 0.8, 0.75]), 0.05 * np.mean([0.7, 0.65, 0.6, 0.55, 0.5])]
    assert info["learning_rates"] == pytest.approx(means)
    assert info["effective_decay"] == pytest.approx([w * m / 0.05 for w, m in zip(info["w"], means, strict=True)])


# ----------------------------------------------------------------------------------------------- the run is untouched


class Careless(toy.Toy):
    """Validation that draws from every random state, counts in a buffer and in attributes, and keeps a metric."""

    def __init__(self, sums):
        super().__init__(sums=False)
        import torchmetrics

        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.number, self.nested = 0, {"a": [[0]]}
        self.generator = torch.Generator().manual_seed(5)
        if sums:
            self.validation_sums = lambda batch: self._disturb() or self._sums(batch)

    def _disturb(self):
        random.random(), np.random.rand(), torch.rand(3, generator=self.generator), torch.rand(2)
        self.calls += 1
        self.scratch += 1
        self.number += 1
        self.nested["a"][0].append(self.number)

    def validation_step(self, batch, batch_idx):
        self._disturb()
        self.metric.update(self.loss(batch))
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("metric", self.metric.compute())
        self.metric.reset()


class Spy(pl.Callback):
    """All that must not differ, after each validation and at the end."""

    def __init__(self):
        self.seen = []

    def look(self, trainer, module):
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        self.seen.append(
            {
                "weights": {n: t.clone() for n, t in module.state_dict().items()},
                "scratch": module.scratch.clone(),
                "optimizer": str(trainer.optimizers[0].state_dict()),
                "rng": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
                "grads": str(grads),
                "mode": [m.training for m in module.modules()],
                "attributes": (module.number, str(module.nested), module.generator.get_state().tolist()),
                "metrics": {k: float(v) for k, v in trainer.callback_metrics.items() if "merged" not in k},
                "versions": sum(p.grad is not None for p in module.parameters()),
            }
        )

    def on_validation_end(self, trainer, pl_module):
        self.look(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.look(trainer, pl_module)


class ShuffledData(toy.OrderedData):
    def val_dataloader(self):
        self.loader = DataLoader(self.val, 4, shuffle=True, generator=torch.Generator().manual_seed(9))
        return self.loader


@pytest.mark.parametrize("sums", [True, False], ids=["validation_sums", "validation_step"])
@pytest.mark.parametrize("settings", [{}, {"num_checkpoints": 2, "storage": "disk"}, {"min_ratio": 0.2}])
def test_training_is_untouched_bit_for_bit(tmp_path, sums, settings):
    results = []
    for with_callback in (False, True):
        spy, data = Spy(), ShuffledData()
        callback = CheckpointMerge(2, export_dir="merged", export_every=4, **settings) if with_callback else None
        random.seed(1)
        np.random.seed(1)
        # 3 batches a step, validation every 5 batches: in the middle of an accumulation, with gradients in place
        run(
            tmp_path / str(with_callback),
            callback,
            Careless(sums),
            data,
            callbacks=[spy],
            accumulate_grad_batches=3,
            max_steps=10,
        )
        results.append((spy.seen, data.loader.generator.get_state()))
    (before, generator_before), (after, generator_after) = results
    assert len(before) == len(after) == 7
    assert any(look["versions"] for look in before[:-1])
    for a, b in zip(before, after, strict=True):
        assert same(a.pop("weights"), b.pop("weights"))
        assert torch.equal(a.pop("scratch"), b.pop("scratch"))
        assert a == b
    assert torch.equal(generator_before, generator_after)
    assert (tmp_path / "True" / "merged" / "merge.json").is_file()


@pytest.mark.parametrize("sums", [True, False])
def test_merged_validation_measures_the_merged_weights(tmp_path, sums):
    callback, data = CheckpointMerge(2, num_checkpoints=3, curve="cosine"), toy.OrderedData(val_batches=4)
    module, trainer = run(tmp_path, callback, toy.Toy(sums=sums), data)
    reference = toy.Toy()
    reference.load_state_dict(
        {
            **module.state_dict(),
            **callback.merged_state_dict(),
            "head.weight": callback.merged_state_dict()["net.3.weight"],
        }
    )
    reference.eval()
    loss = float(reference.loss(data.val.tensors))
    assert float(trainer.callback_metrics["val_loss_merged"]) == pytest.approx(loss, rel=1e-6)
    assert callback.history[-1]["val_loss_merged"] == pytest.approx(loss, rel=1e-6)
    assert callback.history[-1]["val_loss"] == float(trainer.callback_metrics["val_loss"]) != loss
    assert ("val_bpb_merged" in trainer.callback_metrics) is sums
    if sums:
        assert float(trainer.callback_metrics["val_bpb_merged"]) == pytest.approx(loss / np.log(2) / 3, rel=1e-6)
    assert trainer.progress_bar_metrics["val_loss_merged"] == pytest.approx(loss, rel=1e-6)
    assert "val_loss_merged" in trainer.logged_metrics


def test_several_validation_loaders_are_measured_together_and_apart(tmp_path):
    class TwoLoaders(toy.OrderedData):
        def val_dataloader(self):
            return [DataLoader(self.val, 4), DataLoader(torch.utils.data.Subset(self.val, range(4)), 4)]

    class Module(toy.Toy):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return self.loss(batch)

        def on_validation_epoch_end(self):
            pass

    _, trainer = run(tmp_path, CheckpointMerge(2), Module(), TwoLoaders())
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert metrics["val_loss_merged"] == pytest.approx(
        (3 * metrics["val_loss_merged_0"] + metrics["val_loss_merged_1"]) / 4, rel=1e-6
    )
    assert metrics["val_loss_merged_0"] != metrics["val_loss_merged_1"]


def test_model_checkpoint_monitors_the_merge_and_stores_the_live_weights(tmp_path):
    recorder, callback = Recorder(), CheckpointMerge(3)
    checkpoint = ModelCheckpoint(
        tmp_path / "c", "{step}-{val_loss_merged:.6f}", "val_loss_merged", save_top_k=-1, every_n_epochs=1
    )
    # the first validation comes before the second snapshot: the metric is there all the same, of the live weights
    run(tmp_path, callback, callbacks=[recorder, checkpoint], val_check_interval=4)
    paths = sorted((tmp_path / "c").glob("*.ckpt"), key=lambda p: int(p.stem.split("-")[0].split("=")[1]))
    assert len(paths) == 5
    for path in paths:
        saved = torch.load(path, weights_only=True)
        assert same(saved["state_dict"], recorder.weights[saved["global_step"]])
    merged = {entry["step"]: entry["val_loss_merged"] for entry in callback.history if "val_loss_merged" in entry}
    assert list(merged) == [8, 12, 16, 20]
    assert [entry["step"] for entry in callback.history if "val_loss" in entry] == [4, 8, 12, 16, 20]
    assert float(checkpoint.best_model_score) <= min(merged.values()) + 1e-6


class Failing(toy.Toy):
    """The second pass fails in its second batch."""

    def __init__(self):
        super().__init__(sums=False)
        self.calls_left = None

    def validation_sums(self, batch):
        self.calls_left = 1 if self.calls_left is None else self.calls_left - 1
        if self.calls_left == 0:
            raise RuntimeError("out of memory, say")
        return self._sums(batch)


@pytest.mark.parametrize("settings", [{}, {"num_checkpoints": 2}, {"min_ratio": 0.5}])
def test_an_exception_in_merged_validation_leaves_the_live_weights(tmp_path, settings):
    recorder, module, callback = Recorder(), Failing(), CheckpointMerge(2, **settings)
    saver = ModelCheckpoint(tmp_path / "c", "oops", save_on_exception=True, every_n_train_steps=1000)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        run(tmp_path, callback, module, callbacks=[recorder, saver])
    assert same(snapshot(module), recorder.weights[5])
    assert same(torch.load(tmp_path / "c" / "oops.ckpt", weights_only=True)["state_dict"], recorder.weights[5])
    assert "log" not in vars(module)
    # the merge itself is whole as well
    c = callback.merge_info()["c"]
    assert_close(callback.merged_state_dict(), weighted_mean([recorder.weights[2], recorder.weights[4]], c))


def test_a_module_without_a_validation_loss_is_told_what_to_return(tmp_path):
    class Silent(toy.Toy):
        def validation_step(self, batch, batch_idx):
            self.loss(batch)

        def on_validation_epoch_end(self):
            pass

    with pytest.raises(ValueError, match=r"returned no loss.*validation_sums"):
        run(tmp_path, CheckpointMerge(2), Silent(sums=False))


def test_validation_of_the_merge_can_be_switched_off(tmp_path):
    _, trainer = run(tmp_path, CheckpointMerge(2, validate_merged=False))
    assert "val_loss_merged" not in trainer.callback_metrics


def test_two_merges_and_lightning_s_ema_in_one_run(tmp_path):
    recorder = Recorder()
    callbacks = [
        CheckpointMerge(2, name="mean"),
        CheckpointMerge(2, num_checkpoints=3, curve="1-sqrt", name="sqrt"),
        EMAWeightAveraging(decay=0.9),
    ]
    _, trainer = run(tmp_path, None, callbacks=[recorder, *callbacks])
    assert {"val_loss_mean", "val_loss_sqrt"} <= set(trainer.callback_metrics)
    steps = list(range(2, 21, 2))
    assert_close(callbacks[0].merged_state_dict(), weighted_mean([recorder.weights[s] for s in steps], [0.1] * 10))
    with pytest.raises(RuntimeError, match="state_key` must be unique"):
        run(tmp_path / "b", None, callbacks=[CheckpointMerge(2), CheckpointMerge(3)])


def test_fit_again_goes_on_with_the_window(tmp_path):
    callback = CheckpointMerge(4)
    module, trainer = run(tmp_path, callback, max_steps=8)
    trainer.fit_loop.epoch_loop.max_steps = 16
    trainer.fit(module, datamodule=toy.OrderedData())
    assert callback.positions == [4, 8, 12, 16]


# ------------------------------------------------------------------------------------------------------------- export


def test_export_without_save_pretrained_is_a_safetensors_directory(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_model

    callback = CheckpointMerge(5, export_dir="merged", export_every=10)
    module, _ = run(tmp_path, callback, save_at=[20])
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoints", "merged", "merged-step-10", "merged-step-20"}
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {"model.safetensors", "merge.json"}
    info = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert info["positions"] == [5, 10, 15, 20]
    assert info["c"] == [0.25] * 4
    assert info["source"] == "training"
    assert json.loads((tmp_path / "merged-step-10" / "merge.json").read_text())["positions"] == [5, 10]
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert set(module.state_dict()) - stored == {"head.weight"}  # tied to net.3.weight
    fresh = toy.Toy()
    load_model(fresh, tmp_path / "merged" / "model.safetensors")
    assert fresh.head.weight is fresh.net[3].weight
    merged = callback.merged_state_dict()
    assert all(torch.equal(merged[name], snapshot(fresh)[name]) for name in merged)
    assert fresh.net[1].num_batches_tracked.dtype == torch.int64


def test_export_goes_through_save_pretrained_with_the_model_s_keys_only(tmp_path):
    class Pretrained(toy.Toy):
        def __init__(self):
            super().__init__()
            self.model, self.extra = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def loss(self, batch):
            return (self.model(batch[0]) - batch[1]).pow(2).mean() + self.extra(batch[0]).pow(2).mean()

        def save_pretrained(self, directory, state_dict=None):
            Path(directory).mkdir(exist_ok=True)
            torch.save({k: v.clone() for k, v in state_dict.items()}, Path(directory) / "weights.pt")

    callback = CheckpointMerge(5, export_dir=tmp_path / "elsewhere" / "merged")
    module = Pretrained()
    module.model = torch.compile(module.model, backend="eager")
    run(tmp_path, callback, module)
    saved = torch.load(tmp_path / "elsewhere" / "merged" / "weights.pt")
    assert set(saved) == {"model.weight", "model.bias"}
    assert torch.equal(saved["model.weight"], callback.merged_state_dict()["model._orig_mod.weight"])


def test_an_earlier_merge_is_replaced_and_anything_else_is_not(tmp_path):
    run(tmp_path, CheckpointMerge(5, export_dir="merged"))
    run(tmp_path, CheckpointMerge(4, export_dir="merged"))
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["every_n_steps"] == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"mine exists and holds no merge\.json"):
        run(tmp_path, CheckpointMerge(5, export_dir="mine"))


def test_a_failed_export_says_so_and_leaves_the_earlier_one(tmp_path, monkeypatch):
    run(tmp_path, CheckpointMerge(5, export_dir="merged"))
    before = (tmp_path / "merged" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    recorder, module = Recorder(), toy.Toy()
    with pytest.raises(OSError, match=r"could not write the merged model to .*merged.*Checkpoints are not affected"):
        run(tmp_path, CheckpointMerge(4, export_dir="merged"), module, callbacks=[recorder])
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".merged*"))
    assert same(snapshot(module), recorder.weights[20])


def test_figures_and_record_go_to_the_run_s_folder_and_to_loggers_that_take_them(tmp_path):
    class Logger(CSVLogger):
        def __init__(self, folder):
            super().__init__(folder)
            self.figures, self.records, self.metrics = {}, {}, []

        def log_figure(self, figure, artifact_file):
            self.figures[artifact_file] = figure

        def log_dict(self, dictionary, artifact_file):
            self.records[artifact_file] = dictionary

        def log_metrics(self, metrics, step=None):
            self.metrics.append((step, metrics))

    logger, callback = Logger(tmp_path / "logs"), CheckpointMerge(4, export_dir="merged")
    run(tmp_path, callback, logger=logger)
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["live-vs-merged.png", "merged-weights.png"]
    assert (tmp_path / "plots" / "live-vs-merged.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert set(logger.figures) == {"plots/live-vs-merged.png", "plots/merged-weights.png"}
    drawn = {
        line.get_label(): list(line.get_ydata()) for line in logger.figures["plots/live-vs-merged.png"].axes[0].lines
    }
    assert drawn["live weights"] == [entry["val_loss"] for entry in callback.history]
    assert drawn["merged weights"] == [e["val_loss_merged"] for e in callback.history if "val_loss_merged" in e]
    assert len(drawn["live weights"]) == 4
    assert len(drawn["merged weights"]) == 3  # at step 5 one snapshot was no merge
    assert logger.records["merge.json"] == json.loads((tmp_path / "merged" / "merge.json").read_text())
    # one record holds both losses of a validation, at the step at which it was made
    both = [(step, m["val_loss"], m["val_loss_merged"]) for step, m in logger.metrics if "val_loss_merged" in m]
    assert [step for step, _, _ in both] == [9, 14, 19]
    assert [live for _, live, _ in both] == drawn["live weights"][1:]


def test_training_too_short_for_a_merge_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"no merge at the end of training: 1 snapshot\(s\)"):
        run(tmp_path, CheckpointMerge(12, export_dir="merged"))
    assert not (tmp_path / "merged").exists()


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be 1 or more, got 0"),
        ({"storage": "gpu"}, "unknown storage 'gpu': use one of auto, device, cpu, disk"),
        ({"dtype": "bfloat16"}, "dtype must be float32 or float64, got bfloat16"),
        ({"curve": "cosine"}, "curve 'cosine' has no any-time form: use mode='sliding'"),
        ({"curve": "cosin", "num_checkpoints": 4}, "unknown curve 'cosin': known are linear"),
        ({"num_checkpoints": 1}, "num_checkpoints of 2 or more, got 1"),
        ({"curve": [0.2, 0.5], "num_checkpoints": 3}, "must not increase"),
        ({"mode": "fixed"}, "mode='fixed' needs num_checkpoints"),
        ({"mode": "windowed"}, "unknown mode 'windowed'"),
        ({"export_every": 5}, "needs an export_dir"),
        ({"start_step": -1}, "start_step must not be negative"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        CheckpointMerge(**{"every_n_steps": 4, **settings})


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy])
def test_partitioned_parameters_are_refused_at_setup(kind):
    strategy = object.__new__(kind)
    strategy.config = {"zero_optimization": {"stage": 3}}
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = strategy
    with pytest.raises(ValueError, match=rf"{kind.__name__} partitions.*off-line with `lightning merge`"):
        CheckpointMerge(4).setup(trainer, toy.Toy(), "fit")


def test_lora_factors_and_untrained_models_are_refused(tmp_path):
    module = toy.Toy()
    module.lora_A = torch.nn.Linear(8, 2)
    module.lora_B = torch.nn.Linear(2, 8)
    with pytest.raises(ValueError, match=r"holds LoRA factors \(lora_A\.weight\).*is not averaging B @ A"):
        run(tmp_path, CheckpointMerge(4), module)
