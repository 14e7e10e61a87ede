"""Filter what C++ libraries print in a process of a job of several.

Gloo prints a line for each group of devices, and JAX's coordination service ends a process that has
lost another one from C++, with a stack that says nothing of it. No setting changes either. So
file descriptors 1 and 2 lead to this file, run as a program, which outlives the process. What
Python prints does not pass through it.
"""

import contextlib
import os
import re
import subprocess
import sys

# Lines of Gloo, also if several threads print at once.
NOISE = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )*\n"
)
UNHEALTHY = b"The following tasks are unhealthy"  # the next line has their numbers
UNREACHED = b"Failed to send RPC to coordination service"  # of process 0
STACK, FRAME = b"*** Check failure stack trace", b"    @ "
LOST = (
    "error: process {} of this job was lost, so this process ended too. The log of the lost one "
    "says why, or the scheduler's events; then start the job again, which resumes."
)


def redirect() -> None:
    """Pass what C++ prints through the filter, and what Python prints around it."""
    reading, writing = os.pipe()
    # In a session of its own, so that Ctrl-C ends the job and not what reports its end.
    subprocess.Popen([sys.executable, "-S", __file__], stdin=reading, start_new_session=True)
    os.close(reading)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError):  # it is closed
            own = os.dup(number)
            if (stream := getattr(sys, name)) is not None:
                stream.flush()
                stream = os.fdopen(own, "w", 1, encoding=stream.encoding, errors=stream.errors)
                setattr(sys, name, stream)
            os.dup2(writing, number)
    os.close(writing)


def main() -> None:
    """Copy lines from stdin to stderr."""
    lost, before = b"", b""
    for line in sys.stdin.buffer:
        if UNHEALTHY in before:
            lost = line.strip()
        elif NOISE.fullmatch(line) or (lost and line.startswith(FRAME)):
            continue
        elif UNREACHED in line:
            lost = lost or b"0"
        before = line
        if line.startswith(STACK) and lost:
            line = LOST.format(lost.decode(errors="replace")).encode() + b"\n"
        with contextlib.suppress(OSError):  # its reader has gone
            os.write(2, line)


if __name__ == "__main__":
    main()
