"""Merging state dicts in memory: numerics, what is averaged and what is copied, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.callbacks.checkpoint_merging import merge_state_dicts, merge_weights

from .checkpoints import state_dicts


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 20, 100])
def test_identical_checkpoints_come_back_bit_for_bit(dtype, n):
    """A plain float32 sum of c_j theta_j is 5 ulps off at n = 20 and 25 at n = 100."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator).to(dtype)
    x[:3] = torch.tensor([0.0, -0.0, 1e-40])
    c = merge_weights(n, "1-sqrt").c
    merged = merge_state_dicts([{"x": x}] * n, c)["x"]
    assert torch.equal(bits(merged), bits(x))
    if dtype == torch.float32 and n == 100:
        plain = sum(float(weight) * x for weight in c)
        assert not torch.equal(plain, x)


def test_one_checkpoint_is_copied_bit_for_bit():
    state = state_dicts(1)[0]
    merged = merge_state_dicts([state], [1.0])
    assert list(merged) == list(state)
    for name, tensor in state.items():
        assert torch.equal(merged[name], tensor)
        assert merged[name].dtype == tensor.dtype
        assert not tensor.numel() or merged[name].data_ptr() != tensor.data_ptr()


def test_inputs_are_not_touched():
    states = state_dicts()
    copies = [{name: t.clone() for name, t in state.items()} for state in states]
    merged = merge_state_dicts(states, merge_weights(4).c)
    for tensor in merged.values():
        if tensor.is_floating_point():
            tensor.fill_(99.0)
    for state, copy in zip(states, copies, strict=True):
        assert all(torch.equal(state[name], copy[name]) for name in state)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 12),
    seed=st.integers(0, 10_000),
    curve=st.sampled_from(["linear", "cosine", "1-sqrt", "ema"]),
    scale=st.floats(1e-3, 1e3),
)
def test_float32_merge_is_within_an_ulp_of_the_exact_one(n, seed, curve, scale):
    generator = torch.Generator().manual_seed(seed)
    base = scale * torch.randn(200, generator=generator)
    states = [{"x": base + 1e-2 * scale * torch.randn(200, generator=generator)} for _ in range(n)]
    c = merge_weights(n, curve).c
    exact = sum(float(weight) * s["x"].double() for weight, s in zip(c, states, strict=True))
    merged = merge_state_dicts(states, c)["x"]
    ulp = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()
    rounding_of_differences = n * 2**-24 * 0.1 * scale  # differences are below 0.1 scale
    assert ((merged.double() - exact).abs() <= ulp + rounding_of_differences).all()


