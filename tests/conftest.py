"""Settings every test shares: no network, one thread a process, nothing written outside the test's own folder."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["PYTHONHASHSEED"] = "0"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """Each test works in its own folder, so that no run, store or lock of one is seen by another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULGURITE_CACHE", os.environ.get("FULGURITE_TEST_CACHE", str(tmp_path / "cache")))
    monkeypatch.delenv("FULGURITE_RUN_DIR", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
