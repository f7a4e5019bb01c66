"""`lightning submit`: the script it renders, the mistakes it refuses, what it records (real sbatch: test_slurm.py)."""

import json
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from fulgurite.recipes import sbatch, submit

RECIPE = """\
# A recipe for these tests
trainer: {max_steps: 3}
model: {class_path: lightning.pytorch.demos.boring_classes.DemoModel, init_args: {out_dim: 3}}
"""
GPU_RECIPE = RECIPE.replace("max_steps: 3", "devices: 8, num_nodes: 16, accelerator: gpu")
TASK_RECIPE = "task: {class_path: pathlib.Path}\n"
CPU = ["--gpus-per-node", "0"]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return "tiny.yaml"


@pytest.fixture
def fake_sbatch(tmp_path, monkeypatch):
    """Puts an sbatch of our own first on the PATH; the returned function sets what it answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answer(stdout="", stderr="", code=0, before=""):
        program = folder / "sbatch"
        words = f"printf %s {shlex.quote(stdout)}; printf %s {shlex.quote(stderr)} >&2; exit {code}"
        program.write_text(f'#!/bin/bash\necho "$@" > {folder}/arguments\n{before}{words}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return folder / "arguments"

    return answer


def dry_run(capsys, *arguments):
    """The script that `lightning submit ARGUMENTS --dry-run` prints."""
    code = submit.main([*arguments, "--dry-run"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refusal(capsys, *arguments):
    """The one line on standard error of a submission that ends with exit code 2."""
    code = submit.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def srun_line(script):
    return script[script.index("\nsrun ") + 1 : script.index(" || status=")]


def directives(script):
    return dict(
        re.fullmatch(r"#SBATCH --([\w-]+)(?:=(.*))?", line).groups() for line in script.splitlines() if "#SB" in line
    )


def test_dry_run_renders_the_whole_job_and_writes_nothing(capsys, recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--nodes", "2", "--gpus-per-node", "4", "--time", "2:00:00", "--partition", "gpu", "--account", "lab"]
    arguments += ["--qos", "high", "--cpus-per-task", "12", "--mem", "64G", "--dependency", "afterok:17:18,singleton"]
    script = dry_run(
        capsys, recipe, "--trainer.max_steps", "200", *arguments, "--extra", "--constraint=h100 --exclusive"
    )
    run_dir = tmp_path / "runs/tiny"
    found = directives(script)
    output = found.pop("output")
    assert re.fullmatch(rf"{re.escape(str(run_dir))}/[\w-]+/slurm-%j\.out", output)
    assert found == {
        "job-name": "tiny",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "12",
        "mem": "64G",
        "time": "2:00:00",
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "dependency": "afterok:17:18,singleton",
        "chdir": str(tmp_path),
        "open-mode": "append",
        "signal": "SIGUSR1@120",
        "requeue": None,
        "constraint": "h100",
        "exclusive": None,
    }
    assert f"export FULGURITE_RUN_DIR={Path(output).parent}\n" in script
    command = shlex.split(srun_line(script).replace("\\\n", ""))
    program = command.index("run") - 1
    assert command[:program] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=12"]
    assert command[program + 1 :] == [
        *("run", str(tmp_path / "tiny.yaml"), "--trainer.num_nodes", "2", "--trainer.devices", "4"),
        *("--trainer.accelerator", "gpu", "--trainer.max_steps", "200", "--resume", "auto"),
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_bash_accepts_the_script(capsys, recipe):
    script = dry_run(capsys, recipe, *CPU, "--array", "0-3", "--resume", "a b.ckpt", "--env-setup", "source 'my env'")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "value", ["it's", 'a "b"', "$HOME `date` $(date)", "a;b|c&d #e", "back\\slash", "a*", "--x", "[1, 2]", "1e-3"]
)
def test_values_reach_the_command_unchanged(capsys, recipe, value):
    """The srun line is run by bash with srun replaced by a program that prints its arguments."""
    script = dry_run(capsys, recipe, f"--trainer.default_root_dir={value}", *CPU)
    shim = "srun() { printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", shim + srun_line(script)], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    given = [word.removeprefix("--trainer.default_root_dir=") for word in words if value in word]
    assert given == [value]


def test_sizes_come_from_the_recipe_when_the_command_leaves_them_open(capsys, tmp_path):
    (tmp_path / "big.yaml").write_text(GPU_RECIPE)
    found = directives(dry_run(capsys, "big.yaml"))
    assert (found["nodes"], found["gpus-per-node"], found["ntasks-per-node"]) == ("16", "8", "8")
    script = dry_run(capsys, "big.yaml", "--nodes", "3", "--gpus-per-node", "0", "--ntasks-per-node", "2")
    assert "gpus-per-node" not in directives(script)
    assert "--trainer.num_nodes 3 --trainer.devices 2 --trainer.accelerator cpu" in script


def test_a_task_recipe_gets_no_trainer_overrides(capsys, tmp_path):
    (tmp_path / "sweep.yaml").write_text(TASK_RECIPE)
    script = dry_run(capsys, "sweep.yaml", "--seed", "3")
    assert "--trainer" not in script
    assert "--resume" not in script
    assert "one process" in refusal(capsys, "sweep.yaml", "--nodes", "2")


def test_array_tasks_have_folders_and_seeds_of_their_own(capsys, recipe):
    script = dry_run(capsys, recipe, *CPU, "--array", "1,4-8:2%3")
    assert directives(script)["output"].endswith("/task-%a/slurm-%A_%a.out")
    assert re.search(r'^export FULGURITE_RUN_DIR=\S+/task-"\$SLURM_ARRAY_TASK_ID"$', script, re.MULTILINE)
    assert '--seed "$SLURM_ARRAY_TASK_ID"' in script


def test_array_number_may_go_into_any_override(capsys, recipe):
    script = dry_run(
        capsys,
        recipe,
        *CPU,
        "--array",
        "1-2",
        "--trainer.default_root_dir",
        "part ${SLURM_ARRAY_TASK_ID}",
        "--seed",
        "7",
    )
    assert "'part '\"$SLURM_ARRAY_TASK_ID\"" in script
    assert "--seed 7" in script


def test_first_start_resumes_from_the_given_checkpoint_and_a_requeued_one_from_its_own(capsys, recipe, tmp_path):
    script = dry_run(capsys, recipe, *CPU, "--resume", "base.ckpt")
    lines = script.splitlines()
    choice = "\n".join(lines[lines.index("resume=base.ckpt") :][:2]) + "\necho $resume"
    environment = {"FULGURITE_RUN_DIR": str(tmp_path / "run"), "PATH": os.environ["PATH"]}

    def chosen():
        return subprocess.run(
            ["bash", "-ec", choice], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert chosen() == "base.ckpt\n"
    (tmp_path / "run/checkpoints/last.ckpt").mkdir(parents=True)
    assert chosen() == "auto\n"
    assert srun_line(script).endswith('--resume "$resume"')


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (
            "nvcr.io#nvidia/pytorch:25.01",
            "--container-image='nvcr.io#nvidia/pytorch:25.01' --container-workdir={here} ",
        ),
        ("pyxis:/images/a.sqsh", "--container-image=/images/a.sqsh --container-workdir={here} "),
        ("/images/a.sif", "apptainer exec --nv --pwd {here} --bind {here} /images/a.sif "),
        ("apptainer:docker://torch:2", "apptainer exec --nv --pwd {here} --bind {here} docker://torch:2 "),
    ],
)
def test_containers(capsys, recipe, tmp_path, container, expected):
    script = dry_run(capsys, recipe, "--gpus-per-node", "1", "--container", container)
    flat = script.replace(" \\\n    ", " ")
    assert expected.format(here=tmp_path) in flat
    assert " lightning run " in flat


def test_env_setup_runs_first_and_brings_the_command(capsys, recipe):
    script = dry_run(capsys, recipe, *CPU, "--env-setup", "module load cuda", "--env-setup", "source env/bin/activate")
    assert script.index("module load cuda\nsource env/bin/activate\n") < script.index("\nsrun ")
    assert "\n    lightning run " in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes: expected a whole number of at least 1, not '0'"),
        (["--nodes", "two"], "not 'two'"),
        (["--gpus-per-node", "-1"], "0 for the CPU, not '-1'"),
        ([], "--gpus-per-node G (0 = train on the CPU)"),
        ([*CPU, "--time", "2h"], "--time '2h' is not valid: expected minutes, hours:minutes:seconds"),
        ([*CPU, "--time", "1:2:3:4"], "--time"),
        ([*CPU, "--array", "1..4"], "--array '1..4' is not valid: expected for example 0-4"),
        ([*CPU, "--array", "8-4"], "'8-4' is an empty range"),
        ([*CPU, "--dependency", "afterok"], "--dependency 'afterok' is not valid"),
        ([*CPU, "--mem", "64GB"], "--mem '64GB' is not valid"),
        ([*CPU, "--time", "2", "--signal-seconds", "120"], "leaves nothing of --time 2 (120 s)"),
        ([*CPU, "--signal-seconds", "65536"], "at most 65535"),
        ([*CPU, "--extra", "--signal=USR2@1"], "sets --signal itself; use --signal-seconds"),
        ([*CPU, "--extra", "-J name"], "sets -J itself; leave it out"),
        ([*CPU, "--extra", "exclusive"], "expected sbatch flags"),
        ([*CPU, "--extra", "--comment 'open"], "No closing quotation"),
        ([*CPU, "--trainer.num_nodes", "4"], "--trainer.num_nodes follows from the job's size: use --nodes"),
        ([*CPU, "--trainer.devices=4"], "--trainer.devices follows from the job's size"),
        ([*CPU, "--node", "4"], "no option --node. Did you mean --nodes"),
        ([*CPU, "stray"], "'stray' belongs to no key"),
        ([*CPU, "--trainer.default_root_dir", "a\nb"], "line break"),
        ([*CPU, "--account", "a\n#SBATCH --uid=0"], "line break"),
        ([*CPU, "--seed", "$SLURM_ARRAY_TASK_ID"], "only an array has"),
        ([*CPU, "--array", "0-1", "--seed", "1"], "would run the same seed"),
        ([*CPU, "--seed", "x"], "--seed 'x' is not valid"),
        ([*CPU, "--trainer.max_stepz", "1"], "tiny has no key trainer.max_stepz. Did you mean trainer.max_steps"),
        ([*CPU, "--trainer.max_steps", "many"], "trainer.max_steps is 'many'; expected int"),
        (["--gpus-per-node", "2", "--ntasks-per-node", "1"], "one process a GPU"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(capsys, recipe, tmp_path, arguments, message):
    assert message in refusal(capsys, recipe, *arguments)
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_recipe_is_named(capsys):
    assert "No recipe or file is called 'pretrain/wsn'" in refusal(capsys, "pretrain/wsn", *CPU)
    assert "The recipe comes first" in refusal(capsys, "--nodes", "2")


def test_job_id_is_printed_and_recorded(capsys, recipe, fake_sbatch, tmp_path):
    seen = fake_sbatch(stdout="4711;cluster\n")
    assert submit.main([recipe, "--trainer.max_steps", "5", *CPU]) == 0
    printed = capsys.readouterr().out
    assert "submitted job 4711: tiny, 1 node x 1 CPU process" in printed
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    script = run_dir / "submit.sbatch"
    assert seen.read_text().split() == ["--parsable", str(script)]
    assert "#SBATCH --requeue" in script.read_text()
    assert f"{run_dir}/slurm-4711.out" in printed
    assert json.loads((run_dir / "run.json").read_text()) == {
        "recipe": "tiny",
        "recipe_path": str(tmp_path / recipe),
        "overrides": ["trainer.max_steps=5"],
        "command": "lightning submit tiny.yaml --trainer.max_steps 5 --gpus-per-node 0",
        "status": "submitted",
        "slurm_job_id": "4711",
    }


def test_each_array_task_records_its_own_job(recipe, fake_sbatch, tmp_path):
    fake_sbatch(stdout="12\n")
    assert submit.main([recipe, *CPU, "--array", "3,5"]) == 0
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    for task in ("3", "5"):
        record = json.loads((run_dir / f"task-{task}/run.json").read_text())
        assert (record["slurm_array_job_id"], record["slurm_array_task_id"]) == ("12", task)


def test_what_a_job_that_already_runs_has_written_is_kept(recipe, fake_sbatch, tmp_path):
    """The stand-in for sbatch writes run.json itself, as a job that starts at once would."""
    fake_sbatch(
        stdout="9", before="""echo '{"status": "running", "mlflow_run_id": "abc"}' > "$(dirname "$2")/run.json"\n"""
    )
    assert submit.main([recipe, *CPU]) == 0
    (path,) = tmp_path.glob("runs/tiny/*/run.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["mlflow_run_id"], record["slurm_job_id"]) == ("running", "abc", "9")


def test_secrets_stay_out_of_the_record(recipe, fake_sbatch, tmp_path):
    fake_sbatch(stdout="9")
    assert submit.main([recipe, *CPU, "--env-setup", "true", "--model.api_key", "hunter2"]) == 0
    (path,) = tmp_path.glob("runs/tiny/*/run.json")
    assert "hunter2" not in path.read_text()
    assert "model.api_key" in path.read_text()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "account 'lab' may not be used like this (Invalid account or account/partition combination specified)",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "quality of service 'fast'"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds limit)",
            "the time limit '30:00' is not allowed here",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "it cannot give 1 node x 1 CPU process",
        ),
        ("sbatch: error: Unable to contact slurm controller (connect failure)\n", "Unable to contact slurm controller"),
        ("", "it gave no reason"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_no_folder(capsys, recipe, fake_sbatch, tmp_path, stderr, message):
    fake_sbatch(stderr=stderr, code=1)
    line = refusal(capsys, recipe, *CPU, "--account", "lab", "--qos", "fast", "--time", "30:00")
    assert line.startswith("error: SLURM refused the job: ")
    assert message in line
    assert list((tmp_path / "runs/tiny").iterdir()) == []


def test_without_sbatch_the_mend_is_named(capsys, recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "sbatch is not on the PATH" in refusal(capsys, recipe, *CPU)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("2:00:01", 7201), ("1-12", 129600), ("1-12:30", 131400), ("0-0:0:5", 5)],
)
def test_time_limits(text, seconds):
    assert sbatch.time_limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "tasks"), [("7", [7]), ("0-3", [0, 1, 2, 3]), ("1,4-8:2%3", [1, 4, 6, 8]), ("2,2", [2])]
)
def test_array_task_ids(text, tasks):
    assert sbatch.array_task_ids(text) == tasks


def test_a_job_name_that_lightning_reads_as_a_prompt_is_changed(capsys, tmp_path):
    (tmp_path / "interactive.yaml").write_text(RECIPE)
    assert directives(dry_run(capsys, "interactive.yaml", *CPU))["job-name"] == "run-interactive"
