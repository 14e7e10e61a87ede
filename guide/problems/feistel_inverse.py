"""Problem 9.4: the inverse of one round of a Feistel network."""


def inverse(left: int, right: int, hashed) -> tuple[int, int]:
    """Return the (left, right) before a round: the round maps it to (right, left ^ hashed(right)).

    hashed  the hash of this round, from an integer to an integer. It has no inverse.
    """
    raise NotImplementedError
