"""Documents from files, folders, globs, the standard library and the hub; policies and error messages."""

import gzip
import hashlib
import json
import os
import sys
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fulgurite.datamodules import files, sources
from fulgurite.datamodules.files import FileHashes
from fulgurite.datamodules.sources import HubSource, resolve_source, standard_library_files


def texts(source, **arguments):
    return ["".join(document.pieces) for document in resolve_source(source, **arguments).documents()]


def fingerprint(source, **arguments):
    return resolve_source(source, **arguments).fingerprint(FileHashes(None))


def test_standard_library():
    files = standard_library_files()
    names = [name for name, _ in files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
    size = sum(path.stat().st_size for _, path in files)
    assert 7e6 < size < 20e6
    # inside a virtual environment the base interpreter's library is meant
    assert not any(path.is_relative_to(sys.prefix) for _, path in files) or sys.prefix == sys.base_prefix
    source = resolve_source("stdlib")
    assert source.label == "stdlib-" + ".".join(map(str, sys.version_info[:3]))
    assert fingerprint("stdlib") == fingerprint("stdlib")


def test_every_format_gives_the_same_documents(tmp_path):
    expected = ["first\nwith two lines", "zweiter, größer", "第三"]
    for i, text in enumerate(expected):
        (tmp_path / f"{i}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in expected)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(lines)
    pyarrow.parquet.write_table(
        pyarrow.table({"n": [1, 2, 3], "text": expected}), tmp_path / "c.parquet", row_group_size=2
    )
    (tmp_path / "joined.md").write_text("###".join(expected))
    assert texts(str(tmp_path / "*.txt")) == expected
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert texts(tmp_path / name) == expected
    assert texts([str(tmp_path / f"{i}.txt") for i in (2, 0)]) == [expected[2], expected[0]]
    assert texts(str(tmp_path / "*.md"), document_separator="###") == expected
    # 0.txt, 1.txt, 2.txt, a.jsonl, b.jsonl.gz, c.parquet; joined.md does not look like data
    assert texts(tmp_path) == expected * 4
    digests = [document.digest for document in resolve_source(tmp_path / "c.parquet").documents()]
    assert digests == [hashlib.sha256(text.encode()).digest() for text in expected]


def test_text_key(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"body": "one", "title": "t"}\n\n{"body": null}\n{"body": "two"}\n')
    assert texts(path, text_key="body") == ["one", "two"]
    with pytest.raises(ValueError, match=r"docs\.jsonl:1: no key 'text'; it has \['body', 'title'\]: set text_key"):
        texts(path)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet: no column 'text'; it has \['body'\]: set text_key"):
        texts(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "fine"}\n{"text": \n', r"d\.jsonl:2: not JSON \(.*one JSON object a line"),
        (b'{"text": "fine"}\n["text"]\n', r"d\.jsonl:2: no key 'text'; it has list"),
        (b'{"text": 7}\n', r"d\.jsonl:1: 'text' is int, expected a string"),
        (b'{"text": "ok"}\n{"text": "\xff"}\n', r"d\.jsonl:2: not UTF-8 \(byte 0xff: .*encoding_errors='replace'"),
        (b'{"text": "\\ud800 alone"}\n', r"d\.jsonl:1: not valid Unicode .*encoding_errors='replace'"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path / "d.jsonl")


def test_encoding_policy(tmp_path, monkeypatch):
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfglass\r\nsand")
    (tmp_path / "half.jsonl").write_bytes(b'{"text": "\\ud800 alone"}\n')
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 \(byte 0xf6: invalid start byte\)"):
        texts(tmp_path / "latin.txt")
    assert texts(tmp_path / "latin.txt", encoding_errors="replace") == ["gr\ufffd\ufffder"]
    assert texts(tmp_path / "bom.txt") == ["glass\r\nsand"]
    assert texts(tmp_path / "half.jsonl", encoding_errors="replace") == ["\ufffd alone"]
    with pytest.raises(ValueError, match="encoding_errors='ignore': expected 'strict' or 'replace'"):
        texts(tmp_path / "bom.txt", encoding_errors="ignore")
    # the same for files that are read in pieces
    monkeypatch.setattr(sources, "_WHOLE", 4)
    monkeypatch.setattr(sources, "_PIECE", 4)
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8"):
        texts(tmp_path / "latin.txt")
    assert texts(tmp_path / "bom.txt") == ["glass\r\nsand"]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_large_text_comes_in_pieces_cut_at_line_ends(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(sources, "_WHOLE", 100)
    monkeypatch.setattr(sources, "_PIECE", 64)
    text = "".join(f"line {i} größer\n" for i in range(50)) + "y" * 200 + "\nend"
    path = tmp_path / f"large{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    (document,) = resolve_source(path).documents()
    pieces = list(document.pieces)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 128
    assert all(piece.endswith("\n") for piece in pieces[:10])
    assert document.digest == hashlib.sha256(text.encode()).digest()


def test_separator_across_read_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 5)
    (tmp_path / "d.txt").write_text("one<|end|>two<|end|><|end|>three")
    assert texts(tmp_path / "d.txt", document_separator="<|end|>") == ["one", "two", "", "three"]


def test_fingerprint_follows_names_and_content_not_places_and_times(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("glass")
        (tmp_path / folder / "y.txt").write_text("sand")
    reference = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "b") == reference
    (tmp_path / "b" / "x.txt").write_text("grass")
    assert fingerprint(tmp_path / "b") != reference
    (tmp_path / "b" / "x.txt").write_text("glass")
    assert fingerprint(tmp_path / "b") == reference
    (tmp_path / "b" / "x.txt").rename(tmp_path / "b" / "z.txt")
    assert fingerprint(tmp_path / "b") != reference


def test_paths_that_name_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"source='nothing/here\.txt': no such file, folder or match"):
        resolve_source("nothing/here.txt")
    with pytest.raises(ValueError, match=r"no such file, folder or match .*'stdlib', a path, a glob or a hub"):
        resolve_source(str(tmp_path / "*.txt"))
    with pytest.raises(ValueError, match=r"no such file"):
        resolve_source(["stdlib", "missing-name"])
    with pytest.raises(ValueError, match=r"source=\[\]"):
        resolve_source([])
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(ValueError, match=r"holds no \.txt.* file \(it has \['\.md'\]\).*\*\*/\*\.md"):
        resolve_source(str(tmp_path))
    (tmp_path / "broken.parquet").write_bytes(b"PAR0 nothing")
    with pytest.raises(ValueError, match=r"broken\.parquet: not a parquet file"):
        texts(tmp_path / "broken.parquet")


def fake_hub(monkeypatch, rows, calls, sha="abc123"):
    import huggingface_hub

    def load_dataset(name, config, *, split, streaming, revision):
        calls.append((name, config, split, streaming, revision))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    info = types.SimpleNamespace(sha=sha)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: types.SimpleNamespace(dataset_info=lambda name: info))


def test_hub_data_set_is_streamed_at_a_fixed_commit(tmp_path, monkeypatch):
    calls = []
    fake_hub(monkeypatch, [{"text": "one"}, {"text": None}, {"text": "two"}], calls)
    source = resolve_source("org/stories:small", hub_split="train[:1%]", cache_dir=tmp_path)
    assert isinstance(source, HubSource)
    first = source.fingerprint(FileHashes(None))
    assert ["".join(document.pieces) for document in source.documents()] == ["one", "two"]
    assert calls == [("org/stories", "small", "train[:1%]", True, "abc123")]
    fake_hub(monkeypatch, [], calls, sha="def456")
    assert source.fingerprint(FileHashes(None)) != first
    # without a network: the commit of the last run with one
    monkeypatch.undo()
    again = resolve_source("org/stories:small", hub_split="train[:1%]", cache_dir=tmp_path)
    again.fingerprint(FileHashes(None))
    assert again._revision == "def456"


def test_hub_errors(monkeypatch, tmp_path):
    source = resolve_source("org/no-such-set", cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"'org/no-such-set' is no local path, and as a hub data set.*HF_HUB_OFFLINE"):
        source.fingerprint(FileHashes(None))
    fake_hub(monkeypatch, [{"story": "x", "id": 1}], [])
    with pytest.raises(ValueError, match=r"org/no-such-set\[train\]: row 0: no key 'text'; it has \['id', 'story'\]"):
        list(source.documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the `datasets` package: pip install 'fulgurite\[hub\]'"):
        list(source.documents())


def test_remembered_hashes(tmp_path, monkeypatch):
    path, store = tmp_path / "x.txt", tmp_path / "hashes" / "store.json"
    path.write_text("glass")
    glass, grass = (hashlib.sha256(word).hexdigest() for word in (b"glass", b"grass"))
    hashes = FileHashes(store)
    assert hashes.sha256(path) == glass
    hashes.save()
    assert not store.exists()  # touched a moment ago: may change again within one tick of the clock

    monkeypatch.setattr(files, "_RACY_NS", -1)
    hashes.sha256(path)
    hashes.save()
    reads = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: reads.append(1) or real(*arguments))
    again = FileHashes(store)
    assert again.sha256(path) == glass
    assert not reads
    stat = path.stat()
    path.write_text("grass")  # same size, and the old mtime put back
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert again.sha256(path) == grass
    assert len(reads) == 1
    store.write_text("{broken")
    assert FileHashes(store).sha256(path) == grass
