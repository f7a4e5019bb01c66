"""Checks a recipe against the classes it names, before anything is built: every mistake is one line that names the key.

jsonargparse would refuse the same mistakes, but tries every member of every union and prints all their refusals. Here
each key is looked up in the signature of its class, and each value is checked alone against its parameter's annotation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import pkgutil
import sys
import typing
from collections.abc import Iterator
from typing import Any

from .catalog import RECIPES_FOLDER
from .errors import UserError, describe_type, did_you_mean
from .overrides import CLASS_KEYS, REQUIRED, Override, Place, class_name, is_class_node, required_comment, required_keys


def check_config(
    config: dict[str, Any], recipe: str, text: str = "", places: dict[Place, Override] | None = None
) -> None:
    """Check all keys and values of a recipe. Values typed on the command line become strings where a string is wanted.

    Args:
        config: the recipe with its overrides; corrected in place.
        recipe: its name, for messages.
        text: the recipe's text: the comment behind a `???` says what to give.
        places: where each override went (`apply_overrides`).

    Raises:
        UserError: an unknown key or class, a value of the wrong type, or a value that is still to be given.
    """
    _Checker(config, recipe, places or {}).check()
    missing = []
    for key in required_keys(config):
        comment = required_comment(text, key).rstrip(".")
        missing.append(f"--{key} ({comment})" if comment else f"--{key}")
    if missing:
        raise UserError(f"{recipe} needs {' and '.join(missing)}.")


@functools.cache
def parameters(target: Any) -> dict[str, Any]:
    """The parameters of a class or function by name, also those that it hands on through `**kwargs`."""
    from jsonargparse._parameter_resolvers import get_signature_parameters

    found = get_signature_parameters(target, "__init__" if inspect.isclass(target) else None, logger=False)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {parameter.name: parameter for parameter in found if parameter.kind not in kinds}


def import_class(path: str, key: str, recipe: str) -> type:
    """The class called `path`.

    Raises:
        UserError: there is none; names the nearest class or module.
    """
    module_name, _, name = path.rpartition(".")
    problem = f"{recipe}: {key}.class_path {path!r}"
    if not module_name:
        raise UserError(f"{problem} needs its module in front: package.module.{name}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise UserError(f"{problem} cannot be imported: {error}.") from error
        raise UserError(f"{problem}: there is no module {error.name}.{_nearest_module(error.name)}") from error
    except Exception as error:  # the module is the user's own: whatever its import does
        raise UserError(f"{problem} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [other for other, value in vars(module).items() if inspect.isclass(value)]
        hint = did_you_mean(name, known, prefix=f"{module_name}.")
        raise UserError(f"{problem}: {module_name} has no class {name}.{hint}")
    return found


def _nearest_module(name: str) -> str:
    """A hint for a module that does not exist, from what its package holds."""
    package, _, leaf = name.rpartition(".")
    paths = list(getattr(sys.modules.get(package), "__path__", [])) if package else None
    known = [info.name for info in pkgutil.iter_modules(paths)]
    if package == "fulgurite":  # an editable install does not list its folders
        known += [path.parent.name for path in RECIPES_FOLDER.parent.glob("*/__init__.py")]
    return did_you_mean(leaf, known, prefix=f"{package}." if package else "")


def convert(value: Any, annotation: Any) -> Any:
    """`value` as the type `annotation` wants it. Raises TypeError or ValueError where it does not fit."""
    from jsonargparse import ArgumentError, ArgumentParser

    if annotation is inspect.Parameter.empty or annotation is Any:
        return value
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=annotation)
    except ValueError:  # a type that jsonargparse does not know
        return value
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return parser.parse_object({"value": value}).value
        except (ArgumentError, SystemExit) as error:
            raise TypeError(str(error)) from error


class _Checker:
    def __init__(self, config: dict[str, Any], recipe: str, places: dict[Place, Override]) -> None:
        self.config, self.recipe, self.places = config, recipe, places
        self.sections: dict[str, type | None] = {}

    def check(self) -> None:
        from lightning.pytorch import LightningDataModule, LightningModule, Trainer

        if "task" in self.config:
            self.sections = {"task": None, "seed_everything": None}
        else:
            self.sections = {"trainer": Trainer, "model": LightningModule, "data": LightningDataModule}
        for key in self.config:
            if key not in (*self.sections, "seed_everything"):
                self.unknown_key(_first_leaf(key, self.config[key]))
        self.check_seed()
        if "task" in self.config:
            self.check_class(self.config["task"], ("task",), "task", None)
            return
        if "model" not in self.config:
            raise UserError(f"{self.recipe} has no model: a recipe has the keys trainer, model and data, or task.")
        self.check_arguments(self.config.setdefault("trainer", {}) or {}, ("trainer",), "trainer", Trainer)
        for key in ("model", "data"):
            if self.config.get(key) is not None:
                self.check_class(self.config[key], (key,), key, self.sections[key])

    def check_seed(self) -> None:
        seed = self.config.get("seed_everything")
        if seed is not None and not isinstance(seed, bool | int):
            raise UserError(f"{self.recipe}: seed_everything is {seed!r}; expected int, true or false.")

    def check_class(self, node: Any, place: Place, key: str, base: type | None) -> None:
        if not is_class_node(node):
            raise UserError(f"{self.recipe}: {key} is {_short(node)}; expected class_path and init_args.")
        for name in node:
            if name not in CLASS_KEYS:
                self.unknown_key(f"{key}.{name}", f"It belongs under {key}.init_args.")
        found = import_class(node["class_path"], key, self.recipe)
        if base is not None and not (inspect.isclass(found) and issubclass(found, base)):
            raise UserError(f"{self.recipe}: {key}.class_path {node['class_path']!r} is not a {base.__name__}.")
        arguments = node.get("init_args") or {}
        self.check_arguments(arguments, (*place, "init_args"), key, found)
        given = {*arguments, *(node.get("dict_kwargs") or {})}
        for name, parameter in parameters(found).items():
            if parameter.default is inspect.Parameter.empty and name not in given:
                kind = describe_type(parameter.annotation)
                raise UserError(f"{self.recipe} needs --{key}.{name} ({kind}): {found.__name__} has no default for it.")

    def check_arguments(self, arguments: Any, place: Place, key: str, target: Any) -> None:
        if not isinstance(arguments, dict):
            raise UserError(f"{self.recipe}: {key} is {_short(arguments)}; expected a mapping of keys to values.")
        known = parameters(target)
        for name, value in arguments.items():
            if name not in known:
                self.unknown_key(_first_leaf(f"{key}.{name}", value))
            annotation = known[name].annotation
            if value is None and known[name].default is None:
                continue
            if value is None and not _takes_null(annotation):
                raise UserError(f"{self.recipe}: {key}.{name} is null; expected {describe_type(annotation)}.")
            arguments[name] = self.check_value(value, (*place, name), f"{key}.{name}", annotation)

    def check_value(self, value: Any, place: Place, key: str, annotation: Any) -> Any:
        if is_class_node(value):
            self.check_class(value, place, key, None)
            return value
        if isinstance(value, list) and any(is_class_node(item) for item in value):
            for index, item in enumerate(value):
                if is_class_node(item):
                    self.check_class(item, (*place, index), f"{key}.{class_name(item)}", None)
            return value
        if value == REQUIRED:
            return value
        try:
            converted = convert(value, annotation)
        except (TypeError, ValueError):
            typed = self.places.get(place)
            if typed is not None and not isinstance(value, str):
                with contextlib.suppress(TypeError, ValueError):
                    return convert(typed.text, annotation)
            shown = typed.text if typed is not None else value
            raise UserError(f"{self.recipe}: {key} is {_short(shown)}; expected {describe_type(annotation)}.") from None
        # keep plain YAML values: the final parse builds paths, timedeltas and the like
        return value if not isinstance(converted, bool | int | float | str) else converted

    def unknown_key(self, key: str, otherwise: str = "") -> None:
        known = list(self.all_keys())
        siblings: list[str] = []
        parent = key
        while parent and not siblings:
            parent = parent.rpartition(".")[0]
            siblings = [other for other in known if other.rpartition(".")[0] == parent]
        listed = f"{parent or self.recipe} has the keys {', '.join(key.rpartition('.')[2] for key in siblings)}."
        hint = did_you_mean(key, known, otherwise=otherwise or listed)
        raise UserError(f"{self.recipe} has no key {key}.{hint}")

    def all_keys(self) -> Iterator[str]:
        """Every dotted key of this recipe, for suggestions."""
        yield "seed_everything"
        for section, base in self.sections.items():
            node = self.config.get(section)
            yield section
            if section == "trainer":
                for name in parameters(base):
                    yield f"trainer.{name}"
                for name, value in (node or {}).items():
                    yield from _class_keys(f"trainer.{name}", value)
            else:
                yield from _class_keys(section, node)


def _class_keys(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            if is_class_node(item):
                yield from _class_keys(f"{key}.{class_name(item)}", item)
    elif is_class_node(value):
        with contextlib.suppress(Exception):
            for name in parameters(import_class(value["class_path"], key, "")):
                yield f"{key}.{name}"
        for name, child in (value.get("init_args") or {}).items():
            yield from _class_keys(f"{key}.{name}", child)


def _takes_null(annotation: Any) -> bool:
    if annotation in (Any, inspect.Parameter.empty, None, type(None)):
        return True
    return type(None) in typing.get_args(annotation)


def _first_leaf(key: str, value: Any) -> str:
    while isinstance(value, dict) and value and not is_class_node(value):
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
