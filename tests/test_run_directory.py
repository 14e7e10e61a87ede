"""A run's folder in a bucket: its records are fetched, and sent before what depends on them."""

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import main
import metrics
from conftest import ROOT
from runtime import buckets, cli, jsonl, resume, run_directory, writer_lock
from runtime.buckets import AccessDenied, Prefix, Unavailable
from runtime.errors import Exit, JobFailed, TransientError, code_of
from tiny_run import FLAGS, arrays, losses, start


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 0.5)
    return f"{bucket.url}/runs/x"


def fresh(url):
    """As another process opens it."""
    run_directory._in_bucket.cache_clear()
    return run_directory.at(url)


def test_a_folder_on_a_disk_has_no_copy(tmp_path):
    folder = run_directory.at(tmp_path / "x")
    assert (folder.files, folder.name, str(folder)) == (tmp_path / "x", "x", str(tmp_path / "x"))
    assert folder.checkpoints == tmp_path / "x" / "checkpoints"
    assert not folder.exists() and folder.saved_steps() == []
    (tmp_path / "x" / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "12" / "commit_success.txt").touch()
    (tmp_path / "x" / "checkpoints" / "damaged-3").mkdir()
    assert folder.exists() and folder.has_checkpoints() and folder.saved_steps() == [12]
    with folder.synced():
        folder.upload()


def test_a_run_in_a_bucket_has_its_tokenizer(bucket, url):
    here = fresh(url)
    assert here.tokenizer("sample") == "sample" and not here.folder("tokenizer").exists()
    with here.synced():
        here.folder("tokenizer").mkdir()
        (here.folder("tokenizer") / "tokenizer.json").write_text("{}")
    there = fresh(url)
    assert not (there.files / "tokenizer").exists()  # not a record, fetched when it is needed
    assert there.tokenizer("lost") == str(there.files / "tokenizer")
    assert (there.files / "tokenizer" / "tokenizer.json").read_text() == "{}"


def uploads(bucket):
    return [line for line in bucket.log if line.startswith("upload")]


def test_files_are_downloaded_and_changed_ones_uploaded(bucket, url):
    there = Prefix(url)
    there.write("metrics.jsonl", b"1\n")
    there.write("config.toml", b"c")
    there.write("lock", b"another's")
    there.write("checkpoints/12/commit_success.txt", b"")
    there.write("checkpoints/13/x", b"")
    there.write("", b"")  # some programs make such objects for folders
    there.write("plots/", b"")
    folder = fresh(url)
    assert folder is run_directory.at(f"{url}/") and folder.exists()
    assert sorted(file.name for file in folder.files.iterdir()) == ["config.toml", "metrics.jsonl"]
    assert folder.saved_steps() == [12]
    (folder.files / "wandb_id").write_text("1")
    (folder.files / "plots").mkdir()
    (folder.files / "plots" / "loss.png").write_bytes(b"png")
    folder.upload()
    bucket.log.clear()
    folder.upload()  # there is nothing new
    (folder.files / "wandb_id").write_text("2")
    folder.upload()
    assert uploads(bucket) == ["upload runs/x/wandb_id 200"]
    bucket.log.clear()
    with folder.synced():
        (folder.files / "plots").mkdir()
        (folder.files / "plots" / "loss.png").write_bytes(b"png")
    assert "upload runs/x/plots/loss.png 200" in uploads(bucket)
    assert (fresh(url).files / "metrics.jsonl").read_bytes() == b"1\n"
    assert there.read("lock") == b"another's"


def test_a_run_with_only_checkpoints_exists(url):
    Prefix(url).write("checkpoints/12/commit_success.txt", b"")
    folder = fresh(url)
    assert folder.exists() and not any(folder.files.iterdir())
    assert not run_directory.at(f"{url}-2").exists()


def test_later_files_of_another_run_are_downloaded_at_the_start(url):
    folder = fresh(url)
    Prefix(url).write("metrics.jsonl", b"1\n2\n")
    with folder.synced():
        assert (folder.files / "metrics.jsonl").read_bytes() == b"1\n2\n"


def test_records_that_cannot_be_uploaded_are_kept_and_reported(bucket, url, capsys):
    folder = fresh(url)
    kept = r"could not be uploaded: .* They are kept in"
    with pytest.raises(TransientError, match=kept) as error, folder.synced():
        (folder.files / "metrics.jsonl").write_text("1\n")
        bucket.fault(503, on="upload")
    assert str(folder.files) in str(error.value)
    with pytest.raises(KeyError), folder.synced():
        (folder.files / "metrics.jsonl").write_text("1\n")
        raise KeyError
    assert "warning: the newest records could not be uploaded" in capsys.readouterr().out


