"""TextDataModule: text in, packed sequences of token ids out, with an order that resumes exactly anywhere."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from . import shards
from .files import CorruptCacheError, FileHashes, cached_folder
from .sampler import SampleStream
from .sources import Source, resolve_source
from .streaming import StreamingDataModule
from .tokenizer import load_tokenizer, token_byte_lengths, tokenizer_hash, train_byte_level_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_SAMPLE_BYTES = 32 << 20  # text that a tokenizer is trained on, at most
IGNORE_INDEX = -100


def default_cache_dir() -> Path:
    """`$FULGURITE_CACHE`, or `~/.cache/fulgurite`."""
    return Path(os.environ.get("FULGURITE_CACHE") or "~/.cache/fulgurite").expanduser()


class PackedTextDataset(Dataset):
    """Sequence i is tokens `[i*T, (i+1)*T)` of a split in which every document ends with EOS.

    Batches (dict of tensors): `input_ids` (B, T) int64; `labels` (B, T) int64, equal to `input_ids` (the shift happens
    in the loss); `sample_ids` (B,) int64. With `document_masking` also `position_ids` (B, T), restarting at 0 at each
    document, and the first token of each document that begins inside the sequence has label -100: it is not predicted
    from the document before. EOS is predicted. Index -1 gives EOS tokens with labels -100 (padding of the last batch).
    """

    def __init__(
        self, tokens: shards.TokenShards, sequence_length: int, eos_token_id: int, document_masking: bool
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.eos_token_id = eos_token_id
        self.document_masking = document_masking

    def __len__(self) -> int:
        return self.tokens.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """The whole batch at once."""
        length = self.sequence_length
        starts = [max(index, 0) * length for index in indices]
        input_ids = self.tokens.read(starts, length)
        padding = np.array(indices) < 0
        input_ids[padding] = self.eos_token_id
        labels = input_ids.copy()
        batch = {"input_ids": input_ids, "labels": labels}
        if self.document_masking:
            begins = self._document_begins(starts)
            labels[begins] = IGNORE_INDEX
            offsets = np.arange(length)
            batch["position_ids"] = offsets - np.maximum.accumulate(np.where(begins, offsets, 0), axis=1)
        labels[padding] = IGNORE_INDEX
        batch["sample_ids"] = np.array(indices, dtype=np.int64)
        return {key: torch.from_numpy(value) for key, value in batch.items()}

    def _document_begins(self, starts: list[int]) -> np.ndarray:
        """(B, T) bool: a new document begins at this token, which is not the sequence's first."""
        ends, length = self.tokens.document_ends, self.sequence_length
        begins = np.zeros((len(starts), length), dtype=bool)
        lows = np.searchsorted(ends, starts, side="right")
        highs = np.searchsorted(ends, np.array(starts) + length, side="left")
        for row, start, low, high in zip(begins, starts, lows, highs, strict=True):
            row[ends[low:high] - start] = True
        return begins


