"""How a command ends: the exit code says whether starting it again can help."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

# Statuses of devices and networks, which may pass.
OUTSIDE = "INTERNAL|UNAVAILABLE|DATA_LOSS|ABORTED|CANCELLED|DEADLINE_EXCEEDED|UNKNOWN"


class Exit(IntEnum):
    """Exit codes. README.md says what those mean that the system gives beside these."""

    DONE = 0  # all steps are done
    BUG = 1  # with a traceback: starting again ends the same
    MEND = 2  # a setting, a file, or the training itself: a person has to fix it first
    AGAIN = 75  # something outside failed, such as a host: starting again can help
    INTERRUPTED = 130  # SIGINT: what was trained is saved, and starting again resumes
    TERMINATED = 143  # SIGTERM, or the time limit: the same


class Fault(Exception):
    """Something outside failed, and starting again can help."""

    code = Exit.AGAIN


class Failed(Exception):
    """A process of the job failed; all of them raise this."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


class Stopped(Failed):
    """The run was asked to stop, and all processes did."""


def of_the_runtime(error: BaseException) -> bool:
    """Whether a device or a collective failed, by the status in front: some are ValueErrors."""
    return re.match(f"({OUTSIDE}): ", str(error)) is not None


def code_of(error: BaseException) -> int:
    """The exit code of a command that raised this."""
    if isinstance(error, Fault | Failed | KeyboardInterrupt):
        return getattr(error, "code", Exit.INTERRUPTED)
    if of_the_runtime(error):
        return Exit.AGAIN
    return Exit.MEND if isinstance(error, ValueError) else Exit.BUG


def command_line(function: Callable[[], None]) -> None:
    """Run function(); what is no bug is one line, and its exit code."""
    try:
        function()
    except Exception as error:
        if os.environ.get("TRACEBACK") or code_of(error) == Exit.BUG:
            raise
        if of_the_runtime(error):
            traceback.print_exc()
        # Schedulers send several signals, and at its exit Python handles none any more.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) * isinstance(error, Stopped):
            signal.signal(number, signal.SIG_IGN)
        print(line(error), file=sys.stderr)
        raise SystemExit(int(code_of(error))) from None


def line(error: BaseException) -> str:
    """What a command prints at its end."""
    return str(error) if isinstance(error, Stopped) else f"error: {error}"
