"""The MLflow logger and the run's record, on the embedded SQLite store; the spool by itself."""

import importlib.util
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import matplotlib.figure
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow.tracking import MlflowClient

from fulgurite.callbacks import mlflow_delivery
from fulgurite.callbacks.checkpointing import RNGState
from fulgurite.callbacks.guards import PreemptionGuard
from fulgurite.callbacks.mlflow_spool import Spool
from fulgurite.callbacks.tracking import (
    BufferedMLFlowLogger,
    RunTracker,
    environment_facts,
    flush_spool,
    git_facts,
    read_run_json,
    update_run_json,
)

_spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


@pytest.fixture
def store(tmp_path, empty_store):
    """The default store of the current directory; a client of it."""
    (tmp_path / "mlruns").mkdir()
    shutil.copy(empty_store, tmp_path / "mlruns" / "mlflow.db")
    return MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")


def only_run(client, experiment="fulgurite"):
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def history(client, run_id, name):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def artifacts(client, run_id, folder=None):
    return sorted(item.path for item in client.list_artifacts(run_id, folder))


def text_of(client, run_id, path, tmp_path):
    return Path(client.download_artifacts(run_id, path, str(tmp_path))).read_text()


# ----------------------------------------------------------------------------------------------------------- the logger


def test_everything_reaches_the_default_store(tmp_path, store):
    run_dir = tmp_path / "run"
    logger = BufferedMLFlowLogger(run_name="one", run_dir=run_dir)
    for step in range(5):
        logger.log_metrics({"loss": 1.0 / (step + 1), "val/bpb": float("nan") if step == 3 else 2.0}, step)
    logger.log_hyperparams({"lr": 1e-3, "net": {"depth": 2}, "hub_token": "s3cr3t"})
    logger.set_tags({"note": "hello", "api_key": "s3cr3t"})
    figure = matplotlib.figure.Figure()
    figure.subplots().plot([1, 2])
    logger.log_figure(figure, "plots/curve.png")
    logger.log_dict({"a": [1], "password": "s3cr3t"}, "numbers.json")
    logger.log_text("plain", "notes/text.txt")
    (tmp_path / "merge.json").write_text("{}")
    logger.log_artifact(tmp_path / "merge.json")
    (tmp_path / "merge.json").unlink()  # a copy was taken
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("x")
    logger.log_artifact(tmp_path / "folder", "deep")
    logger.log_dataset("stdlib", "f" * 64, "stdlib", {"tokens": 5})
    logger.finalize("success")

    run = only_run(store)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "one"
    assert history(store, run.info.run_id, "loss") == [(step, 1.0 / (step + 1)) for step in range(5)]
    assert [step for step, value in history(store, run.info.run_id, "val/bpb") if value != value] == [3]
    assert run.data.params == {"lr": "0.001", "net/depth": "2", "hub_token": "***"}
    assert (run.data.tags["note"], run.data.tags["api_key"]) == ("hello", "***")
    assert artifacts(store, run.info.run_id) == ["deep", "merge.json", "notes", "numbers.json", "plots"]
    assert artifacts(store, run.info.run_id, "plots") == ["plots/curve.png"]
    assert artifacts(store, run.info.run_id, "deep/folder") == ["deep/folder/x.txt"]
    assert json.loads(text_of(store, run.info.run_id, "numbers.json", tmp_path)) == {"a": [1], "password": "***"}
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("stdlib", "f" * 36)
    assert (tmp_path / "mlruns" / "artifacts" / run.info.run_id / "artifacts" / "merge.json").is_file()
    assert sorted(os.listdir(run_dir)) == ["run.json"]  # nothing is left to deliver
    assert read_run_json(run_dir)["mlflow_run_id"] == logger.run_id == run.info.run_id
    assert b"s3cr3t" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_nothing_happens_before_the_first_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_delivery.MLFlowConnection, "client", property(lambda self: pytest.fail("connected")))
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run")
    assert logger.experiment is not None
    assert (logger.name, logger.version, logger.save_dir, logger.run_id) == ("", "", str(tmp_path / "run"), None)
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_tracking_uri(tmp_path, monkeypatch):
    assert BufferedMLFlowLogger()._tracking_uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    logger = BufferedMLFlowLogger()
    assert (logger._tracking_uri, logger._connection.artifact_location) == ("http://server:5000", None)
    assert BufferedMLFlowLogger(tracking_uri="sqlite:///x.db")._tracking_uri == "sqlite:///x.db"
    monkeypatch.setenv("FULGURITE_RUN_DIR", str(tmp_path / "there"))
    assert BufferedMLFlowLogger().run_dir == tmp_path / "there"


