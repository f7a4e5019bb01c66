"""Curves, grids and the map between decay coefficients and merge weights, against vectors and identities."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.callbacks.checkpoint_merging import (
    decay_coefficients,
    decay_to_merge_weights,
    merge_to_decay_weights,
    merge_weights,
)
from fulgurite.callbacks.checkpoint_merging.weights import curve_values

VECTORS = Path(__file__).parents[2] / "vectors" / "wsm"
CASES = json.loads((VECTORS / "merge_weights.json").read_text())
CURVES = {
    "linear": {},
    "cosine": {},
    "one_minus_sqrt": {},
    "polynomial": {"p": 2.5},
    "ema": {"r": 0.1},
    "inv_sqrt": {"a": 3.0},
    "exponential": {"r": 0.05},
}
GRIDS = ("virtual_end", "schedule", "interval_mean")

increasing_steps = st.lists(st.integers(1, 10_000), min_size=2, max_size=30, unique=True).map(sorted)
monotone = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=40).map(lambda w: sorted(w, reverse=True))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("curve", sorted({case["curve"] for case in CASES}))
def test_vectors(curve, grid):
    cases = [case for case in CASES if case["curve"] == curve and case["grid"] == grid]
    assert len(cases) >= 8
    for case in cases:
        positions = case["steps"] or case["num_checkpoints"]
        args = {"grid": grid, "min_ratio": case["min_ratio"], **case["params"]}
        merged = merge_weights(positions, curve, **args)
        np.testing.assert_allclose(merged.w, case["w"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(merged.c, case["c"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(decay_coefficients(positions, curve, **args), case["w"], rtol=0, atol=1e-12)


def test_worked_numbers():
    def rounded(*args, **kwargs):
        return merge_weights(*args, **kwargs).c.round(4).tolist()

    assert rounded(5, "linear") == [0.2] * 5
    assert rounded(5, "cosine") == [0.0955, 0.25, 0.3090, 0.25, 0.0955]
    assert rounded(5, "1-sqrt") == [0.4472, 0.1852, 0.1421, 0.1198, 0.1056]
    assert rounded(5, "linear", min_ratio=0.1) == [0.18, 0.18, 0.18, 0.18, 0.28]
    assert rounded(5, "1-sqrt", grid="schedule") == [0.0, 0.5, 0.2071, 0.1589, 0.1340]
    assert rounded(5, "linear", grid="interval_mean") == [0.125, 0.25, 0.25, 0.25, 0.125]
    assert rounded([100, 150, 250, 260, 300], "1-sqrt") == [0.4472, 0.3274, 0.0254, 0.0944, 0.1056]


def test_ema_reproduces_the_ten_weights_printed_in_the_paper():
    printed = [0.126, 0.033, 0.041, 0.052, 0.065, 0.082, 0.103, 0.130, 0.163, 0.206]
    assert merge_weights(10, "ema").c.round(3).tolist() == printed


def test_one_minus_sqrt_puts_the_largest_weight_on_the_oldest_and_ema_on_the_newest():
    assert np.argmax(merge_weights(10, "1-sqrt").c) == 0
    assert np.argmax(merge_weights(10, "ema").c) == 9
    printed = [0.316, 0.131, 0.101, 0.085, 0.075, 0.067, 0.062, 0.058, 0.054, 0.051]
    assert merge_weights(10, "minus-sqrt").c.round(3).tolist() == printed


@pytest.mark.parametrize("n", [2, 3, 7, 16, 100, 1000])
def test_linear_on_virtual_end_is_the_uniform_mean(n):
    np.testing.assert_allclose(merge_weights(n, "linear").c, np.full(n, 1 / n), rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2, 5, 10, 33])
def test_cosine_is_symmetric(n):
    c = merge_weights(n, "cosine").c
    np.testing.assert_allclose(c, c[::-1], rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2, 5, 17])
def test_ema_is_an_exponential_average_from_the_base(n):
    beta = 0.1 ** (1 / n)
    expected = np.array([beta ** (n - 1), *((1 - beta) * beta ** (n - 1 - j) for j in range(1, n))])
    np.testing.assert_allclose(merge_weights(n, "ema", r=0.1).c, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(merge_weights(n, "ema", beta=beta).c, expected, rtol=0, atol=1e-15)


def test_polynomial_two_weighs_by_recency_as_wma_nearly_does():
    n = 12
    j = np.arange(n)
    np.testing.assert_allclose(merge_weights(n, "polynomial", p=2).c, (2 * j + 1) / n**2, rtol=0, atol=1e-15)
    np.testing.assert_allclose(merge_weights(n, "wma").c, 2 * (j + 1) / (n * (n + 1)), rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["mean", "sma", "swa", "lawa"])
def test_uniform_presets_ignore_spacing(name):
    merged = merge_weights([3, 50, 51, 400], name)
    np.testing.assert_allclose(merged.c, [0.25] * 4, rtol=0, atol=1e-15)
    assert merged.curve == name


def test_polynomial_contains_linear_and_one_minus_sqrt():
    for p, name in ((1.0, "linear"), (0.5, "one_minus_sqrt")):
        for grid in GRIDS:
            steps = [5, 6, 9, 30, 31]
            a, b = merge_weights(steps, "polynomial", grid=grid, p=p), merge_weights(steps, name, grid=grid)
            np.testing.assert_allclose(a.c, b.c, rtol=0, atol=1e-15)


def test_inv_sqrt_default_is_the_noam_decay_of_the_run():
    steps = [400, 500, 600, 700]
    for grid, horizon in (("virtual_end", 400.0), ("schedule", 300.0), ("interval_mean", 300.0)):
        merged = merge_weights(steps, "inv_sqrt", grid=grid)
        assert merged.curve_args == {"a": horizon / 400.0}
    # peak * sqrt(s_0 / s) is what a Noam schedule gives at step s.
    w = decay_coefficients(steps, "inv_sqrt", grid="virtual_end")
    np.testing.assert_allclose(w, np.sqrt(400 / np.array([500, 600, 700])), rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=r"a = H / s_0 needs a positive first position, got 0: give a"):
        merge_weights(4, "inv_sqrt")


@pytest.mark.parametrize("curve", CURVES)
def test_interval_mean_in_closed_form_equals_quadrature(curve):
    args, steps = CURVES[curve], [10, 11, 14, 40, 41]
    by_quadrature = decay_coefficients(
        steps, lambda t: float(curve_values(curve, [t], **args)[0]), grid="interval_mean"
    )
    tolerance = 1e-6 if curve == "one_minus_sqrt" else 1e-10  # infinite slope at 0
    np.testing.assert_allclose(
        decay_coefficients(steps, curve, grid="interval_mean", **args), by_quadrature, rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("curve", CURVES)
def test_interval_mean_loses_no_digits_on_a_short_interval(curve):
    """One token in a window of 1e9: the mean over it is the curve's value there."""
    steps = [0, 500_000_000, 500_000_001, 1_000_000_000]
    w = decay_coefficients(steps, curve, grid="interval_mean", **CURVES[curve])
    value = curve_values(curve, [(500_000_000.5) / 1e9], **CURVES[curve])[0]
    assert w[1] == pytest.approx(value, abs=1e-14)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_callable_equals_the_named_curve(curve, grid):
    args = CURVES[curve]
    named = decay_coefficients([7, 9, 20, 33], curve, grid=grid, min_ratio=0.2, **args)
    called = decay_coefficients(
        [7, 9, 20, 33], lambda t: float(curve_values(curve, [t], **args)[0]), grid=grid, min_ratio=0.2
    )
    np.testing.assert_allclose(called, named, rtol=0, atol=1e-6 if curve == "one_minus_sqrt" else 1e-12)


