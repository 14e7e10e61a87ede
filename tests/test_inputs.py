"""Files of any usual kind are read, or refused with a message of one line that has the fix."""

import bz2
import gzip
import itertools
import json
import lzma
import os
from collections import Counter

import pyarrow.parquet
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


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
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


LINES, ARRAY = lines_of(ROWS), json.dumps(ROWS, indent=1).encode()
HALF, REST = LINES[:17], LINES[17:]
BOM = b"\xef\xbb\xbf"
LONG_WINDOW = zstd.compress(LINES, options={zstd.CompressionParameter.window_log: 31})

LINES_TWICE = [gzip.compress(HALF) + gzip.compress(REST), zstd.compress(HALF) + zstd.compress(REST)]
LONG_INTEGERS = json.dumps([{"id": 2**64 - 1, "x": 0.5} | row for row in ROWS]).encode()
ODD = '{"text": "a\u2028b\x85c"}\n{"text": "a\\ud800b"}\n{"text": "a\\u0000b"}\n'.encode()
EMPTY = b'{"text": ""}\n' + LINES + b'\n{"text": ""}'

# (content of files by name, their documents, in the order of the names)
READ = [
    ({"A.JSONL": LINES, "a.json": LINES, "b.ndjson": LINES, "part-0": LINES[:-1]}, TEXTS * 4),
    ({"a.jsonl.gz": gzip.compress(LINES), "b.json.gz": LINES_TWICE[0]}, TEXTS * 2),
    ({"c.jsonl.bz2": bz2.compress(LINES), "d.jsonl.xz": lzma.compress(LINES)}, TEXTS * 2),
    ({"e.jsonl.zst": LINES_TWICE[1], "f.jsonl.zst": LONG_WINDOW}, TEXTS * 2),
    ({"a.jsonl": LINES.replace(b"\n", b"\r\n"), "b.jsonl": BOM + LINES}, TEXTS * 2),
    ({"a.jsonl": ODD}, ["a\u2028b\x85c", "a\ufffdb", "a\0b"]),
    ({"a.jsonl": EMPTY, "b.jsonl": b""}, TEXTS),
    ({"README": b"[Illustration]\n", "a.txt": b"a\r\nb"}, ["[Illustration]\n", "a\r\nb"]),
    ({"b.txt": BOM + b"x", "c.txt": b"a\0b", "d.txt.zst": zstd.compress(b"y")}, ["x", "a\0b", "y"]),
    ({"a.json": ARRAY, "b.jsonl": ARRAY, "c.json.gz": gzip.compress(ARRAY)}, TEXTS * 3),
    ({"d.json": BOM + ARRAY, "e.json": LONG_INTEGERS}, TEXTS * 2),
    ({"a.parquet": parquet(ROWS), "b": parquet(ROWS)}, TEXTS * 2),
    ({"c.parquet": parquet([{"text": b"\xc3\xa4"}])}, ["ä"]),
    ({"a.parquet": parquet(ROWS), "b.json": ARRAY, "ein ordner/übung 1.jsonl": LINES}, TEXTS * 3),
    ({"c.jsonl": LINES, ".cache/a.jsonl": b"x", ".b.jsonl": b"x"}, TEXTS),
    ({"a.py": b"x = 1", "package.json": b'{\n "a": 1\n}'}, ["x = 1", '{\n "a": 1\n}']),
]


@pytest.mark.parametrize(("files", "expected"), READ)
def test_usual_files_are_read(tmp_path, files, expected):
    assert texts(tmp_path, files) == expected


