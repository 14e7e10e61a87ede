"""Elements of shards: mapped from a disk, and read from a bucket as byte ranges."""

import os
import threading

import numpy as np
import pytest

import dataset
from data import token_files, verify
from data.manifest import DOCUMENT_RULE, INDEX, Manifest, index_text
from data.shards import ShardWriter
from dataset import Dataset
from runtime import buckets
from runtime.buckets import Prefix, Unavailable
from test_dataset import alone, make_folder
from train import AHEAD_STEPS, prefetch

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TOKENS, SHARD, CHUNK, T = 1000, 230, 100, 7
ROWS = np.arange(6)


@pytest.fixture
def folder(tmp_path):
    """Tokens that are their own positions, in shards of 588 bytes."""
    return make_folder(tmp_path / "corpus" / "train", np.arange(TOKENS), shard_tokens=SHARD)


@pytest.fixture
def weighted(tmp_path):
    """The same with loss weights."""
    folder, ids = tmp_path / "chat" / "train", np.arange(TOKENS)
    writer = ShardWriter(str(folder), "shard", SHARD, np.dtype("uint16"), weighted=True)
    for begin in range(0, TOKENS, 10):
        writer.add(ids[begin : begin + 10], begin // 10 % 2)
    writer.flush()
    fields = ("sample", "aa", 1000, 999, DOCUMENT_RULE, "uint16", 1, TOKENS, 0)
    manifest = Manifest("train", *fields, writer.shards, "python data/prepare.py", {})
    (folder / INDEX).write_text(index_text(manifest))
    return folder


def uploaded(bucket, folder):
    """The same in a bucket."""
    url = f"{bucket.url}/corpus/{folder.name}"
    for path in folder.iterdir():
        Prefix(url).write(path.name, path.read_bytes())
    return url


def opened(folder, **how):
    return alone(folder, T, batch_size=len(ROWS), **how)


def files_of(data):
    return data.parts[""].files


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
        assert one[name].dtype == other[name].dtype


# --- on a disk ------------------------------------------------------------------------------------


def test_files_are_mapped_when_they_are_first_used(folder, monkeypatch):
    mapped, real = [], np.memmap
    monkeypatch.setattr(np, "memmap", lambda path, *g: mapped.append(path[-7:]) or real(path, *g))
    data = Dataset(folder, T)
    assert not mapped
    for window in range(data.windows):
        data.batch(np.array([window]))
    assert mapped == [f"{n:03d}.npy" for n in range(5)]


def test_a_shard_that_is_removed_or_changed_during_a_run_is_named(folder):
    data = Dataset(folder, T)
    data.batch(ROWS)
    for name in ("shard_000.npy", "shard_001.npy"):
        (folder / name).rename(folder / f"{name}.away")
    assert data.batch(ROWS)["tokens"][0, 0] == 0  # it is mapped
    with pytest.raises(ValueError, match=r"shard_000.npy is missing: .* Copy the file again"):
        data.batch(ROWS + 35)
    for name in ("shard_000.npy", "shard_001.npy"):
        (folder / f"{name}.away").rename(folder / name)
    (folder / "shard_002.npy").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"shard_002.npy is truncated, with 5 bytes: .*Copy"):
        data.batch(ROWS + 70)


def test_a_shard_that_cannot_be_read_is_named(folder, monkeypatch):
    def refused(path, *how):
        raise PermissionError(13, "Permission denied", path)

    data = Dataset(folder, T)
    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(ValueError, match=r"shard_000.npy cannot be read: .*Permission denied"):
        data.batch(ROWS)


def test_the_number_of_open_files_is_limited(folder, monkeypatch):
    monkeypatch.setattr(token_files, "MAX_MAPPED", 2)
    data, before = opened(folder), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        tokens = data.rows(step, ROWS)["tokens"]
        np.testing.assert_array_equal(tokens[:, 0], T * data.windows_of(step, ROWS))
        assert len(os.listdir("/proc/self/fd")) <= before + 2


