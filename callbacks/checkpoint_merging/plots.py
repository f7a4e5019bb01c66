"""Figures of merging: a curve with the staircase that a merge emulates, merge weights, losses, and a sweep's heat map.

Every function returns a `matplotlib.figure.Figure`; nothing here touches pyplot or a global backend.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .weights import GRIDS, MergeWeights, canonical_curve, curve_values, merge_weights

# Okabe and Ito's palette, told apart by colour-blind readers and in grey.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LIVE, MERGED = _COLORS[6], _COLORS[1]
_GALLERY: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "one_minus_sqrt": {},
    "polynomial": {"p": 2.0},
    "ema": {"r": 0.1},
    "inv_sqrt": {"a": 3.0},
    "exponential": {"r": 0.05},
}


def plot_weights(weights: MergeWeights, unit: str = "steps") -> Figure:
    """Decay curve, the staircase of factors w_i that the merge applies to the run's updates, and the merge weights c.

    Args:
        weights: what `merge_weights` gives.
        unit: what the positions count, for the axis.
    """
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    s = weights.positions
    if len(s) > 1:
        left.stairs(weights.w, s, baseline=None, color=MERGED, linewidth=2, label="factor of each interval's updates")
        curve = _continuous(weights)
        if curve is not None:
            left.plot(*curve, color=LIVE, linewidth=1, linestyle="--", label=f"{_title(weights)}")
        left.legend(frameon=False, fontsize=8)
    left.set(xlabel=unit, ylabel="update factor w", ylim=(-0.03, 1.05), title="Emulated decay")
    width = 0.8 * float(np.min(np.diff(s))) if len(s) > 1 else 1.0
    right.bar(s, weights.c, width=width, color=_COLORS[0])
    right.axhline(1.0 / len(s), color=LIVE, linewidth=0.8, linestyle=":", label="uniform mean")
    right.legend(frameon=False, fontsize=8)
    right.set(xlabel=unit, ylabel="merge weight c", title="Weight of each checkpoint")
    return _plain(figure)


def plot_curves(num_checkpoints: int = 10, grid: str = "virtual_end") -> Figure:
    """All named curves side by side: f(t) above, merge weights of `num_checkpoints` checkpoints (oldest left) below."""
    if grid not in GRIDS:
        raise ValueError(f"unknown grid {grid!r}: use one of {', '.join(GRIDS)}")
    figure = Figure(figsize=(13.0, 4.2), layout="constrained")
    axes = figure.subplots(2, len(_GALLERY), sharey="row")
    t = np.linspace(0.0, 1.0, 300)
    index = np.arange(num_checkpoints)
    for column, (name, args) in enumerate(_GALLERY.items()):
        top, bottom = axes[0, column], axes[1, column]
        weights = merge_weights(num_checkpoints, name, grid=grid, **args)
        top.plot(t, curve_values(name, t, **args), color=LIVE, linewidth=1.2)
        steps = np.arange(1, num_checkpoints) / (num_checkpoints if grid == "virtual_end" else num_checkpoints - 1)
        top.step([0.0, *steps], [weights.w[0], *weights.w], where="pre", color=MERGED, linewidth=1.2)
        arguments = ", ".join(f"{key}={value:g}" for key, value in args.items())
        top.set_title(f"{name}({arguments})" if arguments else name, fontsize=9)
        bottom.bar(index, weights.c, color=_COLORS[0])
        bottom.set_xlabel("checkpoint")
    axes[0, 0].set_ylabel("decay")
    axes[1, 0].set_ylabel("merge weight")
    return _plain(figure)


def plot_losses(history: Sequence[Mapping[str, float]], name: str = "merged", unit: str = "steps") -> Figure:
    """Validation loss of the live and of the merged weights over the run.

    Args:
        history: one mapping a validation: "step", "val_loss", and "val_loss_<name>" where there was a merge.
        name: which merge.
        unit: what "step" counts.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    key = f"val_loss_{name}"
    for metric, color, label in (("val_loss", LIVE, "live weights"), (key, MERGED, f"{name} weights")):
        rows = [(row["step"], row[metric]) for row in history if metric in row]
        if rows:
            axis.plot(*zip(*rows, strict=True), color=color, marker="o", markersize=3, label=label)
    both = [row for row in history if "val_loss" in row and key in row]
    if both:
        gap = both[-1]["val_loss"] - both[-1][key]
        axis.set_title(f"{name} is {abs(gap):.4f} {'below' if gap >= 0 else 'above'} live at the end", fontsize=10)
    axis.set(xlabel=unit, ylabel="validation loss (nats a token)")
    axis.legend(frameon=False)
    return _plain(figure)


def plot_heat_map(
    values: Any, rows: Sequence[str], columns: Sequence[str], *, title: str, row_label: str, column_label: str
) -> Figure:
    """Numbers as a table of colours, the smallest marked; NaN stays empty.

    Args:
        values: (len(rows), len(columns)).
    """
    table = np.asarray(values, dtype=np.float64)
    figure = Figure(figsize=(1.6 + 0.95 * len(columns), 1.4 + 0.45 * len(rows)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(table, cmap="cividis", aspect="auto")
    best = np.nanmin(table) if np.isfinite(table).any() else np.nan
    middle = (np.nanmin(table) + np.nanmax(table)) / 2 if np.isfinite(table).any() else 0.0
    for (i, j), value in np.ndenumerate(table):
        if np.isfinite(value):
            color = "black" if value > middle else "white"
            weight = "bold" if value == best else "normal"
            axis.text(j, i, f"{value:.4f}", ha="center", va="center", color=color, fontsize=8, fontweight=weight)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel=column_label, ylabel=row_label, title=title)
    figure.colorbar(image, ax=axis, label="nats a token")
    return figure


def plot_lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, xlabel: str, title: str, baseline: tuple[str, float] | None
) -> Figure:
    """Loss against one setting, a line for each entry of `series`; `baseline` is a horizontal line."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for index, (label, points) in enumerate(series.items()):
        color = _COLORS[index % (len(_COLORS) - 1)]
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=label, color=color)
    if baseline is not None:
        axis.axhline(baseline[1], color=LIVE, linewidth=1, linestyle="--", label=baseline[0])
    axis.set(xlabel=xlabel, ylabel="validation loss (nats a token)", title=title)
    axis.legend(frameon=False, fontsize=8)
    return _plain(figure)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _continuous(weights: MergeWeights) -> tuple[np.ndarray, np.ndarray] | None:
    """The curve over the window's positions, where it has a name."""
    if weights.curve in ("explicit", "callable") or weights.order != "forward":
        return None
    try:
        canonical_curve(weights.curve)
        t = np.linspace(0.0, 1.0, 300)
        values = curve_values(weights.curve, t, min_ratio=weights.min_ratio, **weights.curve_args)
    except ValueError:  # presets weigh by index and have no curve
        return None
    s = weights.positions
    span = float(s[-1] - s[0])
    horizon = span * len(s) / (len(s) - 1) if weights.grid == "virtual_end" else span
    return s[0] + t * horizon, values


def _title(weights: MergeWeights) -> str:
    args = ", ".join(f"{key}={value:.3g}" for key, value in weights.curve_args.items())
    floor = f", floor {weights.min_ratio:g}" if weights.min_ratio else ""
    return f"{weights.curve}({args})" + floor if args else f"{weights.curve}{floor}"


def _plain(figure: Figure) -> Figure:
    for axis in figure.axes:
        if isinstance(axis, Axes):
            axis.spines[["top", "right"]].set_visible(False)
    return figure