def test_a_run_that_was_replaced_uploads_nothing(bucket, url, monkeypatch, capsys):
    folder = fresh(url)
    with writer_lock.held(url) as held, pytest.raises(writer_lock.Replaced), folder.synced():
        monkeypatch.setattr(folder, "lock", held)
        (folder.files / "metrics.jsonl").write_text("1\n")
        Prefix(url).write("lock", b"another's")
        bucket.log.clear()
        folder.upload()
    with pytest.raises(writer_lock.Replaced), folder.synced():
        (folder.files / "metrics.jsonl").write_text("1\n")
    assert not uploads(bucket)
    assert "warning: gs://" in capsys.readouterr().out


def test_a_bucket_that_denies_access_is_refused(bucket, url):
    bucket.fault(403)
    with pytest.raises(AccessDenied, match="Grant this account"):
        fresh(url)


# --- records are appended -------------------------------------------------------------------------


@pytest.fixture
def uploaded(monkeypatch):
    """The sizes of the uploads to each object."""
    write, sizes = Prefix.write, {}

    def counted(self, name, content, *how):
        sizes.setdefault(name, []).append(len(content))
        return write(self, name, content, *how)

    monkeypatch.setattr(Prefix, "write", counted)
    return sizes


LINE = "x" * 99 + "\n"


def add(folder, line=LINE):
    with (folder.files / "metrics.jsonl").open("a") as file:
        file.write(line)


def content(folder):
    return (folder.files / "metrics.jsonl").read_text()


def test_each_record_is_uploaded_once_over_all_starts(url, uploaded):
    for number in range(3):
        folder = fresh(url)
        assert number == 0 or content(folder) == 10 * number * LINE
        for _ in range(10):
            add(folder)
            folder.upload()
    assert uploaded == {"metrics.jsonl": [100], "metrics.jsonl.part": 29 * [100]}
    assert Prefix(url).list_objects().keys() == {"metrics.jsonl"}
    assert Prefix(url).read("metrics.jsonl").decode() == 30 * LINE == content(fresh(url))


def test_truncated_records_are_not_downloaded_again(url):
    """The new file is longer, shorter, or as long as what was sent."""
    folder = fresh(url)
    for records in ("1\n2\n3\n", "1\n2\n", "1\n2\n3\n4\n", "1\n9\n9\n4\n5\n", "6\n" * 5, "", "7\n"):
        (folder.files / "metrics.jsonl").write_text(records)
        folder.upload()
        assert content(fresh(url)) == records


@pytest.mark.parametrize("on", ["upload", "compose"])
@pytest.mark.parametrize("kind", ["cut request", "cut response"])
def test_a_repeated_request_appends_once(bucket, url, on, kind, uploaded, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)
    folder = fresh(url)
    add(folder, "1\n")
    folder.upload()
    fault = bucket.fault(kind, on=on, times=1)
    add(folder, "2\n")
    folder.upload()
    add(folder, "3\n")
    folder.upload()
    assert fault.done == 1 and content(fresh(url)) == "1\n2\n3\n"
    whole = [2, 4] if (on, kind) == ("compose", "cut response") else [2]
    assert uploaded["metrics.jsonl"] == whole


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("on", ["upload", "compose"])
def test_a_request_that_arrives_late_has_no_effect(bucket, url, monkeypatch, on, restarted):
    monkeypatch.setattr(buckets, "RETRY_S", 0.01)
    append, late = Prefix.append, []
    monkeypatch.setattr(Prefix, "append", lambda *how: late.append(how) or append(*how))
    folder = fresh(url)
    add(folder, "1\n")
    folder.upload()
    fault = bucket.fault(503, on=on)
    add(folder, "2\n")
    with pytest.raises(Unavailable):
        folder.upload()
    fault.stopped.set()
    if restarted:
        folder = fresh(url)
        assert content(folder) == "1\n"
        add(folder, "3\n")
    folder.upload()
    expected = "1\n3\n" if restarted else "1\n2\n"
    with pytest.raises(buckets.Changed):
        append(*late[0])
    assert content(fresh(url)) == expected


def test_a_late_upload_between_the_requests_that_append_is_not_appended(url, monkeypatch):
    write = Prefix.write

    def overtaken(self, name, *how):
        generation = write(self, name, *how)
        if name.endswith(".part"):
            write(self, name, b"late\n")
        return generation

    monkeypatch.setattr(Prefix, "write", overtaken)
    folder = fresh(url)
    for line in ("1\n", "2\n"):
        add(folder, line)
        folder.upload()
    assert content(fresh(url)) == "1\n2\n"
    assert not any(file.name.endswith(".part") for file in fresh(url).files.iterdir())


