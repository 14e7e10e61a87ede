"""Problem 4.1: a feed-forward layer under tensor parallelism."""

import jax


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Return relu(x up) down, from inside shard_map over the axis "tensor".

    x     [b, D], complete on every rank; so is the result.
    up    [D, f], this rank's columns of a [D, F] matrix.
    down  [f, D], this rank's rows of a [F, D] matrix.
    """
    raise NotImplementedError
