"""Learning-rate schedules, one function each, all counted in optimizer steps.

Every schedule returns a `LambdaLR` whose factor multiplies each group's learning rate, and starts with the same linear
warmup `factor(t) = t / warmup_steps` (t = 0 at the first step, as transformers does), so that two runs which differ
only in their schedule see the same learning rates until their first decay step. transformers' own functions are used
where the curve exists; what they lack (a minimum ratio for `linear` and `inverse_sqrt`, `1-sqrt` over the whole
run, an exponential decay) is added here.

Source of warmup-stable and its decays: arXiv 2507.17634 (WSM), 2404.06395 (WSD), 2405.18392 (1-sqrt).
"""

import difflib
from collections.abc import Callable

import transformers
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

DECAY_TYPES = ("1-sqrt", "linear", "cosine", "exponential")


def _with_warmup(factor: Callable[[int], float], warmup_steps: int) -> Callable[[int], float]:
    def with_warmup(step: int) -> float:
        return step / warmup_steps if step < warmup_steps else factor(step)

    return with_warmup


def constant(optimizer: Optimizer) -> LambdaLR:
    """The peak learning rate from the first step to the last."""
    return transformers.get_constant_schedule(optimizer)


def warmup_stable(optimizer: Optimizer, *, warmup_steps: int) -> LambdaLR:
    """Linear warmup, then the peak for ever: the schedule of WSM. Needs no total length."""
    return transformers.get_constant_schedule_with_warmup(optimizer, warmup_steps)


