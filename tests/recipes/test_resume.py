"""`--resume auto|PATH|RUN_ID`: what it finds, what it keeps, and when it refuses."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.callbacks.checkpoint_files import temporary_path
from fulgurite.recipes import rundir


@pytest.fixture
def run(lightning, tiny):
    """A finished run of six steps; returns its folder."""
    assert lightning("run", tiny).code == 0
    (path,) = Path("runs/tiny").iterdir()
    return path


def set_record(run, **fields):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, **fields}))
    return record


def weights(run, step):
    return torch.load(run / f"checkpoints/resume-step={step}.ckpt", weights_only=True)["state_dict"]


def cut_off_after(run, step):
    """The run as a kill right after the checkpoint of this step would have left it."""
    for path in run.glob("checkpoints/*.ckpt"):
        if int(path.stem.rpartition("=")[2]) > step:
            path.unlink()
            path.with_name(path.name + ".sha256").unlink()
    set_record(run, status="running")


def test_an_unfinished_run_goes_on_to_the_same_weights(run, lightning, tiny):
    expected = weights(run, 6)
    before = set_record(run)
    cut_off_after(run, 3)
    result = lightning("run", tiny, "--resume", "auto")
    assert result.code == 0, result.err
    assert [path.name for path in Path("runs/tiny").iterdir()] == [run.name]
    after = json.loads((run / "run.json").read_text())
    assert after["mlflow_run_id"] == before["mlflow_run_id"]
    assert after["created"] == before["created"]
    assert after["status"] == "finished"
    assert [attempt["status"] for attempt in after["attempts"]] == ["finished", "finished"]
    assert after["attempts"][1]["resumed_from"].endswith("resume-step=3.ckpt")
    actual = weights(run, 6)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, lightning, tiny):
    set_record(run, status="running")
    newest = run / "checkpoints/resume-step=6.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"resume-step=6\.ckpt is truncated"):
        result = lightning("run", tiny, "--resume", "auto")
    assert result.code == 0
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"].endswith("resume-step=3.ckpt")


@pytest.mark.parametrize("how", ["folder", "name", "mlflow", "checkpoint"])
def test_a_finished_run_is_named_and_trained_on(run, lightning, tiny, how):
    mlflow_id = json.loads((run / "run.json").read_text())["mlflow_run_id"]
    target = {
        "folder": str(run),
        "name": run.name,
        "mlflow": mlflow_id,
        "checkpoint": f"{run}/checkpoints/resume-step=3.ckpt",
    }
    result = lightning("run", tiny, "--resume", target[how], "--trainer.max_steps", "9")
    assert result.code == 0, result.err
    record = json.loads((run / "run.json").read_text())
    start = 3 if how == "checkpoint" else 6
    assert record["attempts"][-1]["resumed_from"].endswith(f"resume-step={start}.ckpt")
    assert record["global_step"] == 9
    assert record["mlflow_run_id"] == mlflow_id
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 9


def test_the_saved_recipe_counts_not_todays_file(run, lightning, tiny):
    """Someone edited the recipe since: the run goes on as it was, but for what is overridden now."""
    cut_off_after(run, 3)
    Path(tiny).write_text(Path(tiny).read_text().replace("learning_rate: 1.0e-2", "learning_rate: 7.0"))
    result = lightning("run", tiny, "--resume", "auto", "--trainer.log_every_n_steps", "2", "--print_config")
    config = yaml.safe_load(result.out)
    assert config["model"]["init_args"]["learning_rate"] == 1e-2
    assert config["trainer"]["log_every_n_steps"] == 2


def test_a_resumed_run_keeps_its_secrets(lightning, tiny):
    """MLflow gets the recipe masked; the run's folder keeps it as it was, for its owner only."""
    uri = "http://user:pa55w0rd@127.0.0.1:9"
    logger = "  logger:\n    class_path: fulgurite.callbacks.tracking.BufferedMLFlowLogger\n    init_args: "
    init = f"{{tracking_uri: '{uri}', finalize_timeout: 0.1}}\n"
    Path(tiny).write_text(Path(tiny).read_text().replace("trainer:\n", f"trainer:\n{logger}{init}"))
    assert lightning("run", tiny, "--trainer.max_steps", "3").code == 0
    (run,) = Path("runs/tiny").iterdir()
    set_record(run, status="running")
    for steps in ("6", "9"):
        saved = run / "config.yaml"
        assert saved.stat().st_mode & 0o777 == 0o600
        assert yaml.safe_load(saved.read_text())["trainer"]["logger"]["init_args"]["tracking_uri"] == uri
        assert lightning("run", tiny, "--resume", str(run), "--trainer.max_steps", steps).code == 0
    others = [path for path in run.rglob("*") if path.is_file() and path != saved]
    assert len(others) > 5
    assert [path for path in others if b"pa55w0rd" in path.read_bytes()] == []


def test_a_bare_checkpoint_starts_a_new_run(run, lightning, tiny, tmp_path):
    checkpoint = tmp_path / "taken.ckpt"
    checkpoint.write_bytes((run / "checkpoints/resume-step=3.ckpt").read_bytes())
    assert lightning("run", tiny, "--resume", str(checkpoint)).code == 0
    other = next(path for path in Path("runs/tiny").iterdir() if path.name != run.name)
    assert json.loads((other / "run.json").read_text())["attempts"][0]["resumed_from"] == str(checkpoint)
    assert torch.equal(*(weights(path, 6)["model.lm_head.weight"] for path in (run, other)))


