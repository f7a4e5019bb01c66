"""CausalLMModule in one process: the loss of the global batch, optimizer groups, logging, saving, errors."""

import importlib.util
import json
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from fulgurite.lightning_modules.causal_lm import CausalLMModule
from fulgurite.lightning_modules.pretraining import PretrainingModule

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)
STILL = 1e-12  # a learning rate that leaves the weights as they are, so that every step's gradient is comparable


def big_batch_gradients(batches, model=None, z_loss=0.0):
    """Gradient of the mean over all target tokens of `batches`, from plain torch and transformers."""
    module = CausalLMModule(model or tiny.LLAMA)
    module.configure_model()
    total, count = 0.0, 0
    for batch in batches:
        logits = module.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        logits, targets = logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
        total = total + F.cross_entropy(logits, targets, reduction="sum")
        if z_loss:
            total = total + z_loss * torch.logsumexp(logits, -1).square()[targets != -100].sum()
        count += int((targets != -100).sum())
    (total / count).backward()
    return {name: p.grad for name, p in module.named_parameters()}, (total / count).item()


def assert_same_gradients(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradient_is_that_of_the_mean_over_the_global_batchs_tokens(accumulate):
    """Padded batches; the last window of the epoch is short (5 batches, windows of 3)."""
    result = tiny.train(batches=5, accumulate=accumulate, learning_rate=STILL, keep_gradients=True, weight_decay=0.0)
    batches = [tiny.padded_batch(i) for i in range(5)]
    windows = [batches[i : i + accumulate] for i in range(0, 5, accumulate)]
    assert len(result["gradients"]) == len(windows)
    losses = [row["train_loss"] for row in result["rows"] if "train_loss" in row]
    for window, gradients, loss in zip(windows, result["gradients"], losses, strict=True):
        expected, expected_loss = big_batch_gradients(window)
        assert_same_gradients(gradients, expected, 1e-6)
        assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_a_mean_of_means_would_differ():
    """The batches of the test above are ones where averaging each micro-batch's mean is clearly wrong."""
    batches = [tiny.padded_batch(i) for i in range(3)]
    right, _ = big_batch_gradients(batches)
    parts = [big_batch_gradients([batch])[0] for batch in batches]
    scale = max(g.abs().max() for g in right.values())
    wrong = max((sum(part[name] for part in parts) / 3 - right[name]).abs().max() for name in right)
    assert wrong > 0.01 * scale


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.03), ("bf16-true", 0.06)])
def test_half_precisions_agree_with_the_float32_reference(precision, tolerance):
    result = tiny.train(batches=3, accumulate=3, precision=precision, learning_rate=STILL, keep_gradients=True)
    expected, loss = big_batch_gradients([tiny.padded_batch(i) for i in range(3)])
    assert_same_gradients(result["gradients"][0], expected, tolerance)
    assert result["rows"][0]["train_loss"] == pytest.approx(loss, rel=5e-3)


def test_uniform_token_counts_need_no_counting_and_short_windows_are_still_right():
    """uniform_token_count: 5 batches in windows of 3, and the gradient equals the reference in both windows."""
    result = tiny.train(
        batches=5, accumulate=3, uniform=True, learning_rate=STILL, keep_gradients=True, weight_decay=0.0
    )
    batches = [tiny.padded_batch(i, uniform=True) for i in range(5)]
    for window, gradients in zip((batches[:3], batches[3:]), result["gradients"], strict=True):
        assert_same_gradients(gradients, big_batch_gradients(window)[0], 1e-6)
    assert result["tokens_seen"] == 5 * 3 * 12