def warmup_stable_decay(
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    decay_steps: int,
    total_steps: int,
    decay_type: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """WSD: linear warmup, the peak, then a decay to `min_lr_ratio` over the last `decay_steps` of `total_steps`."""
    stable_end = total_steps - decay_steps
    if decay_type != "exponential":
        # Its own warmup would start at min_lr_ratio instead of 0, so it is asked for the part after the warmup only.
        factor = transformers.get_wsd_schedule(
            optimizer,
            num_warmup_steps=0,
            num_stable_steps=stable_end,
            num_decay_steps=decay_steps,
            decay_type=decay_type,
            min_lr_ratio=min_lr_ratio,
        ).lr_lambdas[0]
    else:

        def factor(step: int) -> float:
            return min_lr_ratio ** min(max((step - stable_end) / decay_steps, 0.0), 1.0)

    return LambdaLR(optimizer, _with_warmup(factor, warmup_steps))


def cosine(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> LambdaLR:
    """Linear warmup, then half a cosine down to `min_lr_ratio` at `total_steps`, where it stays."""
    factor = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, 0, total_steps - warmup_steps, min_lr_rate=min_lr_ratio
    ).lr_lambdas[0]
    # Beyond the end transformers' curve rises again: clamp, for a run that is extended without a new schedule.
    return LambdaLR(
        optimizer,
        _with_warmup(lambda step: factor(min(step, total_steps) - warmup_steps), warmup_steps),
    )


def linear(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> LambdaLR:
    """Linear warmup, then a line down to `min_lr_ratio` at `total_steps`, where it stays."""
    return warmup_stable_decay(
        optimizer,
        warmup_steps=warmup_steps,
        decay_steps=total_steps - warmup_steps,
        total_steps=total_steps,
        decay_type="linear",
        min_lr_ratio=min_lr_ratio,
    )


def one_minus_sqrt(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> LambdaLR:
    """Linear warmup, then 1 - sqrt(progress) down to `min_lr_ratio` at `total_steps`, where it stays."""
    return warmup_stable_decay(
        optimizer,
        warmup_steps=warmup_steps,
        decay_steps=total_steps - warmup_steps,
        total_steps=total_steps,
        decay_type="1-sqrt",
        min_lr_ratio=min_lr_ratio,
    )


def inverse_sqrt(optimizer: Optimizer, *, warmup_steps: int, min_lr_ratio: float = 0.0) -> LambdaLR:
    """Linear warmup, then sqrt(warmup_steps / step), never below `min_lr_ratio`. Needs no total length."""
    factor = transformers.get_inverse_sqrt_schedule(optimizer, warmup_steps).lr_lambdas[0]
    return LambdaLR(optimizer, _with_warmup(lambda step: max(factor(step), min_lr_ratio), warmup_steps))


_NEEDS = {  # schedule -> the arguments it takes
    "constant": (constant, ()),
    "warmup_stable": (warmup_stable, ("warmup_steps",)),
    "wsd": (warmup_stable_decay, ("warmup_steps", "decay_steps", "total_steps", "decay_type", "min_lr_ratio")),
    "cosine": (cosine, ("warmup_steps", "total_steps", "min_lr_ratio")),
    "linear": (linear, ("warmup_steps", "total_steps", "min_lr_ratio")),
    "1-sqrt": (one_minus_sqrt, ("warmup_steps", "total_steps", "min_lr_ratio")),
    "inverse_sqrt": (inverse_sqrt, ("warmup_steps", "min_lr_ratio")),
}
SCHEDULES = tuple(_NEEDS)


def needs_total_steps(name: str) -> bool:
    """Whether schedule `name` depends on the length of the run."""
    return "total_steps" in _NEEDS[name][1]


def check_schedule(
    name: str,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    decay_type: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
    total_steps: int | None = None,
) -> None:
    """Checks a schedule's arguments; `total_steps` None means "not known yet".

    Raises:
        ValueError: names the argument, its value and the mend.
    """
    if name not in _NEEDS:
        near = difflib.get_close_matches(name, SCHEDULES, n=3)
        raise ValueError(
            f"schedule={name!r} is unknown; use one of {', '.join(SCHEDULES)}"
            + (f" (nearest: {', '.join(near)})" if near else "")
        )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} is negative; use 0 for no warmup")
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"min_lr_ratio={min_lr_ratio} must lie in [0, 1]: it is a fraction of the peak learning rate")
    if name == "wsd":
        if decay_type not in DECAY_TYPES:
            raise ValueError(f"decay_type={decay_type!r} is unknown; use one of {', '.join(DECAY_TYPES)}")
        if decay_type == "exponential" and min_lr_ratio == 0.0:
            raise ValueError("decay_type='exponential' never reaches 0; give min_lr_ratio > 0, for example 0.1")
        if decay_steps is None or decay_steps < 1:
            raise ValueError(f"schedule='wsd' needs decay_steps >= 1 (the length of its decay), got {decay_steps}")
    if total_steps is None:
        return
    if total_steps < 1 and needs_total_steps(name):
        raise ValueError(
            f"schedule={name!r} depends on the length of the run, which is not limited: set trainer.max_steps or"
            " trainer.max_epochs, or use schedule='warmup_stable'"
        )
    if name == "wsd" and decay_steps is not None and warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} + decay_steps={decay_steps} = {warmup_steps + decay_steps} exceeds the run's"
            f" {total_steps} optimizer steps; lower one of them or raise trainer.max_steps"
        )
    if name != "constant" and 0 < total_steps <= warmup_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} leaves no step at the peak learning rate in a run of {total_steps} optimizer"
            " steps; lower it or raise trainer.max_steps"
        )


def get_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    decay_type: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
    total_steps: int | None = None,
) -> LambdaLR:
    """The schedule called `name` (see `SCHEDULES`); arguments that it does not take are ignored.

    Args:
        name: "constant", "warmup_stable", "wsd", "cosine", "linear", "1-sqrt" or "inverse_sqrt".
        optimizer: its parameter groups' learning rates are the peaks.
        warmup_steps: optimizer steps of linear warmup.
        decay_steps: length of WSD's decay in optimizer steps.
        decay_type: shape of WSD's decay: "1-sqrt", "linear", "cosine" or "exponential".
        min_lr_ratio: end of the decay, as a fraction of the peak.
        total_steps: optimizer steps of the whole run.

    Raises:
        ValueError: as `check_schedule`, or a missing `total_steps`.
    """
    check_schedule(
        name,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        decay_type=decay_type,
        min_lr_ratio=min_lr_ratio,
        total_steps=-1 if total_steps is None and needs_total_steps(name) else total_steps,
    )
    function, argument_names = _NEEDS[name]
    arguments = {
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "decay_type": decay_type,
        "min_lr_ratio": min_lr_ratio,
        "total_steps": total_steps,
    }
    return function(optimizer, **{key: arguments[key] for key in argument_names})  # type: ignore[operator]
