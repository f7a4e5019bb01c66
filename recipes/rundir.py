"""The folder of a run: made or found again, locked while the run lives, and agreed upon by all of its processes.

Rank 0 decides (`find_resumed`, `new_directory`) and publishes a `Start`; the other ranks wait for it (`receive`). How
it travels depends on who started the processes: Lightning's own launcher hands it down in the environment, torchrun has
a key-value store, SLURM shares the run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..callbacks.checkpoint_files import write_text_atomic
from .catalog import Recipe
from .errors import UserError, did_you_mean
from .overrides import load_recipe

RUN_DIR = "FULGURITE_RUN_DIR"
START = "FULGURITE_START"
RUNS_FOLDER = Path("runs")
ERROR_FILE = "error.txt"
TOKENIZER_FOLDER = "tokenizer"  # in the run's folder
WAIT_SECONDS = 600.0
_locks: dict[Path, Any] = {}  # open files: a lock lasts as long as its process


@dataclass
class Start:
    """What all processes of a run agree on: its folder, the recipe with its overrides, the checkpoint to go on from."""

    directory: str
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    error: str | None = None


# ------------------------------------------------------------------------------------------------------------ processes


def rank() -> int:
    """This process's rank, before any process group exists."""
    if os.environ.get("NODE_RANK", "0") != "0" and "RANK" not in os.environ:
        return int(os.environ["NODE_RANK"])
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if variable in os.environ:
            return int(os.environ[variable])
    return 0


def publish(start: Start) -> None:
    """Rank 0: let the other processes of the run know."""
    text = json.dumps(asdict(start))
    os.environ[RUN_DIR] = start.directory
    os.environ[START] = text  # children of Lightning's launcher inherit it
    if _under_torchrun():
        _store().set(_start_key(), text)
    elif _under_slurm():
        write_text_atomic(_start_file(start.directory), text, mode=0o600)


def publish_error(message: str, recipe: Recipe) -> None:
    """Rank 0: tell the other processes, if there are any, why there will be no run."""
    if _under_torchrun():
        publish(Start("", error=message))
    elif _under_slurm():
        directory = Path(os.environ.get(RUN_DIR) or _slurm_directory(recipe))
        if directory.is_dir():
            publish(Start(str(directory), error=message))


def receive(recipe: Recipe) -> Start:
    """Any other rank: wait for what rank 0 decided.

    Raises:
        UserError: rank 0 failed, or said nothing for ten minutes.
    """
    if _under_torchrun():
        text = _store().get(_start_key()).decode()
    elif _under_slurm():
        text = _wait_for(_start_file(os.environ.get(RUN_DIR) or _slurm_directory(recipe)))
    elif START in os.environ:
        text = os.environ[START]
    else:
        raise UserError(f"Process {rank()} does not know its run: start all processes by torchrun or srun.")
    start = Start(**json.loads(text))
    if start.error is not None:
        raise UserError(start.error)
    os.environ[RUN_DIR] = start.directory
    return start


def _under_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _under_slurm() -> bool:
    # Lightning takes a job of this name for a person at a prompt, and starts the processes itself
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ and not interactive


def _store() -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=WAIT_SECONDS))


def _start_key() -> str:
    return f"fulgurite/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _start_file(directory: str) -> Path:
    parts = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return Path(directory) / f".start-{'-'.join(parts)}.json"


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="utf-8")
        time.sleep(0.2)
    raise UserError(f"Process {rank()} waited {WAIT_SECONDS:.0f} s for {path}: is the run's folder on a shared disk?")


# -------------------------------------------------------------------------------------------------------------- folders


