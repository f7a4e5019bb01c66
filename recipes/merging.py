"""`lightning merge CHECKPOINTS ... OUTPUT`: off-line WSM from the command line.

The options are the keyword arguments of `fulgurite.callbacks.checkpoint_merging.merge_checkpoints`, which does the
work. An output directory is completed to a model that transformers loads: the configuration and tokenizer of the run.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from .errors import USAGE_EXIT_CODE, UserError, did_you_mean
from .overrides import parse_overrides

USAGE = """\
Usage: lightning merge CHECKPOINTS ... OUTPUT [--option VALUE ...]

Averages checkpoints of one run with the weights that a decay curve gives (WSM, arXiv 2507.17634). Nothing is trained.

CHECKPOINTS  checkpoints in any order, a folder of them, or the folder of a run
OUTPUT       a new path: a directory (Hugging Face), or x.safetensors, x.ckpt, x.pt

  --curve NAME           linear (default), one_minus_sqrt, cosine, ema, polynomial, inv_sqrt, exponential
  --p, --r, --a NUMBER   parameter of polynomial, ema and exponential, inv_sqrt
  --grid NAME            virtual_end (default), schedule or interval_mean
  --min_ratio NUMBER     floor of the curve
  --num_checkpoints N    the newest N
  --duration NUMBER      those within this distance of the newest, in --unit steps (default) or tokens
  --interval NUMBER      only checkpoints this far apart
  --output_dtype NAME    same (default), float32, bfloat16 or float16
  --c LIST, --w LIST     explicit merge weights, or decay coefficients

and every other argument of fulgurite.callbacks.checkpoint_merging.merge_checkpoints, by its name. Example:
  lightning merge runs/pretrain-wsm/NAME merged-1-sqrt --curve one_minus_sqrt --num_checkpoints 8"""

CURVE_ARGUMENTS = ("p", "r", "a", "beta")


def main(arguments: list[str]) -> int:
    """Merge as the command line asks; returns the exit code."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0 if arguments else USAGE_EXIT_CODE
    paths, options = _split(arguments)
    if len(paths) < 2:
        raise UserError("`lightning merge` needs checkpoints and an output: lightning merge CHECKPOINTS ... OUTPUT.")

    from ..callbacks.checkpoint_merging import merge_checkpoints

    known = [name for name in inspect.signature(merge_checkpoints).parameters if name not in ("inputs", "output")]
    known = [name for name in known if name not in ("on_progress", "curve_args")] + list(CURVE_ARGUMENTS)
    for name in options:
        if name not in known:
            raise UserError(f"`lightning merge` has no option --{name}.{did_you_mean(name, known, prefix='--')}")
    inputs = [_checkpoints(Path(path)) for path in paths[:-1]]
    output = Path(paths[-1])
    try:
        result = merge_checkpoints(
            inputs[0] if len(inputs) == 1 else inputs, output, on_progress=_progress(), **options
        )
    except (ValueError, TypeError, OSError) as error:
        raise UserError(_plain(error)) from error
    if output.is_dir():
        from .export import complete_directory

        complete_directory(output, result.inputs[-1])
    weights = ", ".join(f"{weight:.4g}" for weight in result.weights.c)
    print(f"{output}: {len(result.inputs)} checkpoints, oldest first with weights {weights}")
    print(f"{result.sidecar}: what was merged")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Paths come first, options after them, or the other way round."""
    paths: list[str] = []
    words: list[str] = []
    for word in arguments:
        awaits_value = bool(words) and words[-1].startswith("--") and "=" not in words[-1]
        (words if word.startswith("--") or awaits_value else paths).append(word)
    return paths, {override.key: override.value for override in parse_overrides(words)}


def _checkpoints(path: Path) -> Path:
    """A run's folder stands for its checkpoints."""
    return path / "checkpoints" if (path / "run.json").is_file() and (path / "checkpoints").is_dir() else path


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _progress() -> Any:
    """Bytes read, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else "\r"
        print(f"  read {done / 1e9:.2f} of {total / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)

    return show
