"""The token cache: exact content, atomic publication under kill -9, locks, damage repaired, clear disk errors."""

import hashlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fulgurite.datamodules import files, shards
from fulgurite.datamodules.files import CorruptCacheError, FileHashes, cached_folder
from fulgurite.datamodules.sources import Document
from fulgurite.datamodules.tokenizer import train_byte_level_bpe

TEXTS = [f"Document number {i} of sand and glass, {'bolt ' * (i % 7)}größer" for i in range(60)] + ["", "x"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS, 300)


def documents(texts=TEXTS):
    for i, text in enumerate(texts):
        yield Document(hashlib.sha256(text.encode()).digest(), (text[:9], text[9:]), str(i))


def build_into(tokenizer, texts=TEXTS, val_fraction=0.2):
    def build(folder):
        shards.build_shards(
            folder,
            lambda: documents(texts),
            tokenizer,
            val_fraction=val_fraction,
            total_bytes=None,
            info={"source": "t"},
        )

    return build


def check(folder):
    shards.read_meta(folder, FileHashes(None))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def entry(tmp_path, tokenizer):
    return cached_folder(tmp_path / "tokens" / "key", build_into(tokenizer), check)


def expected_streams(tokenizer, val_fraction=0.2):
    streams = {"train": [], "val": []}
    for text in TEXTS:
        if text:
            digest = hashlib.sha256(text.encode()).digest()
            split = "val" if int.from_bytes(digest[:8], "big") < val_fraction * 2**64 else "train"
            backend = tokenizer.backend_tokenizer
            ids = backend.encode(text[:9]).ids + backend.encode(text[9:]).ids
            streams[split].append([*ids, tokenizer.eos_token_id])
    return streams


