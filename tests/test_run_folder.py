"""A run's folder in a bucket: its records are fetched, and sent before what depends on them."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import buckets
import main
import metrics
import resume
import run_folder
import utils
from buckets import Prefix, Refused
from conftest import ROOT
from faults import Exit, Fault
from processes import environments, run_all
from tiny_run import FLAGS, arrays, losses


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 0.5)
    return f"{bucket.url}/runs/x"


def fresh(url):
    """As another process opens it."""
    run_folder._in_bucket.cache_clear()
    return run_folder.at(url)


def test_a_folder_on_a_disk_is_its_own_copy(tmp_path):
    folder = run_folder.at(tmp_path / "x")
    assert (folder.files, folder.name, str(folder)) == (tmp_path / "x", "x", str(tmp_path / "x"))
    assert folder.checkpoints == tmp_path / "x" / "checkpoints"
    assert folder.path("a") == str(tmp_path / "x" / "a")
    assert not folder.exists() and folder.saved_steps() == []
    (tmp_path / "x" / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "damaged-3").mkdir()
    assert folder.exists() and folder.has_checkpoints() and folder.saved_steps() == [12]
    with folder.in_step():
        folder.send()


def test_records_are_fetched_and_those_that_changed_sent(bucket, url):
    there = Prefix(url)
    there.write("metrics.jsonl", b"1\n")
    there.write("config.toml", b"c")
    there.write("lock", b"another's")
    there.write("checkpoints/12/commit_success.txt", b"")
    there.write("checkpoints/13/x", b"")
    there.write("", b"")  # as of a folder, by some programs
    there.write("plots/", b"")
    folder = fresh(url)
    assert folder is run_folder.at(f"{url}/") and folder.exists()
    assert sorted(file.name for file in folder.files.iterdir()) == ["config.toml", "metrics.jsonl"]
    assert folder.saved_steps() == [12] and folder.path("a") == f"{url}/a"
    (folder.files / "metrics.jsonl").write_text("1\n2\n")
    (folder.files / "plots").mkdir()
    (folder.files / "plots" / "loss.png").write_bytes(b"png")
    bucket.log.clear()
    folder.send()
    folder.send()  # there is nothing new
    assert [x for x in bucket.log if "upload" in x] == ["upload runs/x/metrics.jsonl 200"]
    bucket.log.clear()
    with folder.in_step():
        (folder.files / "plots").mkdir()
        (folder.files / "plots" / "loss.png").write_bytes(b"png")
    assert [x for x in bucket.log if "upload" in x] == ["upload runs/x/plots/loss.png 200"]
    assert there.read("metrics.jsonl") == b"1\n2\n" and there.read("lock") == b"another's"


def test_a_run_of_which_only_checkpoints_are_left_exists(url):
    Prefix(url).write("checkpoints/12/commit_success.txt", b"")
    folder = fresh(url)
    assert folder.exists() and not any(folder.files.iterdir())
    assert not run_folder.at(f"{url}-2").exists()


def test_what_another_run_wrote_since_is_what_is_there_when_this_one_begins(url):
    Prefix(url).write("metrics.jsonl", b"1\n")
    folder = fresh(url)
    Prefix(url).write("metrics.jsonl", b"1\n2\n")
    with folder.in_step():
        assert (folder.files / "metrics.jsonl").read_bytes() == b"1\n2\n"


def test_records_that_cannot_be_sent_are_kept_and_told(bucket, url, capsys):
    folder = fresh(url)
    kept = r"could not be sent: .* They are kept in"
    with pytest.raises(Fault, match=kept) as told, folder.in_step():
        (folder.files / "metrics.jsonl").write_text("1\n")
        bucket.fault(503, on="upload")
    assert str(folder.files) in str(told.value)
    with pytest.raises(KeyError), folder.in_step():
        (folder.files / "metrics.jsonl").write_text("1\n")
        raise KeyError
    assert "warning: the newest records could not be sent" in capsys.readouterr().out


def test_a_bucket_that_refuses_is_said(bucket, url):
    bucket.fault(403)
    with pytest.raises(Refused, match="Grant who runs this"):
        fresh(url)


@pytest.mark.parametrize(
    "name", ["gs:/b/x", "gs://", "gs://b", "gs://b/", "gs://b//x", "gs://b/./x", "gs://b/a/../x"]
)
def test_a_name_that_clients_read_in_several_ways_is_refused(name):
    with pytest.raises(ValueError, match=r"names no folder of a bucket. Give one as gs://bucket/"):
        run_folder.at(name)


def test_copies_of_killed_processes_are_removed_and_others_stay(bucket, url, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = fresh(url).files.parent
    of_url = own.name.rpartition("-")[0].rpartition("-")[0]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"{of_url}-{gone.pid}-x", f"{of_url}-1-x", "run-0-1-x"):
        (tmp_path / name / "x").mkdir(parents=True)
    again = fresh(url).files.parent
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {own.name, again.name, f"{of_url}-1-x", "run-0-1-x"}


def test_a_copy_is_removed_at_the_end_of_its_process_and_kept_if_it_was_not_sent(bucket, url):
    program = """
