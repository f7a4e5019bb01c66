"""What a run's record holds beyond metrics: recipe, environment, lineage, status. And the logger that carries it.

`RunTracker` keeps `run.json` and `config.yaml` in the run's folder and sends the same facts to MLflow through any
logger that offers `set_tags`, `log_text`, `log_dict`, `log_dataset`, `log_artifact` (`BufferedMLFlowLogger`,
re-exported here).
Secrets are masked on the way (`masking.py`), and of the environment only SLURM's numbers are read. The `config.yaml` in
the run's folder, which a resumed run reads, keeps them: only its owner can read it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from .checkpoint_files import write_text_atomic
from .guards import Preempted
from .masking import mask_arguments, mask_text, mask_value
from .mlflow_delivery import flush_spool
from .mlflow_logger import BufferedMLFlowLogger
from .mlflow_spool import default_tracking_uri, read_run_json, update_run_json

__all__ = [
    "BufferedMLFlowLogger",
    "RunTracker",
    "default_tracking_uri",
    "environment_facts",
    "flush_spool",
    "git_facts",
    "mask_arguments",
    "mask_text",
    "mask_value",
    "package_versions",
    "read_run_json",
    "slurm_facts",
    "update_run_json",
]

log = logging.getLogger(__name__)

_KEY_PACKAGES = ("fulgurite", "torch", "lightning", "transformers", "mlflow", "triton", "numpy", "tokenizers")
_SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_CLUSTER_NAME",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
)


class RunTracker(Callback):
    """Writes down what a run is, what it ran on and how it ended.

    Args:
        recipe: name or path of the recipe.
        config: the resolved recipe as YAML text or as a dict.
        overrides: the overrides given on the command line.
        command: the whole command line; default `sys.argv`.
        run_dir: the run's folder; default `trainer.default_root_dir`.
    """

    def __init__(
        self,
        recipe: str = "",
        config: str | dict[str, Any] = "",
        overrides: Sequence[str] = (),
        command: Sequence[str] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.overrides = list(overrides)
        self.command = list(command if command is not None else sys.argv)
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self._attempts: list[dict[str, Any]] = []

    # ---- start

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Rank 0 writes `run.json` and `config.yaml` and hands the facts to the loggers."""
        if not trainer.is_global_zero:
            return
        if self.run_dir is None:
            self.run_dir = Path(trainer.default_root_dir)
        facts = {**git_facts(), **slurm_facts()}
        config = self.config if isinstance(self.config, str) else yaml.safe_dump(self.config, sort_keys=False)
        self._attempts = read_run_json(self.run_dir).get("attempts", [])
        if self._attempts and self._attempts[-1]["status"] == "running":
            self._attempts[-1]["status"] = "killed"  # nobody was left to write it down
        self._attempts.append(
            {
                "started": _now(),
                "host": platform.node(),
                "status": "running",
                **slurm_facts(),
            }
        )
        command = shlex.join(mask_arguments(self.command))
        update_run_json(
            self.run_dir,
            recipe=self.recipe,
            overrides=mask_arguments(self.overrides),
            command=command,
            status="running",
            seed=_seed(),
            attempts=self._attempts,
            **facts,
        )
        if self.config:  # as it is, for `--resume`: only what is sent away is masked
            write_text_atomic(self.run_dir / "config.yaml", config, mode=0o600)
        tags = {
            "recipe": self.recipe,
            "command": command,
            "overrides": " ".join(mask_arguments(self.overrides)),
            "run_dir": str(self.run_dir),
            "seed": _seed(),
            "attempt": len(self._attempts),
            "world_size": trainer.world_size,
            "precision": trainer.precision,
            "strategy": type(trainer.strategy).__name__,
            **facts,
            **environment_facts(cuda=trainer.strategy.root_device.type == "cuda"),
        }
        tags = {name: value for name, value in tags.items() if value not in (None, "")}
        versions = package_versions()
        tags |= {f"version.{name}": versions[name] for name in _KEY_PACKAGES if name in versions}
        for logger in _loggers(trainer, "set_tags"):
            logger.set_tags(tags)
        for logger in _loggers(trainer, "log_text"):
            logger.log_text("".join(f"{name}=={value}\n" for name, value in versions.items()), "packages.txt")
            if self.config:
                logger.log_text(self._masked_config(), "config.yaml")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The data module is set up: its fingerprints become MLflow inputs."""
        fingerprints = getattr(trainer.datamodule, "fingerprints", None) if hasattr(trainer, "datamodule") else None
        if not trainer.is_global_zero or not fingerprints or self.run_dir is None:
            return
        fingerprints = {name: str(value) for name, value in fingerprints.items()}
        update_run_json(self.run_dir, fingerprints=mask_value("", fingerprints))
        source = fingerprints.get("source", "unknown")
        for logger in _loggers(trainer, "log_dataset"):
            for name, context in (("dataset", "training"), ("tokenizer", "tokenizer")):
                if name in fingerprints:
                    label = f"{name}: {Path(source).name or source}"
                    logger.log_dataset(label, fingerprints[name], source, fingerprints, context)
            logger.set_tags({f"fingerprint.{name}": value for name, value in fingerprints.items()})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """By now it is known where training goes on."""
        if trainer.is_global_zero and trainer.ckpt_path and self.run_dir is not None:
            resumed = {"resumed_from": str(trainer.ckpt_path), "resumed_at": trainer.global_step}
            self._attempts[-1] |= resumed
            update_run_json(self.run_dir, attempts=self._attempts)
            for logger in _loggers(trainer, "set_tags"):
                logger.set_tags(resumed)

    def _masked_config(self) -> str:
        if isinstance(self.config, str):
            try:
                config = yaml.safe_load(self.config)
            except yaml.YAMLError:
                return mask_text(self.config)
        else:
            config = self.config
        return yaml.safe_dump(mask_value("", config), sort_keys=False) if config else ""

    # ---- end

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The merged model, if a callback wrote one, and the last numbers."""
        if not trainer.is_global_zero or self.run_dir is None:
            return
        merge = self.run_dir / "merged" / "merge.json"
        if merge.is_file():
            for logger in _loggers(trainer, "log_artifact"):
                logger.log_artifact(merge)
                logger.set_tags({"merged_model": str(merge.parent)})
        self._finish("finished", trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Failed, interrupted or requeued: in `run.json` and as the MLflow run's status."""
        if not trainer.is_global_zero or self.run_dir is None:
            return
        if isinstance(exception, Preempted) and exception.requeued:
            status, mlflow_status = "requeued", "SCHEDULED"
        elif isinstance(exception, KeyboardInterrupt | SystemExit):
            status, mlflow_status = "interrupted", "KILLED"
        else:
            status, mlflow_status = "failed", "FAILED"
        reason = mask_text(f"{type(exception).__name__}: {exception}")[:2000]
        for logger in _loggers(trainer, "set_final_status"):
            logger.set_tags({"stopped_by": reason})
            logger.set_final_status(mlflow_status)
        self._finish(status, trainer, stopped_by=reason)

    def _finish(self, status: str, trainer: pl.Trainer, **fields: Any) -> None:
        assert self.run_dir is not None
        if self._attempts:
            self._attempts[-1] |= {"status": status, "ended": _now(), "step": trainer.global_step, **fields}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        try:
            update_run_json(
                self.run_dir, status=status, attempts=self._attempts, global_step=trainer.global_step, metrics=metrics
            )
        except OSError as error:  # a full disk is perhaps what stopped the run: its own error must be the one seen
            log.warning("run.json could not be updated: %s", error)


# --------------------------------------------------------------------------------------------------------------- facts


def _loggers(trainer: pl.Trainer, method: str) -> list[Any]:
    return [logger for logger in trainer.loggers if hasattr(logger, method)]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _seed() -> str | None:
    return os.environ.get("PL_GLOBAL_SEED")


def git_facts(directory: str | Path = ".") -> dict[str, str]:
    """`git_commit` and `git_dirty` of the working tree around `directory`; empty outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": str(bool(git("status", "--porcelain"))).lower()}
    except (OSError, subprocess.SubprocessError):
        return {}


def slurm_facts() -> dict[str, str]:
    """SLURM's ids of this job, with lower-case names; empty outside a job."""
    return {name.lower(): os.environ[name] for name in _SLURM_VARIABLES if name in os.environ}


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, sorted by name."""
    found = {(item.metadata["Name"] or "").lower(): item.version for item in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


def environment_facts(cuda: bool = False) -> dict[str, str]:
    """Machine: host, platform, Python, CPU, memory; GPUs and their memory if `cuda`."""
    import psutil

    facts = {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_model": _cpu_model(),
        "cpu_count": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.1f}",
    }
    if cuda:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts["gpu_count"] = str(len(devices))
        facts["gpu_model"] = ", ".join(sorted({device.name for device in devices}))
        facts["gpu_memory_gb"] = ", ".join(sorted({f"{device.total_memory / 1e9:.0f}" for device in devices}))
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