def test_min_ratio_moves_mass_from_every_checkpoint_to_the_newest():
    for curve, args in CURVES.items():
        plain, floored = merge_weights(6, curve, **args).c, merge_weights(6, curve, min_ratio=0.3, **args).c
        np.testing.assert_allclose(floored, 0.7 * plain + 0.3 * np.eye(6)[-1], rtol=0, atol=1e-15)


def test_spacing_is_honoured_and_scale_free():
    irregular = [100, 150, 250, 260, 300]
    assert np.abs(merge_weights(irregular, "1-sqrt").c - merge_weights(5, "1-sqrt").c).max() > 0.1
    tokens = [2_000_000 * s + 12_345 for s in irregular]
    np.testing.assert_allclose(
        merge_weights(tokens, "cosine").c, merge_weights(irregular, "cosine").c, rtol=0, atol=1e-15
    )


# ---------------------------------------------------------------------------------------------------- identities


@given(w=monotone)
def test_round_trip_from_decay_coefficients(w):
    c = decay_to_merge_weights(w)
    assert len(c) == len(w) + 1
    assert (c >= 0).all()
    assert c.sum() == pytest.approx(1.0, abs=1e-14)
    np.testing.assert_allclose(merge_to_decay_weights(c), w, rtol=0, atol=1e-15)


@given(raw=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60).filter(lambda v: sum(v) > 1e-3))
def test_round_trip_from_merge_weights(raw):
    c = np.array(raw) / np.sum(raw)
    w = merge_to_decay_weights(c)
    assert ((w >= -1e-15) & (w <= 1 + 1e-15)).all()
    assert (np.diff(w) <= 1e-15).all()
    np.testing.assert_allclose(decay_to_merge_weights(w), c, rtol=0, atol=1e-15)


