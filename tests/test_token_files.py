"""Elements of shards: compared when they are used, and fetched from a bucket by the block."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

import buckets
import token_files
from buckets import Prefix, Unanswered
from conftest import ROOT
from data import verify
from dataset import Dataset
from manifest import INDEX, read_manifest
from test_dataset import make_folder, without_blocks
from token_files import CHECKED, Cache

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TOKENS, SHARD, BLOCK, T = 1000, 230, 100, 7
ROWS = np.arange(6)


@pytest.fixture
def folder(tmp_path):
    """Tokens that are their own positions, in shards of 6 blocks, of which the last is short."""
    ids = np.arange(TOKENS)
    return make_folder(tmp_path / "corpus" / "train", ids, shard_tokens=SHARD, block_bytes=BLOCK)


def uploaded(bucket, folder):
    """The same in a bucket."""
    url = f"{bucket.url}/corpus/{folder.name}"
    for path in folder.iterdir():
        Prefix(url).write(path.name, path.read_bytes())
    return url


def opened(folder, cache=None, **how):
    return Dataset(folder, T, sequences=len(ROWS), cache=cache, **how)


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
        assert one[name].dtype == other[name].dtype


def settled(cache):
    wait(cache._held.values())


# --- on a disk ------------------------------------------------------------------------------------


def counted(monkeypatch):
    """(name, first byte) of each block that is compared."""
    compared, real = [], token_files.range_crc32c
    monkeypatch.setattr(
        token_files,
        "range_crc32c",
        lambda path, begin, end: compared.append((path.name, begin)) or real(path, begin, end),
    )
    return compared


def test_a_block_is_compared_when_it_is_first_used_and_not_before(folder, monkeypatch):
    compared = counted(monkeypatch)
    data = opened(folder, shuffle=False)
    assert not compared
    data.rows(0, ROWS)  # tokens 0 to 42, which are bytes 128 to 213
    assert compared == [("shard_00000.npy", 100), ("shard_00000.npy", 200)]
    data.rows(0, ROWS)
    assert len(compared) == 2
    for step in range(TOKENS // T // len(ROWS)):
        data.rows(step, ROWS)
    assert len(compared) == len(set(compared)) == 22  # the first 100 bytes are of headers alone


def test_a_block_that_is_not_used_may_be_damaged(folder):
    path = folder / "shard_00000.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    data = opened(folder, shuffle=False)
    assert data.rows(0, ROWS)["tokens"][-1, -1] == 41
    with pytest.raises(ValueError, match=r"shard_00000.npy is altered: .* bytes 500 to 587, found"):
        data.eval_rows(np.array([32]), TOKENS // T)


def test_what_was_good_is_remembered_beside_the_file(folder, monkeypatch):
    monkeypatch.setattr(token_files, "REMEMBER_S", 0.0)
    compared = counted(monkeypatch)
    both = opened(folder, shuffle=False), opened(folder, shuffle=False)
    for step in (0, 3, 5):
        both[step % 2].rows(step, ROWS)
    assert len(compared) == 6
    remembered(*both)
    for step in (0, 3, 5):  # each kept what the other had remembered
        opened(folder, shuffle=False).rows(step, ROWS)
    assert len(compared) == 6
    opened(folder, shuffle=False).rows(9, ROWS)
    assert len(compared) > 6


def remembered(*opened):
    for data in opened:
        data.shards.remember()


def test_it_is_written_now_and_then_and_not_at_the_start(folder, monkeypatch):
    compared = counted(monkeypatch)
    for _ in range(2):
        data = opened(folder, shuffle=False)
        for _ in range(3):
            data.rows(0, ROWS)
    assert compared == [("shard_00000.npy", 100), ("shard_00000.npy", 200)] * 2
    assert not list(folder.glob(f"*{CHECKED}"))


@pytest.mark.parametrize("change", ["touched", "replaced", "other checksums", "nonsense", "short"])
def test_what_is_remembered_of_another_file_does_not_count(folder, monkeypatch, change):
    monkeypatch.setattr(token_files, "REMEMBER_S", 0.0)
    data = opened(folder, shuffle=False)
    data.rows(0, ROWS)
    remembered(data)
    path = folder / "shard_00000.npy"
    record = folder / f"shard_00000.npy{CHECKED}"
    assert record.exists()
    if change == "touched":
        os.utime(path, ns=(1, 1))
    elif change == "replaced":
        stat = path.stat()
        other = folder / "other"
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(other, path)
    elif change == "other checksums":
        index = json.loads((folder / INDEX).read_text())
        blocks = index["shards"][0]["blocks"]
        index["shards"][0]["blocks"] = blocks[:-1] + ("0" if blocks[-1] != "0" else "1")
        (folder / INDEX).write_text(json.dumps(index))
    elif change == "nonsense":
        record.write_text(json.dumps({"good": 5}))
    else:
        fields = json.loads(record.read_text())
        record.write_text(json.dumps(fields | {"good": "01"}))
    compared = counted(monkeypatch)
    opened(folder, shuffle=False).rows(0, ROWS)
    assert compared == [("shard_00000.npy", 100), ("shard_00000.npy", 200)]


def test_what_is_altered_after_it_was_compared_is_not_remembered_as_good(folder):
    data, path = opened(folder, shuffle=False), folder / "shard_00000.npy"
    data.rows(0, ROWS)
    content = path.read_bytes()
    with path.open("r+b") as file:  # in place: tokens 6 and 7
        file.seek(128 + 12)
        file.write(b"\xee" * 4)
    data.shards.remember()
    for again in (opened(folder, shuffle=False), data):
        with pytest.raises(ValueError, match=r"shard_00000.npy is altered"):
            again.rows(0, ROWS)
    path.write_bytes(content)
    data.shards.remember()
    assert data.rows(0, ROWS)["tokens"][1, 0] == 7


def test_a_shard_that_is_replaced_while_it_is_not_mapped_is_compared_again(folder, monkeypatch):
    monkeypatch.setattr(token_files, "MOST_MAPPED", 1)
    data, path = opened(folder, shuffle=False), folder / "shard_00000.npy"
    data.rows(0, ROWS)
    data.rows(10, ROWS)  # of another shard, which takes its place
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:140] + b"\xee" + content[141:])
    with pytest.raises(ValueError, match=r"shard_00000.npy is altered"):
        data.rows(0, ROWS)


def test_a_shard_that_goes_or_cannot_be_read_meanwhile_is_named(folder):
    data = opened(folder, shuffle=False)
    data.rows(0, ROWS)
    for name in ("shard_00000.npy", "shard_00001.npy"):
        (folder / name).unlink()
    data.shards.remember()
    assert data.rows(0, ROWS)["tokens"][0, 0] == 0  # it is mapped, and was compared
    with pytest.raises(ValueError, match=r"shard_00001.npy is missing: .*, or bring"):
        data.rows(6, ROWS)
    (folder / "shard_00001.npy").mkdir()
    with pytest.raises(ValueError, match=r"shard_00001.npy cannot be read: .*directory"):
        data.rows(6, ROWS)


def test_no_more_files_are_open_than_a_process_may_have(folder, monkeypatch):
    monkeypatch.setattr(token_files, "MOST_MAPPED", 2)
    data, before = opened(folder), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        tokens = data.rows(step, ROWS)["tokens"]
        np.testing.assert_array_equal(tokens[:, 0], T * data.windows_of(step, ROWS))
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert sum(file is not None and file.array is not None for file in data.shards._files) <= 2


def test_a_folder_that_cannot_be_written_is_read_as_well(folder, monkeypatch):
    def refused(*_):
        raise PermissionError("read only")

    monkeypatch.setattr(token_files, "replace", refused)
    monkeypatch.setattr(token_files, "REMEMBER_S", 0.0)
    data = opened(folder, shuffle=False)
    for _ in range(3):
        assert data.rows(0, ROWS)["tokens"][0, 0] == 0
    assert not list(folder.glob(f"*{CHECKED}"))


# --- in a bucket ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["windows", "blocks"])
@pytest.mark.parametrize("limit", [10**9, 40 * BLOCK])
def test_a_batch_from_a_bucket_is_the_one_from_a_disk(bucket, folder, tmp_path, order, limit):
    """Also where the cache holds little of what there is."""
    cache = Cache(tmp_path / "cache", limit)
    how = {"order": order, "segments": True, "seed": 3}
    disk, remote = opened(folder, **how), opened(uploaded(bucket, folder), cache, **how)
    for step in (*range(30), 2, 77, 5):
        same(remote.rows(step, ROWS), disk.rows(step, ROWS))
        settled(cache)
        assert used(tmp_path / "cache") <= limit
    for rows in (ROWS[:3], ROWS[[5, 1]]):
        same(remote.rows(9, rows), disk.rows(9, rows))
    same(remote.eval_rows(ROWS, 6), disk.eval_rows(ROWS, 6))


def used(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_loss_weights_from_a_bucket_are_those_from_a_disk(bucket, tmp_path):
    folder = weighted(tmp_path / "chat" / "train")
    cache = Cache(tmp_path / "cache", 10**9)
    disk, remote = opened(folder), opened(uploaded(bucket, folder), cache)
    for step in range(5):
        same(remote.rows(step, ROWS), disk.rows(step, ROWS))
    assert 0 < disk.rows(0, ROWS)["loss_weights"].mean() < 1


def weighted(folder):
    from data.shards import ShardWriter

    folder.mkdir(parents=True)
    writer = ShardWriter(folder, SHARD, np.dtype(np.uint16), weighted=True, block_bytes=BLOCK)
    ids = np.arange(TOKENS, dtype=np.uint16)
    for begin in range(0, TOKENS, 4):
        writer.add(ids[begin : begin + 1], 0, 1)
        writer.add(ids[begin + 1 : begin + 4], 0, 0)
    writer.flush()
    plain = make_folder(folder.parent / "plain", ids, shard_tokens=SHARD, block_bytes=BLOCK)
    whole = dataclasses.replace(read_manifest(plain), shards=writer.manifest_shards)
    writer.finish(whole)
    return folder


def test_a_folder_without_blocks_is_read_by_whole_files(bucket, folder, tmp_path):
    without_blocks(folder)
    cache = Cache(tmp_path / "cache", 10**9)
    disk, remote = opened(folder), opened(uploaded(bucket, folder), cache)
    same(remote.rows(4, ROWS), disk.rows(4, ROWS))


def test_each_block_is_fetched_once_also_by_the_next_run(bucket, folder, tmp_path):
    url, cache = uploaded(bucket, folder), Cache(tmp_path / "cache", 10**9)
    reads = bucket.fault("delay", on="read", path="*.npy", times=0)
    for step in range(TOKENS // T // len(ROWS) + 1):
        opened(url, cache).rows(step, ROWS)
    settled(cache)
    assert 0 < reads.seen <= 30
    seen = reads.seen
    opened(url, Cache(tmp_path / "cache", 10**9)).rows(0, ROWS)
    assert reads.seen == seen


def test_the_next_steps_are_fetched_while_one_is_read(bucket, folder, tmp_path):
    url, cache = uploaded(bucket, folder), Cache(tmp_path / "cache", 10**9)
    reads = bucket.fault("delay", on="read", path="*.npy", times=0)
    data = opened(url, cache, shuffle=False)
    data.rows(0, ROWS)
    settled(cache)
    seen = reads.seen
    assert seen > 2  # a step lies in two blocks
    for step in range(1, 5):
        expected = opened(folder, shuffle=False).batch(data.windows_of(step, ROWS))
        same(data.batch(data.windows_of(step, ROWS)), expected)
    assert reads.seen == seen


def test_what_earlier_runs_left_is_dropped_first(bucket, folder, tmp_path):
    url, limit = uploaded(bucket, folder), 60 * BLOCK
    old = tmp_path / "cache" / f"{5:016x}" / "shard_00000.npy.00000.0000000a"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(50 * BLOCK))
    partial = old.with_name(f"{old.name}.00000001.partial")
    partial.write_bytes(b"x")
    cache = Cache(tmp_path / "cache", limit)
    data = opened(url, cache, shuffle=False)
    data.rows(0, ROWS)
    settled(cache)
    assert old.exists()
    for step in range(TOKENS // T // len(ROWS)):
        data.rows(step, ROWS)
        settled(cache)
    assert not old.exists() and partial.exists()
    assert used(tmp_path / "cache") <= limit + 1
    os.utime(partial, (time.time() - 2 * token_files.ABANDONED_S,) * 2)
    small = Cache(tmp_path / "cache", 10 * BLOCK)
    opened(url, small, shuffle=False).rows(20, ROWS)
    settled(small)
    assert not partial.exists() and used(tmp_path / "cache") <= 10 * BLOCK


def test_several_may_share_the_folder_of_a_cache_at_once(bucket, folder, tmp_path):
    url, disk = uploaded(bucket, folder), opened(folder)
    each = [opened(url, Cache(tmp_path / "cache", 40 * BLOCK)) for _ in range(3)]

    def read(data):
        return [data.rows(step, ROWS) for step in range(20)]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(read, each):
            for step, rows in enumerate(found):
                same(rows, disk.rows(step, ROWS))


def test_what_is_no_block_stays_in_the_folder_of_a_cache(bucket, folder, tmp_path):
    others = ["thesis.txt", "precious/thesis.txt", f"{'0' * 16}/shard_00000.npy", "a/b/c.npy"]
    for name in others:
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(50 * BLOCK))
    data = opened(uploaded(bucket, folder), Cache(tmp_path / "cache", 40 * BLOCK))
    for step in range(20):
        same(data.rows(step, ROWS), opened(folder).rows(step, ROWS))
    settled(data.shards.cache)
    assert all((tmp_path / "cache" / name).exists() for name in others)
    assert used(tmp_path / "cache") <= (40 + 50 * len(others)) * BLOCK


@pytest.mark.parametrize("room", [0, 25])
def test_all_of_a_step_is_kept_until_it_is_read(bucket, tmp_path, room):
    """Its tokens, too, when its loss weights are asked for; with room for little beside it."""
    folder = weighted(tmp_path / "chat" / "train")
    disk = opened(folder)
    need = max(len(set(wanted(disk, step))) for step in range(20))
    cache = Cache(tmp_path / "cache", (need + room) * BLOCK)
    data = opened(uploaded(bucket, folder), cache)
    for step in range(20):
        before = cache.fetched
        same(data.rows(step, ROWS), disk.rows(step, ROWS))
        settled(cache)
        assert cache.fetched - before <= need + room
    with pytest.raises(ValueError, match=r"is too small: the .* blocks of one step"):
        opened(data.folder, Cache(tmp_path / "less", (need - 1) * BLOCK // 2)).rows(0, ROWS)


def wanted(data, step):
    """(kind, file, block) that a step needs."""
    for request in data.requests(data.windows_of(step, ROWS)):
        for span in request.now:
            for number in request.files.layout.blocks(span):
                yield request.files.layout.dtype.name, span.file, number


def test_a_process_that_ends_does_not_wait_for_what_it_expected():
    """Fetches that are under way end; those that wait for them do not begin once it is closed."""
    code = """
