"""A real MLflow server on the loopback: away at first, killed amid a run, slow. Nothing is lost and nothing waits."""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import lightning.pytorch as pl
import pytest
from mlflow.tracking import MlflowClient

from fulgurite.callbacks.tracking import BufferedMLFlowLogger, RunTracker, flush_spool, read_run_json

_spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(folder, port, log):
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from mlflow.server import constants

    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = f"sqlite:///{folder}/server.db"
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = str(folder / "artifacts")
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    import uvicorn
    from mlflow.server.fastapi_app import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


class Server:
    """`mlflow server` without its process manager."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        context = multiprocessing.get_context("fork")
        self.log = self.folder / "server.log"
        self.process = context.Process(target=_serve, args=(self.folder, self.port, self.log))
        self.process.start()
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                if answer.status == 200:
                    return self
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.join()

    @property
    def client(self):
        return MlflowClient(self.uri)


@pytest.fixture
def server(tmp_path, monkeypatch, empty_store):
    import uvicorn  # noqa: F401  # here, so that no forked server has to

    folder = tmp_path / "server"
    folder.mkdir()
    shutil.copy(empty_store, folder / "server.db")
    server = Server(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    yield server
    if hasattr(server, "process"):
        server.kill()


class Proxy:
    """Passes TCP on to `port`, each portion from a client after `delay` seconds."""

    def __init__(self, port, delay):
        self.target, self.delay = port, delay
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self.listener.accept()
            upstream = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pump, args=(client, upstream, self.delay), daemon=True).start()
            threading.Thread(target=self._pump, args=(upstream, client, 0.0), daemon=True).start()

    @staticmethod
    def _pump(source, sink, delay):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class Waits(tiny.TinyModule):
    """Calls `at[step]` before that step."""

    def __init__(self, at=None, sleep=0.0):
        super().__init__()
        self.at, self.pause = at or {}, sleep

    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(self.pause)
        if action := self.at.get(self.global_step):
            action()


def fit(run_dir, module=None, max_steps=10, **kwargs):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(5, verbose=False)
    logger = BufferedMLFlowLogger("tiny", run_dir=run_dir, send_interval=0.1, **kwargs)
    trainer = tiny.make_trainer(run_dir, [RunTracker("tiny", {"a": 1})], logger=logger, max_steps=max_steps)
    started = time.monotonic()
    trainer.fit(module or Waits(), datamodule=tiny.TinyData())
    return time.monotonic() - started


def only_run(client):
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    return run


def steps(client, run, name="train_loss"):
    return [point.step for point in client.get_metric_history(run.info.run_id, name)]


def test_server_away_at_the_start(tmp_path, server, caplog):
    run_dir = tmp_path / "run"
    fit(run_dir, finalize_timeout=5)
    assert caplog.text.count("does not answer") == 1
    assert f"`lightning sync {run_dir}` sends them" in caplog.text
    assert (run_dir / "mlflow-spool.jsonl").stat().st_size > 0
    assert "mlflow_run_id" not in read_run_json(run_dir)
    with pytest.raises(Exception, match=r"[Cc]onnection|refused|Max retries"):
        flush_spool(run_dir)
    assert (run_dir / "mlflow-spool.jsonl").stat().st_size > 0

    server.start()
    assert flush_spool(run_dir) > 10
    run = only_run(server.client)
    assert run.info.status == "FINISHED"
    assert steps(server.client, run) == list(range(10))
    points = server.client.get_metric_history(run.info.run_id, "train_loss")
    assert max(point.timestamp for point in points) < run.info.end_time + 1  # of the training, not of the delivery
    names = [item.path for item in server.client.list_artifacts(run.info.run_id)]
    assert names == ["config.yaml", "packages.txt"]
    assert sorted(path.name for path in run_dir.iterdir() if path.is_file()) == ["config.yaml", "run.json"]
    assert not (run_dir / "mlflow-spool-files").exists()


def test_server_killed_amid_a_run_and_back(tmp_path, server, caplog):
    server.start()
    seen = []

    def delivered():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                seen.append(len(steps(server.client, only_run(server.client))))
                if seen[-1] >= 3:
                    return
            time.sleep(0.05)

    def kill():
        delivered()
        server.kill()

    fit(tmp_path / "run", Waits({4: kill, 30: server.start}, sleep=0.03), max_steps=36, finalize_timeout=60)
    assert seen[-1] >= 3
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again") == 1
    run = only_run(server.client)
    assert run.info.status == "FINISHED"
    assert steps(server.client, run) == list(range(36))
    assert not (tmp_path / "run" / "mlflow-spool.jsonl").exists()


def test_a_slow_server_does_not_slow_training(tmp_path, server, monkeypatch):
    server.start()
    fast = fit(tmp_path / "without", max_steps=40)  # also warms up what the first run imports
    proxy = Proxy(server.port, delay=0.7)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{proxy.port}")
    times = []
    module = Waits({0: lambda: times.append(time.monotonic()), 39: lambda: times.append(time.monotonic())})
    fit(tmp_path / "slow", module, max_steps=40, finalize_timeout=0.5)
    assert times[1] - times[0] < 5 + fast, "40 logged steps would take half a minute if each waited for the server"
    assert (tmp_path / "slow" / "mlflow-spool.jsonl").stat().st_size > 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    deadline = time.monotonic() + 60
    while not flush_spool(tmp_path / "slow"):  # the old sender still has a request under way
        assert time.monotonic() < deadline
        time.sleep(0.2)
    runs = server.client.search_runs([server.client.get_experiment_by_name("tiny").experiment_id])
    assert [steps(server.client, run) for run in runs] == [list(range(40))] * 2


def test_credentials_in_the_uri_reach_the_server_only(tmp_path, server, monkeypatch, caplog, capfd):
    uri = f"http://user:pa55w0rd@127.0.0.1:{server.port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue123456")
    with caplog.at_level(logging.DEBUG):
        fit(tmp_path / "run", finalize_timeout=2)  # away: warnings are written
        server.start()
        assert flush_spool(tmp_path / "run") > 0
        fit(tmp_path / "run", finalize_timeout=30)
    run = only_run(server.client)
    assert sorted(steps(server.client, run)) == sorted([*range(10)] * 2)
    assert read_run_json(tmp_path / "run")["mlflow_tracking_uri"] == f"http://***@127.0.0.1:{server.port}"
    captured = capfd.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    text = b"".join(written) + (captured.out + captured.err + caplog.text).encode()
    assert b"http://***@" in text
    for secret in (b"pa55w0rd", b"hf_verysecretvalue123456"):
        assert not re.search(secret, text)