def test_z_loss_is_the_mean_squared_log_partition_and_is_not_in_train_loss():
    arguments = {"batches": 2, "accumulate": 2, "learning_rate": STILL, "keep_gradients": True, "weight_decay": 0.0}
    result = tiny.train(z_loss=0.1, **arguments)
    batches = [tiny.padded_batch(i) for i in range(2)]
    expected, with_z = big_batch_gradients(batches, z_loss=0.1)
    _, without_z = big_batch_gradients(batches)
    assert_same_gradients(result["gradients"][0], expected, 1e-6)
    assert result["rows"][0]["train_loss"] == pytest.approx(without_z, rel=1e-6)
    assert result["rows"][0]["z_loss"] == pytest.approx(with_z - without_z, rel=1e-5)


def test_clipping_and_the_logged_norm_are_those_of_the_normalised_gradient():
    free = tiny.train(batches=2, accumulate=2, learning_rate=STILL, keep_gradients=True)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free["gradients"][0].values()))
    assert free["rows"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = tiny.train(batches=2, accumulate=2, learning_rate=STILL, keep_gradients=True, clip=0.25 * norm)
    assert clipped["rows"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in free["gradients"][0].items():
        torch.testing.assert_close(clipped["gradients"][0][name], 0.25 * gradient, rtol=1e-4, atol=1e-8)


def test_what_is_logged_and_with_which_numbers():
    result = tiny.train(batches=4, accumulate=2, learning_rate=0.1, schedule="linear", max_steps=2)
    rows = [row for row in result["rows"] if "train_loss" in row]
    tokens = [int(tiny.padded_batch(i)["attention_mask"].sum()) for i in range(4)]
    assert [row["tokens_seen"] for row in rows] == [sum(tokens[:2]), sum(tokens)]
    assert result["tokens_seen"] == sum(tokens)
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.05])  # the rate that each step used
    assert all(row["train_ppl"] == pytest.approx(math.exp(row["train_loss"]), rel=1e-5) for row in rows)
    assert all(row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 for row in rows)
    assert all("train_bpb" not in row for row in rows)  # no byte lengths are known here


def test_bits_per_byte_count_the_bytes_of_the_targets():
    module = CausalLMModule(tiny.LLAMA)
    module.configure_model()
    module.token_byte_lengths = torch.arange(96)
    batch = tiny.padded_batch(0)
    sums = module.validation_sums(batch)
    targets = batch["labels"][:, 1:]
    assert sums[1] == (targets != -100).sum()
    assert sums[2] == targets[targets != -100].sum()
    logits = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    assert sums[0].item() == pytest.approx(expected, rel=1e-6)
    assert sums.dtype == torch.float64


def test_val_loss_is_the_mean_over_tokens_of_all_validation_batches():
    result = tiny.train(batches=1, learning_rate=STILL)
    row = next(row for row in result["rows"] if "val_loss" in row)
    _, expected = big_batch_gradients([tiny.padded_batch(100 + i) for i in range(4)])
    assert row["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert row["val_ppl"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_schedule_steps_once_an_optimizer_step_under_accumulation_and_goes_on_after_resume():
    arguments = {"batches": 6, "accumulate": 2, "schedule": "wsd", "warmup_steps": 2, "decay_steps": 4, "max_epochs": 4}
    whole = tiny.train(**arguments)
    rates = [row["lr"] for row in whole["rows"] if "lr" in row]
    assert len(rates) == 12  # 4 epochs of 3 optimizer steps: decay over the last 4 of them
    assert rates[:9] == pytest.approx([0.0, 0.005, *[0.01] * 7])
    assert rates[9:] == pytest.approx([0.01 * (1 - math.sqrt(t / 4)) for t in (1, 2, 3)])


def test_resume_is_bit_for_bit_and_loads_with_weights_only(tmp_path):
    arguments = {"batches": 3, "clip": 1.0, "learning_rate": 1e-2, "schedule": "inverse_sqrt", "warmup_steps": 2}
    whole = tiny.train(**arguments, max_epochs=4)
    first = tmp_path / "first.ckpt"
    tiny.train(**arguments, max_epochs=2, save=str(first))
    rest = tiny.train(**arguments, max_epochs=4, resume=str(first))
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, rest["weights"][name]), name
    assert whole["tokens_seen"] == rest["tokens_seen"]
    losses = [row["train_loss"] for row in whole["rows"] if "train_loss" in row]
    assert losses[6:] == [row["train_loss"] for row in rest["rows"] if "train_loss" in row]
    checkpoint = torch.load(first, weights_only=True)
    assert checkpoint["causal_lm"]["config"]["hidden_size"] == 32
    assert checkpoint["hyper_parameters"]["model"]["model_type"] == "llama"


