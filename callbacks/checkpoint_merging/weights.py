"""From a learning-rate decay curve to merge weights and back (WSM, arXiv 2507.17634, section 3).

With checkpoints theta_0 .. theta_k (n = k + 1, oldest first) and G_i the sum of all updates between theta_{i-1} and
theta_i,

    sum_j c_j theta_j = theta_0 - sum_i w_i G_i,        w_i = c_i + ... + c_k,

so a weighted average replays the run's own updates, each scaled by a decay factor. `w` (k values) are decay
coefficients, `c` (n values) merge weights. The average *emulates* the decay: a decayed run would have seen other
gradients. Everything here is float64 numpy and knows nothing of models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Curve = str | Callable[[float], float] | Sequence[float]

GRIDS = ("virtual_end", "schedule", "interval_mean")
ORDERS = ("forward", "reversed", "shuffled")

_ZERO = 1e-12  # merge weights this close to 0 are rounding, not meaning
_SUM_TOLERANCE = 1e-6
_QUADRATURE_POINTS = 64


@dataclass(frozen=True)
class _CurveSpec:
    """One named curve: its value at t, its mean over [t0, t1] in closed form, and its parameters with defaults."""

    value: Callable[..., float]
    mean: Callable[..., float]
    defaults: Mapping[str, float | None] = field(default_factory=dict)


def _power_mean(t0: float, t1: float, p: float) -> float:
    """Mean of t^p over [t0, t1]; (t1^q - t0^q) is taken through expm1 so that short intervals lose no digits."""
    q, length = p + 1.0, t1 - t0
    if t0 == 0.0:
        return t1**p / q
    return t0**q * math.expm1(q * math.log1p(length / t0)) / (q * length)


def _exponential_mean(t0: float, t1: float, r: float) -> float:
    """Mean of r^t over [t0, t1]."""
    x = (t1 - t0) * math.log(r)
    return r**t0 * math.expm1(x) / x


def _cosine_mean(t0: float, t1: float) -> float:
    half = math.pi * (t1 - t0) / 2.0
    return 0.5 + 0.5 * math.cos(math.pi * (t0 + t1) / 2.0) * math.sin(half) / half


_CURVES: dict[str, _CurveSpec] = {
    "linear": _CurveSpec(lambda t: 1.0 - t, lambda t0, t1: 1.0 - (t0 + t1) / 2.0),
    "cosine": _CurveSpec(lambda t: (1.0 + math.cos(math.pi * t)) / 2.0, _cosine_mean),
    "one_minus_sqrt": _CurveSpec(lambda t: 1.0 - math.sqrt(t), lambda t0, t1: 1.0 - _power_mean(t0, t1, 0.5)),
    "polynomial": _CurveSpec(lambda t, p: 1.0 - t**p, lambda t0, t1, p: 1.0 - _power_mean(t0, t1, p), {"p": None}),
    "ema": _CurveSpec(
        lambda t, r: 1.0 - r ** (1.0 - t), lambda t0, t1, r: 1.0 - _exponential_mean(1.0 - t1, 1.0 - t0, r), {"r": 0.1}
    ),
    "inv_sqrt": _CurveSpec(
        lambda t, a: 1.0 / math.sqrt(1.0 + a * t),
        lambda t0, t1, a: 2.0 / (math.sqrt(1.0 + a * t0) + math.sqrt(1.0 + a * t1)),
        {"a": None},
    ),
    "exponential": _CurveSpec(lambda t, r: r**t, _exponential_mean, {"r": None}),
}
_ALIASES = {"1-sqrt": "one_minus_sqrt", "minus-sqrt": "one_minus_sqrt", "minus_sqrt": "one_minus_sqrt"}
# Published baselines that weigh checkpoints by their index, whatever the spacing: uniform over the window is SWA
# (Izmailov 2018), LAWA (arXiv 2209.14981) and PMA's SMA; `wma` grows linearly with recency (PMA, arXiv 2505.12082).
_PRESETS: dict[str, Callable[[Array], Array]] = {
    "mean": np.ones_like,
    "sma": np.ones_like,
    "swa": np.ones_like,
    "lawa": np.ones_like,
    "wma": lambda index: index + 1.0,
}
CURVES = (*_CURVES, *_ALIASES, *_PRESETS)


@dataclass(frozen=True, eq=False)
class MergeWeights:
    """Merge weights of one window.

    Attributes:
        c: merge weights (n,), oldest checkpoint first, sum 1.
        w: decay coefficients (n - 1,), `w[i - 1]` scales the updates between checkpoints i - 1 and i.
        positions: (n,) steps or tokens at which the checkpoints were taken.
        curve: canonical name, or "explicit" / "callable".
        grid: how the curve was sampled.
        min_ratio: the curve's floor (learning rate at its end over the peak).
        curve_args: parameters the curve was evaluated with, defaults filled in.
        order: "forward", or the control "reversed" / "shuffled".
    """

    c: Array
    w: Array
    positions: Array
    curve: str
    grid: str
    min_ratio: float = 0.0
    curve_args: dict[str, float] = field(default_factory=dict)
    order: str = "forward"

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON and for checkpoints."""
        return {
            "c": self.c.tolist(),
            "w": self.w.tolist(),
            "positions": [int(p) if p == int(p) else float(p) for p in self.positions],
            "curve": self.curve,
            "curve_args": dict(self.curve_args),
            "grid": self.grid,
            "min_ratio": self.min_ratio,
            "order": self.order,
        }


