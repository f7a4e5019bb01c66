"""A training run of seconds, for the tests beside this file: as a function, a script, and forked ranks to be killed.

Its data come in an order that depends on (seed, epoch) alone and its position is in the checkpoint, dropout makes the
weights depend on every random state, and the loss can be made NaN at a chosen sample.
"""

import argparse
import json
import logging
import multiprocessing
import os
import resource
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

warnings.filterwarnings("ignore", module="lightning")


class Samples(Dataset):
    """`num` random rows; row `nan_at` holds NaN."""

    def __init__(self, num=64, nan_at=()):
        self.data = torch.randn(num, 8, generator=torch.Generator().manual_seed(0))
        for index in nan_at:
            self.data[index] = float("nan")

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {
            "x": self.data[index],
            "sample_ids": torch.tensor(index),
            "input_ids": torch.zeros(8, dtype=torch.int64),
        }


class Order(Sampler):
    """Permutation of (seed, epoch), split over ranks, from a position on."""

    def __init__(self, num, rank, world_size, batch_size):
        self.num, self.rank, self.world_size, self.batch_size = num, rank, world_size, batch_size
        self.epoch, self.start_batch = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num // self.world_size  # of the whole epoch: Lightning counts on from the position

    def __iter__(self):
        order = torch.randperm(self.num, generator=torch.Generator().manual_seed(7 + self.epoch)).tolist()
        start, self.start_batch = self.start_batch * self.batch_size, 0
        return iter(order[self.rank :: self.world_size][start:])


class TinyData(pl.LightningDataModule):
    setup_sleep = 0.0

    fingerprints: ClassVar = {"dataset": "d" * 64, "tokenizer": "t" * 64, "source": "stdlib", "num_train_tokens": "512"}

    def __init__(self, batch_size=4, nan_at=(), num=64):
        super().__init__()
        self.batch_size, self.nan_at, self.num = batch_size, nan_at, num
        self.position = (0, 0)

    def train_dataloader(self):
        if self.setup_sleep:
            sys.stderr.write("setting up\n")
            time.sleep(self.setup_sleep)
        order = Order(self.num, self.trainer.global_rank, self.trainer.world_size, self.batch_size)
        order.epoch, order.start_batch = self.position
        self.position = (0, 0)
        generator = torch.Generator()
        return DataLoader(
            Samples(self.num, self.nan_at), self.batch_size, sampler=order, drop_last=True, generator=generator
        )

    def val_dataloader(self):
        return DataLoader(Samples(16), 4)

    def state_dict(self):
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        num_batches = self.num // self.trainer.world_size // self.batch_size
        finished = progress.ready >= num_batches
        return {"epoch": self.trainer.current_epoch + finished, "batch": 0 if finished else progress.ready}

    def load_state_dict(self, state):
        self.position = (state["epoch"], state["batch"])


class TinyModule(pl.LightningModule):
    def __init__(self, sleep=0.0, val_random=False, val_sleep=0.0):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1, bias=False)
        )
        self.sleep, self.val_random, self.val_sleep = sleep, val_random, val_sleep
        self.losses = []

    def on_train_start(self):
        torch.manual_seed(50 + self.global_rank)  # as a run that wants another dropout on each rank does

    def training_step(self, batch, batch_idx):
        if self.sleep:
            time.sleep(self.sleep)
        loss = self.net(batch["x"]).pow(2).mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss, prog_bar=True)
        if self.sleep:
            sys.stderr.write(f"[rank {self.global_rank} step {self.trainer.global_step} batch {batch_idx}]\n")
        return loss

    def validation_step(self, batch, batch_idx):
        if self.val_random:
            torch.rand(3)
        if self.val_sleep:
            sys.stderr.write("validating\n")
            time.sleep(self.val_sleep)
        self.log("val_loss", self.net(batch["x"]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s / 10)), "interval": "step"}
        ]


