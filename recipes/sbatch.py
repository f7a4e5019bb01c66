"""The text of an sbatch script that runs a recipe: quoting, SLURM's time and array notation, the template.

Pure functions: `recipes/submit.py` checks the options, writes the script and calls sbatch.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .catalog import Recipe
from .overrides import Override

TASK_ID = re.compile(r"\$\{?SLURM_ARRAY_TASK_ID\}?")

TEMPLATE = """\
#!/bin/bash
# {command}
{directives}

set -eo pipefail
{env_setup}
# The run's folder is fixed, so that a requeued job finds its checkpoints and goes on in the same MLflow run.
export FULGURITE_RUN_DIR={run_dir}
export FULGURITE_REQUEUE_FILE=$FULGURITE_RUN_DIR/.requeue

# Rendezvous: the first node's address as SLURM knows it; a port of this job's own, below the ephemeral ones.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(scontrol show node "$head_node" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR=${{MASTER_ADDR:-$head_node}}
export MASTER_PORT=$((12000 + SLURM_JOB_ID % 20000))

{resume}echo "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST: $FULGURITE_RUN_DIR"
status=0
{srun} || status=$?

# A run that is told to stop saves and requeues its job. Where it finds no scontrol, in a container, it leaves a file.
if [[ -e $FULGURITE_REQUEUE_FILE ]]; then
    rm "$FULGURITE_REQUEUE_FILE"
    scontrol requeue "{job}"
fi
exit "$status"
"""

RESUME_ONCE = """\
# The first start continues from what was asked for, a later one from the run's own newest checkpoint.
resume={resume}
if compgen -G "$FULGURITE_RUN_DIR/checkpoints/*" > /dev/null; then resume=auto; fi

"""


def time_limit_seconds(text: str) -> int:
    """Seconds of a SLURM time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (0 = no limit)."""
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not days and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def array_task_ids(text: str) -> list[int]:
    """The task numbers of a SLURM array: `1,4-8:2%3` -> [1, 4, 6, 8].

    Raises:
        ValueError: a range that holds no number.
    """
    numbers: set[int] = set()
    for part in text.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if int(last or first) < int(first) or int(step or 1) < 1:
            raise ValueError(f"{part!r} is an empty range")
        numbers.update(range(int(first), int(last or first) + 1, int(step or 1)))
    return sorted(numbers)


def sbatch_word(text: str) -> str:
    """Quote for an #SBATCH line, which sbatch itself reads: `#` ends it outside quotes, and `$` means nothing."""
    if re.fullmatch(r"[\w@%+=:,./*?\[\]-]+", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def shell_word(text: str) -> str:
    """Quote for bash, but let the array's task number through."""
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in TASK_ID.split(text)) or "''"


def extra_flags(extra: Sequence[str]) -> list[str]:
    """Each flag of the --extra texts with its value as one string, ready for an #SBATCH line.

    Raises:
        ValueError: an unclosed quotation or a text that does not begin with a flag.
    """
    flags: list[str] = []
    for text in extra:
        for index, word in enumerate(shlex.split(text)):
            if word.startswith("-"):
                flags.append(sbatch_word(word))
            elif index:
                flags[-1] += " " + sbatch_word(word)
            else:
                raise ValueError("expected sbatch flags, for example '--constraint=h100 --exclusive'")
    return flags


def render_script(
    recipe: Recipe, overrides: Sequence[Override], options: argparse.Namespace, run_dir: Path, arguments: Sequence[str]
) -> str:
    """The sbatch script of `lightning submit ARGUMENTS`; `options` are checked and complete (see `submit.py`)."""
    resume = "auto" if options.resume == "auto" else '"$resume"'
    return TEMPLATE.format(
        command=shlex.join(["lightning", "submit", *(word for word in arguments if word != "--dry-run")]),
        directives="\n".join(_directives(recipe, options, run_dir)),
        env_setup="".join(f"{line}\n" for line in options.env_setup),
        run_dir=shell_word(str(run_dir)) + ('/task-"$SLURM_ARRAY_TASK_ID"' if options.array else ""),
        resume="" if resume == "auto" else RESUME_ONCE.format(resume=shell_word(options.resume)),
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if options.array else "$SLURM_JOB_ID",
        srun=" \\\n    ".join(_srun(recipe, overrides, options, run_dir, resume)),
    )


