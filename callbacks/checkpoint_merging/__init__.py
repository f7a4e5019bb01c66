"""WSM checkpoint merging (arXiv 2507.17634): the maths, merging files, merging while training, and the callback.

Names are loaded when first used, so that the maths needs nothing but numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import CheckpointMerge as CheckpointMerge
    from .merged_models import load_balance as load_balance
    from .merged_models import recompute_buffers as recompute_buffers
    from .offline import merge_checkpoints as merge_checkpoints
    from .state_dicts import merge_state_dicts as merge_state_dicts
    from .streaming import StreamingMerge as StreamingMerge
    from .weights import MergeWeights as MergeWeights
    from .weights import decay_coefficients as decay_coefficients
    from .weights import decay_to_merge_weights as decay_to_merge_weights
    from .weights import merge_to_decay_weights as merge_to_decay_weights
    from .weights import merge_weights as merge_weights

_HOMES = {
    "CheckpointMerge": "callback",
    "MergeWeights": "weights",
    "StreamingMerge": "streaming",
    "decay_coefficients": "weights",
    "decay_to_merge_weights": "weights",
    "load_balance": "merged_models",
    "merge_checkpoints": "offline",
    "merge_state_dicts": "state_dicts",
    "merge_to_decay_weights": "weights",
    "merge_weights": "weights",
    "recompute_buffers": "merged_models",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