def test_bf16_is_accumulated_in_float32_and_rounded_once():
    """Summing in bf16 loses the effect: each partial sum rounds at 2^-8 relative."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2000, generator=generator)
    states = [{"x": (base + 0.01 * torch.randn(2000, generator=generator)).bfloat16()} for _ in range(16)]
    exact = sum(s["x"].double() for s in states) / 16
    merged = merge_state_dicts(states, [1 / 16] * 16)["x"]
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, exact.float().bfloat16())
    naive = torch.zeros(2000, dtype=torch.bfloat16)
    for state in states:
        naive += state["x"] / 16
    assert (naive.double() - exact).abs().max() > 3 * (merged.double() - exact).abs().max()
    wide = merge_state_dicts(states, [1 / 16] * 16, output_dtype="float32")["x"]
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=1e-6)


def test_float64_parameters_are_summed_in_float64():
    states = [{"x": torch.tensor([1.0 + 1e-12 * j], dtype=torch.float64)} for j in range(5)]
    merged = merge_state_dicts(states, [0.2] * 5)["x"]
    torch.testing.assert_close(merged, torch.tensor([1.0 + 2e-12], dtype=torch.float64), rtol=0, atol=1e-15)


def test_base_checkpoint_has_its_weight_at_its_own_end():
    """Leaving theta_0 out, or mirroring the order, gives plausible numbers: 1-sqrt must lean on the oldest."""
    states = [{"x": torch.tensor([float(j)])} for j in range(5)]
    c = merge_weights(5, "1-sqrt").c
    merged = merge_state_dicts(states, c)["x"].item()
    assert merged == pytest.approx(0.4472 * 0 + 0.1852 * 1 + 0.1421 * 2 + 0.1198 * 3 + 0.1056 * 4, abs=2e-4)
    assert merge_state_dicts(states[::-1], c)["x"].item() == pytest.approx(4 - merged, abs=1e-6)


def test_integers_and_masks_are_taken_from_the_newest():
    merged = merge_state_dicts(state_dicts(), [0.25] * 4)
    assert merged["model.norm.num_batches_tracked"] == 21
    assert merged["model.norm.num_batches_tracked"].dtype == torch.int64
    assert merged["model.mask"].tolist() == [True, False]


def test_extra_state_is_copied_from_the_newest_even_where_it_is_float():
    states = [
        {"w": torch.full((2,), float(j)), "l._extra_state": torch.tensor([float(j)]), "o": {"a": j}} for j in range(3)
    ]
    merged = merge_state_dicts(states, [1 / 3] * 3)
    assert merged["l._extra_state"].tolist() == [2.0]
    assert merged["o"] == {"a": 2}
    torch.testing.assert_close(merged["w"], torch.ones(2))


def test_float_buffers_are_averaged_unless_told_otherwise():
    states = state_dicts()
    name, c = "model.norm.running_mean", [0.25] * 4
    mean = torch.stack([s[name] for s in states]).mean(0)
    torch.testing.assert_close(merge_state_dicts(states, c)[name], mean)
    newest = merge_state_dicts(states, c, buffers="newest", buffer_names=[name])
    assert torch.equal(newest[name], states[-1][name])
    excluded = merge_state_dicts(states, c, exclude=["*.running_*"])
    assert torch.equal(excluded[name], states[-1][name])
    assert torch.equal(excluded["model.embed.weight"], merge_state_dicts(states, c)["model.embed.weight"])


def test_tied_weights_stay_tied():
    merged = merge_state_dicts(state_dicts(), [0.25] * 4)
    assert merged["model.lm_head.weight"] is merged["model.embed.weight"]
    separate = merge_state_dicts(state_dicts(tied=False), [0.25] * 4)
    assert not torch.equal(separate["model.lm_head.weight"], separate["model.embed.weight"])


def test_a_checkpoint_without_the_tied_name_merges_with_one_that_has_it():
    """safetensors drops `lm_head.weight` of a tied model, a `.ckpt` keeps it."""
    states = state_dicts(2)
    without = {name: t for name, t in states[1].items() if "lm_head" not in name}
    assert "model.lm_head.weight" not in merge_state_dicts([states[0], without], [0.5, 0.5])
    assert "model.lm_head.weight" in merge_state_dicts([without, states[0]], [0.5, 0.5])


def test_permuting_names_changes_nothing():
    states = state_dicts()
    c = merge_weights(4, "cosine").c
    merged = merge_state_dicts(states, c)
    order = list(states[0])[::-1]
    permuted = merge_state_dicts([{name: s[name] for name in order} for s in states], c)
    assert all(torch.equal(merged[name], permuted[name]) for name in merged)


def test_functions_load_one_model_at_a_time():
    states = state_dicts()
    alive, peak = 0, 0

    class Counted(dict):
        def __init__(self, state):
            nonlocal alive, peak
            super().__init__(state)
            alive += 1
            peak = max(peak, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    merged = merge_state_dicts([lambda s=s: Counted(s) for s in states], [0.25] * 4)
    assert peak <= 2  # the base and the present one
    assert all(torch.equal(merged[n], t) for n, t in merge_state_dicts(states, [0.25] * 4).items())


def test_extrapolation_needs_permission():
    states = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([3.0])}]
    with pytest.raises(ValueError, match=r"c_0 = -0\.5 is negative: allow_negative=True permits it"):
        merge_state_dicts(states, [-0.5, 1.5])
    assert merge_state_dicts(states, [-0.5, 1.5], allow_negative=True)["x"].item() == 4.0


def test_lora_factors_are_refused_or_merged_as_products():
    generator = torch.Generator().manual_seed(0)
    states = [
        {
            "q.lora_A.weight": torch.randn(2, 6, generator=generator, dtype=torch.float64),
            "q.lora_B.weight": torch.randn(4, 2, generator=generator, dtype=torch.float64),
        }
        for _ in range(3)
    ]
    c = merge_weights(3, "1-sqrt").c
    with pytest.raises(ValueError, match=r"q.lora_A.weight.*averaging A and B separately is not averaging B @ A"):
        merge_state_dicts(states, c)
    merged = merge_state_dicts(states, c, lora="merge_delta")
    product = merged["q.lora_B.weight"] @ merged["q.lora_A.weight"]
    products = [s["q.lora_B.weight"] @ s["q.lora_A.weight"] for s in states]
    expected = sum(float(weight) * delta for weight, delta in zip(c, products, strict=True))
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-14)
    assert merged["q.lora_A.weight"].shape == (6, 6)
    with pytest.raises(ValueError, match="lora must be None or 'merge_delta', got 'average'"):
        merge_state_dicts(states, c, lora="average")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"l.weight": torch.zeros(4, dtype=torch.uint8), "l.weight.absmax": torch.ones(1)}, "l.weight .*absmax"),
        ({"l.weight": torch.zeros(4, dtype=torch.int8), "l.SCB": torch.ones(1)}, "l.weight .*l.SCB"),
        (
            {"l.weight": torch.zeros(4, dtype=torch.uint8), "l.weight.quant_state.bitsandbytes__nf4": torch.ones(1)},
            "l.weight .*quant_state",
        ),
        ({"weight": torch.zeros(4, dtype=torch.uint8), "quant_map": torch.ones(1)}, "weight .*quant_map"),
        ({"l.qweight": torch.zeros(4, dtype=torch.int32), "l.qzeros": torch.zeros(1, dtype=torch.int32)}, "l.qweight"),
        ({"l.weight": torch.zeros(4).to(torch.float8_e4m3fn)}, "l.weight is torch.float8_e4m3fn"),
    ],
)
def test_quantised_parameters_are_a_type_error(state, message):
    with pytest.raises(TypeError, match=rf"{message}.*quantised parameters cannot be averaged"):
        merge_state_dicts([state, state], [0.5, 0.5])


def test_mismatches_list_the_first_five():
    states = state_dicts(2, tied=False)
    changed = dict(states[1])
    changed["model.embed.weight"] = torch.zeros(6, 4)
    changed["model.layer.weight"] = changed["model.layer.weight"].float()
    del changed["model.scalar"]
    changed["model.new"] = torch.zeros(1)
    with pytest.raises(ValueError) as error:
        merge_state_dicts([states[0], changed], [0.5, 0.5])
    text = str(error.value)
    for part in (
        "model.scalar is missing from checkpoint 1",
        "model.new is in checkpoint 1 but not in checkpoint 0",
        "model.embed.weight has shape (6, 4) in checkpoint 1, (6, 5) in checkpoint 0",
        "model.layer.weight has dtype torch.float32 in checkpoint 1, torch.bfloat16 in checkpoint 0",
    ):
        assert part in text
    many = {f"p{i}": torch.zeros(1) for i in range(9)}
    with pytest.raises(ValueError, match=r"p4 is missing from checkpoint 1 \(and 4 more\)"):
        merge_state_dicts([many, {}], [0.5, 0.5])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_number_that_is_not_finite_is_named(bad, which):
    states = state_dicts(3)
    states[which]["model.norm.running_mean"][2] = bad
    with pytest.raises(ValueError, match=rf"checkpoint {which}: model.norm.running_mean holds a number that is not"):
        merge_state_dicts(states, [0.0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"c": [0.5, 0.5]}, "2 merge weights c for 4 checkpoints"),
        ({"c": [0.3] * 4}, "must sum to 1, got 1.2: pass normalize=True"),
        ({"accumulate_dtype": "bfloat16"}, "float32 or float64, got torch.bfloat16"),
        ({"output_dtype": "fp32"}, "'fp32' is no dtype"),
        ({"buffers": "newest"}, "buffers='newest' needs buffer_names"),
        ({"buffers": "mean"}, "buffers must be 'average' or 'newest', got 'mean'"),
        ({"buffers": "newest", "buffer_names": ["nope"]}, "buffer_names that no checkpoint holds: nope"),
        ({"exclude": ["*.bias"]}, r"exclude pattern '\*.bias' matches no tensor"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        merge_state_dicts(state_dicts(), **{"c": [0.25] * 4, **arguments})


def test_overflow_of_the_output_dtype_is_an_error():
    states = [{"x": torch.tensor([1e6])}, {"x": torch.tensor([2e6])}]
    with pytest.raises(ValueError, match="output dtype: x holds a number that is not finite"):
        merge_state_dicts(states, [0.5, 0.5], output_dtype=torch.float16)


def test_a_sum_that_overflows_is_an_error():
    """Both are finite and so is their mean, but not their difference in float32."""
    states = [{"x": torch.tensor([3e38])}, {"x": torch.tensor([-3e38])}]
    with pytest.raises(ValueError, match="overflows its accumulation or output dtype: x holds"):
        merge_state_dicts(states, [0.5, 0.5])
    assert merge_state_dicts(states, [0.5, 0.5], accumulate_dtype=torch.float64)["x"].item() == 0.0


def test_copied_floats_keep_their_dtype():
    states = [{"x": torch.full((2,), float(j)), "bias": torch.tensor([j + 1e-3])} for j in range(2)]
    merged = merge_state_dicts(states, [0.5, 0.5], exclude=["bias"], output_dtype="bfloat16")
    assert merged["x"].dtype == torch.bfloat16
    assert torch.equal(merged["bias"], states[1]["bias"])
    named = merge_state_dicts(states, [0.5, 0.5], buffers="newest", buffer_names=["bias"], output_dtype=torch.float64)
    assert torch.equal(named["bias"], states[1]["bias"])


def _pair(value, other=None):
    a = torch.tensor([float(value)])
    return {"a": a, "b": a.detach() if other is None else torch.tensor([float(other)])}


@pytest.mark.parametrize(
    ("states", "a", "b"),
    [
        ([_pair(0), _pair(4, 4), _pair(8, 8)], 4.0, 4.0),
        ([_pair(0), _pair(3), _pair(9, 6)], 4.0, 3.0),
        ([_pair(0, 3), _pair(3), _pair(9, 6)], 4.0, 4.0),
        ([_pair(0, 1), _pair(3, 4), _pair(9)], 4.0, None),  # tied in the newest
        ([_pair(0), _pair(3, 5), _pair(9)], 4.0, None),
        ([_pair(0), dict(reversed(_pair(3).items())), dict(reversed(_pair(9).items()))], 4.0, None),
        ([{"a": torch.zeros(1)}, _pair(3), _pair(9)], 4.0, None),
    ],
)
def test_a_name_is_an_alias_only_where_it_is_one_everywhere(states, a, b):
    before = [{name: t.clone() for name, t in state.items()} for state in states]
    merged = merge_state_dicts(states, [1 / 3] * 3)
    assert merged["a"].item() == pytest.approx(a, abs=1e-6)
    if b is None:
        assert merged["b"] is merged["a"]
    else:
        assert merged["b"] is not merged["a"]
        assert merged["b"].item() == pytest.approx(b, abs=1e-6)
    assert all(torch.equal(s[n], t) for s, old in zip(states, before, strict=True) for n, t in old.items())


def test_a_name_that_is_really_missing_is_named():
    lacking = {"a": torch.zeros(1)}
    with pytest.raises(ValueError, match="b is missing from checkpoint 1"):
        merge_state_dicts([_pair(0), lacking, _pair(1, 2)], [1 / 3] * 3)
    with pytest.raises(ValueError, match="b is in checkpoint 1 but not in checkpoint 0"):
        merge_state_dicts([lacking, _pair(1, 2)], [0.5, 0.5])
    with pytest.raises(ValueError, match="b is tied to a in checkpoint 0 but not in checkpoint 1: exclude both"):
        merge_state_dicts([_pair(0), _pair(1, 2)], [0.5, 0.5], exclude=["a"])
