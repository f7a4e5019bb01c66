"""CheckpointMerge with real models and against the off-line merge; compiled modules; a killed process; interrupts."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fulgurite.callbacks.checkpoint_merging import CheckpointMerge, merge_checkpoints
from fulgurite.callbacks.checkpoint_merging.validation import Backup
from fulgurite.callbacks.checkpointing import AtomicCheckpointIO
from fulgurite.callbacks.rng_state import RNGState

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("merge_toy", HERE / "toy.py")
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)
run, same, snapshot = toy.run, toy.same, toy.snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_checkpoints": 4, "curve": "cosine"},
        {"num_checkpoints": 4, "curve": "1-sqrt", "grid": "interval_mean", "min_ratio": 0.1, "storage": "disk"},
    ],
)
def test_sliding_merge_equals_the_off_line_merge_of_the_checkpoints_bit_for_bit(tmp_path, settings):
    callback = CheckpointMerge(5, export_dir="merged", **settings)
    run(tmp_path, callback, save_at=[5, 10, 15, 20])
    arguments = {k: v for k, v in settings.items() if k in ("curve", "grid", "min_ratio")}
    paths = sorted((tmp_path / "checkpoints").glob("*.ckpt"))
    result = merge_checkpoints(paths, tmp_path / "offline.safetensors", strip_prefix=None, **arguments)
    offline, online = load_file(tmp_path / "offline.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert same(online, {name: offline[name] for name in online})
    assert result.weights.to_dict().items() <= callback.merge_info().items()


def test_a_merge_is_not_merged_again_by_accident(tmp_path):
    run(tmp_path, CheckpointMerge(5, export_dir="merged", export_every=10), max_steps=20)
    inputs = [tmp_path / "merged-step-10", tmp_path / "merged-step-20"]
    with pytest.raises(ValueError, match="merged-step-10"):
        merge_checkpoints(inputs, tmp_path / "again.safetensors", positions=[10, 20])


class Net(torch.nn.Module):
    """A module of the user's own: dynamo does not compile a bare `Sequential`."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


def test_compiled_modules_validate_the_merge_without_compiling_again(tmp_path):
    plain, compiled = CheckpointMerge(2), CheckpointMerge(2)
    run(tmp_path / "a", plain)
    module, graphs = toy.Toy(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module.net = Net(module.net)
    module.net.compile(backend=backend)
    counts = []

    class Count(toy.pl.Callback):
        def on_validation_end(self, *args):
            counts.append(len(graphs))

    run(tmp_path / "b", compiled, module, callbacks=[Count()])
    assert [e["val_loss_merged"] for e in compiled.history] == pytest.approx(
        [e["val_loss_merged"] for e in plain.history], rel=1e-5
    )
    assert len(counts) == 4
    assert counts[0] > 0
    assert counts[0] == counts[-1]  # the first validation, live and merged, compiled all there is


# ----------------------------------------------------------------------------------------------------- tiny Llama


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"{i} plus {i % 7} is {i + i % 7} and the river runs past house number {i * i}.\n" for i in range(3000)]
    for part in range(30):
        (folder / f"{part}.txt").write_text("".join(lines[part * 100 : part * 100 + 100]))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_llama_trains_exports_and_loads_with_the_loss_it_was_measured_at(tmp_path, corpus, tied):
    from transformers import AutoModelForCausalLM

    from fulgurite.datamodules.text import TextDataModule
    from fulgurite.lightning_modules.causal_lm import CausalLMModule

    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    config |= {"max_position_embeddings": 64}
    data = TextDataModule(str(corpus), vocab_size=300, sequence_length=32, batch_size=4, val_fraction=0.1)
    module = CausalLMModule(config, learning_rate=1e-2, schedule="warmup_stable", warmup_steps=4)
    callback = CheckpointMerge(2, export_dir="merged")
    _, trainer = run(tmp_path, callback, module, data, limit_val_batches=4, max_steps=16, val_check_interval=4)
    assert callback.positions == [6, 8, 10, 12, 14, 16]  # 4 steps of warmup; 5 is the first at the peak
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied
    assert {"config.json", "model.safetensors", "merge.json", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "merged").iterdir()
    }
    with torch.no_grad():
        batches = [b for _, b in zip(range(4), data.val_dataloader(), strict=False)]
        losses = [float(merged(input_ids=b["input_ids"], labels=b["labels"]).loss) for b in batches]
    assert float(trainer.callback_metrics["val_loss_merged"]) == pytest.approx(sum(losses) / 4, rel=1e-4)
    bytes_a_token = float(trainer.callback_metrics["val_loss"] / trainer.callback_metrics["val_bpb"])
    assert float(
        trainer.callback_metrics["val_loss_merged"] / trainer.callback_metrics["val_bpb_merged"]
    ) == pytest.approx(bytes_a_token, rel=1e-5)
    # the merge is a place to start from: a fresh run with a fresh optimizer
    tuned = CausalLMModule(str(tmp_path / "merged"), learning_rate=1e-3, schedule="linear", warmup_steps=2)
    _, second = run(tmp_path / "sft", None, tuned, data, max_steps=4, limit_val_batches=4, val_check_interval=4)
    assert float(second.callback_metrics["val_loss"]) < sum(losses) / 4 + 0.5


