"""Two gloo ranks train with CheckpointMerge (started by test_callback_distributed.py) and write down what they saw."""

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fulgurite.callbacks.checkpoint_merging import CheckpointMerge
from fulgurite.callbacks.checkpointing import CheckpointSafety
from fulgurite.callbacks.rng_state import RNGState

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
_spec = importlib.util.spec_from_file_location("merge_toy", Path(__file__).with_name("toy.py"))
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)


class Sharded(toy.Toy):
    """FSDP2 with unevenly sharded parameters (5 rows on 2 ranks), a nested group and parameters of the root itself; or
    tensor parallelism, where some parameters are sharded and others are not."""

    def __init__(self, kind):
        super().__init__(sums=False)
        self.kind = kind
        del self.net, self.head

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        width = 5 if self.kind == "fsdp" else 6
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 7))
        self.head = torch.nn.Linear(7, 8, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if self.kind == "tp":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net, mesh=mesh)
        # as with a model whose embedding and head are the root's: gathered, and left so, by a forward pass
        fully_shard(self, mesh=mesh)

    def loss(self, batch):
        x, y = batch
        return ((self.head(self.net(x)) * self.scale.mean()) - y).pow(2).mean()

    def forward(self, batch):
        return self.loss(batch)

    def training_step(self, batch, batch_idx):
        self.count += 1
        return self(batch)

    def validation_sums(self, batch):
        size = len(batch[0])
        return torch.tensor([float(self(batch).double()) * size, size, 0.0], dtype=torch.float64)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        pass


class Tokens(toy.OrderedData):
    """Rows of random tokens, as language-model batches."""

    def __init__(self, num_batches, val_batches):
        super().__init__(num_batches, val_batches)
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(64, (4 * num_batches, 16), generator=generator)
        self.x = self.y = tokens
        tokens = torch.randint(64, (4 * val_batches, 16), generator=generator)
        self.val = torch.utils.data.TensorDataset(tokens, tokens)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"input_ids": batch[0], "labels": batch[1]}


def llama():
    from fulgurite.lightning_modules.causal_lm import CausalLMModule

    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return CausalLMModule(config, learning_rate=1e-2, schedule="constant")


class Recorder(toy.pl.Callback):
    """Full weights after each update."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights[trainer.global_step] = full(pl_module)


def full(module):
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in module.state_dict().items()
    }


def whole(merged):
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in merged.items()}


def train(kind, root, callback, ckpt_path=None, save_at=(8,), **kwargs):
    sizes = {"fsdp": (2, 1), "tp": (1, 2), "llama": (2, 1)}
    data = (Tokens if kind == "llama" else toy.OrderedData)(num_batches=100, val_batches=4)
    strategy = ModelParallelStrategy(*sizes[kind]) if kind in sizes else "ddp"
    recorder = Recorder()
    callbacks = [CheckpointSafety(check_space=False), RNGState()]
    callbacks += [callback] if callback is not None else []
    settings = {"strategy": strategy, "devices": 2, "max_steps": 16, "enable_checkpointing": False} | kwargs
    module, trainer = toy.run(
        root,
        None,
        llama() if kind == "llama" else Sharded(kind) if kind in sizes else toy.Toy(),
        data,
        ckpt_path,
        callbacks=[*callbacks, recorder, toy.SaveAt(save_at, root / "checkpoints")],
        **settings,
    )
    return module, trainer, recorder


def compare(kind, root, settings):
    """One unbroken run without and one with the callback, and one that resumes; what came out of them."""
    _, _, plain = train(kind, root / "plain", None)
    callback = CheckpointMerge(2, export_dir="merged", **settings)
    module, trainer, recorder = train(kind, root / "whole", callback)
    again, source = CheckpointMerge(2, export_dir="merged", **settings), root / "whole"
    if callback._directory is not None or kind != "ddp":  # the unbroken run has deleted old files: stop earlier
        source = root / "short"
        train(kind, source, CheckpointMerge(2, **settings), max_steps=9)
    _, _, resumed = train(kind, root / "resumed", again, source / "checkpoints" / "batch=8.ckpt")
    return {
        "weights": recorder.weights,
        "untouched": all(toy.same(plain.weights[s], recorder.weights[s]) for s in plain.weights),
        "resumed_run": all(toy.same(recorder.weights[s], resumed.weights[s]) for s in resumed.weights),
        "holds": callback._merge is not None,
        "merged": whole(callback.merged_state_dict()),
        "merged_resumed": whole(again.merged_state_dict()),
        "info": callback.merge_info(),
        "info_resumed": again.merge_info(),
        "history": callback.history,
        "history_resumed": again.history,
        "val_loss_merged": float(trainer.callback_metrics["val_loss_merged"]),
        "model": full(module),
        "val": list(toy.OrderedData(num_batches=100, val_batches=4).val.tensors),
        "files": sorted(str(p.relative_to(root)) for p in root.rglob("*.safetensors")),
    }


def main(root, cases):
    for kind, settings in json.loads(cases):
        name = f"{kind}-{json.dumps(settings)}"
        folder = Path(root, name.replace("/", "_"))
        try:
            report = compare(kind, folder, settings)
        except ValueError as error:
            report = {"error": str(error)}
        torch.save(report, f"{folder}-report-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
