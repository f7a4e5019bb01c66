"""A NaN never reaches the weights: stop with a resumable checkpoint, or drop the update exactly; ranks agree."""

import importlib.util
import logging
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fulgurite.callbacks.checkpointing import RNGState, find_resumable
from fulgurite.callbacks.guards import NonFiniteError, NonFiniteGuard, _gradients_finite

_spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

ORDER = torch.randperm(64, generator=torch.Generator().manual_seed(7)).tolist()  # of the first epoch, batches of 4


def sample_of_step(step, batch_size=4):
    return ORDER[(step - 1) * batch_size + 2]


def fit(root, guard, nan_steps=(), max_steps=12, ckpt_path=None, module=None, nan_at=None, **kwargs):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(5, verbose=False)
    module = module or tiny.TinyModule()
    nan_at = [sample_of_step(step) for step in nan_steps] if nan_at is None else nan_at
    checkpoints = ModelCheckpoint(root / "checkpoints", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = tiny.make_trainer(root, [RNGState(), guard, checkpoints], max_steps=max_steps, **kwargs)
    trainer.limit_val_batches = 0
    try:
        trainer.fit(module, datamodule=tiny.TinyData(nan_at=nan_at), ckpt_path=ckpt_path)
    finally:
        module.fitted = trainer
    return module


def load(root, name):
    return torch.load(root / "checkpoints" / f"{name}.ckpt", weights_only=True)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_stop_names_step_batch_and_samples_and_saves_the_state_from_before(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        fit(tmp_path, NonFiniteGuard(), nan_steps=[6])
    path = tmp_path / "checkpoints" / "nonfinite-step=6.ckpt"
    samples = str(ORDER[20:24])
    assert f"The loss of optimizer step 6 is not finite (rank 0, batch 5, samples {samples})." in str(caught.value)
    assert str(path) in str(caught.value)
    before, saved = load(tmp_path, "step=5"), load(tmp_path, "nonfinite-step=6")
    assert same(before["state_dict"], saved["state_dict"])
    assert same(before["optimizer_states"][0]["state"], saved["optimizer_states"][0]["state"])
    assert find_resumable(tmp_path / "checkpoints") == path


def test_stopping_and_resuming_equals_skipping_bit_for_bit(tmp_path):
    skipped = fit(tmp_path / "skip", NonFiniteGuard("skip"), nan_steps=[6])
    with pytest.raises(NonFiniteError):
        fit(tmp_path / "stop", NonFiniteGuard(), nan_steps=[6])
    path = tmp_path / "stop" / "checkpoints" / "nonfinite-step=6.ckpt"
    resumed = fit(tmp_path / "stop", NonFiniteGuard(), nan_steps=[6], ckpt_path=path)
    assert same(skipped.state_dict(), resumed.state_dict())
    assert resumed.fitted.global_step == 12
    assert all(value.isfinite().all() for value in resumed.state_dict().values())


class WithOptimizer(tiny.TinyModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, weight_decay=0.1),
    ],
    ids=["adamw", "fused-adamw", "sgd", "rmsprop", "adagrad"],
)
def test_skip_drops_the_update_exactly(tmp_path, make):
    guard = NonFiniteGuard("skip")
    module = fit(tmp_path, guard, nan_steps=[6], module=WithOptimizer(make), gradient_clip_val=1.0)
    before, after = load(tmp_path, "step=5"), load(tmp_path, "step=6")
    assert same(before["state_dict"], after["state_dict"])
    assert same(before["optimizer_states"][0]["state"], after["optimizer_states"][0]["state"])
    assert after["global_step"] == 6
    assert not same(after["state_dict"], load(tmp_path, "step=7")["state_dict"])
    assert guard.num_skipped == 1
    assert module.fitted.global_step == 12


def test_skip_drops_the_whole_accumulated_update(tmp_path):
    guard = NonFiniteGuard("skip")
    fit(tmp_path, guard, nan_at=[ORDER[17]], max_steps=4, accumulate_grad_batches=4)  # batch 4 is in optimizer step 2
    assert same(load(tmp_path, "step=1")["state_dict"], load(tmp_path, "step=2")["state_dict"])
    assert not same(load(tmp_path, "step=2")["state_dict"], load(tmp_path, "step=3")["state_dict"])
    assert guard.num_skipped == 1


