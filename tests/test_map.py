"""Splits are tokenized by any number of processes, with the same bits as the result.

Killed processes, buckets and full disks are in system/test_preparation_failures.py.
"""

import gzip
import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from conftest import ROOT
from data import encode, prepare
from data.manifest import INDEX, read_manifest
from prepared import files_of, tokens_of


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Lines, a long file of text, Parquet in row groups, packed lines, small files."""
    folder = tmp_path_factory.mktemp("map") / "source"
    folder.mkdir()
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    text = (text * (1 + 700_000 // len(text)))[:700_000]
    rows = [{"text": text[i : i + 900]} for i in range(0, 300_000, 900)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [text[i : i + 2_000] for i in range(300_000, 600_000, 2_000)]
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=10, compression=None)
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(2_000))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for number in range(8):
        (folder / f"e{number}.jsonl").write_text(json.dumps({"text": text[number * 99 :][:500]}))
    return folder


def flags(source, out, *more):
    where = "--source", str(source), "--out", str(out), "--split-mb", "0.04"
    return [*where, "--workers", "1", "--val-share", "0.2", "--shard-tokens", "9000", *more]


@pytest.fixture(scope="module")
def whole(source):
    prepare.main(flags(source, source.parent / "whole"))
    files = files_of(source.parent / "whole")
    records = [json.loads(files[name]) for name in files if name.startswith("splits/0")]
    assert sum(r["train"]["documents"] > 0 < r["val"]["documents"] for r in records) > 9
    return files


def test_processes_write_the_same_bits_as_one(source, whole, tmp_path):
    prepare.main(flags(source, tmp_path / "out", "--workers", "2"))
    assert files_of(tmp_path / "out") == whole


def tokenized(monkeypatch, arguments, most=10**9):
    """Return the numbers of the splits that a preparation tokenizes, which ends before another."""
    done, tokenize = [], encode.tokenize_split

    def counted(job, *given):
        if len(done) == most:
            raise KeyboardInterrupt
        done.append(job.split)
        return tokenize(job, *given)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "tokenize_split", counted)
        try:
            prepare.main(arguments)
        except KeyboardInterrupt:
            assert len(done) == most
    return done


def test_splits_with_a_record_are_not_tokenized_again(source, whole, tmp_path, monkeypatch, capsys):
    arguments = flags(source, tmp_path)
    tokenized(monkeypatch, arguments, most=5)
    assert not list(tmp_path.rglob(INDEX))
    capsys.readouterr()
    done = tokenized(monkeypatch, arguments)
    assert done == list(range(5, 5 + len(done)))
    assert f"{tmp_path}: 5 splits with " in capsys.readouterr().out
    assert files_of(tmp_path) == whole
    assert tokenized(monkeypatch, arguments) == []
    assert "already prepared with these settings" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["shard gone", "shard short", "record"])
def test_an_incomplete_split_is_tokenized_again(source, whole, tmp_path, monkeypatch, harm):
    arguments = flags(source, tmp_path)
    prepare.main(arguments)
    [shard, *_] = sorted((tmp_path / "train").glob("shard_00003_*.npy"))
    record = tmp_path / "splits" / "00003.json"
    if harm.startswith("shard"):
        shard.write_bytes(shard.read_bytes()[:-1])
        if harm == "shard gone":
            shard.unlink()
    else:
        (tmp_path / "val" / INDEX).unlink()
        assert tokenized(monkeypatch, arguments, most=0) == []
        (tmp_path / "val" / INDEX).unlink()
        record.write_text("{")
    assert tokenized(monkeypatch, arguments) == [3]
    assert files_of(tmp_path) == whole


def test_an_unfinished_preparation_with_other_settings_is_refused(
    source, whole, tmp_path, monkeypatch
):
    tokenized(monkeypatch, flags(source, tmp_path), most=5)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"another val_share\. Use another --out, or --overwrite"):
        prepare.main(flags(source, tmp_path, "--val-share", "0.3"))
    assert files_of(tmp_path) == before
    prepare.main(flags(source, tmp_path, "--val-share", "0.3", "--overwrite"))
    prepare.main(flags(source, tmp_path, "--overwrite"))
    assert files_of(tmp_path) == whole


def test_a_copy_of_the_source_is_the_same_source(source, whole, tmp_path, monkeypatch):
    tokenized(monkeypatch, flags(source, tmp_path / "out"), most=5)
    copy = shutil.copytree(source, tmp_path / "copy")
    prepare.main(flags(copy, tmp_path / "out"))
    found, expected = (
        {n: c for n, c in files.items() if not n.endswith(INDEX)}  # they name the source
        for files in (files_of(tmp_path / "out"), whole)
    )
    assert found == expected
    (copy / "e3.jsonl").write_text('{"text": "another"}')
    with pytest.raises(ValueError, match="another files_sha256"):
        prepare.main(flags(copy, tmp_path / "out"))


def test_what_killed_preparations_left_is_removed(source, whole, tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("shard_00000_000.npy.aa.partial", "shard_99999_000.npy"):
        (tmp_path / "train" / name).write_bytes(b"x")
    prepare.main(flags(source, tmp_path))
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == whole.keys()


# --- a limit, and a validation set by position ----------------------------------------------------


@pytest.mark.parametrize(("most", "workers"), [(1, "1"), (20_000, "2"), (70_001, "1")])
def test_a_limit_takes_the_first_documents_that_reach_it(source, whole, tmp_path, most, workers):
    more = ["--max-tokens", str(most), "--val-share", "0"]
    prepare.main(flags(source, tmp_path / "some", *more, "--workers", workers))
    prepare.main(flags(source, tmp_path / "all", "--val-share", "0"))
    every, some = (tokens_of(tmp_path / name / "train") for name in ("all", "some"))
    ends = np.flatnonzero(every == 4095) + 1
    assert len(some) == ends[ends >= most][0]
    np.testing.assert_array_equal(some, every[: len(some)])
    manifest = read_manifest(tmp_path / "some" / "train")
    names = {path.name for path in (tmp_path / "some" / "train").glob("*.npy")}
    assert names == {shard.name for shard in manifest.shards}
    assert manifest.documents == (some == 4095).sum()


def test_one_file_of_text_has_its_end_for_validation(source, tmp_path, capsys, monkeypatch):
    lines = (source / "a.jsonl").read_text().splitlines()
    text = "".join(json.loads(line)["text"] for line in lines)
    path = tmp_path / "input.txt"
    path.write_text(text)
    arguments = flags(path, tmp_path / "both", "--val-share", "0.1", "--workers", "2")
    prepare.main(arguments)
    assert "the last 0.1 of all tokens are val" in capsys.readouterr().out
    train, val = (tokens_of(tmp_path / "both" / side) for side in ("train", "val"))
    prepare.main(flags(path, tmp_path / "all", "--val-share", "0"))
    both = np.concatenate([train, val])
    np.testing.assert_array_equal(both, tokens_of(tmp_path / "all" / "train"))
    assert len(val) == round(0.1 * len(both))
    manifests = [read_manifest(tmp_path / "both" / side) for side in ("train", "val")]
    assert [m.documents for m in manifests] == [0, 1]
    assert sum(m.text_bytes for m in manifests) == len(text.encode())
    assert [m.tokens for m in manifests] == [len(train), len(val)]
    assert tokenized(monkeypatch, arguments) == []
