"""Packed documents do not see each other, whatever computes attention; what flash attention is told."""

import pytest
import torch

from fulgurite.lightning_modules.causal_lm import CausalLMModule
from fulgurite.lightning_modules.document_masks import attention_inputs, block_diagonal_mask, document_ids

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
A, B, C = 5, 7, 4  # lengths of three documents in a row


def packed(rows=2):
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(50, (rows, A + B + C), generator=generator)
    position_ids = torch.cat([torch.arange(n) for n in (A, B, C)]).expand(rows, -1).contiguous()
    return input_ids, position_ids


def logits_of(attn, input_ids, position_ids, attention_mask=None):
    module = CausalLMModule(LLAMA, attn_implementation=attn).eval()
    module.configure_model()
    with torch.no_grad():
        return module(input_ids, attention_mask, position_ids)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_each_documents_logits_are_those_of_the_document_alone(attn, with_mask):
    input_ids, position_ids = packed()
    mask = torch.ones_like(input_ids) if with_mask else None
    together = logits_of(attn, input_ids, position_ids, mask)
    for start, length in ((0, A), (A, B), (A + B, C)):
        alone = logits_of(attn, input_ids[:, start : start + length], None)
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_changing_one_document_changes_no_other(attn):
    input_ids, position_ids = packed()
    changed = input_ids.clone()
    changed[:, A : A + B] = (changed[:, A : A + B] + 1) % 50
    before, after = (logits_of(attn, ids, position_ids) for ids in (input_ids, changed))
    assert torch.equal(before[:, :A], after[:, :A])
    assert torch.equal(before[:, A + B :], after[:, A + B :])
    assert not torch.allclose(before[:, A : A + B], after[:, A : A + B])
    plain_before, plain_after = (logits_of(attn, ids, None) for ids in (input_ids, changed))
    assert not torch.allclose(plain_before[:, A + B :], plain_after[:, A + B :])  # without masking it does change them


def test_padding_and_documents_together():
    input_ids, position_ids = packed(rows=1)
    mask = torch.ones_like(input_ids)
    mask[:, -2:] = 0
    changed = input_ids.clone()
    changed[:, -2:] = 0
    before, after = (logits_of("sdpa", ids, position_ids, mask) for ids in (input_ids, changed))
    assert torch.equal(before[:, :-2], after[:, :-2])
    assert torch.isfinite(before).all()


def test_document_ids_and_mask_numbers():
    positions = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 5, 0, 0]])  # the second row starts inside a document
    assert document_ids(positions).tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 2]]
    mask = block_diagonal_mask(positions, torch.tensor([[1, 1, 1, 1, 0], [1] * 5]))
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],  # a padded query still sees itself, so that its softmax is defined
    ]


def test_flash_attention_gets_one_row_and_the_bounds_of_every_document():
    input_ids, position_ids = packed(rows=2)
    inputs = attention_inputs(input_ids, None, position_ids, "flash_attention_2")
    length = A + B + C
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 2 * length)
    bounds = [0, A, A + B, length, length + A, length + A + B, 2 * length]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == bounds
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == length
    rows_start_inside = torch.arange(3, 3 + length).expand(2, -1)
    bounds = attention_inputs(input_ids, None, rows_start_inside, "flash_attention_2")["cu_seq_lens_q"]
    assert bounds.tolist() == [0, length, 2 * length]  # rows never see each other, wherever they start


def test_flash_attention_refuses_padding_with_documents():
    input_ids, position_ids = packed(rows=1)
    mask = torch.ones_like(input_ids)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match=r"document masking .* or padding .*, not both"):
        attention_inputs(input_ids, mask, position_ids, "flash_attention_2")
