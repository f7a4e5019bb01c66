"""State dicts for a Hugging Face directory: gathered from shards, with the keys that transformers expects."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict; of a sharded model on the CPU, on rank 0 only (elsewhere empty). Collective."""
    if not is_sharded(model):
        return dict(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state


def huggingface_state_dict(model: "PreTrainedModel", state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state_dict` with Hugging Face keys, complete, each tied tensor once more under all of its names.

    Args:
        model: says which keys there are and which are tied.
        state_dict: keys of the Hugging Face model, or the same with the prefix `model.` (a LightningModule's).

    Raises:
        ValueError: unknown or missing keys (the first five are named), or two values for one tied tensor.
    """
    expected = set(model.state_dict())
    # Hugging Face's own names often start with `model.` too: the reading that knows more of the keys is meant.
    prefix = max(("", "model."), key=lambda prefix: sum(key.removeprefix(prefix) in expected for key in state_dict))
    result = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items()}
    if unknown := sorted(set(result) - expected):
        raise ValueError(
            f"the state dict has {len(unknown)} keys that {type(model).__name__} does not know: {unknown[:5]}; it must"
            " hold this architecture's keys, with or without the prefix 'model.'"
        )
    for name, source in model.all_tied_weights_keys.items():
        if {name, source} <= result.keys() and not torch.equal(result[name], result[source]):
            raise ValueError(f"{name} and {source} are tied in {type(model).__name__} but have different values")
        tied = result.get(source, result.get(name))
        if tied is not None:
            result[name] = result[source] = tied
    if missing := sorted(expected - set(result)):
        raise ValueError(f"the state dict lacks {len(missing)} of the model's tensors: {missing[:5]}")
    return result
