"""What checkpoint merging gives at the smallest scale: merged against live weights and real learning-rate decays.

A two-layer byte-level GPT on the standard library, three seeds. The stable arm trains at a constant learning rate for
`--base` + `--window` steps and keeps a checkpoint every 10 steps of the window; all merges are made from those 20
checkpoints. The decay arms branch off where the window begins and see the same batches. Prints the table of validation
losses with the paired differences to the live weights, checks for each seed the three claims that hold at this size,
and draws a plot.

    python benchmarks/wsm_cpu.py [--seeds 3] [--output DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel

from fulgurite.callbacks.checkpoint_merging import merge_state_dicts, merge_weights

CONTEXT, BATCH, WARMUP, PEAK_LR, INTERVAL = 64, 16, 50, 4e-3, 10
TOLERANCE = 0.003  # nats: the spread of paired differences between seeds
CURVES = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "1-sqrt": ("one_minus_sqrt", {}),
    "ema(0.1)": ("ema", {"r": 0.1}),
}


def load_bytes(limit: int = 3_000_000, held_out: int = 200_000) -> tuple[torch.Tensor, torch.Tensor]:
    """ASCII bytes of the standard library's top-level modules in name order: (train, validation), both int64."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    data = np.frombuffer(text, dtype=np.uint8)
    data = torch.from_numpy(data[data < 128][:limit].astype(np.int64))
    return data[:-held_out], data[-held_out:]


def build_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, initializer_range=0.02,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch_at(data: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """The batch of one step, (BATCH, CONTEXT + 1): a pure function of seed and step, so that all arms see the same."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, data: torch.Tensor) -> float:
    usable = (len(data) - 1) // CONTEXT * CONTEXT
    inputs, targets = data[:usable].view(-1, CONTEXT), data[1 : usable + 1].view(-1, CONTEXT)
    total = 0.0
    for rows, labels in zip(inputs.split(256), targets.split(256), strict=True):
        logits = model(rows).logits
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    return total / usable


def train(model, optimizer, data, seed: int, first: int, last: int, factor, on_step=None) -> None:
    """Optimizer steps `first` .. `last` - 1 at learning rate PEAK_LR * factor(step)."""
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * factor(step)
        loss_of(model, batch_at(data, seed, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step + 1)


def copy_of(state):
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}


def run_seed(seed: int, base: int, window: int, data: torch.Tensor, held_out: torch.Tensor) -> dict[str, float]:
    """Validation loss of each arm of one seed."""
    losses: dict[str, float] = {}
    model = build_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    train(model, optimizer, data, seed, 0, base, lambda step: min(1.0, step / WARMUP))
    branch_weights = copy_of(model.state_dict())
    branch_moments = {index: copy_of(state) for index, state in optimizer.state_dict()["state"].items()}

    checkpoints: dict[int, dict[str, torch.Tensor]] = {}

    def keep(step: int) -> None:
        if (step - base) % INTERVAL == 0:
            checkpoints[step] = copy_of(model.state_dict())

    train(model, optimizer, data, seed, base, base + window, lambda step: 1.0, keep)
    losses["live, constant lr"] = validate(model, held_out)

    def merged(duration: int, interval: int, curve: str, **params: float) -> float:
        end = base + window
        steps = list(range(end - duration + interval, end + 1, interval))
        weights = merge_weights(steps, curve, **params)
        model.load_state_dict(merge_state_dicts([checkpoints[step] for step in steps], weights.c))
        return validate(model, held_out)

    for label, (curve, params) in CURVES.items():
        losses[f"merge {label}, duration {window}"] = merged(window, INTERVAL, curve, **params)
    for duration in (20, 50, 100, 200):
        losses[f"merge linear, duration {duration}, interval 10"] = merged(duration, 10, "linear")
    for interval in (10, 20, 50, 100):
        losses[f"merge linear, duration {window}, interval {interval}"] = merged(window, interval, "linear")

    shapes = {
        "linear": lambda t: 1 - t,
        "1-sqrt": lambda t: 1 - math.sqrt(t),
        "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    }
    for label, shape in shapes.items():
        model.load_state_dict(branch_weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
        state = optimizer.state_dict()
        state["state"] = {index: copy_of(moments) for index, moments in branch_moments.items()}
        optimizer.load_state_dict(state)
        train(model, optimizer, data, seed, base, base + window, lambda step, f=shape: f((step - base) / window))
        losses[f"real decay {label} over {window}"] = validate(model, held_out)
    return losses


def check(losses: dict[str, float], window: int) -> dict[str, bool]:
    """The claims that transfer to a tiny run (not among them: 1-sqrt > mean > EMA, and that longer is better)."""
    live = losses["live, constant lr"]
    merges = {name: loss for name, loss in losses.items() if name.startswith("merge")}
    by_interval = [losses[f"merge linear, duration {window}, interval {interval}"] for interval in (10, 50, 100)]
    decays = [loss for name, loss in losses.items() if name.startswith("real decay")]
    recovered = (live - min(merges.values())) / (live - min(decays))
    return {
        "every merge is below the live weights": max(merges.values()) < live,
        "interval 10 <= 50 <= 100": all(a <= b + TOLERANCE for a, b in itertools.pairwise(by_interval)),
        f"best merge recovers >= 50% of the gap to a real decay ({recovered:.0%})": recovered >= 0.5,
    }


def plot(table: dict[str, np.ndarray], path: Path) -> None:
    names = sorted(table, key=lambda name: table[name].mean())
    live = table["live, constant lr"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    colors = {"merge": "tab:blue", "real": "tab:green", "live": "tab:red"}
    for row, name in enumerate(names):
        difference = table[name] - live
        axis.barh(row, difference.mean(), color=colors[name.split()[0].rstrip(",")], alpha=0.6)
        axis.plot(difference, [row] * len(difference), "k.", markersize=5)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("validation loss minus that of the live weights (nats/byte; dots: seeds)")
    axis.set_title("Checkpoint merging against the live weights and real decays")
    axis.axvline(0, color="tab:red", linewidth=1)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base", type=int, default=400, help="steps before the window, warmup included")
    parser.add_argument("--window", type=int, default=200, help="steps of the merge window")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/wsm_cpu"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    data, held_out = load_bytes()
    started, per_seed = time.perf_counter(), []
    for seed in range(args.seeds):
        per_seed.append(run_seed(seed, args.base, args.window, data, held_out))
        print(f"seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    table = {name: np.array([losses[name] for losses in per_seed]) for name in per_seed[0]}
    live = table["live, constant lr"]
    print(f"| arm ({args.seeds} seeds) | val loss | minus live, mean | per seed |\n|---|---|---|---|")
    for name, losses in table.items():
        difference = losses - live
        print(
            f"| {name} | {losses.mean():.3f} | {difference.mean():+.4f} | {' '.join(f'{d:+.4f}' for d in difference)} |"
        )
    failed = 0
    for seed, losses in enumerate(per_seed):
        for claim, holds in check(losses, args.window).items():
            failed += not holds
            print(f"seed {seed}: {'holds' if holds else 'FAILS'}: {claim}")
    (args.output / "results.json").write_text(json.dumps(per_seed, indent=1))
    plot(table, args.output / "wsm_cpu.png")
    print(f"plot and results: {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
