"""AnnealSwitch: one corpus, and from an exact optimizer step on another (WSM, arXiv 2507.17634, Algorithm 1)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

from .sampler import SampleStream
from .streaming import StreamingDataModule
from .text import TextDataModule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class AnnealSwitch(StreamingDataModule):
    """Batches of `main` for optimizer steps 0 ... switch_step - 1, batches of `anneal` from step `switch_step` on.

    Each corpus keeps a position of its own, so that the switch is exact under gradient accumulation, and resuming
    before, at or after it continues both. Batch size and number of workers are those of `main`. `sample_ids` of the
    annealing corpus count on from the number of training samples of `main`. A checkpoint of a run on `main` alone can
    be resumed with an `AnnealSwitch` if ranks, batch size and accumulation stay the same.

    Args:
        main: corpus of the stable phase; gives tokenizer and validation data.
        anneal: corpus from `switch_step` on. With `tokenizer=None` it takes the tokenizer of `main`.
        switch_step: optimizer steps done before the switch (`trainer.global_step`), at least 0.
        validate_anneal: also validate on the held-out split of `anneal`, as second validation loader. Lightning then
            appends `/dataloader_idx_0` and `/dataloader_idx_1` to the names of logged validation metrics.

    Raises:
        ValueError: the two corpora have different tokenizers or batch sizes.
    """

    def __init__(
        self, main: TextDataModule, anneal: TextDataModule, switch_step: int, *, validate_anneal: bool = False
    ) -> None:
        if switch_step < 0:
            raise ValueError(f"switch_step={switch_step}: must be 0 or more optimizer steps")
        if main.batch_size != anneal.batch_size:
            raise ValueError(
                f"anneal.batch_size={anneal.batch_size} differs from main.batch_size={main.batch_size}: "
                "give both the same"
            )
        super().__init__(main.batch_size, main.num_workers, switch_step)
        self.main = main
        self.anneal = anneal
        self.validate_anneal = validate_anneal
        self.uniform_token_count = (
            main.uniform_token_count and anneal.uniform_token_count and main.sequence_length == anneal.sequence_length
        )
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.token_byte_lengths: Tensor | None = None
        self.fingerprints: dict[str, str] = {}

    @property
    def sequence_length(self) -> int:
        return self.main.sequence_length

    def prepare_data(self) -> None:
        self.main.prepare_data()
        self.main.setup()
        self.anneal.shared_tokenizer = self.main.tokenizer
        self.anneal.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Opens both corpora and checks that they share a tokenizer."""
        super().setup(stage)
        self.main.trainer = self.anneal.trainer = self.trainer
        self.main.setup()
        self.anneal.shared_tokenizer = self.main.tokenizer
        self.anneal.setup()
        main, anneal = self.main.fingerprints, self.anneal.fingerprints
        if main["tokenizer"] != anneal["tokenizer"]:
            raise ValueError(
                f"main and anneal have different tokenizers ({self.main.tokenizer_source or 'trained on main'}: "
                f"{main['tokenizer'][:12]}, {self.anneal.tokenizer_source}: {anneal['tokenizer'][:12]}): leave out "
                "anneal.tokenizer to use that of main, or name the same one in both"
            )
        self.tokenizer = self.main.tokenizer
        self.token_byte_lengths = self.main.token_byte_lengths
        both = f"{main['dataset']} {anneal['dataset']} {self.switch_step}"
        self.fingerprints = {
            **main,
            "dataset": hashlib.sha256(both.encode()).hexdigest(),
            "source": f"{main['source']}, from step {self.switch_step} {anneal['source']}",
            **{f"main_{key}": main[key] for key in ("dataset", "source")},
            **{f"anneal_{key}": anneal[key] for key in ("dataset", "source", "num_train_tokens")},
        }

    def _train_streams(self) -> list[tuple[Dataset, SampleStream]]:
        return [*self.main._train_streams(), *self.anneal._train_streams()]

    def _val_datasets(self) -> list[Dataset]:
        return self.main._val_datasets() + (self.anneal._val_datasets() if self.validate_anneal else [])
