"""Training throughput of the causal LM module under Lightning's Trainer, side by side with two peers.

    python benchmarks/throughput.py                                   # against a hand-written PyTorch loop
    python benchmarks/throughput.py --litgpt-python VENV/bin/python   # and against litgpt's own pretrain script

The same architecture (5.4 M-parameter Llama: 6 layers, d=256, 4 heads, 2 key-value heads, vocabulary 4096, tied), batch
(16 x 256 tokens), precision (bf16-mixed), optimizer (AdamW, clip 1.0) and data (random tokens) for all. Every arm is a
process of its own; arms take turns, and each round's step time is a median, so that what else runs on the machine hits
all alike. A step is timed from one fetch of a batch to the next, in wall and in CPU time, after `--warmup` steps.

litgpt pins other versions of its dependencies: install it in an environment of its own
(`python -m venv VENV && VENV/bin/pip install litgpt`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, VOCAB, BATCH, LENGTH = 6, 256, 688, 4, 2, 4096, 16, 256
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
LOG_EVERY = 10
WARMUP_STEPS = 2


class Clock:
    """Wall and CPU time at each fetch of a batch."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps(self, warmup: int) -> dict[str, float]:
        """Median seconds of a step after `warmup` of them."""

        def median(times: list[float]) -> float:
            return statistics.median(later - earlier for earlier, later in pairwise(times))

        return {"wall": median(self.wall[warmup:]), "cpu": median(self.cpu[warmup:])}


def batches(clock: Clock, length: int, steps: int) -> Iterator:
    """`steps` batches of random tokens (BATCH, length), each fetch a tick."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        clock.tick()
        yield torch.randint(VOCAB, (BATCH, length), generator=generator)


def run_module(clock: Clock, steps: int, compile_model: bool) -> None:
    """The project's module under Lightning's Trainer, with its logging."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.loggers import CSVLogger

    from fulgurite.lightning_modules.pretraining import PretrainingModule

    class Data(pl.LightningDataModule):
        uniform_token_count = True

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            class Stream(torch.utils.data.IterableDataset):
                def __iter__(self) -> Iterator:
                    for ids in batches(clock, LENGTH, steps):
                        yield {"input_ids": ids, "labels": ids}

            return torch.utils.data.DataLoader(Stream(), batch_size=None)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger("."),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(PretrainingModule(LLAMA, warmup_steps=WARMUP_STEPS, compile=compile_model), Data())


def run_loop(clock: Clock, steps: int, same_leaves: bool) -> None:
    """What one would write by hand: transformers' model and loss, autocast, fused AdamW, clipping.

    With `same_leaves`, its attention, norms and loss are the module's: what is left is the cost of Trainer and logging.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    if same_leaves:
        from fulgurite.lightning_modules.cpu_training import speed_up_on_cpu
        from fulgurite.lightning_modules.token_loss import shift_targets, token_cross_entropy

        speed_up_on_cpu(model, attention=True, norms=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARMUP_STEPS))
    for step, ids in enumerate(batches(clock, LENGTH, steps)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if same_leaves:
                logits = model(input_ids=ids, use_cache=False).logits
                loss = token_cross_entropy(logits, shift_targets(ids))[0] / (BATCH * (LENGTH - 1))
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % LOG_EVERY == 0:
            print(step, loss.item(), file=sys.stderr)


def run_litgpt(clock: Clock, steps: int) -> None:
    """litgpt's pretrain script, with its own model, loss, torch.compile and Fabric loop."""
    import torch
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule

    class Data(DataModule):
        def connect(self, tokenizer=None, batch_size=1, max_seq_length=None) -> None:
            pass

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            class Stream(torch.utils.data.IterableDataset):
                def __iter__(self) -> Iterator:
                    return batches(clock, LENGTH + 1, steps + 1)

            return torch.utils.data.DataLoader(Stream(), batch_size=None)

        def val_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader([torch.randint(VOCAB, (BATCH, LENGTH + 1))], batch_size=None)  # type: ignore[arg-type]

    config = Config(
        name="llama-5m",
        block_size=LENGTH,
        padded_vocab_size=VOCAB,
        vocab_size=VOCAB,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        n_query_groups=KV_HEADS,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=FFN,
    )
    train = TrainArgs(
        save_interval=None,
        log_interval=LOG_EVERY,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        max_tokens=steps * BATCH * LENGTH,
        max_norm=1.0,
        lr_warmup_steps=WARMUP_STEPS,
        tie_embeddings=True,
    )
    pretrain.save_checkpoint = lambda *args, **kwargs: None  # the final one is not part of a step
    pretrain.setup(
        model_name="llama-5m",
        model_config=config,
        out_dir=Path("litgpt-out"),
        precision="bf16-mixed",
        data=Data(),
        train=train,
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 4e-4, "betas": [0.9, 0.95]}},
        devices=1,
        logger_name="csv",
    )


