"""Tokenizers: byte-level BPE trained on a corpus, or loaded; their identity and the UTF-8 length of each token.

A trained tokenizer has one special token, `<|endoftext|>`: it ends every document (EOS), and serves as BOS and padding
token for code that asks for them; padded positions carry the label -100, so that the double use harms nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and the special token


def train_byte_level_bpe(texts: Iterable[str] | Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer; the same texts in the same order give the same tokenizer.

    Args:
        texts: training texts, consumed once.
        vocab_size: number of tokens including the special one, at least 257; a small corpus may give fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size}: byte-level BPE needs at least {MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """Loads a fast tokenizer from a directory, a `tokenizer.json` file, a GGUF file or a hub id.

    Raises:
        ValueError: nothing there, not a fast tokenizer, or no end-of-sequence token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(source).expanduser()
    try:
        if path.is_file() and path.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        elif path.is_file() and not (
            path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file()
        ):
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            if tokenizer.convert_tokens_to_ids(END_OF_TEXT) is not None:
                tokenizer.add_special_tokens({"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
        else:
            folder = path.parent if path.is_file() else path
            tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else str(source))
    except Exception as error:  # `tokenizers` raises bare Exception on a malformed file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"tokenizer={str(source)!r} is neither a tokenizer.json file, nor a directory with one, nor a hub id that "
            f"can be reached: {reason}"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer={str(source)!r} is a slow tokenizer: give one that has a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer={str(source)!r} has no eos_token, which ends every document: "
            "set `eos_token` in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of all that decides token ids: the serialised tokenizer and the BOS and EOS ids."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content.pop("truncation", None)  # set and cleared by callers on the fly; never used here
    content.pop("padding", None)
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps([content, ids], sort_keys=True).encode()).hexdigest()


def document_prefix(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids that open a document: the BOS token if the tokenizer itself adds one (Llama 3, Gemma), else nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def _bytes_to_unicode_chars() -> set[str]:
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet())


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """UTF-8 bytes that each token id stands for, (V,) int64; 0 for special tokens and unused ids.

    Exact for byte-level BPE, where each character of a token is one byte. For SentencePiece-style tokenizers `▁` counts
    as the space it stands for and `<0xNN>` as one byte; for WordPiece the continuation mark `##` counts nothing.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        added[token_id] = token.content
        if token.special:
            special.add(token_id)
    serialised = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = '"ByteLevel"' in json.dumps([serialised.get("pre_tokenizer"), serialised.get("decoder")])
    word_piece = (serialised.get("model") or {}).get("type") == "WordPiece"
    alphabet = _bytes_to_unicode_chars()
    lengths = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.int64)
    for token, token_id in vocabulary.items():
        if token_id in special:
            continue
        if token_id in added:
            lengths[token_id] = len(token.encode())
        elif byte_level:
            lengths[token_id] = sum(1 if char in alphabet else len(char.encode()) for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[token_id] = 1
        elif word_piece:
            lengths[token_id] = len(token.removeprefix("##").encode())
        else:
            lengths[token_id] = len(token.replace("▁", " ").encode())
    return lengths
