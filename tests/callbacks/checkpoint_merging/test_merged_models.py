"""Balance of experts and statistics of batch norms."""

import numpy as np
import pytest
import torch

from fulgurite.callbacks.checkpoint_merging import load_balance, merge_state_dicts, recompute_buffers


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: torch.tensor(x).bfloat16()])
def test_load_balance_numbers(kind):
    """mu = 4: (10 - 4) / 4 and (4 - 1) / 4; mu = 2: perfect."""
    assert load_balance(kind([1, 2, 3, 10])) == {"max_violation": 1.5, "min_violation": 0.75}
    assert load_balance(kind([[1, 2, 3, 10], [2, 2, 2, 2]])) == {"max_violation": 0.75, "min_violation": 0.375}
    assert load_balance(kind([[0, 0, 0, 8]])) == {"max_violation": 3.0, "min_violation": 1.0}


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([], r"\(layers, experts\) or \(experts,\), got shape \(1, 0\)"),
        (3.0, r"got shape \(\)"),
        ([[1, 1], [0, 0]], "layer 1 received no tokens"),
        ([1.0, -1.0], "finite and not negative"),
        ([1.0, float("nan")], "finite and not negative"),
    ],
)
def test_load_balance_errors(loads, message):
    with pytest.raises(ValueError, match=message):
        load_balance(loads)


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))


@pytest.mark.parametrize("labelled", [False, True])
def test_recomputed_statistics_are_those_of_the_merged_weights(labelled):
    torch.manual_seed(0)
    models = [net(), net()]
    for scale, model in enumerate(models, start=1):
        model(scale * torch.randn(64, 3))  # moves its running statistics
    merged = net()
    merged.load_state_dict(merge_state_dicts([model.state_dict() for model in models], [0.5, 0.5]))
    averaged = merged[1].running_var.clone()
    batches = torch.randn(4, 16, 3)
    merged.eval()
    merged[2].train()
    recompute_buffers(merged, [(x, 0) for x in batches] if labelled else list(batches))
    with torch.no_grad():
        hidden = [merged[0](x) for x in batches]
    torch.testing.assert_close(merged[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(merged[1].running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    assert not torch.allclose(merged[1].running_var, averaged)
    assert [module.training for module in merged.modules()] == [False, False, False, True]
    assert merged[1].momentum == 0.1


def test_recompute_errors_leave_the_statistics_alone():
    model = net()
    model[1].running_mean.fill_(7.0)
    with pytest.raises(ValueError, match="the loader gave no batch"):
        recompute_buffers(model, [])
    assert model[1].running_mean.tolist() == [7.0] * 4
    with pytest.raises(ValueError, match="Linear has no batch norm with running statistics"):
        recompute_buffers(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
