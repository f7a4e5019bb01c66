"""Base of the data modules here: endless train streams with a position that survives any change of layout.

The position of a stream is the number of samples that all ranks together have consumed from it. It is derived from the
trainer's own counter of finished micro-batches, never from what loaders or their workers have read ahead.

One Lightning epoch is the largest whole number of optimizer steps in one pass over the (first) stream. The next epoch
begins where the last one ended, so that the samples left over open it: nothing is dropped, whatever the batch size.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import ConcatDataset, Dataset

from .sampler import (
    ResumableDataLoader,
    SampleStream,
    Segment,
    ShardedEvalSampler,
    StreamSampler,
    identity_collate,
)

log = logging.getLogger(__name__)


class _Concatenation(ConcatDataset):
    """Data sets one after the other; a batch comes from one of them (streams switch between batches only)."""

    def __getitems__(self, indices: list[int]) -> Any:
        dataset, offset = self.datasets[0], 0
        for candidate, end in zip(self.datasets, self.cumulative_sizes, strict=True):
            if indices[0] < end:
                dataset = candidate
                break
            offset = end
        batch = dataset.__getitems__([index - offset for index in indices])  # type: ignore[attr-defined]
        batch["sample_ids"] += offset
        return batch


class StreamingDataModule(LightningDataModule):
    """Loaders and resumable position for subclasses that give `_train_streams()` and `_val_datasets()`.

    Args:
        batch_size: samples of one micro-batch on one rank.
        num_workers: loader processes; 0 reads in the training process.
        switch_step: optimizer step from which the second stream is read, None with one stream.
    """

    def __init__(self, batch_size: int, num_workers: int, switch_step: int | None = None) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be 0 or more")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.switch_step = switch_step
        self._batches_at_base = 0  # trainer's total of finished micro-batches when `_positions` was noted
        self._positions = [0, 0]  # samples consumed from each stream at that moment
        self._switch_batch: float = float("inf")  # total of micro-batches after which the second stream begins
        self._num_batches = 0

    def _train_streams(self) -> list[tuple[Dataset, SampleStream]]:
        raise NotImplementedError

    def _val_datasets(self) -> list[Dataset]:
        raise NotImplementedError

    # ---- layout -----------------------------------------------------------------------------------------------------

    def _replicas(self) -> tuple[int, int]:
        """(data-parallel ranks, index of this one)."""
        keywords = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (keywords["num_replicas"], keywords["rank"]) if keywords else (1, 0)

    @property
    def _accumulation(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._replicas()[0]

    def _epoch_batches(self) -> int:
        """Micro-batches of one Lightning epoch on each rank: a whole number of optimizer steps, at least one."""
        num_samples = self._train_streams()[0][1].num_samples
        step_samples = self._global_batch * self._accumulation
        if num_samples < step_samples:
            warnings.warn(
                f"one optimizer step takes {step_samples} samples (batch_size {self.batch_size} x "
                f"{self._replicas()[0]} ranks x {self._accumulation} micro-batches) but the training split has only "
                f"{num_samples}: every step sees some more than once",
                stacklevel=2,
            )
        return max(1, num_samples // step_samples) * self._accumulation

    def setup(self, stage: str | None = None) -> None:
        """Forgets the position of an earlier run when a new trainer starts one."""
        if self.trainer is not None and self._finished_batches() == 0:
            self._batches_at_base, self._positions, self._switch_batch = 0, [0, 0], float("inf")

    # ---- position ---------------------------------------------------------------------------------------------------

    def _finished_batches(self) -> int:
        if self.trainer is None:
            return self._batches_at_base
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        return progress.total.processed

    def _positions_after(self, finished: int) -> list[int]:
        """Samples consumed from each stream once `finished` micro-batches are done."""
        second = max(0, finished - max(self._switch_batch, self._batches_at_base))
        first = finished - self._batches_at_base - second
        return [
            self._positions[0] + int(first) * self._global_batch,
            self._positions[1] + int(second) * self._global_batch,
        ]

    def _plan(self, epoch: int) -> list[Segment]:
        """What is left of this epoch. Called when its first batch is wanted, with the trainer's counters settled."""
        streams = [stream for _, stream in self._train_streams()]
        if self.trainer is None or not self.trainer.training:
            return [Segment(streams[0], epoch * self._num_batches * self._global_batch, self._num_batches)]
        finished = self._finished_batches()
        self._positions = self._positions_after(finished)
        self._batches_at_base = finished
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left = max(0, self._num_batches - ready)
        before_switch = left
        if self.switch_step is not None:
            accumulation = self._accumulation
            due = (self.switch_step - self.trainer.global_step) * accumulation - ready % accumulation
            before_switch = min(left, max(0, due))
        self._switch_batch = finished + before_switch if before_switch < left else float("inf")
        segments = [Segment(streams[0], self._positions[0], before_switch)]
        if before_switch < left:
            offset = streams[0].num_samples
            segments.append(Segment(streams[1], self._positions[1], left - before_switch, offset))
        return segments

    def _identity(self) -> list[list[Any]]:
        """What a position refers to, for each stream: compared on resume."""
        return [[stream.num_samples, stream.seed] for _, stream in self._train_streams()]

    def state_dict(self) -> dict[str, Any]:
        """Position in the streams at the last optimizer step, and the layout that the trainer's counters refer to."""
        finished, pending = self._finished_batches(), 0
        if self.trainer is not None:
            progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
            pending = 0 if progress.is_last_batch else progress.current.processed % self._accumulation
        return {
            "batches": finished,
            "pending_batches": pending,
            "positions": self._positions_after(finished - pending),
            "global_batch": self._global_batch,
            "accumulation": self._accumulation,
            "streams": self._identity(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the stored positions, also with another number of ranks, batch size or accumulation."""
        self._batches_at_base = state_dict["batches"]
        self._switch_batch = float("inf")
        self._positions = list(state_dict["positions"])
        for i, (now, before) in enumerate(zip(self._identity(), state_dict["streams"], strict=False)):
            if now[0] != before[0]:
                rank_zero_warn(
                    f"the checkpoint was trained on {before[0]} samples, there are {now[0]} now (another corpus, "
                    "tokenizer, sequence_length or val_fraction): reading starts at the beginning of the new order"
                )
                self._positions[i] = 0
            elif now[1] != before[1]:
                rank_zero_warn(
                    f"seed={now[1]} is not the checkpoint's {before[1]}: the order of samples changes from here on, "
                    "and this pass may repeat some and miss others"
                )
        self._translate_counters(state_dict)

    def _translate_counters(self, state_dict: dict[str, Any]) -> None:
        """Puts the trainer's counters of this epoch, about to be restored, into micro-batches of today's layout.

        Micro-batches since the last optimizer step are taken back: their gradients are not in a checkpoint, so they run
        again. Lightning offers a data module no public way to its loop state, hence the private attribute.
        """
        connector = getattr(self.trainer, "_checkpoint_connector", None)
        loops = getattr(connector, "_loaded_checkpoint", {}).get("loops", {}).get("fit_loop", {})
        progress = loops.get("epoch_loop.batch_progress")
        if progress is None:
            return
        batches = before = progress["current"]["processed"]
        batches -= state_dict["pending_batches"]
        if [state_dict["global_batch"], state_dict["accumulation"]] != [self._global_batch, self._accumulation]:
            epoch_batches = self._limited_epoch_batches()
            if progress["is_last_batch"]:
                batches = epoch_batches
            else:
                steps = round(batches * state_dict["global_batch"] / (self._global_batch * self._accumulation))
                batches = max(0, min(steps * self._accumulation, epoch_batches - self._accumulation))
        for counter in progress["current"]:
            progress["current"][counter] += batches - before

    def _limited_epoch_batches(self) -> int:
        batches, limit = self._epoch_batches(), self.trainer.limit_train_batches  # type: ignore[union-attr]
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)

    # ---- loaders ----------------------------------------------------------------------------------------------------

    def _loader(self, dataset: Dataset, sampler: torch.utils.data.Sampler) -> ResumableDataLoader:
        # 0 workers are enough: reading a batch from the memory map takes less than handing it over between processes
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        return ResumableDataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=identity_collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),
        )

    def train_dataloader(self) -> ResumableDataLoader:
        streams = self._train_streams()
        dataset = streams[0][0] if len(streams) == 1 else _Concatenation([dataset for dataset, _ in streams])
        self._num_batches = self._epoch_batches()
        replicas, rank = self._replicas()
        sampler = StreamSampler(
            dataset,
            self._plan,
            num_batches=self._num_batches,
            batch_size=self.batch_size,
            num_replicas=replicas,
            rank=rank,
        )
        return self._loader(dataset, sampler)

    def val_dataloader(self) -> list[ResumableDataLoader] | ResumableDataLoader:
        replicas, rank = self._replicas()
        loaders = [
            self._loader(
                dataset,
                ShardedEvalSampler(dataset, batch_size=self.batch_size, num_replicas=replicas, rank=rank),
            )
            for dataset in self._val_datasets()
        ]
        return loaders[0] if len(loaders) == 1 else loaders