import time
from token_files import Block, Cache, Layout
from manifest import Shard
class Slow:
    name = "0" * 16
    class layout:
        shards = [Shard("a.npy", 0, 100, "00000000", blocks="0" * 8000)]
        bytes_of = staticmethod(lambda file, number: (number, number + 1))
        checksum = staticmethod(lambda file, number: "0" * 8)
    def fetch(self, block):
        print("fetched", flush=True)
        time.sleep(1)
        raise OSError("away")
import sys
cache, files = Cache(sys.argv[1], 10**9), Slow()
cache.expect([Block(files, 0, n) for n in range(200)], [])
time.sleep(0.3)
cache.close()
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < done.stdout.count("fetched") <= 3 * token_files.FETCHES


def test_what_was_altered_in_the_cache_is_fetched_again(bucket, folder, tmp_path):
    url, disk = uploaded(bucket, folder), opened(folder)
    opened(url, Cache(tmp_path / "cache", 10**9)).rows(0, ROWS)
    time.sleep(0.1)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    for number, path in enumerate(kept):
        path.write_bytes(b"" if number % 2 else path.read_bytes()[:-1] + b"\xee")
    same(opened(url, Cache(tmp_path / "cache", 10**9)).rows(0, ROWS), disk.rows(0, ROWS))