@pytest.mark.parametrize(("status", "expected"), [("success", "FINISHED"), ("failed", "FAILED")])
def test_status(tmp_path, store, status, expected):
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run")
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize(status)
    assert only_run(store).info.status == expected


def test_another_process_continues_the_run(tmp_path, store):
    run_dir = tmp_path / "run"
    for attempt, (lr, final) in enumerate([("0.1", "KILLED"), ("0.2", None)]):
        logger = BufferedMLFlowLogger(run_dir=run_dir)
        logger.log_hyperparams({"lr": lr, "depth": 2})
        logger.log_metrics({"loss": float(attempt)}, attempt)
        if attempt == 1:
            assert logger.flush(20)
            assert only_run(store).info.status == "RUNNING"
        if final:
            logger.set_final_status(final)
        logger.finalize("success")
        assert only_run(store).info.status == (final or "FINISHED")
    run = only_run(store)
    assert history(store, run.info.run_id, "loss") == [(0, 0.0), (1, 1.0)]
    assert run.data.params == {"lr": "0.1", "depth": "2"}  # MLflow keeps the first value
    assert run.data.tags["changed.lr"] == "0.2"
    assert not (run_dir / "mlflow-rejected.jsonl").exists()


def test_points_sent_twice_are_there_once(tmp_path, store):
    """kill -9 may come between sending entries and cutting them from the spool."""
    run_dir = tmp_path / "run"
    logger = BufferedMLFlowLogger(run_dir=run_dir, send_interval=60)
    logger.log_metrics({"loss": 0.5}, 3)
    lines = (run_dir / "mlflow-spool.jsonl").read_text()
    assert logger.flush(20)
    logger._close()
    (run_dir / "mlflow-spool.jsonl").write_text(lines)
    assert flush_spool(run_dir) == 2
    run_id = only_run(store).info.run_id
    assert history(store, run_id, "loss") == [(3, 0.5)]
    assert not (run_dir / "mlflow-spool.jsonl").exists()


def test_a_run_created_but_not_noted_is_found_again(tmp_path, store, monkeypatch):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_delivery, "update_run_json", _dies_with_run_id)
        logger = BufferedMLFlowLogger(run_dir=run_dir, finalize_timeout=1)
        logger.log_metrics({"loss": 0.5}, 3)
        logger.finalize("success")
    assert "mlflow_run_id" not in read_run_json(run_dir)
    assert flush_spool(run_dir) == 3
    assert history(store, only_run(store).info.run_id, "loss") == [(3, 0.5)]  # and there is only one


def _dies_with_run_id(run_dir, **fields):
    if "mlflow_run_id" in fields:
        raise RuntimeError("killed here")
    return update_run_json(run_dir, **fields)


def test_a_deleted_run_is_replaced(tmp_path, store):
    run_dir = tmp_path / "run"
    logger = BufferedMLFlowLogger(run_dir=run_dir, send_interval=0.05)
    logger.log_metrics({"loss": 1.0}, 1)
    assert logger.flush(20)
    first = only_run(store).info.run_id
    store.delete_run(first)
    logger.log_metrics({"loss": 2.0}, 2)
    deadline = time.monotonic() + 20
    while not logger.flush(20):
        assert time.monotonic() < deadline
    second = only_run(store).info.run_id
    assert second != first
    assert history(store, second, "loss") == [(2, 2.0)]
    logger.finalize()


