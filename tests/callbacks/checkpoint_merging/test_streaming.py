"""Streaming forms equal the off-line merge at every step, survive a restart, and never alias or block the live run."""

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fulgurite.callbacks.checkpoint_merging import StreamingMerge, merge_state_dicts, merge_weights, rings

VECTORS = Path(__file__).parents[2] / "vectors" / "wsm"
STORAGES = ("device", "cpu", "disk")


def trajectory(num=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight, step = torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)
    return [
        {"w": (weight + 0.1 * j * step + 0.01 * torch.randn(4, 3, generator=generator)).to(dtype), "n": torch.tensor(j)}
        for j in range(num)
    ]


def reload(state):
    """What a Lightning checkpoint does to a state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


ANYTIME = [
    ("linear", {}),
    ("1-sqrt", {}),
    ("polynomial", {"p": 2.0}),
    ("polynomial", {"p": 0.3}),
    ("ema", {"beta": 0.8}),
    ("mean", {}),
    ("wma", {}),
]


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0])
def test_anytime_vectors(p):
    data = np.load(VECTORS / "streaming.npz")
    merge = StreamingMerge("anytime", curve="polynomial", p=p)
    for row, expected in zip(data["checkpoints"], data[f"anytime_poly_p{p}"], strict=True):
        merge.update({"x": torch.tensor(row)})
        np.testing.assert_allclose(merge.result()["x"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("curve", ["linear", "cosine", "one_minus_sqrt"])
def test_sliding_vectors(curve, storage, tmp_path):
    data = np.load(VECTORS / "streaming.npz")
    merge = StreamingMerge("sliding", curve=curve, num_checkpoints=4, storage=storage, directory=tmp_path)
    for index, row in enumerate(data["checkpoints"]):
        merge.update({"x": torch.tensor(row)})
        if index >= 3:
            np.testing.assert_allclose(merge.result()["x"], data[f"sliding4_{curve}"][index - 3], rtol=0, atol=1e-12)
    merge.close()


@pytest.mark.parametrize(("curve", "args"), ANYTIME)
@pytest.mark.parametrize("min_ratio", [0.0, 0.2])
@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_anytime_equals_offline_at_every_k(curve, args, min_ratio, storage):
    states = trajectory(dtype=torch.float64)
    merge = StreamingMerge("anytime", curve=curve, min_ratio=min_ratio, storage=storage, **args)
    for k, state in enumerate(states):
        merge.update(state, 100 + 20 * k)
        offline = [1.0] if k == 0 else merge_weights(k + 1, curve, min_ratio=min_ratio, **args).c
        expected = merge_state_dicts(states[: k + 1], offline)
        merged = merge.result()
        torch.testing.assert_close(merged["w"], expected["w"], rtol=0, atol=1e-12)
        assert merged["n"] == k  # integers come from the newest
        np.testing.assert_allclose(merge.weights().c, offline, rtol=0, atol=1e-12)


@pytest.mark.parametrize("curve", ["linear", "cosine", "1-sqrt", "ema", "inv_sqrt"])
@pytest.mark.parametrize("grid", ["virtual_end", "schedule", "interval_mean"])
def test_fixed_horizon_equals_offline_at_its_end(curve, grid):
    states = trajectory(dtype=torch.float64)
    even = [100 + 20 * k for k in range(8)]
    for positions, given in ((even, None), ([100, 101, 150, 160, 170, 300, 310, 311], "all")):
        merge = StreamingMerge(
            "fixed", curve=curve, grid=grid, num_checkpoints=8, positions=positions if given else None
        )
        for state, position in zip(states, positions, strict=True):
            assert not merge.ready
            merge.update(state, position)
        assert merge.ready
        expected = merge_state_dicts(states, merge_weights(positions, curve, grid=grid).c)
        torch.testing.assert_close(merge.result()["w"], expected["w"], rtol=0, atol=1e-12)


def test_fixed_horizon_is_nothing_before_its_end():
    merge = StreamingMerge("fixed", num_checkpoints=3)
    merge.update({"w": torch.ones(2)}, 10)
    with pytest.raises(ValueError, match="only at its end: 1 of 3 checkpoints"):
        merge.result()
    merge.update({"w": torch.ones(2)}, 20)
    with pytest.raises(ValueError, match="expected position 30 next, got 45"):
        merge.update({"w": torch.ones(2)}, 45)
    merge.update({"w": torch.ones(2)}, 30)
    with pytest.raises(ValueError, match="has all its 3 checkpoints: 40 is one more"):
        merge.update({"w": torch.ones(2)}, 40)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("curve", ["cosine", "inv_sqrt"])
def test_sliding_window_equals_offline_with_uneven_spacing(curve, storage, tmp_path):
    states, steps = trajectory(), [3, 10, 11, 30, 31, 55, 70, 71]
    merge = StreamingMerge("sliding", curve=curve, num_checkpoints=3, storage=storage, directory=tmp_path)
    for k, (state, step) in enumerate(zip(states, steps, strict=True)):
        merge.update(state, step)
        low = max(0, k - 2)
        c = [1.0] if k == 0 else merge_weights(steps[low : k + 1], curve).c
        expected = merge_state_dicts(states[low : k + 1], c)
        assert torch.equal(merge.result()["w"], expected["w"])  # the same sum in the same order
        assert merge.result()["n"] == k
    merge.close()


@pytest.mark.parametrize("mode", ["anytime", "fixed", "sliding"])
@pytest.mark.parametrize("storage", STORAGES)
def test_restart_at_any_step_changes_nothing(mode, storage, tmp_path):
    states = trajectory()
    arguments = {"curve": "1-sqrt", "storage": storage, "directory": tmp_path}
    if mode != "anytime":
        arguments["num_checkpoints"] = {"fixed": 8, "sliding": 3}[mode]
    unbroken = StreamingMerge(mode, **arguments)
    for k, state in enumerate(states):
        unbroken.update(state, 10 + 5 * k)
    expected = unbroken.result()
    unbroken.close()
    for path in tmp_path.iterdir():
        path.unlink()
    merge = StreamingMerge(mode, **arguments)
    for k, state in enumerate(states):
        merge.update(state, 10 + 5 * k)
        saved = reload(merge.state_dict())
        merge.close()
        merge = StreamingMerge(mode, **arguments)
        merge.load_state_dict(saved)
        assert merge.positions[-1] == 10 + 5 * k
    assert torch.equal(merge.result()["w"], expected["w"])
    assert torch.equal(merge.result()["n"], expected["n"])
    merge.close()


@pytest.mark.parametrize("mode", ["anytime", "sliding"])
@pytest.mark.parametrize("storage", STORAGES)
def test_snapshots_do_not_alias_the_live_tensors(mode, storage, tmp_path):
    live = {"w": torch.ones(3, 2), "n": torch.tensor(1)}
    merge = StreamingMerge(
        mode, storage=storage, directory=tmp_path, num_checkpoints=None if mode == "anytime" else 2, min_ratio=0.5
    )
    merge.update(live, 1)
    live["w"].fill_(3.0)
    merge.update(live, 2)
    live["w"].fill_(-7.0)
    live["n"].fill_(-7)
    merged = merge.result()
    torch.testing.assert_close(merged["w"], torch.full((3, 2), 0.25 * 1 + 0.75 * 3))
    assert merged["n"] == 1
    merged["w"].zero_()  # nor does the result alias what is kept
    torch.testing.assert_close(merge.result()["w"], torch.full((3, 2), 2.5))
    merge.close()


@pytest.mark.parametrize("mode", ["anytime", "fixed", "sliding"])
@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_a_state_stays_what_it_was_while_the_run_goes_on(mode, storage):
    """A sliding window reuses the memory of the snapshot that leaves it, but not of one that a state holds."""
    states, size = trajectory(), {"anytime": None, "fixed": 8, "sliding": 3}[mode]
    merge = StreamingMerge(mode, storage=storage, num_checkpoints=size)
    for k in range(4):
        merge.update(states[k], k)
    held, saved = merge.state_dict(), reload(merge.state_dict())
    for k in range(4, 8):
        merge.update(states[k], k)
    expected = merge.result()["w"]
    for state in (held, saved):  # not written out, and written out at once
        again = StreamingMerge(mode, storage=storage, num_checkpoints=size)
        again.load_state_dict(state)
        for k in range(4, 8):
            again.update(states[k], k)
            if k == 4 and mode == "sliding":
                assert torch.equal(again.result()["w"], merge_state_dicts(states[2:5], [1 / 3] * 3)["w"])
        assert torch.equal(again.result()["w"], expected)


def test_result_into_given_tensors_keeps_ties_and_dtypes():
    tied = torch.ones(2, 2, dtype=torch.bfloat16)
    merge = StreamingMerge("sliding", num_checkpoints=2)
    merge.update({"a": tied, "b": tied, "c": torch.zeros(1)}, 1)
    merge.update({"a": 2 * tied, "b": 2 * tied, "c": torch.ones(1)}, 2)
    merged = merge.result()
    assert merged["a"] is merged["b"]
    assert merged["a"].dtype == torch.bfloat16
    assert merge.result(dtype=torch.float32)["a"].dtype == torch.float32
    out = torch.nn.Parameter(torch.zeros(2, 2))
    other = torch.zeros(2, 2)
    merge.result(out={"a": out, "b": other})
    assert torch.equal(out, torch.full((2, 2), 1.5))
    assert torch.equal(other, torch.full((2, 2), 1.5))


def test_bf16_parameters_are_accumulated_in_float32():
    """1 + 2^-8 k is lost when the running mean itself is kept in bf16."""
    states = [{"w": torch.full((4,), 1.0 + 2**-7 * k, dtype=torch.bfloat16)} for k in range(16)]
    merge = StreamingMerge("anytime")
    for k, state in enumerate(states):
        merge.update(state, k)
    exact = torch.stack([s["w"].double() for s in states]).mean(0)
    torch.testing.assert_close(merge.result(dtype=torch.float32)["w"].double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["anytime", "sliding"])
def test_identical_checkpoints_come_back_bit_for_bit(mode):
    state = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    merge = StreamingMerge(mode, curve="1-sqrt", num_checkpoints=None if mode == "anytime" else 20)
    for k in range(20):
        merge.update(state, k)
        assert torch.equal(merge.result()["w"], state["w"])


def test_anytime_keeps_one_copy_and_a_floor_keeps_two():
    state = {"w": torch.randn(10, 10), "n": torch.tensor(0)}

    def bytes_kept(**arguments):
        merge = StreamingMerge("anytime", **arguments)
        for k in range(5):
            merge.update(state, k)
        tensors = reload(merge.state_dict())["tensors"]
        return sum(t.nbytes for t in tensors.values())

    assert bytes_kept() == 400 + 8
    assert bytes_kept(min_ratio=0.1) == 800 + 8


# ---------------------------------------------------------------------------------------------------- disk


def slow_writer(monkeypatch, gate):
    write = rings.write_safetensors

    def waiting(path, tensors):
        assert gate.wait(10)
        write(path, tensors)

    monkeypatch.setattr(rings, "write_safetensors", waiting)


def test_training_does_not_wait_for_the_disk_and_memory_is_bounded(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    slow_writer(monkeypatch, gate)
    merge = StreamingMerge("sliding", num_checkpoints=4, storage="disk", directory=tmp_path)
    states = trajectory()
    for k in range(2):  # two snapshots wait for the disk, training does not
        merge.update(states[k], k)
    assert list(tmp_path.glob("snapshot*")) == []
    expected = merge_state_dicts(states[:2], [0.5, 0.5])["w"]
    assert torch.equal(merge.result()["w"], expected)  # readable before they are written
    third = threading.Thread(target=merge.update, args=(states[2], 2))
    third.start()
    time.sleep(0.1)
    assert third.is_alive()  # the third would be a third copy in memory: it waits, and says so
    assert "training now waits for the disk" in caplog.text
    gate.set()
    third.join(10)
    merge.flush()
    assert len(list(tmp_path.glob("snapshot*.safetensors"))) == 3
    merge.close()


def test_a_failed_write_is_reported_and_loses_no_snapshot(tmp_path, monkeypatch):
    merge = StreamingMerge("sliding", num_checkpoints=3, storage="disk", directory=tmp_path)
    states = trajectory()
    merge.update(states[0], 1)
    merge.flush()

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rings, "write_safetensors", full)
    merge.update(states[1], 2)
    with pytest.raises(OSError, match=rf"writing a snapshot to {tmp_path} failed: .*No space left"):
        merge.flush()
    assert torch.equal(merge.result()["w"], merge_state_dicts(states[:2], [0.5, 0.5])["w"])


def test_files_of_the_last_two_saved_states_outlive_the_window(tmp_path):
    merge = StreamingMerge("sliding", num_checkpoints=2, storage="disk", directory=tmp_path)
    states = trajectory()

    def files():
        merge.flush()
        return sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("snapshot*.safetensors"))

    for k in range(4):
        merge.update(states[k], k)
    assert files() == [2, 3]  # nothing saved yet: only the window
    first = reload(merge.state_dict())
    for k in range(4, 7):
        merge.update(states[k], k)
    assert files() == [2, 3, 5, 6]
    second = reload(merge.state_dict())
    merge.update(states[7], 7)
    assert files() == [2, 3, 5, 6, 7]
    for saved, window in ((second, [5, 6]), (first, [2, 3])):
        resumed = StreamingMerge("sliding", num_checkpoints=2, storage="disk", directory=tmp_path)
        resumed.load_state_dict(saved)
        assert resumed.positions == window
        assert torch.equal(resumed.result()["w"], merge_state_dicts([states[k] for k in window], [0.5, 0.5])["w"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"snapshot-{k:015d}-rank00000.safetensors" for k in (2, 3)
    ]  # what was newer than the restored step is dropped
    merge.close()


def test_a_missing_snapshot_is_named(tmp_path):
    merge = StreamingMerge("sliding", num_checkpoints=2, storage="disk", directory=tmp_path)
    for k, state in enumerate(trajectory(3)):
        merge.update(state, k)
    saved = reload(merge.state_dict())
    (tmp_path / "snapshot-000000000000001-rank00000.safetensors").unlink()
    resumed = StreamingMerge("sliding", num_checkpoints=2, storage="disk", directory=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"snapshot-000000000000001-rank00000.safetensors. Resume from a newer"):
        resumed.load_state_dict(saved)
    merge.close()


def test_state_with_disk_storage_holds_no_tensor(tmp_path):
    for mode, more in (("sliding", {"num_checkpoints": 2}), ("anytime", {})):
        merge = StreamingMerge(mode, storage="disk", directory=tmp_path / mode, **more)
        for k, state in enumerate(trajectory(3)):
            merge.update(state, k)
        buffer = io.BytesIO()
        torch.save(merge.state_dict(), buffer)
        assert buffer.tell() < 2500
        merge.close()


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "online"}, "unknown mode 'online': use one of anytime, fixed, sliding"),
        ({"mode": "sliding", "num_checkpoints": 4, "storage": "tape"}, "unknown storage 'tape'"),
        ({"mode": "sliding", "num_checkpoints": 4, "storage": "disk"}, "needs a directory"),
        ({"mode": "sliding"}, "needs num_checkpoints of 2 or more, got None"),
        ({"mode": "sliding", "num_checkpoints": 1}, "of 2 or more, got 1"),
        ({"mode": "sliding", "num_checkpoints": 3, "curve": "sqrt"}, "unknown curve 'sqrt'"),
        ({"mode": "sliding", "num_checkpoints": 3, "curve": [0.5, 0.6]}, "must not increase"),
        ({"curve": "cosine"}, "curve 'cosine' has no any-time form: use mode='sliding'"),
        ({"curve": "ema", "r": 0.1}, "any-time ema takes beta, got r"),
        ({"curve": "linear", "grid": "schedule"}, "needs grid='virtual_end', got 'schedule'"),
        ({"num_checkpoints": 4}, "it takes no num_checkpoints and no positions"),
        ({"curve": "linear", "dtype": torch.bfloat16}, "accumulate in float32 or float64, got torch.bfloat16"),
        ({"mode": "fixed", "num_checkpoints": 3, "positions": [1, 2]}, "num_checkpoints = 3 but 2 positions"),
    ],
)
def test_errors_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        StreamingMerge(**arguments)


def test_errors_while_streaming():
    merge = StreamingMerge("anytime", curve="1-sqrt")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        merge.result()
    state = {"w": torch.ones(2)}
    merge.update(state, 10)
    with pytest.raises(ValueError, match="must increase strictly: 10 follows 10"):
        merge.update(state, 10)
    merge.update(state, 20)
    with pytest.raises(ValueError, match=r"needs even spacing: 35 comes 15 after 20, the others 10 apart"):
        merge.update(state, 35)
    with pytest.raises(ValueError, match=r"w: shape \(3,\), was \(2,\)"):
        merge.update({"w": torch.ones(3)}, 30)
    with pytest.raises(ValueError, match=r"w: missing; v: new"):
        merge.update({"v": torch.ones(2)}, 30)
    with pytest.raises(TypeError, match="w is a list, not a tensor"):
        merge.update({"w": [1.0, 1.0]}, 30)
    merge.update(state, 30)  # a refused checkpoint leaves no trace
    assert merge.positions == [10, 20, 30]


def test_a_saved_accumulator_commits_to_its_curve():
    merge = StreamingMerge("anytime", curve="linear")
    merge.update({"w": torch.ones(2)}, 1)
    saved = reload(merge.state_dict())
    with pytest.raises(ValueError, match="commits to its curve"):
        StreamingMerge("anytime", curve="1-sqrt").load_state_dict(saved)
    with pytest.raises(ValueError, match="mode 'anytime', this one 'sliding'"):
        StreamingMerge("sliding", num_checkpoints=2).load_state_dict(saved)


@pytest.mark.parametrize("mode", ["anytime", "fixed", "sliding"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named_and_leaves_no_trace(mode, bad):
    size = {"anytime": None, "fixed": 3, "sliding": 3}[mode]
    states = trajectory(3)
    large = torch.tensor([3e38, -3e38])  # its norm overflows, it does not
    states = [{**state, "large": large, "half": large.new_ones(2).bfloat16()} for state in states]
    merge = StreamingMerge(mode, num_checkpoints=size)
    merge.update(states[0], 10)
    torn = {**states[1], "w": states[1]["w"].clone()}
    torn["w"][2, 1] = bad
    with pytest.raises(ValueError, match="position 20: w holds a number that is not finite"):
        merge.update(torn, 20)
    assert merge.positions == [10]
    for k in (1, 2):
        merge.update(states[k], 10 + 10 * k)
    expected = merge_state_dicts(states, [1 / 3] * 3)
    torch.testing.assert_close(merge.result()["w"], expected["w"], rtol=0, atol=1e-6)
    assert torch.equal(merge.result()["large"], large)


def test_what_cannot_be_averaged_is_refused_at_the_first_checkpoint():
    merge = StreamingMerge("anytime")
    with pytest.raises(ValueError, match=r"LoRA factors \(q.lora_A.weight\)"):
        merge.update({"q.lora_A.weight": torch.ones(2, 6), "q.lora_B.weight": torch.ones(4, 2)}, 1)
    with pytest.raises(TypeError, match=r"l.weight .*l.SCB.*quantised"):
        merge.update({"l.weight": torch.ones(4, dtype=torch.int8), "l.SCB": torch.ones(1)}, 1)
    assert merge.positions == []


@pytest.mark.parametrize(("mode", "what"), [("sliding", "a list of weights"), ("fixed", "mode='fixed'")])
def test_a_list_of_weights_needs_the_whole_window(mode, what):
    states = trajectory(4, torch.float64)
    merge = StreamingMerge(mode, curve=[0.5, 0.25], num_checkpoints=3)
    for k in range(2):
        merge.update(states[k], k)
        assert not merge.ready
        with pytest.raises(ValueError, match=rf"{what} is a merge only at its end: {k + 1} of 3 checkpoints have come"):
            merge.result()
    merge.update(states[2], 2)
    assert merge.ready
    torch.testing.assert_close(merge.result()["w"], merge_state_dicts(states[:3], [0.5, 0.25, 0.25])["w"])
