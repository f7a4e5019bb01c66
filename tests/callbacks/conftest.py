"""An empty MLflow store, made once: its tables take seconds, a copy of the file does not."""

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