import os, sys, run_folder
import buckets
buckets.RETRY_S = 0.1
folder = run_folder.at(sys.argv[1])
print(folder.files)
if os.fork() == 0:
    sys.exit()  # a child ends, and the copy stays
os.wait()
assert folder.files.exists()
if len(sys.argv) > 2:
    with folder.in_step():
        (folder.files / "metrics.jsonl").write_text("1")
"""
    for more, kept in (([], False), (["write"], True)):
        if kept:
            bucket.fault(503, on="upload")
        command = [sys.executable, "-c", program, url, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode != 0) == kept, done.stderr
        assert Path(done.stdout.split()[0]).exists() == kept


def test_a_run_that_is_not_there_is_said(url):
    with pytest.raises(ValueError, match=r"--run gs://bucket-\d+/runs/x does not exist"):
        resume.config_file(fresh(url), "--run")


# --- whole runs -----------------------------------------------------------------------------------


def same_but_measured(a, b):
    def told(folder, name):
        records = metrics.read(folder / name)
        return [{k: v for k, v in r.items() if k not in metrics.MEASURED} for r in records]

    for name in ("metrics.jsonl", "samples.jsonl"):
        assert told(a, name) == told(b, name)


def test_a_run_in_a_bucket_goes_on_as_one_on_a_disk_that_was_never_stopped(
    bucket, url, data, whole, monkeypatch
):
    """Its first process is killed after the save of step 3 and what came after it."""
    config = utils.parse([*FLAGS, *data, "--run.dir", f"{bucket.url}/runs", "--run.name", "x"])
    here = main.Loop._record

    def killed(self, step, *how):
        if step == 5:
            self.saved.wait()
            raise SystemExit(9)  # with no word to anybody
        return here(self, step, *how)

    with monkeypatch.context() as patch:
        patch.setattr(main.Loop, "_record", killed)
        with pytest.raises(SystemExit):
            main.run(config)
    left = fresh(url)
    assert left.saved_steps() == [3]
    assert metrics.read(left.files / "metrics.jsonl")[-1]["step"] == 3
    run_folder._in_bucket.cache_clear()
    main.run(config)
    done = fresh(url)
    same_but_measured(done.files, whole)
    for a, b in zip(arrays(url, 6), arrays(whole, 6), strict=True):
        assert (a == b).all()
    names = Prefix(url).found()
    assert {"config.toml", "starts.jsonl", "plots/validation_loss.png"} <= names.keys()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_corpus_in_a_bucket_trains_with_the_losses_of_one_on_a_disk(
    bucket, data, tmp_path, mixed
):
    """Alone, and in a mixture."""
    folder, url = Path(data[1]).parent, f"{bucket.url}/corpus"
    for path in folder.rglob("*.*"):
        Prefix(url).write(path.relative_to(folder).as_posix(), path.read_bytes())
    for place, name in ((folder, "disk"), (url, "bucket")):
        source = ["--data.train", f"{place}/train", "--data.val", f"{place}/val"]
        if mixed:
            source = ["--data.mixture", f"a 0.7 {place}", f"b 0.3 {place}"]
        main.run(utils.parse([*FLAGS, *source, "--run.dir", str(tmp_path), "--run.name", name]))
    same_but_measured(tmp_path / "disk", tmp_path / "bucket")
    assert len(metrics.read(tmp_path / "bucket" / "metrics.jsonl")) > 6


KILLED_AT_STEP_5 = """
import os, signal, sys
import faults, main

