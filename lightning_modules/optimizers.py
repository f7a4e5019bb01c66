"""AdamW's parameter groups, and gradient normalisation and clipping in one pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def decay_groups(module: nn.Module, weight_decay: float, *, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Two AdamW parameter groups: matrices with `weight_decay`, and the rest with none.

    Norm weights, biases, other vectors and scalars, and parameters marked `_no_weight_decay` (state-space models) are
    not decayed; embedding tables only with `decay_embeddings` (a table tied to the output head counts as a table).
    A shared parameter appears once; parameters that need no gradient do not appear.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    # Tables first, so that a tied head is met as the table it is.
    modules = sorted(module.modules(), key=lambda child: not isinstance(child, nn.Embedding))
    group_of: dict[nn.Parameter, list[nn.Parameter]] = {}
    for child in modules:
        is_norm = "norm" in type(child).__name__.lower()
        for name, parameter in child.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            no_decay = (
                is_norm
                or parameter.ndim < 2
                or name.endswith("bias")
                or getattr(parameter, "_no_weight_decay", False)
                or (isinstance(child, nn.Embedding) and not decay_embeddings)
            )
            group_of[parameter] = plain if no_decay else decayed
    for parameter in module.parameters():  # the model's own order, which checkpoints rely on
        if parameter.requires_grad:
            group_of[parameter].append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def scale_and_clip_(
    parameters: Iterable[Tensor],
    *,
    factor: float | Tensor = 1.0,
    max_norm: float | None = None,
    max_value: float | None = None,
    need_norm: bool = True,
) -> Tensor | None:
    """Multiplies gradients by `factor`, then clips them: one read for the norm, at most one read and write to scale.

        g <- factor * g;   norm = ||g||_2;   g <- g * min(1, max_norm / (norm + 1e-6))

    Works on sharded gradients (DTensor), whose norm is that of the whole model, and never waits for the device.

    Args:
        parameters: those without a gradient are passed over.
        factor: number or scalar tensor.
        max_norm: of all gradients together; None for no clipping.
        max_value: clamps each element to [-max_value, max_value] after scaling.
        need_norm: whether to compute the norm when nothing is clipped by it.

    Returns:
        The norm after scaling and before clipping, a scalar float32 tensor; None when not computed.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return None
    norm = None
    scale = factor
    if need_norm or max_norm is not None:
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm = norm.float() * factor
        if max_norm is not None:
            scale = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(scale, Tensor) or scale != 1.0:
        for group in _by_dtype_and_device([_local(grad) for grad in grads]):
            torch._foreach_mul_(group, scale.to(group[0].device) if isinstance(scale, Tensor) else scale)
    if max_value is not None:
        for group in _by_dtype_and_device([_local(grad) for grad in grads]):
            torch._foreach_clamp_min_(group, -max_value)
            torch._foreach_clamp_max_(group, max_value)
    return norm


def _by_dtype_and_device(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
