"""Recipe files and overrides as nested dicts."""

import copy

import pytest

from fulgurite.recipes.errors import UserError
from fulgurite.recipes.overrides import (
    Override,
    apply_overrides,
    load_recipe,
    parse_overrides,
    required_keys,
    resolve_references,
)

CONFIG = {
    "trainer": {
        "max_steps": 3,
        "callbacks": [
            {"class_path": "a.Merge", "init_args": {"n": 2}},
            {"class_path": "b.Save"},
            {"class_path": "c.Save", "init_args": {"k": 1}},
        ],
    },
    "model": {"class_path": "m.Module", "init_args": {"lr": 0.1, "model": {"hidden": 4}}},
}


def applied(*words):
    config = copy.deepcopy(CONFIG)
    places = apply_overrides(config, parse_overrides(words), "demo")
    return config, places


def refused(*words):
    with pytest.raises(UserError) as caught:
        applied(*words)
    return str(caught.value)


def test_three_spellings():
    words = ["--a.b", "1", "--c.d=2=3", "e.f=null", "--g", "-1"]
    assert parse_overrides(words) == [
        Override("a.b", "1"), Override("c.d", "2=3"), Override("e.f", "null"), Override("g", "-1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a.b"], "--a.b has no value: write --a.b VALUE."),
        (["--a.b", "--c.d", "1"], "--a.b has no value: write --a.b VALUE."),
        (["stray"], "'stray' belongs to no key: overrides are --key value or key=value."),
        (["--=3"], "'--=3' has no key: overrides are --key value or key=value."),
    ],
)
def test_words_that_are_no_override(words, message):
    with pytest.raises(UserError) as caught:
        parse_overrides(words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("4.0e-3", 4e-3), ("5E6", 5e6), ("1_000", 1000), (".5", 0.5), ("3.", 3.0), ("-2e2", -200.0),
        ("7", 7), ("true", True), ("null", None), ("[1, 2e1]", [1, 20.0]), ("{a: b}", {"a": "b"}),
        ("2024-01-01", "2024-01-01"),
        ("e5", "e5"), ("1-sqrt", "1-sqrt"), ("00:10:00", "00:10:00"), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_values_are_yaml_with_scientific_numbers(text, value):
    parsed = Override("k", text).value
    assert parsed == value
    assert type(parsed) is type(value)


def test_arguments_of_a_class_need_no_init_args():
    config, places = applied("--model.lr", "1e-3", "--model.new", "x", "--model.model.hidden", "8")
    assert config["model"]["init_args"] == {"lr": 1e-3, "new": "x", "model": {"hidden": 8}}
    assert set(places) == {
        ("model", "init_args", "lr"),
        ("model", "init_args", "new"),
        ("model", "init_args", "model", "hidden"),
    }


def test_list_items_by_class_and_by_index():
    config, places = applied("--trainer.callbacks.Merge.n", "5", "--trainer.callbacks.1.k", "7")
    assert config["trainer"]["callbacks"][:2] == [
        {"class_path": "a.Merge", "init_args": {"n": 5}},
        {"class_path": "b.Save", "init_args": {"k": 7}},
    ]
    assert ("trainer", "callbacks", 1, "init_args", "k") in places


def test_null_removes_an_item():
    config, _ = applied("--trainer.callbacks.Merge", "null")
    assert [item["class_path"] for item in config["trainer"]["callbacks"]] == ["b.Save", "c.Save"]


def test_a_class_is_replaced_by_naming_another():
    assert applied("--model", "my.Module")[0]["model"] == {"class_path": "my.Module", "init_args": {}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trainer.callbacks.Merg.n=1"],
            "demo has no Merg in trainer.callbacks. Did you mean trainer.callbacks.Merge?",
        ),
        (["trainer.callbacks.Zzzz.n=1"], "demo has no Zzzz in trainer.callbacks. It has Merge, Save or Save."),
        (
            ["trainer.callbacks.Save.n=1"],
            "trainer.callbacks.Save is there 2 times in demo: use trainer.callbacks.1 or trainer.callbacks.2.",
        ),
        (["trainer.max_steps.x=1"], "--trainer.max_steps.x: trainer.max_steps of demo is 3, which has no keys."),
        (["trainer.max_steps=[1,"], "--trainer.max_steps '[1,' is not valid YAML"),
    ],
)
def test_overrides_that_lead_nowhere(words, message):
    assert refused(*words).startswith(message.rstrip("."))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "r.yaml, line 3 is not valid YAML"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "r.yaml, line 4 is not valid YAML: the key 'c' is there twice."),
        ("- a\n", "r.yaml is not a recipe: expected the keys trainer, model and data, or task."),
        ("a: b\n\tc: d", "r.yaml, line 2 is not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert message in str(caught.value)


def test_required_keys_are_named_as_a_user_writes_them():
    config = {
        "data": {"class_path": "D", "init_args": {"source": "???"}},
        "trainer": {"callbacks": [{"class_path": "a.Cb", "init_args": {"n": "???"}}]},
    }
    assert list(required_keys(config)) == ["data.source", "trainer.callbacks.Cb.n"]


def test_references_take_the_value_of_another_key():
    config = {
        "model": {"class_path": "M", "init_args": {"model": {"a": 1}}},
        "data": {"tokenizer": "${model.model}", "b": "x${c}"},
    }
    resolve_references(config, "demo")
    assert config["data"] == {"tokenizer": {"a": 1}, "b": "x${c}"}
    config["data"]["tokenizer"]["a"] = 2
    assert config["model"]["init_args"]["model"] == {"a": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": "${b.c}", "b": {}}, "demo refers to ${b.c}, but has no such key."),
        ({"a": "${b}", "b": "${c}", "c": 1}, "demo refers to ${b}, which refers to ${c}: name the last one."),
    ],
)
def test_references_that_lead_nowhere(config, message):
    with pytest.raises(UserError) as caught:
        resolve_references(config, "demo")
    assert str(caught.value) == message
