"""Collectives of CPU devices in the order of the program.

XLA for CPUs starts a collective while a loop before it still runs, unless the collective needs a
result that the loop computes. A value that the loop returns unchanged is none. If the loop has a
collective of the same kind and ranks, one can receive what the other sent. The functions of this
file make a collective need such a result, and change no value. lax.optimization_barrier does not
help, as XLA removes it before the program runs. TPUs and GPUs do not need this.
"""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def after(tree: Tree, before: Tree) -> Tree:
    """Return the tree. Each array of it is computed after all arrays of `before`."""
    # Gradients of integers are no arrays.
    firsts = [a.reshape(-1)[0] for a in jax.tree.leaves(before) if a.dtype != jax.dtypes.float0]
    always = jnp.stack([(a == a) | (a != a) for a in firsts]).all()  # nan too
    return jax.tree.map(lambda a: jnp.where(always, a, 0), tree)


@jax.custom_vjp
def in_turn(w: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Return w `after` x, and x. Backward, the gradient of x comes after that of w.

    So a layer's weights are gathered after the layers before it, and their gradients are reduced
    before those layers run backward.
    """
    return after(w, x), x


in_turn.defvjp(
    lambda w, x: (in_turn(w, x), None),
    lambda _, grads: (grads[0], after(grads[1], grads[0])),
)