ARMS: dict[str, Callable[[Clock, int], None]] = {
    "module": lambda clock, steps: run_module(clock, steps, compile_model=False),
    "module+compile": lambda clock, steps: run_module(clock, steps, compile_model=True),
    "loop": lambda clock, steps: run_loop(clock, steps, same_leaves=False),
    "loop, same leaves": lambda clock, steps: run_loop(clock, steps, same_leaves=True),
    "litgpt": run_litgpt,
}


def work(arm: str, steps: int, warmup: int, threads: int) -> None:
    """Child process: runs one arm in a temporary folder and prints its step times as the last line."""
    import torch

    torch.set_num_threads(threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        ARMS[arm](clock, steps + warmup)
        os.chdir("/")
    print(json.dumps(clock.steps(warmup)))


def measure(arm: str, python: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs one arm once and returns its median step times in seconds."""
    command = [python, __file__, "--arm", arm]
    for name in ("steps", "warmup", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if child.returncode:
        sys.exit(f"{arm} failed:\n{child.stderr[-3000:]}")
    return json.loads(child.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measures all arms in turns and prints step times and ratios (above 1: the module is faster)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--litgpt-python", metavar="PATH", help="python of an environment that has litgpt")
    parser.add_argument("--compile", action="store_true", help="also measure the module with compile=True")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        work(arguments.arm, arguments.steps, arguments.warmup, arguments.threads)
        return
    arms = ["module", *(["module+compile"] if arguments.compile else []), "loop", "loop, same leaves"]
    pythons = dict.fromkeys(arms, sys.executable)
    if arguments.litgpt_python:
        pythons["litgpt"] = arguments.litgpt_python
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in pythons}
    for _ in range(arguments.rounds):
        for arm, python in pythons.items():
            results[arm].append(measure(arm, python, arguments))
            print(f"  {arm}: {results[arm][-1]}", file=sys.stderr)
    print(f"{'arm':<18}{'tokens/s':>10}{'ms/step':>10}{'CPU ms/step':>13}  (medians of {arguments.rounds} rounds)")
    for arm, rounds in results.items():
        wall, cpu = (statistics.median(r[kind] for r in rounds) for kind in ("wall", "cpu"))
        print(f"{arm:<18}{BATCH * LENGTH / wall:>10.0f}{wall * 1e3:>10.1f}{cpu * 1e3:>13.1f}")
    ours = [arm for arm in results if arm.startswith("module")]
    for arm in ours:
        for peer in [arm for arm in results if arm not in ours]:
            ratios = {
                kind: statistics.median(
                    theirs[kind] / mine[kind] for theirs, mine in zip(results[peer], results[arm], strict=True)
                )
                for kind in ("wall", "cpu")
            }
            print(f"throughput of {arm} / {peer}: {ratios['wall']:.3f} (wall)  {ratios['cpu']:.3f} (CPU time)")


if __name__ == "__main__":
    main()
