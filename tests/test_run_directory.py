"""A run's folder in a bucket: its records are fetched, and sent before what depends on them."""

import pytest

from runtime import buckets, resume, run_directory, writer_lock
from runtime.buckets import Prefix, Unavailable
from runtime.errors import TransientError


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
    there = Prefix(url)
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
    Prefix(url).write("checkpoints/12/commit_success.txt", b"")
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
        monkeypatch.setattr(folder, "lock", held)
        (folder.files / "metrics.jsonl").write_text("1\n")
        Prefix(url).write("lock", b"another's")
        bucket.log.clear()
        folder.upload()
    assert not uploads(bucket)
    assert "warning: gs://" in capsys.readouterr().out


# --- records are appended -------------------------------------------------------------------------


def add(folder, line):
    with (folder.files / "metrics.jsonl").open("a") as file:
        file.write(line)
    folder.upload()


def content(folder):
    return (folder.files / "metrics.jsonl").read_text()


def test_each_record_is_uploaded_once_over_all_starts(url, monkeypatch):
    write, sizes = Prefix.write, {}

    def counted(self, name, content, *how):
        sizes.setdefault(name, []).append(len(content))
        return write(self, name, content, *how)

    monkeypatch.setattr(Prefix, "write", counted)
    line = "x" * 99 + "\n"
    for number in range(2):
        folder = fresh(url)
        assert number == 0 or content(folder) == 5 * line
        for _ in range(5):
            add(folder, line)
    assert sizes == {"metrics.jsonl": [100], "metrics.jsonl.part": 9 * [100]}
    assert Prefix(url).list_objects().keys() == {"metrics.jsonl"}
    assert content(fresh(url)) == 10 * line


def test_truncated_records_are_not_downloaded_again(url):
    """The new file is longer, shorter, or as long as what was sent."""
    folder = fresh(url)
    for records in ("1\n2\n3\n", "1\n2\n", "1\n9\n9\n4\n5\n", "6\n" * 5, "", "7\n"):
        (folder.files / "metrics.jsonl").write_text(records)
        folder.upload()
        assert content(fresh(url)) == records


@pytest.mark.parametrize("kind", ["cut request", "cut response"])
def test_a_repeated_request_appends_once(bucket, url, kind, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)
    folder = fresh(url)
    add(folder, "1\n")
    fault = bucket.fault(kind, on="compose", times=1)
    add(folder, "2\n")
    add(folder, "3\n")
    assert fault.done == 1 and content(fresh(url)) == "1\n2\n3\n"
    whole = uploads(bucket).count("upload runs/x/metrics.jsonl 200")
    assert whole == 1 + (kind == "cut response")


def test_what_another_program_writes_between_the_requests_is_not_appended(url, monkeypatch):
    write = Prefix.write

    def overtaken(self, name, *how):
        written = write(self, name, *how)
        if name.endswith(".part"):
            write(self, name, b"late\n")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(Prefix, "write", overtaken)
        folder = fresh(url)
        for line in ("1\n", "2\n"):
            add(folder, line)
    assert content(fresh(url)) == "1\n2\n"
    assert not any(file.name.endswith(".part") for file in fresh(url).files.iterdir())
    Prefix(url).remove(["metrics.jsonl"])  # it is written again
    add(folder, "3\n")
    assert content(fresh(url)) == "1\n2\n3\n"
    monkeypatch.setattr(Prefix, "generation", lambda self, name: 1)  # it changes at each try
    (folder.files / "config.toml").write_text("")
    with pytest.raises(Unavailable, match="is being changed by another program"):
        folder.upload()
