"""Real Trainer runs: stop at every kind of save point, resume, and compare what was trained on with an unbroken run."""

import pytest

LAYOUTS = {
    "epoch": {"max_steps": 23},
    "epochs": {"max_epochs": 3},
    "open-ended": {"max_steps": 23, "max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "no-validation": {"max_steps": 23, "limit_val_batches": 0},
    "within-epoch": {"max_epochs": 3, "val_check_interval": 0.5},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_from_every_save_point(make_data, run_fit, save_everywhere, layout, accumulation, num_workers):
    arguments = {**LAYOUTS[layout], "accumulate_grad_batches": accumulation}
    unbroken = run_fit(make_data(), callbacks=[save_everywhere], **arguments)
    places = {path.stem.split("-")[1] for path, _, _ in save_everywhere.saved}
    assert places >= {"step", "epoch"} | ({"validation"} if layout != "no-validation" else set())
    saved = save_everywhere.saved if num_workers == 0 else save_everywhere.saved[1::7]
    for path, done, _ in saved:
        resumed = run_fit(make_data(num_workers=num_workers), ckpt_path=path, **arguments)
        redone = done % accumulation  # micro-batches whose gradients no checkpoint holds
        assert resumed.steps == unbroken.steps[done - redone :], path.stem
        assert resumed.weight.tolist() == unbroken.weight.tolist(), path.stem
        print(path.stem, done, resumed.epochs, unbroken.epochs, len(resumed.validated), len(unbroken.validated), make_data()._train_streams())
