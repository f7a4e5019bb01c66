"""Which checkpoints of a run make up a merge window, and where they are."""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from .byte_ranges import Checkpoint
from .io import is_checkpoint, open_checkpoint

log = logging.getLogger(__name__)


def select_window(
    positions: Sequence[float],
    num_checkpoints: int | None = None,
    duration: float | None = None,
    interval: float | None = None,
) -> list[int]:
    """Indices of the newest checkpoints that make up a merge window; `positions` increase.

    The merge duration is n times the interval: with checkpoints every 10 steps up to 200, duration 40 is 170 .. 200.
    Of `num_checkpoints`, `duration` and `interval` any two give the third; none takes all.

    Raises:
        ValueError: fewer checkpoints than asked, none where one is needed, or arguments that contradict each other.
    """
    for name, value in (("num_checkpoints", num_checkpoints), ("duration", duration), ("interval", interval)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    last = positions[-1]
    if num_checkpoints is not None and duration is not None:
        implied = duration / num_checkpoints
        if interval is not None and not math.isclose(interval, implied, rel_tol=1e-9):
            raise ValueError(
                f"duration {duration:g} with {num_checkpoints} checkpoints is interval {implied:g}, not {interval:g}"
            )
        interval = implied
    if interval is not None:
        return _evenly_spaced(positions, interval, num_checkpoints, duration)
    if num_checkpoints is not None:
        if num_checkpoints > len(positions):
            raise ValueError(f"{num_checkpoints} checkpoints were asked for, {len(positions)} were found")
        return list(range(len(positions) - num_checkpoints, len(positions)))
    if duration is None:
        return list(range(len(positions)))
    slack = 1e-9 * max(abs(last), duration)
    chosen = [i for i, position in enumerate(positions) if position > last - duration + slack]
    first = chosen[0]
    if first == 0 and len(positions) > 1:
        spacing = (last - positions[0]) / (len(positions) - 1)
        if last - positions[0] + spacing < duration - slack:
            raise ValueError(
                f"a duration of {duration:g} was asked for; the {len(positions)} checkpoints found "
                f"({positions[0]:g} to {last:g}) cover {last - positions[0] + spacing:g}"
            )
    return chosen


def _evenly_spaced(
    positions: Sequence[float], interval: float, num_checkpoints: int | None, duration: float | None
) -> list[int]:
    last = positions[-1]
    slack = 1e-6 * interval
    if num_checkpoints is None:
        reach = duration if duration is not None else last - positions[0] + interval
        num_checkpoints = max(1, math.floor(reach / interval + 1e-9))
    chosen = []
    for j in range(num_checkpoints - 1, -1, -1):
        wanted = last - j * interval
        found = [i for i, position in enumerate(positions) if abs(position - wanted) <= slack]
        if not found:
            raise ValueError(
                f"{num_checkpoints} checkpoints every {interval:g} were asked for, and there is none at {wanted:g} "
                f"(found: {_abridged(positions)})"
            )
        chosen.append(found[0])
    return chosen


def _abridged(positions: Sequence[float]) -> str:
    texts = [f"{p:g}" for p in positions]
    return ", ".join(texts) if len(texts) <= 12 else ", ".join([*texts[:5], "...", *texts[-5:]])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, or in the `checkpoints` folder of a run directory; links to another left out; by name.

    Raises:
        ValueError: there is none.
    """
    folder = Path(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    found: dict[Path, Path] = {}
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_symlink(), p.name.startswith("last"), p.name)):
        if is_checkpoint(path):
            found.setdefault(path.resolve(), path)
    if not found:
        raise ValueError(f"{folder} holds no checkpoints (.ckpt, .pt, .bin, .safetensors, or folders of them)")
    return sorted(found.values())


def open_inputs(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], stack: ExitStack
) -> list[Checkpoint]:
    given = [Path(inputs)] if isinstance(inputs, (str, os.PathLike)) else [Path(path) for path in inputs]
    from_folder = len(given) == 1 and given[0].is_dir() and not is_checkpoint(given[0])
    paths = list_checkpoints(given[0]) if from_folder else given
    if not paths:
        raise ValueError("nothing to merge: inputs is empty")
    opened = []
    for path in paths:
        checkpoint = open_checkpoint(path)
        stack.callback(checkpoint.close)
        opened.append(checkpoint)
    return _without_copies(opened) if from_folder else opened


def _without_copies(opened: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Of a run's folder: leave out merges, and what repeats a step (`last.ckpt`, one written on preemption)."""
    merges = [str(c.path) for c in opened if c.is_merge]
    if merges:
        log.warning("Left out because they are merges themselves: %s", ", ".join(merges))
    kept: dict[Any, Checkpoint] = {}
    live = [c for c in opened if not c.is_merge]
    for checkpoint in sorted(live, key=lambda c: c.path.name.startswith(("last", "preempted"))):
        key = checkpoint.path if checkpoint.step is None else checkpoint.step
        if kept.setdefault(key, checkpoint) is not checkpoint:
            log.info("%s repeats the step of %s and is left out", checkpoint.path, kept[key].path)
    return list(kept.values())


def locate(
    opened: Sequence[Checkpoint], unit: str, positions: Sequence[float] | None, single: bool
) -> list[tuple[float, Checkpoint]]:
    """(position, checkpoint), sorted."""
    if positions is not None:
        if len(positions) != len(opened):
            raise ValueError(f"{len(positions)} positions for {len(opened)} checkpoints: give one each, in their order")
        found: list[float | None] = list(positions)
    else:
        found = [c.step if unit == "steps" else c.tokens for c in opened]
        if single and len(opened) == 1 and found[0] is None:
            found = [0]
    located: list[tuple[float, Checkpoint]] = []
    for position, checkpoint in zip(found, opened, strict=True):
        if position is None:
            what = "no global_step and no number in its name" if unit == "steps" else "no tokens_seen"
            raise ValueError(f"{checkpoint.path} has {what}: pass positions=[...], one a checkpoint")
        located.append((position, checkpoint))
    located.sort(key=lambda item: item[0])
    for (p, a), (q, b) in pairwise(located):
        if p == q:
            raise ValueError(f"{a.path} and {b.path} are both at position {p:g}: positions must increase strictly")
    return located
