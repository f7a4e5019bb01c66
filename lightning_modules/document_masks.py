"""Keeps packed documents from seeing each other, for every attention implementation.

`position_ids` restart at 0 with each document. transformers (5.24) turns such position ids into a block-diagonal causal
mask by itself for sdpa, eager and flex attention, but only without an `attention_mask` and without a cache; for flash
attention only in a batch of one row: with more rows it silently lets documents attend to each other. The gaps are
closed here.
"""

from typing import Any

import torch
from torch import Tensor


def document_ids(position_ids: Tensor) -> Tensor:
    """Index (B, T) of each position's document in its row: a new one starts where positions do not go on by one."""
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return starts.cumsum(-1)


def block_diagonal_mask(position_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, 1, T, T) bool, True where a query may look: same document, not later, not padding; and always at itself."""
    documents = document_ids(position_ids)
    length = position_ids.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=position_ids.device)
    return (same & causal & attention_mask.bool()[:, None, :] | itself)[:, None]


def attention_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    attn_implementation: str,
) -> dict[str, Any]:
    """Keyword arguments for a Hugging Face forward; logits have input_ids' rows, or one flattened row (flash)."""
    if position_ids is None:
        return {"input_ids": input_ids, "attention_mask": attention_mask}
    if "flash" in attn_implementation:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(
                "flash attention takes document masking (position_ids) or padding (attention_mask), not both; let the"
                " data module pack full sequences, or set attn_implementation='sdpa'"
            )
        starts = torch.diff(position_ids, prepend=position_ids[:, :1], dim=-1) != 1
        starts[:, 0] = True
        bounds = starts.flatten().nonzero().flatten()
        bounds = torch.cat((bounds, bounds.new_tensor([input_ids.numel()]))).to(torch.int32)
        return {
            "input_ids": input_ids.reshape(1, -1),
            "position_ids": position_ids.reshape(1, -1),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": input_ids.shape[1],
            "max_length_k": input_ids.shape[1],
        }
    if attention_mask is not None:
        mask = block_diagonal_mask(position_ids, attention_mask)
        if attn_implementation == "eager":  # adds its mask to the scores
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, torch.finfo(torch.float32).min)
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
    return {"input_ids": input_ids, "position_ids": position_ids}