@pytest.mark.parametrize("shard_tokens", [7, 64, 1 << 20])
def test_content_is_exact_whatever_the_shard_size(tmp_path, tokenizer, shard_tokens, monkeypatch):
    monkeypatch.setattr(shards, "_FLUSH_TOKENS", 50)
    monkeypatch.setattr(shards, "_ENCODE_CHARS", 200)
    meta = shards.write_shards(documents(), tokenizer, tmp_path, val_fraction=0.2, shard_tokens=shard_tokens)
    assert meta["dtype"] == "uint16"
    for split, expected in expected_streams(tokenizer).items():
        reader = pickle.loads(pickle.dumps(shards.TokenShards(tmp_path, split, meta)))
        stream = np.concatenate([np.array(ids) for ids in expected])
        assert reader.num_tokens == len(stream)
        assert reader.document_ends.tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
        starts = [0, 3, 5, len(stream) - 31, 20, 20]
        assert np.array_equal(reader.read(starts, 31), np.stack([stream[start : start + 31] for start in starts]))
        assert reader.read([0], 2).dtype == np.int64
        assert len(list(tmp_path.glob(f"{split}-*.bin"))) == -(-len(stream) // shard_tokens)


def test_reading_stays_a_few_batches_ahead_of_writing(tmp_path, tokenizer, monkeypatch):
    """Constant memory: what is read and not yet written is bounded, however long the corpus."""
    monkeypatch.setattr(shards, "_ENCODE_CHARS", 500)
    read, ahead = [0], []

    def corpus():
        for i in range(3000):
            text = f"{i:049d}."
            read[0] += len(text)
            yield Document(hashlib.sha256(text.encode()).digest(), (text,), "")

    monkeypatch.setattr(
        shards._Progress, "update", lambda self, count: (read.append(count), ahead.append(read[0] - sum(read[1:])))
    )
    shards.write_shards(corpus(), tokenizer, tmp_path, val_fraction=0.1)
    assert sum(read[1:]) == read[0] == 150_000
    assert len(ahead) > 250
    assert max(ahead) <= 3 * 550


def test_split_is_by_content(tokenizer, tmp_path):
    """More documents move no other one; copies share a split; the share held out is the fraction."""

    def held_out(texts, val_fraction):
        folder = tmp_path / f"{len(texts)}-{val_fraction}"
        folder.mkdir()
        meta = shards.write_shards(documents(texts), tokenizer, folder, val_fraction=val_fraction)
        reader = shards.TokenShards(folder, "val", meta)
        ids = reader.read([0], reader.num_tokens)[0]
        return [tokenizer.decode(part) for part in np.split(ids, reader.document_ends[:-1])]

    few = [f"text {i}" for i in range(200)]
    many = [f"other {i}" for i in range(300)] + few + few[:100]
    val_few, val_many = held_out(few, 0.1), held_out(many, 0.1)
    assert set(val_few) == {text for text in val_many if text.startswith("text")}
    copies = [text for text in val_few if int(text.split()[1].removesuffix("<|endoftext|>")) < 100]
    assert all(val_many.count(text) == 2 for text in copies)
    assert len(copies) > 3
    assert set(val_few) <= set(held_out(few, 0.3))
    assert abs(len(val_many) / len(many) - 0.1) < 0.04


def test_special_tokens_in_the_text_are_text(tmp_path, tokenizer):
    meta = shards.write_shards(documents(["a<|endoftext|>b", "c"]), tokenizer, tmp_path, val_fraction=0)
    reader = shards.TokenShards(tmp_path, "train", meta)
    ids = reader.read([0], reader.num_tokens)[0]
    assert (ids == tokenizer.eos_token_id).sum() == 2
    assert tokenizer.decode(ids[: reader.document_ends[0] - 1]) == "a<|endoftext|>b"


def test_dtype_follows_the_vocabulary():
    assert shards.token_dtype(65536) == np.uint16
    assert shards.token_dtype(65537) == np.uint32
    with pytest.raises(ValueError, match=r"vocab_size=4294967297: token ids above 2\*\*32 - 1"):
        shards.token_dtype(2**32 + 1)


def test_empty_corpus_and_splits(tmp_path, tokenizer):
    def write(texts, val_fraction):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return shards.write_shards(documents(texts), tokenizer, folder, val_fraction=val_fraction)

    with pytest.raises(ValueError, match="the corpus is empty: no document has any text"):
        write([""], 0.1)
    with pytest.raises(
        ValueError, match=r"val_fraction=1e-09 holds out none of the 61 documents; (0\.\d+) would"
    ) as info:
        write(TEXTS, 1e-9)
    mend = float(str(info.value).split("documents; ")[1].split()[0])
    assert write(TEXTS, mend)["splits"]["val"]["num_documents"] == 1
    with pytest.raises(ValueError, match=r"val_fraction=0\.99999 holds out all 2 documents"):
        write(["a", "b"], 0.99999)
    assert write(TEXTS, 0.0)["splits"]["val"]["num_documents"] == 0


def damage_truncate(path):
    os.truncate(path, path.stat().st_size - 2)
    return rf"{path.name} has \d+ bytes, expected \d+ bytes"


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return rf"{path.name} does not match its (sha256|checksum)|{path.name} cannot be read"


def damage_remove(path):
    path.unlink()
    return rf"{path.name} is missing|{path.name} cannot be read"


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove])
@pytest.mark.parametrize("name", ["train-00000.bin", "val-00000.bin", "train.docs.bin", "meta.json"])
def test_damage_is_named_and_repaired(entry, tokenizer, caplog, damage, name):
    before = contents(entry)
    message = damage(entry / name)
    if name == "meta.json":
        message = rf"{name} (cannot be read|does not match its checksum)"
    with pytest.raises(CorruptCacheError, match=message):
        check(entry)
    with caplog.at_level(logging.WARNING, logger="fulgurite.datamodules.files"):
        assert cached_folder(entry, build_into(tokenizer), check, "the tokens") == entry
    assert "building the tokens again" in caplog.text
    assert name in caplog.text
    assert contents(entry) == before


