"""`lightning submit` on a real SLURM cluster of two nodes on this machine: training, preemption, arrays, refusals."""

import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

_spec = importlib.util.spec_from_file_location(
    "slurm_cluster", Path(__file__).resolve().parents[1] / "slurm_cluster.py"
)
slurm_cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slurm_cluster)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if missing := slurm_cluster.missing_programs():
        reason = f"SLURM is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge"
        if os.environ.get("CI") == "true" or os.environ.get("FULGURITE_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(cluster, folder, *arguments):
    """`lightning submit ARGUMENTS` in `folder`: the finished process."""
    program = [sys.executable, "-m", "fulgurite.recipes.submit", *arguments]
    return subprocess.run(program, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=120)


def submitted(cluster, folder, *arguments):
    """The job's id and the run's folder of a submission that succeeds."""
    done = submit(cluster, folder, *arguments)
    assert done.returncode == 0, done.stderr
    job_id = re.match(r"submitted job (\d+): ", done.stdout).group(1)
    run_dir = Path(re.search(r"^  run +(.*)$", done.stdout, re.MULTILINE).group(1))
    return job_id, run_dir


# --------------------------------------------------------------------------------- the script, with a stand-in command

STAND_IN = """#!{python}
import json, os, sys, time
run_dir = os.environ["FULGURITE_RUN_DIR"]
seen = {{"arguments": sys.argv[1:], "folder": os.getcwd(), **os.environ}}
path = f"{{run_dir}}/rank{{os.environ['SLURM_PROCID']}}-start{{os.environ.get('SLURM_RESTART_COUNT', '0')}}.json"
with open(path, "w") as file:
    json.dump(seen, file)
{body}
"""


@pytest.fixture
def stand_in(tmp_path):
    """Makes a folder with a recipe, and a `lightning` that records how it was called and then runs `body`."""

    def make(body="", folder="work"):
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin/lightning"
        program.write_text(STAND_IN.format(python=sys.executable, body=body))
        program.chmod(0o755)
        work = tmp_path / folder
        work.mkdir()
        (work / "tiny.yaml").write_text("trainer: {accelerator: cpu}\n")
        return work, ["--env-setup", f"export PATH={tmp_path}/bin:$PATH"]

    return make


def test_folders_and_values_survive_sbatch_and_srun(cluster, stand_in):
    awkward = r"""a #1 %j it's "b" \c"""
    work, setup = stand_in(folder=awkward.replace("\\", ""))
    arguments = [
        "--trainer.default_root_dir",
        awkward,
        "--extra",
        r"--comment='x #y' --exclusive",
        "--nodes",
        "2",
        "--time",
        "5",
    ]
    job_id, run_dir = submitted(cluster, work, "tiny.yaml", *arguments, *setup)
    job = cluster.run("scontrol", "show", "job", job_id)
    assert "Comment=x #y" in job
    cluster.wait(job_id)
    seen = [json.loads((run_dir / f"rank{rank}-start0.json").read_text()) for rank in (0, 1)]
    for rank, process in enumerate(seen):
        assert process["folder"] == str(work)
        assert process["SLURMD_NODENAME"] == f"n{rank + 1}"
        assert process["MASTER_ADDR"] == "127.0.0.1"
        assert process["MASTER_PORT"] == str(12000 + int(job_id) % 20000)
        assert process["arguments"] == [
            *("run", str(work / "tiny.yaml"), "--trainer.num_nodes", "2", "--trainer.devices", "1"),
            *("--trainer.accelerator", "cpu", "--trainer.default_root_dir", awkward, "--resume", "auto"),
        ]
    log = (run_dir / f"slurm-{job_id}.out").read_text()
    assert log == f"job {job_id}, start 1, on n[1-2]: {run_dir}\n"


def test_a_run_that_cannot_requeue_itself_is_requeued_by_the_script(cluster, stand_in):
    """What happens in a container without scontrol: the run leaves a file."""
    body = """
if "SLURM_RESTART_COUNT" not in os.environ:
    open(os.environ["FULGURITE_REQUEUE_FILE"], "w").close()
"""
    work, setup = stand_in(body)
    job_id, run_dir = submitted(cluster, work, "tiny.yaml", *setup)
    assert cluster.wait(job_id)["Restarts"] == "1"
    assert sorted(path.name for path in run_dir.glob("rank0*")) == ["rank0-start0.json", "rank0-start1.json"]
    assert not (run_dir / ".requeue").exists()
    log = (run_dir / f"slurm-{job_id}.out").read_text()
    assert [line for line in log.splitlines() if line.startswith("job ")] == [
        f"job {job_id}, start {start}, on n1: {run_dir}" for start in (1, 2)
    ]


def test_a_failing_rank_ends_the_job(cluster, stand_in):
    """The other rank would wait for a collective for ever."""
    work, setup = stand_in("sys.exit(3) if os.environ['SLURM_PROCID'] == '1' else time.sleep(100)")
    job_id, _ = submitted(cluster, work, "tiny.yaml", "--nodes", "2", *setup)
    assert cluster.wait(job_id, "FAILED", timeout=30)["ExitCode"] != "0:0"


def test_the_signal_reaches_the_processes_before_the_limit(cluster, stand_in):
    body = "import signal; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); time.sleep(100)"
    work, setup = stand_in(body)
    job_id, _ = submitted(cluster, work, "tiny.yaml", "--time", "1", "--signal-seconds", "50", *setup)
    assert cluster.wait(job_id, timeout=60)["ExitCode"] == "0:0"


def test_refusals_are_one_clear_line(cluster, stand_in):
    work, setup = stand_in()

    def refusal(*arguments):
        done = submit(cluster, work, "tiny.yaml", *arguments, *setup)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.removeprefix("error: SLURM refused the job: ")

    assert refusal("--partition", "gpuu") == "there is no partition 'gpuu'; --partition takes one of: short, test.\n"
    assert re.fullmatch(r"the time limit '5' is not allowed here .*\n", refusal("--partition", "short", "--time", "5"))
    assert re.fullmatch(r"it cannot give 5 nodes x 1 CPU process .*\n", refusal("--nodes", "5"))
    assert list((work / "runs/tiny").iterdir()) == []


def test_array_tasks_run_with_seeds_folders_and_logs_of_their_own(cluster, stand_in):
    work, setup = stand_in()
    job_id, run_dir = submitted(cluster, work, "tiny.yaml", "--array", "3,5", *setup)
    for task in (3, 5):
        cluster.wait(f"{job_id}_{task}")
        folder = run_dir / f"task-{task}"
        seen = json.loads((folder / "rank0-start0.json").read_text())
        assert seen["arguments"][-4:] == ["--seed", str(task), "--resume", "auto"]
        assert f"start 1, on n1: {folder}\n" in (folder / f"slurm-{job_id}_{task}.out").read_text()
        record = json.loads((folder / "run.json").read_text())
        assert (record["slurm_array_job_id"], record["slurm_array_task_id"]) == (job_id, str(task))


# ------------------------------------------------------------------------------------------------------- real training

# Every rank reports a digest of its weights at the end. `actions` maps "start:step" to a command that rank 0 runs then:
# `scancel --signal` is what SLURM does before a time limit, `scontrol requeue` what it does at a preemption.
REPORT = """
import hashlib, json, os, subprocess
from lightning.pytorch.callbacks import Callback

class Report(Callback):
    def __init__(self, actions: dict | None = None) -> None:
        self.actions = actions or {}

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        here = f"{os.environ.get('SLURM_RESTART_COUNT', '0')}:{trainer.global_step}"
        if trainer.is_global_zero and here in self.actions:
            subprocess.run(self.actions[here].split() + [os.environ["SLURM_JOB_ID"]])

    def on_train_end(self, trainer, pl_module):
        digest = hashlib.sha256()
        for name, tensor in sorted(pl_module.state_dict().items()):
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        report = {
            "weights": digest.hexdigest(),
            "step": trainer.global_step,
            "world_size": trainer.world_size,
            "strategy": type(trainer.strategy).__name__,
            "node": os.environ["SLURMD_NODENAME"],
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        }
        with open(f"{trainer.default_root_dir}/report-{trainer.global_rank}.json", "w") as file:
            json.dump(report, file)
"""

TINY = """\
# A model that trains in a moment
seed_everything: 7
trainer:
  accelerator: cpu
  max_steps: 24
  max_epochs: -1
  accumulate_grad_batches: 2
  log_every_n_steps: 1
  val_check_interval: null
  limit_val_batches: 1
  enable_progress_bar: false
  callbacks:
    - {class_path: slurm_report.Report}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 10, save_top_k: -1}
model:
  class_path: fulgurite.lightning_modules.pretraining.PretrainingModule
  init_args:
    model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
    learning_rate: 0.01
    warmup_steps: 4
data:
  class_path: fulgurite.datamodules.text.TextDataModule
  init_args: {source: corpus, vocab_size: 300, sequence_length: 32, batch_size: 2, val_fraction: 0.25, seed: 7}
"""


@pytest.fixture(scope="session")
def workplace(cluster, tmp_path_factory):
    """A folder to submit from: the recipe `tiny.yaml`, its corpus, and the callback that reports the weights."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "slurm_report.py").write_text(REPORT)
    (folder / "corpus").mkdir()
    for index in range(40):
        lines = (f"Line {line} of document {index}: {'lorem ipsum dolor '[: 3 + line % 15]}." for line in range(60))
        (folder / f"corpus/{index}.txt").write_text("\n".join(lines))
    cluster.environment["PYTHONPATH"] = str(folder)
    cluster.environment["OMP_NUM_THREADS"] = "1"
    cluster.environment["FULGURITE_CACHE"] = str(folder / "cache")
    cluster.environment["HF_HUB_OFFLINE"] = "1"
    for name in ("FULGURITE_RUN_DIR", "MLFLOW_TRACKING_URI"):
        cluster.environment.pop(name, None)
    return folder


def reports(run_dir):
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("report-*.json"))]


def log_of(run_dir):
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("slurm-*.out")))


def tracked(folder, run_id):
    """Status and the steps with a training loss of an MLflow run."""
    with sqlite3.connect(folder / "mlruns/mlflow.db") as store:
        (status,) = store.execute("select status from runs where run_uuid = ?", (run_id,)).fetchone()
        query = "select step from metrics where run_uuid = ? and key = 'train_loss' order by step"
        return status, [step for (step,) in store.execute(query, (run_id,))]


@pytest.fixture(scope="session")
def two_node_run(cluster, workplace):
    """The folder of an uninterrupted training on both nodes."""
    job_id, run_dir = submitted(cluster, workplace, "tiny.yaml", "--nodes", "2", "--time", "10")
    cluster.wait(job_id, timeout=240)
    return run_dir


def test_two_nodes_train_one_model(two_node_run):
    ranks = reports(two_node_run)
    assert [rank["node"] for rank in ranks] == ["n1", "n2"], log_of(two_node_run)
    for rank in ranks:
        assert (rank["world_size"], rank["strategy"], rank["step"]) == (2, "DDPStrategy", 24)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert json.loads((two_node_run / "run.json").read_text())["status"] == "finished"


def test_a_preempted_training_goes_on_where_it_stopped(cluster, workplace, two_node_run):
    """SIGUSR1 as before a time limit, then a preemption by SLURM itself: three starts, the weights of one."""
    actions = {"0:7": "scancel --signal=USR1", "1:15": "scontrol requeue"}
    option = f"--trainer.callbacks.Report.actions={json.dumps(actions)}"
    job_id, run_dir = submitted(cluster, workplace, "tiny.yaml", "--nodes", "2", "--time", "10", option)
    assert cluster.wait(job_id, timeout=400)["Restarts"] == "2"

    log = log_of(run_dir)
    ranks = reports(run_dir)
    assert [(rank["step"], rank["restarts"]) for rank in ranks] == [(24, 2), (24, 2)], log
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in reports(two_node_run)], log

    record = json.loads((run_dir / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["slurm_job_id"] == job_id
    stops = [attempt["step"] for attempt in record["attempts"]]
    assert stops[0] in (8, 9), "the signal is heeded at the next step that all ranks agree on"
    assert 15 < stops[1] < 24
    assert stops[2] == 24
    assert [attempt.get("slurm_restart_count", "0") for attempt in record["attempts"]] == ["0", "1", "2"]
    for stop in stops[:2]:
        assert f"Resuming from {run_dir}/checkpoints/preempted-step={stop}.ckpt" in log
    assert tracked(workplace, record["mlflow_run_id"]) == ("FINISHED", list(range(24)))


def test_an_array_trains_a_model_for_each_seed(cluster, workplace):
    """Both tasks start at once, also on an MLflow store that neither has made yet."""
    folder = workplace / "array"
    folder.mkdir()
    options = ["--array", "1-2", "--time", "10", "--trainer.max_steps", "6", "--data.source", str(workplace / "corpus")]
    job_id, run_dir = submitted(cluster, folder, str(workplace / "tiny.yaml"), *options)
    records, weights = {}, set()
    for task in ("1", "2"):
        cluster.wait(f"{job_id}_{task}", timeout=240)
        records[task] = json.loads((run_dir / f"task-{task}/run.json").read_text())
        (report,) = reports(run_dir / f"task-{task}")
        weights.add(report["weights"])
    assert [(record["status"], record["seed"]) for record in records.values()] == [("finished", "1"), ("finished", "2")]
    assert {record["slurm_array_job_id"] for record in records.values()} == {job_id}
    assert [record["slurm_array_task_id"] for record in records.values()] == ["1", "2"]
    assert len(weights) == 2
    for record in records.values():
        assert tracked(folder, record["mlflow_run_id"]) == ("FINISHED", list(range(6)))
