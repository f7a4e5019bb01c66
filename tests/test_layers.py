"""The layer rules of the house: who may import whom, what must be imported late, and that an import does nothing."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("callbacks", "datamodules", "kernels", "lightning_modules", "recipes")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "datamodules": {"datamodules"},
    "lightning_modules": {"lightning_modules", "kernels"},
    "callbacks": {"callbacks", "kernels"},
    "recipes": set(FOLDERS),
}
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy"}
# Big or optional: imported in the function that uses them.
LATE = {"vllm", "playwright", "himalaya", "mlflow.server", "datasets"}
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path):
    """recipes/cli.py -> fulgurite.recipes.cli, kernels/__init__.py -> fulgurite.kernels"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("fulgurite", *parts)).removesuffix(".__init__")


def package_of(path):
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def imports(path, *, top_level_only=False):
    """(absolute name, level, line) of every import of a file; `top_level_only` leaves out what runs later or never."""
    return list(_imports(path.read_text(encoding="utf-8"), package_of(path), top_level_only))


def _imports(source, package, top_level_only=False):
    pending = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            for alias in node.names:
                yield f"{base}.{alias.name}", node.level, node.lineno
        elif top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif top_level_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def violations(paths, problem):
    """`problem(path, name, level)` says what is wrong with an import, or None."""
    found = []
    for path in paths:
        for name, level, line in imports(path):
            if message := problem(path, name, level):
                found.append(f"{path.relative_to(ROOT)}:{line} {message}")
    return found


def test_every_folder_has_modules():
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(FOLDERS)


def test_folders_import_only_the_layers_below_them():
    def problem(path, name, level):
        parts = name.split(".")
        here = path.relative_to(ROOT).parts[0]
        if parts[0] == "fulgurite" and len(parts) > 1 and parts[1] not in MAY_IMPORT[here]:
            return f"{here} must not import {name}"
        return None

    assert violations(MODULES, problem) == []


def test_our_own_modules_are_imported_relatively():
    def problem(path, name, level):
        return f"writes `{name}`: import it relatively" if level == 0 and name.split(".")[0] == "fulgurite" else None

    assert violations(MODULES, problem) == []


def test_folder_names_are_never_imported_bare():
    """`import kernels` would find Hugging Face's package of that name."""

    def problem(path, name, level):
        return f"imports {name} bare" if level == 0 and name.split(".")[0] in FOLDERS else None

    everything = [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert violations(everything, problem) == []


def test_kernels_need_nothing_but_torch_triton_and_numpy():
    def problem(path, name, level):
        top = name.split(".")[0]
        allowed = KERNELS_MAY_IMPORT | set(sys.stdlib_module_names) | {"fulgurite"}
        return None if top in allowed else f"kernels must not import {name}"

    assert violations([path for path in MODULES if path.is_relative_to(ROOT / "kernels")], problem) == []


def test_heavy_packages_are_imported_where_they_are_used():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name} at the top"
        for path in MODULES
        for name, _, line in imports(path, top_level_only=True)
        if any(name == late or name.startswith(f"{late}.") for late in LATE)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ..kernels.a import b", [("fulgurite.kernels.a.b", 2)]),
        ("from . import weights", [("fulgurite.callbacks.weights", 1)]),
        ("from .. import recipes", [("fulgurite.recipes", 2)]),
        ("def f():\n    import vllm", [("vllm", 0)]),
        ("class A:\n    import vllm", [("vllm", 0)]),
    ],
)
def test_relative_and_nested_imports_are_seen(source, expected):
    assert [(name, level) for name, level, _ in _imports(source, "fulgurite.callbacks")] == expected


def test_late_imports_are_told_from_early_ones():
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    import d\n"
    assert sorted(name for name, _, _ in _imports(source, "fulgurite.recipes", top_level_only=True)) == ["a", "c"]


# Run in a fresh interpreter. What other packages do when they are first imported (font caches, CPU probes) is theirs,
# so they come first; then every act that an import of ours must not do is reported.
WATCHED_IMPORT = """
import importlib, json, os, sys, threading
ours, theirs = json.loads(sys.argv[1])
for name in theirs:
    try:
        importlib.import_module(name)
    except ImportError:
        try:
            getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2], None)
        except ImportError:
            pass
before = set(threading.enumerate())
acts, current = [], ""
def watch(event, arguments):
    starts = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "os.mkdir")
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in starts or writes:
        acts.append(f"{current}: {event} {arguments!r:.200}")
sys.addaudithook(watch)
sys.dont_write_bytecode = True
for current in ours:
    importlib.import_module(current)
threads = [thread.name for thread in threading.enumerate() if thread not in before]
print(json.dumps({"acts": acts, "threads": threads, "cuda": sys.modules["torch"].cuda.is_initialized()}))
"""


def test_importing_every_module_does_nothing(tmp_path):
    ours = [module_name(path) for path in MODULES]
    theirs = {name for path in MODULES for name, level, _ in imports(path, top_level_only=True) if level == 0}
    program = [sys.executable, "-c", WATCHED_IMPORT, json.dumps([ours, sorted(theirs)])]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"acts": [], "threads": [], "cuda": False}
    assert list(tmp_path.iterdir()) == []
