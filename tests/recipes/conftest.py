"""A tiny recipe, and the command called within the test's own process."""

import logging
import os
from types import SimpleNamespace

import pytest

from fulgurite.recipes import cli

TINY = """\
# A model of a few thousand parameters, for tests
seed_everything: 7

trainer:
  max_steps: 6
  accelerator: cpu
  devices: 1
  val_check_interval: 3
  check_val_every_n_epoch: null
  limit_val_batches: 2
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks:
    - class_path: fulgurite.callbacks.checkpoint_merging.CheckpointMerge
      init_args: {every_n_steps: 1, num_checkpoints: 3, start_step: 2, export_dir: merged}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: "resume-{step}", every_n_train_steps: 3, save_top_k: -1}

model:
  class_path: fulgurite.lightning_modules.pretraining.PretrainingModule
  init_args:
    model:
      model_type: llama
      hidden_size: 16
      intermediate_size: 32
      num_hidden_layers: 1
      num_attention_heads: 2
      max_position_embeddings: 32
      tie_word_embeddings: true
    learning_rate: 1.0e-2
    warmup_steps: 1

data:
  class_path: fulgurite.datamodules.text.TextDataModule
  init_args:
    source: text
    vocab_size: 300
    sequence_length: 16
    batch_size: 2
    val_fraction: 0.3
"""


@pytest.fixture
def tiny(tmp_path):
    """A recipe in the test's folder and the text that it reads; returns the recipe's path."""
    (tmp_path / "text").mkdir()
    for index in range(20):
        words = " ".join(f"word{(index * 7 + position * position) % 31}" for position in range(60))
        (tmp_path / "text" / f"{index}.txt").write_text(f"document {index}: {words}\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


@pytest.fixture
def lightning(capsys, monkeypatch):
    """Calls the command: `lightning("run", "tiny.yaml")` -> code, out, err, errors (lines of err)."""
    # Lightning's log handler keeps the standard error of the test that imported it first, which is closed by now
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "LOCAL_RANK", "FULGURITE_START"):
        monkeypatch.setenv(name, "0")  # so that what the run leaves there is undone
        monkeypatch.delenv(name)

    def call(*arguments):
        capsys.readouterr()
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        assert "FULGURITE_RUN_DIR" not in os.environ
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, errors=errors)

    return call


@pytest.fixture
def refusal(lightning):
    """The one line that the command answers a mistake with, without `error: `; it exits with 2."""

    def call(*arguments):
        result = lightning(*arguments)
        assert result.code == 2, (result.out, result.err)
        assert len(result.errors) == 1, result.err
        assert "Traceback" not in result.err
        return result.errors[0].removeprefix("error: ")

    return call
