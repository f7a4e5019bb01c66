"""The theorem on runs that really happened: sum_j c_j theta_j = theta_0 - sum_i w_i G_i, for any optimizer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fulgurite.callbacks.checkpoint_merging import merge_state_dicts, merge_weights

VECTORS = Path(__file__).parents[2] / "vectors" / "wsm"
CASES = json.loads((VECTORS / "trajectories_cases.json").read_text())


def record(optimizer_class, num_steps=40, clip=None, lr=None, **settings):
    """Parameters after 0, 1, ... steps (T + 1, d) of a noisy quadratic, in float64."""
    torch.manual_seed(0)
    theta = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
    hessian = torch.diag(torch.linspace(0.1, 2.0, 6, dtype=torch.float64))
    optimizer = optimizer_class([theta], lr=lr or 0.05, **settings)
    trajectory = [theta.detach().clone()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        (0.5 * theta @ hessian @ theta + theta @ torch.randn(6, dtype=torch.float64)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([theta], clip)
        optimizer.step()
        trajectory.append(theta.detach().clone())
    return torch.stack(trajectory)


def replay(trajectory, steps, w):
    """theta_0 - sum_i w_i (sum of the updates of interval i), update by update."""
    updates = trajectory[:-1] - trajectory[1:]
    merged = trajectory[steps[0]].clone()
    for factor, start, stop in zip(w, steps[:-1], steps[1:], strict=True):
        for t in range(start, stop):
            merged -= float(factor) * updates[t]
    return merged


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd momentum, weight decay, clipping": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "adamw, clipping": (torch.optim.AdamW, {"weight_decay": 0.1, "clip": 0.5}),
}


@pytest.mark.parametrize("curve", ["linear", "cosine", "1-sqrt", "ema"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_merge_replays_the_scaled_updates(optimizer, curve):
    optimizer_class, settings = OPTIMIZERS[optimizer]
    trajectory = record(optimizer_class, **settings)
    for steps in ([10, 20, 30, 40], [5, 6, 20, 33, 40]):
        for grid in ("virtual_end", "schedule", "interval_mean"):
            weights = merge_weights(steps, curve, grid=grid, min_ratio=0.05)
            merged = merge_state_dicts([{"theta": trajectory[s]} for s in steps], weights.c)["theta"]
            torch.testing.assert_close(merged, replay(trajectory, steps, weights.w), rtol=0, atol=1e-12)
            assert (merged - trajectory[steps[-1]]).abs().max() > 1e-3  # a merge is not the last checkpoint


@pytest.mark.parametrize("curve", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("grid", ["virtual_end", "schedule", "interval_mean"])
def test_constant_gradient_sgd_equals_a_run_with_the_staircase_rate(curve, grid):
    """The only case in which the decayed run sees the same gradients: then merging *is* decaying."""
    gradient = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    steps, lr = [8, 12, 16, 20, 24], 0.1
    weights = merge_weights(steps, curve, grid=grid)

    def train(rates, start):
        theta = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([theta], lr=lr)
        states = {}
        for t, rate in enumerate(rates):
            states[t] = theta.detach().clone()
            optimizer.param_groups[0]["lr"] = rate
            theta.grad = gradient.clone()
            optimizer.step()
        states[len(rates)] = theta.detach().clone()
        return states

    live = train([lr] * 24, torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64))
    merged = merge_state_dicts([{"theta": live[s]} for s in steps], weights.c)["theta"]
    staircase = [lr * float(weights.w[i]) for i in range(4) for _ in range(4)]
    decayed = train(staircase, live[8])[16]
    torch.testing.assert_close(merged, decayed, rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['source']}-{case['curve']}-{case['grid']}")
def test_vectors(case):
    data = np.load(VECTORS / "trajectories.npz")
    params, steps = torch.tensor(data[f"{case['source']}_params"]), case["steps"]
    weights = merge_weights(steps, case["curve"], grid=case["grid"], min_ratio=case["min_ratio"], **case["params"])
    np.testing.assert_allclose(weights.w, data[f"case{case['case']}_w"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights.c, data[f"case{case['case']}_c"], rtol=0, atol=1e-12)
    merged = merge_state_dicts([{"theta": params[s]} for s in steps], weights.c)["theta"]
    np.testing.assert_allclose(merged, data[f"case{case['case']}_merged"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(replay(params, steps, weights.w), data[f"case{case['case']}_merged"], rtol=0, atol=1e-12)


def test_recorded_updates_are_those_of_the_trajectory():
    data = np.load(VECTORS / "trajectories.npz")
    updates = data["sgd_params"][:-1] - data["sgd_params"][1:]
    np.testing.assert_allclose(updates, data["sgd_updates"], rtol=0, atol=1e-12)


def test_halving_the_interval_of_an_affine_trajectory_changes_nothing_on_interval_mean():
    a, b = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def merged(num_intervals, curve, grid):
        steps = [float(s) for s in np.linspace(100, 180, num_intervals + 1)]
        states = [{"x": a * s + b} for s in steps]
        return merge_state_dicts(states, merge_weights(steps, curve, grid=grid).c)["x"]

    for curve in ("linear", "cosine", "1-sqrt", "ema"):
        coarse = merged(4, curve, "interval_mean")
        torch.testing.assert_close(merged(8, curve, "interval_mean"), coarse, rtol=0, atol=1e-11)
        # The other grids only converge to it; the mean and cosine on virtual_end are there by symmetry.
        for grid in ("schedule",) if curve in ("linear", "cosine") else ("virtual_end", "schedule"):
            errors = [(merged(n, curve, grid) - coarse).abs().max() for n in (4, 64, 1024)]
            assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_merge_is_affine():
    states = [{"x": torch.randn(7, dtype=torch.float64)} for _ in range(5)]
    c = merge_weights(5, "cosine").c
    plain = merge_state_dicts(states, c)["x"]
    scaled = merge_state_dicts([{"x": 3.0 * s["x"] + 2.0} for s in states], c)["x"]
    torch.testing.assert_close(scaled, 3.0 * plain + 2.0, rtol=0, atol=1e-13)


def test_merged_model_of_a_convex_loss_is_no_worse_than_the_mean_of_the_losses():
    trajectory = record(torch.optim.SGD, lr=0.3)
    hessian = torch.linspace(0.1, 2.0, 6, dtype=torch.float64)

    def loss(theta):
        return 0.5 * (hessian * theta * theta).sum() + torch.logsumexp(theta, 0)

    steps = list(range(10, 41, 5))
    for curve in ("linear", "cosine", "1-sqrt", "ema"):
        c = merge_weights(steps, curve).c
        merged = merge_state_dicts([{"t": trajectory[s]} for s in steps], c)["t"]
        mean = sum(weight * loss(trajectory[s]) for weight, s in zip(c, steps, strict=True))
        assert loss(merged) < mean - 1e-6
