"""What the command answers to a mistake in a key, a class or a value: one line, before anything is made."""

from pathlib import Path

import pytest

MODULE = "fulgurite.lightning_modules.pretraining.PretrainingModule"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    yield
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("*/*"))
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.max_step", "5"], "tiny has no key trainer.max_step. Did you mean trainer.max_steps?"),
        (["--trianer.max_steps", "5"], "tiny has no key trianer.max_steps. Did you mean trainer.max_steps"),
        (["--max_steps=5"], "tiny has no key max_steps. Did you mean trainer.max_steps"),
        (["--model.lrr", "3"], "tiny has no key model.lrr. Did you mean model.learning_rate or model.min_lr_ratio?"),
        (["--model.lr", "3"], "tiny has no key model.lr. Did you mean model.learning_rate"),
        (["learning_rate=3"], "tiny has no key learning_rate. Did you mean model.learning_rate"),
        (["--model.warmup_step", "3"], "tiny has no key model.warmup_step. Did you mean model.warmup_steps"),
        (["--data.batchsize", "3"], "tiny has no key data.batchsize. Did you mean data.batch_size?"),
        (
            ["--trainer.callbacks.CheckpointMerge.num_checkpoint", "3"],
            "tiny has no key trainer.callbacks.CheckpointMerge.num_checkpoint. Did you mean "
            "trainer.callbacks.CheckpointMerge.num_checkpoints?",
        ),
        (
            ["--trainer.callbacks.CheckpointMerg.curve", "ema"],
            "tiny has no CheckpointMerg in trainer.callbacks. Did you mean trainer.callbacks.CheckpointMerge?",
        ),
        (["--data.zzz.qqq", "3"], "tiny has no key data.zzz.qqq. data has the keys source,"),
        (["--zzz", "3"], "tiny has no key zzz. tiny has the keys seed_everything, trainer, model, data."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_misspelt_keys(refusal, tiny, words, message):
    assert refusal("run", tiny, *words).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.max_steps", "five"], "tiny: trainer.max_steps is 'five'; expected int."),
        (["--trainer.max_steps", "5.5"], "tiny: trainer.max_steps is '5.5'; expected int."),
        (["--trainer.max_steps", "true"], "tiny: trainer.max_steps is 'true'; expected int."),
        (["--trainer.max_steps", "null"], "tiny: trainer.max_steps is null; expected int."),
        (["--trainer.max_steps", "[1]"], "tiny: trainer.max_steps is '[1]'; expected int."),
        (["--trainer.gradient_clip_val", "a"], "tiny: trainer.gradient_clip_val is 'a'; expected int, float or null."),
        (
            ["--trainer.enable_progress_bar", "3"],
            "tiny: trainer.enable_progress_bar is '3'; expected true, false or null.",
        ),
        (["--model.learning_rate", "1e-3x"], "tiny: model.learning_rate is '1e-3x'; expected float."),
        (["--model.betas", "[0.9]"], "tiny: model.betas is '[0.9]'; expected tuple of float, float."),
        (["--model.compile", "maybe"], "tiny: model.compile is 'maybe'; expected true or false."),
        (["--model.warmup_steps", "0.1"], "tiny: model.warmup_steps is '0.1'; expected int."),
        (["--data.batch_size", "8.5"], "tiny: data.batch_size is '8.5'; expected int."),
        (["--data.vocab_size", "{a: 1}"], "tiny: data.vocab_size is '{a: 1}'; expected int."),
        (
            ["--trainer.callbacks.CheckpointMerge.every_n_steps", "often"],
            "tiny: trainer.callbacks.CheckpointMerge.every_n_steps is 'often'; expected int.",
        ),
        (["--trainer", "3"], "tiny: trainer is 3; expected a mapping of keys to values."),
        (["--model", "3"], "tiny: model is 3; expected class_path and init_args."),
        (["--seed_everything", "x"], "tiny: seed_everything is 'x'; expected int, true or false."),
        (["--trainer.max_steps"], "--trainer.max_steps has no value: write --trainer.max_steps VALUE."),
        (["trainer.max_steps"], "'trainer.max_steps' belongs to no key: overrides are --key value or key=value."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_types(refusal, tiny, words, message):
    assert refusal("run", tiny, *words) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "fulgurite.lightning_modules.pretraining.PretrainingModul"], f"Did you mean {MODULE}?"),
        (
            ["--model", "fulgurite.lightning_module.pretraining.X"],
            "there is no module fulgurite.lightning_module. Did you mean fulgurite.lightning_modules?",
        ),
        (["--model", "PretrainingModule"], "needs its module in front: package.module.PretrainingModule."),
        (["--data", MODULE], f"tiny: data.class_path '{MODULE}' is not a LightningDataModule."),
        (["--model", "json.dumps"], "tiny: model.class_path 'json.dumps' is not a LightningModule."),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)  # fmt: skip
