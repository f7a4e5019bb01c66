"""Figures show the numbers that they are given."""

import numpy as np
import pytest

from fulgurite.callbacks.checkpoint_merging import merge_weights
from fulgurite.callbacks.checkpoint_merging.plots import (
    plot_curves,
    plot_heat_map,
    plot_lines,
    plot_losses,
    plot_weights,
    save_figure,
)


def test_weights_are_drawn_at_their_positions_and_the_curve_meets_the_staircase():
    weights = merge_weights([100, 150, 250, 260, 300], "1-sqrt", min_ratio=0.1)
    left, right = plot_weights(weights).axes
    (stairs,) = left.patches
    values, edges, _ = stairs.get_data()
    np.testing.assert_array_equal(values, weights.w)
    np.testing.assert_array_equal(edges, weights.positions)
    t, curve = left.lines[0].get_data()
    assert (t[0], t[-1]) == (100, 350)  # virtual_end: one mean interval after the newest
    np.testing.assert_allclose(np.interp(weights.positions[1:], t, curve), weights.w, atol=2e-3)
    assert [bar.get_height() for bar in right.patches] == weights.c.tolist()
    assert left.get_legend().get_texts()[1].get_text() == "one_minus_sqrt, floor 0.1"


@pytest.mark.parametrize(
    "weights", [merge_weights([5], c=[1.0]), merge_weights(4, "wma"), merge_weights(3, c=[0, 0, 1])]
)
def test_weights_without_a_curve_are_drawn_too(weights, tmp_path):
    figure = plot_weights(weights)
    assert not figure.axes[0].lines
    assert save_figure(figure, tmp_path / "plots" / "w.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("grid", ["virtual_end", "schedule", "interval_mean"])
def test_gallery_shows_every_named_curve(grid):
    figure = plot_curves(6, grid)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles[:5] == ["linear", "cosine", "one_minus_sqrt", "polynomial(p=2)", "ema(r=0.1)"]
    bars = [bar.get_height() for bar in figure.axes[len(titles)].patches]
    np.testing.assert_array_equal(bars, merge_weights(6, "linear", grid=grid).c)
    with pytest.raises(ValueError, match="unknown grid 'end'"):
        plot_curves(6, "end")


def test_losses_say_how_far_the_merge_is_below():
    history = [{"step": 10.0, "val_loss": 3.0}, {"step": 20.0, "val_loss": 2.5, "val_loss_merged": 2.25}]
    (axis,) = plot_losses(history).axes
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[10, 3.0], [20, 2.5]], [[20, 2.25]]]
    assert axis.get_title() == "merged is 0.2500 below live at the end"
    assert plot_losses(history[:1]).axes[0].get_title() == ""


def test_heat_map_writes_each_number_and_marks_the_smallest():
    figure = plot_heat_map(
        [[2.0, float("nan")], [1.5, 3.0]], ["a", "b"], ["x", "y"], title="t", row_label="r", column_label="c"
    )
    texts = {text.get_text(): text.get_fontweight() for text in figure.axes[0].texts}
    assert texts == {"2.0000": "normal", "1.5000": "bold", "3.0000": "normal"}


def test_lines_are_sorted_and_the_baseline_is_named():
    (axis,) = plot_lines({"linear": [(20, 2.0), (10, 3.0)]}, xlabel="d", title="t", baseline=("live", 2.5)).axes
    assert axis.lines[0].get_xydata().tolist() == [[10, 3.0], [20, 2.0]]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["linear", "live"]
