"""WSM merging while training runs: the live weights train on, the merged weights are validated and exported.

    trainer = Trainer(callbacks=[CheckpointMerge(every_n_steps=100, export_dir="merged")])

Baselines. LAWA (arXiv 2306.03241) is `CheckpointMerge(T, num_checkpoints=n, curve="lawa")`; SWA over intervals and
PMA's SMA are curve="swa" and "sma", PMA's WMA is "wma", its EMA "ema" with `curve_args={"beta": 0.9}` (arXiv
2505.12082). EMA of every step is Lightning's `EMAWeightAveraging(decay=0.999)`, per-epoch SWA with a learning rate of
its own `StochasticWeightAveraging`, any other running average `WeightAveraging(avg_fn=...)`; these three put the
average into the live model when training ends, which this callback never does.

After the merge. *Merge, then decay* and *SFT from merged*: start a new run whose `model` is the exported directory,
with a fresh optimizer and a warmup (no optimizer state belongs to merged weights). *Decay, then merge*: keep the
callback on while a WSD schedule decays; it warns, and `merge.json` holds the factors w_i lr_i / peak that result.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from . import publishing, validation
from .live import (
    LearningRateWatch,
    Window,
    broadcast_from_rank_zero,
    gather,
    is_sharded,
    learning_rate,
    local,
    merged_tensors,
    on_rank_zero,
    refuse_unmergeable,
    reshard,
)
from .offline import tool_version
from .resuming import choose_directory, usable_from
from .streaming import StreamingMerge
from .weights import MergeWeights, merge_weights

log = logging.getLogger(__name__)

STORAGES = ("auto", "device", "cpu", "disk")
_LARGE = 1_000_000_000  # parameters above which "auto" means "disk"


class CheckpointMerge(Callback):
    """Merges checkpoints of a running training with the weights of a decay curve (WSM, arXiv 2507.17634).

    Every `every_n_steps` optimizer updates a copy of the parameters enters the merge. The run itself stays as it is,
    bit for bit: merged weights are in the model only during the second validation pass and while they are exported, and
    no checkpoint sees them. A step is a training batch that advanced `trainer.global_step`, however many batches were
    accumulated for it and however many optimizers stepped in it.

    Logs `val_loss_merged` (and `val_bpb_merged`) next to the live metrics: to the loggers, the progress bar and
    `trainer.callback_metrics`, so that `ModelCheckpoint(monitor="val_loss_merged")` works. A checkpoint holds the live
    weights and, in this callback's state, the merge.

    Args:
        every_n_steps: interval T between snapshots, taken at the multiples of T.
        num_checkpoints: sliding window of the last n snapshots. None: the window grows without end, in one accumulator
            (curves linear, one_minus_sqrt, polynomial, ema with beta, mean, wma).
        curve: decay curve, see `decay_coefficients`.
        grid: "virtual_end", "schedule" or "interval_mean".
        min_ratio: floor of the curve.
        start_step: first step that may be a snapshot. None: the first at which the learning rate of parameter group 0
            has stopped rising; should it rise again, the window starts anew.
        storage: where snapshots live: "device", "cpu" (pinned host memory), "disk" (written by a thread), or "auto":
            disk when the model has over 1e9 parameters or is sharded, else device.
        dtype: "float32" or "float64", of the accumulation; wider parameters keep their own.
        validate_merged: validate the merged weights after each validation of the live ones.
        export_dir: directory for the merged model, written when training ends; relative to `trainer.default_root_dir`.
        export_every: export also every this many steps, to `<export_dir>-step-<step>`.
        mode: "auto" (sliding when `num_checkpoints` is given, else anytime), "anytime", "sliding", or "fixed": one
            accumulator for exactly `num_checkpoints` snapshots of any curve, a merge when the last is in.
        curve_args: parameters of the curve, for example {"p": 0.5}.
        snapshot_dir: folder for storage="disk"; default `merge_snapshots`, relative to `trainer.default_root_dir`.
        name: suffix of the metrics; two callbacks in one run need two names.

    Raises:
        ValueError: a value out of range, an unknown curve, a curve that the mode cannot stream, a strategy that hides
            the parameters (DeepSpeed ZeRO-3, FSDP1), LoRA factors, a learning rate that rises after `start_step`.
    """

    def __init__(
        self,
        every_n_steps: int,
        num_checkpoints: int | None = None,
        curve: str | Sequence[float] | Callable[[float], float] = "linear",
        grid: str = "virtual_end",
        min_ratio: float = 0.0,
        start_step: int | None = None,
        storage: str = "auto",
        dtype: str | torch.dtype = "float32",
        validate_merged: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        export_every: int | None = None,
        *,
        mode: str = "auto",
        curve_args: dict[str, Any] | None = None,
        snapshot_dir: str | os.PathLike[str] = "merge_snapshots",
        name: str = "merged",
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
        if storage not in STORAGES:
            raise ValueError(f"unknown storage {storage!r}: use one of {', '.join(STORAGES)}")
        if export_every is not None and (export_every < 1 or export_dir is None):
            raise ValueError(f"export_every={export_every} must be 1 or more and needs an export_dir")
        if start_step is not None and start_step < 0:
            raise ValueError(f"start_step must not be negative, got {start_step}")
        self.every_n_steps = every_n_steps
        self.num_checkpoints = num_checkpoints
        self.curve = curve
        self.grid = grid
        self.min_ratio = min_ratio
        self.start_step = start_step
        self.storage = storage
        wide = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if wide not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32 or float64, got {dtype}")
        self.dtype: torch.dtype = wide
        self.validate_merged = validate_merged
        self.export_dir = export_dir
        self.export_every = export_every
        self.mode = mode if mode != "auto" else "anytime" if num_checkpoints is None else "sliding"
        self.curve_args = dict(curve_args or {})
        self.snapshot_dir = snapshot_dir
        self.name = name
        self.history: list[dict[str, float]] = []
        # its errors belong here, not an hour into training
        self._required = self._new_merge("device", None, 0).required
        self._step = 0
        self._global_step: int | None = None
        self._window = Window()
        self._lr = LearningRateWatch()
        self._merge: StreamingMerge | None = None
        self._backup = validation.Backup()
        self._sharded = False
        self._world_size = 1
        self._directory: Path | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """One state a name."""
        return f"{type(self).__qualname__}[{self.name}]"

    @property
    def positions(self) -> list[int]:
        """Steps of the snapshots in the merge, oldest first."""
        return self._window.positions()

    @property
    def ready(self) -> bool:
        """Whether there is a merge: two snapshots, or all of them with mode="fixed" or an explicit list of weights."""
        return len(self._window.snapshots) >= self._required

    # ------------------------------------------------------------------ set-up and resume

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Refuses what cannot work, before training."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if isinstance(strategy, FSDPStrategy) or (
            isinstance(strategy, DeepSpeedStrategy) and getattr(strategy, "zero_stage_3", False)
        ):
            raise ValueError(
                f"CheckpointMerge cannot read the parameters that {type(strategy).__name__} partitions: train without "
                "it and merge the saved checkpoints off-line with `lightning merge`, or use ModelParallelStrategy "
                "(FSDP2)"
            )
        if self.export_dir is not None:
            on_rank_zero(trainer, lambda: publishing.check_target(self._export_path(trainer)))

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Builds the merge, or takes up that of the checkpoint from which the run resumes."""
        state, self._restored = self._restored, None
        if state is None and self._global_step == trainer.global_step:
            return  # `fit` again with the same trainer: the window goes on
        tensors = merged_tensors(pl_module)
        refuse_unmergeable(tensors)
        self._world_size = trainer.world_size
        self._sharded = any(is_sharded(tensor) for tensor in tensors.values())
        storage = self.storage
        if storage == "auto":
            large = sum(tensor.numel() for tensor in tensors.values()) > _LARGE
            storage = "disk" if large or self._sharded else "device"
        elif storage != "disk" and self._sharded:
            raise ValueError(
                f"storage={storage!r} cannot be resumed with a sharded model, whose checkpoints keep callback state "
                "from rank 0 only: use storage='disk' (or 'auto')"
            )
        directory = None
        if storage == "disk":
            root = Path(trainer.default_root_dir, self.snapshot_dir).absolute()
            before = state["directory"] if state is not None else None
            directory = choose_directory(root, self.name, before, trainer.global_rank, trainer.strategy.broadcast)
        holds = self._sharded or trainer.is_global_zero
        self._directory = directory
        self._merge = self._new_merge(storage, directory, trainer.global_rank) if holds else None
        self._window, self._lr = Window(), LearningRateWatch()
        if state is not None:
            self._take_up(trainer, pl_module, state)
        else:
            self._step = trainer.global_step // max(len(trainer.optimizers), 1)
            self._global_step = trainer.global_step

    def _take_up(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state; snapshots whose files are gone are left out, with a warning."""
        if self._sharded and state["world_size"] != trainer.world_size:
            raise ValueError(
                f"the snapshots in {state['directory']} are shards of {state['world_size']} ranks, this run has "
                f"{trainer.world_size}: resume on as many, or delete that folder to start a new merge window"
            )
        self._step, self._global_step = state["step"], state["global_step"]
        self._lr = LearningRateWatch(**state["lr"])
        self.history = list(state["history"])
        snapshots, sliding = list(state["snapshots"]), self.mode == "sliding"
        first = max(0, len(snapshots) - (self.num_checkpoints or 0)) if sliding else 0
        if self._merge is not None and self._directory is not None:
            steps = [snapshot["step"] for snapshot in snapshots]
            first = max(first, usable_from(steps, self._directory, trainer.global_rank, sliding))
        first = max(gather(first))
        if first < len(snapshots):
            self._window = Window(snapshots[first:])
            if self._merge is not None:
                merge = dict(state["merge"])
                if sliding:
                    merge["ring"] = {key: values[first:] for key, values in merge["ring"].items()}
                self._merge.load_state_dict(merge)
                self._merge.bind(merged_tensors(pl_module))
        if self._global_step != trainer.global_step:
            # The checkpoint was written by a callback before this one, between the update and its snapshot.
            self._after_update(trainer, pl_module)

    def _new_merge(self, storage: str, directory: Path | None, rank: int) -> StreamingMerge:
        return StreamingMerge(
            self.mode,
            curve=self.curve,
            grid=self.grid,
            min_ratio=self.min_ratio,
            num_checkpoints=self.num_checkpoints,
            storage=storage,
            directory=directory,
            dtype=self.dtype,
            rank=rank,
            **self.curve_args,
        )

    # ------------------------------------------------------------------ snapshots

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Notes the learning rate of the coming update."""
        self._lr.current = learning_rate(trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes a snapshot when the batch completed an optimizer update and one is due."""
        if trainer.global_step != self._global_step:
            self._after_update(trainer, pl_module)

    def _after_update(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._global_step = trainer.global_step
        self._step += 1
        before = self._lr.previous
        change = self._lr.update(in_window=bool(self._window.snapshots))
        if change == "rose":
            self._on_rise(before)
        elif change == "fell" and not self._lr.lowered:
            self._lr.lowered = True
            rank_zero_warn(
                f"the learning rate fell from {before:g} to {self._lr.current:g} at step {self._step}, inside the "
                "merge window: the merge decays updates that are decayed already. merge.json records the factors "
                "w_i lr_i / peak"
            )
        if self._due(trainer):
            snapshot = {"step": self._step, "global_step": trainer.global_step, **self._lr.interval()}
            if self._merge is not None:
                self._merge.update(merged_tensors(pl_module), self._step)
            self._window.snapshots.append(snapshot)
            if self.mode == "sliding":
                del self._window.snapshots[: -self.num_checkpoints]  # type: ignore[operator]
        if self.export_every is not None and self._step % self.export_every == 0 and self.ready:
            path = self._export_path(trainer)
            self._export(trainer, pl_module, path.with_name(f"{path.name}-step-{self._step}"))

    def _due(self, trainer: "pl.Trainer") -> bool:
        if self._step % self.every_n_steps or (self.mode == "fixed" and self.ready):
            return False
        if self.start_step is not None:
            return self._step >= self.start_step
        return bool(self._window.snapshots) or not self._lr.still_rising(learning_rate(trainer))

    def _on_rise(self, before: float | None) -> None:
        text = (
            f"the learning rate rose from {before:g} to {self._lr.current:g} at step {self._step}, inside the merge "
            f"window that began at step {self.positions[0]}"
        )
        if self.start_step is not None:
            raise ValueError(
                f"{text}: start_step={self.start_step} lies in the warmup. Give a later one, or None to wait"
            )
        rank_zero_warn(f"{text}: the window starts anew once it has stopped rising")
        self._restart_window()

    def _restart_window(self) -> None:
        self._window = Window()
        self._lr.previous, self._lr.lowered = None, False
        if self._merge is not None:
            storage, directory, rank = self._merge.storage, self._merge.directory, self._merge.rank
            self._merge.close()
            self._merge = self._new_merge(storage, directory, rank)

    # ------------------------------------------------------------------ validation and export

    @contextmanager
    def merged_weights(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", all_ranks: bool = True
    ) -> Iterator[None]:
        """The model holds the merged weights inside the `with` block, and its own again after it, come what may.

        Args:
            trainer: the trainer that runs.
            pl_module: its module.
            all_ranks: False leaves ranks that hold no snapshots (under DDP all but rank 0) as they are.
        """
        shared = trainer.world_size > 1 and not self._sharded
        tensors = merged_tensors(pl_module)
        try:
            if self._merge is not None:
                rest: dict[str, Tensor] = {}
                for name, tensor in tensors.items():
                    live, merged = local(tensor), self._merge.accumulator(name)
                    if merged is not None and merged.dtype == live.dtype and merged.device == live.device:
                        self._backup.exchange(live, merged)
                    else:
                        self._backup.save(live)
                        rest[name] = tensor
                if rest:
                    self._merge.result(out=rest)
            elif all_ranks:
                for tensor in tensors.values():
                    self._backup.save(local(tensor))
            if shared and all_ranks:
                broadcast_from_rank_zero(tensors)
            yield
        finally:
            reshard(pl_module)
            self._backup.restore()

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Second pass, with merged weights; here, because Lightning's own logging then reaches all who listen.

        Where a callback monitors the metric it exists from the first validation on: before there is a merge, the model
        to ship is the live one.
        """
        if not self.validate_merged or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        key = f"val_loss_{self.name}"
        listeners = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
        if not self.ready and not any(getattr(listener, "monitor", None) == key for listener in listeners):
            return
        problem = validation.can_validate(trainer, pl_module)
        if problem is not None:
            self.validate_merged = False
            rank_zero_warn(f"merged weights are not validated: {problem}")
            return
        with validation.untouched(trainer, pl_module):
            if self.ready:
                with self.merged_weights(trainer, pl_module):
                    metrics = validation.validate(trainer, pl_module, self.name)
            else:
                metrics = validation.validate(trainer, pl_module, self.name)
            reshard(pl_module)
        for metric, value in metrics.items():
            pl_module.log(
                metric, value, prog_bar=metric == key, on_epoch=True, batch_size=1, sync_dist=trainer.world_size > 1
            )
        if self.ready:
            self._entry()[key] = metrics[key]

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Adds the live loss, which the module may have logged after the second pass, to the history."""
        live = trainer.callback_metrics.get("val_loss")
        if live is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._entry()["val_loss"] = float(live)

    def _entry(self) -> dict[str, float]:
        """This validation's entry in the history."""
        if not self.history or self.history[-1]["step"] != self._step:
            self.history.append({"step": self._step})
        return self.history[-1]

    def merged_state_dict(self) -> dict[str, Tensor]:
        """The merge by parameter name, in the parameters' dtypes; empty on ranks that hold no snapshots."""
        return self._merge.result() if self._merge is not None else {}

    def weights(self) -> MergeWeights:
        """Merge weights of the snapshots held now."""
        return merge_weights(self.positions, self.curve, grid=self.grid, min_ratio=self.min_ratio, **self.curve_args)

    def merge_info(self) -> dict[str, Any]:
        """What `merge.json` says: weights, positions, learning rates, how it was computed."""
        weights = self.weights().to_dict()
        return {
            "tool": tool_version(),
            "source": "training",
            **weights,
            "unit": "steps",
            "global_steps": [snapshot["global_step"] for snapshot in self._window.snapshots],
            **self._window.learning_rates(weights["w"]),
            "mode": self.mode,
            "every_n_steps": self.every_n_steps,
            "dtype": {"accumulate": str(self.dtype), "output": "same"},
            "live_step": self._step,
        }

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Exports the merged model, and draws the figures."""
        if not self.ready:
            rank_zero_warn(
                f"no merge at the end of training: {len(self.positions)} snapshot(s) were taken (every "
                f"{self.every_n_steps} steps, start_step={self.start_step}, {self._step} steps in all)"
            )
            return
        if self.export_dir is not None:
            self._export(trainer, pl_module, self._export_path(trainer))
        if trainer.is_global_zero:
            self._draw(trainer)

    def _export_path(self, trainer: "pl.Trainer") -> Path:
        assert self.export_dir is not None
        return Path(trainer.default_root_dir, self.export_dir)

    def _export(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", directory: Path) -> None:
        """Publish the merged model; every rank takes part."""
        info = self.merge_info()
        with self.merged_weights(trainer, pl_module, all_ranks=False):
            state = publishing.full_state_dict(pl_module)
            on_rank_zero(trainer, lambda: publishing.publish(pl_module, state, directory, info))
        rank_zero_info(f"Merged {len(self.positions)} checkpoints into {directory}")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                log_dict = getattr(logger, "log_dict", None)
                if log_dict is not None:
                    log_dict(info, publishing.SIDECAR)

    def _draw(self, trainer: "pl.Trainer") -> None:
        """Figures of the merge weights and of both losses: PNG files, and to the loggers that take figures."""
        from . import plots

        figures = {f"{self.name}-weights.png": plots.plot_weights(self.weights())}
        if any(f"val_loss_{self.name}" in entry for entry in self.history):
            figures[f"live-vs-{self.name}.png"] = plots.plot_losses(self.history, self.name)
        for file_name, figure in figures.items():
            try:
                plots.save_figure(figure, Path(trainer.default_root_dir, "plots", file_name))
            except OSError as error:
                log.warning("The figure %s could not be saved: %s", file_name, error)
            for logger in trainer.loggers:
                log_figure = getattr(logger, "log_figure", None)
                if log_figure is not None:
                    log_figure(figure, f"plots/{file_name}")

    # ------------------------------------------------------------------ state and end

    def state_dict(self) -> dict[str, Any]:
        """Counters, positions and the merge: tensors, or with storage="disk" the folder that holds its files."""
        if self._restored is not None or self._global_step is None:  # saved before training began
            return self._restored or {}
        return {
            "step": self._step,
            "global_step": self._global_step,
            "lr": self._lr.state_dict(),
            "snapshots": [dict(snapshot) for snapshot in self._window.snapshots],
            "history": [dict(entry) for entry in self.history],
            "merge": self._merge.state_dict() if self._merge is not None else None,
            "directory": str(self._directory) if self._directory is not None else None,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts, when the model has its final place on devices and ranks."""
        self._restored = state_dict

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Live weights are back already, unless an interrupt hit their restoration."""
        self._backup.restore()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Finishes writing."""
        if self._merge is not None and self._merge.storage == "disk":
            self._merge.close()
