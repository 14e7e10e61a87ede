"""Matrices that are more than an array: with a low-rank change, and in 4 bits.

lora.py declares them. weights.matmul multiplies with them as with arrays. A and B of `Adapted` are
sharded as the rows and columns of the matrix. Where its rows are sharded, x A is a partial sum, and
passes through B as one: it is summed with that of x W, so no other collective is needed.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

# The quantiles of a normal distribution that a code of 4 bits selects (arXiv:2305.14314, appendix
# E). They are not symmetric: one of them is 0.
NF4 = np.array([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
], np.float32)  # fmt: skip

Matmul = Callable[[str, jax.Array, Any], jax.Array]  # weights.matmul


@flax.struct.dataclass
class Adapted:
    """A frozen matrix with a low-rank change that is trained."""

    base: Any  # the matrix, or Quantized
    a: Any  # [batch, rows, r]: the dimensions of the matrix that are not columns
    b: Any  # [batch, r, columns]
    scale: float = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def multiply(self, matmul: Matmul, formula: str, x: jax.Array) -> jax.Array:
        """Return x W + scale * (x A) B.  formula: as in weights.matmul."""
        x_dims, w_dims, y_dims = formula.replace("->", ",").split(",")
        columns = [d for d in w_dims if d not in x_dims]
        to_a = "".join(d for d in w_dims if d not in columns) + "r"
        to_b = "".join(d for d in w_dims if d in y_dims and d not in columns)
        to_b += "r" + "".join(columns)
        low_dims = "".join(d for d in x_dims if d in y_dims) + "r"
        low = matmul(f"{x_dims},{to_a}->{low_dims}", x, self.a)
        change = matmul(f"{low_dims},{to_b}->{y_dims}", low, self.b)
        # A constant in the VJPs of experts.py too, which see arrays alone.
        base = jax.tree.map(jax.lax.stop_gradient, self.base)
        return matmul(formula, x, base) + self.scale * change


@flax.struct.dataclass
class Biased:
    """A matrix of experts with biases of its columns."""

    base: Any  # the matrix, also Adapted
    bias: Any  # [batch, columns]

    def multiply(self, matmul: Matmul, formula: str, x: jax.Array) -> jax.Array:
        """Return x W + bias.  formula: as in weights.matmul."""
        _, w_dims, y_dims = formula.replace("->", ",").split(",")
        bias = jnp.expand_dims(self.bias, [i for i, d in enumerate(y_dims) if d not in w_dims])
        return matmul(formula, x, self.base) + bias


@flax.struct.dataclass
class Quantized:
    """A matrix in NF4."""

    codes: Any  # uint8 [..., A / 2]: of a block, the first half in the low bits
    scales: Any  # [..., A / block]: the largest magnitude of each block

    def multiply(self, matmul: Matmul, formula: str, x: jax.Array) -> jax.Array:
        """Return the product with the expanded matrix, as weights.matmul."""
        return matmul(formula, x, self.expanded(x.dtype))

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """Return the matrix, [..., A]."""
        blocks = self.scales.shape[-1]
        codes = self.codes.reshape(*self.codes.shape[:-1], blocks, -1)
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        # A sum of steps rather than a lookup, which would be slow, and a residual.
        value = jnp.full(codes.shape, NF4[0])
        for code, step in enumerate(np.diff(NF4), 1):
            value += jnp.where(codes >= code, step, 0)
        value *= self.scales.astype(jnp.float32)[..., None]
        return value.astype(dtype).reshape(*codes.shape[:-2], -1)


def is_matrix(w: Any) -> bool:
    """Return whether a node of a tree is a matrix of this file."""
    return isinstance(w, Adapted | Quantized)


def is_quantized(w: Any) -> bool:
    return isinstance(w, Quantized)


def expanded(w: Any, dtype: jnp.dtype) -> Any:
    """Return an array for a Quantized, also if it is adapted; anything else as it is."""
    if isinstance(w, Adapted):
        return w.replace(base=expanded(w.base, dtype))
    return w.expanded(dtype) if isinstance(w, Quantized) else w


def of_side(w: Any, side: str, function: Callable) -> Any:
    """Apply a function of the rows of a matrix (side a) or of its columns (b), and nothing else."""
    if isinstance(w, Adapted):
        changed = {side: function(getattr(w, side))}
        return w.replace(base=jax.tree.map(function, w.base), **changed)
    return jax.tree.map(function, w)


def side_by_side(w: Any, v: Any, dtype: jnp.dtype) -> Any:
    """Return a matrix with the columns of w, then those of v: [e, rows, columns] each."""
    if isinstance(w, Biased):
        return Biased(side_by_side(w.base, v.base, dtype), jnp.concatenate([w.bias, v.bias], -1))
    w, v = expanded(w, dtype), expanded(v, dtype)
    if not isinstance(w, Adapted):
        return jnp.concatenate([w, v], axis=-1)
    base = side_by_side(w.base, v.base, dtype)
    a = jnp.concatenate([w.a, v.a], axis=-1)
    # Block-diagonal, so that the columns of w are changed by its own rows of b.
    zero = jnp.zeros_like(w.b)
    b = jnp.concatenate([jnp.concatenate([w.b, zero], -1), jnp.concatenate([zero, v.b], -1)], -2)
    return Adapted(base, a, b, w.scale)
