"""Splits are tokenized by any number of processes, with the same bits as the result."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from conftest import ROOT
from data import encode, prepare, shards
from data.manifest import INDEX, read_manifest
from data.shards import DiskFolder
from prepared import files_of, texts_of, tokens_of
from processes import KILLS_ITSELF
from runtime.buckets import AccessDenied, Prefix, Unavailable

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KILLS = 20
# Kills itself when this kind of work is done for the n-th time.
CHILD = """
import os, signal, sys
from data import encode, prepare, shards

kind, number, *arguments = sys.argv[1:]
"""
CHILD += KILLS_ITSELF
CHILD += """
encode.SplitWriter.add = killing("document", encode.SplitWriter.add)
shards.ShardWriter.add = killing("append", shards.ShardWriter.add)
shards.ShardWriter._write = killing("shard", shards.ShardWriter._write)
shards.DiskFolder.write = killing("record", shards.DiskFolder.write)
prepare.Preparation.write_index = killing("index", prepare.Preparation.write_index)
prepare.main(arguments)
"""
# How often a kind may be done before the kill; a life does each about so often.
KINDS = {"document": 400, "append": 1000, "shard": 60, "record": 20, "index": 2}


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
    return files_of(source.parent / "whole")


def test_the_source_is_many_splits_of_each_kind(source, whole):
    records = [json.loads(whole[name]) for name in whole if name.startswith("splits/0")]
    assert len(records) > 15
    assert (
        sum(record["train"]["documents"] > 0 < record["val"]["documents"] for record in records) > 9
    )
    manifest = read_manifest(source.parent / "whole" / "train")
    assert manifest.documents == sum(record["train"]["documents"] for record in records)
    assert manifest.tokens == sum(record["train"]["tokens"] for record in records)


@pytest.mark.parametrize("workers", ["2", "5"])
def test_processes_write_the_same_bits_as_one(source, whole, tmp_path, workers):
    prepare.main(flags(source, tmp_path / "out", "--workers", workers))
    assert files_of(tmp_path / "out") == whole


@pytest.mark.slow
@pytest.mark.long
def test_after_any_kill_the_bits_are_the_same(source, whole, tmp_path):
    chance, kills, preparations = random.Random(0), 0, 0
    while kills < KILLS:
        preparations += 1
        out = tmp_path / f"{preparations}"
        while True:
            kind = [*KINDS][kills % len(KINDS)] if kills < KILLS else "none"
            number = chance.randint(1, KINDS.get(kind, 1))
            command = [sys.executable, "-c", CHILD, kind, str(number), *flags(source, out)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode != -signal.SIGKILL:
                break
            kills += 1
        assert done.returncode == 0, done.stderr
        assert files_of(out) == whole


@pytest.mark.slow
def test_workers_end_with_a_preparation_that_is_killed(source, tmp_path):
    command = [sys.executable, ROOT / "data" / "prepare.py", *flags(source, tmp_path)]
    process = subprocess.Popen([*command, "--workers", "2"])
    children, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
    workers = []
    while len(workers) < 2 or not list(tmp_path.rglob("*.npy")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
        workers = children.read_text().split()
    process.kill()
    process.wait()
    while any(Path("/proc", worker).exists() for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_preparations_of_one_folder_at_once_write_the_same_bits(source, whole, tmp_path):
    command = [sys.executable, ROOT / "data" / "prepare.py", *flags(source, tmp_path / "out")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert files_of(tmp_path / "out") == whole


def stopped(monkeypatch, arguments, after=5):
    """A preparation that ends after some splits."""
    with monkeypatch.context() as patch:
        done, tokenize = [], encode.tokenize_split

        def counted(job, *given):
            if len(done) == after:
                raise KeyboardInterrupt
            done.append(job.split)
            return tokenize(job, *given)

        patch.setattr(prepare, "tokenize_split", counted)
        with pytest.raises(KeyboardInterrupt):
            prepare.main(arguments)


def done_again(monkeypatch, arguments):
    """Numbers of the splits that are tokenized."""
    done, tokenize = [], encode.tokenize_split
    with monkeypatch.context() as patch:
        patch.setattr(
            prepare, "tokenize_split", lambda job, *g: done.append(job.split) or tokenize(job, *g)
        )
        prepare.main(arguments)
    return done


def test_splits_with_a_record_are_not_tokenized_again(source, whole, tmp_path, monkeypatch, capsys):
    arguments = flags(source, tmp_path)
    stopped(monkeypatch, arguments)
    assert not list(tmp_path.rglob(INDEX))
    capsys.readouterr()
    done = done_again(monkeypatch, arguments)
    assert done == list(range(5, 5 + len(done)))
    assert f"{tmp_path}: 5 splits with " in capsys.readouterr().out
    assert files_of(tmp_path) == whole
    assert done_again(monkeypatch, arguments) == []
    assert "already prepared with these settings" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["shard gone", "shard short", "record", "other settings", "index"])
def test_an_incomplete_split_is_tokenized_again(source, whole, tmp_path, monkeypatch, harm):
    arguments = flags(source, tmp_path)
    prepare.main(arguments)
    [shard, *_] = sorted((tmp_path / "train").glob("shard_00003_*.npy"))
    record = tmp_path / "splits" / "00003.json"
    if harm == "shard gone":
        shard.unlink()
    elif harm == "shard short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (tmp_path / "val" / INDEX).unlink()
        if harm == "record":
            record.write_text("{")
        elif harm == "other settings":
            record.write_text(record.read_text().replace('"settings": "', '"settings": "0'))
    assert done_again(monkeypatch, arguments) == ([] if harm == "index" else [3])
    assert files_of(tmp_path) == whole


def test_an_unfinished_preparation_with_other_settings_is_refused(
    source, whole, tmp_path, monkeypatch
):
    stopped(monkeypatch, flags(source, tmp_path))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"another val_share\. Use another --out, or --overwrite"):
        prepare.main(flags(source, tmp_path, "--val-share", "0.3"))
    assert files_of(tmp_path) == before
    prepare.main(flags(source, tmp_path, "--val-share", "0.3", "--overwrite"))
    prepare.main(flags(source, tmp_path, "--overwrite"))
    assert files_of(tmp_path) == whole


def test_a_copy_of_the_source_is_the_same_source(source, whole, tmp_path, monkeypatch):
    stopped(monkeypatch, flags(source, tmp_path / "out"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    prepare.main(flags(copy, tmp_path / "out"))
    found = files_of(tmp_path / "out")
    commands = [name for name in whole if name.endswith(INDEX)]
    assert {n: c for n, c in found.items() if n not in commands} == {
        n: c for n, c in whole.items() if n not in commands
    }
    (copy / "e3.jsonl").write_text('{"text": "another"}')
    with pytest.raises(ValueError, match="another files_sha256"):
        prepare.main(flags(copy, tmp_path / "out"))


def test_old_temporary_files_of_killed_preparations_are_removed(source, whole, tmp_path):
    (tmp_path / "train").mkdir()
    old, new = (tmp_path / "train" / f"shard_00000_000.npy.{n}.partial" for n in ("old", "new"))
    for path in (old, new, tmp_path / "train" / "shard_99999_000.npy"):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    prepare.main(flags(source, tmp_path))
    assert not old.exists() and new.exists()
    assert files_of(tmp_path) == whole


def test_a_full_disk_is_reported_and_nothing_is_lost(source, whole, small_disk):
    folder, enlarge = small_disk
    with pytest.raises(ValueError, match=r"there is no space left for .*No space left.*are kept"):
        prepare.main(flags(source, folder / "out"))
    assert not list(folder.rglob(INDEX)) and not list(folder.rglob("*.partial"))
    enlarge()
    prepare.main(flags(source, folder / "out"))
    assert files_of(folder / "out") == whole


# --- a limit, and a validation set by position ----------------------------------------------------


@pytest.mark.parametrize("most", [1, 3_000, 20_000, 70_001])
@pytest.mark.parametrize("workers", ["1", "2"])
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
    text = "".join(json.loads(line)["text"] for line in (source / "a.jsonl").open())
    path = tmp_path / "input.txt"
    path.write_text(text)
    for workers in ("1", "2"):
        prepare.main(flags(path, tmp_path / workers, "--val-share", "0.1", "--workers", workers))
    assert "the last 0.1 of all tokens are val" in capsys.readouterr().out
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    train, val = (tokens_of(tmp_path / "1" / side) for side in ("train", "val"))
    prepare.main(flags(path, tmp_path / "all", "--val-share", "0"))
    both = np.concatenate([train, val])
    np.testing.assert_array_equal(both, tokens_of(tmp_path / "all" / "train"))
    assert len(val) == round(0.1 * len(both))
    manifests = [read_manifest(tmp_path / "1" / side) for side in ("train", "val")]
    assert [m.documents for m in manifests] == [0, 1]
    assert sum(m.text_bytes for m in manifests) == len(text.encode())
    assert [m.tokens for m in manifests] == [len(train), len(val)]
    assert done_again(monkeypatch, flags(path, tmp_path / "1", "--val-share", "0.1")) == []


def test_few_rows_have_their_end_for_validation_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n} " * 50}) + "\n" for n in range(3)))
    prepare.main(["--source", str(path), "--out", str(tmp_path / "out")])
    train, val = (read_manifest(tmp_path / "out" / side) for side in ("train", "val"))
    assert 0.04 < val.tokens / (val.tokens + train.tokens) < 0.06
    assert train.documents + val.documents == 3


def test_a_split_decides_alone_which_documents_are_for_validation(source, whole, tmp_path):
    """Each is where it is in any other preparation, whatever lies beside it."""
    prepare.main(flags(source / "a.jsonl", tmp_path / "out", "--split-mb", "1"))
    here = texts_of(tmp_path / "out" / "val")
    there = texts_of(source.parent / "whole" / "val")
    assert len(here) > 30 and there[: len(here)] == here


# --- in a bucket ----------------------------------------------------------------------------------


def uploaded(bucket, folder, name):
    url = f"{bucket.url}/{name}"
    for path in folder.iterdir():
        Prefix(url).write(path.name, path.read_bytes())
    return url


def objects(url):
    prefix = Prefix(url)
    return {name: prefix.read(name) for name in prefix.list_objects()}


def but_index(files):
    """Without indexes, which name the source, and settings, whose checksums are a bucket's."""
    return {n: c for n, c in files.items() if n.endswith(".npy")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, 503, "cut request", "cut response"])
