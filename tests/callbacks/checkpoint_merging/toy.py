"""A module and a trainer of milliseconds for the callback's tests; its data order depends on the batch index alone."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Toy(pl.LightningModule):
    """Regression with dropout (random state), BatchNorm (buffers) and a tied pair; `rates` gives the LR by update."""

    def __init__(self, rates=None, dtype=torch.float32, sums=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 8)
        ).to(dtype)
        self.head = torch.nn.Linear(8, 8, bias=False)
        self.head.weight = self.net[3].weight
        self.rates = rates
        self.val_outputs = []
        if sums:
            self.validation_sums = self._sums

    def loss(self, batch):
        x, y = batch
        return (self.head(self.net(x.to(self.head.weight.dtype))).float() - y).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def _sums(self, batch):
        size = len(batch[0])
        return torch.tensor([float(self.loss(batch).double()) * size, size, 3.0 * size], dtype=torch.float64)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.val_outputs.append(loss)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_end(self):
        self.log("num_val_batches", float(len(self.val_outputs)))
        self.val_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        if self.rates is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: self.rates(s))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OrderedData(pl.LightningDataModule):
    """The n-th training batch is the same in every run, also in one that resumes in the middle of the epoch."""

    def __init__(self, num_batches=200, val_batches=3):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4 * num_batches, 8, generator=generator)
        self.y = torch.randn(4 * num_batches, 8, generator=generator)
        self.val = TensorDataset(
            torch.randn(4 * val_batches, 8, generator=generator), torch.randn(4 * val_batches, 8, generator=generator)
        )
        self.skip = 0

    def train_dataloader(self):
        ranks = self.trainer.distributed_sampler_kwargs  # None in one process
        rows = slice(4 * self.skip * (ranks["num_replicas"] if ranks else 1), None)
        data = TensorDataset(self.x[rows], self.y[rows])
        return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False, **ranks) if ranks else None)

    def val_dataloader(self):
        return DataLoader(self.val, 4, shuffle=False)

    def state_dict(self):
        return {"seen": self.trainer.fit_loop.epoch_loop.batch_progress.current.ready}

    def load_state_dict(self, state):
        self.skip = state["seen"]


def run(root, callback=None, module=None, data=None, ckpt_path=None, save_at=(), **kwargs):
    """Train and return (module, trainer); checkpoints `step=<n>.ckpt` are left in `root/checkpoints`."""
    callbacks = [] if callback is None else [callback]
    if save_at:
        callbacks.append(SaveAt(save_at, root / "checkpoints"))
    callbacks += kwargs.pop("callbacks", [])
    for merge in callbacks:
        if hasattr(merge, "_draw") and not kwargs.get("logger"):
            merge._draw = lambda trainer: None  # half a second a run; one test draws
    module = Toy() if module is None else module
    settings = {
        "default_root_dir": root,
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
    }
    trainer = pl.Trainer(**{**settings, **kwargs})
    torch.manual_seed(3)
    trainer.fit(module, datamodule=OrderedData() if data is None else data, ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


class SaveAt(pl.Callback):
    """Saves a checkpoint after given training batches (counted from 1)."""

    def __init__(self, batches, folder):
        self.batches, self.folder = set(batches), folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seen = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if seen in self.batches:
            trainer.save_checkpoint(self.folder / f"batch={seen}.ckpt")


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(a, b):
    """Whether two dicts of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