def _directives(recipe: Recipe, options: argparse.Namespace, run_dir: Path) -> list[str]:
    log = "task-%a/slurm-%A_%a.out" if options.array else "slurm-%j.out"
    values = {
        # Lightning takes a job called `bash` or `interactive` for a person at a prompt and does not join its processes.
        "job-name": recipe.slug if recipe.slug not in ("bash", "interactive") else f"run-{recipe.slug}",
        "nodes": options.nodes,
        "ntasks-per-node": options.ntasks_per_node,
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "array": options.array,
        "dependency": options.dependency,
        "chdir": Path.cwd(),
        "output": f"{str(run_dir).replace('%', '%%')}/{log}",
        "open-mode": "append",
        "signal": f"SIGUSR1@{options.signal_seconds}",
    }
    lines = [f"#SBATCH --{name}={sbatch_word(str(value))}" for name, value in values.items() if value is not None]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {flag}" for flag in extra_flags(options.extra))]


def _srun(
    recipe: Recipe, overrides: Sequence[Override], options: argparse.Namespace, run_dir: Path, resume: str
) -> list[str]:
    """The srun command, a readable piece a line."""
    launch = "srun --kill-on-bad-exit=1"
    if options.cpus_per_task:
        launch += f" --cpus-per-task={options.cpus_per_task}"  # srun does not take it from sbatch since SLURM 22.05
    name = recipe.name if "/" in recipe.name else str(recipe.path)
    pieces = [launch, *_container(recipe, options, run_dir), f"{_program(options)} run {shell_word(name)}"]
    if options.trains:
        accelerator = "gpu" if options.gpus_per_node else "cpu"
        pieces.append(f"--trainer.num_nodes {options.nodes} --trainer.devices {options.ntasks_per_node}")
        pieces[-1] += f" --trainer.accelerator {accelerator}"
    for override in overrides:
        joint = "=" if override.text.startswith("--") else " "
        pieces.append(f"{shell_word(f'--{override.key}')}{joint}{shell_word(override.text)}")
    return [*pieces, f"--resume {resume}"] if options.trains else pieces


def _container(recipe: Recipe, options: argparse.Namespace, run_dir: Path) -> list[str]:
    """What srun needs to run inside the image: pyxis flags, or `apptainer exec` before the command."""
    if not options.container:
        return []
    kind, image = container_kind(options.container)
    own_file = recipe.path.parent if "/" not in recipe.name else Path.cwd()
    outside = [folder for folder in (own_file, run_dir) if not folder.is_relative_to(Path.cwd())]
    folders = [str(folder) for folder in (Path.cwd(), *outside)]
    here = shell_word(str(Path.cwd()))
    if kind == "pyxis":
        mounts = shell_word(",".join(f"{folder}:{folder}" for folder in folders))
        return [f"--container-image={shell_word(image)} --container-workdir={here}", f"--container-mounts={mounts}"]
    binds = " ".join(f"--bind {shell_word(folder)}" for folder in folders)
    gpus = "--nv " if options.gpus_per_node else ""
    return [f"apptainer exec {gpus}--pwd {here} {binds} {shell_word(image)}"]


def container_kind(container: str) -> tuple[str, str]:
    """("apptainer" | "pyxis", image): by the prefix `apptainer:` or `pyxis:`, else by a file name ending in .sif."""
    prefix, _, rest = container.partition(":")
    if prefix in ("apptainer", "pyxis") and rest:
        return prefix, rest
    return ("apptainer" if container.endswith(".sif") else "pyxis"), container


def _program(options: argparse.Namespace) -> str:
    """The `lightning` that --env-setup or a container brings; else that of the submitting interpreter."""
    if options.env_setup or options.container:
        return "lightning"
    installed = Path(sys.executable).with_name("lightning")
    if installed.exists():
        return shell_word(str(installed))
    return f"{shell_word(sys.executable)} -m fulgurite.recipes.cli"