def test_checkpoint_keys_are_the_models_own_also_with_compile(tmp_path):
    module = CausalLMModule(tiny.LLAMA, compile=True)
    module.configure_model()
    plain = CausalLMModule(tiny.LLAMA)
    plain.configure_model()
    assert list(module.state_dict()) == list(plain.state_dict()) == ["model." + key for key in plain.model.state_dict()]


def test_loading_a_checkpoint_is_strict(tmp_path):
    path = str(tmp_path / "a.ckpt")
    tiny.train(batches=1, save=path)
    module = CausalLMModule.load_from_checkpoint(path, weights_only=True)
    assert torch.equal(module.model.lm_head.weight, torch.load(path)["state_dict"]["model.lm_head.weight"])
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["state_dict"]["model.lm_head.weight"]
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match=r"Missing key.*model.lm_head.weight"):
        CausalLMModule.load_from_checkpoint(path, weights_only=True)


def test_decay_groups_hold_each_parameter_once_in_the_right_group():
    module = CausalLMModule(tiny.QWEN)
    module.configure_model()
    from fulgurite.lightning_modules.optimizers import decay_groups

    names = {parameter: name for name, parameter in module.model.named_parameters()}
    decayed, plain = ([names[p] for p in group["params"]] for group in decay_groups(module.model, 0.1))
    layer = "model.layers.0."
    assert layer + "self_attn.q_proj.weight" in decayed
    assert "model.embed_tokens.weight" in decayed
    assert {layer + "self_attn.q_proj.bias", layer + "input_layernorm.weight", "model.norm.weight"} <= set(plain)
    assert sorted(decayed + plain) == sorted(names.values())
    assert not [name for name in decayed if "norm" in name or name.endswith("bias")]
    groups = decay_groups(module.model, 0.1, decay_embeddings=False)
    assert "model.embed_tokens.weight" in [names[p] for p in groups[1]["params"]]  # also as a tied head
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_activation_checkpointing_changes_nothing_but_memory():
    arguments = {"batches": 2, "learning_rate": 1e-2}
    plain = tiny.train(**arguments)["weights"]
    recomputed = tiny.train(**arguments, activation_checkpointing=True)["weights"]
    for name, weight in plain.items():
        assert torch.equal(weight, recomputed[name]), name


@pytest.mark.slow
def test_compiled_layers_train_to_the_same_weights_within_rounding():
    plain = tiny.train(batches=2, learning_rate=1e-3)["weights"]
    compiled = tiny.train(batches=2, learning_rate=1e-3, compile=True)["weights"]
    for name, weight in plain.items():
        torch.testing.assert_close(compiled[name], weight, rtol=1e-4, atol=1e-4)


def test_bf16_true_keeps_the_rotary_frequencies_in_float32():
    module = CausalLMModule(tiny.LLAMA)
    module.configure_model()
    exact = module.model.model.rotary_emb.inv_freq.clone()
    module.to(torch.bfloat16)
    assert module.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(module.model.model.rotary_emb.inv_freq, exact)


