"""Exit codes, for who starts runs again."""

import subprocess
import sys

import pytest

import faults
from conftest import ROOT
from faults import Exit, Fault, Stopped


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("use another"), 2, "error: use another"),
        (Fault("process 1 is lost"), 75, "error: process 1 is lost"),
        (Stopped("SIGTERM: stopped", 143), 143, "SIGTERM: stopped"),
    ],
)
def test_what_is_no_bug_is_one_line_and_its_code(error, code, text, capsys, monkeypatch):
    monkeypatch.delenv("TRACEBACK", raising=False)

    def fails():
        raise error

    with pytest.raises(SystemExit) as ended:
        faults.command_line(fails)
    assert ended.value.code == code == faults.code_of(error)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setenv("TRACEBACK", "1")
    with pytest.raises(type(error)):
        faults.command_line(fails)


def test_a_bug_keeps_its_traceback():
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        faults.command_line(fails)
    assert faults.code_of(KeyError("x")) == Exit.BUG == 1


def test_errors_of_devices_and_collectives_are_told_from_the_projects_own(capsys, monkeypatch):
    monkeypatch.delenv("TRACEBACK", raising=False)
    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    assert faults.code_of(gloo) == faults.code_of(RuntimeError("INTERNAL: chip")) == Exit.AGAIN
    assert faults.code_of(RuntimeError("RESOURCE_EXHAUSTED: no memory")) == Exit.BUG
    for text in ("--model.width 3 is odd", "JAX_PROCESS_ID 1 is given twice"):
        assert faults.code_of(ValueError(text)) == Exit.MEND

    def fails():
        raise gloo

    with pytest.raises(SystemExit) as ended:
        faults.command_line(fails)
    assert ended.value.code == Exit.AGAIN and "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_after_a_stop_do_not_change_the_exit_code(number):
    code = f"""
import atexit, os, signal
import faults
atexit.register(lambda: os.kill(os.getpid(), signal.{number}))
def stop():
    raise faults.Stopped("it has saved", 143)
faults.command_line(stop)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "it has saved\n")
