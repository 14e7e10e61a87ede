"""Products of rows with the matrix of their expert, for NVIDIA GPUs and TPUs.

Rows are sorted by expert, and each expert has whole tiles of rows. So every tile has one matrix.

Letters: p rows, i tiles, e experts, D and Z widths of a matrix.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from device_kernels.adapter import foreign_p

ALIGNED = 16  # widths that a GPU's tensor cores can load are multiples of it
LARGEST_TILE = 128
# Widths of a TPU's blocks of a matrix and of its gradient, which fit in its memory for vectors: all
# of the matrix, if it is at most the first number wide, else the second number.
TPU_BLOCKS, TPU_GRADIENT_BLOCKS = (1152, 1024), (512, 512)


class Tiles(NamedTuple):
    """The expert of each tile."""

    expert_i: jax.Array  # the number of experts for tiles behind the last
    first_e: jax.Array  # [experts + 1] first tile of each expert, and the end of the last


class Kernel(NamedTuple):
    """A kernel as functions of arrays without varying-axes types.

    Each takes `interpret` as well: run as JAX operations, on a device without the kernel.
    """

    rows: Callable[..., Any]  # x [p, D], w [e, D, Z], tiles -> [p, Z]
    transposed: Callable[..., Any]  # y [p, Z], w [e, D, Z], tiles -> y w^T [p, D]
    matrices: Callable[..., Any]  # x [p, D], y [p, Z], tiles -> x^T y [e, D, Z]


def tile_rows(kernel: str, load: float) -> int:
    """Return the rows of a tile: a power of two, at most an eighth of an expert's choices.

    So at most about a sixteenth of the rows is padding, where loads are even.
    """
    if kernel == "megablox":
        return LARGEST_TILE
    return max(ALIGNED, min(LARGEST_TILE, 1 << (max(1, int(load / 8)).bit_length() - 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(kernel: Kernel, tiles: Tiles, x_pD: jax.Array, w_eDZ: jax.Array) -> jax.Array:
    """Multiply each row with the matrix of its tile's expert: [p, Z].

    Rows of tiles behind the last are undefined. A gradient is summed in float32. All arguments
    vary along the same mesh axes.
    """
    [y_pZ] = foreign_p.bind(x_pD, w_eDZ, *tiles, function=kernel.rows)
    return y_pZ


def _product_backward(kernel: Kernel, residuals: Any, d_y_pZ: jax.Array) -> tuple:
    tiles, x_pD, w_eDZ = residuals
    [d_x_pD] = foreign_p.bind(d_y_pZ, w_eDZ, *tiles, function=kernel.transposed)
    [d_w_eDZ] = foreign_p.bind(x_pD, d_y_pZ, *tiles, function=kernel.matrices)
    return None, d_x_pD, d_w_eDZ


product.defvjp(lambda kernel, *args: (product(kernel, *args), args), _product_backward)


@cache  # one object for equal arguments, so that equal programs compare as equal
def kernel_of(name: str, tile: int, counted: int) -> Kernel:
    """Return the kernel triton or megablox for tiles of some rows.

    counted  rows that are multiplied where all experts have the same load. The other rows are
             those of tiles that only uneven loads fill.
    """
    run_rows, run_matrices = {"triton": _triton, "megablox": _megablox}[name](tile)

    def named(run: Callable[..., Any], *transposed: bool) -> Callable[..., Any]:
        def function(a: Any, b: Any, *tiles: Any, interpret: bool) -> list[jax.Array]:
            return [run(a, b, Tiles(*tiles), *transposed, interpret)]

        function.__name__ = f"grouped_{counted}_rows"  # see counted_rows
        return jax.named_scope(function.__name__)(function)

    return Kernel(named(run_rows, False), named(run_rows, True), named(run_matrices))


def counted_rows(text: str) -> int:
    """Return `counted` of the kernel whose function or scopes `text` names, else 0."""
    found = re.search(r"\bgrouped_(\d+)_rows\b", text)
    return int(found[1]) if found else 0


# --- the kernels ----------------------------------------------------------------------------------


def _triton(tile: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of grouped_triton.py."""
    from device_kernels import grouped_triton

    return partial(grouped_triton.rows, tile), partial(grouped_triton.matrices, tile)


def _megablox(tile: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of megablox, the Pallas kernel for TPUs in JAX."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    def sizes(tiles: Tiles) -> jax.Array:
        return jnp.diff(tiles.first_e) * tile

    def blocks(whole: int, part: int, *widths: int) -> tuple[int, ...]:
        # A block can have any width, if it is that of the matrix.
        return tile, *(width if width <= whole else part for width in widths)

    # The library adds integers to truth values, which strict types do not allow.
    mixed_types = partial(jax.numpy_dtype_promotion, "standard")

    def run_rows(x: Any, w: Any, tiles: Tiles, transposed: bool, interpret: bool) -> Any:
        widths = x.shape[1], w.shape[1 if transposed else 2]
        tiling = blocks(*TPU_BLOCKS, *widths)
        options = {"transpose_rhs": transposed, "interpret": interpret}
        with mixed_types():
            return gmm(x, w, sizes(tiles), x.dtype, tiling, **options)

    def run_matrices(x: Any, y: Any, tiles: Tiles, interpret: bool) -> Any:
        tiling = blocks(*TPU_GRADIENT_BLOCKS, x.shape[1], y.shape[1])
        with mixed_types():
            return tgmm(x.T, y, sizes(tiles), x.dtype, tiling, interpret=interpret)

    return run_rows, run_matrices
