"""The way from the spool to MLflow: finding or creating the run, sending entries, and the thread that does it.

See `mlflow_logger.py` for the guarantees. `flush_spool` delivers what a run could not.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .masking import mask_text, mask_value
from .mlflow_spool import (
    REJECTED_NAME,
    SPOOL_NAME,
    STAGING_NAME,
    Spool,
    default_tracking_uri,
    lock_file,
    parse_lines,
    read_run_json,
    update_run_json,
)

log = logging.getLogger(__name__)

MAX_PARAM_LENGTH, MAX_TAG_LENGTH = 6000, 8000  # MLflow's own limits, as the two of the next line
_MAX_METRICS, _MAX_PARAMS = 1000, 100
_KEY_TAG = "fulgurite.run_key"
_MAX_ARTIFACT_TRIES = 20
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "RESOURCE_ALREADY_EXISTS"}


class MLFlowConnection:
    """The MLflow side: finds or creates the run, and sends entries. Every method may block or raise."""

    def __init__(
        self,
        run_dir: Path,
        tracking_uri: str,
        experiment_name: str,
        run_name: str | None = None,
        artifact_location: str | None = None,
        tags: Mapping[str, str] | None = None,
        run_id: str | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.tracking_uri = tracking_uri
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.artifact_location = artifact_location
        self.tags = dict(tags or {})
        self.run_id = run_id
        self._client: Any = None
        self._ready = False

    @property
    def client(self) -> Any:
        """The MLflow client. Creating it may create a SQLite store: one process at a time does."""
        if self._client is None:
            # one failed request must not keep the thread for minutes, and the address that MLflow prints may hold a
            # password; the user's own settings win
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            from mlflow.tracking import MlflowClient

            with _store_lock(self.tracking_uri):
                client = MlflowClient(self.tracking_uri)
                client.search_experiments(max_results=1)
            self._client = client
        return self._client

    def ensure_run(self) -> str:
        """Run id: that of `run.json`, that of a process killed before it could note it, or a new one."""
        if self._ready and self.run_id is not None:
            return self.run_id
        record = read_run_json(self.run_dir)
        run_id = self.run_id or record.get("mlflow_run_id")
        if run_id is not None and not self._exists(run_id):
            log.warning("MLflow run %s does not exist on %s: starting a new one.", run_id, mask_text(self.tracking_uri))
            run_id = None
        if run_id is None:
            key = record.get("run_key") or uuid.uuid4().hex
            update_run_json(self.run_dir, run_key=key)
            experiment_id = self._experiment()
            found = self.client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
            run_id = found[0].info.run_id if found else self._create(experiment_id, key)
        try:
            update_run_json(self.run_dir, mlflow_run_id=run_id)
        except OSError as error:  # a full disk: the run's tag finds it again
            log.warning("run.json could not be updated: %s", error)
        self.run_id, self._ready = run_id, True
        return run_id

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return False
            raise

    def _experiment(self) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment_name)
        if experiment is None:
            from mlflow.exceptions import MlflowException

            try:
                return self.client.create_experiment(self.experiment_name, artifact_location=self.artifact_location)
            except MlflowException:  # another process was faster
                experiment = self.client.get_experiment_by_name(self.experiment_name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            log.warning("The MLflow experiment %r was deleted: restoring it.", self.experiment_name)
            self.client.restore_experiment(experiment.experiment_id)
        return experiment.experiment_id

    def _create(self, experiment_id: str, key: str) -> str:
        from mlflow.tracking.context.registry import resolve_tags

        tags = {name: clip(mask_value(name, value)) for name, value in resolve_tags(self.tags).items()}
        tags[_KEY_TAG] = key
        return self.client.create_run(experiment_id, tags=tags, run_name=self.run_name).info.run_id

    def send(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sends entries in order, metrics in batches. Returns artifacts to try again later.

        Raises whatever says that the server is away; entries that it refuses are put into `mlflow-rejected.jsonl`.
        """
        again = []
        for kind, group in _grouped(entries):
            try:
                self._send_group(kind, group)
            except Exception as error:
                if self._run_is_gone(error):
                    raise  # the next try makes another
                if getattr(error, "error_code", None) in _REFUSALS or isinstance(error, FileNotFoundError):
                    for entry in group:
                        self._send_alone(kind, entry)
                elif kind == "artifact":
                    self.client.get_run(self.ensure_run())  # raises when the whole server is away
                    entry = {**group[0], "tries": group[0].get("tries", 0) + 1}
                    if entry["tries"] < _MAX_ARTIFACT_TRIES:
                        again.append(entry)
                    else:
                        self._reject(entry, error)
                else:
                    raise
        return again

    def _run_is_gone(self, error: Exception) -> bool:
        """Whether somebody deleted the run meanwhile; forgets it then."""
        if getattr(error, "error_code", None) not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return False
        if self.run_id is None or self._exists(self.run_id):
            return False
        log.warning("The MLflow run %s was deleted: starting a new one.", self.run_id)
        self.run_id, self._ready = None, False
        update_run_json(self.run_dir, mlflow_run_id=None)
        return True

    def _send_alone(self, kind: str, entry: dict[str, Any]) -> None:
        if kind in ("params", "tags") and len(entry["items"]) > 1:
            for item in entry["items"].items():
                self._send_alone(kind, {"kind": kind, "items": dict([item])})
            return
        try:
            self._send_group(kind, [entry])
        except Exception as error:
            if getattr(error, "error_code", None) not in _REFUSALS and not isinstance(error, FileNotFoundError):
                raise
            if kind == "params":  # parameters of a run never change; a resumed run may have others
                changed = {f"changed.{name}": clip(str(value)) for name, value in entry["items"].items()}
                self._send_group("tags", [{"items": changed}])
            else:
                self._reject(entry, error)

    def _reject(self, entry: dict[str, Any], error: Exception) -> None:
        with open(self.run_dir / REJECTED_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "error": mask_text(str(error))[:500]}) + "\n")
        log.warning(
            "MLflow refused an entry (%s); kept in %s.", mask_text(str(error))[:200], self.run_dir / REJECTED_NAME
        )

    def _send_group(self, kind: str, group: list[dict[str, Any]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        run_id = self.ensure_run()
        if kind == "metrics":
            points = [Metric(name, value, at, step) for entry in group for name, value, at, step in entry["points"]]
            for start in range(0, len(points), _MAX_METRICS):
                self.client.log_batch(run_id, metrics=points[start : start + _MAX_METRICS], synchronous=True)
            return
        for entry in group:
            if kind in ("params", "tags"):
                items = list(entry["items"].items())
                for start in range(0, len(items), _MAX_PARAMS):
                    part = items[start : start + _MAX_PARAMS]
                    if kind == "params":
                        self.client.log_batch(run_id, params=[Param(k, v) for k, v in part], synchronous=True)
                    else:
                        self.client.log_batch(run_id, tags=[RunTag(k, v) for k, v in part], synchronous=True)
            elif kind == "artifact":
                self.client.log_artifact(run_id, entry["path"], entry["directory"])
                if entry["staged"]:
                    shutil.rmtree(Path(entry["path"]).parent, ignore_errors=True)
            elif kind == "dataset":
                dataset = Dataset(entry["name"], entry["digest"], "local", entry["source"], None, entry["profile"])
                self.client.log_inputs(
                    run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", entry["context"])])]
                )
            elif kind == "status" and entry["status"] in ("RUNNING", "SCHEDULED"):
                self.client.update_run(run_id, status=entry["status"])
            elif kind == "status":
                self.client.set_terminated(run_id, entry["status"], entry["time"])


def _grouped(entries: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Neighbouring metrics together, everything else alone; the order stays."""
    group: list[dict[str, Any]] = []
    for entry in entries:
        if group and (entry["kind"] != "metrics" or group[0]["kind"] != "metrics"):
            yield group[0]["kind"], group
            group = []
        group.append(entry)
    if group:
        yield group[0]["kind"], group


@contextlib.contextmanager
def _store_lock(tracking_uri: str) -> Iterator[None]:
    """Keeps two jobs from creating the same SQLite store at once."""
    match = re.match(r"sqlite:///(?P<path>[^?]+)", tracking_uri)
    if match is None:
        yield
        return
    path = Path(match["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


def clip(text: Any, length: int = MAX_TAG_LENGTH) -> str:
    return str(text)[:length]


class Sender(threading.Thread):
    """Takes entries from the spool to MLflow, for as long as the process lives."""

    def __init__(self, spool: Spool, connection: MLFlowConnection, interval: float) -> None:
        super().__init__(name="mlflow-sender", daemon=True)
        self._spool = spool
        self._connection = connection
        self._interval = interval
        self._wake = threading.Event()
        self._stop_requested = False
        self._attempts = threading.Condition()
        self._num_attempts = 0  # finished tries, successful or not
        self.away = False

    def run(self) -> None:
        """Until `stop`; closes the spool then."""
        try:
            self._deliver()
        finally:
            self._spool.close()

    def _deliver(self) -> None:
        delay = self._interval
        while not self._stop_requested:
            self._wake.wait(delay)
            hurried = self._wake.is_set()
            self._wake.clear()
            delay = self._interval
            if not self._spool.empty:
                try:
                    self._drain()
                except Exception as error:  # whatever it is, training goes on and the spool keeps the entries
                    self._report_away(error)
                    delay = 2.0 if hurried else 5.0
                else:
                    self._report_back()
            with self._attempts:
                self._num_attempts += 1
                self._attempts.notify_all()

    def _drain(self) -> None:
        while True:
            entries, position, num_from_memory = self._spool.read()
            again = self._connection.send(entries)
            for entry in again:
                self._spool.append(entry)
            self._spool.done(position, num_from_memory)
            if again or self._spool.empty or self._stop_requested:
                return

    def _report_away(self, error: Exception) -> None:
        if not self.away:
            log.warning(
                "The MLflow server %s does not answer (%s: %s). Training goes on; entries wait in %s.",
                mask_text(self._connection.tracking_uri),
                type(error).__name__,
                mask_text(str(error))[:200],
                self._spool.path,
            )
        self.away = True

    def _report_back(self) -> None:
        if self.away:
            log.warning("The MLflow server answers again; the entries that waited were sent.")
        self.away = False

    def flush(self, timeout: float) -> bool:
        """Waits until the spool is empty, until the server has failed to answer once, or for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._attempts:
            target = self._num_attempts + 2  # the attempt under way may have started before the last entry
            while not self._spool.empty and self.is_alive():
                self._wake.set()
                remaining = deadline - time.monotonic()
                if remaining <= 0 or (self._num_attempts >= target and self.away):
                    break
                self._attempts.wait(min(remaining, 0.1))
        return self._spool.empty

    def stop(self) -> None:
        """Ends the thread, after what it is sending."""
        self._stop_requested = True
        self._wake.set()


def flush_spool(run_dir: str | Path, tracking_uri: str | None = None) -> int:
    """Sends what a run could not deliver (`lightning sync RUN_DIR`). Returns the number of entries sent.

    Args:
        run_dir: the run's folder.
        tracking_uri: default `MLFLOW_TRACKING_URI`, else the one the run used.

    Raises:
        ValueError: the folder is no run, or its server needs credentials that are not in the environment.
        Exception: MLflow's own, when the server does not answer; everything unsent stays in the spool.
    """
    run_dir = Path(run_dir)
    record = read_run_json(run_dir)
    files = sorted(run_dir.glob("mlflow-spool*.jsonl"))
    if not record and not files:
        raise ValueError(f"{run_dir} is not a run's folder: it has neither run.json nor {SPOOL_NAME}.")
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or record.get("mlflow_tracking_uri")
    uri = uri or default_tracking_uri()
    if "***@" in uri:
        raise ValueError(f"The run used {uri}: set MLFLOW_TRACKING_URI with its credentials, then try again.")
    connection = MLFlowConnection(
        run_dir,
        uri,
        record.get("mlflow_experiment", "fulgurite"),
        record.get("mlflow_run_name", run_dir.name),
        record.get("mlflow_artifact_location"),
    )
    sent = 0
    for path in files:
        with io.FileIO(path, "r+") as file:
            if not lock_file(file):
                log.warning("%s belongs to a run that is still going; it sends its entries by itself.", path)
                continue
            lines = file.readall().splitlines()
            entries = parse_lines(lines, path)
            again = connection.send(entries)
            os.ftruncate(file.fileno(), 0)
            file.seek(0)
            for entry in again:
                file.write(json.dumps(entry).encode() + b"\n")
            sent += len(entries) - len(again)
            if not again:
                path.unlink()
    with contextlib.suppress(OSError):
        (run_dir / STAGING_NAME).rmdir()
    return sent
