"""The `lightning` command (also `fulgurite`): lists, shows, runs and submits recipes; merges and exports checkpoints.

Only the chosen subcommand's modules are imported, when it is chosen: help and listings answer without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from .errors import INTERRUPT_EXIT_CODE, USAGE_EXIT_CODE, UserError, did_you_mean

USAGE = """\
Usage: lightning COMMAND ...

  run RECIPE [KEY=VALUE ...]     train, or do what else the recipe says, here
  submit RECIPE [KEY=VALUE ...]  the same as a SLURM job
  list                           the recipes, by family
  show RECIPE                    a recipe's YAML, with its comments: copy it to make your own
  merge CHECKPOINTS ... OUTPUT   average checkpoints off-line (WSM)
  export CHECKPOINT OUTPUT       a checkpoint as a Hugging Face directory
  ui                             MLflow's pages on the runs of this folder
  sync RUN_DIR                   send what a run could not send to its tracking server

`lightning COMMAND --help` explains each. `fulgurite` is the same command.
RECIPE is a name from `lightning list` or the path of a YAML file."""

RUN_USAGE = """\
Usage: lightning run RECIPE [--KEY VALUE | --KEY=VALUE | KEY=VALUE ...] [options]

Any key of the recipe can be overridden; values are YAML:
  --trainer.max_steps 200 --model.learning_rate 1e-3 data.batch_size=8
An item of a list is named by its class, and removed by null:
  --trainer.callbacks.CheckpointMerge.num_checkpoints 8 --trainer.callbacks.CheckpointMerge null

Options:
  --resume auto      go on with the newest unfinished run of this recipe, from its newest whole checkpoint
  --resume PATH      go on with a run's folder, or from a checkpoint
  --resume RUN_ID    go on with a run by its name or MLflow run id
  --seed N           seed of everything: weights, data, dropout
  --print_config     print the resolved recipe, and run nothing
  --debug            show tracebacks of errors (or FULGURITE_DEBUG=1)

`lightning run model SCRIPT.py ...` is handed to Lightning Fabric."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 1 a failed run, 2 a mistake in what was asked, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("FULGURITE_DEBUG", "0") not in ("", "0")
    try:
        return _dispatch(arguments, debug)
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        return INTERRUPT_EXIT_CODE
    except BrokenPipeError:  # `lightning list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str], debug: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else USAGE_EXIT_CODE
    name, rest = arguments[0], [word for word in arguments[1:] if word != "--debug"]
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"fulgurite {version('fulgurite')}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, otherwise="`lightning --help` lists them.")
        raise UserError(f"There is no command {name!r}.{hint}")
    return COMMANDS[name](rest, debug)


def _run(arguments: list[str], debug: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(RUN_USAGE)
        return 0 if arguments else USAGE_EXIT_CODE
    if arguments[0] == "model":
        return _fabric(arguments[1:])
    if arguments[0].endswith(".py"):
        raise UserError(
            f"{arguments[0]} is a script, not a recipe: `lightning run model {arguments[0]}` runs it by Fabric."
        )
    if arguments[0].startswith("-"):
        raise UserError(f"The recipe comes first: lightning run RECIPE {arguments[0]} ...")
    words = arguments[1:]
    if "-h" in words or "--help" in words:
        print(RUN_USAGE)
        return 0
    print_config = "--print_config" in words
    words = [word for word in words if word != "--print_config"]

    from .overrides import Override, parse_overrides

    options: dict[str, Override] = {}
    overrides = []
    for override in parse_overrides(words):
        if override.key in ("resume", "seed"):
            options[override.key] = override
        else:
            overrides.append(override)
    seed = options["seed"].value if "seed" in options else None
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise UserError(f"--seed is {options['seed'].text!r}; expected int of at least 0.")

    from .runner import Request, run

    resume = options["resume"].text if "resume" in options else None
    return run(Request(arguments[0], overrides, resume, seed, print_config, debug=debug, command=["run", *arguments]))


def _fabric(arguments: list[str]) -> int:
    """`lightning run model script.py`, the form of Lightning 2.0, is `fabric run script.py` today."""
    from lightning.fabric.cli import _main

    _main(["run", *arguments], prog_name="lightning run model", standalone_mode=True)
    return 0


def _submit(arguments: list[str], debug: bool) -> int:
    from .submit import main as submit

    return submit(arguments)


def _list(arguments: list[str], debug: bool) -> int:
    from .catalog import format_catalog

    if arguments:
        raise UserError(f"`lightning list` takes no arguments, not {arguments[0]!r}.")
    print(format_catalog())
    return 0


def _show(arguments: list[str], debug: bool) -> int:
    from .catalog import find_recipe

    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("Usage: lightning show RECIPE")
        return 0 if arguments and arguments[0] in ("-h", "--help") else USAGE_EXIT_CODE
    print(find_recipe(arguments[0]).text(), end="")
    return 0


def _merge(arguments: list[str], debug: bool) -> int:
    from .merging import main as merge

    return merge(arguments)


def _export(arguments: list[str], debug: bool) -> int:
    from .export import main as export

    return export(arguments)


def _ui(arguments: list[str], debug: bool) -> int:
    from .tracking import ui

    return ui(arguments)


def _sync(arguments: list[str], debug: bool) -> int:
    from .tracking import sync

    return sync(arguments)


COMMANDS: dict[str, Callable[[list[str], bool], int]] = {
    "run": _run,
    "submit": _submit,
    "list": _list,
    "show": _show,
    "merge": _merge,
    "export": _export,
    "ui": _ui,
    "sync": _sync,
}


if __name__ == "__main__":
    sys.exit(main())
