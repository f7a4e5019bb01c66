"""Tiny models and batches for the tests of lightning_modules, and a training function that also runs as two ranks.

As a script: `python tiny.py JOBS.json RESULTS.pt` runs `train(**arguments)` of each job on the rank LOCAL_RANK.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

from fulgurite.lightning_modules.causal_lm import CausalLMModule

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Qwen2: biases on the projections, tied head
QWEN = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}


def padded_batch(index, rows=3, length=12, vocab=96, uniform=False):
    """Right-padded rows of very different lengths, with a masked prompt in each."""
    generator = torch.Generator().manual_seed(1000 + index)
    input_ids = torch.randint(1, vocab, (rows, length), generator=generator)
    labels = input_ids.clone()
    batch = {"input_ids": input_ids, "labels": labels, "sample_ids": torch.arange(rows) + index * rows}
    if not uniform:
        lengths = torch.randint(3, length + 1, (rows,), generator=generator)
        mask = (torch.arange(length) < lengths[:, None]).long()
        labels[mask == 0] = -100
        labels[:, :2] = -100
        input_ids[mask == 0] = 0
        batch["attention_mask"] = mask
    return batch


class Batches(pl.LightningDataModule):
    """A list of ready batches an epoch; rank r of R takes batches r, r + R, ..."""

    def __init__(self, batches, val_batches=(), uniform_token_count=False):
        super().__init__()
        self.batches, self.val_batches, self.uniform_token_count = batches, val_batches, uniform_token_count

    def loader(self, batches):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(batches[rank::world], batch_size=None)

    def train_dataloader(self):
        return self.loader(self.batches)

    def val_dataloader(self):
        return self.loader(self.val_batches)


class Record(pl.Callback):
    """Full gradients at each optimizer step, after normalisation and clipping."""

    def __init__(self, keep_gradients=False):
        self.keep_gradients = keep_gradients
        self.gradients = []

    def on_train_start(self, trainer, pl_module):
        if self.keep_gradients:
            trainer.optimizers[0].register_step_post_hook(lambda *_: self.gradients.append(full_gradients(pl_module)))


class Metrics(pl.loggers.logger.DummyLogger):
    """Keeps every logged row."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append({**{key: float(value) for key, value in metrics.items()}, "step": step})


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().clone()


def full_gradients(module):
    return {name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def full_weights(module):
    return {name: full(p) for name, p in module.named_parameters()}


def train(
    *,
    model=None,
    strategy="auto",
    devices=1,
    batches=6,
    uniform=False,
    rows=3,
    accumulate=1,
    precision="32-true",
    max_steps=-1,
    max_epochs=1,
    clip=None,
    resume=None,
    save=None,
    keep_gradients=False,
    export=None,
    folder=".",
    **module_arguments,
):
    """Trains and returns {weights, gradients, rows of metrics, tokens_seen}."""
    torch.set_num_threads(1)
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp": lambda: ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1),
        "fsdp-tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=devices),
    }
    module = CausalLMModule(model or LLAMA, **{"learning_rate": 1e-2, "schedule": "constant", **module_arguments})
    record, logger = Record(keep_gradients), Metrics()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategies[strategy]() if strategy in strategies else strategy,
        precision=precision,
        accumulate_grad_batches=accumulate,
        max_steps=max_steps,
        max_epochs=max_epochs,
        gradient_clip_val=clip,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        logger=logger,
        callbacks=[record],
        default_root_dir=folder,
    )
    data = Batches(
        [padded_batch(i, uniform=uniform, rows=rows) for i in range(batches)],
        [padded_batch(100 + i) for i in range(4)],
        uniform_token_count=uniform,
    )
    trainer.fit(module, data, ckpt_path=resume, weights_only=None if resume is None else True)
    if save is not None:
        trainer.save_checkpoint(save)
    if export is not None:
        module.save_pretrained(export)
    return {
        "weights": full_weights(module),
        "gradients": record.gradients,
        "rows": logger.rows,
        "tokens_seen": module.tokens_seen,
    }


if __name__ == "__main__":
    results = {}
    for job, job_arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            results[job] = train(**job_arguments)
        except ValueError as error:
            results[job] = f"ValueError: {error}"
    if os.environ["LOCAL_RANK"] == "0":
        torch.save(results, sys.argv[2])