class TextDataModule(StreamingDataModule):
    """Language-model batches from text, tokenised once into a cache and read from memory maps.

    After `setup()`: `tokenizer`, `token_byte_lengths` (V,) int64, `uniform_token_count` (every training sample has the
    same number of target tokens), `fingerprints` (str -> str), `train_dataset`, `val_dataset`.

    Args:
        source: "stdlib" (the interpreter's standard library), a path, glob or folder or a list of them (.txt, .jsonl,
            .parquet, .gz of the first two; a glob may name other text files), or the id of a hub data set ("name" or
            "name:config"). A plain-text file is one document unless `document_separator` is set.
        tokenizer: directory, tokenizer.json, GGUF file or hub id; None trains byte-level BPE on the training split.
        vocab_size: size of a tokenizer trained here, at least 257.
        sequence_length: tokens of one sample, at least 2.
        batch_size: samples of one micro-batch on one rank.
        seed: decides the order of the samples, nothing else.
        val_fraction: share of documents held out, in [0, 1). A document is held out if the hash of its text falls below
            it: adding documents moves no other, and copies of one document share their split.
        num_workers: loader processes; the default 0 is the fastest in nearly all cases.
        cache_dir: where tokenizers and tokens are kept; default `$FULGURITE_CACHE` or `~/.cache/fulgurite`.
        document_masking: restart positions at each document and do not predict across documents.
        text_key: key of .jsonl objects or column of .parquet files and hub data sets that holds the text.
        document_separator: string at which plain-text files are cut into documents.
        encoding_errors: "strict" (bytes that are not UTF-8 are an error) or "replace" (they become U+FFFD).
        hub_split: split of a hub data set that is read.

    Raises:
        ValueError: an argument out of range, a source that is missing, empty or too small, a missing text key.
    """

    def __init__(
        self,
        source: str | list[str] = "stdlib",
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        sequence_length: int = 256,
        batch_size: int = 16,
        *,
        seed: int = 0,
        val_fraction: float = 0.02,
        num_workers: int = 0,
        cache_dir: str | None = None,
        document_masking: bool = False,
        text_key: str = "text",
        document_separator: str | None = None,
        encoding_errors: str = "strict",
        hub_split: str = "train",
    ) -> None:
        super().__init__(batch_size, num_workers)
        if sequence_length < 2:
            raise ValueError(f"sequence_length={sequence_length}: must be at least 2")
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction}: must be in [0, 1)")
        if document_separator == "":
            raise ValueError("document_separator='': must be a non-empty string or null")
        self.source = source
        self.tokenizer_source = tokenizer
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.val_fraction = val_fraction
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.document_masking = document_masking
        self.text_key = text_key
        self.document_separator = document_separator
        self.encoding_errors = encoding_errors
        self.hub_split = hub_split
        self.uniform_token_count = not document_masking
        self.shared_tokenizer: PreTrainedTokenizerFast | None = None  # set by a module that contains this one
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.token_byte_lengths: Tensor | None = None
        self.fingerprints: dict[str, str] = {}
        self.train_dataset: PackedTextDataset | None = None
        self.val_dataset: PackedTextDataset | None = None

    # ---- building ---------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Builds the tokenizer and the token cache if they are not there, and verifies them (one process a node)."""
        self._build()

    def setup(self, stage: str | None = None) -> None:
        """Opens the cache, building it first if `prepare_data` was not called."""
        super().setup(stage)
        if self.train_dataset is None:
            # under a trainer, prepare_data has just verified the checksums: not again on every rank
            self._open(*self._build(checksums=self.trainer is None))

    def _source(self) -> Source:
        return resolve_source(
            self.source,
            text_key=self.text_key,
            document_separator=self.document_separator,
            encoding_errors=self.encoding_errors,
            hub_split=self.hub_split,
            cache_dir=self.cache_dir,
        )

    def _hashes(self, name: str) -> FileHashes:
        return FileHashes(self.cache_dir / "hashes" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json")

    def _build(self, checksums: bool = True) -> tuple[PreTrainedTokenizerFast, Path, dict[str, Any]]:
        source = self._source()
        content = source.fingerprint(self._hashes(json.dumps([str(self.source), os.getcwd()])))
        reading = [shards.FORMAT_VERSION, content, self.text_key, self.document_separator, self.encoding_errors]
        dataset = hashlib.sha256(json.dumps([*reading, self.val_fraction]).encode()).hexdigest()
        tokenizer = self._get_tokenizer(source, dataset)
        tokenizer_id = tokenizer_hash(tokenizer)
        key = hashlib.sha256(f"{dataset} {tokenizer_id}".encode()).hexdigest()[:32]
        info = {"source": source.label, "dataset": dataset, "tokenizer": tokenizer_id}

        def build(folder: Path) -> None:
            shards.build_shards(
                folder,
                source.documents,
                tokenizer,
                val_fraction=self.val_fraction,
                total_bytes=source.total_bytes,
                info=info,
            )

        def check(folder: Path) -> None:
            hashes = self._hashes(str(folder)) if checksums else None
            shards.read_meta(folder, hashes)
            if hashes is not None:
                hashes.save()

        folder = cached_folder(self.cache_dir / "tokens" / key, build, check, "the tokenised corpus")
        return tokenizer, folder, shards.read_meta(folder)

    def _get_tokenizer(self, source: Source, dataset: str) -> PreTrainedTokenizerFast:
        if self.tokenizer_source is not None:
            return load_tokenizer(self.tokenizer_source)
        if self.shared_tokenizer is not None:
            return self.shared_tokenizer
        import tokenizers

        recipe = ["bpe", dataset, self.vocab_size, TOKENIZER_SAMPLE_BYTES, tokenizers.__version__]
        key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]

        def build(folder: Path) -> None:
            rank_zero_info(f"training a tokenizer of {self.vocab_size} tokens on {source.label}")
            train_byte_level_bpe(self._tokenizer_sample(source), self.vocab_size).save_pretrained(folder)

        def check(folder: Path) -> None:
            try:
                load_tokenizer(folder)
            except Exception as error:
                raise CorruptCacheError(f"the tokenizer in {folder} cannot be loaded ({error})") from error

        return load_tokenizer(cached_folder(self.cache_dir / "tokenizers" / key, build, check, "the tokenizer"))

    def _tokenizer_sample(self, source: Source) -> Iterator[str]:
        """Texts of the training split, about TOKENIZER_SAMPLE_BYTES of them, evenly spread if the size is known.

        A document is in the sample according to bits of its hash that the split does not use.
        """
        share = min(1.0, TOKENIZER_SAMPLE_BYTES / source.total_bytes) if source.total_bytes else 1.0
        budget = TOKENIZER_SAMPLE_BYTES
        for document in source.documents():
            if shards.split_position(document.digest) < self.val_fraction:
                continue
            if shards.split_position(document.digest[8:16]) >= share:
                continue
            for piece in document.pieces:
                yield piece
                budget -= len(piece)
                if budget <= 0:
                    return

    def _open(self, tokenizer: PreTrainedTokenizerFast, folder: Path, meta: dict[str, Any]) -> None:
        datasets = {}
        for split in ("train", "val"):
            tokens = shards.TokenShards(folder, split, meta)
            datasets[split] = PackedTextDataset(
                tokens, self.sequence_length, tokenizer.eos_token_id, self.document_masking
            )
            if len(datasets[split]) == 0 and (split == "train" or self.val_fraction > 0):
                raise ValueError(
                    f"the {split} split of source={self.source!r} has {tokens.num_tokens} tokens in "
                    f"{tokens.num_documents} documents, fewer than one sequence of "
                    f"sequence_length={self.sequence_length}: lower sequence_length, "
                    + ("give more text" if split == "train" else "or raise val_fraction")
                )
        self.tokenizer = tokenizer
        self.token_byte_lengths = token_byte_lengths(tokenizer)
        self.train_dataset, self.val_dataset = datasets["train"], datasets["val"]
        self.fingerprints = {
            "dataset": meta["info"]["dataset"],
            "tokenizer": meta["info"]["tokenizer"],
            "source": meta["info"]["source"],
            "num_train_tokens": str(meta["splits"]["train"]["num_tokens"]),
            "num_val_tokens": str(meta["splits"]["val"]["num_tokens"]),
        }

    # ---- streams ----------------------------------------------------------------------------------------------------

    def _train_streams(self) -> list[tuple[Dataset, SampleStream]]:
        if self.train_dataset is None:
            self.setup()
        assert self.train_dataset is not None
        return [(self.train_dataset, SampleStream(len(self.train_dataset), self.seed))]

    def _val_datasets(self) -> list[Dataset]:
        if self.val_dataset is None:
            self.setup()
        assert self.val_dataset is not None
        return [self.val_dataset] if len(self.val_dataset) else []
