"""The two kinds of job a recipe describes: a training (`TrainingJob`) and a plain task (`TaskJob`)."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from ..callbacks.checkpointing import AtomicCheckpointIO, CheckpointSafety, RNGState
from ..callbacks.guards import NonFiniteGuard, PreemptionGuard
from ..callbacks.progress import ThroughputProgressBar
from ..callbacks.tracking import BufferedMLFlowLogger, RunTracker, update_run_json
from .catalog import Recipe
from .errors import UserError
from .rundir import TOKENIZER_FOLDER, Start
from .validation import import_class

log = logging.getLogger(__name__)


class TrainingJob:
    """A recipe with `trainer`, `model` and `data`."""

    def __init__(self, config: dict[str, Any], recipe: Recipe) -> None:
        self._cli = _CLI(copy.deepcopy(config), recipe)  # parsing changes it

    @property
    def started(self) -> bool:
        """Whether training began: what fails before is a mistake in the recipe or its data."""
        return self._cli.notes.began

    def text(self) -> str:
        """The resolved recipe as YAML, defaults included."""
        return self._cli.parser.dump(self._cli.config, skip_none=False)

    def build(self, start: Start, request: Any) -> None:
        """Make trainer, module and data module."""
        self._cli.build(start, request)

    def run(self, start: Start) -> None:
        """Train."""
        cli = self._cli
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=start.checkpoint, weights_only=True)

    def report(self, start: Start, recipe: Recipe) -> None:
        """Print the summary, and keep it as summary.txt."""
        from .summary import print_summary

        if self._cli.trainer.is_global_zero:
            validated = self._cli.notes.validated_step
            print_summary(self._cli.trainer, self._cli.model, Path(start.directory), recipe, validated)


class TaskJob:
    """A recipe with the one key `task`: a class whose `run()` does the work."""

    def __init__(self, config: dict[str, Any], recipe: Recipe) -> None:
        self._config = config
        self._recipe = recipe
        self._task: Any = None
        self.started = False

    def text(self) -> str:
        """The recipe as YAML."""
        return yaml.safe_dump(self._config, sort_keys=False)

    def build(self, start: Start, request: Any) -> None:
        """Make the task."""
        seed = self._config.get("seed_everything")
        if seed is not False:
            seed_everything(None if seed is True else seed, workers=True, verbose=False)
        node = self._config["task"]
        found = import_class(node["class_path"], "task", self._recipe.name)
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_class_arguments(found, "task", fail_untyped=False)
        parsed = _quietly(parser.parse_object, {"task": node.get("init_args") or {}}, self._recipe)
        self._task = parser.instantiate_classes(parsed).task

    def run(self, start: Start) -> None:
        """Call its `run()`."""
        self.started = True
        self._task.run()

    def report(self, start: Start, recipe: Recipe) -> None:
        """A task reports by itself."""


class _CLI(LightningCLI):
    """A LightningCLI that takes a checked dict, builds when it is told to, and adds what every run needs."""

    def __init__(self, config: dict[str, Any], recipe: Recipe) -> None:
        self._recipe = recipe
        self.notes = _RunNotes()
        super().__init__(
            args=config,
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            parser_kwargs={"exit_on_error": False},
            # our data modules place their samples by rank themselves
            trainer_defaults={"use_distributed_sampler": False},
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = _quietly(parser.parse_object, args, self._recipe)

    def instantiate_classes(self) -> None:
        """Nothing yet: see `build`."""

    def build(self, start: Start, request: Any) -> None:
        self._start, self._request = start, request
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._get(self.config_init, "trainer")
        callbacks = _as_list(given.callbacks)
        directory = Path(self._start.directory)
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(directory / "checkpoints")
        extra = self._extra_callbacks(callbacks, directory)
        if (
            not any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
            and given.enable_checkpointing is not False
        ):
            extra.append(ModelCheckpoint(dirpath=directory / "checkpoints"))
        self.trainer_defaults["callbacks"] = extra
        kwargs["default_root_dir"] = str(directory)
        if given.enable_model_summary is None:
            kwargs["enable_model_summary"] = False  # `_RunNotes` says it in one line
        if given.logger in (None, True):
            kwargs["logger"] = BufferedMLFlowLogger(self._recipe.name, run_name=directory.name, run_dir=directory)
        if not _writes_its_own_checkpoints(given.strategy):
            plugins = _as_list(given.plugins)
            if not any(isinstance(plugin, AtomicCheckpointIO) for plugin in plugins):
                kwargs["plugins"] = [*plugins, AtomicCheckpointIO()]
        trainer = super().instantiate_trainer(**kwargs)
        strategy = trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            sizes = strategy._data_parallel_size, strategy._tensor_parallel_size
            if sizes == ("auto", 1):  # Lightning's `auto` is the number of nodes, and would leave GPUs idle
                strategy._data_parallel_size = trainer.num_nodes * trainer.num_devices
        self._record_checkpoint_folders(trainer, directory)
        return trainer

    def _extra_callbacks(self, given: list[Any], directory: Path) -> list[Callback]:
        tracker = RunTracker(
            recipe=self._recipe.name,
            config=self.parser.dump(self.config, skip_none=False),
            overrides=[f"{override.key}={override.text}" for override in self._request.overrides],
            command=["lightning", *self._request.command],
        )
        extra: list[Callback] = [
            tracker,
            self.notes,
            CheckpointSafety(),
            RNGState(),
            NonFiniteGuard(),
            PreemptionGuard(),
        ]
        if self._get(self.config_init, "trainer").enable_progress_bar is not False:
            extra.append(ThroughputProgressBar())
        kinds = [ProgressBar if isinstance(callback, ProgressBar) else type(callback) for callback in extra]
        return [
            callback
            for callback, kind in zip(extra, kinds, strict=True)
            if not any(isinstance(other, kind) for other in given)
        ]

    @staticmethod
    def _record_checkpoint_folders(trainer: Trainer, directory: Path) -> None:
        """Where `--resume` will look."""
        given = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        paths = [Path(path) for path in given if path]
        # relative where it can be: a run's folder may be moved
        folders = [str(path.relative_to(directory) if path.is_relative_to(directory) else path) for path in paths]
        if trainer.is_global_zero and folders:
            update_run_json(directory, checkpoint_folders=list(dict.fromkeys(folders)))


class _RunNotes(Callback):
    """Says what is trained, and keeps its tokenizer in the run's folder: a checkpoint alone does not make a model."""

    def __init__(self) -> None:
        self.began = False
        self.validated_step: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_step = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        model = getattr(pl_module, "model", pl_module)
        total = sum(parameter.numel() for parameter in model.parameters())
        device = f"{trainer.world_size} x {trainer.strategy.root_device.type}"
        log.info(
            "%s: %.4g M parameters, %s, %s",
            type(model).__name__.removeprefix("FSDP"),
            total / 1e6,
            trainer.precision,
            device,
        )
        tokenizer: Any = getattr(pl_module, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(Path(trainer.default_root_dir) / TOKENIZER_FOLDER)


def _writes_its_own_checkpoints(strategy: Any) -> bool:
    """Sharded strategies write folders, past any checkpoint plugin, and refuse to be given one."""
    if isinstance(strategy, str):
        return strategy.startswith(("fsdp", "deepspeed"))
    return isinstance(strategy, ModelParallelStrategy | FSDPStrategy)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _quietly(parse: Any, content: Any, recipe: Recipe) -> Any:
    """Parse; what jsonargparse refuses that `validation.py` let pass becomes one line."""
    noise = io.StringIO()
    try:
        with contextlib.redirect_stderr(noise):
            return parse(content)
    except (ArgumentError, SystemExit) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [noise.getvalue()]
        raise UserError(f"{recipe.name} cannot be parsed: {lines[0]} {lines[-1] if len(lines) > 1 else ''}") from error
