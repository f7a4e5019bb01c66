"""`lightning sync` and `lightning ui`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient


@pytest.fixture
def closed_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_sync_sends_what_waited(lightning, tiny, monkeypatch, closed_port):
    """The server is away for the whole run; later there is one (here a store of the same name of another kind)."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = lightning("run", tiny)
    assert result.code == 0
    (run,) = Path("runs/tiny").iterdir()
    assert f"lightning sync {run}" in result.out
    refused = lightning("sync", str(run))
    assert refused.code == 1
    assert "did not take the entries" in refused.errors[0]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path('other.db').absolute()}")
    assert "entries sent" in lightning("sync", str(run)).out
    run_id = json.loads((run / "run.json").read_text())["mlflow_run_id"]
    data = MlflowClient(f"sqlite:///{Path('other.db').absolute()}").get_run(run_id).data
    assert data.metrics["tokens_seen"] == 192
    assert lightning("sync", str(run)).out == f"{run}: nothing was waiting\n"


def test_sync_of_another_folder(refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal("sync", "empty").startswith("empty is not a run's folder")


@pytest.mark.slow
def test_ui_serves_the_projects_store(lightning, tiny, closed_port):
    assert lightning("run", tiny).code == 0
    command = [sys.executable, "-m", "fulgurite.recipes.cli", "ui", "--port", str(closed_port), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{closed_port}/api/2.0/mlflow/experiments/search",
            data=b'{"max_results": 10}',
            headers={"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=5))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.5)
        assert "tiny" in [experiment["name"] for experiment in answer["experiments"]]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
