"""Off-line WSM: the checkpoints of one run -> one "annealed" model, of which the run knows nothing.

Files of any size: each byte is read once, and neither a model nor a tensor is ever held whole.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .artifacts import Artifact, check_output, companion_files
from .byte_ranges import Checkpoint, tensor_bytes
from .checks import check_lora, check_not_quantised, check_same_tensors, names_to_copy
from .engine import Job, run
from .numerics import accumulation_dtype, is_averaged, weighted_sum
from .state_dicts import Dtype, check_finite, merge_factor, merge_state_dicts, parse_dtype, tied_names
from .weights import Curve, MergeWeights, canonical_curve, merge_weights
from .windows import locate, open_inputs, select_window

__all__ = ["MergeResult", "merge_checkpoints", "merge_into", "merge_state_dicts", "tool_version"]


@dataclass(frozen=True, eq=False)
class MergeResult:
    """What `merge_checkpoints` made: the artifact, its `merge.json`, the inputs (oldest first) and their weights."""

    output: Path
    sidecar: Path
    inputs: list[Path]
    weights: MergeWeights


def merge_checkpoints(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    curve: Curve = "linear",
    grid: str = "virtual_end",
    min_ratio: float = 0.0,
    w: ArrayLike | None = None,
    c: ArrayLike | None = None,
    normalize: bool = False,
    allow_negative: bool = False,
    order: str = "forward",
    seed: int = 0,
    num_checkpoints: int | None = None,
    duration: float | None = None,
    interval: float | None = None,
    unit: str = "steps",
    positions: Sequence[float] | None = None,
    accumulate_dtype: Dtype = torch.float32,
    output_dtype: Dtype = "same",
    buffers: str = "average",
    buffer_names: Collection[str] | None = None,
    exclude: Sequence[str] = (),
    lora: str | None = None,
    strip_prefix: str | None = "auto",
    max_shard_size: int | str = "5GB",
    allow_merged: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **curve_args: float,
) -> MergeResult:
    """Merge checkpoint files into one model without optimizer state.

    Reads Lightning `.ckpt` (of one written by `WeightAveraging` the live weights), `.safetensors`, Hugging Face
    directories, `.pt` / `.bin`, and `torch.distributed.checkpoint` directories. The output appears complete or not at
    all, with `merge.json` (in the directory, or `<output>.merge.json` beside a file): inputs with SHA-256, steps,
    curve, c, w, dtypes and version.

    Args:
        inputs: checkpoints in any order (with explicit w or c: oldest first), or one folder of them.
        output: a new path: `x.safetensors`, `x.ckpt`, `x.pt`, else a Hugging Face directory (with the configuration and
            tokenizer files that the newest input has).
        curve, grid, min_ratio, w, c, normalize, allow_negative, order, seed, curve_args: see `merge_weights`.
        num_checkpoints: merge the newest n.
        duration: merge those within this distance of the newest (n times the interval), in `unit`.
        interval: use only checkpoints this far apart, counted back from the newest.
        unit: "steps" (the checkpoint's `global_step`, else the number in its file name) or "tokens" (`tokens_seen`).
        positions: one a checkpoint, in the order of `inputs`, instead.
        accumulate_dtype, output_dtype, buffers, buffer_names, exclude, lora: see `merge_state_dicts`.
        strip_prefix: prefix taken off names in safetensors outputs; "auto" takes Lightning's "model." off.
        max_shard_size: directories are split into shards of this size.
        allow_merged: accept inputs that are merges themselves.
        on_progress: called with (bytes read, bytes to read).

    Raises:
        FileExistsError: `output` exists.
        FileNotFoundError: an input does not.
        ValueError, TypeError: see `merge_weights` and `merge_state_dicts`; fewer checkpoints than asked; a position
            that is neither recorded nor given; inputs that are averages already.
    """
    output = Path(output)
    check_output(output)
    if unit not in ("steps", "tokens"):
        raise ValueError(f"unit must be 'steps' or 'tokens', got {unit!r}")
    wide, target = parse_dtype(accumulate_dtype), None if output_dtype == "same" else parse_dtype(output_dtype)
    accumulation_dtype(torch.float32, wide)
    with ExitStack() as stack:
        opened = open_inputs(inputs, stack)
        located = locate(opened, unit, positions, single=c is not None or w is not None)
        chosen = select_window([p for p, _ in located], num_checkpoints, duration, interval)
        window = [located[i] for i in chosen]
        checkpoints = [checkpoint for _, checkpoint in window]
        if c is not None or w is not None or canonical_curve(curve) == "explicit":
            _check_order(inputs, opened, located)
        weights = merge_weights(
            [position for position, _ in window],
            curve,
            grid=grid,
            min_ratio=min_ratio,
            w=w,
            c=c,
            normalize=normalize,
            allow_negative=allow_negative,
            order=order,
            seed=seed,
            **curve_args,
        )
        _check_inputs(checkpoints, allow_merged)
        signature = _signature(checkpoints[0])
        label = str(checkpoints[0].path)
        check_not_quantised(label, signature)
        factors = check_lora(label, signature, lora)
        copied = names_to_copy(signature, buffers, buffer_names, exclude)
        jobs = [_job(name, dtype, copied, target) for name, (dtype, _) in signature.items() if name not in factors]
        rename = _renaming(output, checkpoints[-1], strip_prefix)
        adapters = _adapters(checkpoints, factors, weights.c.tolist(), target)
        entries = {rename(job.name): (job.target, signature[job.name][1]) for job in jobs}
        entries |= {rename(name): (tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters.items()}
        for checkpoint in checkpoints:
            for file in checkpoint.files:
                file.start_hashing()
        newest = checkpoints[-1]
        artifact = Artifact(
            output,
            entries,
            aliases={rename(alias): rename(name) for alias, name in newest.aliases.items()},
            extra=newest.extra,
            header=newest.header,
            max_shard_size=max_shard_size,
        )
        with artifact:
            run(
                jobs,
                checkpoints,
                weights.c.tolist(),
                wide,
                lambda name, start, view: artifact.write(rename(name), start, view),
                ordered_output=artifact.is_hashed,
                on_progress=on_progress,
            )
            for name, tensor in adapters.items():
                artifact.write(rename(name), 0, tensor_bytes(tensor))
            provenance = {
                "tool": tool_version(),
                **weights.to_dict(),
                "unit": unit,
                "steps": [checkpoint.step for checkpoint in checkpoints],
                "inputs": [_describe_input(*item) for item in zip(window, weights.c.tolist(), strict=True)],
                "dtype": {"accumulate": str(wide), "output": "same" if target is None else str(target)},
                "buffers": buffers,
                "copied_from_newest": sorted(rename(name) for name in copied),
                "tied": {rename(alias): rename(name) for alias, name in newest.aliases.items()},
                "lora": lora,
            }
            companions = _companions(newest, factors, int((weights.c != 0.0).sum()))
            sidecar = artifact.publish(provenance, companions)
    return MergeResult(output, sidecar, [checkpoint.path for checkpoint in checkpoints], weights)


@torch.no_grad()
def merge_into(checkpoints: Sequence[Checkpoint], c: Sequence[float], state: Mapping[str, Tensor]) -> None:
    """Merge open checkpoints (oldest first, weights c) straight into the tensors of a module's state dict.

    One tensor of one checkpoint is in memory at a time, beside the module's own.

    Raises:
        ValueError: names, shapes or dtypes that do not match each other or the module's.
    """
    _check_inputs(checkpoints, allow_merged=True)
    first, newest = checkpoints[0], checkpoints[-1]
    aliases = tied_names(state)
    targets = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in aliases}
    check_same_tensors(
        ["the module", str(first.path)],
        [{n: (t.dtype, tuple(t.shape)) for n, t in targets.items()}, _signature(first)],
    )
    for name, target in targets.items():
        if is_averaged(name, target.dtype):
            wide = accumulation_dtype(target.dtype)
            target.copy_(weighted_sum((checkpoint.load(name) for checkpoint in checkpoints), c, wide))
        else:
            target.copy_(newest.load(name))


def tool_version() -> str:
    """Name and version of this package."""
    try:
        return f"fulgurite {version('fulgurite')}"
    except PackageNotFoundError:
        return "fulgurite"


def _check_inputs(checkpoints: Sequence[Checkpoint], allow_merged: bool) -> None:
    for checkpoint in checkpoints:
        if checkpoint.is_merge and not allow_merged:
            raise ValueError(
                f"{checkpoint.path} is itself a merge: merging merges is not a merge of their checkpoints. Pass "
                "allow_merged=True if this is meant"
            )
    _agree_on_ties(checkpoints)
    labels = [str(checkpoint.path) for checkpoint in checkpoints]
    check_same_tensors(labels, [_signature(checkpoint) for checkpoint in checkpoints])


def _agree_on_ties(checkpoints: Sequence[Checkpoint]) -> None:
    """As in the newest: what is tied there is left out of the others, what is not is a tensor in them too."""
    newest = checkpoints[-1]
    for checkpoint in checkpoints[:-1]:
        for name, owner in list(checkpoint.aliases.items()):
            if name in newest.tensors:
                checkpoint.tensors[name] = checkpoint.tensors[owner]
                del checkpoint.aliases[name]
        for name, owner in newest.aliases.items():
            if owner in checkpoint.tensors:
                checkpoint.tensors.pop(name, None)


def _check_order(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    opened: Sequence[Checkpoint],
    located: Sequence[tuple[float, Checkpoint]],
) -> None:
    """Explicit weights belong to the inputs as listed, so these must be listed oldest first."""
    if isinstance(inputs, (str, os.PathLike)) or len(inputs) == 1:
        return
    position = {id(checkpoint): p for p, checkpoint in located}
    given = [position[id(checkpoint)] for checkpoint in opened]
    if given != sorted(given):
        raise ValueError(
            f"explicit w / c are matched with the checkpoints oldest first, but inputs lists positions "
            f"{', '.join(f'{p:g}' for p in given)}: list them, and their weights, in increasing order"
        )


def _signature(checkpoint: Checkpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items()}


def _job(name: str, dtype: torch.dtype, copied: Collection[str], target: torch.dtype | None) -> Job:
    converts = target is not None and dtype.is_floating_point and name not in copied
    return Job(name, name not in copied, dtype, target if converts and target is not None else dtype)


def _renaming(output: Path, newest: Checkpoint, strip_prefix: str | None) -> Callable[[str], str]:
    keeps_names = output.suffix in (".ckpt", ".pt", ".pth", ".bin")
    prefix = strip_prefix
    if strip_prefix == "auto":
        names = [*newest.tensors, *newest.aliases]
        trainer_wrote_it = newest.kind == "lightning" or (newest.kind == "distributed" and bool(newest.header))
        prefix = "model." if trainer_wrote_it and all(n.startswith("model.") for n in names) else None
    if keeps_names or not prefix:
        return lambda name: name
    wrong = [name for name in newest.tensors if not name.startswith(prefix)]
    if wrong:
        raise ValueError(f"strip_prefix={prefix!r}, but {wrong[0]} does not start with it")
    return lambda name: name.removeprefix(prefix)


def _describe_input(located: tuple[float, Checkpoint], weight: float) -> dict[str, Any]:
    position, checkpoint = located
    digests = checkpoint.digests()
    described: dict[str, Any] = {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "position": position,
        "c": weight,
        "sha256": digests if checkpoint.path.is_dir() else next(iter(digests.values())),
    }
    if checkpoint.tokens is not None:
        described["tokens"] = checkpoint.tokens
    return described


def _adapters(
    checkpoints: Sequence[Checkpoint], factors: Sequence[str], c: Sequence[float], target: torch.dtype | None
) -> dict[str, Tensor]:
    merged = {}
    for name in factors:
        tensors = [checkpoint.load(name) for checkpoint in checkpoints]
        for checkpoint, tensor in zip(checkpoints, tensors, strict=True):
            check_finite({name: tensor}, [name], str(checkpoint.path))
        merged[name] = merge_factor(name, tensors, c, target)
    return merged


def _companions(newest: Checkpoint, factors: Sequence[str], multiple: int) -> dict[str, bytes]:
    """Configuration files of the newest input; an adapter's rank and alpha grow so that its scale alpha / r stays."""
    found = companion_files(newest.directory)
    if newest.config is not None:
        found.setdefault("config.json", (json.dumps(dict(newest.config), indent=2) + "\n").encode())
    if not factors or "adapter_config.json" not in found:
        return found
    config = json.loads(found["adapter_config.json"])
    scales = {"r": multiple, "lora_alpha": math.sqrt(multiple) if config.get("use_rslora") else multiple}
    for key, factor in scales.items():
        config[key] = config[key] * factor
    for key, factor in (("rank_pattern", scales["r"]), ("alpha_pattern", scales["lora_alpha"])):
        if config.get(key):
            config[key] = {name: value * factor for name, value in config[key].items()}
    found["adapter_config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return found