def decay_to_merge_weights(w: ArrayLike, *, allow_negative: bool = False) -> Array:
    """Merge weights c (k + 1,) of decay coefficients w (k,): c_0 = 1 - w_1, c_j = w_j - w_{j+1}, c_k = w_k.

    Args:
        w: 1 >= w_1 >= ... >= w_k >= 0. Empty for a single checkpoint.
        allow_negative: accept any finite w (extrapolation, e.g. arXiv 2605.26484).

    Raises:
        ValueError: w leaves [0, 1] or increases by more than 1e-12 (rounding below that is clipped and renormalised).
    """
    w = _vector(w, "w")
    c = np.concatenate([[1.0], w]) - np.concatenate([w, [0.0]])
    if allow_negative:
        return c
    _check_decay(w)
    return _clip(c, lambda c: c < 0.0)


def merge_to_decay_weights(c: ArrayLike, *, normalize: bool = False, allow_negative: bool = False) -> Array:
    """Decay coefficients w (n - 1,) of merge weights c (n,): w_i = c_i + ... + c_k.

    Raises:
        ValueError: c is empty, has a negative entry (without `allow_negative`), or its sum is not 1 within 1e-6
            (without `normalize=True`).
    """
    c = _check_merge_weights(c, normalize=normalize, allow_negative=allow_negative)
    # Extended precision keeps c -> w -> c exact to the last digit for long windows.
    return np.cumsum(c[::-1].astype(np.longdouble))[::-1][1:].astype(np.float64)


def decay_coefficients(
    positions: int | ArrayLike | None = None,
    curve: Curve = "linear",
    *,
    n: float | None = None,
    grid: str = "virtual_end",
    min_ratio: float = 0.0,
    **curve_args: float,
) -> Array:
    """Decay coefficients w (n - 1,) of a curve f on n checkpoints: w(t) = m + (1 - m) f(t), m = `min_ratio`.

    Grids, with D = s_k - s_0 (spacing is honoured; the formulas in brackets are the uniform case):
        virtual_end    t_j = (s_j - s_0) / (D n / k)     [j / n]: the curve ends one interval after the newest
        schedule       t_j = (s_{j-1} - s_0) / D         [(j-1) / k]: the first decay step still runs at the peak
        interval_mean  mean of w over [(s_{j-1} - s_0) / D, (s_j - s_0) / D]: best L2 staircase

    Curves f(t): linear 1 - t; cosine (1 + cos(pi t)) / 2; one_minus_sqrt (aliases 1-sqrt, minus-sqrt) 1 - sqrt(t);
    polynomial(p) 1 - t^p; ema(r=0.1 or beta) 1 - r^(1-t), r = beta^n; inv_sqrt(a) 1 / sqrt(1 + a t), default
    a = H / s_0 with H the length of the curve; exponential(r) r^t; a callable; a sequence of k values taken as w;
    mean/sma/swa/lawa/wma, which weigh checkpoints by index and ignore spacing and grid.

    Args:
        positions: number of checkpoints n (then positions are 0 .. n-1), or n strictly increasing numbers.
        n: the number of checkpoints, instead of `positions`.

    Raises:
        ValueError: fewer than 2 checkpoints, positions not increasing, unknown curve or grid, a parameter missing,
            unknown or out of range, or values of a callable / sequence that leave [0, 1] or increase.
    """
    s = _check_positions(positions, n)
    w, _, _ = _evaluate(s, curve, grid, min_ratio, curve_args, allow_negative=False)
    return w


