"""Checkpoints of a small trajectory in every format that merging reads."""

import numpy as np
import torch
from safetensors.torch import save_file

STEPS = [100, 110, 120, 130]


def state_dicts(num=4, dtype=torch.float32, tied=True, prefix="model."):
    """State dicts along a noisy line: matrix, tied head, bf16 matrix, float buffer, counter and mask."""
    generator = torch.Generator().manual_seed(0)
    base, drift = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    states = []
    for j in range(num):
        embedding = (base + 0.1 * j * drift + 0.02 * torch.randn(6, 5, generator=generator)).to(dtype)
        state = {
            "embed.weight": embedding,
            "layer.weight": torch.randn(3, 5, generator=generator).bfloat16(),
            "norm.running_mean": torch.randn(5, generator=generator),
            "norm.num_batches_tracked": torch.tensor(7 * j),
            "mask": torch.tensor([True, j % 2 == 0]),
            "scalar": torch.randn((), generator=generator),
            "empty": torch.zeros(0, 4),
            # another tensor on the same memory, as in a module's state dict
            "lm_head.weight": embedding.detach() if tied else torch.randn(6, 5, generator=generator),
        }
        states.append({prefix + name: value for name, value in state.items()})
    return states


def save_lightning(path, state, step, **more):
    """A `.ckpt` as Lightning writes it, optimizer included."""
    weight = next(iter(state.values()))
    torch.save(
        {
            "epoch": 0,
            "global_step": step,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": state,
            "optimizer_states": [{"state": {0: {"exp_avg": torch.full_like(weight, 9.0)}}, "param_groups": []}],
            "lr_schedulers": [{"last_epoch": step}],
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {},
            "hyper_parameters": {"width": 5},
            "hparams_name": "kwargs",
            **more,
        },
        path,
    )


def write(kind, directory, states, steps=STEPS):
    """Write one checkpoint a state; returns their paths, oldest first."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for state, step in zip(states, steps, strict=True):
        if kind == "lightning":
            path = directory / f"epoch=0-step={step}.ckpt"
            save_lightning(path, state, step)
        elif kind == "torch":
            path = directory / f"step_{step}.pt"
            torch.save(state, path)
        elif kind == "legacy":
            path = directory / f"step_{step}.bin"
            torch.save(state, path, _use_new_zipfile_serialization=False)
        elif kind == "safetensors":
            path = directory / f"step_{step}.safetensors"
            save_file(untied(state), path)
        elif kind == "sharded":
            path = directory / f"checkpoint-{step}"
            save_sharded(path, untied(state))
        elif kind == "distributed":
            import torch.distributed.checkpoint as dcp

            path = directory / f"step={step}.ckpt"
            dcp.save({"state_dict": untied(state), "optimizer_0": {"m": torch.ones(3)}}, checkpoint_id=path)
            torch.save({"global_step": step, "pytorch-lightning_version": "2.6.6", "epoch": 0}, path / "meta.pt")
        paths.append(path)
    return paths


def untied(state):
    """What formats without shared memory hold: the head's name is left out."""
    pointers = [tensor.data_ptr() for tensor in state.values()]
    return {name: t for i, (name, t) in enumerate(state.items()) if not t.numel() or t.data_ptr() not in pointers[:i]}


def save_sharded(path, state, num_shards=3):
    """A Hugging Face directory with an index."""
    import json

    path.mkdir()
    names = list(state)
    weight_map = {}
    for i, part in enumerate(np.array_split(np.arange(len(names)), num_shards), start=1):
        shard = f"model-{i:05d}-of-{num_shards:05d}.safetensors"
        save_file({names[j]: state[names[j]] for j in part}, path / shard, metadata={"format": "pt"})
        weight_map |= {names[j]: shard for j in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    torch.save({"m": torch.ones(3)}, path / "optimizer.pt")
