"""Exit codes, for who starts runs again."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from conftest import ROOT
from runtime import errors
from runtime.errors import Exit, Stopped, TransientError
from utils import ConfigError


@pytest.fixture(autouse=True)
def signals_are_restored():
    """After Stopped, `run_command` ignores signals, which later processes would inherit."""
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("JAX_PROCESS_ID 1 is given twice"), Exit.CONFIG),
        (TransientError("process 1 is lost"), Exit.RETRY),
        (Stopped("SIGTERM: stopped", 143), Exit.TERMINATED),
        # Errors of devices and collectives.
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), Exit.RETRY),
        (RuntimeError("UNAVAILABLE: of a step"), Exit.RETRY),
        (RuntimeError("RESOURCE_EXHAUSTED: no memory"), Exit.CONFIG),
        # Bugs.
        (ValueError("a file named UNAVAILABLE: is no status"), 1),
    ],
    ids=str,
)
def test_an_error_is_one_line_with_its_exit_code_unless_it_is_a_bug(
    error, code, capsys, monkeypatch
):
    monkeypatch.delenv("TRACEBACK", raising=False)

    def fails():
        raise error

    assert errors.code_of(error) == code
    with pytest.raises(type(error) if code == Exit.BUG else SystemExit) as ended:
        errors.run_command(fails)
    if code != Exit.BUG:
        assert ended.value.code == code
        *trace, line = capsys.readouterr().err.splitlines()
        assert line == f"{'error: ' * (code != 143)}{error}"
        assert bool(trace) == (": " in str(error) and code == Exit.RETRY), "of the device"
        monkeypatch.setenv("TRACEBACK", "1")
        with pytest.raises(type(error)):
            errors.run_command(fails)


@pytest.mark.parametrize(("status", "code"), [("INTERNAL", Exit.BUG), ("UNAVAILABLE", Exit.RETRY)])
def test_a_compiler_that_fails_internally_is_a_bug(status, code):
    def fails():
        raise jax.errors.JaxRuntimeError(f"{status}: during something")

    with pytest.raises(RuntimeError) as failed:
        errors.compile_lowered(SimpleNamespace(compile=fails))
    assert errors.code_of(failed.value) == code


COMMAND = """
import atexit, os, signal, sys
from runtime import errors
from runtime.console import log

def signals():
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)

def command():
    given = sys.stdin.readline().strip()
    for line in range(2_000):
        log(f"step {line}: \u65e5")
    print("print, too", given, flush=True)
    print("and warnings", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").close()
    raise errors.Stopped("SIGTERM: stopped", 143)

atexit.register(signals)  # as schedulers send after a stop
errors.run_command(command)
"""


@pytest.mark.parametrize("redirection", ["2>&1 | true", ">/dev/full", ""])
def test_a_command_outlives_the_readers_of_its_output_and_later_signals(redirection, tmp_path):
    """What a terminal cannot show is written as escapes."""
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(COMMAND, encoding="utf-8")
    line = f'"{sys.executable}" "{script}" "{done}" {redirection}; exit ${{PIPESTATUS[0]}}'
    more = {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    how = {"env": os.environ | more, "capture_output": True, "input": "\u00fc".encode()}
    ended = subprocess.run(["bash", "-c", line], **how)
    assert (ended.returncode, done.exists()) == (143, True), ended.stderr.decode()
    lost = b"a part of the output is lost: [Errno 28] No space left on device" in ended.stderr
    assert lost == (redirection == ">/dev/full")
    if not redirection:
        first, *_, last = ended.stdout.splitlines()
        assert (first, last) == (b"step 0: \\u65e5", b"print, too \\xfc")
        assert ended.stderr == b"and warnings\nSIGTERM: stopped\n"
