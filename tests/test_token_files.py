"""Elements of shards: mapped from a disk, and read from a bucket as byte ranges."""

import base64
import os
from types import SimpleNamespace
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest

import dataset
from data import token_files, verify
from data.manifest import file_crc32c
from dataset import Dataset
from runtime import storage
from runtime.storage import BucketFolder, FileInfo, Unavailable
from test_dataset import alone, make_folder
from train import prefetch

TOKENS, SHARD, PAGE, T = 1000, 230, 100, 7
ROWS = np.arange(6)


def make(folder):
    """Tokens that are their own positions, in shards of 588 bytes, with loss weights."""
    weights = (np.arange(TOKENS) // 10 % 2).tolist()
    return make_folder(folder, np.arange(TOKENS), shard_tokens=SHARD, weights=weights)


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "corpus" / "train")


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Make gs://bucket the temporary folder. system/test_token_buckets.py has real requests."""

    def path_of(url):
        return tmp_path / str(url).removeprefix("gs://bucket/")

    def files(folder, below=""):
        paths = [path for path in path_of(folder.url).iterdir() if path.is_file()]
        sums = [file_crc32c(storage.at(path.parent), path.name) for path in paths]
        sums = [base64.b64encode(bytes.fromhex(crc32c)).decode() for crc32c in sums]
        return {p.name: FileInfo(p.stat().st_size, s) for p, s in zip(paths, sums, strict=True)}

    def cat_ranges(paths, begins, ends):
        parts = zip(map(path_of, paths), begins, ends, strict=True)
        return [path.read_bytes()[begin:end] for path, begin, end in parts]

    def read(folder, name):
        return (path_of(folder.url) / name).read_bytes()

    monkeypatch.setattr(fsspec, "filesystem", lambda _: SimpleNamespace(cat_ranges=cat_ranges))
    monkeypatch.setattr(BucketFolder, "files", files)
    monkeypatch.setattr(BucketFolder, "read", read)
    return lambda folder: f"gs://bucket/{folder.relative_to(tmp_path).as_posix()}"


def opened(folder, **how):
    return alone(folder, T, batch_size=len(ROWS), **how)


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
        assert one[name].dtype == other[name].dtype


def test_files_are_mapped_when_they_are_first_used_and_few_stay_open(folder, monkeypatch):
    mapped, real = [], np.memmap
    monkeypatch.setattr(np, "memmap", lambda path, *g: mapped.append(path) or real(path, *g))
    data = Dataset(folder, T)
    assert not mapped
    for window in range(data.windows):
        data.batch(np.array([window]))
    assert len(mapped) == len({*mapped}) == 10
    monkeypatch.setattr(token_files, "MAX_MAPPED", 2)
    data, before = opened(folder), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        tokens = data.rows(step, ROWS)["tokens"]
        np.testing.assert_array_equal(tokens[:, 0], T * data.windows_of(step, ROWS))
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # two of each kind


def test_a_shard_that_is_removed_or_changed_during_a_run_is_named(folder, monkeypatch):
    data = Dataset(folder, T)
    data.batch(ROWS)
    for name in ("shard_000.npy", "shard_001.npy"):
        (folder / name).unlink()
    assert data.batch(ROWS)["tokens"][0, 0] == 0  # it is mapped
    with pytest.raises(ValueError, match=r"shard_000.npy is missing: .* Copy the file again"):
        data.batch(ROWS + 35)
    make(folder)
    (folder / "shard_002.npy").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"shard_002.npy is truncated, with 5 bytes: .*Copy"):
        data.batch(ROWS + 70)
    make(folder)
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr(np, "memmap", Mock(side_effect=denied))
    with pytest.raises(ValueError, match=r"shard_000.npy cannot be read: .*Permission denied"):
        Dataset(folder, T).batch(ROWS)


