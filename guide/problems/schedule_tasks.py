"""Problem 5.6: when does a backward task run?"""


def backward_tick(pipeline: int, rank: int, microbatch: int) -> int:
    """Return the tick of the backward task of a microbatch on a rank.

    pipeline  number of ranks, each with one model chunk.
    Ticks, ranks and microbatches count from 0.
    """
    raise NotImplementedError
