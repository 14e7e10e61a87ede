"""Problem 2.2: rotate a vector by its position."""

import numpy as np


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Return the rotated vector.

    x         [R] numbers, R even; pair i is (x[i], x[i + R // 2])
    position  of the token in its text
    theta     pair i turns by position * theta ** (-2 i / R)
    """
    raise NotImplementedError
