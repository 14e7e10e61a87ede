"""How far long work is, as a bar of tqdm on standard error."""

import sys

from tqdm import tqdm

LINE_EVERY_S = 10.0  # where that is no terminal


def progress(total: int, done: int = 0) -> tqdm:
    """A context. total, done  bytes of the work, and those that were done before."""
    every_s = 0.1 if sys.stderr.isatty() else LINE_EVERY_S
    when = {"delay": every_s, "mininterval": every_s, "maxinterval": every_s}
    return tqdm(total=total or None, initial=done, unit="B", unit_scale=True, **when)