def in_child(function):
    """Runs `function` in a forked process, without tokenizer threads; returns the exit code."""

    def run():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    return process.exitcode


def die_at_call(number, counter):
    """Makes the `number`-th of all writes, flushes, renames and folder creations of this process its last."""

    def wrap(function, before):
        def wrapper(*arguments, **keywords):
            if before:
                counter[0] += 1
                if counter[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **keywords)
            counter[0] += 1
            if counter[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    shards._SplitWriter._append = wrap(shards._SplitWriter._append, False)
    files.fsync_path = wrap(files.fsync_path, True)
    shards.write_json_atomically = wrap(shards.write_json_atomically, True)
    Path.rename = wrap(Path.rename, True)
    Path.mkdir = wrap(Path.mkdir, True)


def test_kill_at_any_moment_leaves_nothing_or_a_valid_entry(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 512)
    reference = contents(cached_folder(tmp_path / "whole" / "key", build_into(tokenizer), check))
    absent = complete = 0
    for number in range(1, 200):
        final = tmp_path / f"{number}" / "key"

        def killed(final=final, number=number):
            die_at_call(number, [0])
            cached_folder(final, build_into(tokenizer), check)

        if in_child(killed) == 0:
            break
        if final.exists():
            check(final)
            complete += 1
        else:
            absent += 1
        cached_folder(final, build_into(tokenizer), check)
        assert contents(final) == reference
        assert {path.name for path in final.parent.iterdir()} == {"key", "key.lock"}
    assert absent > 15
    assert complete >= 2
    assert number < 199


def test_processes_that_start_together_build_once(tmp_path, tokenizer):
    final, journal = tmp_path / "tokens" / "key", tmp_path / "builds"

    def build(folder):
        with journal.open("a") as stream:
            stream.write("built\n")
        time.sleep(0.3)
        build_into(tokenizer)(folder)

    def worker():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        check(cached_folder(final, build, check))

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker) for _ in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(60)
    assert [process.exitcode for process in workers] == [0, 0, 0, 0]
    assert journal.read_text() == "built\n"


def test_file_system_without_locks(tmp_path, tokenizer, monkeypatch, caplog):
    import filelock

    def acquire(self, timeout=None):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    final = tmp_path / "tokens" / "key"
    foreign = final.parent / "key.0000.partial"
    foreign.mkdir(parents=True)

    def overtaken(folder):
        build_into(tokenizer)(folder)
        (tmp_path / "other").mkdir()
        build_into(tokenizer)(tmp_path / "other")
        (tmp_path / "other").rename(final)

    with caplog.at_level(logging.WARNING, logger="fulgurite.datamodules.files"):
        cached_folder(final, overtaken, check)
    assert "has no locks" in caplog.text
    check(final)
    assert {path.name for path in final.parent.iterdir()} == {"key", "key.0000.partial"}  # may be someone's work


def test_disk_errors_say_where_and_leave_nothing(tmp_path, tokenizer):
    final = tmp_path / "tokens" / "key"

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
        with pytest.raises(
            OSError, match=r"File too large while writing the tokens under .*cache_dir or FULGURITE_CACHE"
        ):
            cached_folder(final, build_into(tokenizer), check, "the tokens")

    assert in_child(full) == 0
    assert [path.name for path in final.parent.iterdir()] == ["key.lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory while writing the tokens under .*file/tokens"):
        cached_folder(tmp_path / "file" / "tokens" / "key", build_into(tokenizer), check, "the tokens")


def test_errors_of_the_input_pass_through(tmp_path, tokenizer):
    def unreadable(folder):
        raise PermissionError(13, "Permission denied", "/data/corpus.txt")

    with pytest.raises(PermissionError, match=r"^\[Errno 13\] Permission denied: '/data/corpus\.txt'$"):
        cached_folder(tmp_path / "tokens" / "key", unreadable, check)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["key.lock"]
