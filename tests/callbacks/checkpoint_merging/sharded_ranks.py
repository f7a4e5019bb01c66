"""One rank of two: saves sharded checkpoints of a known trajectory; checks that streaming merges stay on the shard."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

STEPS = [10, 20, 30]
PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "vector": [Shard(0)], "whole": [Replicate()]}


def full_state(step):
    """What the sharded checkpoint of a step holds, put together."""
    generator = torch.Generator().manual_seed(step)
    return {
        "rows": torch.randn(301, 700, generator=generator),  # 301 rows: the second rank has one less
        "columns": torch.randn(64, 14, generator=generator).bfloat16(),
        "vector": torch.randn(7, generator=generator),
        "whole": torch.randn(3, 2, generator=generator),
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    from fulgurite.callbacks.checkpoint_merging import StreamingMerge, merge_state_dicts, merge_weights

    rank = dist.get_rank()
    streams = {
        "anytime": StreamingMerge("anytime", curve="1-sqrt"),
        "sliding": StreamingMerge(
            "sliding", curve="cosine", num_checkpoints=3, storage="disk", directory=folder / "ring", rank=rank
        ),
    }
    for step in STEPS:
        full = full_state(step)
        sharded = {name: distribute_tensor(t, mesh, PLACEMENTS[name]) for name, t in full.items()}
        dcp.save({"state_dict": sharded}, checkpoint_id=folder / f"step={step}.ckpt")
        for stream in streams.values():
            stream.update(sharded, step)
    for name, stream in streams.items():
        c = merge_weights(STEPS, {"anytime": "1-sqrt", "sliding": "cosine"}[name]).c
        expected = merge_state_dicts([full_state(step) for step in STEPS], c)
        merged = stream.result()
        for key, tensor in merged.items():
            assert isinstance(tensor, DTensor)
            assert tuple(tensor.placements) == tuple(PLACEMENTS[key])
            torch.testing.assert_close(
                tensor.full_tensor(), expected[key], rtol=0, atol=1e-2 if key == "columns" else 1e-6
            )
        stream.flush()
    state = streams["sliding"].state_dict()
    resumed = StreamingMerge(
        "sliding", curve="cosine", num_checkpoints=3, storage="disk", directory=folder / "ring", rank=rank
    )
    resumed.load_state_dict(state)
    live = {name: distribute_tensor(torch.zeros_like(t), mesh, PLACEMENTS[name]) for name, t in full_state(0).items()}
    resumed.result(out=live)
    assert all(torch.equal(live[k].to_local(), v.to_local()) for k, v in streams["sliding"].result().items())
    moved = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in full_state(40).items()}
    with pytest.raises(
        ValueError, match=r"rows: local_shape .* placements \(Replicate\(\),\), was \(Shard\(dim=0\),\)"
    ):
        streams["anytime"].update(moved, 40)
    for stream in (*streams.values(), resumed):
        stream.close()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} done")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]))
