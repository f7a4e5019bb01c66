"""`lightning run RECIPE`: from a recipe and its overrides to a finished run in its own folder.

The recipe is checked before anything is made. Then a `LightningCLI` (`jobs.py`) builds trainer, module and data module,
adds what every run needs (tracking, progress, guards, safe checkpoints), trains, and prints a summary. A recipe with
the one key `task` names a class whose `run()` is called instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .catalog import Recipe, find_recipe
from .errors import FAILURE_EXIT_CODE, INTERRUPT_EXIT_CODE, UserError
from .overrides import Override, apply_overrides, is_class_node, load_recipe, resolve_references
from .rundir import (
    ERROR_FILE,
    Resumed,
    Start,
    find_resumed,
    lock,
    new_directory,
    publish,
    publish_error,
    rank,
    read_record,
    receive,
    released_at_the_end,
    remove_unused,
)

log = logging.getLogger(__name__)

DEFAULT_SEED = 42


@dataclass
class Request:
    """What was asked for on the command line of `lightning run`."""

    recipe: str
    overrides: list[Override] = field(default_factory=list)
    resume: str | None = None
    seed: int | None = None
    print_config: bool = False
    debug: bool = False
    command: list[str] = field(default_factory=list)


def run(request: Request) -> int:
    """Run a recipe; returns the exit code. Raises UserError for what the user can mend."""
    recipe = find_recipe(request.recipe)
    with _plain_speech(), released_at_the_end():
        return _run(request, recipe)


def _run(request: Request, recipe: Recipe) -> int:
    if rank() == 0:
        try:
            config, resumed = _resolve(request, recipe)
            job = _parse(config, recipe)
            if request.print_config:
                print(job.text(), end="")
                return 0
            start = _open(config, resumed, recipe)
        except UserError as error:
            publish_error(str(error), recipe)
            raise
        publish(start)
        _write_record(Path(start.directory), request, recipe, job)
    else:
        start = receive(recipe)
        job = _parse(start.config, recipe)
    return _guarded(job, start, request, recipe)


# ------------------------------------------------------------------------------------------------------- before the run


def _resolve(request: Request, recipe: Recipe) -> tuple[dict[str, Any], Resumed | None]:
    """The recipe, or the saved one of the run to go on with, with overrides and seeds, checked."""
    text = recipe.text()
    original = load_recipe(recipe.path)
    resumed = None
    if not request.resume:
        # mistakes in keys that need no class are found before torch is imported
        apply_overrides(load_recipe(recipe.path), request.overrides, recipe.name)
    else:
        resumed = find_resumed(recipe, request.resume)
    config = (resumed.config if resumed else None) or original
    places = apply_overrides(config, request.overrides, recipe.name)
    resolve_references(config, recipe.name)
    if not config.get("seed_everything") and config.get("seed_everything") is not False:
        config["seed_everything"] = DEFAULT_SEED

    from .validation import check_config

    check_config(config, recipe.name, text, places)
    if request.seed is not None:
        _set_seed(config, request.seed, {override.key for override in places.values()}, recipe.name)
    if not any(override.key == "trainer.precision" for override in places.values()):
        _choose_cpu_precision(config)
    return config, resumed


def _set_seed(config: dict[str, Any], seed: int, overridden: set[str], recipe: str) -> None:
    """`--seed`: the global seed, and that of every part of the recipe that takes one."""
    from .validation import import_class, parameters

    config["seed_everything"] = seed
    for section in ("model", "data", "task"):
        node: Any = config.get(section)
        if not is_class_node(node) or f"{section}.seed" in overridden:
            continue
        if "seed" in parameters(import_class(node["class_path"], section, recipe)):
            node["init_args"] = {**(node.get("init_args") or {}), "seed": seed}


def _choose_cpu_precision(config: dict[str, Any]) -> None:
    """bf16-mixed on a processor without bf16 units is several times slower than float32: take that, and say so."""
    trainer = config.get("trainer") or {}
    if trainer.get("precision") != "bf16-mixed":
        return
    import torch

    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if on_cpu and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        trainer["precision"] = "32-true"
        warnings.warn(
            "This processor has no bfloat16 units: training in float32 (trainer.precision 32-true) instead of"
            " bf16-mixed. To insist, give --trainer.precision bf16-mixed.",
            stacklevel=2,
        )


def _open(config: dict[str, Any], resumed: Resumed | None, recipe: Recipe) -> Start:
    """The run's folder, made or taken over, and the checkpoint to start from."""
    wanted = (config.get("trainer") or {}).get("default_root_dir")
    if resumed is None or resumed.directory is None:
        directory = new_directory(recipe, wanted)
    else:
        directory = resumed.directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        lock(directory)
    log.info("%s in %s", recipe.name, _shown(directory))
    checkpoint = str(resumed.checkpoint) if resumed and resumed.checkpoint else None
    if checkpoint:
        log.info("Resuming from %s.", checkpoint)
    elif resumed and read_record(directory).get("status", "submitted") != "submitted":
        log.warning(
            "The run %s has no whole checkpoint yet: it starts again from step 0, in the same folder and MLflow run.",
            _shown(directory),
        )
    return Start(str(directory), config, checkpoint)


