"""A run's folder in a bucket: its records are fetched, and sent before what depends on them."""

import pytest

from runtime import resume, run_directory, storage, writer_lock
from runtime.errors import TransientError
from runtime.storage import BucketFolder


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.5)
    return f"{bucket.url}/runs/x"


def fresh(url):
    """As another process opens it."""
    run_directory._remote.cache_clear()
    return run_directory.at(url)


def test_a_folder_on_a_disk_has_no_copy(tmp_path):
    folder = run_directory.at(tmp_path / "x")
    assert (folder.files, folder.checkpoints) == (tmp_path / "x", tmp_path / "x" / "checkpoints")
    assert not folder.exists() and folder.saved_steps() == []
    for name in ("12/commit_success.txt", "damaged-3/commit_success.txt"):
        (folder.checkpoints / name).parent.mkdir(parents=True)
        (folder.checkpoints / name).touch()
    assert folder.exists() and folder.has_checkpoints() and folder.saved_steps() == [12]
    with folder.synced():
        folder.upload()


def test_an_ambiguous_object_name_is_refused():
    for name in ("gs:/b/x", "gs://b", "gs://b//x", "gs://b/a/../x"):
        with pytest.raises(ValueError, match=r"names no folder of a bucket. Give one as gs://buck"):
            run_directory.at(name)


def uploads(bucket):
    return [line for line in bucket.log if line.startswith("upload")]


def test_files_are_downloaded_and_changed_ones_uploaded(bucket, url):
    there = BucketFolder(url)
    for name in (
        *("metrics.jsonl", "config.toml", "lock", "checkpoints/12/commit_success.txt"),
        *("checkpoints/13/x", "", "plots/"),  # some programs make the last two for folders
    ):
        there.write(name, b"1\n")
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
    there.write("metrics.jsonl", b"1\n2\n")  # of another run; downloaded at the start
    with folder.synced():
        assert (folder.files / "metrics.jsonl").read_bytes() == b"1\n2\n"
        (folder.files / "plots").mkdir()
        (folder.files / "plots" / "loss.png").write_bytes(b"png")
    assert "upload runs/x/plots/loss.png 200" in uploads(bucket)
    assert there.read("lock") == b"1\n"
    # A tokenizer is no record: it is fetched when it is needed.
    there.write("tokenizer/tokenizer.json", b"{}")
    assert folder.tokenizer("lost") == str(folder.files / "tokenizer")
    assert (folder.files / "tokenizer" / "tokenizer.json").read_bytes() == b"{}"
    assert run_directory.at(f"{url}-2").tokenizer("sample") == "sample"


def test_a_run_with_only_checkpoints_exists_and_a_missing_one_is_reported(url):
    BucketFolder(url).write("checkpoints/12/commit_success.txt", b"")
    folder = fresh(url)
    assert folder.exists() and folder.has_checkpoints() and not any(folder.files.iterdir())
    missing = run_directory.at(f"{url}-2")
    assert not missing.exists() and not missing.has_checkpoints()
    with pytest.raises(ValueError, match=r"--run gs://bucket-\d+/runs/x-2 does not exist"):
        resume.config_file(missing, "--run")


def test_records_that_cannot_be_uploaded_are_kept_and_reported(bucket, url, capsys):
    folder = fresh(url)
    kept = rf"could not be uploaded: .* They are kept in {folder.files}"
    with pytest.raises(TransientError, match=kept), folder.synced():
        (folder.files / "metrics.jsonl").write_text("1\n")
        bucket.fault(503, on="upload")
    with pytest.raises(KeyError), folder.synced():
        (folder.files / "metrics.jsonl").write_text("1\n")
        raise KeyError
    assert "warning: the newest records could not be uploaded" in capsys.readouterr().out


def test_a_run_that_was_replaced_uploads_nothing(bucket, url, monkeypatch, capsys):
    folder = fresh(url)
    with writer_lock.held(url) as held, pytest.raises(writer_lock.Replaced), folder.synced():
        monkeypatch.setattr(folder, "check_lock", held)
        (folder.files / "metrics.jsonl").write_text("1\n")
        BucketFolder(url).write("lock", b"another's")
        bucket.log.clear()
        folder.upload()
    assert not uploads(bucket)
    assert "warning: gs://" in capsys.readouterr().out


# --- records are replaced -------------------------------------------------------------------------


def add(folder, line):
    with (folder.files / "metrics.jsonl").open("a") as file:
        file.write(line)
    folder.upload()


def content(folder):
    return (folder.files / "metrics.jsonl").read_text()


def test_changed_records_are_uploaded(url):
    """The new file is longer, shorter, or as long as what was sent."""
    folder = fresh(url)
    for records in ("1\n2\n3\n", "1\n2\n", "1\n9\n", ""):
        (folder.files / "metrics.jsonl").write_text(records)
        folder.upload()
        assert content(fresh(url)) == records


@pytest.mark.parametrize("kind", ["cut request", "cut response"])
def test_a_repeated_request_has_one_effect(bucket, url, kind, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 20.0)
    folder = fresh(url)
    add(folder, "1\n")
    fault = bucket.fault(kind, on="upload", times=1)
    add(folder, "2\n")
    add(folder, "3\n")
    assert fault.done == 1 and content(fresh(url)) == "1\n2\n3\n"


def test_what_another_program_wrote_is_replaced(bucket, url):
    folder = fresh(url)
    add(folder, "1\n")
    BucketFolder(url).write("metrics.jsonl", b"late\n")
    add(folder, "2\n")
    assert uploads(bucket)[-2:] == [f"upload runs/x/metrics.jsonl {code}" for code in (412, 200)]
    assert content(fresh(url)) == "1\n2\n"
    BucketFolder(url).remove(["metrics.jsonl"])  # it is written again
    add(folder, "3\n")
    assert content(fresh(url)) == "1\n2\n3\n"
