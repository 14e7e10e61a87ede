"""What a run tells of where it came from."""

import datetime
import json
import subprocess
import sys

import jax
import numpy as np

import starts
from conftest import ROOT


def test_a_start_tells_command_code_host_devices_and_versions(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "--run.name", "a b"])
    start = starts.of_now(7)
    assert start["step"] == 7 and start["command"] == ["main.py", "--run.name", "a b"]
    assert datetime.datetime.fromisoformat(start["time"]).utcoffset() == datetime.timedelta(0)
    assert start["devices"] == {"cpu": 8} and start["processes"] == 1 and start["host"]
    expected = {"python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__}
    assert expected.items() <= start["versions"].items()
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint"} <= start["versions"].keys()
    assert json.loads(json.dumps(start)) == start


def test_the_commit_is_told_and_whether_the_code_differs_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "__file__", str(tmp_path / "starts.py"))
    assert starts._commit() == {"commit": None, "changed": None}
    for name in ("starts.py", "a.md", "b.jsonl", "c.png"):
        (tmp_path / name).write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    first = starts._commit()
    assert len(first["commit"]) == 40 and first["changed"] is False
    for name in ("a.md", "b.jsonl", "c.png"):
        (tmp_path / name).write_text("changed")
    assert starts._commit() == first
    (tmp_path / "starts.py").write_text("changed")
    assert starts._commit() == first | {"changed": True}
    monkeypatch.setenv("PATH", "")
    assert starts._commit() == {"commit": None, "changed": None}


def test_each_start_is_a_line_and_one_that_cannot_be_written_is_told(tmp_path, capsys):
    first, second = (starts.record(tmp_path, step) for step in (0, 3))
    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [first, second]
    starts.record(tmp_path / "absent", 0)
    assert "warning: this start is not told in" in capsys.readouterr().out
    assert str(ROOT) not in lines[0].replace(json.dumps(sys.argv), "")
