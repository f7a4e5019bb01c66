"""TextDataModule: batches, masking, caching, attributes, errors."""

import json
import logging
import os
import time

import numpy as np
import pytest
import torch

from fulgurite.datamodules import text as text_module
from fulgurite.datamodules.text import TextDataModule, default_cache_dir
from fulgurite.datamodules.tokenizer import tokenizer_hash


@pytest.fixture
def data(make_data):
    module = make_data()
    module.prepare_data()
    module.setup("fit")
    return module


def token_stream(dataset):
    return dataset.tokens.read([0], dataset.tokens.num_tokens)[0]


def test_batches(data):
    stream = token_stream(data.train_dataset)
    batches = list(data.train_dataloader())
    assert len(batches) == 16 == len(data.train_dataloader())
    for batch in batches:
        assert set(batch) == {"input_ids", "labels", "sample_ids"}
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 64)
        assert batch["input_ids"].dtype == batch["labels"].dtype == batch["sample_ids"].dtype == torch.int64
        assert torch.equal(batch["labels"], batch["input_ids"])
        for row, index in zip(batch["input_ids"], batch["sample_ids"].tolist(), strict=True):
            assert row.tolist() == stream[index * 64 : index * 64 + 64].tolist()
    assert sorted(i for batch in batches for i in batch["sample_ids"].tolist()) == list(range(32))
    batches[0]["labels"][0, 0] = -100
    assert batches[0]["input_ids"][0, 0] != -100  # no shared memory
    sample = data.train_dataset[3]
    assert sample["input_ids"].tolist() == stream[192:256].tolist()
    assert sample["sample_ids"] == 3


def test_text_comes_back(data, corpus):
    """Every document is in one split, whole and in order."""
    expected = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    found = []
    for dataset in (data.train_dataset, data.val_dataset):
        parts = np.split(token_stream(dataset), dataset.tokens.document_ends)
        assert len(parts.pop()) == 0
        assert all(part[-1] == data.tokenizer.eos_token_id for part in parts)
        found += [data.tokenizer.decode(part[:-1]) for part in parts]
    assert len(found) == 24
    assert set(found) == expected


def test_validation_is_in_order_and_padded(data):
    dataset = data.val_dataset
    batches = list(data.val_dataloader())
    ids = torch.cat([batch["sample_ids"] for batch in batches])
    count = len(dataset)
    assert count % 2 == 1
    assert ids.tolist() == [*range(count), -1]
    last = batches[-1]
    assert (last["labels"][1] == -100).all()
    assert (last["input_ids"][1] == data.tokenizer.eos_token_id).all()
    total = sum((batch["labels"][:, 1:] != -100).sum().item() for batch in batches)
    assert total == count * 63  # targets of a token-weighted mean


def test_document_masking(make_data):
    data = make_data(document_masking=True, sequence_length=200)
    data.setup()
    assert not data.uniform_token_count
    assert make_data().uniform_token_count
    stream, eos = token_stream(data.train_dataset), data.tokenizer.eos_token_id
    boundaries = 0
    for batch in data.train_dataloader():
        for row in range(2):
            ids = batch["input_ids"][row].tolist()
            start = int(batch["sample_ids"][row]) * 200
            assert ids == stream[start : start + 200].tolist()
            position = 0
            for t, token in enumerate(ids):
                new_document = t > 0 and ids[t - 1] == eos
                position = 0 if new_document else position + (t > 0)
                boundaries += new_document
                assert batch["position_ids"][row, t] == position
                assert batch["labels"][row, t] == (-100 if new_document else token)
    assert boundaries > 10
    padded = data.val_dataset.__getitems__([0, -1])
    assert (padded["labels"][1] == -100).all()


def test_documents_that_end_with_the_sequence(tmp_path):
    """A boundary on the cut: neither sequence shows it."""
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefg"}) + "\n" for _ in range(8)))
    data = TextDataModule(
        str(path), vocab_size=257, sequence_length=16, val_fraction=0, document_masking=True, cache_dir=str(tmp_path)
    )
    data.setup()
    assert data.train_dataset.tokens.document_ends.tolist() == list(range(8, 65, 8))
    batch = data.train_dataset.__getitems__([0, 3])
    assert batch["position_ids"].tolist() == [[*range(8), *range(8)]] * 2
    assert (batch["labels"] == -100).nonzero().tolist() == [[0, 8], [1, 8]]


