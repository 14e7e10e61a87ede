"""Problem 10.3: assign capacity slots, first come, first served."""


def assign(choices: list[list[int]], experts: int, capacity: int) -> list[list[int]]:
    """Return the slot of each choice of one sequence, or -1 for a dropped one.

    choices   the experts of each token, tokens in order
    capacity  slots of an expert; slot e * capacity + i is number i of expert e
    """
    raise NotImplementedError