# ------------------------------------------------------------------------------------------------ kill and interrupt

KILLED = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("toy", sys.argv[1])
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
from fulgurite.callbacks.checkpoint_merging import CheckpointMerge
from fulgurite.callbacks.checkpointing import AtomicCheckpointIO
from fulgurite.callbacks.rng_state import RNGState

class Slow(toy.pl.Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.05)

root = Path(sys.argv[2])
toy.run(root, CheckpointMerge(1, num_checkpoints=4, curve="cosine", storage="disk"), callbacks=[RNGState(), Slow()],
        save_at=range(2, 100, 2), max_steps=100, plugins=[AtomicCheckpointIO()], val_check_interval=1000)
"""


@pytest.mark.parametrize("after", [6, 7])
def test_kill_9_at_any_moment_resumes_to_the_merge_of_an_unbroken_run(tmp_path, after):
    from fulgurite.callbacks.checkpoint_files import find_resumable

    settings = {"num_checkpoints": 4, "curve": "cosine", "storage": "disk"}
    keywords = {"max_steps": 20, "val_check_interval": 1000, "plugins": [AtomicCheckpointIO()]}
    whole = CheckpointMerge(1, **settings)
    module, _ = run(tmp_path / "whole", whole, callbacks=[RNGState()], **keywords)
    root = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(HERE / "toy.py"), str(root)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while not (list(root.glob(f"merge_snapshots/*/*-0*{after}-rank*"))) and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    path = find_resumable(root / "checkpoints")
    assert path is not None
    resumed = CheckpointMerge(1, **settings)
    again, _ = run(root, resumed, ckpt_path=path, callbacks=[RNGState()], **keywords)
    assert same(snapshot(module), snapshot(again))
    assert resumed.merge_info() == whole.merge_info()
    assert same(resumed.merged_state_dict(), whole.merged_state_dict())
    assert not list(root.glob("merge_snapshots/*/.*"))


@pytest.mark.parametrize("hit", range(1, 9))
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_at_any_point_of_an_exchange_costs_neither_live_nor_merged_weights(monkeypatch, hit, done):
    live = [torch.full((2,), float(i)) for i in (1, 2)]
    merged = [torch.full((2,), float(i)) for i in (10, 20)]
    backup, calls = Backup(), 0
    copy = torch.Tensor.copy_

    def interrupted(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if done or calls != hit:
            copy(self, *args, **kwargs)
        if calls == hit:
            raise KeyboardInterrupt
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)

    def exchange_and_restore():
        try:
            for a, b in zip(live, merged, strict=True):
                backup.exchange(a, b)
            assert [t[0].item() for t in live + merged] == [10, 20, 1, 2]
        finally:
            backup.restore()

    with pytest.raises(KeyboardInterrupt):
        exchange_and_restore()
    backup.restore()  # as on_exception does
    assert [t[0].item() for t in live] == [1, 2]
    assert [t[0].item() for t in merged] == [10, 20]
    assert not backup.entries
