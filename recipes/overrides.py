"""Recipe files and the overrides of the command line, as plain nested dicts. Imports no torch: mistakes stay cheap.

A dotted key walks the recipe. `model.learning_rate` means `model.init_args.learning_rate`; an item of a list is named
by its class, or by its index: `trainer.callbacks.CheckpointMerge.num_checkpoints`. Values are YAML; `${model.model}`
stands for the value of another key.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, did_you_mean, join_or

REQUIRED = "???"  # the value of a key that the user must give
Place = tuple[str | int, ...]  # where a value sits in the nested recipe
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True)
class Override:
    """`--key value`; `text` is what was typed, `value` what YAML makes of it."""

    key: str
    text: str

    @property
    def value(self) -> Any:
        return parse_value(self.key, self.text)


class _Loader(yaml.SafeLoader):
    """YAML where 1e-3 is a number, a date is a string, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*|\.inf|\.Inf|\.INF)$|\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)  # fmt: skip


def load_recipe(path: Path) -> dict[str, Any]:
    """The content of a recipe file.

    Raises:
        UserError: not YAML (names the line), or not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where} is not valid YAML: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a recipe: expected the keys trainer, model and data, or task.")
    return content


def parse_value(key: str, text: str) -> Any:
    """The value of an override. Raises UserError when it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserError(f"--{key} {text!r} is not valid YAML: {problem}.") from error


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Overrides from `--key value`, `--key=value` and `key=value`.

    Raises:
        UserError: a key without value, or a word that belongs to no key.
    """
    overrides = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--"):
                raise UserError(f"{word!r} belongs to no key: overrides are --key value or key=value.")
            if index == len(words) or words[index].startswith("--"):
                raise UserError(f"--{key} has no value: write --{key} VALUE.")
            text = words[index]
            index += 1
        if not key or key.startswith("-"):
            raise UserError(f"{word!r} has no key: overrides are --key value or key=value.")
        overrides.append(Override(key, text))
    return overrides


def apply_overrides(config: dict[str, Any], overrides: Sequence[Override], recipe: str) -> dict[Place, Override]:
    """Set every override in `config`, in place. Returns where each one went.

    A `null` for an item of a list removes the item. Keys that the recipe does not have are added: whether a class takes
    them is for `validation.check_config` to say.

    Raises:
        UserError: the key runs through something that has no keys, or names a list item that is not there.
    """
    places = {}
    for override in overrides:
        place = _set(config, override, recipe)
        if place is not None:
            places[place] = override
    return places


def _set(config: dict[str, Any], override: Override, recipe: str) -> Place | None:
    node: Any = config
    place: list[str | int] = []
    parts = override.key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        here = ".".join(parts[:depth])
        if isinstance(node, dict):
            if is_class_node(node) and part not in CLASS_KEYS:
                node = node.setdefault("init_args", {}) or _fresh(node, "init_args")
                place.append("init_args")
            step: Any = part
        elif isinstance(node, list):
            step = _find_item(node, part, here, recipe)
            if last and override.value is None:
                del node[step]
                return None
        else:
            raise UserError(f"--{override.key}: {here} of {recipe} is {node!r}, which has no keys.")
        place.append(step)
        if last:
            old = node[step] if isinstance(node, list) else node.get(step)
            value = override.value
            if is_class_node(old) and isinstance(value, str):  # `--data my.module.MyData`
                value = {"class_path": value, "init_args": {}}
            node[step] = value
        elif isinstance(node, list):
            node = node[step]
        else:
            node = node[step] if node.get(step) is not None else _fresh(node, step)
    return tuple(place)


def _fresh(node: dict[str, Any], key: str | int) -> dict[str, Any]:
    node[key] = {}  # type: ignore[index]
    return node[key]  # type: ignore[index]


def _find_item(items: list[Any], name: str, key: str, recipe: str) -> int:
    names = [class_name(item) for item in items]
    if name in names:
        if names.count(name) > 1:
            indices = join_or([f"{key}.{index}" for index, other in enumerate(names) if other == name])
            raise UserError(f"{key}.{name} is there {names.count(name)} times in {recipe}: use {indices}.")
        return names.index(name)
    if name.isdecimal() and int(name) < len(items):
        return int(name)
    known = [other for other in names if other]
    otherwise = f"It has {join_or(known)}." if known else ""
    raise UserError(
        f"{recipe} has no {name} in {key}.{did_you_mean(name, known, prefix=f'{key}.', otherwise=otherwise)}"
    )


def resolve_references(config: dict[str, Any], recipe: str) -> None:
    """Replace each value `${other.key}` by that of the other key, in place.

    Raises:
        UserError: the other key is not there, or refers to a third one.
    """

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: resolve(value) for key, value in node.items()}
        if isinstance(node, list):
            return [resolve(value) for value in node]
        match = _REFERENCE.fullmatch(node) if isinstance(node, str) else None
        return look_up(match[1]) if match else node

    def look_up(key: str) -> Any:
        node: Any = config
        for part in key.split("."):
            if is_class_node(node) and part not in CLASS_KEYS:
                node = node.get("init_args") or {}
            if not isinstance(node, dict) or part not in node:
                raise UserError(f"{recipe} refers to ${{{key}}}, but has no such key.")
            node = node[part]
        if isinstance(node, str) and _REFERENCE.fullmatch(node):
            raise UserError(f"{recipe} refers to ${{{key}}}, which refers to {node}: name the last one.")
        # what is still to be given is asked for once, under its own key
        return f"${{{key}}}" if node == REQUIRED else copy.deepcopy(node)

    resolved = resolve(config)
    config.clear()
    config.update(resolved)


def is_class_node(value: Any) -> bool:
    """Whether `value` is `{class_path: ..., init_args: ...}`."""
    return isinstance(value, dict) and isinstance(value.get("class_path"), str)


def class_name(item: Any) -> str:
    """The bare class name of a list item, `""` if it is none."""
    return item["class_path"].rpartition(".")[2] if is_class_node(item) else ""


def required_keys(value: Any, key: str = "") -> Iterator[str]:
    """The dotted keys, as a user writes them, whose value is still `???`."""
    if value == REQUIRED:
        yield key
    elif isinstance(value, dict):
        for name, child in value.items():
            inner = key if name == "init_args" and is_class_node(value) else f"{key}.{name}".lstrip(".")
            yield from required_keys(child, inner)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from required_keys(child, f"{key}.{class_name(child) or index}")


def required_comment(text: str, key: str) -> str:
    """The comment behind `???` of `key` in a recipe's text: it says what to give."""
    leaf = re.escape(key.rpartition(".")[2])
    match = re.search(rf"^\s*-?\s*{leaf}:\s*\?\?\?\s*#\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
