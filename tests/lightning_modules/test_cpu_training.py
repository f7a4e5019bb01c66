"""The CPU leaf swaps compute what they replace: values and gradients, and only where they may."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fulgurite.lightning_modules import cpu_training
from fulgurite.lightning_modules.causal_lm import CausalLMModule
from fulgurite.lightning_modules.cpu_training import ATTENTION, speed_up_on_cpu
from fulgurite.lightning_modules.token_loss import shift_targets, token_cross_entropy

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gradients(model, input_ids, precision=torch.bfloat16, **inputs):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        logits = model(input_ids=input_ids, use_cache=False, **inputs).logits
    loss, _ = token_cross_entropy(logits, shift_targets(input_ids))
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), loss.item()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_swapped_model_is_as_close_to_float32_as_the_original(model_type):
    """Both are bfloat16 approximations of the same float32 gradient; the swap must not be a worse one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **LLAMA))
    input_ids = torch.randint(96, (4, 32))
    exact, exact_loss = gradients(model, input_ids, torch.float32)
    plain, plain_loss = gradients(model, input_ids)
    speed_up_on_cpu(model, attention=True, norms=True)
    swapped, swapped_loss = gradients(model, input_ids)
    assert not torch.equal(plain, swapped)  # the swap is in use
    plain_error, swapped_error = ((g - exact).norm() / exact.norm() for g in (plain, swapped))
    assert swapped_error < 1.25 * plain_error
    assert abs(swapped_loss - exact_loss) < max(1.5 * abs(plain_loss - exact_loss), 1e-3 * exact_loss)
    again, _ = gradients(model, input_ids, torch.float32)
    torch.testing.assert_close(again, exact, rtol=1e-4, atol=1e-4)  # in float32 the original code runs


def test_masks_evaluation_and_long_sequences_go_through_the_original_attention(monkeypatch):
    class Refuses:
        @staticmethod
        def apply(*_):
            raise AssertionError("the swap was used")

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
    input_ids = torch.randint(96, (2, 16))
    padding = torch.ones_like(input_ids)
    padding[0, 10:] = 0
    documents = torch.arange(16).remainder(8).expand(2, -1).contiguous()
    cases = ({"attention_mask": padding}, {"position_ids": documents})
    plain = [gradients(model, input_ids, **inputs)[0] for inputs in cases]
    speed_up_on_cpu(model, attention=True, norms=False)
    monkeypatch.setattr(cpu_training, "_CausalAttention", Refuses)
    with pytest.raises(AssertionError, match="the swap was used"):
        gradients(model, input_ids)
    for inputs, before in zip(cases, plain, strict=True):
        torch.testing.assert_close(gradients(model, input_ids, **inputs)[0], before, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=input_ids).logits).all()
    monkeypatch.setattr(cpu_training, "_MAX_LENGTH", 15)
    assert torch.isfinite(gradients(model, input_ids)[0]).all()


def test_only_what_was_asked_for_and_measured_is_swapped():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA), attn_implementation="eager")
    speed_up_on_cpu(model, attention=True, norms=False)
    assert model.config._attn_implementation == "eager"
    assert "forward" not in vars(model.model.norm)
    gemma = {**LLAMA, "head_dim": 16}
    gemma = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma", **gemma)
    )  # its norm multiplies by 1 + weight
    speed_up_on_cpu(gemma, attention=True, norms=True)
    assert "forward" not in vars(gemma.model.norm)
    assert gemma.config._attn_implementation == ATTENTION


def test_the_module_swaps_only_for_bf16_mixed_and_exports_nothing_of_it(tmp_path):
    module = CausalLMModule({**LLAMA, "model_type": "llama"})
    module.configure_model()
    assert module.model.config._attn_implementation == "sdpa"
    speed_up_on_cpu(module.model, attention=True, norms=True)
    module.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert ATTENTION not in module.model.config.to_json_string(use_diff=False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
