"""A small corpus, data modules on it with one cache for the whole session, and a model that records what it sees."""

import json
import random

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

WORDS = ["sand", "glass", "bolt", "storm", "cloud", "strike", "light", "branch", "tube", "fuse", "heat", "silica"]
WORDS += ["dune", "rain", "spark", "ground", "field", "charge"]


def write_corpus(path, num_documents, seed=0):
    rng = random.Random(seed)
    with path.open("w") as stream:
        for i in range(num_documents):
            text = f"Document {i}. " + " ".join(rng.choices(WORDS, k=rng.randrange(20, 60)))
            stream.write(json.dumps({"text": text, "id": i}) + "\n")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "docs.jsonl", 24)


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data-cache"))


@pytest.fixture
def make_data(corpus, data_cache):
    from fulgurite.datamodules.text import TextDataModule

    def make(**arguments):
        defaults = {
            "source": str(corpus),
            "vocab_size": 300,
            "sequence_length": 64,
            "batch_size": 2,
            "val_fraction": 0.25,
            "cache_dir": data_cache,
        }
        return TextDataModule(**{**defaults, **arguments})

    return make


class Recorder(LightningModule):
    """`steps`: (optimizer step, sample ids) of each micro-batch; the weight depends on every id and its place."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.steps = []
        self.validated = []

    def training_step(self, batch, batch_idx):
        ids = batch["sample_ids"]
        self.steps.append((self.global_step, ids.tolist()))
        features = torch.stack([ids.sin().double(), ids.cos().double(), ids.double() / 100])
        return (features.mean(1) * (self.weight - 1) ** 2).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validated.append(batch["sample_ids"].tolist())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SaveEverywhere(Callback):
    """A checkpoint at each optimizer step, after each validation and at each epoch's end."""

    def __init__(self, folder):
        self.folder = folder
        self.saved = []  # (path, number of micro-batches done, optimizer steps done)
        self.last = 0

    def save(self, trainer, place):
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        path = self.folder / f"{len(self.saved):03d}-{place}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append((path, done, trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step > self.last:
            self.last = trainer.global_step
            self.save(trainer, "step")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "epoch")


def fit(data, *, ckpt_path=None, callbacks=(), **arguments):
    module = Recorder()
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(**{**defaults, **arguments}, callbacks=list(callbacks))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    module.epochs = trainer.current_epoch
    return module


@pytest.fixture
def run_fit():
    return fit


@pytest.fixture
def save_everywhere(tmp_path):
    return SaveEverywhere(tmp_path)
