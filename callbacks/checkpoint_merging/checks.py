"""What cannot be averaged, or would be averaged wrongly, is refused here, by name."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from .numerics import is_averaged

Signature = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

LORA_FACTOR = re.compile(r"(?:^|\.)lora_(?:embedding_)?(?P<factor>[AB])(?=\.|$)")
_LORA_OTHER = re.compile(r"(?:^|\.)lora_magnitude_vector(?=\.|$)")
_QUANTISER = re.compile(
    r"^(?P<module>.*?)(?:\.?weight)?\.?(?P<companion>(?:nested_)?absmax|(?:nested_)?quant_map|quant_state(?:\..+)?|SCB"
    r"|qzeros|weight_scale(?:_inv)?|weight_packed)$"
)
_QUANTISED_DTYPES = (torch.int8, torch.uint8, torch.int32)
_FLOAT8 = tuple(
    dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype) and "float8" in name
)
_SHOWN = 5


def check_same_tensors(labels: Sequence[str], signatures: Sequence[Signature]) -> None:
    """All checkpoints hold the same names, shapes and dtypes as the first.

    Raises:
        ValueError: the first five differences, with the checkpoint that has them.
    """
    lines: list[str] = []
    first = signatures[0]
    for label, signature in zip(labels[1:], signatures[1:], strict=True):
        lines += [f"{name} is missing from {label}" for name in first if name not in signature]
        lines += [f"{name} is in {label} but not in {labels[0]}" for name in signature if name not in first]
        for name, (dtype, shape) in first.items():
            other_dtype, other_shape = signature.get(name, (dtype, shape))
            if other_shape != shape:
                lines.append(f"{name} has shape {other_shape} in {label}, {shape} in {labels[0]}")
            elif other_dtype != dtype:
                lines.append(f"{name} has dtype {other_dtype} in {label}, {dtype} in {labels[0]}")
    if lines:
        more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
        raise ValueError(f"the checkpoints do not match: {'; '.join(lines[:_SHOWN])}{more}")


def check_not_quantised(label: str, signature: Signature) -> None:
    """No tensor is a quantised weight: codes are not numbers that can be averaged.

    Raises:
        TypeError: names the tensor and the quantiser state beside it.
    """
    for name, (dtype, _) in signature.items():
        if dtype in _FLOAT8:
            raise TypeError(f"{label}: {name} is {dtype}: quantised parameters cannot be averaged; dequantise first")
    modules: dict[str, str] = {}
    for name in signature:
        if match := _QUANTISER.match(name):
            modules.setdefault(match["module"].rstrip("."), name)
    if not modules:
        return
    for name, (dtype, _) in signature.items():
        module = re.sub(r"\.?(?:weight|qweight)$", "", name)
        if dtype in _QUANTISED_DTYPES and module in modules and name != modules[module]:
            raise TypeError(
                f"{label}: {name} ({dtype}) is quantised (see {modules[module]}): quantised parameters cannot be "
                "averaged; dequantise first"
            )


def check_lora(label: str, names: Iterable[str], lora: str | None) -> list[str]:
    """Names of LoRA factors, which may only be merged as products.

    Raises:
        ValueError: factors are present and `lora` is not "merge_delta"; DoRA magnitudes are present.
    """
    if lora not in (None, "merge_delta"):
        raise ValueError(f"lora must be None or 'merge_delta', got {lora!r}")
    names = list(names)
    factors = [name for name in names if LORA_FACTOR.search(name)]
    if factors and lora is None:
        raise ValueError(
            f"{label} holds LoRA factors ({factors[0]}): averaging A and B separately is not averaging B @ A. Pass "
            "lora='merge_delta' to merge the products, or merge the adapters into their base first"
        )
    magnitudes = [name for name in names if _LORA_OTHER.search(name)]
    if magnitudes:
        raise ValueError(f"{label} holds DoRA magnitudes ({magnitudes[0]}), which cannot be averaged: merge them first")
    for name in factors:
        if lora_partner(name) not in names:
            raise ValueError(f"{label}: {name} has no partner {lora_partner(name)}")
    return factors


def lora_partner(name: str) -> str:
    """Name of the other factor."""

    def swap(match: re.Match[str]) -> str:
        return match.group(0)[:-1] + ("B" if match["factor"] == "A" else "A")

    return LORA_FACTOR.sub(swap, name)


def names_to_copy(
    signature: Signature, buffers: str, buffer_names: Collection[str] | None, exclude: Sequence[str]
) -> set[str]:
    """Names taken from the newest checkpoint instead of averaged.

    Args:
        buffers: "average", or "newest" to copy the tensors of `buffer_names`.
        exclude: shell-style patterns ("*.expert_bias") of further tensors to copy.

    Raises:
        ValueError: "newest" without names; a name or pattern that matches nothing.
    """
    if buffers not in ("average", "newest"):
        raise ValueError(f"buffers must be 'average' or 'newest', got {buffers!r}")
    copied = {name for name, (dtype, _) in signature.items() if not is_averaged(name, dtype)}
    if buffers == "newest":
        if buffer_names is None:
            raise ValueError(
                "buffers='newest' needs buffer_names: a state dict does not tell buffers from parameters "
                "(names of model.named_buffers())"
            )
        unknown = sorted(set(buffer_names) - set(signature))
        if unknown:
            raise ValueError(f"buffer_names that no checkpoint holds: {', '.join(unknown[:_SHOWN])}")
        copied |= set(buffer_names)
    elif buffer_names is not None:
        raise ValueError("buffer_names only has a meaning with buffers='newest'")
    for pattern in exclude:
        found = fnmatch.filter(signature, pattern)
        if not found:
            raise ValueError(
                f"exclude pattern {pattern!r} matches no tensor (names look like {next(iter(signature))!r})"
            )
        copied |= set(found)
    return copied
