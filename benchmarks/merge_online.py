"""What CheckpointMerge costs a training run: time a step, memory, and waiting for the disk.

    python benchmarks/merge_online.py [--steps 12] [--batch-size 16] [--every 10] [--snapshots 64]

A Llama of 5.4 M parameters trains on random tokens of 16 x 256 in float32. The time that the callback's hooks take is
measured inside each step and divided by the step's own time, so that a busy machine slows both alike; a snapshot is
taken at every step and its cost spread over `--every` steps, the interval of the recipe. Targets: the any-time form at
most 1 % of step time and one extra copy of the parameters at any number of merged checkpoints (also while merged
weights are validated); the sliding window on disk never waits for a write and holds a bounded number of copies.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from fulgurite.callbacks.checkpoint_merging import CheckpointMerge, rings
from fulgurite.callbacks.checkpoint_merging.rings import DiskRing

VOCABULARY, CONTEXT = 4096, 256


class TinyLlama(pl.LightningModule):
    """The architecture of the default recipe."""

    def __init__(self, hidden: int = 256, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=688, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.on_merged = lambda: None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_sums(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.on_merged()
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        return torch.stack((loss.double() * batch[0].numel(), torch.tensor(float(batch[0].numel())), torch.tensor(0.0)))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Seconds of each step, from batch start to the end of all hooks, and of them in the callback's hooks."""

    def __init__(self, watched: CheckpointMerge) -> None:
        self.steps: list[float] = []
        self.hooks: list[float] = []
        self.spent = 0.0
        self.started: float | None = None
        for name in ("on_train_batch_start", "on_train_batch_end"):
            setattr(watched, name, self.timed(getattr(watched, name)))

    def timed(self, hook):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs) -> None:  # type: ignore[no-untyped-def]
            before = time.perf_counter()
            hook(*args, **kwargs)
            self.spent += time.perf_counter() - before

        return run

    def on_train_batch_start(self, *args: object) -> None:
        now = time.perf_counter()
        if self.started is not None:
            self.steps.append(now - self.started)
            self.hooks.append(self.spent)
        self.started, self.spent = now, 0.0


def held_bytes(holder: object, module: torch.nn.Module) -> int:
    """Bytes of the tensors that an object holds, directly or in its parts, other than the module's own."""
    own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)
        elif type(value).__module__.startswith("fulgurite"):
            walk(vars(value))

    walk(holder)
    return sum(found.values())


def train(callback: CheckpointMerge, module: TinyLlama, root: Path, steps: int, batch_size: int, **kwargs) -> Clock:  # type: ignore[no-untyped-def]
    clock = Clock(callback)
    tokens = torch.randint(VOCABULARY, (batch_size * (steps + 1), CONTEXT), generator=torch.Generator().manual_seed(1))
    settings = {"limit_val_batches": 0} | kwargs
    trainer = pl.Trainer(
        default_root_dir=root, accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[clock, callback], num_sanity_val_steps=0,
        **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size), DataLoader(TensorDataset(tokens[:1]), 1))
    return clock


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def report_time(name: str, clock: Clock, every: int) -> float:
    """Prints and returns the share of a step, leaving out the first two (allocation, warm caches)."""
    step = median([s - h for s, h in zip(clock.steps[2:], clock.hooks[2:], strict=True)])
    snapshot = median(clock.hooks[2:])
    share = snapshot / every / step
    print(
        f"{name:34s} step {step * 1e3:8.1f} ms   snapshot {snapshot * 1e3:7.2f} ms = {snapshot / step:6.2%} of it   "
        f"every {every} steps: {share:6.3%}"
    )
    return share


def measure_memory(snapshots: int, **settings) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Copies of the parameters that the callback holds after `snapshots` snapshots, and while they are validated."""
    module = TinyLlama(hidden=64, layers=2)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    callback = CheckpointMerge(1, **settings)
    validating: list[int] = []
    module.on_merged = lambda: validating.append(held_bytes(callback, module))
    with tempfile.TemporaryDirectory() as root:
        train(callback, module, Path(root), snapshots, 1, limit_val_batches=1, val_check_interval=snapshots)
    return held_bytes(callback, module) / size, max(validating) / size


def measure_disk(root: Path, steps: int, batch_size: int, every: int) -> None:
    """Waiting of the training thread against the time that the writer needs."""
    waited, written = [], []
    push = DiskRing.push

    def timed_push(ring, position, tensors):  # type: ignore[no-untyped-def]
        before = time.perf_counter()
        blocked = ring._idle.empty()
        push(ring, position, tensors)
        waited.append((time.perf_counter() - before, blocked))

    original = rings.write_safetensors

    def timed_write(path, tensors):  # type: ignore[no-untyped-def]
        before = time.perf_counter()
        original(path, tensors)
        written.append(time.perf_counter() - before)

    DiskRing.push, rings.write_safetensors = timed_push, timed_write  # type: ignore[method-assign]
    try:
        callback = CheckpointMerge(1, num_checkpoints=4, storage="disk")
        clock = train(callback, TinyLlama(), root, steps, batch_size)
    finally:
        DiskRing.push, rings.write_safetensors = push, original  # type: ignore[method-assign]
    report_time("sliding window of 4 on disk", clock, every)
    pushes = [seconds for seconds, _ in waited]
    print(
        f"    a snapshot at every step: push {median(pushes) * 1e3:.2f} ms (the copy to host memory), write "
        f"{median(written) * 1e3:.1f} ms in the background; pushes that found both buffers busy: "
        f"{sum(blocked for _, blocked in waited)} of {len(waited)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--snapshots", type=int, default=64)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    parameters = sum(p.numel() for p in TinyLlama().parameters())
    print(f"{parameters / 1e6:.2f} M parameters, batch {arguments.batch_size} x {CONTEXT}, float32")
    with tempfile.TemporaryDirectory() as root:
        clock = train(CheckpointMerge(1), TinyLlama(), Path(root), arguments.steps, arguments.batch_size)
        share = report_time("any-time form (linear)", clock, arguments.every)
        clock = train(
            CheckpointMerge(1, num_checkpoints=4), TinyLlama(), Path(root), arguments.steps, arguments.batch_size
        )
        report_time("sliding window of 4 on the device", clock, arguments.every)
        measure_disk(Path(root), arguments.steps, arguments.batch_size, arguments.every)
    passed = share <= 0.01
    for count in (2, arguments.snapshots // 4, arguments.snapshots):
        held, validating = measure_memory(count)
        passed &= held < 1.01 and validating < 1.01
        print(f"any-time, {count:3d} snapshots: {held:.3f} extra copies, at most {validating:.3f} while validating")
    held, validating = measure_memory(8, num_checkpoints=4)
    print(f"sliding 4 on device: {held:.3f} extra copies, at most {validating:.3f} while validating")
    print(f"targets {'met' if passed else 'MISSED'}: any-time {share:.3%} of step time (at most 1 %), one extra copy")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