def test_files_that_are_left_out_are_reported_and_much_text_is_refused(tmp_path, capsys):
    files = {"README.md": b"# Data", "a.jsonl": LINES, "LICENSE": b"MIT", "table.csv": b"a,b"}
    assert texts(tmp_path, files) == TEXTS
    out = capsys.readouterr().out
    assert "3 files are left out, as they are plain text beside files with rows, or" in out
    assert "LICENSE, README.md, table.csv" in out
    files = {"a.jsonl": LINES, "b.txt": b"More than a fifth. " * 9}
    with pytest.raises(ConfigError, match=r"files of plain text, such as b.txt.*--glob"):
        texts(tmp_path / "refused", files)
    assert texts(tmp_path / "rows", files, "--glob", "*.jsonl") == TEXTS
    assert texts(tmp_path / "skipped", files, "--skip-bad") == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.txt.gz", "a"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    for flags in ([], ["--as", "text"]):
        with pytest.raises(ConfigError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
            texts(tmp_path, {name: pointer}, *flags)


def test_as_text_reads_all_files_as_text_which_may_be_longer_than_a_shard(tmp_path):
    files = {"a.jsonl": LINES, "b.csv": b"a,b" * 99}
    found = texts(tmp_path, files, "--as", "text", "--shard-tokens", 7)
    assert found == [LINES.decode(), "a,b" * 99]


def test_a_field_may_lie_in_another(tmp_path):
    rows = [{"data": {"text": t}, "text": 1} for t in TEXTS]
    forms = {"jsonl": lines_of(rows), "json": json.dumps(rows).encode(), "parquet": parquet(rows)}
    files = {f"a.{kind}": content for kind, content in forms.items()}
    assert texts(tmp_path, files, "--text-field", "data.text") == TEXTS * 3
    for name in files:
        with pytest.raises(ValueError, match=r"field 'text' \(int\); its fields: .*text"):
            texts(tmp_path / name, {name: files[name]})


def test_links_are_followed_unless_they_are_broken_or_circular(tmp_path):
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "source"
    for folder in (elsewhere, source / "deep"):
        folder.mkdir(parents=True)
    (elsewhere / "a.jsonl").write_bytes(LINES)
    os.symlink(elsewhere, source / "deep" / "linked")
    os.symlink(elsewhere / "a.jsonl", source / "b.jsonl")
    assert texts(tmp_path, {}) == TEXTS * 2
    for to, pattern in (("source", "is a link to a folder above it"), ("gone", "does not exist")):
        os.symlink(tmp_path / to, source / "deep" / to)
        with pytest.raises(ValueError, match=pattern):
            texts(tmp_path, {})
        (source / "deep" / to).unlink()


LATIN_1, UTF_16 = b"ab\xff", LINES.decode().encode("utf-16")
NULL = parquet([{"text": None}, {"text": "a"}])
LONG = b'{"text": "' + b"x" * 2000 + b'"}\n'

REFUSED = [
    ("a.csv", b"a,b", r"a.csv is of unknown kind \(1 of 1 files"),
    ("a.json", b'{\n "data": []\n}', "a.json is of unknown kind .* an object per line"),
    ("a.pdb", b"\x00\x01", "a.pdb is of unknown kind"),
    ("a.jsonl", LINES + b'{"text"\n', r"a.jsonl:6 is not a line of JSON"),
    ("a.json", ARRAY[:-20], "a.json cannot be read as JSON array"),
    ("a.jsonl", b'{"text": ["a"], "body": "b"}', "jsonl:1 has no text .*; its fields: text, body"),
    ("a.jsonl", b'{"text": null}\n', r"a.jsonl:1 has no text in the field 'text' \(NoneType"),
    ("a.parquet", NULL, "a.parquet, row 1, has no text in the field 'text' .*--skip-bad"),
    ("a.parquet", parquet([{"text": LATIN_1}]), r"row 1, has .* \(bytes that are not UTF-8\)"),
    ("a.jsonl", LINES + b"\0" * 99, "a.jsonl:6 is not a line of JSON"),
    ("a.jsonl", UTF_16, "a.jsonl:1 is not a line of JSON .*expected an object in UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n["x"]\n', "a.jsonl:2 has no text"),
    ("a.txt", LATIN_1, r"a.txt .* as text \(byte 2 is not UTF-8"),
    ("a.txt", UTF_16, "byte 0 is not UTF-8"),
    ("a.jsonl.gz", LINES, "a.jsonl.gz cannot be read .*gzip"),
    ("b.gz", LINES, "b.gz cannot be read as any kind .*gzip"),
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "ended before the end"),
    ("a.parquet", b"PAR1" + b"x" * 99, "a.parquet cannot be read as Parquet"),
    ("a.jsonl", LONG + LINES, "a record of more than"),
]


@pytest.mark.parametrize(("name", "content", "pattern"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line_or_skipped(
    tmp_path, monkeypatch, capsys, name, content, pattern
):
    monkeypatch.setattr(readers, "RECORD_BYTES", 1000)  # a longer one takes no more memory
    with pytest.raises(ValueError, match=pattern) as refused:
        texts(tmp_path, {name: content})
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "out").rglob("index.json"))
    good, last = ({"z.txt": b"b"}, ["b"]) if ".txt" in name else ({"z.jsonl": LINES}, TEXTS)
    assert texts(tmp_path, {name: content} | good, "--skip-bad")[-len(last) :] == last
    assert "left out" in capsys.readouterr().out


def test_skip_bad_leaves_out_the_whole_of_a_text(tmp_path):
    text = b"line one\n" * 100
    files = {"a.txt": text + b"\xff" + text, "b.txt": text}
    assert texts(tmp_path, files, "--skip-bad", "--split-mb", 1e-4) == [text.decode()]


def test_a_hub_data_set_gives_a_split_for_each_data_file_or_is_refused(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for number in range(3):
        (folder / f"train-{number}.jsonl").write_bytes(LINES)
    assert len(open_source(Prepare(source=f"hf:{folder}", out="")).splits) == 3
    prepared.prepare(f"hf:{folder}", tmp_path / "out", "--val-share", 0)
    assert prepared.texts_of(tmp_path / "out" / "train") == TEXTS * 3
    with pytest.raises(ValueError, match=r"cannot be opened \(Bad split: nope.*--hf-split"):
        prepared.prepare(f"hf:{folder}", tmp_path / "other", "--hf-split", "nope")


def read(path, size=64 * 2**20):
    """(file, position, text, whether it begins and ends here) of the documents of each split."""
    config = Prepare(source=str(path), out="", split_mb=size / 2**20)
    for split in open_source(config).splits:
        yield [
            (d.name, d.position, "".join(p.text for p in d.chunks), d.begins, d.ends)
            for part in split
            for d in readers.documents(part, config, left_out=Counter())
        ]


@pytest.mark.parametrize("bom", [b"", BOM])
def test_a_file_of_lines_is_divided_at_line_ends_wherever_its_parts_begin(tmp_path, bom):
    lines = [{"text": "x" * (n * 7 % 50)} for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(bom + lines_of(lines) + b"\n\n")
    whole, *none = read(path)
    assert not none and [text for _, _, text, *_ in whole] == [line["text"] for line in lines]
    for size in (4, 17, 18, 19, 60, 1000):
        parts = list(read(path, size))
        assert len(parts) == -(-path.stat().st_size // size)
        assert [document for part in parts for document in part] == whole
    path.write_bytes(bom + LINES * 20 + b"{\n")
    for size in (9, 100, 10_000):  # the line of an error is counted from the file's begin
        with pytest.raises(ValueError, match=r"a.jsonl:101 is not a line of JSON"):
            list(read(path, size))


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("text", ["é\n" * 40, "x" * 100, "\n" * 20 + "y"])
def test_a_file_of_text_stays_one_document_wherever_it_is_divided(tmp_path, bom, text):
    path = tmp_path / "a.txt"
    path.write_text(bom + text)
    for size in (1, 2, 5, 33, 10_000):
        parts = list(read(path, size))
        names, positions, found, begins, ends = zip(*itertools.chain(*parts), strict=True)
        assert "".join(found) == text and len(found) == len(parts)
        assert {*names, *positions} == {"a.txt", 0}
        assert begins == (True,) + (False,) * (len(parts) - 1) == ends[::-1]
    out = tmp_path / "out"
    prepared.prepare(path, out, "--val-share", 0, "--split-mb", 33 / 2**20)
    assert prepared.texts_of(out / "train") == [text]


def test_row_groups_of_a_large_file_are_splits(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(ROWS * 4))
    parts = list(read(path, 300))
    found = [(position, text) for part in parts for _, position, text, *_ in part]
    assert len(parts) > 2 and found == [*enumerate(TEXTS * 4)]


def test_small_files_share_a_split_and_a_compressed_one_is_not_divided(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 30)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(os.urandom(500).hex().encode()))
    config = Prepare(source=str(tmp_path), out="", split_mb=100 / 2**20)
    names = [" ".join(part.name for part in split) for split in open_source(config).splits]
    threes = [f"{n}.txt {n + 1}.txt {n + 2}.txt" for n in (0, 3, 6)]
    assert names == [*threes, "9.txt", "packed.txt.gz"]


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
