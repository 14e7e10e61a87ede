"""Progress bar on standard error."""

import sys

from tqdm import tqdm

LINE_EVERY_S = 10.0  # if standard error is not a terminal


def progress(total: int, done: int = 0) -> tqdm:
    """Return a context manager. total, done  bytes of the work, and of it before the start."""
    every_s = 0.1 if sys.stderr.isatty() else LINE_EVERY_S
    intervals = {"delay": every_s, "mininterval": every_s, "maxinterval": every_s}
    return tqdm(total=total or None, initial=done, unit="B", unit_scale=True, **intervals)
