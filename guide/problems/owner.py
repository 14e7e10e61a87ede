"""Problem 1.5: which split reads a line?"""

from collections.abc import Sequence


def owner(first_byte: int, begins: Sequence[int]) -> int:
    """Return the number of the split that reads a line.

    first_byte  position of the line's first byte in the file
    begins      first byte of each split, increasing, from 0
    """
    raise NotImplementedError
