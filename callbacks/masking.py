"""Keeps secrets out of whatever is logged: by a key's name, by a value's look, and by what the environment holds.

Everything that goes to MLflow or into a message about a tracking server passes through here. The environment itself is
never logged.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SENSITIVE_WORDS = {
    "secret",
    "secrets",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "apikey",
}
_KEY_WORDS = {"api", "access", "private", "signing", "encryption"}
_TOKEN_WORDS = {
    "bos",
    "eos",
    "pad",
    "unk",
    "mask",
    "sep",
    "cls",
    "special",
    "image",
    "start",
    "end",
    "per",
    "stop",
    "bytes",
}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)[^/@\s'\"]+@")
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abp]-[\w\-]{10,}|AIza[\w\-]{30,}|dapi[0-9a-f]{32})"
)
_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][\w.\-]*)(?P<middle>[\"']?\s*[=:]\s*)(?P<quote>[\"']?)(?P<value>[^\s\"',}]+)"
)


def is_sensitive(name: str) -> bool:
    """Whether a key of this name holds a secret: `hub_token`, `API_KEY`, `db.password`; not `eos_token`, `tokens`."""
    last = re.split(r"[./]", str(name))[-1]
    words = [word.lower() for word in _WORDS.findall(last)]
    if _SENSITIVE_WORDS.intersection(words) or ("pwd" in words and len(words) > 1):
        return True
    pairs = list(itertools.pairwise(words))
    if any(first in _KEY_WORDS and second in ("key", "keys") for first, second in pairs):
        return True
    if words and words[-1] in ("token", "tokens"):
        before = words[-2] if len(words) > 1 else ""
        return before not in _TOKEN_WORDS if words[-1] == "token" else before in ("auth", "access", "api", "hub")
    return False


def mask_text(text: str) -> str:
    """Masks in free text: URLs' user info, tokens of known form, `name=value` of sensitive names, the environment's
    secrets."""
    for name, value in os.environ.items():
        if len(value) >= 6 and value in text and is_sensitive(name):
            text = text.replace(value, MASK)
    text = _KNOWN_TOKENS.sub(MASK, _URL_USERINFO.sub(rf"\g<scheme>{MASK}@", text))
    return _ASSIGNMENT.sub(_mask_assignment, text)


def _mask_assignment(match: re.Match[str]) -> str:
    value = match["value"]
    if not is_sensitive(match["name"]) or value in ("null", "None", "true", "false", "True", "False"):
        return match[0]
    return f"{match['name']}{match['middle']}{match['quote']}{MASK}"


def mask_value(name: str, value: Any) -> Any:
    """The value of one key, masked where its name or its look says so; containers are walked."""
    if isinstance(value, Mapping):
        return {key: mask_value(str(key), item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [mask_value(name, item) for item in value]
    if isinstance(value, str):
        return MASK if is_sensitive(name) and value else mask_text(value)
    return value


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--hub_token X`, `--hub_token=X`, `model.api_key=X`, URLs."""
    masked = []
    hide_next = False
    for argument in arguments:
        name = argument.lstrip("-")
        if hide_next and not argument.startswith("--"):
            masked.append(MASK)
        elif "=" in argument and is_sensitive(name.split("=", 1)[0]):
            masked.append(argument.split("=", 1)[0] + "=" + MASK)
        else:
            masked.append(mask_text(argument))
        hide_next = argument.startswith("-") and "=" not in argument and is_sensitive(name)
    return masked
