"""Snapshot files across processes: whose folder they are in, and which of them a resumed run can still use."""

import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from ..checkpoint_files import remove_leftovers
from .rings import DiskRing


def choose_directory(root: Path, name: str, before: str | None, rank: int, agree: Callable[[str], str]) -> Path:
    """Folder of this run's snapshots: its own, so that two runs never delete each other's.

    A run that resumes within its own root goes on in the folder of before. One that resumes from another run's
    checkpoint links (or copies) that run's files into a new folder and leaves the originals alone.

    Args:
        root: folder of all snapshot folders of this run.
        name: start of the new folder's name.
        before: folder recorded in the checkpoint.
        rank: whose files to borrow.
        agree: rank 0's value on all ranks.
    """
    source = Path(before) if before is not None else None
    if source is not None and source.parent == root:
        return source
    directory = Path(agree(str(root / f"{name}-{secrets.token_hex(4)}")))
    if source is not None:
        if not source.is_dir():  # the run's folder was moved as a whole
            source = root / source.name
        directory.mkdir(parents=True, exist_ok=True)
        for path in source.glob(f"*-rank{rank:05d}.safetensors"):
            try:
                os.link(path, directory / path.name)
            except OSError:
                shutil.copy2(path, directory / path.name)
    return directory


def usable_from(steps: list[int], directory: Path, rank: int, sliding: bool) -> int:
    """Index of the oldest snapshot from which on all files are there and whole; `len(steps)` when there is none.

    Warns when something is missing, and removes temporary files that a killed writer left.
    """
    remove_leftovers(directory)
    if not steps:
        return 0
    if sliding:
        ring = DiskRing(len(steps), directory, rank)
        problems = {i: text for i, step in enumerate(steps) if (text := _problem(ring.path(step)))}
    else:
        text = _problem(directory / f"accumulator-{steps[-1]:015d}-rank{rank:05d}.safetensors")
        problems = {len(steps) - 1: text} if text else {}
    if not problems:
        return 0
    newest = max(problems)
    kept = len(steps) - 1 - newest
    warnings.warn(
        f"the merge cannot be resumed whole: {problems[newest]}. Of its {len(steps)} snapshots the {kept} newest are "
        "used. Only the two latest checkpoints keep all their snapshots: resume from one of them",
        stacklevel=2,
    )
    return newest + 1


def _problem(path: Path) -> str | None:
    """What is wrong with a file, or None."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            return None
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, SafetensorError) as error:
        return f"{path} is damaged ({error})"
