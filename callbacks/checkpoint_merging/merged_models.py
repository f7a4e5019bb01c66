"""After a merge: the balance of its experts, and the batch-norm statistics that it should have."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn


def load_balance(token_loads: Any) -> dict[str, float]:
    """How far the busiest and the idlest expert are from the mean load (arXiv 2507.17634, section 4).

    Args:
        token_loads: tokens that each expert received, (layers, experts), or (experts,) of one layer.

    Returns:
        "max_violation" |max(l) - mu| / mu and "min_violation" |min(l) - mu| / mu, mu the layer's mean load, averaged
        over layers; 0 is perfect balance.

    Raises:
        ValueError: another number of dimensions, no expert, a load that is negative or not finite, a layer without any
            tokens.
    """
    loads = torch.as_tensor(token_loads).detach().double()
    if loads.ndim == 1:
        loads = loads[None]
    if loads.ndim != 2 or not loads.numel():
        raise ValueError(f"token_loads must be (layers, experts) or (experts,), got shape {tuple(loads.shape)}")
    if not (torch.isfinite(loads) & (loads >= 0)).all():
        raise ValueError("token_loads must be finite and not negative: they are numbers of tokens")
    mean = loads.mean(1)
    if not (mean > 0).all():
        raise ValueError(f"layer {int((mean > 0).int().argmin())} received no tokens")
    worst = {"max_violation": loads.amax(1), "min_violation": loads.amin(1)}
    return {name: float(((value - mean).abs() / mean).mean()) for name, value in worst.items()}


def recompute_buffers(model: nn.Module, loader: Iterable[Any]) -> None:
    """Recompute running means and variances of a merged model's batch norms, instead of averaging them.

    One pass without gradient through `torch.optim.swa_utils.update_bn`, on the model's device; each module is left in
    the mode, training or evaluation, that it was in.

    Args:
        model: changed in place.
        loader: batches, or tuples and lists of which the first is the model's input.

    Raises:
        ValueError: the model has no batch norm with running statistics, or the loader no batches.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    statistics = [norm.running_mean for norm in norms if norm.running_mean is not None]
    if not statistics:
        raise ValueError(f"{type(model).__name__} has no batch norm with running statistics: nothing to recompute")
    batches = iter(loader)
    try:
        first = next(batches)
    except StopIteration:
        raise ValueError("the loader gave no batch: running statistics cannot be recomputed") from None

    def all_batches() -> Iterator[Any]:
        yield first
        yield from batches

    modes = {module: module.training for module in model.modules()}
    try:
        update_bn(all_batches(), model, device=statistics[0].device)
    finally:
        for module, training in modes.items():
            module.training = training
