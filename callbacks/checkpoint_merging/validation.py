"""A validation pass with other weights that leaves the training run as it was, bit for bit.

The pass runs on the trainer's own validation data after the live pass and calls no hook but `validation_sums(batch)`
(or `validation_step` where the module has none). Weights are exchanged in place, so that compiled graphs, optimizers
and DDP buckets keep pointing at the same memory.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


def can_validate(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> str | None:
    """Why a second pass is impossible, or None when it is possible."""
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    if loader is None:
        return "there is no validation data"
    if hasattr(pl_module, "validation_sums"):
        return None
    if is_param_in_hook_signature(pl_module.validation_step, "dataloader_iter", explicit=True):
        return "validation_step(dataloader_iter) cannot be called a second time"
    return None


@torch.no_grad()
def validate(trainer: "pl.Trainer", pl_module: "pl.LightningModule", name: str) -> dict[str, float]:
    """Validation loss of the weights that `pl_module` holds now.

    Returns:
        `val_loss_<name>` (nats a target token, or the mean loss a sample when only `validation_step` exists) and
        `val_bpb_<name>` (bits a UTF-8 byte) where the byte counts are known; with several loaders also one of each a
        loader, with the suffix `_<i>`. All ranks return the same numbers.

    Raises:
        ValueError: `validation_step` returns no loss.
    """
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    loader = val_loop._combined_loader
    assert loader is not None
    num_loaders = val_loop.num_dataloaders if val_loop._is_sequential else 1
    device = trainer.strategy.root_device
    sums = torch.zeros(num_loaders, 3, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    validation_sums: Any = getattr(pl_module, "validation_sums", None)
    loader.limits = val_loop.max_batches
    for batch, batch_idx, loader_idx in loader:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=loader_idx)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=loader_idx)
        if validation_sums is not None:
            with trainer.precision_plugin.val_step_context():
                sums[loader_idx] += validation_sums(batch).to(sums)
        else:
            kwargs = val_loop._build_kwargs(batch, batch_idx, loader_idx if num_loaders > 1 else None)
            output = trainer.strategy.validation_step(
                *val_loop._build_step_args_from_hook_kwargs(kwargs, "validation_step")
            )
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):
                raise ValueError(
                    "merged weights cannot be validated: validation_step returned no loss. Return the loss, or give "
                    "the module validation_sums(batch) -> [summed loss, number of tokens, number of bytes]"
                )
            size = extract_batch_size(batch)
            sums[loader_idx, 0] += loss.to(sums).mean() * size
            sums[loader_idx, 1] += size
    if trainer.world_size > 1:
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
    metrics = _metrics(sums.sum(0), name, "")
    if num_loaders > 1:
        for i in range(num_loaders):
            metrics |= _metrics(sums[i], name, f"_{i}")
    return metrics


def _metrics(sums: Tensor, name: str, suffix: str) -> dict[str, float]:
    loss, count, num_bytes = sums.tolist()
    metrics = {f"val_loss_{name}{suffix}": loss / count if count else float("nan")}
    if num_bytes:
        metrics[f"val_bpb_{name}{suffix}"] = loss / float(np.log(2.0)) / num_bytes
    return metrics


@dataclass
class Backup:
    """Live tensors whose values are elsewhere while others stand in their place.

    `restore` gives each its own value back, whatever the state an exception or an interrupt has left, and can be called
    again should an interrupt have hit it.
    """

    # (live tensor, its own value, the tensor that its present value belongs to). The value is None once the third holds
    # it. Each step of `exchange` and `restore` leaves an entry from which `restore` can go on.
    entries: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)

    @torch.no_grad()
    def save(self, live: Tensor) -> None:
        """Keep a copy of a live tensor, which the caller then overwrites."""
        self.entries.append((live, live.clone(), None))

    @torch.no_grad()
    def exchange(self, live: Tensor, merged: Tensor) -> None:
        """Exchange the values of a live tensor and its merge in place; needs the memory of one tensor."""
        value = live.clone()
        self.entries.append((live, value, None))
        live.copy_(merged)
        self.entries[-1] = (live, value, merged)
        merged.copy_(value)
        self.entries[-1] = (live, None, merged)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all `save` and `exchange` calls."""
        while self.entries:
            live, value, merged = self.entries[-1]
            if merged is not None:
                value = merged.clone() if value is None else value
                self.entries[-1] = (live, value, merged)
                merged.copy_(live)
                self.entries[-1] = (live, value, None)
            assert value is not None
            live.copy_(value)
            self.entries.pop()


@contextmanager
def untouched(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Iterator[None]:
    """Undo everything a validation pass may leave behind besides its result.

    Covers random states (Python, NumPy, torch on CPU and on the device, generators of the validation loaders), buffers,
    attributes of the module and its children that are numbers, strings, tensors or containers (among them train/eval
    mode and torchmetrics states), and silences `self.log`.
    """
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        device = trainer.strategy.root_device
        undo.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        for generator in _loader_generators(trainer):
            undo.callback(generator.set_state, generator.get_state())
        for buffer in pl_module.buffers():
            if not buffer.is_meta:
                undo.callback(buffer.copy_, buffer.clone())
        for module in pl_module.modules():
            for key, value in list(vars(module).items()):
                if key not in _MODULE_INTERNALS:
                    _undo_attribute(undo, module, key, value)
            if isinstance(module, pl.LightningModule):
                for log in ("log", "log_dict"):
                    undo.callback(module.__dict__.pop, log, None)
                    module.__dict__[log] = _silent
        yield


def _silent(*args: Any, **kwargs: Any) -> None:
    """Stands in for `LightningModule.log` during a pass whose metrics are returned, not logged."""


def _undo_attribute(undo: ExitStack, module: nn.Module, key: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if not value.is_meta and not isinstance(value, nn.Parameter):
            undo.callback(value.copy_, value.detach().clone())
    elif isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, (list, dict, set, deque)):
        for put_back in _put_back(value, set()):
            undo.callback(put_back)
    elif value is not None and not isinstance(value, (bool, int, float, complex, str, bytes, tuple)):
        return
    undo.callback(module.__dict__.__setitem__, key, value)


def _put_back(container: Any, seen: set[int]) -> Iterator[Callable[[], None]]:
    """Functions that give a container, and the containers in it, their present items back."""
    if id(container) in seen:
        return
    seen.add(id(container))
    items = copy.copy(container)

    def put_back() -> None:
        container.clear()
        container.update(items) if isinstance(container, (dict, set)) else container.extend(items)

    yield put_back
    for item in items.values() if isinstance(items, dict) else items:
        if isinstance(item, (list, dict, set, deque)):
            yield from _put_back(item, seen)


def _loader_generators(trainer: "pl.Trainer") -> Iterator[torch.Generator]:
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    seen: set[int] = set()
    for part in loader.flattened if loader is not None else ():
        sampler = getattr(part, "sampler", None)
        batch_sampler = getattr(part, "batch_sampler", None)
        for owner in (part, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator
