"""Off-line WSM: the checkpoints of one run -> one "annealed" model, of which the run knows nothing.

`merge_state_dicts` works on state dicts in memory, `merge_checkpoints` on files of any size, reading each byte once and
holding neither a model nor a tensor.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .artifacts import Artifact, check_output, companion_files
from .checks import LORA_FACTOR, check_lora, check_not_quantised, check_same_tensors, names_to_copy
from .engine import Job, run
from .io import Checkpoint, is_checkpoint, open_checkpoint, tensor_bytes
from .numerics import DifferenceSum, accumulation_dtype
from .weights import Curve, MergeWeights, merge_weights

log = logging.getLogger(__name__)

Source = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Dtype = torch.dtype | str


@dataclass(frozen=True, eq=False)
class MergeResult:
    """What `merge_checkpoints` made: the artifact, its `merge.json`, the inputs (oldest first) and their weights."""

    output: Path
    sidecar: Path
    inputs: list[Path]
    weights: MergeWeights


@torch.no_grad()
def merge_state_dicts(
    sources: Sequence[Source],
    c: ArrayLike,
    *,
    accumulate_dtype: Dtype = torch.float32,
    output_dtype: Dtype = "same",
    buffers: str = "average",
    buffer_names: Collection[str] | None = None,
    exclude: Sequence[str] = (),
    lora: str | None = None,
    normalize: bool = False,
    allow_negative: bool = False,
) -> dict[str, Any]:
    """Weighted average `sum_j c_j theta_j` of state dicts, oldest first, in difference form.

    Integers, booleans and `_extra_state` are taken from the newest; tied tensors stay tied; inputs are not touched.

    Args:
        sources: state dicts, or functions that load one; a function is called once and its result dropped after use
            (three models are in memory at most).
        c: merge weights (n,), sum 1.
        accumulate_dtype: float32 or float64; wider tensors are summed in their own dtype.
        output_dtype: dtype of averaged tensors; "same" casts back to the stored one.
        buffers: "average", or "newest" to copy the tensors named in `buffer_names`.
        exclude: shell-style patterns of further tensors to copy from the newest.
        lora: "merge_delta" turns LoRA factors into one adapter of rank n r with B @ A = sum_j c_j B_j @ A_j.
        normalize, allow_negative: as in `merge_weights`.

    Raises:
        ValueError: wrong number or sum of weights, checkpoints that do not match (the first five differences), a number
            that is not finite, LoRA factors without `lora`, names or patterns that match nothing.
        TypeError: quantised parameters.
    """
    if not sources:
        raise ValueError("nothing to merge: sources is empty")
    weights = merge_weights(
        max(len(sources), 1), c=c, normalize=normalize, allow_negative=allow_negative, curve="explicit"
    ).c.tolist()
    wide, target = _dtype(accumulate_dtype), None if output_dtype == "same" else _dtype(output_dtype)
    accumulation_dtype(torch.float32, wide)
    labels = [f"checkpoint {i}" for i in range(len(sources))]
    first = _read_source(sources[0])
    aliases = _tied(first)
    signature = _signature(first, aliases)
    check_not_quantised(labels[0], signature)
    factors = check_lora(labels[0], signature, lora)
    copied = names_to_copy(signature, buffers, buffer_names, exclude)
    averaged = [name for name in signature if name not in copied and name not in factors]
    sums = {name: DifferenceSum(first[name].detach(), accumulation_dtype(first[name].dtype, wide)) for name in averaged}
    adapters = {name: [first[name].detach()] for name in factors}
    _check_finite(first, averaged, labels[0])
    newest = first
    for label, source, weight in zip(labels[1:], sources[1:], weights[1:], strict=True):
        del newest  # let go of one model before the next is loaded
        newest = _read_source(source)
        aliases = _tied(newest)
        check_same_tensors([labels[0], label], [signature, _signature(newest, aliases)])
        _check_finite(newest, averaged, label)
        for name in averaged:
            sums[name].add(newest[name].detach().to(first[name].device), weight)
        for name in factors:
            adapters[name].append(newest[name].detach())
    merged: dict[str, Any] = {}
    for name, value in newest.items():
        if name in aliases:
            continue
        if name in sums:
            total = sums.pop(name).result()
            merged[name] = total.to(target or value.dtype, copy=True)
        elif name in adapters:
            merged[name] = _merge_factor(name, adapters[name], weights, target)
        else:
            merged[name] = value.detach().clone() if isinstance(value, Tensor) else value
    result = {name: merged[aliases.get(name, name)] for name in newest}
    _check_finite(result, [n for n in averaged if result[n].dtype != first[n].dtype], "the merge in its output dtype")
    return result


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
        inputs: checkpoints in any order, or one folder of them.
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
    wide, target = _dtype(accumulate_dtype), None if output_dtype == "same" else _dtype(output_dtype)
    accumulation_dtype(torch.float32, wide)
    with ExitStack() as stack:
        opened = _open_inputs(inputs, stack)
        located = _locate(opened, unit, positions, single=c is not None or w is not None)
        chosen = select_window([p for p, _ in located], num_checkpoints, duration, interval)
        window = [located[i] for i in chosen]
        checkpoints = [checkpoint for _, checkpoint in window]
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
        signature = {name: (entry.dtype, entry.shape) for name, entry in checkpoints[0].tensors.items()}
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
                on_progress,
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


def tool_version() -> str:
    """Name and version of this package."""
    try:
        return f"fulgurite {version('fulgurite')}"
    except PackageNotFoundError:
        return "fulgurite"


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


# ---------------------------------------------------------------------------------------------------- inputs


def _open_inputs(
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


def _locate(
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


def _check_inputs(checkpoints: Sequence[Checkpoint], allow_merged: bool) -> None:
    for checkpoint in checkpoints:
        if checkpoint.is_merge and not allow_merged:
            raise ValueError(
                f"{checkpoint.path} is itself a merge: merging merges is not a merge of their checkpoints. Pass "
                "allow_merged=True if this is meant"
            )
    signatures = [{n: (e.dtype, e.shape) for n, e in checkpoint.tensors.items()} for checkpoint in checkpoints]
    check_same_tensors([str(checkpoint.path) for checkpoint in checkpoints], signatures)


def _job(name: str, dtype: torch.dtype, copied: Collection[str], target: torch.dtype | None) -> Job:
    converts = target is not None and dtype.is_floating_point and not name.endswith("_extra_state")
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


# ---------------------------------------------------------------------------------------------------- LoRA


def _merge_factor(name: str, factors: Sequence[Tensor], c: Sequence[float], target: torch.dtype | None) -> Tensor:
    """Stack one LoRA factor over the checkpoints, so that B @ A is the weighted mean of the products.

    A (r, ...) is stacked along its first axis, B (out, r, ...) times its weight along its second.
    """
    is_a = LORA_FACTOR.search(name)["factor"] == "A"  # type: ignore[index]
    dtype = target or factors[0].dtype
    used = [(f, weight) for f, weight in zip(factors, c, strict=True) if weight != 0.0]
    wide = accumulation_dtype(factors[0].dtype)
    parts = [f.to(dtype) if is_a else (f.to(wide) * weight).to(dtype) for f, weight in used]
    return torch.cat(parts, dim=0 if is_a else 1).contiguous()


def _adapters(
    checkpoints: Sequence[Checkpoint], factors: Sequence[str], c: Sequence[float], target: torch.dtype | None
) -> dict[str, Tensor]:
    merged = {}
    for name in factors:
        tensors = [checkpoint.load(name) for checkpoint in checkpoints]
        for checkpoint, tensor in zip(checkpoints, tensors, strict=True):
            _check_finite({name: tensor}, [name], str(checkpoint.path))
        merged[name] = _merge_factor(name, tensors, c, target)
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


# ---------------------------------------------------------------------------------------------------- state dicts


def _dtype(dtype: Dtype) -> torch.dtype:
    known = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise ValueError(f"{name!r} is no dtype to merge in: use {', '.join(known)}")
    return known[name]


def _read_source(source: Source) -> Mapping[str, Any]:
    state = source if isinstance(source, Mapping) else source()
    if not isinstance(state, Mapping):
        raise TypeError(f"a source must be a state dict or a function that loads one, got {type(state).__name__}")
    return state


def _signature(state: Mapping[str, Any], aliases: Collection[str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    tensors = {name: t for name, t in state.items() if isinstance(t, Tensor) and name not in aliases}
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def _tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Names whose tensor is another name's."""
    owners: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.device.type != "meta":
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            key = (local.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if owners.setdefault(key, name) != name:
                aliases[name] = owners[key]
    return aliases


def _check_finite(state: Mapping[str, Any], names: Sequence[str], label: str) -> None:
    for name in names:
        if not torch.isfinite(state[name]).all():
            raise ValueError(f"{label}: {name} holds a number that is not finite (NaN or infinity)")