def new_directory(recipe: Recipe, wanted: str | None = None) -> Path:
    """The folder of a new run: `wanted`, `FULGURITE_RUN_DIR`, or `runs/<recipe>/<time>`. Made and locked.

    Raises:
        UserError: the folder already holds the checkpoints of a run, or cannot be written.
    """
    fixed = os.environ.get(RUN_DIR) or wanted
    if fixed is None and _under_slurm():
        fixed = _slurm_directory(recipe)
    try:
        if fixed is not None:
            path = Path(fixed).absolute()
            path.mkdir(parents=True, exist_ok=True)
            if any(path.glob("checkpoints/*")):
                raise UserError(
                    f"{path} already holds a run: add --resume auto to go on with it, or choose another folder."
                )
        else:
            path = _unique(RUNS_FOLDER / recipe.slug / time.strftime("%Y%m%d-%H%M%S"))
        lock(path)
    except OSError as error:
        raise UserError(f"Cannot write the run's folder {error.filename or fixed}: {error.strerror}.") from error
    return path


def _slurm_directory(recipe: Recipe) -> str:
    """The folder of a run that was started by a plain srun: one that every process knows by itself."""
    return str((RUNS_FOLDER / recipe.slug / f"slurm-{os.environ['SLURM_JOB_ID']}").absolute())


def _unique(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate.absolute()
    raise UserError(f"{path} and 998 more of its name are there already.")


def remove_unused(directory: Path) -> None:
    """Rank 0: take away the folder of a run that never began, unless something else than our first notes is there."""
    notes = {".lock", "config.yaml", "run.json", ERROR_FILE}
    tracked = "attempts" in read_record(directory)
    if (
        rank() == 0
        and not tracked
        and all(path.name in notes or path.name.startswith(".start-") for path in directory.iterdir())
    ):
        shutil.rmtree(directory, ignore_errors=True)


def lock(directory: Path) -> None:
    """Keep the folder for this process until it ends. Raises UserError when another one has it."""
    if directory.absolute() in _locks:
        return
    file = open(directory / ".lock", "w")  # noqa: SIM115 - stays open on purpose
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"The run {directory} is still running: stop it first, or wait for it.") from error
    except OSError:  # a file system without locks
        pass
    _locks[directory.absolute()] = file


