"""How a command ends: the exit code says whether starting it again can help."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

# What a device or a network does may pass; what a program asks for in vain does not.
OUTSIDE = ("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
OUTSIDE += ("UNKNOWN",)


class Exit(IntEnum):
    """Exit codes, for who starts runs again without a person. What the system gives beside these,
    137 (killed, or out of memory), 134 and 139 (a crash in machine code), is as AGAIN.
    """

    DONE = 0  # all steps are done
    BUG = 1  # with a traceback: starting again ends the same
    MEND = 2  # a setting, a file, or the training itself: a person has to mend it first
    AGAIN = 75  # something outside failed, as a host that vanished: starting again can help
    INTERRUPTED = 130  # SIGINT; what was trained is saved, and starting again goes on
    TERMINATED = 143  # SIGTERM, or the time limit; the same


class Fault(Exception):
    """Something outside failed, and starting again can help."""

    code = Exit.AGAIN


class Stopped(Exception):
    """The run was asked to stop, and did."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def of_the_runtime(error: BaseException) -> bool:
    """Whether this came from a device, a collective or what carries it, by the status that its text
    begins with: some of gloo's errors are ValueErrors, as settings' are.
    """
    return re.match(f"({'|'.join(OUTSIDE)}): ", str(error)) is not None


def code_of(error: BaseException) -> int:
    """That a command ends with which raised this."""
    if isinstance(error, Fault | Stopped):
        return error.code
    if of_the_runtime(error):
        return Exit.AGAIN
    return Exit.MEND if isinstance(error, ValueError) else Exit.BUG


def command_line(function: Callable[[], None]) -> None:
    """Runs function(); what is no bug is one line, and its exit code."""
    try:
        function()
    except Exception as error:
        if os.environ.get("TRACEBACK") or code_of(error) == Exit.BUG:
            raise
        if of_the_runtime(error):
            traceback.print_exc()
        print(line(error), file=sys.stderr)
        raise SystemExit(int(code_of(error))) from None


def line(error: BaseException) -> str:
    """What a command says at its end."""
    return str(error) if isinstance(error, Stopped) else f"error: {error}"
