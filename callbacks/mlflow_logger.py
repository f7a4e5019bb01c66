"""MLflow logging that a slow or dead tracking server can neither stop nor lose.

Every entry (metrics, parameters, tags, artifacts, status) is first appended to `mlflow-spool.jsonl` in the run's
folder, which takes microseconds, and sent by a background thread. What has been sent is cut from the file. So:

- training waits for nothing but one `write` to the run's folder;
- kill -9 loses nothing that was logged; what had been sent but not yet cut is sent again, which MLflow absorbs, since
  every metric keeps its own time and step;
- while the server is away the file grows; it is sent when the server is back, when the run is resumed, or by
  `lightning sync RUN_DIR` (`flush_spool`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.logger import _add_prefix, _convert_params, _flatten_dict
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from .masking import mask_text, mask_value
from .mlflow_delivery import MAX_PARAM_LENGTH, MLFlowConnection, Sender, clip
from .mlflow_spool import DEFAULT_STORE, STAGING_NAME, Spool, default_tracking_uri, read_run_json, update_run_json

log = logging.getLogger(__name__)

_MAX_STAGED_BYTES = 64 << 20  # larger artifacts are sent from where they are
_STATUSES = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class _LazyClient:
    """The MLflow client of `logger.experiment`: made at its first use, for users who need MLflow itself (may block)."""

    def __init__(self, connection: MLFlowConnection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.client, name)


class BufferedMLFlowLogger(MLFlowLogger):
    """Lightning's `MLFlowLogger` with all writes spooled to the run's folder and sent in the background.

    Nothing is read, written or created before the first entry; the MLflow run itself may come to be much later, when
    its server answers. A run folder whose `run.json` names an MLflow run continues that run. Points logged again after
    resuming from an older checkpoint are added: MLflow shows the newest at each step as the current one.

    Args:
        experiment_name: MLflow experiment, created if it does not exist.
        run_name: shown by MLflow.
        run_dir: the run's folder; default `FULGURITE_RUN_DIR`, else the current directory.
        tracking_uri: default `MLFLOW_TRACKING_URI`, else `sqlite:///mlruns/mlflow.db`.
        artifact_location: of a new experiment; default `mlruns/artifacts` beside the default store, else the
            server's choice.
        tags: set on the run when it is created.
        run_id: continue this MLflow run.
        prefix: put before metric names.
        send_interval: seconds between two deliveries.
        finalize_timeout: seconds to wait for the delivery at the end of the run; what is left stays in the spool.
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        experiment_name: str = "fulgurite",
        run_name: str | None = None,
        run_dir: str | Path | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        tags: dict[str, Any] | None = None,
        run_id: str | None = None,
        prefix: str = "",
        send_interval: float = 5.0,
        finalize_timeout: float = 30.0,
    ) -> None:
        Logger.__init__(self)  # MLFlowLogger's own __init__ connects to the store
        if tracking_uri is None:
            tracking_uri = default_tracking_uri()
            if "MLFLOW_TRACKING_URI" not in os.environ and artifact_location is None:
                artifact_location = str(Path(DEFAULT_STORE).absolute() / "artifacts")
        self.run_dir = Path(run_dir or os.environ.get("FULGURITE_RUN_DIR") or ".").absolute()
        self._connection = MLFlowConnection(
            self.run_dir, tracking_uri, experiment_name, run_name, artifact_location, tags, run_id
        )
        self._tracking_uri = tracking_uri
        self._prefix = prefix
        self._send_interval = send_interval
        self._finalize_timeout = finalize_timeout
        self._final_status: str | None = None
        self._spool: Spool | None = None
        self._sender: Sender | None = None
        self._started = False

    # ---- what Lightning reads

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's own client, connected at its first use; direct calls may block, so prefer the methods below."""
        return _LazyClient(self._connection)

    @property
    def run_id(self) -> str | None:
        """MLflow's run id, or None while the run has not been created."""
        return self._connection.run_id or read_run_json(self.run_dir).get("mlflow_run_id")

    @property
    def experiment_id(self) -> str | None:
        """Asks the server."""
        return self._connection._experiment()

    @property
    def name(self) -> str:
        """Empty, like `version`: from them Lightning builds the checkpoint folder, and it is `<run>/checkpoints`."""
        return ""

    @property
    def version(self) -> str:
        """Empty; see `name`."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.run_dir)

    # ---- what is logged

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Spools one point a metric, with the time of this call."""
        now = int(time.time() * 1000)
        named = _add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        points = [
            [re.sub(r"[^\w/. :-]+", "_", name), float(value), now, int(step or 0)]
            for name, value in named.items()
            if not isinstance(value, str)
        ]
        if points:
            self._put({"kind": "metrics", "points": points})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Spools parameters, flattened (`optimizer/lr`), without secrets."""
        flat = _flatten_dict(_convert_params(params))
        items = {
            re.sub(r"[^\w/. :-]+", "_", name)[:250]: clip(mask_value(name, value), MAX_PARAM_LENGTH)
            for name, value in flat.items()
        }
        if items:
            self._put({"kind": "params", "items": items})

    @rank_zero_only
    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Spools tags, without secrets."""
        items = {name: clip(mask_value(name, value)) for name, value in tags.items()}
        if items:
            self._put({"kind": "tags", "items": items})

    @rank_zero_only
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None) -> None:
        """Spools a file or folder; up to 64 MB are copied at once, so that it may change or go afterwards."""
        path = Path(local_path).absolute()
        if not path.exists():
            raise FileNotFoundError(f"There is no artifact at {path}.")
        size = sum(item.stat().st_size for item in ([path] if path.is_file() else path.rglob("*")) if item.is_file())
        staged = size <= _MAX_STAGED_BYTES
        if staged:
            target = self._stage(path.name)
            shutil.copy2(path, target) if path.is_file() else shutil.copytree(path, target)
            path = target
        self._put({"kind": "artifact", "path": str(path), "directory": artifact_path, "staged": staged})

    @rank_zero_only
    def log_figure(self, figure: Any, artifact_file: str) -> None:
        """Spools a matplotlib figure, drawn now, as `artifact_file` (its suffix chooses the format)."""
        target = self._stage(Path(artifact_file).name)
        figure.savefig(target, bbox_inches="tight")
        self._put_staged(target, artifact_file)

    @rank_zero_only
    def log_text(self, text: str, artifact_file: str) -> None:
        """Spools a text file, without secrets."""
        target = self._stage(Path(artifact_file).name)
        target.write_text(mask_text(text), encoding="utf-8")
        self._put_staged(target, artifact_file)

    @rank_zero_only
    def log_dict(self, dictionary: dict[str, Any], artifact_file: str) -> None:
        """Spools a dict as JSON, or YAML if `artifact_file` ends so, without secrets."""
        masked = mask_value("", dictionary)
        as_yaml = artifact_file.endswith((".yaml", ".yml"))
        target = self._stage(Path(artifact_file).name)
        target.write_text(yaml.safe_dump(masked) if as_yaml else json.dumps(masked, indent=2), encoding="utf-8")
        self._put_staged(target, artifact_file)

    @rank_zero_only
    def log_dataset(
        self, name: str, digest: str, source: str, profile: Mapping[str, Any], context: str = "training"
    ) -> None:
        """Spools a data set as an MLflow input, as `mlflow.log_input` does. MLflow keeps 36 characters of a digest."""
        self._put(
            {
                "kind": "dataset",
                "name": name,
                "digest": digest[:36],
                "source": json.dumps({"uri": mask_text(source)}),
                "profile": json.dumps(mask_value("", profile)),
                "context": context,
            }
        )

    @rank_zero_only
    def set_final_status(self, status: str) -> None:
        """Status for `finalize` to set whatever Lightning says then: FINISHED, FAILED, KILLED or SCHEDULED."""
        self._final_status = status

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Spools the status and waits, not for ever, until everything is delivered."""
        if not self._started:
            return
        final = self._final_status or _STATUSES.get(status, status.upper())
        self._put({"kind": "status", "status": final, "time": int(time.time() * 1000)})
        self.flush(self._finalize_timeout)
        self._close()

    @rank_zero_only
    def flush(self, timeout: float = 30.0) -> bool:
        """Tries to deliver now. Returns whether nothing is left; warns where to find what is."""
        if self._sender is None or self._spool is None:
            return True
        delivered = self._sender.flush(timeout)
        if not delivered:
            log.warning(
                "MLflow entries that could not be delivered are kept in %s; `lightning sync %s` sends them.",
                self._spool.path,
                self.run_dir,
            )
        return delivered

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Checkpoints stay in the run's folder."""

    # ---- plumbing

    def _open(self) -> Spool:
        if self._spool is None:
            self._spool = Spool(self.run_dir)
            self._sender = Sender(self._spool, self._connection, self._send_interval)
            self._sender.start()
        if not self._started:
            self._started = True
            with contextlib.suppress(OSError):  # a full disk; what is missing then is only for `flush_spool`
                update_run_json(
                    self.run_dir,
                    mlflow_tracking_uri=mask_text(self._tracking_uri),
                    mlflow_experiment=self._connection.experiment_name,
                    mlflow_run_name=self._connection.run_name,
                    mlflow_artifact_location=self._connection.artifact_location,
                )
            self._spool.append({"kind": "status", "status": "RUNNING"})
        return self._spool

    def _put(self, entry: dict[str, Any]) -> None:
        self._open().append(entry)

    def _stage(self, name: str) -> Path:
        self._open()  # before the file is there: opening removes files that no entry names
        folder = self.run_dir / STAGING_NAME / uuid.uuid4().hex
        folder.mkdir(parents=True)
        return folder / name

    def _put_staged(self, path: Path, artifact_file: str) -> None:
        folder = str(Path(artifact_file).parent)
        self._put(
            {"kind": "artifact", "path": str(path), "directory": None if folder == "." else folder, "staged": True}
        )

    def _close(self) -> None:
        if self._sender is not None and self._spool is not None:
            self._sender.stop()
            self._sender.join(0.5)
        self._sender = self._spool = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_spool": None, "_sender": None}
