"""Merging state dicts in memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .checks import LORA_FACTOR, check_lora, check_not_quantised, check_same_tensors, names_to_copy
from .numerics import DifferenceSum, accumulation_dtype
from .weights import merge_weights

Source = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Dtype = torch.dtype | str


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

    Integers, booleans and `_extra_state` are taken from the newest; what is tied in the newest is tied in the merge;
    inputs are not touched.

    Args:
        sources: state dicts, or functions that load one; a function is called once and its result dropped after use
            (three models are in memory at most).
        c: merge weights (n,), sum 1.
        accumulate_dtype: float32 or float64; wider tensors are summed in their own dtype.
        output_dtype: dtype of averaged tensors; "same" casts back to the stored one, which copied ones always keep.
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
    wide, target = parse_dtype(accumulate_dtype), None if output_dtype == "same" else parse_dtype(output_dtype)
    accumulation_dtype(torch.float32, wide)
    labels = [f"checkpoint {i}" for i in range(len(sources))]
    first = _read_source(sources[0])
    aliases = tied_names(first)
    signature = _signature(first, aliases)
    check_not_quantised(labels[0], signature)
    factors = check_lora(labels[0], signature, lora)
    copied = names_to_copy(signature, buffers, buffer_names, exclude)
    sums = {
        name: DifferenceSum(first[name].detach(), accumulation_dtype(dtype, wide))
        for name, (dtype, _) in signature.items()
        if name not in copied and name not in factors
    }
    adapters = {name: [first[name].detach()] for name in factors}
    check_finite(first, list(sums), labels[0])
    newest, ties, lacking = first, dict(aliases), dict[str, str]()
    for label, source, weight in zip(labels[1:], sources[1:], weights[1:], strict=True):
        del newest  # let go of one model before the next is loaded
        newest = _read_source(source)
        ties = tied_names(newest, signature)
        for name, owner in list(aliases.items()):
            if name not in newest:
                lacking.setdefault(name, label)
            elif ties.get(name, name) != ties.get(owner, owner):  # tied so far, a tensor of its own from here on
                if name in lacking:
                    raise ValueError(f"the checkpoints do not match: {name} is missing from {lacking[name]}")
                del aliases[name]
                signature[name] = signature[owner]
                copied = names_to_copy(signature, buffers, buffer_names, exclude)
                if name in copied:
                    continue
                if owner in sums:
                    sums[name] = sums[owner].fork()
                elif owner in adapters:
                    adapters[name] = list(adapters[owner])
                else:
                    raise ValueError(f"{name} is tied to {owner} in {labels[0]} but not in {label}: exclude both")
        ties = tied_names(newest, signature)
        own = {name for name in ties if name not in signature and ties[name] in signature}
        check_same_tensors([labels[0], label], [signature, _signature(newest, own)])
        check_finite(newest, list(sums), label)
        for name, total in sums.items():
            total.add(newest[name].detach().to(total.base.device), weight)
        for name in factors:
            adapters[name].append(newest[name].detach())
    merged: dict[str, Any] = {}
    averaged = list(sums)
    for name, value in newest.items():
        if name in ties:
            continue
        if name in sums:
            converts = target is not None and value.is_floating_point()
            merged[name] = sums.pop(name).result().to(target if converts else value.dtype, copy=True)
        elif name in adapters:
            merged[name] = merge_factor(name, adapters[name], weights, target)
        else:
            merged[name] = value.detach().clone() if isinstance(value, Tensor) else value
    result = {name: merged[ties.get(name, name)] for name in newest}
    check_finite(result, averaged, "the merge overflows its accumulation or output dtype")
    return result


def merge_factor(name: str, factors: Sequence[Tensor], c: Sequence[float], target: torch.dtype | None) -> Tensor:
    """Stack one LoRA factor over the checkpoints, so that B @ A is the weighted mean of the products.

    A (r, ...) is stacked along its first axis, B (out, r, ...) times its weight along its second.
    """
    is_a = LORA_FACTOR.search(name)["factor"] == "A"  # type: ignore[index]
    dtype = target or factors[0].dtype
    used = [(f, weight) for f, weight in zip(factors, c, strict=True) if weight != 0.0]
    wide = accumulation_dtype(factors[0].dtype)
    parts = [f.to(dtype) if is_a else (f.to(wide) * weight).to(dtype) for f, weight in used]
    return torch.cat(parts, dim=0 if is_a else 1).contiguous()


def parse_dtype(dtype: Dtype) -> torch.dtype:
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


def tied_names(state: Mapping[str, Any], preferred: Collection[str] = ()) -> dict[str, str]:
    """Names whose tensor is another name's, which is the first, or the first of the `preferred`."""
    owners: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in preferred):
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.device.type != "meta":
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            key = (local.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if owners.setdefault(key, name) != name:
                aliases[name] = owners[key]
    return aliases


def check_finite(state: Mapping[str, Any], names: Sequence[str], label: str) -> None:
    for name in names:
        if not torch.isfinite(state[name]).all():
            raise ValueError(f"{label}: {name} holds a number that is not finite (NaN or infinity)")