def test_a_bucket_gets_the_same_shards_even_after_failures(source, whole, bucket, kind):
    url, out = uploaded(bucket, source, "source"), f"{bucket.url}/data/out"
    faults = []
    if kind:
        faults = [bucket.fault(kind, on=on, times=2, after=3) for on in ("upload", "read")]
    prepare.main(flags(url, out))
    assert all(fault.done == 2 for fault in faults)
    assert but_index(objects(out)) == but_index(whole)
    assert (
        read_manifest(f"{out}/train").identity
        == read_manifest(source.parent / "whole" / "train").identity
    )


def test_a_preparation_into_a_bucket_resumes_after_a_kill(source, whole, bucket, tmp_path):
    out = f"{bucket.url}/data/out"
    command = [sys.executable, "-c", CHILD, "shard", "20", *flags(source, out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    prepare.main(flags(source, out))
    assert objects(out) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "raised"),
    [
        ("c.parquet", 403, AccessDenied),
        ("a.jsonl", 403, AccessDenied),
        ("d.jsonl.gz", 403, AccessDenied),
        # gcsfs retries for half a minute
        pytest.param("d.jsonl.gz", 503, Unavailable, marks=pytest.mark.long),
    ],
)
def test_an_unavailable_bucket_is_not_a_damaged_source(source, bucket, name, status, raised):
    url = uploaded(bucket, source, "source")
    bucket.fault(status, on="read", path=f"*{name}")
    with pytest.raises(raised, match=name):
        prepare.main(flags(f"{url}/{name}", f"{bucket.url}/data/out", "--skip-bad"))