def merge_weights(
    positions: int | ArrayLike | None = None,
    curve: Curve = "linear",
    *,
    n: float | None = None,
    grid: str = "virtual_end",
    min_ratio: float = 0.0,
    w: ArrayLike | None = None,
    c: ArrayLike | None = None,
    normalize: bool = False,
    allow_negative: bool = False,
    order: str = "forward",
    seed: int = 0,
    **curve_args: float,
) -> MergeWeights:
    """Merge weights of a window; see `decay_coefficients` for curves and grids.

    Args:
        positions: n, or n strictly increasing steps (or tokens).
        n: the number of checkpoints, instead of `positions`.
        curve: as in `decay_coefficients`; "explicit" when `w` or `c` is given.
        w: explicit decay coefficients (n - 1,).
        c: explicit merge weights (n,); `normalize=True` divides them by their sum.
        allow_negative: accept negative merge weights (extrapolation).
        order: "reversed" / "shuffled" (by `seed`) reassign the same weights to other checkpoints: the controls that
            show that the order matters.

    Raises:
        ValueError: see `decay_coefficients`; one checkpoint with a curve (`c=[1.0]` copies it); explicit values of
            the wrong length.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: use one of {', '.join(ORDERS)}")
    explicit = w is not None or c is not None
    if (isinstance(curve, str) and curve == "explicit") != explicit:
        if not explicit:
            raise ValueError("curve='explicit' needs w (decay coefficients) or c (merge weights)")
        if not (isinstance(curve, str) and curve == "linear"):
            raise ValueError(f"give either curve={curve!r} or explicit w / c, not both")
    if w is not None and c is not None:
        raise ValueError("give either w (decay coefficients) or c (merge weights), not both")
    if c is not None:
        s = _check_positions(positions, n, minimum=1)
        _reject_with_explicit(min_ratio, curve_args, "c")
        weights = _check_merge_weights(c, normalize=normalize, allow_negative=allow_negative)
        if len(weights) != len(s):
            raise ValueError(
                f"{len(weights)} merge weights c for {len(s)} checkpoints: give one a checkpoint, oldest first"
            )
        weights = weights / weights.sum()
        name, args = "explicit", dict[str, float]()
    else:
        chosen: Curve = curve if w is None else _vector(w, "w").tolist()
        s = _check_positions(positions, n, minimum=1 if not isinstance(chosen, str) and not callable(chosen) else 2)
        decay, name, args = _evaluate(s, chosen, grid, min_ratio, curve_args, allow_negative)
        weights = decay_to_merge_weights(decay, allow_negative=allow_negative)
    if not allow_negative:
        weights = _clip(weights, lambda c: np.abs(c) <= _ZERO)
    if order == "reversed":
        weights = weights[::-1].copy()
    elif order == "shuffled":
        weights = np.random.default_rng(seed).permutation(weights)
    decay = merge_to_decay_weights(weights, allow_negative=allow_negative)
    return MergeWeights(weights, decay, s, name, grid, float(min_ratio), args, order)


def curve_values(curve: Curve, t: ArrayLike, *, min_ratio: float = 0.0, **curve_args: float) -> Array:
    """w(t) = m + (1 - m) f(t) of a named or callable curve at t in [0, 1]; for figures and schedules."""
    function, _, _, _ = _resolve(curve, curve_args, None, None)
    f = np.array([function(float(x)) for x in np.atleast_1d(_vector(t, "t"))])
    return min_ratio + (1.0 - min_ratio) * f


def canonical_curve(curve: Curve) -> str:
    """Name of a curve with aliases resolved: "1-sqrt" -> "one_minus_sqrt"; "callable" / "explicit" for the others."""
    if isinstance(curve, str):
        name = _ALIASES.get(curve, curve)
        if name not in _CURVES and name not in _PRESETS and name != "explicit":
            raise ValueError(f"unknown curve {curve!r}: known are {', '.join(CURVES)}, a callable, or a list of w")
        return name
    return "callable" if callable(curve) else "explicit"


def _evaluate(
    s: Array, curve: Curve, grid: str, min_ratio: float, curve_args: Mapping[str, float], allow_negative: bool
) -> tuple[Array, str, dict[str, float]]:
    """(w, canonical curve name, its parameters) on checked positions."""
    n, k = len(s), len(s) - 1
    if grid not in GRIDS:
        raise ValueError(f"unknown grid {grid!r}: use one of {', '.join(GRIDS)}")
    if not 0.0 <= min_ratio <= 1.0:
        raise ValueError(f"min_ratio must lie in [0, 1], got {min_ratio}")
    name = canonical_curve(curve)
    if name == "explicit":
        w = _vector(curve, "w")
        _reject_with_explicit(min_ratio, curve_args, "w")
        if len(w) != k:
            raise ValueError(f"{len(w)} decay coefficients w for {n} checkpoints: give {k}, one an interval")
        if not allow_negative:
            _check_decay(w)
        return w, name, {}
    if name in _PRESETS:
        if curve_args:
            raise ValueError(f"curve {curve!r} takes no parameters, got {', '.join(curve_args)}")
        c = _PRESETS[name](np.arange(n, dtype=np.float64))
        f, args = merge_to_decay_weights(c, normalize=True), dict[str, float]()
    else:
        span = s[-1] - s[0]
        horizon = span * n / k if grid == "virtual_end" else span
        value, mean, args, _ = _resolve(curve, curve_args, n, (horizon, s[0]))
        elapsed = s - s[0]
        if grid == "virtual_end":
            f = np.array([value(t) for t in elapsed[1:] * k / (span * n)])
        elif grid == "schedule":
            f = np.array([value(t) for t in elapsed[:-1] / span])
        else:
            t = elapsed / span
            f = np.array([mean(t0, t1) for t0, t1 in pairwise(t)])
    w = min_ratio + (1.0 - min_ratio) * f
    _check_decay(w)
    return np.clip(w, 0.0, 1.0), name, args


def _resolve(
    curve: Curve, curve_args: Mapping[str, float], n: int | None, horizon: tuple[float, float] | None
) -> tuple[Callable[[float], float], Callable[[float, float], float], dict[str, float], str]:
    """Value and interval mean of a curve with its parameters bound."""
    name = canonical_curve(curve)
    if callable(curve):
        if curve_args:
            raise ValueError(f"a callable curve takes no parameters here, got {', '.join(curve_args)}")

        def called(t: float) -> float:
            return float(curve(float(t)))

        return called, lambda t0, t1: _quadrature(called, t0, t1), {}, name
    if name not in _CURVES:
        raise ValueError(f"curve {curve!r} has no continuous form")
    spec = _CURVES[name]
    args = dict(curve_args)
    if name == "ema" and "beta" in args:
        if "r" in args:
            raise ValueError("ema takes r or beta (r = beta^n), not both")
        if n is None:
            raise ValueError("ema with beta needs a window: r = beta^n")
        args["r"] = _in_open_unit(args.pop("beta"), "beta") ** n
    unknown = sorted(set(args) - set(spec.defaults))
    if unknown:
        accepted = ", ".join(spec.defaults) or "none"
        raise ValueError(f"curve {curve!r} does not take {', '.join(unknown)} (accepted: {accepted})")
    args = {**{key: value for key, value in spec.defaults.items() if value is not None}, **args}
    if name == "inv_sqrt" and "a" not in args and horizon is not None:
        length, start = horizon
        if start <= 0:
            raise ValueError(f"inv_sqrt's default a = H / s_0 needs a positive first position, got {start:g}: give a")
        args["a"] = length / start
    for key in spec.defaults:
        if key not in args:
            raise ValueError(f"curve {curve!r} needs the parameter {key!r}")
        args[key] = float(args[key])
        if key == "r":
            _in_open_unit(args[key], "r")
        elif not (args[key] > 0.0 and math.isfinite(args[key])):
            raise ValueError(f"curve {curve!r} needs {key} > 0, got {args[key]}")
    return lambda t: spec.value(float(t), **args), lambda t0, t1: spec.mean(float(t0), float(t1), **args), args, name


def _quadrature(function: Callable[[float], float], t0: float, t1: float) -> float:
    nodes, node_weights = np.polynomial.legendre.leggauss(_QUADRATURE_POINTS)
    t = t0 + (t1 - t0) * (nodes + 1.0) / 2.0
    return float(np.dot(node_weights, [function(float(x)) for x in t]) / 2.0)


def _in_open_unit(value: float, name: str) -> float:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
    return float(value)


def _plain(values: Any) -> Any:
    """Values that numpy takes: of torch tensors their numbers, without gradient, on the host, bf16 widened."""
    if isinstance(values, (list, tuple)):
        return [_plain(value) for value in values]
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return (values.double() if values.is_floating_point() else values).numpy()
    return values


def _vector(values: Any, name: str) -> Array:
    array = np.asarray(_plain(values), dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds a non-finite value at index {int(np.argmin(np.isfinite(array)))}")
    return array


def _count(n: Any) -> int:
    """The number of checkpoints: a whole number of any type."""
    value = np.asarray(_plain(n))
    if value.ndim != 0 or value.dtype.kind not in "iuf" or value != np.floor(value) or not 0 <= value < np.inf:
        raise ValueError(f"n must be a whole number of checkpoints, got {n!r}")
    return int(value)


def _check_positions(positions: int | ArrayLike | None, n: float | None, minimum: int = 2) -> Array:
    if (positions is None) == (n is None):
        raise ValueError("give either positions or n (the number of checkpoints)" + (", not both" if n else ""))
    if positions is None or np.ndim(_plain(positions)) == 0:
        positions = np.arange(_count(n if positions is None else positions), dtype=np.float64)
    s = _vector(positions, "positions")
    if len(s) < minimum:
        raise ValueError(
            f"merging needs at least {minimum} checkpoint(s), got {len(s)}"
            + (": a single one can only be copied, with explicit c=[1.0]" if len(s) == 1 else "")
        )
    bad = np.flatnonzero(np.diff(s) <= 0)
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"positions must increase strictly: position {s[i + 1]:.15g} (index {i + 1}) follows {s[i]:.15g}"
            + (" (duplicate)" if s[i + 1] == s[i] else "")
        )
    return s


def _check_decay(w: Array) -> None:
    for i, value in enumerate(w, start=1):
        if not -_ZERO <= value <= 1.0 + _ZERO:
            raise ValueError(f"decay coefficients must lie in [0, 1]: w_{i} = {value:.15g}")
        if i > 1 and value > w[i - 2] + _ZERO:
            raise ValueError(
                f"decay coefficients must not increase: w_{i} = {value:.15g} > w_{i - 1} = {w[i - 2]:.15g}"
            )


def _check_merge_weights(c: ArrayLike, *, normalize: bool, allow_negative: bool) -> Array:
    c = _vector(c, "c")
    if not len(c):
        raise ValueError("c is empty: give one merge weight a checkpoint")
    total = float(c.sum())
    if normalize:
        if abs(total) <= _ZERO:
            raise ValueError(f"cannot normalize merge weights that sum to {total:.3g}")
        c = c / total
    elif abs(total - 1.0) > _SUM_TOLERANCE:
        raise ValueError(f"merge weights must sum to 1, got {total:.9g}: pass normalize=True to divide by the sum")
    if not allow_negative:
        worst = int(np.argmin(c))
        if c[worst] < -_ZERO:
            raise ValueError(f"merge weight c_{worst} = {c[worst]:.15g} is negative: allow_negative=True permits it")
        c = _clip(c, lambda c: c < 0.0)
    return c


def _clip(c: Array, is_zero: Callable[[Array], NDArray[np.bool_]]) -> Array:
    """Set rounding noise to 0 and renormalise, leaving c alone where there is none."""
    noise = is_zero(c) & (c != 0.0)
    if not noise.any():
        return c
    c = np.where(noise, 0.0, c)
    return c / c.sum()


def _reject_with_explicit(min_ratio: float, curve_args: Mapping[str, float], name: str) -> None:
    if min_ratio != 0.0:
        raise ValueError(f"min_ratio = {min_ratio} has no meaning with explicit {name}: put it into the values")
    if curve_args:
        raise ValueError(f"explicit {name} takes no curve parameters, got {', '.join(curve_args)}")