def _write_record(directory: Path, request: Request, recipe: Recipe, job: Any) -> None:
    from ..callbacks.checkpointing import write_text_atomic
    from ..callbacks.tracking import mask_arguments, read_run_json, update_run_json

    try:
        write_text_atomic(directory / "config.yaml", job.text(), mode=0o600)  # a URL in it may hold a password
        update_run_json(
            directory,
            recipe=recipe.name,
            recipe_path=str(recipe.path),
            overrides=mask_arguments([f"{override.key}={override.text}" for override in request.overrides]),
            command=shlex.join(mask_arguments(["lightning", *request.command])),
            created=read_run_json(directory).get("created") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            status="running",
            pid=os.getpid(),
        )
    except OSError as error:
        raise UserError(f"Cannot write the run's folder {directory}: {error.strerror}.") from error


def _parse(config: dict[str, Any], recipe: Recipe) -> Any:
    """The parsed job: a `TrainingJob` or a `TaskJob`."""
    from .jobs import TaskJob, TrainingJob

    _warn_plainly()
    return TaskJob(config, recipe) if "task" in config else TrainingJob(config, recipe)


# ---------------------------------------------------------------------------------------------------- the run itself


def _guarded(job: Any, start: Start, request: Request, recipe: Recipe) -> int:
    """Run the job; turn how it ended into an exit code, `run.json`'s status and, for a user's mistake, one line."""
    from ..callbacks.guards import Preempted

    directory = Path(start.directory)
    try:
        job.build(start, request)
        job.run(start)
    except Preempted as stop:
        _note_status(directory, "requeued" if stop.requeued else "interrupted")
        if rank() == 0:
            print(f"{stop}." + ("" if stop.requeued else f"\n{_how_to_resume(recipe, directory, stop.checkpoint)}"))
        return int(stop.code or 0)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        _note_status(directory, "interrupted")
        print("Interrupted; nothing saved.", file=sys.stderr)
        return INTERRUPT_EXIT_CODE
    except Exception as error:
        if rank() == 0:
            _note_status(directory, "failed")
            with contextlib.suppress(OSError):
                (directory / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
        if request.debug or not _is_explained(error):
            raise
        where = "" if rank() == 0 else f" (process {rank()})"
        message = f"{recipe.name}{where}: {_plain(error)}"
        if job.started:
            raise UserError(f"{message} (Traceback: {_shown(directory / ERROR_FILE)})", FAILURE_EXIT_CODE) from error
        remove_unused(directory)
        raise UserError(message) from error
    _note_status(directory, "finished")
    job.report(start, recipe)
    return 0


def _is_explained(error: Exception) -> bool:
    """Whether the exception's own message is meant for the user; anything else is a bug and keeps its traceback."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from ..callbacks.guards import NonFiniteError

    kinds = (UserError, ValueError, OSError, ImportError, MisconfigurationException, NonFiniteError)
    return isinstance(error, kinds) and not isinstance(error, UnicodeError)


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _note_status(directory: Path, status: str) -> None:
    if rank() != 0:
        return
    from ..callbacks.tracking import update_run_json

    with contextlib.suppress(OSError):  # a full disk may be what stopped the run
        update_run_json(directory, status=status)


def _how_to_resume(recipe: Recipe, directory: Path, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "Training had not begun."
    name = recipe.name if "/" in recipe.name else str(recipe.path)
    return f"Go on with it:  lightning run {name} --resume {_shown(directory)}"


def _shown(path: Path) -> str:
    """A path as short as it can be written from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# What Lightning and MLflow say at every start that no user of this command can act on.
_NOISE = (
    "\N{ELECTRIC LIGHT BULB}",
    "GPU available",
    "TPU available",
    "Seed set to",
    "`Trainer.fit` stopped",
    "Using bfloat16 Automatic",
    "Restor",
)
_NOISY_LOGGERS = ("pytorch.utilities.rank_zero", "fabric.utilities.seed")
_NOISY_WARNINGS = (".*LeafSpec", ".*`srun` command is available", ".*Checkpoint directory .* exists and is not empty")


@contextlib.contextmanager
def _plain_speech() -> Iterator[None]:
    """The project's own log and warnings as plain lines; of the log, only problems on ranks above 0."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    project = logging.getLogger("fulgurite")
    before = project.handlers, project.propagate, project.level
    project.handlers, project.propagate = [handler], False
    project.setLevel(logging.INFO if rank() == 0 else logging.WARNING)
    for name in ("mlflow.store.db.utils", "alembic.runtime.migration"):
        logging.getLogger(name).setLevel(logging.WARNING)
    format_before = warnings.formatwarning
    noisy = [logging.getLogger(f"lightning.{name}") for name in _NOISY_LOGGERS]
    for logger in noisy:
        logger.addFilter(_is_worth_saying)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for logger in noisy:
            logger.removeFilter(_is_worth_saying)
        project.handlers, project.propagate = before[:2]
        project.setLevel(before[2])
        warnings.formatwarning = format_before


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)


def _warn_plainly() -> None:
    """Warnings as one line each. Lightning sets a format of its own when it is imported: call this later."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of writing model shards
    for message in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message)
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"  # type: ignore[assignment]
