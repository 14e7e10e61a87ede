"""Exit codes of commands: they say whether starting the command again can help."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import jax

from runtime import console
from utils import ConfigError

# Statuses of devices and networks that may be transient.
MAX_NAMED = 10  # in one message
TRANSIENT = "INTERNAL|UNAVAILABLE|DATA_LOSS|ABORTED|CANCELLED|DEADLINE_EXCEEDED|UNKNOWN"


class Exit(IntEnum):
    """Exit codes. docs/usage.md describes those that the system adds, such as 137."""

    DONE = 0  # all steps are done
    BUG = 1  # with a traceback; starting again ends the same way
    CONFIG = 2  # a setting, a file or diverged training, which a person has to fix
    RETRY = 75  # a transient failure, such as of a host; starting again can help
    INTERRUPTED = 130  # SIGINT to a single process; starting again resumes what is saved
    TERMINATED = 143  # any other request to stop; likewise


class TransientError(Exception):
    """A failure outside the program. Starting again can help."""

    code = Exit.RETRY


class JobFailed(Exception):
    """A process of the job failed. All processes raise this."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


class Stopped(JobFailed):
    """All processes stopped on request."""


def is_runtime_error(error: BaseException) -> bool:
    """Return whether a device or collective failed. The status is a prefix of the message; some of
    these errors are ValueErrors.
    """
    return re.match(f"({TRANSIENT}): ", str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a compiler or a device lacked memory."""
    return str(error).startswith("RESOURCE_EXHAUSTED:")


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that raised this."""
    if isinstance(error, TransientError | JobFailed | KeyboardInterrupt):
        return getattr(error, "code", Exit.INTERRUPTED)
    if is_runtime_error(error):
        return Exit.RETRY
    fixable = isinstance(error, ConfigError) or is_out_of_memory(error)
    return Exit.CONFIG if fixable else Exit.BUG


def compile_lowered(lowered: Any, name: str = "") -> Any:
    """Compile a program.

    name    is the `program` of an error
    Raises  RuntimeError if the compiler fails with INTERNAL. From a device this status may be
            transient; from the compiler it is not.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if name:
            error.program = name
        if str(error).startswith("INTERNAL:"):
            raise RuntimeError(f"the compiler failed, and will again: {error}") from error
        raise


def run_command(function: Callable[[], None]) -> None:
    """Run a command. Any error but a bug is printed in one line and sets the exit code."""
    console.tolerate_errors()
    try:
        function()
    except Exception as error:
        if os.environ.get("TRACEBACK") or code_of(error) == Exit.BUG:
            raise
        if is_runtime_error(error):
            traceback.print_exc()
        # Schedulers send several signals, and Python restores default handlers when it exits.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) * isinstance(error, Stopped):
            signal.signal(number, signal.SIG_IGN)
        print(line(error), file=sys.stderr)
        raise SystemExit(int(code_of(error))) from None
    finally:
        console.report_lost()


def listed(texts: list[str]) -> str:
    """Return the first texts, and how many more there are."""
    more = f" and {len(texts) - MAX_NAMED} more" * (len(texts) > MAX_NAMED)
    return ", ".join(texts[:MAX_NAMED]) + more


def one_line(error: BaseException) -> str:
    """Return the message in one line. A long one is cut in the middle: the cause is often last.

    TensorStore's messages end with its own settings and the lines of its source, which are left
    out: otherwise they would hide the cause.
    """
    text = " ".join(re.split(r" \[(?:source locations|tensorstore_spec)=", str(error))[0].split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"


def line(error: BaseException) -> str:
    """Return the last line that a command prints."""
    if isinstance(error, Stopped):
        return str(error)
    return f"error: {one_line(error) if is_out_of_memory(error) else error}"
