"""What a run records of its origin."""

import datetime
import subprocess
import sys

import jax

from runtime import jsonl, provenance


def test_a_start_has_command_code_host_devices_and_versions(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "--run.name", "a b"])
    start = provenance.describe_start(7)
    assert start["step"] == 7 and start["command"] == sys.argv
    assert datetime.datetime.fromisoformat(start["time"]).utcoffset() == datetime.timedelta(0)
    assert start["devices"] == {"cpu": 8} and start["processes"] == 1 and start["host"]
    expected = {"python": sys.version.split()[0], "jax": jax.__version__}
    assert expected.items() <= start["versions"].items()


def test_a_start_has_the_variables_that_matter_and_no_secret(monkeypatch):
    kept = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "NCCL_DEBUG", "PYTHONPATH")
    kept += ("TF_CPP_MIN_LOG_LEVEL", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
    secret = ("JAX_API_KEY", "TPU_TOKEN", "PYTHON_SECRET", "NCCL_PASSWORD", "TF_CREDENTIALS")
    for name in (*kept, *secret, "HOME", "WANDB_API_KEY", "TFHUB"):
        monkeypatch.setenv(name, "value")
    found = provenance.describe_start(0)["environment"]
    assert {name for name, value in found.items() if value == "value"} == set(kept)


def test_the_commit_and_whether_the_code_differs_from_it_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "runtime/provenance.py"))
    assert provenance._commit() == {"commit": None, "changed": None}
    (tmp_path / "runtime").mkdir()
    for name in ("runtime/provenance.py", "a.md", "b.jsonl", "c.png"):
        (tmp_path / name).write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    first = provenance._commit()
    assert len(first["commit"]) == 40 and first["changed"] is False
    for name in ("a.md", "b.jsonl", "c.png"):
        (tmp_path / name).write_text("changed")
    assert provenance._commit() == first
    (tmp_path / "runtime/provenance.py").write_text("changed")
    assert provenance._commit() == first | {"changed": True}


def test_each_start_is_a_line_and_one_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    starts = [provenance.record(tmp_path, step) for step in (0, 3)]
    assert jsonl.read(tmp_path / "starts.jsonl") == starts
    provenance.record(tmp_path / "absent", 0)
    assert "starts.jsonl takes no more records" in capsys.readouterr().out