def test_only_the_bad_micro_batch_is_named(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        fit(tmp_path, NonFiniteGuard(), nan_at=[ORDER[26]], max_steps=4, accumulate_grad_batches=4)
    assert f"optimizer step 2 is not finite (rank 0, batch 6, samples {ORDER[24:28]})." in str(caught.value)


def test_count_of_skips_survives_a_resume(tmp_path):
    fit(tmp_path, NonFiniteGuard("skip"), nan_steps=[3, 5], max_steps=6)
    guard = NonFiniteGuard("skip")
    fit(tmp_path, guard, nan_steps=[8], ckpt_path=tmp_path / "checkpoints" / "step=6.ckpt")
    assert guard.num_skipped == 3


def test_too_many_skips_in_a_row_stop(tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 7 .* 3 updates in a row were dropped"):
        fit(tmp_path, NonFiniteGuard("skip", max_consecutive_skips=3), nan_steps=[2, 5, 6, 7])


class InfiniteGradient(tiny.TinyModule):
    """At step 4 the loss is finite (zero) and its gradient is not: the square root of zero."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self.net[0].weight.sum() * 0).sqrt() if batch_idx == 3 else loss


def test_infinite_gradients_under_a_finite_loss(tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 4 is finite but its gradients are not \(batch \[3\], samples"):
        fit(tmp_path / "a", NonFiniteGuard(), module=InfiniteGradient())
    module = fit(tmp_path / "b", NonFiniteGuard(check_gradients=False), module=InfiniteGradient(), max_steps=4)
    assert not module.net[0].weight.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_every_dtype(dtype):
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in (1000, 0, 3, 3)]
    mixed = torch.nn.Parameter(torch.zeros(3))
    for parameter, value in zip(parameters[:3], (60000.0, 0.0, 1.0), strict=True):  # in float16 a norm would overflow
        parameter.grad = torch.full_like(parameter, value)
    mixed.grad = torch.ones(3)
    assert _gradients_finite([*parameters, mixed]).item() == 1.0
    for bad in (float("inf"), float("nan")):
        parameters[2].grad[1] = bad
        assert _gradients_finite([*parameters, mixed]).item() == 0.0
    assert _gradients_finite([parameters[3]]).item() == 1.0  # has none


class Manual(tiny.TinyModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.net[0], self.net[2])]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()


def test_manual_optimization_is_guarded_too(tmp_path):
    guard = NonFiniteGuard("skip")
    module = fit(tmp_path, guard, nan_steps=[3], max_steps=12, module=Manual())
    assert guard.num_skipped == 2  # one update of each optimizer
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert same(load(tmp_path, "step=4")["state_dict"], load(tmp_path, "step=6")["state_dict"])
    assert not same(load(tmp_path, "step=6")["state_dict"], load(tmp_path, "step=8")["state_dict"])


@pytest.mark.distributed
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_ranks_agree_when_one_of_them_has_the_nan(tmp_path, action):
    # rank 1 gets every other sample of the order; its batch of step 3 holds ORDER[17, 19, 21, 23]
    arguments = ("--nan-at", ORDER[19], "--action", action, "--max-steps", "6", "--every", "1", "--val-every", "100")
    output = tiny.launch(tmp_path, *arguments, ranks=2, expect=1 if action == "stop" else 0)
    named = re.escape(f"(rank 1, batch 2, samples {ORDER[17:24:2]})")
    if action == "stop":
        for rank in range(2):
            assert re.search(
                rf"rank {rank}: NonFiniteError: The loss of optimizer step 3 is not finite {named}", output
            )
        assert find_resumable(tmp_path / "checkpoints").name == "nonfinite-step=3.ckpt"
    else:
        assert output.count("This update was dropped (1 so far)") == 1
        assert same(load(tmp_path, "step=2")["state_dict"], load(tmp_path, "step=3")["state_dict"])
        assert not same(load(tmp_path, "step=3")["state_dict"], load(tmp_path, "step=4")["state_dict"])


@pytest.mark.distributed
def test_sharded_gradients_are_checked_too(tmp_path):
    arguments = ("--nan-at", ORDER[19], "--action", "skip", "--max-steps", "6", "--strategy", "fsdp2")
    output = tiny.launch(tmp_path, *arguments, "--val-every", "100", ranks=2)
    assert output.count("The loss of optimizer step 3 is not finite (rank 1, batch 2") == 1
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert all(value.isfinite().all() for value in final.values())


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"action='halt'.*choose \"stop\" or \"skip\""):
        NonFiniteGuard("halt")
    with pytest.raises(ValueError, match="max_consecutive_skips=0"):
        NonFiniteGuard("skip", max_consecutive_skips=0)