@contextlib.contextmanager
def released_at_the_end() -> Iterator[None]:
    """Let go of the run's folder, and of what was said about it in the environment, when the block ends."""
    before = {name: os.environ.get(name) for name in (RUN_DIR, START)}
    try:
        yield
    finally:
        while _locks:
            _locks.popitem()[1].close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_locked(directory: Path) -> bool:
    """Whether a living process holds the run."""
    with contextlib.suppress(OSError), open(directory / ".lock") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_record(directory: Path) -> dict[str, Any]:
    """The run's `run.json`, or an empty dict."""
    try:
        return json.loads((directory / "run.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def runs_of(recipe: Recipe | None = None) -> Iterator[Path]:
    """The folders of the runs of a recipe (of all), newest first; each task of a SLURM array is a run."""
    pattern = f"{recipe.slug if recipe else '*'}/*"
    found = [path.parent for depth in ("", "/task-*") for path in RUNS_FOLDER.glob(f"{pattern}{depth}/run.json")]
    yield from sorted(
        found, key=lambda path: (path.name if "task-" not in path.name else path.parent.name, path.name), reverse=True
    )


# --------------------------------------------------------------------------------------------------------------- resume


@dataclass
class Resumed:
    """A run to go on with, locked; from step 0 where `checkpoint` is None.

    `config` is None where a bare checkpoint has no saved recipe beside it.
    """

    directory: Path | None
    checkpoint: Path | None
    config: dict[str, Any] | None


def find_resumed(recipe: Recipe, resume: str) -> Resumed:
    """What `--resume auto|PATH|RUN_ID` means. `auto` is the newest unfinished run, whether it has a checkpoint or not.

    Raises:
        UserError: there is nothing to go on with; says what to do.
    """
    fixed = os.environ.get(RUN_DIR)
    if resume == "auto":
        if fixed:  # the first start of a submitted job has nothing yet
            directory = Path(fixed)
            return Resumed(directory, _newest_checkpoint(directory), _saved_config(directory))
        directory = _newest_unfinished(recipe)
        return _resume_directory(recipe, directory)
    path = Path(resume).expanduser()
    if not path.exists():
        _put_back(path)
    if (path / "run.json").is_file():
        found = _resume_directory(recipe, path)
    elif path.exists():
        found = _resume_checkpoint(recipe, path)
    else:
        found = _resume_directory(recipe, _find_run(resume))
    if fixed:
        found.directory = Path(fixed)
    return found


def _newest_unfinished(recipe: Recipe) -> Path:
    running = None
    for directory in runs_of(recipe):
        if read_record(directory).get("status") in ("finished", "submitted"):
            continue
        if not is_locked(directory):
            return directory
        running = running or directory
    if running is not None:
        raise UserError(f"Nothing to resume: the only unfinished run of {recipe.name}, {running}, is still running.")
    raise UserError(
        f"Nothing to resume: there is no unfinished run of {recipe.name} under {RUNS_FOLDER / recipe.slug}. Start one "
        "without --resume, or name a finished run or a checkpoint: --resume PATH."
    )


def _resume_directory(recipe: Recipe, directory: Path) -> Resumed:
    _check_recipe(recipe, directory)
    checkpoint, status = _newest_checkpoint(directory), read_record(directory).get("status")
    if checkpoint is None and status in ("finished", "submitted"):
        raise UserError(f"The run {directory} is {status} and has no whole checkpoint: start one without --resume.")
    return Resumed(directory, checkpoint, _saved_config(directory))


def _resume_checkpoint(recipe: Recipe, path: Path) -> Resumed:
    from ..callbacks.checkpointing import verify_checkpoint

    path = path.absolute()
    try:
        verify_checkpoint(path)
    except (ValueError, OSError) as error:
        raise UserError(f"Cannot resume: {error}") from error
    for directory in path.parents[:2]:
        if (directory / "run.json").is_file():
            _check_recipe(recipe, directory)
            return Resumed(directory, path, _saved_config(directory))
    return Resumed(None, path, None)


def _find_run(name: str) -> Path:
    names: dict[str, Path] = {}
    for directory in runs_of():
        for known in (directory.name, read_record(directory).get("mlflow_run_id")):
            if known is not None:
                names.setdefault(known, directory)
    if name in names:
        return names[name]
    hint = did_you_mean(name, names, otherwise=f"Runs are under {RUNS_FOLDER}/.")
    raise UserError(f"Nothing to resume: no checkpoint, run or MLflow run is called {name!r}.{hint}")


def _check_recipe(recipe: Recipe, directory: Path) -> None:
    own = read_record(directory).get("recipe")
    if own and own not in (recipe.name, str(recipe.path)):
        raise UserError(
            f"{directory} is a run of {own}, not of {recipe.name}: `lightning run {own} --resume {directory}`."
        )


def _newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint of a run, which is locked first; None where it has none, or does not exist yet."""
    from ..callbacks.checkpointing import find_resumable

    if not directory.is_dir():
        return None
    given = read_record(directory).get("checkpoint_folders") or ["checkpoints"]
    folders = [folder for folder in (directory / name for name in given) if folder.is_dir()]
    _tidy(directory, folders)
    for folder in folders:
        if (found := find_resumable(folder)) is not None:
            return found
    return None


def _put_back(checkpoint: Path) -> None:
    """A checkpoint that is not there may be one that a killed save had set aside."""
    for directory in checkpoint.absolute().parents[:2]:
        if (directory / "run.json").is_file() and checkpoint.parent.is_dir():
            _tidy(directory, [checkpoint.parent])


def _tidy(directory: Path, folders: list[Path]) -> None:
    """Lock a run, and clear up what its killed saves left: a folder that was set aside is a checkpoint again."""
    from ..callbacks.checkpointing import remove_leftovers

    try:
        lock(directory.absolute())
        for folder in folders:
            remove_leftovers(folder)
    except OSError as error:
        raise UserError(f"Cannot write the run's folder {error.filename or directory}: {error.strerror}.") from error


def _saved_config(directory: Path) -> dict[str, Any] | None:
    path = directory / "config.yaml"
    return load_recipe(path) if path.is_file() else None
