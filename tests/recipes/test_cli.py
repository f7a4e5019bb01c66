"""The command itself: help and listings without torch, dispatch, options, the hand-over to Fabric."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "lightning", "transformers", "numpy", "mlflow", "jsonargparse")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["list"], ["show", "pretrain/wsm"], ["run", "--help"], ["merge", "--help"], ["run", "pretrain/wms"]],
    ids=" ".join,
)
def test_answers_without_importing_anything_heavy(arguments):
    """What makes `--help` and `list` answer at once; a limit in seconds would depend on the machine."""
    code = (
        "import sys, json; from fulgurite.recipes.cli import main; main(json.loads(sys.argv[1]));"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_names_every_command(lightning):
    result = lightning("--help")
    assert result.code == 0
    for command in ("run", "submit", "list", "show", "merge", "export", "ui", "sync"):
        assert f"\n  {command} " in result.out


def test_no_command_prints_help_and_fails(lightning):
    result = lightning()
    assert result.code == 2
    assert result.out.startswith("Usage: lightning COMMAND")


def test_list_gives_one_line_a_recipe_by_family(lightning):
    lines = lightning("list").out.splitlines()
    assert lines[lines.index("pretrain") + 1].startswith("  pretrain/")
    wsm = next(line for line in lines if line.split()[:1] == ["pretrain/wsm"])
    assert "merge its checkpoints" in wsm


def test_show_prints_the_file_with_its_comments(lightning, tmp_path):
    text = lightning("show", "pretrain/wsm").out
    assert text.startswith("# Pretrain a small Llama")
    (tmp_path / "mine.yaml").write_text(text)
    assert lightning("show", "mine.yaml").out == text


def test_misspelt_names(refusal):
    assert refusal("rnu") == "There is no command 'rnu'. Did you mean run?"
    assert refusal("run", "pretrain/wms").startswith(
        "No recipe or file is called 'pretrain/wms'. Did you mean pretrain/ws"
    )
    assert refusal("run", "wsm") == "No recipe or file is called 'wsm'. Did you mean pretrain/wsm?"
    assert refusal("show", "nothing-like-it") == (
        "No recipe or file is called 'nothing-like-it'. `lightning list` shows them all."
    )


def test_the_recipe_comes_first(refusal):
    assert (
        refusal("run", "--trainer.max_steps", "3")
        == "The recipe comes first: lightning run RECIPE --trainer.max_steps ..."
    )


def test_a_file_that_is_no_recipe(refusal, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "a recipe is a .yaml file" in refusal("run", "notes.txt")
    assert "`lightning run model train.py`" in refusal("run", "train.py")


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", "true"])
def test_seed_must_be_a_whole_number(refusal, tiny, seed):
    assert refusal("run", tiny, f"--seed={seed}") == f"--seed is {seed!r}; expected int of at least 0."


def test_run_model_is_handed_to_fabric(tmp_path, capfd):
    """The form of Lightning 2.0: the script runs with Fabric's environment, and keeps its own arguments."""
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['LT_CLI_USED'], os.environ['LT_ACCELERATOR'])\n"
    )
    command = [sys.executable, "-m", "fulgurite.recipes.cli", "run", "model", "--accelerator=cpu", "train.py", "--lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "['--lr=1'] 1 cpu" in done.stdout, done.stderr
    assert done.returncode == 0


def test_ui_without_a_store_says_what_to_do(refusal):
    assert refusal("ui").startswith("There is no run yet: mlruns/mlflow.db does not exist here.")


def test_ui_on_a_server_points_there_without_its_password(lightning, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@tracking.example")
    result = lightning("ui")
    assert result.code == 0
    assert "tracking.example" in result.out
    assert "secret" not in result.out


def test_sync_needs_a_folder(refusal):
    assert refusal("sync", "nowhere").startswith("nowhere is not a run's folder")