def test_masked_documents_do_not_see_each_other(make_data):
    """A Hugging Face model given these position ids computes each document as if it were alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = make_data(document_masking=True, sequence_length=200)
    data.setup()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
            attn_implementation="sdpa",
        )
    ).eval()
    batch = data.train_dataset.__getitems__([0, 1])
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for row in range(2):
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            assert len(starts) > 1
            for start, end in zip(starts, [*starts[1:], 200], strict=True):
                alone = model(input_ids=batch["input_ids"][row : row + 1, start:end]).logits
                torch.testing.assert_close(packed[row, start:end], alone[0], atol=1e-5, rtol=1e-4)


def test_attributes(data):
    assert data.tokenizer.eos_token == "<|endoftext|>"
    assert len(data.tokenizer) == 300
    assert data.token_byte_lengths.shape == (300,)
    stream = token_stream(data.train_dataset)
    text = data.tokenizer.decode(stream, skip_special_tokens=True)
    assert data.token_byte_lengths[stream].sum() == len(text.encode())
    fingerprints = data.fingerprints
    assert fingerprints["tokenizer"] == tokenizer_hash(data.tokenizer)
    assert fingerprints["num_train_tokens"] == str(len(stream))
    assert fingerprints["source"].endswith("docs.jsonl")
    assert len(fingerprints["dataset"]) == 64


def test_tokenizer_never_sees_held_out_text(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100)))
    seen = []
    real = text_module.train_byte_level_bpe
    monkeypatch.setattr(
        text_module, "train_byte_level_bpe", lambda texts, size: (seen.extend(texts), real(list(seen), size))[1]
    )
    data = TextDataModule(str(path), vocab_size=260, sequence_length=8, val_fraction=0.3, cache_dir=str(tmp_path / "c"))
    data.setup()
    held_out = data.tokenizer.decode(token_stream(data.val_dataset)).split("<|endoftext|>")[:-1]
    assert 20 < len(held_out) < 40
    assert not set(held_out) & set(seen)
    assert len(seen) + len(held_out) == 100


def test_tokenizer_sample_is_bounded_and_spread(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:05d}" * 20}) + "\n" for i in range(2000)))
    monkeypatch.setattr(text_module, "TOKENIZER_SAMPLE_BYTES", 20_000)
    data = TextDataModule(str(path), val_fraction=0.1, cache_dir=str(tmp_path))
    sample = list(data._tokenizer_sample(data._source()))
    assert 120 < len(sample) <= 200
    numbers = [int(text[:5]) for text in sample]
    assert numbers == sorted(numbers)
    assert min(numbers) < 200
    assert max(numbers) > 1800 or sum(map(len, sample)) >= 20_000


def build_times(caplog, make):
    """Which of the two builds a set-up does."""
    with caplog.at_level(logging.INFO):
        caplog.clear()
        module = make()
        module.prepare_data()
        module.setup()
    return module, {"tokenizer": "training a tokenizer" in caplog.text, "tokens": "tokenised" in caplog.text}


def test_cache_is_used_again_and_rebuilt_when_due(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": f"sand and glass {i}" * 5, "other": f"{i} bolts " * 9}) + "\n" for i in range(40)]
    path.write_text("".join(lines))

    def make(**arguments):
        defaults = {"vocab_size": 280, "sequence_length": 16, "val_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
        return build_times(caplog, lambda: TextDataModule(str(path), **{**defaults, **arguments}))

    both, nothing = {"tokenizer": True, "tokens": True}, {"tokenizer": False, "tokens": False}
    first, built = make()
    assert built == both
    again, built = make()
    assert built == nothing
    assert again.fingerprints == first.fingerprints
    assert make(sequence_length=32, batch_size=3, seed=9, document_masking=True)[1] == nothing
    path.touch()
    assert make()[1] == nothing
    changed, built = make(vocab_size=270)
    assert built == both
    assert changed.fingerprints["tokenizer"] != first.fingerprints["tokenizer"]
    assert changed.fingerprints["dataset"] == first.fingerprints["dataset"]
    assert make(val_fraction=0.3)[1] == both
    assert make(text_key="other", vocab_size=257)[1] == both
    first.tokenizer.save_pretrained(tmp_path / "saved")
    loaded, built = make(tokenizer=str(tmp_path / "saved"))
    assert built == nothing
    assert loaded.fingerprints == first.fingerprints
    path.write_text("".join(lines).replace("glass 7", "glass 8"))  # same size
    changed, built = make()
    assert built == both
    assert changed.fingerprints["dataset"] != first.fingerprints["dataset"]


def test_damaged_cache_is_repaired(tmp_path, corpus, make_data, caplog):
    arguments = {"cache_dir": str(tmp_path / "cache")}
    first, _ = build_times(caplog, lambda: make_data(**arguments))
    (shard,) = (tmp_path / "cache" / "tokens").glob("*/train-00000.bin")
    content = shard.read_bytes()
    stream = token_stream(first.train_dataset).tolist()
    shard.write_bytes(content[:-100] + bytes(100))
    again, built = build_times(caplog, lambda: make_data(**arguments))
    assert built == {"tokenizer": False, "tokens": True}
    assert "train-00000.bin does not match its sha256; building the tokenised corpus again" in caplog.text
    assert shard.read_bytes() == content
    assert token_stream(again.train_dataset).tolist() == stream
    (tokenizer,) = (tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text()[:100])
    again, built = build_times(caplog, lambda: make_data(**arguments))
    assert built == {"tokenizer": True, "tokens": False}
    assert again.fingerprints == first.fingerprints


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FULGURITE_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == TextDataModule().cache_dir == tmp_path / "here"
    assert TextDataModule(cache_dir="~/there").cache_dir == tmp_path.__class__("~/there").expanduser()
    monkeypatch.delenv("FULGURITE_CACHE")
    assert default_cache_dir() == tmp_path.__class__("~/.cache/fulgurite").expanduser()


def test_no_held_out_split(make_data, run_fit):
    data = make_data(val_fraction=0)
    module = run_fit(data, max_steps=3, val_check_interval=1)
    assert len(module.steps) == 3
    assert module.validated == []
    assert len(data.val_dataset) == 0


def test_more_samples_a_step_than_there_are(make_data, run_fit):
    with pytest.warns(UserWarning, match=r"takes 50 samples \(batch_size 25 x 1 ranks x 2 micro-batches\) .* only 32"):
        module = run_fit(make_data(batch_size=25), max_steps=2, accumulate_grad_batches=2, limit_val_batches=0)
    order = [index for _, ids in module.steps for index in ids]
    assert sorted(order[:32]) == sorted(order[32:64]) == list(range(32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1: must be at least 2"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1: must be 0 or more"),
        ({"val_fraction": 1.0}, r"val_fraction=1\.0: must be in \[0, 1\)"),
        ({"document_separator": ""}, "document_separator='': must be a non-empty string"),
    ],
)
def test_arguments_out_of_range(make_data, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_data(**arguments)


def test_corpus_too_small(make_data):
    with pytest.raises(ValueError, match=r"the train split .* has \d+ tokens in 18 documents, fewer than one sequence"):
        make_data(sequence_length=5000).setup()
    with pytest.raises(
        ValueError, match=r"the val split .* in 6 documents, .*sequence_length=1000: .*raise val_fraction"
    ):
        make_data(sequence_length=1000).setup()


def test_missing_source(make_data):
    with pytest.raises(ValueError, match=r"source='gone/docs\.jsonl': no such file"):
        make_data(source="gone/docs.jsonl").prepare_data()


def test_vocabulary_too_small(make_data):
    with pytest.raises(ValueError, match="vocab_size=100: byte-level BPE needs at least 257"):
        make_data(vocab_size=100).prepare_data()


def test_worker_processes_read_the_same_batches(make_data):
    def batches(num_workers):
        data = make_data(num_workers=num_workers)
        data.setup()
        return [batch["input_ids"].tolist() for batch in data.train_dataloader()]

    assert batches(2) == batches(0)


def test_workers_do_not_warn_about_tokenizer_threads(make_data, capfd, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    data = make_data(num_workers=1, cache_dir=str(tmp_path / "fresh"))
    data.setup()
    data.tokenizer(["use the threads"] * 64)
    next(iter(data.train_dataloader()))
    assert "forked" not in capfd.readouterr().err
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.slow
def test_standard_library_corpus(tmp_path, caplog):
    """The default corpus, end to end; the second set-up takes no time to speak of."""
    data, built = build_times(caplog, lambda: TextDataModule(cache_dir=str(tmp_path)))
    assert built == {"tokenizer": True, "tokens": True}
    assert len(data.tokenizer) == 4096
    assert 2e6 < int(data.fingerprints["num_train_tokens"]) < 6e6
    assert len(data.val_dataset) > 50
    stream = token_stream(data.val_dataset)
    text = data.tokenizer.decode(stream, skip_special_tokens=True)
    assert data.token_byte_lengths[stream].sum() == len(text.encode())
    started = time.monotonic()
    again, built = build_times(caplog, lambda: TextDataModule(cache_dir=str(tmp_path)))
    assert built == {"tokenizer": False, "tokens": False}
    assert time.monotonic() - started < 10
    assert again.fingerprints == data.fingerprints
