"""Whole runs in a bucket that are killed, refused or replaced, and what they leave there."""

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import loop
import main
import metrics
from conftest import ROOT
from runtime import cli, jsonl, run_directory, storage
from runtime.errors import Exit, code_of
from runtime.storage import BucketFolder
from tiny_run import FLAGS, arrays


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.5)
    return f"{bucket.url}/runs/x"


@pytest.fixture
def config_with(url, data):
    here = ["--run.dir", url.removesuffix("/x"), "--run.name", "x"]
    return lambda *flags: cli.parse([*FLAGS, *data, *here, *flags])


def fresh(url):
    """As another process opens it."""
    run_directory._remote.cache_clear()
    return run_directory.at(url)


def steps_in(folder):
    return [r["step"] for r in jsonl.read(folder.files / "metrics.jsonl")]


class Killed(BaseException):
    """Stands for a kill of the process: no `except` of the run handles it."""


def at_step(patch, number, function):
    """Call the function before this step is recorded."""
    record = loop.Reports._record

    def recorded(self, step, *how):
        if step == number:
            function(self)
        return record(self, step, *how)

    patch.setattr(loop.Reports, "_record", recorded)


def test_a_run_killed_before_any_request_leaves_a_prefix_of_its_records(url, monkeypatch):
    """The second start cuts the records of the first, as a resume does, and writes others."""
    retried = storage._retried  # called once per request
    starts = ["11", "1112", "1112131"], ["11", "1122", "11222", "112223"]
    for killed_at in itertools.count(1):
        requests, states, done = itertools.count(1), [""], False

        def request():
            if next(requests) == killed_at:  # noqa: B023
                raise Killed
            return retried()

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(storage, "_retried", request)
            for start in starts:
                folder = fresh(url)
                for records in start:
                    (folder.files / "metrics.jsonl").write_text(records)
                    states.append(records)
                    folder.upload()
                    del states[:-1]  # what was sent before is not needed from now on
            done = True
        path = fresh(url).files / "metrics.jsonl"
        assert (path.read_text() if path.exists() else "") in states, killed_at
        path.write_text("1134")
        run_directory.at(url).upload()
        assert (fresh(url).files / "metrics.jsonl").read_text() == "1134"
        BucketFolder(url).remove(BucketFolder(url).files())
        if done:
            break
    assert killed_at > 10


LOCAL_COPY = """
import os, sys
from runtime import storage, run_directory
storage.RETRY_S = 0.1
folder = run_directory.at(sys.argv[1])
print(folder.files)
if os.fork() == 0:
    sys.exit()  # a child ends, and the copy stays
os.wait()
assert folder.files.exists()
with folder.synced():
    (folder.files / "metrics.jsonl").write_text(str(os.getpid()))
"""


def test_a_local_copy_is_removed_at_exit_unless_its_upload_failed(bucket, url):
    for kept in (False, True):
        if kept:
            bucket.fault(503, on="upload")
        command = [sys.executable, "-c", LOCAL_COPY, url]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode != 0) == kept, done.stderr
        assert Path(done.stdout.split()[0]).exists() == kept


def test_a_resumed_run_in_a_bucket_equals_an_uninterrupted_one_on_a_disk(
    url, config_with, whole, monkeypatch
):
    """Its first process is killed after the save of step 3 and what came after it."""

    def killed(reports):
        reports.job.saved.wait()
        raise Killed  # with no word to anybody

    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, killed)
        main.run(config_with())
    left = fresh(url)
    assert left.saved_steps() == [3] and steps_in(left)[-1] == 3
    run_directory._remote.cache_clear()
    main.run(config_with())
    done = fresh(url)
    mine, other = (
        [{k: v for k, v in record.items() if k not in metrics.MEASURED} for record in records]
        for records in (jsonl.read(run / "metrics.jsonl") for run in (done.files, whole))
    )
    assert mine == other
    assert jsonl.read(done.files / "samples.jsonl") == jsonl.read(whole / "samples.jsonl")
    for a, b in zip(arrays(url, 6), arrays(whole, 6), strict=True):
        assert (a == b).all()
    files = {"config.toml", "plots/validation_loss.png", "report.html"}
    assert files <= BucketFolder(url).files().keys()
    assert f"generate.py --run {url} " in BucketFolder(url).read("report.html").decode()
    assert [start["step"] for start in jsonl.read(done.files / "starts.jsonl")] == [0, 3]


def test_a_run_that_another_owner_took_over_writes_no_checkpoint(url, config_with, monkeypatch):
    at_step(monkeypatch, 3, lambda reports: BucketFolder(url).write("lock", b"owner another"))
    with pytest.raises(ValueError, match="x was taken over by owner another") as error:
        main.run(config_with("--checkpoint.every_steps", "2"))
    assert code_of(error.value) == Exit.CONFIG
    left = fresh(url)
    assert left.saved_steps() == [2] and BucketFolder(url).read("lock") == b"owner another"
    assert not BucketFolder(url).files("checkpoints/4") and steps_in(left)[-1] == 2
