"""Print to the console, from the primary process only, and whatever becomes of its reader."""

import errno
import sys
from typing import Any, TextIO

import jax
from rich.console import Console

console = Console()


def is_primary() -> bool:
    """Return whether this process prints and writes records.

    A job of one process does not call jax for this: the call would initialize the devices.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


class TolerantStream:
    """A text stream whose errors are ignored, such as of a closed pipe, a full disk or a terminal
    that hung up. What its charset lacks is written as an escape.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.lost = ""  # why text was lost, unless its reader has gone
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        if isinstance(error, OSError) and error.errno != errno.EPIPE:  # ValueError: it is closed
            self.lost = str(error)


def tolerate_errors() -> None:
    """Make the streams of a command ignore errors, and its input UTF-8.

    Python flushes stdout when it exits, and would replace the exit code by 120 if that fails.
    """
    sys.stdout, sys.stderr = (
        stream if stream is None or isinstance(stream, TolerantStream) else TolerantStream(stream)
        for stream in (sys.stdout, sys.stderr)
    )
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def report_lost() -> None:
    """Warn on stderr if text for stdout was lost, as on a full disk."""
    if sys.stdout is not None:
        sys.stdout.flush()
    if lost := getattr(sys.stdout, "lost", ""):
        print(f"warning: a part of the output is lost: {lost}", file=sys.stderr)


def log(text: str) -> None:
    """Print a line, above the progress bar if there is one."""
    if is_primary():
        console.print(text, markup=False, highlight=False, soft_wrap=True)
