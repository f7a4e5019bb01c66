"""Mistakes of the person at the keyboard, told in one line: what was wrong, what was expected, what to do.

`UserError` is the only exception that the command turns into a message without a traceback by itself. The helpers below
find the names nearest to a misspelt one, and turn type annotations into words.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator

USAGE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1
INTERRUPT_EXIT_CODE = 130


class UserError(Exception):
    """A mistake in what was asked for. `str(error)` is one line; the command prints it and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = USAGE_EXIT_CODE) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """The `limit` candidates that `name` was most likely meant to be, best first; empty if none is close.

    A dotted name is compared whole and by its last part, so that a forgotten prefix is found too; an abbreviation
    (`lr` for `learning_rate`) counts as close.
    """
    parent, _, leaf = name.rpartition(".")

    def score(candidate: str) -> float:
        candidate_parent, _, candidate_leaf = candidate.rpartition(".")
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        part = difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio()
        if candidate_parent == parent:
            abbreviation = 0.7 if len(leaf) > 1 and _is_subsequence(leaf, candidate_leaf) else 0.0
            return max(part, abbreviation)
        return 0.9 * (part if not parent else (whole + part) / 2)

    scored = sorted(
        ((score(candidate), candidate) for candidate in set(candidates)), key=lambda pair: (-pair[0], pair[1])
    )
    best = scored[0][0] if scored else 0.0
    margin = 0.1 if best >= 0.85 else 0.25  # an obvious slip needs no alternatives
    return [candidate for value, candidate in scored[:limit] if value >= 0.6 and value >= best - margin]


def did_you_mean(name: str, candidates: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """` Did you mean a, b or c?` for the candidates nearest to `name`, each written with `prefix`; else `otherwise`."""
    close = [prefix + candidate for candidate in nearest(name, candidates)]
    if not close:
        return f" {otherwise}" if otherwise else ""
    return f" Did you mean {join_or(close)}?"


def join_or(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def describe_type(annotation: object) -> str:
    """A type annotation in words: `int | None` -> `int or null`, `Literal["a", "b"]` -> `'a' or 'b'`."""
    return join_or(list(dict.fromkeys(_alternatives(annotation))))


def _alternatives(annotation: object) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        yield "null"
    elif annotation is bool:
        yield from ("true", "false")
    elif origin in (typing.Union, types.UnionType):
        for argument in sorted(arguments, key=lambda argument: argument is type(None)):
            yield from _alternatives(argument)
    elif origin is typing.Literal:
        yield from (repr(argument) for argument in arguments)
    elif origin is typing.Annotated:
        yield from _alternatives(arguments[0])
    elif origin is not None:
        name = getattr(origin, "__name__", str(origin))
        inner = ", ".join(describe_type(argument) for argument in arguments if argument is not Ellipsis)
        yield _PLAIN_NAMES.get(name, name) + (f" of {inner}" if inner else "")
    else:
        name = getattr(annotation, "__name__", str(annotation))
        yield _PLAIN_NAMES.get(name, name)


_PLAIN_NAMES = {
    "int": "int",
    "str": "string",
    "PathLike": "path",
    "Path": "path",
    "Sequence": "list",
    "Iterable": "list",
    "Mapping": "mapping",
    "dict": "mapping",
}


def _is_subsequence(short: str, long: str) -> bool:
    letters = iter(long)
    return all(letter in letters for letter in short)