@given(w=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=10))
def test_merge_weights_are_nonnegative_exactly_when_w_is_monotone(w):
    if all(b <= a + 1e-12 for a, b in pairwise(w)):
        assert (decay_to_merge_weights(w) >= 0).all()
    else:
        with pytest.raises(ValueError, match="must not increase"):
            decay_to_merge_weights(w)
        assert (decay_to_merge_weights(w, allow_negative=True) < 0).any()


@settings(max_examples=60, deadline=None)
@given(steps=increasing_steps, curve=st.sampled_from(sorted(CURVES)), grid=st.sampled_from(GRIDS), m=st.floats(0, 1))
def test_every_curve_gives_a_probability_vector(steps, curve, grid, m):
    merged = merge_weights(steps, curve, grid=grid, min_ratio=m, **CURVES[curve])
    assert (merged.c >= 0).all()
    assert merged.c.sum() == pytest.approx(1.0, abs=1e-14)
    assert (np.diff(merged.w) <= 1e-12).all()
    np.testing.assert_allclose(decay_to_merge_weights(merged.w), merged.c, rtol=0, atol=2e-12)


def test_one_checkpoint_has_no_decay_coefficients():
    assert decay_to_merge_weights([]).tolist() == [1.0]
    assert merge_to_decay_weights([1.0]).tolist() == []
    copied = merge_weights([700], c=[1.0])
    assert (copied.c.tolist(), copied.w.tolist(), copied.curve) == ([1.0], [], "explicit")


def test_rounding_noise_is_clipped_and_renormalised():
    c = decay_to_merge_weights([0.5, 0.5 + 5e-13])
    assert c[1] == 0.0
    assert c.sum() == pytest.approx(1.0, abs=1e-15)
    assert merge_weights(3, c=[0.5, 1e-13, 0.5 - 1e-13]).c[1] == 0.0


def test_order_controls_permute_the_weights():
    forward = merge_weights(6, "1-sqrt").c
    np.testing.assert_array_equal(merge_weights(6, "1-sqrt", order="reversed").c, forward[::-1])
    shuffled = merge_weights(6, "1-sqrt", order="shuffled", seed=3)
    assert sorted(shuffled.c) == sorted(forward)
    assert shuffled.c.tolist() != forward.tolist()
    np.testing.assert_array_equal(shuffled.c, merge_weights(6, "1-sqrt", order="shuffled", seed=3).c)
    np.testing.assert_allclose(shuffled.w, merge_to_decay_weights(shuffled.c), rtol=0, atol=1e-15)


def test_explicit_values():
    by_w = merge_weights([1, 2, 3], w=[0.75, 0.25])
    by_list = merge_weights([1, 2, 3], [0.75, 0.25])
    by_c = merge_weights([1, 2, 3], c=[1, 2, 1], normalize=True)
    for merged in (by_w, by_list, by_c):
        np.testing.assert_allclose(merged.c, [0.25, 0.5, 0.25], rtol=0, atol=1e-15)
        assert merged.curve == "explicit"
    assert merge_weights(2, curve="explicit", c=[0.3, 0.7]).w.tolist() == [0.7]
    extrapolated = merge_weights(2, c=[-0.5, 1.5], allow_negative=True)
    assert (extrapolated.c.tolist(), extrapolated.w.tolist()) == ([-0.5, 1.5], [1.5])


def test_the_number_of_checkpoints_may_be_named_and_of_any_whole_type():
    expected = merge_weights(3, "1-sqrt").c
    numbers = (3.0, np.int64(3), np.float32(3), np.array(3), torch.tensor(3), torch.tensor(3.0).bfloat16())
    for number in numbers:
        np.testing.assert_array_equal(merge_weights(number, "1-sqrt").c, expected)
        np.testing.assert_array_equal(merge_weights(n=number, curve="1-sqrt").c, expected)
    np.testing.assert_array_equal(decay_coefficients(n=3, curve="1-sqrt"), decay_coefficients(3, "1-sqrt"))
    assert merge_weights(n=2, c=[0.25, 0.75]).positions.tolist() == [0, 1]


def test_torch_tensors_are_numbers():
    w = torch.nn.Parameter(torch.tensor([0.75, 0.25]))
    for values in (w, w.bfloat16(), list(w), [w[0], 0.25]):
        assert decay_to_merge_weights(values).tolist() == [0.25, 0.5, 0.25]
    positions = torch.tensor([100, 150, 260])
    np.testing.assert_array_equal(merge_weights(positions, "cosine").c, merge_weights([100, 150, 260], "cosine").c)