def test_the_newest_unfinished_run_is_taken(run, lightning, tiny):
    cut_off_after(run, 3)
    assert lightning("run", tiny, "--seed", "1").code == 0
    second = max(Path("runs/tiny").iterdir(), key=lambda path: path.name)
    set_record(second, status="running")
    recipe = rundir.Recipe("tiny", Path(tiny))
    with rundir.released_at_the_end():
        assert rundir.find_resumed(recipe, "auto").directory == second
        set_record(second, status="finished")
        assert rundir.find_resumed(recipe, "auto").directory == run


def test_nothing_to_resume(run, refusal, tiny):
    assert refusal("run", tiny, "--resume", "auto") == (
        "Nothing to resume: there is no unfinished run of tiny under runs/tiny. Start one without --resume, or name a "
        "finished run or a checkpoint: --resume PATH."
    )
    wrong = run.name[:-1] + ("0" if run.name[-1] != "0" else "1")
    assert refusal("run", tiny, "--resume", wrong) == (
        f"Nothing to resume: no checkpoint, run or MLflow run is called {wrong!r}. Did you mean {run.name}?"
    )
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert refusal("run", tiny, "--resume", str(run)) == (
        f"The run {run} is finished and has no whole checkpoint: start one without --resume."
    )


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_its_place(run, lightning, tiny):
    """Also where an older unfinished run has checkpoints."""
    older = run.with_name("20000101-000000")
    shutil.copytree(run, older)
    set_record(older, status="running")
    expected, before = weights(run, 6), set_record(run, status="running")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    result = lightning("run", tiny, "--resume", "auto")
    assert result.code == 0, result.err
    assert (
        f"The run {run} has no whole checkpoint yet: it starts again from step 0, in the same folder and MLflow run."
        in result.err
    )
    after = json.loads((run / "run.json").read_text())
    assert (after["status"], after["global_step"]) == ("finished", 6)
    assert after["mlflow_run_id"] == before["mlflow_run_id"]
    assert len(after["attempts"]) == 2
    actual = weights(run, 6)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert json.loads((older / "run.json").read_text())["status"] == "running"


def test_a_checkpoint_set_aside_by_a_killed_save_is_put_back_before_choosing(run, tiny):
    """Its writer's number may belong to a living process by now: here to this one."""
    set_record(run, status="running")
    newest = (run / "checkpoints/resume-step=6.ckpt").absolute()
    recipe = rundir.Recipe("tiny", Path(tiny))
    for how in ("auto", str(run), str(newest)):
        newest.rename(temporary_path(newest, "old"))
        with rundir.released_at_the_end():
            assert rundir.find_resumed(recipe, how).checkpoint == newest
            assert (how == str(newest)) or rundir.is_locked(run)
        assert not rundir.is_locked(run)


def test_a_truncated_checkpoint_that_was_named_is_refused(run, refusal, tiny):
    path = run / "checkpoints/resume-step=6.ckpt"
    path.write_bytes(path.read_bytes()[:-10])
    message = refusal("run", tiny, "--resume", str(path))
    assert message.startswith("Cannot resume: The checkpoint ")
    assert "resume-step=6.ckpt is truncated" in message


def test_a_run_of_another_recipe_is_refused(run, refusal):
    message = refusal("run", "pretrain/wsm", "--resume", str(run))
    assert message == f"{run} is a run of tiny, not of pretrain/wsm: `lightning run tiny --resume {run}`."


def test_a_living_run_is_left_alone(run, refusal, tiny):
    set_record(run, status="running")
    with open(run / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert refusal("run", tiny, "--resume", "auto") == (
            f"Nothing to resume: the only unfinished run of tiny, {run}, is still running."
        )
        assert refusal("run", tiny, "--resume", str(run)) == (
            f"The run {run.absolute()} is still running: stop it first, or wait for it."
        )


def test_a_submitted_job_starts_afresh_the_first_time(lightning, tiny, tmp_path, monkeypatch):
    """sbatch scripts always say `--resume auto`, with the run's folder in the environment."""
    from fulgurite.recipes import cli

    monkeypatch.setenv("FULGURITE_RUN_DIR", str(tmp_path / "job"))
    assert cli.main(["run", tiny, "--resume", "auto"]) == 0
    record = json.loads((tmp_path / "job/run.json").read_text())
    assert record["attempts"][0].get("resumed_from") is None
    assert cli.main(["run", tiny, "--resume", "auto", "--trainer.max_steps", "9"]) == 0
    record = json.loads((tmp_path / "job/run.json").read_text())
    assert record["attempts"][1]["resumed_from"].endswith("resume-step=6.ckpt")
    assert record["global_step"] == 9


def test_a_run_may_be_moved(run, lightning, tiny, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    moved = run.rename(tmp_path / "elsewhere" / "mine")
    result = lightning("run", tiny, "--resume", str(moved), "--trainer.max_steps", "9")
    assert result.code == 0, result.err
    assert torch.load(moved / "checkpoints/resume-step=9.ckpt", weights_only=True)["global_step"] == 9
    assert not any(Path("runs/tiny").iterdir())
