"""How a process of a run ends: its exit code says whether starting it again can help."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, for who starts runs again without a person. What a system gives beside these:
    137 and 139 (killed, out of memory; crashed in machine code) are as AGAIN.
    """

    DONE = 0  # all steps are done
    BUG = 1  # with a traceback: starting again ends the same
    MEND = 2  # a setting, a file, training itself: a person has to mend it first
    AGAIN = 75  # something outside failed, as a host that vanished: starting again can help
    INTERRUPTED = 130  # SIGINT; what was trained is saved, and starting again goes on
    TERMINATED = 143  # SIGTERM or the time limit; the same


class Fault(Exception):
    """Something outside failed, and starting again can help: one line, and exit code AGAIN."""