def test_to_dict_is_plain():
    described = merge_weights([100, 200], "polynomial", p=2, min_ratio=0.1).to_dict()
    assert json.loads(json.dumps(described)) == described
    assert described["positions"] == [100, 200]
    assert described["curve_args"] == {"p": 2.0}


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: merge_weights(1), r"at least 2 checkpoint\(s\), got 1: .* explicit c=\[1.0\]"),
        (lambda: decay_coefficients(0, "linear"), r"at least 2 checkpoint\(s\), got 0"),
        (lambda: merge_weights(3.5), r"n must be a whole number of checkpoints, got 3.5"),
        (lambda: merge_weights(n=True), r"n must be a whole number of checkpoints, got True"),
        (lambda: merge_weights(torch.tensor(True)), r"n must be a whole number of checkpoints, got tensor\(True\)"),
        (lambda: decay_coefficients(-2), r"n must be a whole number of checkpoints, got -2"),
        (lambda: merge_weights(n="3"), r"n must be a whole number of checkpoints, got '3'"),
        (lambda: merge_weights(float("nan")), r"n must be a whole number of checkpoints, got nan"),
        (lambda: merge_weights(curve="cosine"), r"give either positions or n \(the number of checkpoints\)"),
        (lambda: decay_coefficients([1, 2], n=2), r"positions or n .*, not both"),
        (lambda: merge_weights([3, 9, 7]), r"position 7 \(index 2\) follows 9"),
        (lambda: merge_weights([3, 9, 9]), r"position 9 \(index 2\) follows 9 \(duplicate\)"),
        (lambda: merge_weights([1, float("nan")]), r"positions holds a non-finite value at index 1"),
        (lambda: decay_to_merge_weights([1.2, 0.5]), r"\[0, 1\]: w_1 = 1.2"),
        (lambda: decay_to_merge_weights([0.5, -0.1]), r"\[0, 1\]: w_2 = -0.1"),
        (lambda: decay_to_merge_weights([0.5, 0.6]), r"w_2 = 0.6 > w_1 = 0.5"),
        (lambda: merge_weights(3, w=[0.5, 0.6]), r"w_2 = 0.6 > w_1 = 0.5"),
        (lambda: merge_weights(3, [0.9, 0.95]), r"w_2 = 0.95 > w_1 = 0.9"),
        (lambda: merge_weights(3, lambda t: t), r"must not increase"),
        (lambda: merge_weights(3, lambda t: 2 - t), r"must lie in \[0, 1\]"),
        (lambda: merge_to_decay_weights([0.5, 0.6]), r"must sum to 1, got 1.1: pass normalize=True"),
        (lambda: merge_weights(2, c=[0.5, 0.50001]), r"must sum to 1, got 1.00001"),
        (lambda: merge_weights(2, c=[-0.5, 1.5]), r"c_0 = -0.5 is negative: allow_negative=True"),
        (lambda: merge_weights(3, c=[0.5, 0.5]), r"2 merge weights c for 3 checkpoints"),
        (lambda: merge_weights(3, w=[0.5]), r"1 decay coefficients w for 3 checkpoints: give 2"),
        (lambda: merge_weights(2, c=[1, -1], normalize=True), r"cannot normalize"),
        (lambda: merge_to_decay_weights([]), r"c is empty"),
        (
            lambda: merge_weights(3, "sqrt"),
            r"unknown curve 'sqrt': known are linear, cosine, one_minus_sqrt, polynomial",
        ),
        (lambda: merge_weights(3, grid="end"), r"unknown grid 'end': use one of virtual_end, schedule, interval_mean"),
        (lambda: merge_weights(3, min_ratio=1.5), r"min_ratio must lie in \[0, 1\], got 1.5"),
        (lambda: merge_weights(3, "exponential"), r"'exponential' needs the parameter 'r'"),
        (lambda: merge_weights(3, "polynomial"), r"needs the parameter 'p'"),
        (lambda: merge_weights(3, "polynomial", p=-1), r"needs p > 0, got -1"),
        (lambda: merge_weights(3, "ema", r=1.0), r"r must lie strictly between 0 and 1, got 1.0"),
        (lambda: merge_weights(3, "ema", r=0.1, beta=0.9), r"r or beta"),
        (lambda: merge_weights(3, "linear", p=2), r"does not take p \(accepted: none\)"),
        (lambda: merge_weights(3, "wma", p=2), r"takes no parameters, got p"),
        (lambda: merge_weights(3, "explicit"), r"needs w \(decay coefficients\) or c"),
        (lambda: merge_weights(3, "cosine", c=[1, 0, 0]), r"either curve='cosine' or explicit"),
        (lambda: merge_weights(2, c=[0.5, 0.5], w=[0.5]), r"not both"),
        (lambda: merge_weights(2, c=[0.5, 0.5], min_ratio=0.1), r"min_ratio = 0.1 has no meaning with explicit c"),
        (lambda: merge_weights(3, order="backwards"), r"unknown order 'backwards'"),
    ],
)
def test_errors_name_the_culprit(call, message):
    with pytest.raises(ValueError, match=message):
        call()