# --- in a bucket ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["windows", "blocks"])
@pytest.mark.parametrize("chunks", [64, 7, 1])
def test_a_batch_from_a_bucket_is_the_one_from_a_disk(bucket, weighted, monkeypatch, order, chunks):
    """Also where the cache holds little, or less than a step needs."""
    monkeypatch.setattr(dataset, "CHUNK_BYTES", CHUNK)
    for module in (dataset, token_files):
        monkeypatch.setattr(module, "CACHED_CHUNKS", chunks)
    kept = max(chunks, 2 * len(ROWS)) if order == "blocks" or chunks == 64 else 0
    how = {"order": order, "segments": True, "seed": 3}
    disk, remote = opened(weighted, **how), opened(uploaded(bucket, weighted), **how)
    for step in (*range(30), 2, 77, 5):
        same(remote.rows(step, ROWS), disk.rows(step, ROWS))
        for files in files_of(remote):  # each of the rows may lie in two chunks
            assert len(files._cache) <= kept
    for rows in (ROWS[:3], ROWS[[5, 1]]):
        same(remote.rows(9, rows), disk.rows(9, rows))
    same(remote.parts[""].eval_rows(ROWS, 6), disk.parts[""].eval_rows(ROWS, 6))


def test_windows_read_what_they_need_and_blocks_read_a_chunk_once(bucket, folder, monkeypatch):
    monkeypatch.setattr(dataset, "CHUNK_BYTES", CHUNK)
    url, steps = uploaded(bucket, folder), TOKENS // T // len(ROWS)
    read = {}
    for order, kept in (("windows", 0), ("blocks", 0), ("windows", 64)):
        monkeypatch.setattr(dataset, "CACHED_CHUNKS", kept)
        data = opened(url, order=order)
        list(prefetch(lambda step, data=data: data.rows(step, ROWS), range(steps)))
        read[order, kept] = files_of(data)[0].requests
    # Some lie in two files.
    assert steps * len(ROWS) < read["windows", 0] < steps * len(ROWS) * 1.1
    assert read["blocks", 0] == 22  # chunks of all files, but those of headers alone
    assert read["windows", 64] == 22  # a small folder is read once


def test_the_next_steps_are_read_while_one_is_used(bucket, folder, monkeypatch):
    url, real = uploaded(bucket, folder), buckets.filesystem()
    together = threading.Barrier(AHEAD_STEPS)
    monkeypatch.setattr(dataset, "CACHED_CHUNKS", 0)

    class Waiting:
        def cat_ranges(self, *where):
            together.wait(60)
            return real.cat_ranges(*where)

    data, disk = opened(url), opened(folder)
    monkeypatch.setattr(buckets, "filesystem", Waiting)
    steps = range(2 * AHEAD_STEPS)
    for step, found in zip(steps, prefetch(lambda s: data.rows(s, ROWS), steps), strict=True):
        same(found, disk.rows(step, ROWS))


@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_a_failed_request_to_a_bucket_is_retried(bucket, folder, kind):
    url, disk = uploaded(bucket, folder), opened(folder)
    fault = bucket.fault(kind, on="read", path="*.npy", times=2)
    same(opened(url).rows(0, ROWS), disk.rows(0, ROWS))
    assert fault.done == 2


def test_an_unavailable_bucket_is_a_transient_error(bucket, folder, monkeypatch):
    data, real = opened(uploaded(bucket, folder)), buckets.filesystem()

    class Away:
        def cat_ranges(self, paths, begins, ends):
            return [OSError("away")] * len(paths)

    monkeypatch.setattr(buckets, "filesystem", Away)
    with pytest.raises(Unavailable, match=r"shard_.* failed: away"):
        data.rows(0, ROWS)
    monkeypatch.setattr(Away, "cat_ranges", lambda *_: 1 / 0)  # of all of them
    with pytest.raises(ZeroDivisionError):
        data.rows(0, ROWS)
    monkeypatch.setattr(Away, "cat_ranges", lambda self, paths, *_: [b"x"] * len(paths))
    with pytest.raises(Unavailable, match=r"1 of \d+ bytes came"):
        data.rows(0, ROWS)
    monkeypatch.setattr(buckets, "filesystem", lambda: real)
    same(data.rows(0, ROWS), opened(folder).rows(0, ROWS))