def test_an_object_that_another_program_keeps_changing_is_reported(url, monkeypatch):
    generation = Prefix.generation

    def overtaken(self, name):
        found = generation(self, name)
        self.write(name, b"another's")
        return found

    folder = fresh(url)
    add(folder, "1\n")
    monkeypatch.setattr(Prefix, "generation", overtaken)
    with pytest.raises(Unavailable, match="is being changed by another program"):
        folder.upload()


def test_an_object_that_was_removed_is_written_again(url):
    folder = fresh(url)
    add(folder, "1\n")
    folder.upload()
    Prefix(url).remove(["metrics.jsonl"])
    add(folder, "2\n")
    folder.upload()
    assert content(fresh(url)) == "1\n2\n"


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_run_killed_before_any_request_leaves_a_prefix_of_its_records(url, monkeypatch):
    """The second start cuts the records of the first, as a resume does, and writes others."""
    retried = buckets._retried
    starts = ["11", "1112", "1112131"], ["11", "1122", "11222", "112223"]
    for killed_at in itertools.count(1):
        requests, states, done = itertools.count(1), [""], False

        def request():
            if next(requests) == killed_at:  # noqa: B023
                raise Killed
            return retried()

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(buckets, "_retried", request)
            for start in starts:
                folder = fresh(url)
                for records in start:
                    (folder.files / "metrics.jsonl").write_text(records)
                    states.append(records)
                    folder.upload()
                    del states[:-1]  # what was sent before is not needed from now on
            done = True
        folder = fresh(url)
        path = folder.files / "metrics.jsonl"
        assert (path.read_text() if path.exists() else "") in states, killed_at
        path.write_text("1134")
        folder.upload()
        assert content(fresh(url)) == "1134"
        Prefix(url).remove(Prefix(url).list_objects())
        if done:
            break
    assert killed_at > 15


# --- names and copies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gs:/b/x", "gs://", "gs://b", "gs://b/", "gs://b//x", "gs://b/./x", "gs://b/a/../x"]
)
def test_an_ambiguous_object_name_is_refused(name):
    with pytest.raises(ValueError, match=r"names no folder of a bucket. Give one as gs://bucket/"):
        run_directory.at(name)


@pytest.mark.slow
def test_a_local_copy_is_removed_at_exit_unless_its_upload_failed(bucket, url):
    program = """
import os, sys
from runtime import run_directory
from runtime import buckets
buckets.RETRY_S = 0.1
folder = run_directory.at(sys.argv[1])
print(folder.files)
if os.fork() == 0:
    sys.exit()  # a child ends, and the copy stays
os.wait()
assert folder.files.exists()
if len(sys.argv) > 2:
    with folder.synced():
        (folder.files / "metrics.jsonl").write_text("1")
"""
    for more, kept in (([], False), (["write"], True)):
        if kept:
            bucket.fault(503, on="upload")
        command = [sys.executable, "-c", program, url, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode != 0) == kept, done.stderr
        assert Path(done.stdout.split()[0]).exists() == kept


def test_a_missing_run_is_reported(url):
    with pytest.raises(ValueError, match=r"--run gs://bucket-\d+/runs/x does not exist"):
        resume.config_file(fresh(url), "--run")


# --- whole runs -----------------------------------------------------------------------------------


def same_but_measured(a, b):
    def recorded(folder, name):
        records = jsonl.read(folder / name)
        return [{k: v for k, v in r.items() if k not in metrics.MEASURED} for r in records]

    for name in ("metrics.jsonl", "samples.jsonl"):
        assert recorded(a, name) == recorded(b, name)


@pytest.mark.slow
def test_a_resumed_run_in_a_bucket_equals_an_uninterrupted_one_on_a_disk(
    bucket, url, data, whole, monkeypatch
):
    """Its first process is killed after the save of step 3 and what came after it."""
    config = cli.parse([*FLAGS, *data, "--run.dir", f"{bucket.url}/runs", "--run.name", "x"])
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
    assert jsonl.read(left.files / "metrics.jsonl")[-1]["step"] == 3
    run_directory._in_bucket.cache_clear()
    main.run(config)
    done = fresh(url)
    same_but_measured(done.files, whole)
    for a, b in zip(arrays(url, 6), arrays(whole, 6), strict=True):
        assert (a == b).all()
    assert {"config.toml", "plots/validation_loss.png"} <= Prefix(url).list_objects().keys()
    assert [start["step"] for start in jsonl.read(done.files / "starts.jsonl")] == [0, 3]


@pytest.mark.long
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
        main.run(cli.parse([*FLAGS, *source, "--run.dir", str(tmp_path), "--run.name", name]))
    same_but_measured(tmp_path / "disk", tmp_path / "bucket")
    assert len(jsonl.read(tmp_path / "bucket" / "metrics.jsonl")) > 6