class ShardedModule(TinyModule):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class BreakDisk(pl.Callback):
    """From `step` on, rank 0 can write no file of more than a few bytes."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step + 1 == self.step and trainer.is_global_zero:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    def on_exception(self, *args):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def make_trainer(root, callbacks=(), **kwargs):
    from fulgurite.callbacks.checkpointing import AtomicCheckpointIO

    settings = {
        "default_root_dir": root,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 24,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "plugins": [AtomicCheckpointIO()],
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **kwargs})


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


class Ranks:
    """`main(arguments)` in one or more forked processes, as `torchrun` would start them (without its imports)."""

    def __init__(self, root, *arguments, ranks=1, environment=None):
        root.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        context = multiprocessing.get_context("fork")
        arguments = [str(root), *map(str, arguments), "--devices", str(ranks)]
        self.log = root / f"output-{time.monotonic_ns()}.txt"
        self.processes = []
        for rank in range(ranks):
            variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
            if ranks > 1:
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tiny"}
                variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(context.Process(target=_forked, args=(arguments, variables, self.log)))
        for process in self.processes:
            process.start()

    @property
    def output(self):
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text, timeout=60):
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.output}"
            assert any(process.is_alive() for process in self.processes) or text in self.output, self.output
            time.sleep(0.01)

    def signal(self, signum, rank=0):
        os.kill(self.processes[rank].pid, signum)

    def join(self, timeout=60):
        """Exit codes, rank by rank."""
        for process in self.processes:
            process.join(timeout)
            if process.is_alive():
                for other in self.processes:
                    other.kill()
                raise AssertionError(f"still running after {timeout} s:\n{self.output}")
        return [process.exitcode for process in self.processes]


def _forked(arguments, variables, log):
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(variables)
    logging.basicConfig(force=True, stream=sys.stderr, format="%(message)s")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    main(arguments)


def launch(root, *arguments, ranks=1, expect=0, **kwargs):
    """Runs to the end; returns what was written."""
    run = Ranks(root, *arguments, ranks=ranks, **kwargs)
    assert run.join() == [expect] * ranks, run.output
    return run.output


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--max-steps", type=int, default=24)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--val-every", type=int, default=8)
    parser.add_argument("--nan-at", type=int, nargs="*", default=[])
    parser.add_argument("--action", default="stop")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--mlflow", action="store_true")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--val-sleep", type=float, default=0.0)
    parser.add_argument("--setup-sleep", type=float, default=0.0)
    parser.add_argument("--break-disk-at", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args(argv)

    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fulgurite.callbacks.checkpointing import CheckpointSafety, RNGState, find_resumable
    from fulgurite.callbacks.guards import NonFiniteGuard, PreemptionGuard
    from fulgurite.callbacks.progress import ThroughputProgressBar
    from fulgurite.callbacks.tracking import BufferedMLFlowLogger, RunTracker

    torch.set_num_threads(1)
    pl.seed_everything(5, verbose=False)
    folder = arguments.root / "checkpoints"
    checkpoints = {"filename": "{step}", "save_top_k": -1}
    if arguments.overwrite:
        checkpoints = {"filename": "same", "save_top_k": 1, "enable_version_counter": False}
    callbacks = [
        CheckpointSafety(),
        RNGState(),
        NonFiniteGuard(arguments.action),
        PreemptionGuard(),
        ThroughputProgressBar(),
        BreakDisk(arguments.break_disk_at),
        ModelCheckpoint(folder, **checkpoints, every_n_train_steps=arguments.every),
    ]
    strategy = arguments.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    logger = False
    if arguments.mlflow:
        callbacks.insert(0, RunTracker("tiny", {"lr": 0.01}, ["--lr", "0.01"]))
        logger = BufferedMLFlowLogger("tiny", run_dir=arguments.root, finalize_timeout=20)
    trainer = make_trainer(
        arguments.root,
        callbacks,
        max_steps=arguments.max_steps,
        accumulate_grad_batches=arguments.accumulate,
        devices=arguments.devices,
        strategy=strategy,
        logger=logger,
        val_check_interval=arguments.val_every,
        check_val_every_n_epoch=None,
        enable_progress_bar=True,
        use_distributed_sampler=False,
    )
    kind = ShardedModule if arguments.strategy == "fsdp2" else TinyModule
    module = kind(arguments.sleep, val_random=True, val_sleep=arguments.val_sleep)
    data = TinyData(nan_at=arguments.nan_at)
    data.setup_sleep = arguments.setup_sleep
    path = find_resumable(folder) if arguments.resume else None
    if trainer.global_rank == 0:
        arguments.root.mkdir(parents=True, exist_ok=True)
        (arguments.root / "started").write_text(str(os.getpid()))
    try:
        trainer.fit(module, datamodule=data, ckpt_path=path)
    except BaseException as error:
        sys.stderr.write(f"\nrank {trainer.global_rank}: {type(error).__name__}: {error}\n")
        raise
    final = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    if trainer.is_global_zero:
        torch.save(final, arguments.root / "final.pt")
        (arguments.root / "result.json").write_text(json.dumps({"resumed": str(path), "step": trainer.global_step}))


if __name__ == "__main__":
    main()