def test_a_shard_that_is_removed_from_the_bucket_during_a_run_is_named(bucket, folder):
    url = uploaded(bucket, folder)
    data = Dataset(url, T)
    Prefix(url).remove(["shard_001.npy"])
    with pytest.raises(ValueError, match=r"shard_001.npy is missing: .* Copy the file again"):
        data.batch(ROWS + 35)


@pytest.mark.parametrize("harm", ["missing", "truncated", "index"])
def test_a_bucket_in_which_a_shard_is_not_whole_is_refused_at_the_start(bucket, folder, harm):
    url = uploaded(bucket, folder)
    if harm == "truncated":
        Prefix(url).write("shard_002.npy", b"short")
    else:
        Prefix(url).remove([INDEX if harm == "index" else "shard_002.npy"])
    words = "index.json does not exist" if harm == "index" else f"shard_002.npy is {harm}"
    with pytest.raises(ValueError, match=words):
        opened(url)


def test_the_cache_keeps_the_chunks_used_last(bucket, folder, monkeypatch):
    monkeypatch.setattr(dataset, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(token_files, "CACHED_CHUNKS", 2)
    data = Dataset(uploaded(bucket, folder), T, order="blocks")
    one, two, three = np.array([0]), np.array([8]), np.array([14])  # at bytes 128, 240, 324
    for windows in (one, one, two, one, three, one, two):
        data.batch(windows)
    assert data.files[0].requests == 4


# --- verification ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_verify_lists_damaged_files_and_accepts_complete_folders(bucket, weighted, capsys, where):
    folder = make_folder(weighted.parent / "val", np.arange(TOKENS), shard_tokens=SHARD)
    url = str(folder.parent)
    if where == "bucket":
        url = uploaded(bucket, weighted).rpartition("/")[0]
        uploaded(bucket, folder)
    verify.main(["--folder", url])
    assert f"{url} is complete: 15 files, " in capsys.readouterr().out

    def change(name, content):
        if where == "disk":
            path = folder / name
            path.unlink() if content is None else path.write_bytes(content)
        elif content is None:
            Prefix(f"{url}/val").remove([name])
        else:
            Prefix(f"{url}/val").write(name, content)

    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    change("shard_001.npy", whole["shard_001.npy"][:-1] + b"\xff")
    change("shard_002.npy", whole["shard_002.npy"] + b"++")
    change("shard_003.npy", None)
    change("shard_004.npy", whole["shard_004.npy"][:-5])
    with pytest.raises(ValueError, match=r"4 files are damaged, listed above"):
        verify.main(["--folder", f"{url}/val"])
    out = capsys.readouterr().out
    assert "shard_001.npy is altered, with another checksum" in out
    assert "shard_003.npy is missing" in out
    assert "shard_002.npy is altered" in out and "shard_004.npy is truncated" in out
    assert "shard_000.npy" not in out


def test_verify_continues_after_a_shard_that_cannot_be_read(folder, capsys, monkeypatch):
    def refused(path, real=verify.file_crc32c):
        if path.name == "shard_001.npy":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(verify, "file_crc32c", refused)
    with pytest.raises(ValueError, match=r"1 files are damaged, listed above; compared 5"):
        verify.main(["--folder", str(folder)])
    assert capsys.readouterr().out.count("shard_001.npy cannot be read: ") == 1


def test_verify_refuses_a_folder_without_shards(tmp_path):
    with pytest.raises(ValueError, match=r"has no index.json"):
        verify.main(["--folder", str(tmp_path)])