record = main.Loop._record

def killed(self, step, *how):
    if step == 5:
        self.saved.wait()
        if os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    return record(self, step, *how)

main.Loop._record = killed
faults.command_line(lambda: main.run(main.parse(sys.argv[1:])))
"""


def test_two_processes_of_which_one_is_killed_train_in_a_bucket_as_one_does_on_a_disk(
    bucket, url, data, whole
):
    # Texts of two processes are slow, and the last ones are enough.
    where = "--run.dir", f"{bucket.url}/runs", "--run.name", "x", "--sample.every_steps", "0"
    flags = *FLAGS, *data, *where

    def live(*program):
        job = environments(2, 4, JAX_DEFAULT_MATMUL_PRECISION="highest")
        return run_all(job, *program, *flags)

    codes, said = live("-c", KILLED_AT_STEP_5)
    assert codes[0] in (Exit.AGAIN, -signal.SIGABRT) and codes[1] == -signal.SIGKILL, said
    assert "stopped sending heartbeats):\n1\n" in said[0]
    codes, said = live("main.py")
    assert codes == [0, 0], said
    assert "continues after step 3" in said[0] and "validation loss" in said[0]
    assert "validation loss" not in said[1]
    done = fresh(url)
    assert done.saved_steps() == [3, 6]
    np.testing.assert_allclose(losses(done.files), losses(whole), rtol=1e-6)


def test_records_that_cannot_be_sent_before_a_save_keep_it_from_being_made(
    bucket, url, data, capsys, monkeypatch
):
    """A checkpoint without the records of its steps would leave a hole in them."""
    fault = bucket.fault(503, on="upload", path="*/metrics.jsonl", times=2)
    monkeypatch.setattr(buckets, "RETRY_S", 0.01)
    flags = ["--run.dir", f"{bucket.url}/runs", "--run.name", "x", "--checkpoint.every_steps", "1"]
    main.run(utils.parse([*FLAGS, *data, *flags, "--train.steps", "3"]))
    told = capsys.readouterr().out
    assert fault.done == 2
    for step in (1, 2):
        assert f"checkpoint of step {step} could not be written: Unanswered: gs://" in told
    left = fresh(url)
    records = metrics.read(left.files / "metrics.jsonl")
    ages = [r["checkpoint/age_steps"] for r in records if "loss/train" in r]
    assert left.saved_steps() == [3] and ages == [1, 2, 3]


def test_a_run_without_a_checkpoint_begins_anew_and_one_that_lost_its_own_does_not(
    bucket, url, data
):
    """Where no save came to anything, the folder is there all the same."""
    flags = ["--run.dir", f"{bucket.url}/runs", "--run.name", "x", "--checkpoint.every_steps", "2"]
    config = utils.parse([*FLAGS, *data, *flags])
    line = '{"step": %d, "loss/train": 1.0, "checkpoint/age_steps": %d}\n'
    cases = ([1, 2, 3], True, False), ([1, 2, 1], True, True), ([1, 2], False, True)
    for ages, made, refused in cases:
        there = Prefix(url)
        there.remove(there.found())
        records = "".join(line % record for record in enumerate(ages, 1))
        there.write("metrics.jsonl", records.encode())
        if made:
            there.write("checkpoints/probe-0", b"")
        run_folder._in_bucket.cache_clear()
        if refused:
            with pytest.raises(ValueError, match="Copy that folder too"):
                main.continued(config)
        else:
            main.continued(config)