@pytest.mark.parametrize("order", ["windows", "blocks"])
@pytest.mark.parametrize("pages", [64, 7, 1])
def test_a_batch_from_a_bucket_is_the_one_from_a_disk(remote, folder, monkeypatch, order, pages):
    monkeypatch.setattr(dataset, "PAGE_BYTES", PAGE)
    for module in (dataset, token_files):
        monkeypatch.setattr(module, "CACHED_PAGES", pages)
    kept = max(pages, 2 * len(ROWS)) if order == "blocks" or pages == 64 else 0
    how = {"order": order, "segments": True, "seed": 3}
    disk, far = opened(folder, **how), opened(remote(folder), **how)
    for step in (*range(30), 2, 77, 5):
        same(far.rows(step, ROWS), disk.rows(step, ROWS))
        for files in far.parts[""].files:  # each of the rows may lie in two pages
            assert len(files._cache) <= kept
    for rows in (ROWS[:3], ROWS[[5, 1]]):
        same(far.rows(9, rows), disk.rows(9, rows))
    same(far.parts[""].eval_rows(ROWS, 6), disk.parts[""].eval_rows(ROWS, 6))


def test_windows_read_what_they_need_and_blocks_read_a_page_once(remote, folder, monkeypatch):
    monkeypatch.setattr(dataset, "PAGE_BYTES", PAGE)
    steps, read, real, requested = TOKENS // T // len(ROWS), {}, BucketFolder.read_ranges, []
    counted = lambda folder, ranges: requested.extend(ranges) or real(folder, ranges)  # noqa: E731
    monkeypatch.setattr(BucketFolder, "read_ranges", counted)
    for order, kept in (("windows", 0), ("blocks", 0), ("windows", 64)):
        monkeypatch.setattr(dataset, "CACHED_PAGES", kept)
        data = opened(remote(folder), order=order)
        list(prefetch(lambda step, data=data: data.rows(step, ROWS), range(steps)))
        read[order, kept] = sum("weights" not in name for name, *_ in requested)
        requested.clear()
    # Some lie in two files.
    assert steps * len(ROWS) < read["windows", 0] < steps * len(ROWS) * 1.1
    assert read["blocks", 0] == 22  # pages of all files, but those of headers alone
    assert read["windows", 64] == 22  # a small folder is read once


def test_an_unavailable_bucket_is_a_transient_error(remote, folder, monkeypatch):
    data, real = opened(remote(folder)), fsspec.filesystem("gs")
    answers = {b"x": "1 of .* bytes", OSError("away"): "shard_.* failed: away"}
    for answer, message in answers.items():
        away = SimpleNamespace(cat_ranges=lambda paths, *_, a=answer: [a] * len(paths))
        monkeypatch.setattr(fsspec, "filesystem", lambda _, away=away: away)
        with pytest.raises(Unavailable, match=message):
            data.rows(0, ROWS)
    monkeypatch.setattr(fsspec, "filesystem", lambda _: real)
    same(data.rows(0, ROWS), opened(folder).rows(0, ROWS))


def test_a_bucket_in_which_a_shard_is_not_whole_is_refused_also_during_a_run(remote, folder):
    data, path = Dataset(remote(folder), T), folder / "shard_001.npy"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"shard_001.npy is truncated"):
        opened(remote(folder))
    path.unlink()
    for used in (lambda: opened(remote(folder)), lambda: data.batch(ROWS + 35)):
        with pytest.raises(ValueError, match=r"shard_001.npy is missing: .* Copy the file again"):
            used()


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_verify_lists_damaged_files_and_accepts_complete_folders(remote, folder, capsys, where):
    url = str(folder) if where == "disk" else remote(folder)
    verify.main(["--folder", url])
    assert f"{url} is complete: 10 files, " in capsys.readouterr().out
    kinds = {
        "1": lambda a: a[:-1] + b"\xff",
        "2.weights": lambda a: a + b"++",
        "4": lambda a: a[:-5],
    }
    for kind, change in kinds.items():
        path = folder / f"shard_00{kind}.npy"
        path.write_bytes(change(path.read_bytes()))
    (folder / "shard_003.npy").unlink()
    with pytest.raises(ValueError, match="4 files are damaged, listed above; compared 10"):
        verify.main(["--folder", url])
    out = capsys.readouterr().out
    assert "shard_001.npy is altered, with another checksum" in out
    assert "shard_003.npy is missing" in out and "shard_000" not in out
    assert "shard_002.weights.npy is altered" in out and "shard_004.npy is truncated" in out
    with pytest.raises(ValueError, match=r"has no index.json"):
        verify.main(["--folder", str(folder.parent.parent / "empty")])
