"""The wheel, installed outside the repository in an environment of its own: all of the tree is in it, and it works.

No network: the environment borrows the dependencies of the one that runs the tests, but not its editable `fulgurite`
(a path in a .pth file does not bring that folder's own .pth files along).
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("callbacks", "datamodules", "kernels", "lightning_modules", "recipes")


def run(*command, folder, **environment):
    """Standard output of a command that must succeed, with nothing of the repository in its environment."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FULGURITE_RUN_DIR")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of a copy of the tracked files: setuptools leaves its build folder beside what it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).split("\0")
    for name in filter(None, tracked):
        if (
            name.split("/")[0] in (*FOLDERS, "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
            and (ROOT / name).is_file()
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, folder=source)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The bin folder of an environment that holds the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    (Path(packages) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, folder=folder)
    return folder / "bin"


def test_the_wheel_holds_the_tree_and_nothing_else(wheel):
    expected = {
        f"fulgurite/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_commands_and_recipes_are_installed(installed, tmp_path):
    where = run(installed / "python", "-c", "import fulgurite.recipes.cli as cli; print(cli.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    names = [path.relative_to(ROOT / "recipes").with_suffix("") for path in (ROOT / "recipes").glob("*/*.yaml")]
    for command in ("lightning", "fulgurite"):
        listed = run(installed / command, "list", folder=tmp_path)
        assert all(str(name) in listed for name in names)
    assert run(installed / "lightning", "show", "pretrain/wsm", folder=tmp_path) == (
        ROOT / "recipes/pretrain/wsm.yaml"
    ).read_text(encoding="utf-8")


def test_the_main_job_runs_from_the_wheel(installed, tmp_path):
    (tmp_path / "text").mkdir()
    for index in range(30):
        (tmp_path / f"text/{index}.txt").write_text(f"Document {index} says {'this and that, ' * 60}and ends.")
    small = ["--trainer.max_steps=6", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=1"]
    small += ["--model.model.hidden_size=32", "--model.model.intermediate_size=64", "--model.warmup_steps=1"]
    small += ["--data.source=text", "--data.vocab_size=300", "--data.sequence_length=32", "--data.batch_size=2"]
    small += ["--data.val_fraction=0.2", "--trainer.callbacks.CheckpointMerge.every_n_steps=1"]
    small += ["--trainer.callbacks.CheckpointMerge.num_checkpoints=2", "--trainer.accelerator=cpu"]
    run(
        installed / "lightning", "run", "pretrain/wsm", *small, folder=tmp_path, FULGURITE_CACHE=str(tmp_path / "cache")
    )
    (record,) = tmp_path.glob("runs/pretrain-wsm/*/run.json")
    content = json.loads(record.read_text())
    assert (content["status"], content["global_step"]) == ("finished", 6)
    assert (record.parent / "merged/model.safetensors").is_file()