def test_a_bit_that_flips_on_the_way_costs_another_request(bucket, folder, tmp_path):
    url, disk = uploaded(bucket, folder), opened(folder)
    fault = bucket.fault("flip response", on="read", path="*.npy", times=2)
    same(opened(url, Cache(tmp_path / "c", 10**9)).rows(0, ROWS), disk.rows(0, ROWS))
    assert fault.done == 2


@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_a_bucket_that_fails_for_a_while_is_asked_again(bucket, folder, tmp_path, kind):
    url, disk = uploaded(bucket, folder), opened(folder)
    fault = bucket.fault(kind, on="read", path="*.npy", times=2)
    same(opened(url, Cache(tmp_path / "c", 10**9)).rows(0, ROWS), disk.rows(0, ROWS))
    assert fault.done == 2


def test_a_shard_that_is_damaged_in_the_bucket_is_never_given_out(bucket, folder, tmp_path):
    url = uploaded(bucket, folder)
    content = (folder / "shard_00000.npy").read_bytes()
    Prefix(url).write("shard_00000.npy", content[:150] + b"\xee" + content[151:])
    data = opened(url, Cache(tmp_path / "cache", 10**9), shuffle=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shard_00000.npy is altered: .* bytes 100 to 199"):
            data.rows(0, ROWS)
    same(data.rows(8, ROWS), opened(folder, shuffle=False).rows(8, ROWS))


def test_a_shard_that_is_removed_from_the_bucket_meanwhile_is_named(bucket, folder, tmp_path):
    url = uploaded(bucket, folder)
    data = opened(url, Cache(tmp_path / "cache", 10**9), shuffle=False)
    Prefix(url).remove(["shard_00001.npy"])
    with pytest.raises(ValueError, match=r"shard_00001.npy is missing: .*, or bring"):
        data.rows(7, ROWS)


def test_a_bucket_that_stays_away_is_a_fault_and_no_damage(bucket, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 1.0)
    cache = Cache(tmp_path / "cache", 10**9)
    data = opened(uploaded(bucket, folder), cache)
    bucket.fault(503)
    with pytest.raises(Unanswered, match=r"shard_.* did not answer"):
        data.rows(0, ROWS)
    settled(cache)
    bucket.mend()
    same(data.rows(0, ROWS), opened(folder).rows(0, ROWS))


def test_a_cache_too_small_for_a_step_is_refused_with_what_is_needed(bucket, folder, tmp_path):
    data = opened(uploaded(bucket, folder), Cache(tmp_path / "cache", 3 * BLOCK))
    with pytest.raises(ValueError, match=r"--data.cache_gb 3e-07 is too small: the .* one step"):
        data.rows(0, ROWS)


def test_a_full_disk_is_said_with_the_flag_that_helps(bucket, folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_files, "replace", full)
    data = opened(uploaded(bucket, folder), Cache(tmp_path / "cache", 10**9))
    with pytest.raises(ValueError, match=r"cannot be written .*No space left.*--data.cache_gb"):
        data.rows(0, ROWS)


@pytest.mark.parametrize("harm", ["missing", "truncated", "index"])
def test_a_bucket_in_which_a_shard_is_not_whole_is_refused_at_the_start(bucket, folder, harm):
    url = uploaded(bucket, folder)
    if harm == "truncated":
        Prefix(url).write("shard_00002.npy", b"short")
    else:
        Prefix(url).remove([INDEX if harm == "index" else "shard_00002.npy"])
    words = "index.json does not exist" if harm == "index" else f"shard_00002.npy is {harm}"
    with pytest.raises(ValueError, match=words):
        opened(url, Cache(folder / "cache", 10**9))


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize("blocks", [True, False])
def test_verify_names_what_is_damaged_and_passes_what_is_whole(
    bucket, folder, capsys, where, blocks
):
    if not blocks:
        without_blocks(folder)
    weighted(folder.parent / "val")
    url = str(folder.parent)
    if where == "bucket":
        url = uploaded(bucket, folder).rpartition("/")[0]
        uploaded(bucket, folder.parent / "val")
        uploaded(bucket, folder.parent / "plain")
    verify.main(["--folder", url])
    of_tokens, of_weights = 4 * 6 + 3, 4 * 4 + 3
    count = (of_tokens if blocks else 5) + of_tokens + of_weights + of_tokens  # train, val, plain
    assert f"{url} is whole: {count} blocks, " in capsys.readouterr().out
    content = (folder / "shard_00001.npy").read_bytes()
    (folder / "shard_00001.npy").write_bytes(content[:-1] + b"\xff")
    (folder / "shard_00003.npy").unlink()
    if where == "bucket":
        Prefix(f"{url}/train").write("shard_00001.npy", content[:-1] + b"\xff")
        Prefix(f"{url}/train").remove(["shard_00003.npy"])
    for name, change in (("shard_00002.npy", b"++"), ("shard_00004.npy", None)):
        content = (folder / name).read_bytes()
        content = content + change if change else content[:-5]
        (folder / name).write_bytes(content)
        if where == "bucket":
            Prefix(f"{url}/train").write(name, content)
    with pytest.raises(ValueError, match=r"4 are damaged, listed above"):
        verify.main(["--folder", f"{url}/train"])
    told = capsys.readouterr().out
    assert "shard_00001.npy is altered" in told and "shard_00003.npy is missing" in told
    assert "shard_00002.npy is altered" in told and "shard_00004.npy is truncated" in told
    assert "shard_00000.npy" not in told


def test_verify_goes_on_behind_a_shard_that_cannot_be_read(folder, capsys, monkeypatch):
    def refused(path, *given, real=verify.range_crc32c):
        if path.name == "shard_00001.npy":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *given)

    monkeypatch.setattr(verify, "range_crc32c", refused)
    with pytest.raises(ValueError, match=r"6 are damaged, listed above; read were 27 blocks"):
        verify.main(["--folder", str(folder)])
    assert capsys.readouterr().out.count("shard_00001.npy cannot be read: ") == 6


def test_verify_of_what_is_no_folder_of_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no index.json"):
        verify.main(["--folder", str(tmp_path)])
    with pytest.raises(ValueError, match=r"--workers 0 is below 1"):
        verify.main(["--folder", str(tmp_path), "--workers", "0"])
