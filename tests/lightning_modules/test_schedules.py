"""Schedules against written-out numbers, transformers' own curves, and their error messages."""

import math
from itertools import pairwise

import pytest
import torch
import transformers

from fulgurite.lightning_modules.schedules import SCHEDULES, check_schedule, get_schedule


def factors(name, num_steps, **arguments):
    """Learning rates of the first `num_steps` optimizer steps with a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_schedule(name, optimizer, **arguments)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_warmup_stable_is_linear_from_zero_then_the_peak_for_ever():
    assert factors("warmup_stable", 8, warmup_steps=4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_constant_is_the_peak_from_the_first_step():
    assert factors("constant", 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay_type", ["1-sqrt", "linear", "cosine"])
def test_wsd_equals_transformers_where_they_share_the_curve(decay_type):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=5, num_decay_steps=10, num_training_steps=30, decay_type=decay_type
    ).lr_lambdas[0]
    ours = factors("wsd", 33, warmup_steps=5, decay_steps=10, total_steps=30, decay_type=decay_type)
    assert ours == pytest.approx([reference(step) for step in range(33)], abs=1e-12)


@pytest.mark.parametrize("decay_type", ["1-sqrt", "linear", "cosine", "exponential"])
def test_wsd_starts_its_decay_at_the_peak_and_ends_at_the_minimum_ratio(decay_type):
    rates = factors("wsd", 42, warmup_steps=10, decay_steps=20, total_steps=40, decay_type=decay_type, min_lr_ratio=0.1)
    assert rates[:11] == pytest.approx([t / 10 for t in range(11)])  # from 0 whatever the minimum ratio
    assert rates[10:21] == [1.0] * 11
    assert all(later < earlier for earlier, later in pairwise(rates[20:41]))
    assert rates[40:] == pytest.approx([0.1, 0.1])


def test_one_minus_sqrt_numbers():
    rates = factors("wsd", 12, warmup_steps=2, decay_steps=4, total_steps=8, decay_type="1-sqrt")
    assert rates[4:9] == pytest.approx([1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0])


def test_whole_run_decays():
    assert factors("linear", 7, warmup_steps=1, total_steps=5, min_lr_ratio=0.2) == pytest.approx(
        [0.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    assert factors("1-sqrt", 6, warmup_steps=0, total_steps=4) == pytest.approx(
        [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0, 0.0]
    )
    cosine = factors("cosine", 15, warmup_steps=2, total_steps=12, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 10)) for t in range(11)]
    assert cosine == pytest.approx([0.0, 0.5, *expected, 0.1, 0.1])


def test_inverse_sqrt_numbers():
    rates = factors("inverse_sqrt", 65, warmup_steps=4, min_lr_ratio=0.3)
    assert rates[2:5] == [0.5, 0.75, 1.0]
    assert rates[16] == pytest.approx(0.5)  # sqrt(4 / 16)
    assert rates[64] == pytest.approx(0.3)  # sqrt(4 / 64) = 0.25 is below the minimum


@pytest.mark.parametrize("name", SCHEDULES)
def test_resuming_a_schedule_at_any_step_goes_on_with_the_same_rates(name):
    arguments = {"warmup_steps": 3, "total_steps": 12, "decay_steps": 5, "min_lr_ratio": 0.1}
    whole = factors(name, 12, **arguments)
    for split in (2, 8):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_schedule(name, optimizer, **arguments)
        for _ in range(split):
            optimizer.step()
            schedule.step()
        saved = optimizer.state_dict(), schedule.state_dict()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_schedule(name, optimizer, **arguments)
        optimizer.load_state_dict(saved[0])
        schedule.load_state_dict(saved[1])
        rest = []
        for _ in range(split, 12):
            rest.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rest == whole[split:]


def test_every_parameter_group_keeps_its_own_peak():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in (1.0, 0.5)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = get_schedule("wsd", optimizer, warmup_steps=0, decay_steps=2, total_steps=2, decay_type="linear")
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosin", {}, r"schedule='cosin' is unknown; use one of .*\(nearest: cosine\)"),
        ("cosine", {"warmup_steps": -1}, "warmup_steps=-1 is negative"),
        ("cosine", {"min_lr_ratio": 1.5}, r"min_lr_ratio=1.5 must lie in \[0, 1\]"),
        ("wsd", {}, "schedule='wsd' needs decay_steps >= 1"),
        ("wsd", {"decay_steps": 5, "decay_type": "sqrt"}, "decay_type='sqrt' is unknown"),
        ("wsd", {"decay_steps": 5, "decay_type": "exponential"}, "give min_lr_ratio > 0"),
        (
            "wsd",
            {"decay_steps": 80, "warmup_steps": 30, "total_steps": 100},
            r"warmup_steps=30 \+ decay_steps=80 = 110 exceeds the run's 100 optimizer steps; .*trainer.max_steps",
        ),
        ("warmup_stable", {"warmup_steps": 100, "total_steps": 100}, "leaves no step at the peak"),
        ("linear", {"total_steps": -1}, "set trainer.max_steps or trainer.max_epochs"),
    ],
)
def test_errors_name_the_value_and_the_mend(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(name, **arguments)


def test_a_missing_length_is_an_error_only_where_it_matters():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="depends on the length of the run"):
        get_schedule("cosine", optimizer)
    assert get_schedule("warmup_stable", optimizer, warmup_steps=2).get_last_lr() == [0.0]
