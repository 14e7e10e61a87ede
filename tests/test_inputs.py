"""Files of any usual kind are read, or refused with a message of one line that has the fix."""

import bz2
import gzip
import json
import lzma
import os
from collections import Counter

import pytest

import prepared
from data import readers
from data.settings import Prepare
from data.sources import open_source
from utils import ConfigError

try:
    from compression import zstd  # Python 3.14
except ImportError:
    from backports import zstd

ROWS = [{"text": f"row {n}"} for n in range(5)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
HALF, REST = LINES[:17], LINES[17:]
ARRAY = json.dumps(ROWS, indent=1).encode()


def parquet(rows):
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def texts(tmp_path, files, *flags):
    """Documents of a folder with these files, all for training."""
    folder = tmp_path / "source"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    prepared.prepare(folder, tmp_path / "out", "--val-share", 0, *flags)
    return prepared.texts_of(tmp_path / "out" / "train")


DEEP = [{"data": {"text": t}, "text": 1} for t in TEXTS]
LONG = "x = 1\n" * 100

READ = {
    "lines": ({"a.jsonl": LINES}, TEXTS),
    "lines called json": ({"a.json": LINES}, TEXTS),
    "lines called ndjson": ({"a.ndjson": LINES}, TEXTS),
    "lines in capitals": ({"A.JSONL": LINES}, TEXTS),
    "lines without a suffix": ({"part-00000": LINES}, TEXTS),
    "gzip": ({"a.jsonl.gz": gzip.compress(LINES)}, TEXTS),
    "gzip in two members": ({"a.json.gz": gzip.compress(HALF) + gzip.compress(REST)}, TEXTS),
    "bzip2": ({"a.jsonl.bz2": bz2.compress(LINES)}, TEXTS),
    "text that begins like a list": (
        {"README": b"[Illustration]\n", "a.txt": b"a"},
        ["[Illustration]\n", "a"],
    ),
    "an array with long integers": (
        {"a.json": json.dumps([{"id": 2**64 - 1, "x": 0.5} | row for row in ROWS]).encode()},
        TEXTS,
    ),
    "zstandard with a long window": (
        {"a.jsonl.zst": zstd.compress(LINES, options={zstd.CompressionParameter.window_log: 31})},
        TEXTS,
    ),
    "xz": ({"a.jsonl.xz": lzma.compress(LINES)}, TEXTS),
    "zstandard": ({"a.jsonl.zst": zstd.compress(LINES)}, TEXTS),
    "zstandard in two frames": ({"a.jsonl.zst": zstd.compress(HALF) + zstd.compress(REST)}, TEXTS),
    "text packed": ({"a.txt.zst": zstd.compress(b"hello")}, ["hello"]),
    "an array": ({"a.json": ARRAY}, TEXTS),
    "an array called jsonl": ({"a.jsonl": ARRAY}, TEXTS),
    "an array packed": ({"a.json.gz": gzip.compress(ARRAY)}, TEXTS),
    "Parquet": ({"a.parquet": parquet(ROWS)}, TEXTS),
    "Parquet without a suffix": ({"a": parquet(ROWS)}, TEXTS),
    "line ends of DOS": ({"a.jsonl": LINES.replace(b"\n", b"\r\n")}, TEXTS),
    "text with them": ({"a.txt": b"a\r\nb"}, ["a\r\nb"]),
    "a byte order mark": ({"a.jsonl": b"\xef\xbb\xbf" + LINES}, TEXTS),
    "text with it": ({"a.txt": b"\xef\xbb\xbfhello"}, ["hello"]),
    "an array with it": ({"a.json": b"\xef\xbb\xbf" + ARRAY}, TEXTS),
    "text with NUL": ({"a.txt": b"a\0b"}, ["a\0b"]),
    "a line with NUL": ({"a.jsonl": b'{"text": "a\\u0000b"}\n'}, ["a\0b"]),
    "half a pair": ({"a.jsonl": b'{"text": "a\\ud800b"}\n'}, ["a\ufffdb"]),
    "line separators inside": (
        {"a.jsonl": '{"text": "a\u2028b\x85c"}\n'.encode()},
        ["a\u2028b\x85c"],
    ),
    "empty documents": (
        {"a.jsonl": b'{"text": ""}\n' + LINES + b'\n{"text": ""}', "b.jsonl": b""},
        TEXTS,
    ),
    "no last line end": ({"a.jsonl": LINES[:-1]}, TEXTS),
    "a README beside": ({"README.md": b"# Data", "a.jsonl": LINES, "LICENSE": b"MIT"}, TEXTS),
    "names with spaces and umlauts": ({"ein ordner/übung 1.jsonl": LINES}, TEXTS),
    "hidden files": ({".cache/a.jsonl": b"x", ".b.jsonl": b"x", "c.jsonl": LINES}, TEXTS),
    "code beside an object": (
        {"a.py": b"x = 1", "package.json": b'{\n "a": 1\n}'},
        ["x = 1", '{\n "a": 1\n}'],
    ),
    "bytes in a column": ({"a.parquet": parquet([{"text": b"\xc3\xa4"}])}, ["ä"]),
    "kinds with rows mixed": (
        {"a.jsonl": LINES, "b.parquet": parquet(ROWS), "c.json": ARRAY},
        TEXTS * 3,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_usual_files_are_read(tmp_path, name):
    files, expected = READ[name]
    assert texts(tmp_path, files) == expected


def test_files_that_are_left_out_are_reported(tmp_path, capsys):
    files = {"README.md": b"# Data", "a.jsonl": LINES, "LICENSE": b"MIT", "table.csv": b"a,b"}
    assert texts(tmp_path, files) == TEXTS
    out = capsys.readouterr().out
    assert "3 files are left out, as they are plain text beside files with rows, or" in out
    assert "LICENSE, README.md, table.csv" in out


def test_a_folder_that_would_lose_much_of_its_text_is_refused(tmp_path):
    files = {"a.jsonl": LINES, "b.txt": b"More than a fifth. " * 9}
    with pytest.raises(ConfigError, match=r"files of plain text, such as b.txt.*--glob"):
        texts(tmp_path / "refused", files)
    assert texts(tmp_path / "rows", files, "--glob", "*.jsonl") == TEXTS
    assert texts(tmp_path / "skipped", files, "--skip-bad") == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    for flags in ([], ["--as", "text"]):
        with pytest.raises(ConfigError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
            texts(tmp_path, {name: pointer}, *flags)


def test_as_text_reads_all_files_as_text(tmp_path):
    files = {"a.jsonl": LINES, "b.csv": b"a,b"}
    assert texts(tmp_path, files, "--as", "text") == [LINES.decode(), "a,b"]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.parquet"])
def test_a_field_may_lie_in_another(tmp_path, kind):
    lines = "".join(json.dumps(row) + "\n" for row in DEEP).encode()
    content = {"a.jsonl": lines, "a.json": json.dumps(DEEP).encode(), "a.parquet": parquet(DEEP)}
    found = texts(tmp_path, {kind: content[kind]}, "--text-field", "data.text")
    assert found == TEXTS
    with pytest.raises(ValueError, match=r"field 'text'; .*: data\.text"):
        texts(tmp_path / "2", {kind: content[kind]})


def test_a_document_may_be_longer_than_a_shard(tmp_path):
    assert texts(tmp_path, {"a.txt": LONG.encode()}, "--shard-tokens", 7) == [LONG]


def test_links_are_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.jsonl").write_bytes(LINES)
    (tmp_path / "source" / "deep").mkdir(parents=True)
    os.symlink(elsewhere, tmp_path / "source" / "deep" / "linked")
    os.symlink(elsewhere / "a.jsonl", tmp_path / "source" / "b.jsonl")
    assert texts(tmp_path, {}) == TEXTS * 2


@pytest.mark.parametrize(
    ("to", "pattern"), [("source", "is a link to a folder above it"), ("gone", "does not exist")]
)
def test_a_broken_or_circular_link_is_refused(tmp_path, to, pattern):
    (tmp_path / "source" / "deep").mkdir(parents=True)
    os.symlink(tmp_path / to, tmp_path / "source" / "deep" / "linked")
    with pytest.raises(ValueError, match=pattern):
        texts(tmp_path, {"a.txt": b"a"})


REFUSED = {
    "another format": ({"a.csv": b"a,b"}, r"a.csv is of unknown kind \(1 of 1 files"),
    "one object": (
        {"a.json": b'{\n "data": []\n}'},
        "a.json is of unknown kind .* an object per line",
    ),
    "binary": ({"a.pdb": b"\x00\x01"}, "a.pdb is of unknown kind"),
    "a line that is cut off": (
        {"a.jsonl": LINES + b'{"text"\n'},
        r"a.jsonl:6 is not a line of JSON",
    ),
    "an array that is cut off": ({"a.json": ARRAY[:-20]}, "a.json cannot be read as JSON array"),
    "fields of another type": (
        {"a.jsonl": b'{"text": ["a"], "body": "b"}\n'},
        r"a.jsonl:1 has no text in the field 'text'; fields with text: body",
    ),
    "no text": ({"a.jsonl": b'{"text": 1}\n'}, "fields with text: none"),
    "null": ({"a.jsonl": b'{"text": null}\n'}, "a.jsonl:1 has null in the field 'text'"),
    "null in a column": (
        {"a.parquet": parquet([{"text": None}, {"text": "a"}])},
        "a.parquet, row 1, has null in the field 'text'",
    ),
    "bytes that are no text": (
        {"a.parquet": parquet([{"text": b"ab\xff"}])},
        r"row 1, has bytes in the field 'text' that are not UTF-8\. Choose",
    ),
    "lines in UTF-16": ({"a.jsonl": LINES.decode().encode("utf-16")}, "a.jsonl:1 has NUL bytes"),
    "lines that end in NULs": ({"a.jsonl": LINES + b"\0" * 99}, "a.jsonl:6 has NUL bytes"),
    "columns of pandas": (
        {"a.json": b'{"text": {"0": "a", "1": "b"}}'},
        r"a.json:1 is a table by columns, .* to_json\(orient=",
    ),
    "a list": ({"a.jsonl": b'{"text": "a"}\n["x"]\n'}, "a.jsonl:2 has no text"),
    "Latin-1": ({"a.txt": b"ab\xff"}, r"a.txt cannot be read as text \(byte 2 is not UTF-8"),
    "UTF-16": ({"a.txt": "hello".encode("utf-16")}, "byte 0 is not UTF-8"),
    "not gzip": ({"a.jsonl.gz": LINES}, "a.jsonl.gz cannot be read .*gzip"),
    "gzip that is cut off": ({"a.jsonl.gz": gzip.compress(LINES)[:-9]}, "ended before the end"),
    "zstandard that is cut off": ({"a.jsonl.zst": zstd.compress(LINES)[:-3]}, "ended before"),
    "a file that is not gzip, beside one that is": (
        {"a.json.gz": gzip.compress(LINES), "b.gz": LINES},
        "b.gz cannot be read as any kind .*gzip",
    ),
    "damaged Parquet": ({"a.parquet": b"PAR1" + b"x" * 99}, "a.parquet cannot be read as Parquet"),
    "a long record": ({"a.jsonl": b'{"text": "' + b"x" * 2000 + b'"}\n'}, "a record of more than"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "RECORD_BYTES", 1000)
    files, pattern = REFUSED[name]
    with pytest.raises(ValueError, match=pattern) as refused:
        texts(tmp_path, files)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "out").rglob("index.json"))


@pytest.mark.parametrize("name", REFUSED)
def test_skip_bad_leaves_it_out_and_counts_it(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(readers, "RECORD_BYTES", 1000)
    files = REFUSED[name][0] | ({"z.jsonl": LINES} if "jsonl" in str(REFUSED[name][0]) else {})
    if files == REFUSED[name][0]:
        files |= {"z.txt": b"hello"} if name in ("Latin-1", "UTF-16") else {"z.jsonl": LINES}
    found = texts(tmp_path, files, "--skip-bad")
    assert found[-5:] == TEXTS or found == ["hello"]
    assert "left out" in capsys.readouterr().out


def test_skip_bad_leaves_out_the_whole_of_a_text(tmp_path):
    text = b"line one\n" * 100
    files = {"a.txt": text + b"\xff" + text, "b.txt": text}
    assert texts(tmp_path, files, "--skip-bad", "--split-mb", 1e-4) == [text.decode()]


def test_a_long_record_takes_no_more_memory_than_it_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "RECORD_BYTES", 100)
    long = b'{"text": "' + b"x" * 5000 + b'"}\n'
    assert texts(tmp_path, {"a.jsonl": LINES + long + LINES}, "--skip-bad") == TEXTS * 2


def test_a_hub_data_set_gives_a_split_for_each_data_file(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for number in range(3):
        (folder / f"train-{number}.jsonl").write_bytes(LINES)
    config = Prepare(source=f"hf:{folder}", out="")
    assert len(open_source(config).splits) == 3
    prepared.prepare(f"hf:{folder}", tmp_path / "out", "--val-share", 0)
    assert prepared.texts_of(tmp_path / "out" / "train") == TEXTS * 3
    with pytest.raises(ValueError, match=r"cannot be opened \(Bad split: nope.*--hf-split"):
        prepared.prepare(f"hf:{folder}", tmp_path / "other", "--hf-split", "nope")


def test_a_hub_data_set_that_needs_a_script_is_refused_in_one_line(tmp_path):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match=r"cannot be opened \(.*script") as refused:
        prepared.prepare(f"hf:{folder}", tmp_path / "out")
    assert "\n" not in str(refused.value)


# --- division into splits -----------------------------------------------------------------------


def read(config):
    """(file, position, text) of the documents of each split."""
    for split in open_source(config).splits:
        yield [
            (d.name, d.position, "".join(p.text for p in d.chunks), d.begins, d.ends)
            for part in split
            for d in readers.documents(part, config, left_out=Counter())
        ]


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("size", [4, 7, 17, 18, 19, 60, 1000])
def test_a_file_of_lines_is_divided_at_line_ends_wherever_its_parts_begin(tmp_path, size, bom):
    lines = [{"text": "x" * (n * 7 % 50)} for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text(bom + "".join(json.dumps(line) + "\n" for line in lines) + "\n\n")
    whole, *none = read(Prepare(source=str(path), out=""))
    assert not none and [text for _, _, text, *_ in whole] == [line["text"] for line in lines]
    parts = list(read(Prepare(source=str(path), out="", split_mb=size / 2**20)))
    assert len(parts) == -(-path.stat().st_size // size)
    assert [document for part in parts for document in part] == whole


@pytest.mark.parametrize("size", [1, 2, 5, 33, 10_000])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("text", ["é\n" * 40, "x" * 100, "\n" * 20 + "y", "ab\ncd" * 15 + "\n"])
def test_a_file_of_text_stays_one_document_wherever_it_is_divided(tmp_path, size, bom, text):
    path = tmp_path / "a.txt"
    path.write_text(bom + text)
    parts = list(read(Prepare(source=str(path), out="", split_mb=size / 2**20)))
    assert "".join(part[0][2] for part in parts) == text
    assert [(d[0], d[1]) for part in parts for d in part] == [("a.txt", 0)] * len(parts)
    assert [part[0][3] for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part[0][4] for part in parts] == [False] * (len(parts) - 1) + [True]
    out = tmp_path / "out"
    prepared.prepare(path, out, "--val-share", 0, "--split-mb", size / 2**20)
    assert prepared.texts_of(out / "train") == [text]


def test_the_line_of_an_error_is_counted_in_the_whole_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES * 20 + b"{\n")
    for size in (9, 100, 10_000):
        with pytest.raises(ValueError, match=r"a.jsonl:101 is not a line of JSON"):
            list(read(Prepare(source=str(path), out="", split_mb=size / 2**20)))


def test_row_groups_of_a_large_file_are_splits(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet([{"text": f"row {n}"} for n in range(20)]))
    parts = list(read(Prepare(source=str(path), out="", split_mb=300 / 2**20)))
    assert len(parts) > 2
    found = [(position, text) for part in parts for _, position, text, *_ in part]
    assert found == [(n, f"row {n}") for n in range(20)]


def test_small_files_share_a_split_and_a_compressed_one_is_not_divided(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 30)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(os.urandom(500).hex().encode()))
    config = Prepare(source=str(tmp_path), out="", split_mb=100 / 2**20)
    names = [[part.name for part in split] for split in open_source(config).splits]
    assert names == [["0.txt", "1.txt", "2.txt"], ["3.txt", "4.txt", "5.txt"],
                     ["6.txt", "7.txt", "8.txt"], ["9.txt"], ["packed.txt.gz"]]  # fmt: skip


def test_a_file_that_changes_after_it_was_listed_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    config = Prepare(source=str(path), out="")
    [[part]] = open_source(config).splits
    path.write_text("two")
    with pytest.raises(ValueError, match=r"a.txt changed since it was listed"):
        list(readers.documents(part, config, left_out=None))
    path.unlink()
    with pytest.raises(ValueError, match=r"a.txt does not exist any more, or not on this machine"):
        list(readers.documents(part, config, left_out=None))