def test_drawn_weights_depend_on_the_seed_alone(monkeypatch):
    def first_weight(**arguments):
        module = CausalLMModule(tiny.LLAMA, **arguments)
        module.configure_model()
        return module.model.model.layers[1].mlp.up_proj.weight

    torch.manual_seed(1)
    one = first_weight(init_seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(one, first_weight(init_seed=5))
    assert not torch.equal(one, first_weight(init_seed=6))
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert torch.equal(one, first_weight())
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # the caller's random numbers are left alone


def test_drawn_weights_have_the_architectures_own_distribution():
    module = CausalLMModule({**tiny.LLAMA, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05})
    module.configure_model()
    for layer in module.model.model.layers:
        assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.02)
        assert (layer.input_layernorm.weight == 1).all()
    a, b = (layer.mlp.up_proj.weight for layer in module.model.model.layers)
    assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02  # layers are drawn independently


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is negative"),
        ({"betas": [0.9, 1.0]}, r"betas=\[0.9, 1.0\] must be two numbers in \[0, 1\)"),
        ({"eps": 0.0}, "eps=0.0 must be positive"),
        ({"z_loss": -1.0}, "z_loss=-1.0 is negative"),
        ({"dtype": "fp8"}, "dtype='fp8' is unknown; use one of float32"),
        ({"schedule": "warmup"}, "schedule='warmup' is unknown.*warmup_stable"),
        ({"attn_implementation": "sdp"}, "cannot be built"),
    ],
)
def test_wrong_hyperparameters_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        CausalLMModule(tiny.LLAMA, **arguments).configure_model()


def test_a_schedule_longer_than_the_run_is_refused_before_the_model_is_built():
    with pytest.raises(ValueError, match=r"warmup_steps=6 \+ decay_steps=6 = 12 exceeds the run's 10"):
        tiny.train(max_steps=10, max_epochs=-1, schedule="wsd", warmup_steps=6, decay_steps=6)


def test_data_that_do_not_fit_the_model_are_refused_at_the_first_batch():
    with pytest.raises(ValueError, match=r"token id \d+ is outside the model's vocab_size=50"):
        tiny.train(model={**tiny.LLAMA, "vocab_size": 50})
    with pytest.raises(ValueError, match=r"sequences of 12 tokens exceed the model's max_position_embeddings=8"):
        tiny.train(model={**tiny.LLAMA, "max_position_embeddings": 8})


def test_unsupported_sharding_strategies_name_the_supported_one():
    module = CausalLMModule(tiny.LLAMA)
    module._trainer = type("T", (), {"strategy": pl.strategies.FSDPStrategy.__new__(pl.strategies.FSDPStrategy)})()
    with pytest.raises(ValueError, match="FSDPStrategy is not supported; use ModelParallelStrategy"):
        module.setup("fit")


def test_pretraining_module_has_the_papers_defaults():
    h = PretrainingModule(tiny.LLAMA, warmup_steps=7, z_loss=1e-4).hparams
    assert (h.schedule, h.warmup_steps, tuple(h.betas), h.weight_decay) == ("warmup_stable", 7, (0.9, 0.95), 0.1)
    assert (h.learning_rate, h.z_loss) == (4.78e-4, 1e-4)


def test_command_line_sets_single_fields_of_the_model(tmp_path):
    """What a recipe relies on: jsonargparse sees every argument, and one field of the config can be overridden."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(CausalLMModule, "model")
    config = {
        "class_path": "fulgurite.lightning_modules.pretraining.PretrainingModule",
        "init_args": {"model": tiny.LLAMA, "schedule": "wsd", "decay_steps": 3},
    }
    (tmp_path / "model.yaml").write_text(json.dumps({"model": config}))
    parser.add_argument("--config", action="config")
    arguments = ["--config", str(tmp_path / "model.yaml"), "--model.init_args.model.hidden_size", "64"]
    parsed = parser.parse_args([*arguments, "--model.init_args.z_loss", "1e-4"])
    module = parser.instantiate_classes(parsed).model
    assert isinstance(module, PretrainingModule)
    assert module.hparams.model["hidden_size"] == 64
    assert module.hparams.model["vocab_size"] == 96
    assert module.hparams.z_loss == 1e-4
