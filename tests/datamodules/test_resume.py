"""Real Trainer runs: stop at every kind of save point, resume, and compare what was trained on with an unbroken run."""

import random
import warnings

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

LAYOUTS = {
    "epoch": {"max_steps": 23},
    "epochs": {"max_epochs": 3},
    "open-ended": {"max_steps": 23, "max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "no-validation": {"max_steps": 23, "limit_val_batches": 0},
    "within-epoch": {"max_epochs": 3, "val_check_interval": 0.5},
}


def flat(steps):
    return [index for _, ids in steps for index in ids]


@pytest.mark.parametrize(
    ("layout", "accumulation", "num_workers"),
    [(layout, accumulation, 0) for layout in LAYOUTS for accumulation in (1, 2)]
    + [("open-ended", 1, 2), ("epochs", 2, 1), ("within-epoch", 4, 2)],
)
def test_resume_from_every_save_point(make_data, run_fit, save_everywhere, layout, accumulation, num_workers):
    arguments = {**LAYOUTS[layout], "accumulate_grad_batches": accumulation}
    # 32 training samples in batches of 3: each epoch ends inside a pass over the data
    unbroken = run_fit(make_data(batch_size=3), callbacks=[save_everywhere], **arguments)
    places = {path.stem.split("-")[1] for path, _, _ in save_everywhere.saved}
    assert places >= {"step", "epoch"} | ({"validation"} if layout != "no-validation" else set())
    saved = save_everywhere.saved if num_workers == 0 else save_everywhere.saved[1::7]
    for path, done, _ in saved:
        resumed = run_fit(make_data(batch_size=3, num_workers=num_workers), ckpt_path=path, **arguments)
        redone = done % accumulation  # micro-batches whose gradients no checkpoint holds
        assert resumed.steps == unbroken.steps[done - redone :], path.stem
        assert resumed.weight.tolist() == unbroken.weight.tolist(), path.stem
        assert resumed.validated == unbroken.validated[len(unbroken.validated) - len(resumed.validated) :], path.stem


def test_epochs_of_the_trainer_drop_no_sample(make_data, run_fit):
    module = run_fit(make_data(batch_size=3), max_epochs=16)
    order = flat(module.steps)
    assert len(order) == 16 * 30  # 10 whole batches an epoch
    for start in range(0, 15 * 32, 32):
        assert sorted(order[start : start + 32]) == list(range(32))
    assert order[:32] != order[32:64]


@pytest.mark.parametrize("before", [(3, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("after", [(3, 4), (6, 1), (1, 3), (16, 2)])
def test_changed_batch_size_and_accumulation(make_data, run_fit, save_everywhere, before, after):
    def arguments(layout, **more):
        return make_data(batch_size=layout[0]), {"accumulate_grad_batches": layout[1], "limit_val_batches": 0, **more}

    data, keywords = arguments(before, max_steps=60 // (before[0] * before[1]))
    unbroken = run_fit(data, callbacks=[save_everywhere], **keywords)
    data, keywords = arguments(after, max_steps=200)
    reference = flat(run_fit(data, **keywords).steps)  # the order has no layout in it
    assert reference[: len(flat(unbroken.steps))] == flat(unbroken.steps)
    step_samples = after[0] * after[1]
    for path, done, steps in save_everywhere.saved[1::3]:
        consumed = done * before[0]
        data, keywords = arguments(after, max_steps=steps + 7)
        resumed = run_fit(data, ckpt_path=path, **keywords)
        assert flat(resumed.steps) == reference[consumed : consumed + 7 * step_samples], path.stem
        assert [step for step, _ in resumed.steps] == [steps + i // after[1] for i in range(7 * after[1])], path.stem


@pytest.mark.parametrize("after", [2, 3, 8])
def test_changed_batch_size_still_trains_for_max_epochs(make_data, run_fit, save_everywhere, after):
    run_fit(make_data(batch_size=4), callbacks=[save_everywhere], max_epochs=3, limit_val_batches=0)
    for path, done, _ in save_everywhere.saved[::2]:
        resumed = run_fit(make_data(batch_size=after), ckpt_path=path, max_epochs=3, limit_val_batches=0)
        total = 4 * done + len(flat(resumed.steps))
        assert abs(total - 3 * 32) <= 3 * after, path.stem  # what does not fill a batch, once an epoch


def test_loader_made_before_the_checkpoint_is_restored(make_data, run_fit, save_everywhere, monkeypatch):
    """`estimated_stepping_batches` in `configure_optimizers` makes Lightning iterate the loader early."""
    module_class = type(run_fit(make_data(), max_steps=1))
    configure = module_class.configure_optimizers

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 48
        return configure(self)

    monkeypatch.setattr(module_class, "configure_optimizers", configure_optimizers)
    unbroken = run_fit(make_data(num_workers=1), callbacks=[save_everywhere], max_epochs=3)
    for path, done, _ in save_everywhere.saved[3::10]:
        assert run_fit(make_data(num_workers=1), ckpt_path=path, max_epochs=3).steps == unbroken.steps[done:]


def test_batch_that_failed_runs_again(make_data, run_fit, tmp_path):
    class Fail(Callback):
        def on_before_backward(self, trainer, module, loss):
            if trainer.global_step == 6 and trainer.fit_loop.epoch_loop.batch_progress.current.ready % 2 == 0:
                raise RuntimeError("lightning struck")

    arguments = {"max_steps": 20, "accumulate_grad_batches": 2}
    unbroken = run_fit(make_data(), **arguments)
    callbacks = [OnExceptionCheckpoint(tmp_path, filename="failed"), Fail()]
    with pytest.raises(RuntimeError, match="lightning struck"):
        run_fit(make_data(), callbacks=callbacks, enable_checkpointing=True, **arguments)
    resumed = run_fit(make_data(), ckpt_path=tmp_path / "failed.ckpt", **arguments)
    assert resumed.steps == unbroken.steps[12:]
    assert resumed.weight.tolist() == unbroken.weight.tolist()


def test_limited_epochs_go_on_through_the_data(make_data, run_fit, save_everywhere):
    unbroken = run_fit(make_data(), callbacks=[save_everywhere], max_epochs=6, limit_train_batches=5)
    assert flat(unbroken.steps) == flat(run_fit(make_data(), max_steps=30).steps)
    for path, done, _ in save_everywhere.saved[::3]:
        resumed = run_fit(make_data(), ckpt_path=path, max_epochs=6, limit_train_batches=5)
        assert resumed.steps == unbroken.steps[done:], path.stem


def test_loaders_made_anew_each_epoch(make_data, run_fit, save_everywhere):
    arguments = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0}
    unbroken = run_fit(make_data(batch_size=3), callbacks=[save_everywhere], **arguments)
    assert flat(unbroken.steps) == flat(run_fit(make_data(batch_size=3), max_epochs=3).steps)
    for path, done, _ in save_everywhere.saved[::4]:
        resumed = run_fit(make_data(batch_size=3), ckpt_path=path, **arguments)
        assert resumed.steps == unbroken.steps[done:], path.stem


def test_overfit_batches_repeats_the_same_batches(make_data, run_fit):
    module = run_fit(make_data(), max_epochs=3, overfit_batches=2)
    batches = [ids for _, ids in module.steps]
    assert len(batches) == 6
    assert batches[:2] == batches[2:4] == batches[4:]


def test_a_new_run_starts_over_and_a_continued_one_goes_on(make_data, run_fit):
    data = make_data()
    first = run_fit(data, max_steps=20)
    assert run_fit(data, max_steps=20).steps == first.steps
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    module = type(first)()
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    assert flat(module.steps)[:40] == flat(first.steps)
    assert len(module.steps) == 32


def test_iterating_draws_nothing_from_the_global_random_state(make_data):
    data = make_data(num_workers=1)
    data.setup()
    torch.manual_seed(3)
    random.seed(3)
    state, python_state = torch.get_rng_state(), random.getstate()
    assert len(list(data.train_dataloader())) == 16
    assert len(list(data.val_dataloader())) == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_position_does_not_depend_on_what_workers_read_ahead(make_data, run_fit, save_everywhere):
    run_fit(make_data(num_workers=2), callbacks=[save_everywhere], max_steps=9)
    for path, done, _ in save_everywhere.saved:
        state = torch.load(path, weights_only=True)["TextDataModule"]
        assert state["positions"] == [2 * done, 0]
        assert state["batches"] == done


def test_resume_on_other_data_starts_its_order_and_says_so(make_data, run_fit, save_everywhere):
    run_fit(make_data(), callbacks=[save_everywhere], max_steps=5)
    path = save_everywhere.saved[-1][0]
    with pytest.warns(UserWarning, match=r"trained on 32 samples, there are 64 now"):
        resumed = run_fit(make_data(sequence_length=32), ckpt_path=path, max_steps=8)
    fresh = run_fit(make_data(sequence_length=32), max_steps=3)
    assert flat(resumed.steps) == flat(fresh.steps)
    with pytest.warns(UserWarning, match="seed=1 is not the checkpoint's 0"):
        resumed = run_fit(make_data(seed=1), ckpt_path=path, max_steps=8)
    assert flat(resumed.steps) == flat(run_fit(make_data(seed=1), max_steps=8).steps)[10:]


def test_resume_is_silent(make_data, run_fit, save_everywhere):
    """Lightning neither calls the loader "not resumable" nor asks for more workers."""
    run_fit(make_data(), callbacks=[save_everywhere], max_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_fit(make_data(), ckpt_path=save_everywhere.saved[-1][0], max_steps=8)
    messages = [str(warning.message) for warning in caught]
    assert not [message for message in messages if "resumable" in message or "workers" in message]