@pytest.mark.long
def test_records_that_cannot_be_uploaded_before_a_save_end_the_run_without_it(
    bucket, url, data, monkeypatch
):
    """A checkpoint without the records of its steps would leave a gap in them."""
    fault = bucket.fault(503, on="upload", path="*/metrics.jsonl*", after=1)
    monkeypatch.setattr(buckets, "RETRY_S", 0.01)
    flags = ["--run.dir", f"{bucket.url}/runs", "--run.name", "x", "--checkpoint.every_steps", "1"]
    config = cli.parse([*FLAGS, *data, *flags, "--train.steps", "3"])
    with pytest.raises((TransientError, JobFailed)) as error:
        main.run(config)
    assert code_of(error.value) == Exit.RETRY and fault.done
    fault.stopped.set()
    left = fresh(url)
    assert left.saved_steps() == [1]
    assert [r["step"] for r in jsonl.read(left.files / "metrics.jsonl")][-1] == 1
    run_directory._in_bucket.cache_clear()
    main.run(config)
    assert len(losses(fresh(url).files)) == 3 and fresh(url).saved_steps() == [2, 3]


@pytest.mark.long
def test_a_run_that_another_owner_took_over_writes_no_checkpoint(bucket, url, data, monkeypatch):
    flags = ["--run.dir", f"{bucket.url}/runs", "--run.name", "x", "--checkpoint.every_steps", "2"]
    here = main.Loop._record

    def taken_over(self, step, *how):
        if step == 3:
            Prefix(url).write("lock", b'{"owner": "another"}')
        return here(self, step, *how)

    monkeypatch.setattr(main.Loop, "_record", taken_over)
    with pytest.raises(ValueError, match="x was taken over by owner another") as error:
        main.run(cli.parse([*FLAGS, *data, *flags]))
    assert code_of(error.value) == Exit.CONFIG
    left = fresh(url)
    assert left.saved_steps() == [2] and Prefix(url).read("lock") == b'{"owner": "another"}'
    assert not Prefix(url).list_objects("checkpoints/4")
    assert [r["step"] for r in jsonl.read(left.files / "metrics.jsonl")][-1] == 2


@pytest.mark.parametrize(
    ("before", "now", "folder", "steps", "refused"),
    [
        (2, 2, False, [1, 2, 3], True),  # its checkpoints are not here
        (2, 2, True, [1, 2, 3], False),  # killed while its first one was written
        (2, 2, True, [1, 2, 3, 4], True),  # its checkpoints were removed
        (2, 2, False, [1], False),  # killed before its first one was due
        (20, 20, False, [*range(1, 7)], True),  # due after the last of 6 steps
        (0, 2, False, [1], True),  # saves none
        (2, 0, False, [1], True),
        (2, 0, False, [0], False),  # an evaluation before the first step
        (0, 0, False, [], False),
        (None, 2, False, [1], False),  # without config.toml
        (None, 2, False, [1, 2], True),
    ],
)
@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_run_that_would_remove_records_without_a_checkpoint_is_refused(
    bucket, data, tmp_path, in_bucket, before, now, folder, steps, refused
):
    url = bucket.url if in_bucket else str(tmp_path)
    flags = [*FLAGS, *data, "--run.dir", url, "--run.name", "x", "--checkpoint.every_steps"]
    run = run_directory.of(cli.parse([*flags, str(now)]))
    run.files.mkdir(exist_ok=True)
    if before is not None:
        (run.files / "config.toml").write_text(cli.to_toml(cli.parse([*flags, str(before)])))
    if steps:
        lines = "".join(f'{{"step": {step}}}\n' for step in steps)
        (run.files / "metrics.jsonl").write_text(lines)
    run.upload()
    if folder and in_bucket:
        Prefix(str(run)).write("checkpoints/probe-0", b"")
    elif folder:
        run.checkpoints.mkdir()
    run_directory._in_bucket.cache_clear()
    with (
        pytest.raises(ValueError, match="and no checkpoint")
        if refused
        else contextlib.nullcontext()
    ):
        resume.resolve(cli.parse([*flags, str(now)]))


@pytest.mark.long
def test_a_run_that_saves_no_checkpoints_keeps_its_records_when_it_is_started_again(data, tmp_path):
    flags = ["--train.steps", "2", "--checkpoint.every_steps", "0", "--sample.prompts"]
    folder = start(data, tmp_path, "x", *flags)
    records = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError) as error:
        start(data, tmp_path, "x", *flags)
    assert "holds records of 2 steps and no checkpoint" in str(error.value)
    assert code_of(error.value) == Exit.CONFIG and "\n" not in str(error.value)
    assert (folder / "metrics.jsonl").read_bytes() == records
