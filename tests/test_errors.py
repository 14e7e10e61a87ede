"""Exit codes, for who starts runs again."""

import subprocess
import sys

import pytest

from conftest import ROOT
from runtime import errors
from runtime.errors import Exit, Stopped, TransientError
from utils import ConfigError


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("use another"), 2, "error: use another"),
        (TransientError("process 1 is lost"), 75, "error: process 1 is lost"),
        (Stopped("SIGTERM: stopped", 143), 143, "SIGTERM: stopped"),
    ],
)
def test_an_error_other_than_a_bug_is_one_line_with_its_exit_code(
    error, code, text, capsys, monkeypatch
):
    monkeypatch.delenv("TRACEBACK", raising=False)

    def fails():
        raise error

    with pytest.raises(SystemExit) as ended:
        errors.run_command(fails)
    assert ended.value.code == code == errors.code_of(error)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setenv("TRACEBACK", "1")
    with pytest.raises(type(error)):
        errors.run_command(fails)


def test_a_bug_keeps_its_traceback():
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        errors.run_command(fails)
    assert errors.code_of(KeyError("x")) == Exit.BUG == 1


def test_errors_of_devices_and_collectives_are_transient(capsys, monkeypatch):
    monkeypatch.delenv("TRACEBACK", raising=False)
    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    assert errors.code_of(gloo) == errors.code_of(RuntimeError("INTERNAL: chip")) == Exit.RETRY
    assert errors.code_of(RuntimeError("RESOURCE_EXHAUSTED: no memory")) == Exit.BUG
    for text in ("--model.hidden_size 3 is odd", "JAX_PROCESS_ID 1 is given twice"):
        assert errors.code_of(ConfigError(text)) == Exit.CONFIG
    assert errors.code_of(ValueError("an einsum of a developer")) == Exit.BUG

    def fails():
        raise gloo

    with pytest.raises(SystemExit) as ended:
        errors.run_command(fails)
    assert ended.value.code == Exit.RETRY and "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_after_a_stop_do_not_change_the_exit_code(number):
    code = f"""
import atexit, os, signal
from runtime import errors
from utils import ConfigError
atexit.register(lambda: os.kill(os.getpid(), signal.{number}))
def stop():
    raise errors.Stopped("it has saved", 143)
errors.run_command(stop)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "it has saved\n")