def test_files_in_a_bucket_are_chosen_as_those_of_a_folder(bucket, tmp_path):
    names = ["a.txt", "sub/b.txt", "sub/c.md", ".hidden.txt", "sub/.h/x.txt"]
    for name in names:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        Prefix(f"{bucket.url}/source").write(name, name.encode())
    Prefix(f"{bucket.url}/source2").write("x.txt", b"another folder")
    for glob in ("**/*", "*.txt", "**/*.md", "sub/*"):
        found = []
        for number, source in enumerate((tmp_path / "source", f"{bucket.url}/source")):
            out = tmp_path / f"out{number}"
            more = ["--glob", glob, "--val-share", "0", "--overwrite"]
            prepare.main(flags(source, out, *more))
            found.append(texts_of(out / "train"))
        assert found[0] == found[1] and found[0]


# --- files ----------------------------------------------------------------------------------------


def test_a_shard_is_a_file_that_numpy_reads(tmp_path):
    writer = shards.ShardWriter(str(tmp_path), "x", 4, np.dtype(np.uint16), weighted=True)
    for begin, weight in ((0, 1), (3, 0), (6, 1)):
        writer.add(np.arange(begin, begin + 3), weight)
    writer.flush()
    assert [shard.name for shard in writer.shards] == [f"x_00{n}.npy" for n in range(3)]
    found = [np.load(tmp_path / shard.name) for shard in writer.shards]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(9))
    np.save(tmp_path / "y.npy", np.arange(4, dtype=np.uint16))
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x_000.npy").read_bytes()
    weights = [np.load(tmp_path / shard.weights.name) for shard in writer.shards]
    assert np.concatenate(weights).tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]


def test_a_file_has_its_old_content_or_the_new_one(tmp_path, monkeypatch):
    folder = DiskFolder(str(tmp_path))
    folder.write("a/b.json", b"old")
    monkeypatch.setattr("os.fsync", lambda fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        folder.write("a/b.json", b"new")
    assert folder.read("a/b.json") == b"old"
    assert [*folder.list_objects()] == ["a/b.json"]  # and no unfinished file
    folder.remove(["a/b.json", "gone"])
    with pytest.raises(FileNotFoundError):
        folder.read("a/b.json")
