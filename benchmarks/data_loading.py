"""How fast batches come: against training, against the usual per-sample loader, and at start-up.

    python benchmarks/data_loading.py [--cache_dir DIR] [--sequence_length 256] [--batch_size 16]

Peer: the loader most training scripts have, one `__getitem__` a sample on a memory map, `default_collate`, a shuffling
`RandomSampler`, two workers. Training: forward, backward and AdamW on a 5 M-parameter Llama, float32, on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fulgurite.datamodules.sampler import permute
from fulgurite.datamodules.text import TextDataModule


class PerSample(Dataset):
    def __init__(self, data: TextDataModule) -> None:
        assert data.train_dataset is not None
        tokens = data.train_dataset.tokens
        self.tokens = np.memmap(tokens.folder / "train-00000.bin", dtype=np.uint16, mode="r")
        self.length = data.sequence_length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self.tokens[index * self.length : (index + 1) * self.length].astype(np.int64))
        return {"input_ids": row, "labels": row.clone(), "sample_ids": torch.tensor(index)}


def tokens_per_second(loader: DataLoader, seconds: float = 2.0) -> tuple[float, float]:
    """(seconds to the first batch, tokens/s after it)."""
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter() - begin
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            continue
        count += batch["input_ids"].numel()
    return first, count / (time.perf_counter() - begin)


def training_tokens_per_second(data: TextDataModule, steps: int = 4) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert data.tokenizer is not None
    config = LlamaConfig(
        vocab_size=len(data.tokenizer),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=data.sequence_length,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin, count = 0.0, 0
    for i, batch in enumerate(data.train_dataloader()):
        if i == 1:
            begin = time.perf_counter()
        model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += batch["input_ids"].numel() if i else 0
        if i == steps:
            break
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache_dir", default=None)
    parser.add_argument("--sequence_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    arguments = parser.parse_args()
    keywords: dict[str, Any] = {"sequence_length": arguments.sequence_length, "batch_size": arguments.batch_size}
    with tempfile.TemporaryDirectory() as scratch:
        cache_dir = arguments.cache_dir or scratch
        begin = time.perf_counter()
        data = TextDataModule(cache_dir=cache_dir, **keywords)
        data.setup()
        built = time.perf_counter() - begin
        begin = time.perf_counter()
        data = TextDataModule(cache_dir=cache_dir, **keywords)
        data.setup()
        print(f"set-up: first {built:.1f} s (train tokenizer, tokenise), again {time.perf_counter() - begin:.2f} s")

        results = {}
        variants: dict[str, dict[str, Any]] = {
            "ours, 0 workers": {},
            "ours, 2 workers": {"num_workers": 2},
            "ours, 0 workers, document masking": {"document_masking": True},
        }
        for name, options in variants.items():
            module = TextDataModule(cache_dir=cache_dir, **keywords, **options)
            module.setup()
            results[name] = tokens_per_second(module.train_dataloader())
        for workers in (0, 2):
            peer = DataLoader(PerSample(data), arguments.batch_size, shuffle=True, drop_last=True, num_workers=workers)
            results[f"per-sample loader, {workers} workers"] = tokens_per_second(peer)
        training = training_tokens_per_second(data)
        print(f"{'loader':36} {'first batch':>12} {'tokens/s':>14} {'x training':>11}")
        for name, (first, rate) in results.items():
            print(f"{name:36} {first * 1e3:9.1f} ms {rate:14,.0f} {rate / training:10.0f}x")
        print(f"{'training step':36} {'':12} {training:14,.0f}")
        begin, count = time.perf_counter(), 1 << 20
        permute(np.arange(count), 10**12, 0, 0)
        print(f"order: {(time.perf_counter() - begin) / count * 1e9:.0f} ns a sample at 10^12 samples")
        ratio = results["ours, 0 workers"][1] / max(results[f"per-sample loader, {w} workers"][1] for w in (0, 2))
        print(f"ratio: ours without workers / best per-sample loader = {ratio:.1f}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
