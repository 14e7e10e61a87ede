"""Exit codes, for who starts runs again."""

import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from runtime import errors
from runtime.errors import Exit, Stopped, TransientError
from utils import ConfigError


@pytest.fixture(autouse=True)
def signals_are_restored():
    """After Stopped, `run_command` ignores signals, which later processes would inherit."""
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


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
    for text in ("an einsum of a developer", "a file named UNAVAILABLE: is no status"):
        assert errors.code_of(ValueError(text)) == Exit.BUG

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


UNREAD = """
import sys
from rich.progress import Progress
from runtime import errors
from runtime.console import console, log

def command():
    with Progress(console=console, disable=sys.argv[1] != "bar"):
        for line in range(20_000):
            log(f"step {line}: \u00fcber")
        print("print, too", flush=True)
        print("and warnings", file=sys.stderr, flush=True)
    open(sys.argv[2], "w").close()
    raise errors.Stopped("SIGTERM: stopped", 143)

errors.run_command(command)
"""


@pytest.mark.parametrize("streams", ["stdout", "both", "full", "closed"])
@pytest.mark.parametrize("bar", ["bar", "lines"])
def test_a_command_outlives_the_readers_of_its_output(streams, bar, tmp_path):
    redirection = {
        "stdout": "| true",
        "both": "2>&1 | true",
        "full": ">/dev/full 2>&1",
        "closed": ">&- 2>&-",
    }[streams]
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(UNREAD, encoding="utf-8")
    line = f'"{sys.executable}" "{script}" {bar} "{done}" {redirection}; exit ${{PIPESTATUS[0]}}'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
    ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True)
    assert (ended.returncode, done.exists()) == (143, True), ended.stderr.decode()


def test_output_that_a_full_disk_does_not_take_is_a_warning():
    code = "from runtime import errors; errors.run_command(lambda: print('result'))"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert "a part of the output is lost: [Errno 28] No space left on device" in ended.stderr


def test_characters_that_a_terminal_cannot_show_are_escapes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from runtime import errors\n"
        "from runtime.console import log\n"
        "errors.run_command(lambda: (log('\u65e5'), print('\u65e5', input())))\n",
        encoding="utf-8",
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, script], env=environment, input="\u00fc".encode(), capture_output=True
    )
    assert ended.stdout == b"\\u65e5\n\\u65e5 \\xfc\n", ended.stderr.decode()
