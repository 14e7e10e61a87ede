"""A preparation that is killed, or whose bucket or disk fails, has the same bits as result."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT
from data import prepare
from data.manifest import INDEX, read_manifest
from prepared import files_of, texts_of
from processes import KILLS_ITSELF
from runtime.storage import AccessDenied, BucketFolder
from test_map import flags, source, whole  # noqa: F401

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Kills itself when this kind of work is done for the n-th time.
CHILD = """
import os, signal, sys
from data import encode, prepare, shards
from runtime import storage

kind, number, *arguments = sys.argv[1:]
"""
CHILD += KILLS_ITSELF
CHILD += """
encode.SplitWriter.add = killing("document", encode.SplitWriter.add)
shards.ShardWriter.add = killing("append", shards.ShardWriter.add)
shards.ShardWriter._write = killing("shard", shards.ShardWriter._write)
storage.DiskFolder.write = killing("record", storage.DiskFolder.write)
prepare.Preparation.write_index = killing("index", prepare.Preparation.write_index)
prepare.main(arguments)
"""
# When each kind is killed. A preparation does about twice as much.
KINDS = {"document": 200, "append": 500, "shard": 30, "record": 10, "index": 1}


def killed(kind, *arguments):
    """Run a preparation that kills itself."""
    command = [sys.executable, "-c", CHILD, kind, str(KINDS[kind]), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_the_bits_are_the_same(source, whole, tmp_path, kind):  # noqa: F811
    killed(kind, *flags(source, tmp_path))
    prepare.main(flags(source, tmp_path))
    assert files_of(tmp_path) == whole


def test_workers_end_with_a_preparation_that_is_killed(source, tmp_path):  # noqa: F811
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


def test_a_full_disk_is_reported_and_nothing_is_lost(source, whole, small_disk):  # noqa: F811
    folder, enlarge = small_disk
    with pytest.raises(ValueError, match=r"No space left on device.*Free some space.*are kept"):
        prepare.main(flags(source, folder / "out"))
    assert not list(folder.rglob(INDEX)) and not list(folder.rglob("*.partial"))
    enlarge()
    prepare.main(flags(source, folder / "out"))
    assert files_of(folder / "out") == whole


# --- in a bucket ----------------------------------------------------------------------------------


def uploaded(bucket, folder, name):
    url = f"{bucket.url}/{name}"
    for path in folder.iterdir():
        BucketFolder(url).write(path.name, path.read_bytes())
    return url


def objects(url):
    prefix = BucketFolder(url)
    return {name: prefix.read(name) for name in prefix.files()}


@pytest.mark.parametrize("kind", [503, "cut response"])
def test_a_bucket_gets_the_same_shards_even_after_failures(source, whole, bucket, kind):  # noqa: F811
    url, out = uploaded(bucket, source, "source"), f"{bucket.url}/data/out"
    faults = [bucket.fault(kind, on=on, times=2, after=3) for on in ("upload", "read")]
    prepare.main(flags(url, out))
    assert all(fault.done == 2 for fault in faults)
    # Indexes name the source, and settings the checksums of a bucket.
    shards, expected = (
        {n: c for n, c in files.items() if n.endswith(".npy")} for files in (objects(out), whole)
    )
    assert shards == expected
    local = read_manifest(source.parent / "whole" / "train")
    assert read_manifest(f"{out}/train").identity == local.identity


def test_a_preparation_into_a_bucket_resumes_after_a_kill(source, whole, bucket):  # noqa: F811
    out = f"{bucket.url}/data/out"
    killed("shard", *flags(source, out))
    prepare.main(flags(source, out))
    assert objects(out) == whole


@pytest.mark.parametrize("name", ["c.parquet", "d.jsonl.gz"])
def test_an_unavailable_bucket_is_not_a_damaged_source(source, bucket, name):  # noqa: F811
    url = uploaded(bucket, source, "source")
    bucket.fault(403, on="read", path=f"*{name}")
    with pytest.raises(AccessDenied, match=name):
        prepare.main(flags(f"{url}/{name}", f"{bucket.url}/data/out", "--skip-bad"))


def test_files_in_a_bucket_are_chosen_as_those_of_a_folder(bucket, tmp_path):
    names = ["a.txt", "sub/b.txt", "sub/c.md", ".hidden.txt", "sub/.h/x.txt"]
    for name in names:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        BucketFolder(f"{bucket.url}/source").write(name, name.encode())
    BucketFolder(f"{bucket.url}/source2").write("x.txt", b"another folder")
    for glob in ("**/*", "*.txt", "**/*.md", "sub/*"):
        found = []
        for number, where in enumerate((tmp_path / "source", f"{bucket.url}/source")):
            out = tmp_path / f"out{number}"
            more = ["--glob", glob, "--val-share", "0", "--overwrite"]
            prepare.main(flags(where, out, *more))
            found.append(texts_of(out / "train"))
        assert found[0] == found[1] and found[0]
