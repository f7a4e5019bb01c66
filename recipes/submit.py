"""`lightning submit RECIPE`: the sbatch script of a run, readable and kept in the run's folder, handed to SLURM.

The script starts `lightning run RECIPE ... --resume auto` by srun, one process a device. It fixes the run's folder,
asks SLURM for a signal some time before the limit and may be requeued, so that a preempted or timed-out job saves a
checkpoint, goes back into the queue and continues in the same folder and MLflow run. Everything is checked before
sbatch is called. docs/slurm.md is the guide.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..callbacks.masking import mask_arguments
from ..callbacks.mlflow_spool import read_run_json, update_run_json
from .catalog import Recipe, find_recipe
from .errors import UserError, did_you_mean
from .overrides import Override, apply_overrides, load_recipe, parse_overrides
from .sbatch import TASK_ID, array_task_ids, extra_flags, render_script, time_limit_seconds

MAX_SIGNAL_SECONDS = 65535  # sbatch(1), --signal
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")

# What the script sets itself, by the option of ours that changes it: twice the same flag would win or lose silently.
OWN_FLAGS = {
    "--nodes": ("--nodes", "-N"),
    "--ntasks-per-node": ("--ntasks-per-node", "--ntasks", "-n"),
    "--gpus-per-node": ("--gpus-per-node",),
    "--cpus-per-task": ("--cpus-per-task", "-c"),
    "--mem": ("--mem",),
    "--time": ("--time", "-t"),
    "--partition": ("--partition", "-p"),
    "--account": ("--account", "-A"),
    "--qos": ("--qos", "-q"),
    "--array": ("--array", "-a"),
    "--dependency": ("--dependency", "-d"),
    "--signal-seconds": ("--signal",),
    "": (
        "--job-name",
        "-J",
        "--chdir",
        "-D",
        "--output",
        "-o",
        "--open-mode",
        "--requeue",
        "--no-requeue",
        "--parsable",
    ),
}

_RANGE = r"\d+(?:-\d+(?::\d+)?)?"
_DEPENDENCY = r"(?:singleton|(?:after|afterany|afternotok|afterok|aftercorr)(?::\d+(?:_\d+|_\*)?(?:\+\d+)?)+)"
# option: (pattern of a valid value, what was expected)
FORMATS = {
    "time": (r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "array": (rf"{_RANGE}(?:,{_RANGE})*(?:%\d+)?", "for example 0-4, 1,3,5, 0-20:5 or 0-99%8 (eight at a time)"),
    "dependency": (rf"{_DEPENDENCY}(?:[,?]{_DEPENDENCY})*", "for example afterok:1234, afterany:12:13 or singleton"),
    "mem": (r"\d+[KMGT]?", "a number of megabytes, or one with K, M, G or T, for example 64G"),
    "partition": (r"[^\s,]+(,[^\s,]+)*", "a partition's name"),
    "account": (r"\S+", "an account's name"),
    "qos": (r"\S+", "the name of a quality of service"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `lightning submit --help` lists the options.")


def build_parser() -> argparse.ArgumentParser:
    """The options of `lightning submit`; what it does not know is an override of the recipe."""
    parser = _Parser(
        prog="lightning submit",
        usage="lightning submit RECIPE [--KEY VALUE ...] [options]",
        description="Render the sbatch script of a run and hand it to SLURM. Keys of the recipe are overridden as in "
        "`lightning run`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=_positive, metavar="N", help="nodes (default: the recipe's trainer.num_nodes, else 1)")
    add("--gpus-per-node", type=_count, metavar="G", help="GPUs a node, 0 = CPU (default: the recipe's devices)")
    add("--ntasks-per-node", type=_positive, metavar="T", help="processes a node (default: one a GPU; 1 on the CPU)")
    add("--cpus-per-task", type=_positive, metavar="C", help="CPU cores a process")
    add("--mem", metavar="SIZE", help="memory a node, for example 64G")
    add("--time", metavar="TIME", help="time limit: minutes, H:M:S or D-H:M:S")
    add("--partition", metavar="NAME", help="SLURM partition")
    add("--account", metavar="NAME", help="account to charge")
    add("--qos", metavar="NAME", help="quality of service")
    add(
        "--array",
        metavar="RANGE",
        help="a run a task, for example 0-4; its number is the seed unless an override uses it",
    )
    add("--dependency", metavar="LIST", help="for example afterok:1234")
    add("--container", metavar="IMAGE", help="pyxis image, or apptainer:IMAGE (a .sif file needs no prefix)")
    add("--signal-seconds", type=_positive, default=120, metavar="S", help="warn the job S s before its limit (120)")
    add("--env-setup", action="append", default=[], metavar="SHELL", help="shell line before the run; may be repeated")
    add("--extra", action="append", default=[], metavar="FLAGS", help="sbatch flags, for example '--constraint=h100'")
    add("--resume", default="auto", metavar="FROM", help="what the first start continues from, as in `lightning run`")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Submit a recipe. `argv` follows `lightning submit`; returns the exit code, 2 for a mistake or SLURM's refusal."""
    try:
        return _submit(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _submit(arguments: list[str]) -> int:
    parser = build_parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else 2
    if arguments[0].startswith("-"):
        raise UserError(f"The recipe comes first: lightning submit RECIPE {arguments[0]} ...")
    for word in arguments:
        if CONTROL_CHARACTER.search(word):
            raise UserError(f"{word!r} holds a line break or control character: write such a value into a recipe file.")
    recipe = find_recipe(arguments[0])
    options, words = parser.parse_known_args(_join_extra(arguments[1:]))
    config = load_recipe(recipe.path)
    overrides = parse_overrides(words)
    _check_options(options)
    _complete_from_recipe(options, recipe, config)
    _check_overrides(overrides, options)
    _check_config(recipe, config, overrides, options)
    run_dir = _new_run_dir(recipe)
    script = render_script(recipe, overrides, options, run_dir, arguments)
    if options.dry_run:
        print(script, end="")
        return 0
    job_id = _hand_over(script, options, run_dir)
    _record(job_id, recipe, overrides, options, run_dir, arguments)
    log = f"task-*/slurm-{job_id}_*.out" if options.array else f"slurm-{job_id}.out"
    print(f"submitted job {job_id}: {recipe.name}, {_size(options)}")
    print(f"  run     {run_dir}\n  script  {run_dir / 'submit.sbatch'}\n  log     {run_dir / log}")
    print(f"  watch   squeue -j {job_id}\n  cancel  scancel {job_id}")
    return 0


def _join_extra(arguments: list[str]) -> list[str]:
    """`--extra VALUE` as `--extra=VALUE`: argparse takes a value like `--exclusive` for an option otherwise."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--extra":
            joined[-1] = f"--extra={word}"
        else:
            joined.append(word)
    return joined


def _size(options: argparse.Namespace) -> str:
    processes, unit = options.ntasks_per_node, "GPU" if options.gpus_per_node else "CPU process"
    plural = "" if processes == 1 else "s" if options.gpus_per_node else "es"
    return f"{options.nodes} node{'s' * (options.nodes > 1)} x {processes} {unit}{plural}"


# ------------------------------------------------------------------------------------------------------------ checks


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 for the CPU, not {text!r}")
    return int(text)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what sbatch would refuse or misread.

    Raises:
        UserError: names the option and what was expected.
    """
    for name, (pattern, expected) in FORMATS.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError(f"--{name} {value!r} is not valid: expected {expected}.")
    try:
        array_task_ids(options.array or "0")
    except ValueError as error:
        raise UserError(f"--array {options.array!r} is not valid: {error}.") from error
    seconds, limit = options.signal_seconds, time_limit_seconds(options.time or "0")
    if seconds > MAX_SIGNAL_SECONDS:
        raise UserError(f"--signal-seconds {seconds} is too large: SLURM takes at most {MAX_SIGNAL_SECONDS}.")
    if limit and seconds >= limit:
        raise UserError(
            f"--signal-seconds {seconds} leaves nothing of --time {options.time} ({limit} s): the job would be told to "
            "save and stop as soon as it starts. Lower the one or raise the other."
        )
    try:
        flags = extra_flags(options.extra)
    except ValueError as error:
        raise UserError(f"--extra {' '.join(options.extra)!r}: {error}.") from error
    for flag in flags:
        name = re.split(r"[ =]", flag)[0]
        for option, own in OWN_FLAGS.items():
            if name in own:
                mend = f"use {option} of `lightning submit`" if option else "leave it out"
                raise UserError(f"--extra {flag!r}: the script sets {name} itself; {mend}.")


def _complete_from_recipe(options: argparse.Namespace, recipe: Recipe, config: dict[str, Any]) -> None:
    """Take from the recipe's trainer section what the command leaves open of the job's size.

    Raises:
        UserError: the size stays open, or its parts contradict each other.
    """
    trainer = config.get("trainer") or {}
    options.trains = "task" not in config
    if options.nodes is None:
        options.nodes = trainer.get("num_nodes", 1)
    if options.gpus_per_node is None:
        accelerator, devices = trainer.get("accelerator"), trainer.get("devices")
        if not options.trains or accelerator == "cpu":
            options.gpus_per_node = 0
        elif accelerator in ("gpu", "cuda") and isinstance(devices, int) and devices > 0:
            options.gpus_per_node = devices
        else:
            raise UserError(f"Say how many GPUs a node {recipe.name} gets: --gpus-per-node G (0 = train on the CPU).")
    if options.ntasks_per_node is None:
        options.ntasks_per_node = options.gpus_per_node or 1
    if options.gpus_per_node and options.ntasks_per_node != options.gpus_per_node and options.trains:
        raise UserError(
            f"--ntasks-per-node {options.ntasks_per_node} with --gpus-per-node {options.gpus_per_node}: Lightning runs "
            "one process a GPU, so leave --ntasks-per-node out."
        )
    if not options.trains and options.nodes * options.ntasks_per_node > 1:
        raise UserError(f"{recipe.name} is a task without a Trainer, one process: it takes neither --nodes nor tasks.")


def _check_overrides(overrides: list[Override], options: argparse.Namespace) -> None:
    """Refuse what contradicts the job; an array that uses its tasks' number nowhere gets it as seed.

    Raises:
        UserError: an override contradicts the job or is a misspelt option of ours.
    """
    keys = [override.key for override in overrides]
    for key, option in (("num_nodes", "--nodes"), ("devices", "--gpus-per-node, on the CPU --ntasks-per-node,")):
        if f"trainer.{key}" in keys:
            raise UserError(f"--trainer.{key} follows from the job's size: use {option} instead.")
    ours = [name.removeprefix("--") for action in build_parser()._actions for name in action.option_strings]
    for key in keys:
        if "." not in key and key != "seed" and (hint := did_you_mean(key, ours, prefix="--")):
            raise UserError(f"`lightning submit` has no option --{key}.{hint}")
    uses_task_id = any(TASK_ID.search(override.text) for override in overrides)
    if uses_task_id and not options.array:
        raise UserError("An override uses $SLURM_ARRAY_TASK_ID, which only an array has: add, say, --array 0-4.")
    if options.array and not uses_task_id:
        if "seed" in keys or "seed_everything" in keys:
            raise UserError(
                "All tasks of --array would run the same seed: leave the seed out, their number is it then."
            )
        overrides.append(Override("seed", "$SLURM_ARRAY_TASK_ID"))


def _check_config(
    recipe: Recipe, config: dict[str, Any], overrides: Sequence[Override], options: argparse.Namespace
) -> None:
    """Check the recipe with its overrides as `lightning run` would, with the number of the array's first task.

    Raises:
        UserError: an unknown key, or a value of the wrong type.
    """
    task = str(array_task_ids(options.array)[0]) if options.array else ""
    filled = [Override(override.key, TASK_ID.sub(task, override.text)) for override in overrides]
    seeds = [override for override in filled if override.key == "seed"]
    if any(not override.text.isdecimal() for override in seeds):
        raise UserError(f"--seed {seeds[0].text!r} is not valid: expected a whole number.")
    places = apply_overrides(config, [override for override in filled if override.key != "seed"], recipe.name)
    if not (options.container or options.env_setup):  # their packages need not be installed here
        from .validation import check_config

        check_config(config, recipe.name, recipe.text(), places)


# -------------------------------------------------------------------------------------------------------- submission


def _new_run_dir(recipe: Recipe) -> Path:
    """Where the run will live; nothing is made yet."""
    path = Path.cwd() / "runs" / recipe.slug / time.strftime("%Y%m%d-%H%M%S")
    names = (path.with_name(f"{path.name}-{number}") for number in range(2, 1000))
    return next(candidate for candidate in (path, *names) if not candidate.exists())


def _run_folders(options: argparse.Namespace, run_dir: Path) -> dict[str | None, Path]:
    """The folder of every run of the job by its task in the array, which a single job has not."""
    if not options.array:
        return {None: run_dir}
    return {str(task): run_dir / f"task-{task}" for task in array_task_ids(options.array)}


def _hand_over(script: str, options: argparse.Namespace, run_dir: Path) -> str:
    """Write the script into the run's folder, give it to sbatch, return the job's id. A refusal leaves nothing.

    Raises:
        UserError: sbatch is missing or refused the job, or the folder cannot be written.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH: submit from a cluster's login node, or see the script by --dry-run."
        )
    path = run_dir / "submit.sbatch"
    try:
        for folder in _run_folders(options, run_dir).values():
            folder.mkdir(parents=True)  # SLURM opens the log before the job runs, and makes no folders
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the run's folder {run_dir}: {error.strerror}.") from error
    done = subprocess.run(["sbatch", "--parsable", str(path)], text=True, capture_output=True, check=False)
    if done.returncode:
        shutil.rmtree(run_dir)
        raise UserError(f"SLURM refused the job: {explain_refusal(done.stderr, options)}")
    return done.stdout.strip().partition(";")[0]


def _record(
    job_id: str,
    recipe: Recipe,
    overrides: Sequence[Override],
    options: argparse.Namespace,
    run_dir: Path,
    arguments: Sequence[str],
) -> None:
    """Start each run's run.json, without its secrets; what a job that already runs has written there stays."""
    values = {
        "recipe": recipe.name,
        "recipe_path": str(recipe.path),
        "overrides": mask_arguments([f"{override.key}={override.text}" for override in overrides]),
        "command": shlex.join(mask_arguments(["lightning", "submit", *arguments])),
        "status": "submitted",
    }
    for task, folder in _run_folders(options, run_dir).items():
        ids = {"slurm_job_id": job_id} if task is None else {"slurm_array_job_id": job_id, "slurm_array_task_id": task}
        update_run_json(folder, **{**values, **ids, **read_run_json(folder)})


def explain_refusal(stderr: str, options: argparse.Namespace) -> str:
    """sbatch's errors as one line that names the option at fault."""
    lines = [re.sub(r"^sbatch: (error|fatal): ", "", line).strip() for line in stderr.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("Batch job submission failed: ").rstrip(".") if lines else "it gave no reason"
    said = " ".join(lines).lower()
    if "invalid partition" in said:
        known = subprocess.run(["sinfo", "--noheader", "--format=%R"], text=True, capture_output=True, check=False)
        names = ", ".join(sorted(set(known.stdout.split()))) or "`sinfo` lists them"
        return f"there is no partition {options.partition!r}; --partition takes one of: {names}."
    if "account" in said:
        return f"account {options.account!r} may not be used like this ({reason}); see --account and --partition."
    if "qos" in said:
        return f"quality of service {options.qos!r} may not be used like this ({reason}); see --qos."
    if "time limit" in said:
        return f"the time limit {options.time!r} is not allowed here ({reason}); see --time."
    if any(words in said for words in ("node configuration", "more processors", "node count")):
        return f"it cannot give {_size(options)} ({reason}); see --nodes, --gpus-per-node, --cpus-per-task and --mem."
    return f"{reason}."


if __name__ == "__main__":
    sys.exit(main())
