"""Where a preparation writes: one at a time, also into a bucket, and what a full disk does."""

import base64
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import buckets
import lock
from buckets import Prefix, Refused, Unanswered
from conftest import ROOT
from data import cluster, out, prepare, shards
from data.settings import Prepare
from data.shards import PROGRESS
from manifest import INDEX, read_manifest
from processes import STRUCK

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHARD = 20_000
KILLS = 20
# Kills itself when this kind of work is done for the n-th time.
CHILD = """
import os, signal, sys
from data import out, prepare, shards
from faults import command_line

kind, number, *arguments = sys.argv[1:]
"""
CHILD += STRUCK
CHILD += """
import buckets
buckets.Prefix.send = struck("sent", buckets.Prefix.send)
buckets.told = struck("asked", buckets.told)
shards.Growing.finish = struck("shard", shards.Growing.finish)
shards.Growing.append = struck("append", shards.Growing.append)
out.InBucket.store = struck("store", out.InBucket.store)
out.InBucket.finish = struck("index", out.InBucket.finish)
out.InBucket.forget = struck("forget", out.InBucket.forget)
command_line(lambda: prepare.main(arguments))
"""
# How often a kind may be done before the kill.
KINDS = {"sent": 10, "asked": 20, "shard": 20, "append": 300, "store": 15, "index": 2, "forget": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Documents of at most 4 KB, of the project's own files; 15 shards and more."""
    path = tmp_path_factory.mktemp("source") / "source.jsonl"
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    text = (text * (1 + 1_200_000 // len(text)))[:1_200_000]
    rows = [text[i : i + 4_000] for i in range(0, len(text), 4_000)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(source):
    """By name the files of one that was not stopped."""
    prepare.main(flags(source, source.parent / "whole"))
    return files_of(source.parent / "whole")


@pytest.fixture
def quick(monkeypatch):
    """Beats and patience of seconds."""
    monkeypatch.setattr(lock, "BEAT_S", 0.5)
    monkeypatch.setattr(buckets, "RETRY_S", 1.0)
    monkeypatch.setattr(buckets, "SEND_PAUSE_S", 0.1)


def flags(source, out, *more):
    where = "--source", str(source), "--out", str(out), "--workers", "1"
    return [*where, "--val-share", "0.2", "--shard-tokens", str(SHARD), *more]


def files_of(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def objects_of(url):
    prefix = Prefix(url)
    return {name: prefix.read(name) for name in prefix.found() if name != "lock"}


def live(kind, number, arguments):
    command = [sys.executable, "-c", CHILD, kind, str(number), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# --- one at a time --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_second_preparation_is_refused_in_one_line_that_names_the_first(
    source, whole, tmp_path, monkeypatch, bucket, quick, where
):
    url = str(tmp_path / "out") if where == "folder" else f"{bucket.url}/books"
    arguments = flags(source, url, "--staging", str(tmp_path / "staging"))
    first, second = threading.Event(), threading.Event()

    def waiting(work):
        first.set()
        assert second.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.Work, "run", waiting)

    def hold():
        with pytest.raises(KeyboardInterrupt):
            prepare.main(arguments)

    held = threading.Thread(target=hold)
    held.start()
    try:
        assert first.wait(60)
        done = live("none", 1, arguments)
    finally:
        second.set()
        held.join()
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {url} is being written by another preparation, process ")
    assert f"process {os.getpid()} on host" in line and line.endswith(f"--out {url}-2.")


def test_a_lock_that_is_lost_ends_the_preparation_at_once():
    command = [sys.executable, "-c", "from data import out; out._lost('why'); print('on')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "error: why\n")


def test_who_locks_for_itself_alone_does_not_wait_for_jax(tmp_path):
    code = "import sys, lock; from data import prepare; lock.take(sys.argv[1], print).close()"
    code += "; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["append", "sync", "store"])
def test_a_full_disk_is_said_in_one_line_and_with_room_the_same_bits_come(
    source, whole, tmp_path, monkeypatch, call
):
    done = []

    def full(function, after):
        def limited(*given):
            done.append(call)
            if len(done) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*given)

        return limited

    with monkeypatch.context() as patch:
        owner, name, after = {
            "append": (shards.Growing, "append", 200),
            "sync": (shards.Growing, "sync", 20),
            "store": (out, "replace", 5),
        }[call]
        patch.setattr(owner, name, full(getattr(owner, name), after))
        with pytest.raises(
            ValueError, match=r"no space left \(.* free\)\. About .* bytes more"
        ) as e:
            prepare.main(flags(source, tmp_path))
    assert "\n" not in str(e.value)
    need = int(str(e.value).split("About ")[1].split()[0].replace(",", ""))
    all_bytes = sum(map(len, whole.values()))
    assert 0.1 * all_bytes < need < all_bytes
    assert (tmp_path / PROGRESS).exists()
    prepare.main(flags(source, tmp_path))
    assert files_of(tmp_path) == whole


def test_a_disk_that_is_full_is_gone_on_with_when_it_is_larger(source, whole, small_disk):
    folder, enlarge = small_disk
    assert sum(map(len, whole.values())) > 800_000
    done = live("none", 1, flags(source, folder / "out"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"error: {folder}/out has no space left (" in done.stderr
    enlarge()
    done = live("none", 1, flags(source, folder / "out"))
    assert "goes on after" in done.stdout
    assert files_of(folder / "out") == whole


def test_what_a_full_disk_did_not_take_keeps_nothing_from_being_closed(tmp_path):
    writer = shards.ShardWriter(tmp_path, 10, np.dtype(np.uint16))
    writer.add(np.arange(3), 0)
    growing = writer.growing
    growing._file.close()
    growing._file = open("/dev/full", "wb")  # noqa: SIM115
    growing.append(np.arange(3))
    writer.close()
    assert growing._file.closed


# --- a bucket -------------------------------------------------------------------------------------


def test_after_any_kill_the_bucket_has_the_bits_of_one_that_was_not_killed(
    source, whole, tmp_path, bucket
):
    """And nothing of the staging folder is left."""
    assert len(whole) >= 15
    chance, kills, preparations = random.Random(0), 0, 0
    while kills < KILLS:
        preparations += 1
        url, staging = f"{bucket.url}/books/{preparations}", tmp_path / "staging"
        while True:
            kind = [*KINDS][kills % len(KINDS)] if kills < KILLS else "none"
            number = chance.randint(1, KINDS.get(kind, 1))
            done = live(kind, number, flags(source, url, "--staging", staging))
            if done.returncode != -signal.SIGKILL:
                break
            kills += 1
            Prefix(url).remove(["lock"])  # or the next life would wait for its lease
        assert done.returncode == 0, done.stderr
        assert objects_of(url) == whole
        assert not files_of(staging)


def test_what_fails_on_the_way_is_sent_again(source, whole, tmp_path, bucket, quick):
    faults = [
        bucket.fault(503, on="upload", path="*shard_0000[0-3]*", times=3),
        bucket.fault("cut request", on="upload", path="*shard_0000[4-6]*", times=2),
        bucket.fault("flip request", on="upload", path="*shard_0000[1-5]*", times=2),
        bucket.fault("cut response", on="upload", path="*shard_0000[1-5]*", times=2),
    ]
    url = f"{bucket.url}/books"
    prepare.main(flags(source, url, "--staging", str(tmp_path)))
    assert all(fault.done == fault.times for fault in faults)
    assert objects_of(url) == whole


def test_an_index_is_sent_when_all_shards_are_there(source, tmp_path, bucket, quick):
    prepare.main(flags(source, f"{bucket.url}/books", "--staging", str(tmp_path)))
    sent = [line.split()[1] for line in bucket.log if line.startswith(("upload", "start"))]
    for split in ("train", "val"):
        of_split = [name for name in sent if name.startswith(f"books/{split}/")]
        assert of_split[-1] == f"books/{split}/{INDEX}" and len(of_split) > 3


def test_what_the_bucket_says_of_a_shard_is_compared(source, tmp_path, bucket, quick, monkeypatch):
    monkeypatch.setattr(
        out, "of", lambda file: buckets.Found(file.bytes, base64.b64encode(b"none").decode())
    )
    with pytest.raises(Unanswered, match="what arrived is not what was sent"):
        prepare.main(flags(source, f"{bucket.url}/books", "--staging", str(tmp_path)))
    assert (tmp_path / f"{bucket.name}%2Fbooks" / "train" / "shard_00000.npy").exists()


def test_a_bucket_that_stays_away_loses_nothing(source, whole, tmp_path, bucket, quick):
    url = f"{bucket.url}/books"
    arguments = flags(source, url, "--staging", str(tmp_path))
    bucket.fault(503, on="upload", path="*shard*", after=3)
    with pytest.raises(Unanswered, match=f"{url}/.*shard_.* did not answer as it should"):
        prepare.main(arguments)
    bucket.mend()
    there = {line.split()[1] for line in bucket.log if line[:6] == "upload" and line[-3:] == "200"}
    before = len(bucket.log)
    prepare.main(arguments)
    assert objects_of(url) == whole
    again = [line.split()[1] for line in bucket.log[before:] if line.startswith("upload")]
    sent = {name for name in there if "shard" in name}
    assert sent and not sent & {*again}


def test_a_bucket_that_refuses_is_said_in_one_line(source, tmp_path, bucket, quick):
    for status, words in ((403, "roles/storage.objectUser"), (401, "gcloud auth application")):
        fault = bucket.fault(status)
        arguments = flags(source, f"{bucket.url}/books", "--staging", str(tmp_path))
        with pytest.raises(Refused, match=words):
            prepare.main(arguments)
        fault.stopped.set()


def test_what_is_prepared_is_known_and_what_is_begun_otherwise_is_not_mixed(
    source, whole, tmp_path, bucket, quick, capsys
):
    url = f"{bucket.url}/books"
    arguments = flags(source, url, "--staging", str(tmp_path))
    prepare.main(arguments)
    assert "prepared in" in capsys.readouterr().out
    prepare.main(arguments)
    assert f"{url} is already prepared" in capsys.readouterr().out
    with pytest.raises(ValueError, match="was made with another val_share"):
        prepare.main([*arguments, "--val-share", "0.3"])
    Prefix(url).write("train/shard_00099.npy", b"left over")
    Prefix(url).write("train/shard_00002.npy", b"another")
    prepare.main(arguments)
    assert objects_of(url) == whole


def test_a_shard_that_is_gone_from_the_bucket_is_not_gone_on_with(
    source, tmp_path, bucket, quick, monkeypatch
):
    url = f"{bucket.url}/books"
    arguments = flags(source, url, "--staging", str(tmp_path))
    live("store", 6, arguments)
    Prefix(url).remove(["train/shard_00000.npy", "lock"])
    with pytest.raises(ValueError, match=r"train/shard_00000.npy is not as progress.json says"):
        prepare.main(arguments)


def test_what_another_machine_began_in_a_bucket_is_not_replaced(
    source, whole, tmp_path, bucket, quick
):
    url = f"{bucket.url}/books"
    arguments = flags(source, url, "--staging", str(tmp_path / "here"))
    live("store", 6, flags(source, url, "--staging", str(tmp_path / "there")))
    before = Prefix(url).found()
    assert any("shard_" in name for name in before)
    Prefix(url).remove(["lock"])
    with pytest.raises(ValueError, match=r"train has shards and no index.json, .*--overwrite"):
        prepare.main(arguments)
    with pytest.raises(ValueError, match=r"another machine or --staging began it"):
        cluster.at(Prepare(source="", out=url)).progress()
    assert Prefix(url).found().keys() == before.keys() - {"lock"}
    prepare.main([*arguments, "--overwrite"])
    assert objects_of(url) == whole


def test_each_prefix_of_a_bucket_has_a_staging_folder_of_its_own(tmp_path):
    urls = "gs://bucket/a/b", "gs://bucket/a_b", "gs://bucket/a", "gs://bucket_a/b"
    folders = [out.at(Prepare(source="", out=url, staging=str(tmp_path))).files for url in urls]
    assert len({*folders}) == len(urls)
    assert all(folder.parent == tmp_path for folder in folders)


def test_one_that_was_killed_when_all_was_there_needs_its_lock_to_tidy_up(
    source, whole, tmp_path, monkeypatch, capsys
):
    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(out.Out, "forget", lambda place: place.progress() and killed(place))
        prepare.main(flags(source, tmp_path))
    assert (tmp_path / PROGRESS).exists() and (tmp_path / "val" / INDEX).exists()
    holder = lock.take(tmp_path, print)
    with pytest.raises(ValueError, match="is being written by another"):
        prepare.main(flags(source, tmp_path))
    assert (tmp_path / PROGRESS).exists()
    holder.close()
    capsys.readouterr()
    prepare.main(flags(source, tmp_path))
    assert "is already prepared" in capsys.readouterr().out
    assert files_of(tmp_path) == whole


@pytest.mark.parametrize("url", ["gs://", "gs://bucket", "gs:/bucket/x"])
def test_an_out_that_names_no_place_in_a_bucket_is_refused(source, url):
    with pytest.raises(ValueError, match=r"names no place in a bucket. Give one as gs://"):
        out.at(Prepare(source="", out=url))


def test_the_manifest_of_a_bucket_is_that_of_a_folder(source, whole, tmp_path, bucket, quick):
    place = out.at(Prepare(source="", out=f"{bucket.url}/books", staging=str(tmp_path)))
    assert place.manifest("train") is None
    prepare.main(flags(source, place.url, "--staging", str(tmp_path)))
    assert place.manifest("train") == read_manifest(source.parent / "whole" / "train")
    place.close()