def test_unknown_classes(refusal, tiny, words, message):
    assert message in refusal("run", tiny, *words)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 6", "max_stepps: 6", "tiny has no key trainer.max_stepps. Did you mean trainer.max_steps"),
        ("trainer:", "trainner:", "tiny has no key trainner.max_steps. Did you mean trainer.max_steps"),
        ("{every_n_steps: 1", "{every_n_step: 1", "Did you mean trainer.callbacks.CheckpointMerge.every_n_steps?"),
        ("learning_rate: 1.0e-2", "learning_rate: high", "tiny: model.learning_rate is 'high'; expected float."),
        ("source: text", "source: ???   # a folder of text.", "tiny needs --data.source (a folder of text)."),
        ("{every_n_steps: 1, num", "{num", "tiny needs --trainer.callbacks.CheckpointMerge.every_n_steps (int): "
         "CheckpointMerge has no default for it."),
        ("  init_args:\n    source", "  args:\n    source", "no key data.args. It belongs under data.init_args."),
        ("ModelCheckpoint\n", "ModelCheckpiont\n", "lightning.pytorch.callbacks has no class ModelCheckpiont. Did you "
         "mean lightning.pytorch.callbacks.ModelCheckpoint"),
        ("hidden_size: 16", "hidden_sise: 16", "model has no field 'hidden_sise' in a llama config"),
        ("vocab_size: 300", "vocab_size: 5", "vocab_size=5"),
        ("source: text", "source: nowhere", "nowhere"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_itself(refusal, tiny, old, new, message):
    text = Path(tiny).read_text()
    assert text.count(old) == 1
    Path(tiny).write_text(text.replace(old, new))
    assert message in refusal("run", tiny)


def test_a_recipe_without_model(refusal, tmp_path):
    (tmp_path / "bare.yaml").write_text("trainer: {max_steps: 1}\n")
    assert refusal("run", "bare.yaml") == "bare has no model: a recipe has the keys trainer, model and data, or task."


def test_a_broken_import_of_the_users_own_class(refusal, tiny, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import there_is_no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("run", tiny, "--model", "broken_module.Mine") == (
        "tiny: model.class_path 'broken_module.Mine' cannot be imported: No module named 'there_is_no_such_package'."
    )


def test_debug_shows_the_traceback(lightning, tiny, monkeypatch):
    from fulgurite.recipes.errors import UserError

    with pytest.raises(UserError, match=r"no key model\.lrr"):
        lightning("run", tiny, "--model.lrr", "3", "--debug")
    monkeypatch.setenv("FULGURITE_DEBUG", "1")
    with pytest.raises(UserError, match=r"no key model\.lrr"):
        lightning("run", tiny, "--model.lrr", "3")


def test_numbers_stay_strings_where_a_string_is_wanted(lightning, tiny):
    out = lightning("run", tiny, "--data.source", "2024", "--print_config").out
    assert "source: '2024'\n" in out
