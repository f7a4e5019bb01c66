"""Builds a Hugging Face causal LM: initialised or loaded, whole or sharded as it is filled.

The model is laid out on the meta device and filled one unit at a time: each decoder layer, then what is outside them
(embeddings, final norm, head). Under FSDP2 a unit is sharded as soon as it is filled, so a rank never holds more than
its shards and one full unit. Random numbers are seeded a unit by (seed, unit name), which makes the initial weights the
same in a single process, under DDP and under FSDP2 with any number of ranks (on the same kind of device).
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .model_sources import ModelSource, weights_directory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


def decoder_layers(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The blocks that are sharded, checkpointed and compiled as one, by name.

    Those whose class the architecture names in `_no_split_modules`, else the elements of the longest `ModuleList`.
    """
    wanted = set(model._no_split_modules or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        # FSDP2 renames the class of what it shards; the original name is in its bases.
        if not inside and any(base.__name__ in wanted for base in type(module).__mro__):
            found[name] = module
    if not found:
        lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        if lists:
            name, longest = max(lists, key=lambda item: len(item[1]))
            found = {f"{name}.{index}": layer for index, layer in enumerate(longest)}
    return found


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        empty.__dict__.update(tensor.__dict__)
    return empty


def _materialise(module: nn.Module, device: torch.device, memo: dict[int, Tensor]) -> None:
    """Gives every meta tensor under `module` uninitialised memory; tensors shared by several modules stay shared."""
    for submodule in module.modules():
        tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in memo:
                        memo[id(tensor)] = _empty_like(tensor, device)
                    tensors[name] = memo[id(tensor)]


def _initialise(module: nn.Module, owner: "PreTrainedModel", done: set[nn.Module]) -> None:
    """The architecture's own initialisation of `module` and what is below it, children first, as transformers does."""
    from transformers import PreTrainedModel

    if module in done:
        return
    done.add(module)
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner, done)
    owner._init_weights(module)


def _unit_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


class _SafetensorsDirectory:
    """Reads single tensors of a (possibly split) safetensors checkpoint."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        handles = [safe_open(directory / file, framework="pt") for file in files]
        self._handle_of = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118

    def covers(self, model: "PreTrainedModel") -> bool:
        """Whether the stored names are the model's own, so that no conversion is needed."""
        names = {name for name, _ in model.named_parameters()}  # a tied tensor once, under its first name
        tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        return names - tied <= self._handle_of.keys() and (not tied or bool(tied & self._handle_of.keys()))

    def fill(self, module: nn.Module, prefix: str, done: set[nn.Module]) -> None:
        """Copies the tensors of `module` and what is below it, but for modules that are `done`."""
        for name, submodule in module.named_modules(prefix=prefix):
            if submodule in done:
                continue
            for key, tensor in submodule.named_parameters(prefix=name, recurse=False):
                if key in self._handle_of:
                    tensor.copy_(self._handle_of[key].get_tensor(key))
                    tensor._is_hf_initialized = True  # transformers' initialisation leaves such tensors alone


def lay_out_model(
    source: ModelSource, config: "PretrainedConfig", *, dtype: torch.dtype, attn_implementation: str | None = None
) -> "PreTrainedModel":
    """The model on the meta device: names, shapes and ties, no memory.

    Raises:
        ValueError: the config's values do not make a model, or the attention implementation is not available.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    except (ValueError, ImportError, ArithmeticError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(f"model={source.value!r} cannot be built: {error}") from error
    model.tie_weights()
    return model


def build_model(
    source: ModelSource,
    config: "PretrainedConfig",
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
    wrap: Callable[[nn.Module], Any] | None = None,
) -> "PreTrainedModel":
    """The model of `source`, filled, on `device`.

    Args:
        source: says whether weights are drawn (a config) or loaded.
        config: its configuration, completed (vocabulary size).
        seed: of the random initialisation.
        dtype: of the parameters.
        device: where units are filled; under FSDP2 the mesh's device.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...; None lets transformers choose.
        wrap: called with each decoder layer once it is filled, and at last with the model: shards it.

    Raises:
        ValueError: the config's values do not make a model, or the attention implementation is not available.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import guard_torch_init_functions

    if source.kind != "config" and wrap is None:
        model = AutoModelForCausalLM.from_pretrained(
            weights_directory(source), config=config, dtype=dtype, attn_implementation=attn_implementation
        )
        return model.to(device)
    model = lay_out_model(source, config, dtype=dtype, attn_implementation=attn_implementation)
    reader = None
    if source.kind != "config":
        directory = Path(weights_directory(source))
        if directory.is_dir() and any(directory.glob("model*.safetensors")):
            reader = _SafetensorsDirectory(directory)
        if reader is None or not reader.covers(model):
            log.warning("%s is loaded whole in every process before it is sharded", source.value)
            whole = AutoModelForCausalLM.from_pretrained(
                weights_directory(source), config=config, dtype=dtype, attn_implementation=attn_implementation
            )
            return shard_filled(whole, wrap)
    memo: dict[int, Tensor] = {}
    done: set[nn.Module] = set()
    # Rotary tables and other buffers are not stored: _init_weights fills them when weights are loaded, too.
    with torch.no_grad(), guard_torch_init_functions():
        for name, unit in [*decoder_layers(model).items(), ("", model)]:
            _materialise(unit, device, memo)
            if reader is not None:
                reader.fill(unit, name, done)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(_unit_seed(seed, name))
                _initialise(unit, model, done)
            if unit is model:
                model.tie_weights()
            if wrap is not None:
                wrap(unit)
    return model.train()


def shard_filled(model: "PreTrainedModel", wrap: Callable[[nn.Module], Any] | None) -> "PreTrainedModel":
    """Calls `wrap` on each decoder layer and then on the model."""
    if wrap is not None:
        for unit in [*decoder_layers(model).values(), model]:
            wrap(unit)
    return model


def fsdp_wrap(mesh: "DeviceMesh", compute_dtype: torch.dtype | None) -> Callable[[nn.Module], Any]:
    """A function that shards a module over the one-dimensional `mesh` (FSDP2).

    Args:
        mesh: the data-parallel mesh.
        compute_dtype: of the gathered parameters and activations; gradients are then reduced in float32. None keeps
            the parameters' dtype throughout.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)

    def wrap(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy)

    return wrap


def rotary_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Float32 buffers that are not saved (rotary tables): (module, name, tensor)."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype == torch.float32:
                yield module, name, buffer
