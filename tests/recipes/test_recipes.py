"""The packaged recipes: described, checked key by key against their classes, comparable, and of the size they claim."""

import copy

import pytest
import torch

from fulgurite.recipes.catalog import packaged_recipes
from fulgurite.recipes.overrides import REQUIRED, apply_overrides, load_recipe, parse_overrides, resolve_references
from fulgurite.recipes.validation import check_config

RECIPES = {recipe.name: recipe for recipe in packaged_recipes()}
PRETRAINING = ("pretrain/wsm", "pretrain/wsd", "pretrain/cosine")


def give(node):
    """A recipe in which whatever the user must give is given."""
    if isinstance(node, dict):
        return {key: give(value) for key, value in node.items()}
    if isinstance(node, list):
        return [give(value) for value in node]
    return "given" if node == REQUIRED else node


def checked(name, *words):
    config = give(load_recipe(RECIPES[name].path))
    places = apply_overrides(config, parse_overrides(words), name)
    resolve_references(config, name)
    check_config(config, name, "", places)
    return config


def test_the_family_is_complete():
    assert {*PRETRAINING, "pretrain/wsm-7b", "finetune/sft-from-merged"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_described_in_one_line_and_commented(name):
    lines = RECIPES[name].text().splitlines()
    assert 20 <= len(RECIPES[name].description) <= 100
    assert not RECIPES[name].description.endswith(".")
    assert len([line for line in lines if "#" in line]) >= 4
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_and_value_fits_its_class(name):
    """`check_config` refuses unknown keys, wrong types and missing arguments at any depth."""
    checked(name)


@pytest.mark.parametrize("name", [name for name in RECIPES if "task" not in load_recipe(RECIPES[name].path)])
def test_lightning_parses_what_the_check_lets_pass(name):
    from fulgurite.recipes.jobs import TrainingJob

    text = TrainingJob(checked(name), RECIPES[name]).text()
    assert "class_path: fulgurite.datamodules.text.TextDataModule" in text


def test_the_baselines_differ_in_their_schedule_only():
    """Otherwise their losses could not be compared: same model, text, order, steps, peak and validation."""
    configs = {name: checked(name) for name in PRETRAINING}
    schedule = {"schedule", "decay_steps", "decay_type", "min_lr_ratio"}
    reference = configs["pretrain/wsm"]
    for config in configs.values():
        assert config["data"] == reference["data"]
        assert config["seed_everything"] == reference["seed_everything"]
        arguments, expected = (copy.deepcopy(c["model"]["init_args"]) for c in (config, reference))
        for name in schedule:
            arguments.pop(name, None), expected.pop(name, None)
        assert arguments == expected
        trainers = [
            {key: value for key, value in c["trainer"].items() if key != "callbacks"} for c in (config, reference)
        ]
        assert trainers[0] == trainers[1]


def test_the_real_decay_spans_the_merge_window():
    """Branch at s_k - H, H = n T: both arms see the same steps (spec: WSD against a merge of duration H)."""
    merge = checked("pretrain/wsm")["trainer"]["callbacks"][0]["init_args"]
    wsd = checked("pretrain/wsd")
    assert wsd["model"]["init_args"]["decay_steps"] == merge["every_n_steps"] * merge["num_checkpoints"]
    assert wsd["trainer"]["max_steps"] % merge["every_n_steps"] == 0


def build_on_meta(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"vocab_size": 4096, **checked(name)["model"]["init_args"]["model"]}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def test_the_small_model_is_between_3_and_8_million_parameters():
    count = sum(parameter.numel() for parameter in build_on_meta("pretrain/wsm").parameters())
    assert 3e6 <= count <= 8e6


def test_the_large_model_is_llama_3_8b():
    """Parameter count and tensor shapes of the published Llama 3 8B."""
    model = build_on_meta("pretrain/wsm-7b")
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    layer = model.model.layers[31]
    assert layer.self_attn.k_proj.weight.shape == (1024, 4096)
    assert layer.mlp.down_proj.weight.shape == (4096, 14336)
    assert model.config.rope_parameters["rope_theta"] == 500000.0


def test_the_large_recipe_has_the_papers_global_batch():
    config = checked("pretrain/wsm-7b")
    trainer, data = config["trainer"], config["data"]["init_args"]
    sequences = trainer["num_nodes"] * trainer["devices"] * trainer["accumulate_grad_batches"] * data["batch_size"]
    assert (sequences, data["sequence_length"]) == (2048, 8192)
    merge = trainer["callbacks"][0]["init_args"]
    assert merge["every_n_steps"] * sequences * data["sequence_length"] == pytest.approx(25e9, rel=0.02)


def test_what_must_be_given_is_asked_for_with_its_comment(refusal):
    assert refusal("run", "pretrain/wsm-7b") == (
        "pretrain/wsm-7b needs --data.source (a folder of .parquet, .jsonl or .txt files, or the id of a hub data set) "
        "and --data.tokenizer (a directory, tokenizer.json or hub id with at most 128256 tokens)."
    )
    message = "needs --model.model (a Hugging Face directory, for example the `merged` folder of a run)."
    assert refusal("run", "finetune/sft-from-merged") == f"finetune/sft-from-merged {message}"


def test_the_tokenizer_of_a_fine_tuning_is_the_models():
    assert checked("finetune/sft-from-merged", "--model.model=some/dir")["data"]["init_args"]["tokenizer"] == "some/dir"
