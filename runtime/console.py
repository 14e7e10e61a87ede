"""Print to the console from the primary process only."""

import contextlib

import jax
from rich.console import Console

console = Console()


def is_primary() -> bool:
    """Return whether this process prints and writes records.

    A job of one process does not call jax for this: the call would initialize the devices.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def log(text: str) -> None:
    """Print a line, above the progress bar if there is one. It is lost if stdout's disk is full."""
    if is_primary():
        with contextlib.suppress(OSError):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
