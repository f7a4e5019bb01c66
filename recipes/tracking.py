"""`lightning ui` and `lightning sync`: MLflow's pages on the project's store; entries that could not be sent yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .errors import USAGE_EXIT_CODE, UserError

UI_USAGE = """\
Usage: lightning ui [--port 5000] [--host 127.0.0.1]

Serves MLflow's pages on the store that runs started here write to: mlruns/mlflow.db, or MLFLOW_TRACKING_URI."""

SYNC_USAGE = """\
Usage: lightning sync RUN_DIR

Sends to the tracking server what the run could not send while the server was away."""


def ui(arguments: list[str]) -> int:
    """Serve MLflow's pages until Ctrl-C."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(UI_USAGE)
        return 0
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlruns').absolute() / 'mlflow.db'}"
    if uri.startswith(("http://", "https://")):
        print(f"MLFLOW_TRACKING_URI names a server, which has its own pages: {uri.rpartition('@')[2]}")
        return 0
    if "MLFLOW_TRACKING_URI" not in os.environ and not Path("mlruns/mlflow.db").is_file():
        raise UserError(
            "There is no run yet: mlruns/mlflow.db does not exist here. Start one: lightning run pretrain/wsm."
        )
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, *arguments]
    return subprocess.call(command, env={**os.environ, "MLFLOW_TRACKING_URI": uri})


def sync(arguments: list[str]) -> int:
    """Send a run's spool."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(SYNC_USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else USAGE_EXIT_CODE
    directory = Path(arguments[0])
    if not directory.is_dir():
        raise UserError(f"{directory} is not a run's folder: runs are under runs/<recipe>/.")

    from ..callbacks.tracking import flush_spool

    try:
        number = flush_spool(directory)
    except ValueError as error:
        raise UserError(str(error)) from error
    except Exception as error:  # MLflow's own, of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"The tracking server did not take the entries ({reason}); they stay.", 1) from error
    print(f"{directory}: {number} entries sent" if number else f"{directory}: nothing was waiting")
    return 0