def test_a_refused_entry_is_kept_and_does_not_block(tmp_path, store, caplog):
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run")
    logger.log_metrics({"loss": 1.0}, 1)
    logger._put({"kind": "metrics", "points": [["bad\nname", 1.0, 1, 1]]})
    logger._put({"kind": "artifact", "path": str(tmp_path / "gone"), "directory": None, "staged": False})
    logger.log_metrics({"loss": 2.0}, 2)
    logger.finalize()
    rejected = [json.loads(line) for line in (tmp_path / "run" / "mlflow-rejected.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in rejected] == ["metrics", "artifact"]
    assert history(store, only_run(store).info.run_id, "loss") == [(1, 1.0), (2, 2.0)]
    assert "MLflow refused an entry" in caplog.text


def test_an_artifact_store_that_fails_holds_up_nothing_else(tmp_path, store, monkeypatch):
    real, failures = MlflowClient.log_artifact, []

    def flaky(self, run_id, path, folder=None):
        if len(failures) < 2:
            failures.append(path)
            raise PermissionError("the bucket says no")
        real(self, run_id, path, folder)

    monkeypatch.setattr(MlflowClient, "log_artifact", flaky)
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run", send_interval=0.05)
    logger.log_text("x", "x.txt")
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize()
    run_id = only_run(store).info.run_id
    assert len(failures) == 2
    assert artifacts(store, run_id) == ["x.txt"]
    assert history(store, run_id, "loss") == [(1, 1.0)]


def test_logging_costs_microseconds(tmp_path):
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run", tracking_uri="http://127.0.0.1:9", send_interval=60)
    metrics = {f"metric_{index}": float(index) for index in range(12)}
    logger.log_metrics(metrics, 0)
    best = min(_timed(lambda: logger.log_metrics(metrics, 1)) for _ in range(300))
    assert best < 1e-3
    logger._sender.stop()


def _timed(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = BufferedMLFlowLogger(run_dir=tmp_path / "run")
    logger.log_metrics({"x": 1.0}, 1)
    logger.set_tags({"a": "b"})
    logger.log_text("x", "x.txt")
    logger.finalize()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ the spool


def drain(spool):
    entries, position, from_memory = spool.read()
    spool.done(position, from_memory)
    return entries


def test_spool_survives_a_line_cut_in_two(tmp_path, caplog):
    (tmp_path / "mlflow-spool.jsonl").write_bytes(b'{"kind": "a"}\n{"kind": "b", "val')
    spool = Spool(tmp_path)
    spool.append({"kind": "c"})
    assert drain(spool) == [{"kind": "a"}, {"kind": "c"}]
    assert "Passed over an unreadable line" in caplog.text
    assert spool.empty
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_spool_reads_in_portions_and_only_whole_lines(tmp_path):
    spool = Spool(tmp_path)
    for number in range(5):
        spool.append({"n": number})
    entries, position, _ = spool.read(max_entries=3)
    assert [entry["n"] for entry in entries] == [0, 1, 2]
    spool.done(position, 0)
    os.write(spool._file.fileno(), b'{"n": 5')
    assert [entry["n"] for entry in drain(spool)] == [3, 4]
    assert drain(spool) == []
    os.write(spool._file.fileno(), b"}\n")
    assert [entry["n"] for entry in drain(spool)] == [5]
    spool.append({"text": "x" * (5 << 20)})
    assert len(drain(spool)[0]["text"]) == 5 << 20
    assert os.path.getsize(spool.path) == 0


def test_spool_on_a_full_disk_keeps_entries_in_memory_in_order(tmp_path, caplog):
    spool = Spool(tmp_path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for number in range(20):
            spool.append({"number": number})
        first = drain(spool)
        second = drain(spool)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caplog.text.count("cannot be written") == 1
    spool.append({"number": 20})
    rest = [entry for _ in range(3) for entry in drain(spool)]
    assert [entry["number"] for entry in first + second + rest] == list(range(21))
    assert spool.empty


def test_a_second_process_takes_a_spool_of_its_own(tmp_path):
    first = Spool(tmp_path)
    second = Spool(tmp_path)
    assert first.path.name == "mlflow-spool.jsonl"
    assert second.path.name.startswith("mlflow-spool-")
    second.append({"n": 1})
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == [second.path.name]


def test_sync_leaves_a_running_process_its_spool_and_refuses_other_folders(tmp_path, store, caplog):
    run_dir = tmp_path / "run"
    spool = Spool(run_dir)
    spool.append({"kind": "status", "status": "RUNNING"})
    assert flush_spool(run_dir) == 0
    assert "belongs to a run that is still going" in caplog.text
    spool._file.close()
    assert flush_spool(run_dir) == 1
    with pytest.raises(ValueError, match="is not a run's folder"):
        flush_spool(tmp_path)
    update_run_json(run_dir, mlflow_tracking_uri="http://***@host")
    with pytest.raises(ValueError, match=r"set MLFLOW_TRACKING_URI with its credentials"):
        flush_spool(run_dir)


def test_staged_files_without_an_entry_are_removed(tmp_path):
    staging = tmp_path / "mlflow-spool-files"
    (staging / "aaaa").mkdir(parents=True)
    (staging / "bbbb").mkdir()
    (tmp_path / "mlflow-spool.jsonl").write_text(json.dumps({"kind": "artifact", "path": str(staging / "aaaa" / "x")}))
    Spool(tmp_path)
    assert os.listdir(staging) == ["aaaa"]


# ----------------------------------------------------------------------------------------------------------- RunTracker


def fit(run_dir, *callbacks, module=None, config=None, ckpt_path=None, **kwargs):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(5, verbose=False)
    tracker = RunTracker(
        "pretrain/tiny",
        config or {"model": {"lr": 0.01, "hub_token": "s3cr3t"}, "data": {"tokenizer": "gpt2"}},
        ["model.lr=0.01", "model.hub_token=s3cr3t"],
        ["lightning", "run", "pretrain/tiny", "--model.lr", "0.01", "--model.hub_token", "s3cr3t"],
    )
    logger = BufferedMLFlowLogger("tiny", run_dir=run_dir)
    trainer = tiny.make_trainer(run_dir, [tracker, *callbacks], logger=logger, **{"max_steps": 4, **kwargs})
    trainer.fit(module or tiny.TinyModule(), datamodule=tiny.TinyData(), ckpt_path=ckpt_path)
    return trainer


def test_the_record_of_a_run(tmp_path, store, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("HF_TOKEN", "environment-s3cr3t")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    (run_dir / "merged").mkdir(parents=True)
    (run_dir / "merged" / "merge.json").write_text('{"n": 4}')
    config = {"model": {"lr": 0.01, "hub_token": "s3cr3t", "note": "environment-s3cr3t"}, "data": {"tokenizer": "gpt2"}}
    fit(run_dir, config=yaml.safe_dump(config))

    run = only_run(store, "tiny")
    tags = run.data.tags
    assert tags["recipe"] == "pretrain/tiny"
    assert tags["command"] == "lightning run pretrain/tiny --model.lr 0.01 --model.hub_token '***'"
    assert tags["overrides"] == "model.lr=0.01 model.hub_token=***"
    assert (tags["seed"], tags["attempt"], tags["world_size"]) == ("5", "1", "1")
    assert (tags["slurm_job_id"], tags["slurm_array_task_id"]) == ("4711", "3")
    assert tags["version.torch"] == torch.__version__
    assert tags["cpu_count"] == environment_facts()["cpu_count"]
    assert float(tags["memory_gb"]) > 0.1
    assert tags["merged_model"] == str(run_dir / "merged")
    assert tags["fingerprint.dataset"] == "d" * 64
    names = {item.dataset.name: item.dataset.digest for item in run.inputs.dataset_inputs}
    assert names == {"dataset: stdlib": "d" * 36, "tokenizer: stdlib": "t" * 36}
    assert artifacts(store, run.info.run_id) == ["config.yaml", "merge.json", "packages.txt"]
    assert "torch==" in text_of(store, run.info.run_id, "packages.txt", tmp_path)
    expected = {"model": {"lr": 0.01, "hub_token": "***", "note": "***"}, "data": {"tokenizer": "gpt2"}}
    assert yaml.safe_load(text_of(store, run.info.run_id, "config.yaml", tmp_path)) == expected
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == config  # a resumed run reads it
    assert (run_dir / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert len(history(store, run.info.run_id, "train_loss")) == 4

    record = read_run_json(run_dir)
    assert (record["status"], record["global_step"], record["recipe"]) == ("finished", 4, "pretrain/tiny")
    assert record["attempts"][0]["status"] == "finished"
    assert record["fingerprints"]["source"] == "stdlib"
    assert record["metrics"]["train_loss"] > 0
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path != run_dir / "config.yaml"]
    assert b"s3cr3t" not in b"".join(path.read_bytes() for path in others)


def test_git_facts(tmp_path):
    assert git_facts(tmp_path) == {}
    run = {"cwd": tmp_path, "check": True, "capture_output": True}
    subprocess.run(["git", "init", "-q"], **run)
    (tmp_path / "x").write_text("x")
    subprocess.run(["git", "add", "x"], **run)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-qm", "x"], **run)
    facts = git_facts(tmp_path)
    assert len(facts["git_commit"]) == 40
    assert facts["git_dirty"] == "false"
    (tmp_path / "x").write_text("y")
    assert git_facts(tmp_path)["git_dirty"] == "true"


def test_failed_run(tmp_path, store):
    class Breaks(tiny.TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("no luck with password=s3cr3t")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="no luck"):
        fit(tmp_path / "run", module=Breaks())
    run = only_run(store, "tiny")
    assert run.info.status == "FAILED"
    assert run.data.tags["stopped_by"] == "RuntimeError: no luck with password=***"
    record = read_run_json(tmp_path / "run")
    assert (record["status"], record["attempts"][-1]["step"]) == ("failed", 2)


class Signals(tiny.TinyModule):
    def __init__(self, signum):
        super().__init__()
        self.signum = signum

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2:
            signal.raise_signal(self.signum)


@pytest.mark.parametrize(
    ("signum", "environment", "status", "mlflow_status"),
    [
        (signal.SIGINT, {}, "interrupted", "KILLED"),
        (signal.SIGTERM, {}, "interrupted", "KILLED"),
        (signal.SIGUSR1, {"SLURM_JOB_ID": "12"}, "requeued", "SCHEDULED"),
    ],
)
def test_interrupted_then_resumed(tmp_path, store, monkeypatch, signum, environment, status, mlflow_status):
    run_dir = tmp_path / "run"
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (bin_dir / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit):
            fit(run_dir, PreemptionGuard(), RNGState(), module=Signals(signum))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    run = only_run(store, "tiny")
    assert run.info.status == mlflow_status
    assert run.data.tags["stopped_by"].startswith(f"Preempted: stopped by {signum.name}, saved ")
    assert read_run_json(run_dir)["status"] == status
    assert [step for step, _ in history(store, run.info.run_id, "train_loss")] == [0, 1, 2]

    path = run_dir / "checkpoints" / "preempted-step=3.ckpt"
    fit(run_dir, RNGState(), ckpt_path=path, max_steps=6)
    again = only_run(store, "tiny")
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    assert (again.data.tags["attempt"], again.data.tags["resumed_from"]) == ("2", str(path))
    assert [step for step, _ in history(store, run.info.run_id, "train_loss")] == list(range(6))
    record = read_run_json(run_dir)
    assert [attempt["status"] for attempt in record["attempts"]] == [status, "finished"]
    assert record["attempts"][1]["resumed_from"] == str(path)


def test_kill_9_loses_nothing_that_was_logged_and_the_run_goes_on(tmp_path, store):
    run_dir = tmp_path / "run"
    run = tiny.Ranks(run_dir, "--mlflow", "--sleep", "0.05", "--every", "2", "--max-steps", "12")
    run.wait_for("step 8 ")
    run.processes[0].kill()
    run.join()
    assert read_run_json(run_dir)["status"] == "running"  # nobody could write it down
    tiny.launch(run_dir, "--mlflow", "--resume", "--max-steps", "12")
    found = only_run(store, "tiny")
    assert found.info.status == "FINISHED"
    steps = [step for step, _ in history(store, found.info.run_id, "train_loss")]
    assert sorted(set(steps)) == list(range(12))
    values = {}
    for step, value in history(store, found.info.run_id, "train_loss"):
        values.setdefault(step, set()).add(value)
    assert all(len(value) == 1 for value in values.values())  # what was trained again came out the same
    record = read_run_json(run_dir)
    assert [attempt["status"] for attempt in record["attempts"]] == ["killed", "finished"]
    assert not (run_dir / "mlflow-spool.jsonl").exists()


def test_works_without_any_logger_and_with_a_foreign_one(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    for logger in (False, CSVLogger(tmp_path / "csv")):
        trainer = tiny.make_trainer(tmp_path / "run", [RunTracker("r")], logger=logger, max_steps=1)
        trainer.fit(tiny.TinyModule(), datamodule=tiny.TinyData())
    assert read_run_json(tmp_path / "run")["status"] == "finished"


def test_checkpoints_go_to_the_run_folder_without_a_dirpath(tmp_path, store):
    fit(tmp_path / "run", ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, filename="{step}"))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt")) == [
        "step=2.ckpt",
        "step=4.ckpt",
    ]


def test_importing_writes_nothing_and_does_not_import_mlflow(tmp_path):
    code = (
        "import sys, fulgurite.callbacks.tracking, fulgurite.callbacks.progress, fulgurite.callbacks.guards;"
        "assert not [name for name in sys.modules if name == 'mlflow' or name.startswith('mlflow.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
