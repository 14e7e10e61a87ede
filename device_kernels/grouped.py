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
from jax import lax

from device_kernels.adapter import foreign_p

# Widths of the blocks that one program of a GPU multiplies, and the shared dimension of a step.
# Three steps in flight fit in shared memory, even where it has only 100 KiB.
BLOCKS, STEP, STEPS = (128, 64, 32, 16), 64, 3
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


def _product_forward(kernel: Kernel, *args: Any) -> tuple[jax.Array, Any]:
    return product(kernel, *args), args


def _product_backward(kernel: Kernel, residuals: Any, d_y_pZ: jax.Array) -> tuple:
    tiles, x_pD, w_eDZ = residuals
    [d_x_pD] = foreign_p.bind(d_y_pZ, w_eDZ, *tiles, function=kernel.transposed)
    [d_w_eDZ] = foreign_p.bind(x_pD, d_y_pZ, *tiles, function=kernel.matrices)
    return None, d_x_pD, d_w_eDZ


product.defvjp(_product_forward, _product_backward)


@cache  # one object for equal arguments, so that equal programs compare as equal
def kernel_of(name: str, tile: int, counted: int) -> Kernel:
    """Return the kernel triton or megablox for tiles of some rows.

    counted  rows that are multiplied where all experts have the same load. The other rows are
             those of tiles that only uneven loads fill.
    """
    run_rows, run_matrices = {"triton": _triton, "megablox": _megablox}[name](tile)

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__name__ = f"grouped_{counted}_rows"  # see counted_rows
        return jax.named_scope(function.__name__)(function)

    @named
    def rows(x: Any, w: Any, *tiles: Any, interpret: bool) -> list[jax.Array]:
        return [run_rows(x, w, Tiles(*tiles), False, interpret)]

    @named
    def transposed(y: Any, w: Any, *tiles: Any, interpret: bool) -> list[jax.Array]:
        return [run_rows(y, w, Tiles(*tiles), True, interpret)]

    @named
    def matrices(x: Any, y: Any, *tiles: Any, interpret: bool) -> list[jax.Array]:
        return [run_matrices(x, y, Tiles(*tiles), interpret)]

    return Kernel(rows, transposed, matrices)


def counted_rows(text: str) -> int:
    """Return `counted` of the kernel whose function or scopes `text` names, else 0."""
    found = re.search(r"\bgrouped_(\d+)_rows\b", text)
    return int(found[1]) if found else 0


# --- NVIDIA GPUs ----------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A block's positions in a dimension of `size`. The last block may reach over its end."""

    begin: Any
    length: int
    size: int


def _block(width: int) -> int:
    """Return the block that pads a width least; of those, the largest."""
    blocks = BLOCKS[:2] if width > BLOCKS[1] else BLOCKS
    return min(blocks, key=lambda block: (-width % block, -block))


def _triton(tile: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of a Pallas kernel that Triton compiles.

    Programs that run at the same time share an expert's matrix and rows in the L2 cache, so tiles
    and experts are the slowest dimension of a grid.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as gpu

    # 256 threads for the largest blocks, of 64 sums each.
    options = gpu.CompilerParams(num_warps=8 if tile == LARGEST_TILE else 4, num_stages=STEPS)

    def part(ref: Any, first: tuple, rows: _Span, columns: _Span) -> tuple[Any, Any]:
        """Return a block of the last two dimensions, and which of its elements exist."""
        exists = None
        for dim, span in enumerate((rows, columns)):
            if span.size % span.length:
                inside = span.begin + jnp.arange(span.length, dtype=jnp.int32) < span.size
                inside = jnp.expand_dims(inside, 1 - dim)
                exists = inside if exists is None else exists & inside
        if exists is not None:
            exists = jnp.broadcast_to(exists, (rows.length, columns.length))
        return ref.at[*first, *(pl.ds(s.begin, s.length) for s in (rows, columns))], exists

    def load(ref: Any, first: tuple, rows: _Span, columns: _Span) -> Any:
        """Load a block, with zeros for what does not exist."""
        block, exists = part(ref, first, rows, columns)
        return gpu.load(block, mask=exists, other=None if exists is None else 0.0)

    def store(ref: Any, first: tuple, rows: _Span, columns: _Span, value: Any) -> None:
        block, exists = part(ref, first, rows, columns)
        gpu.store(block, value.astype(ref.dtype), mask=exists)

    def whole(a: Any) -> Any:
        return pl.BlockSpec(a.shape, lambda *_: (0,) * a.ndim)

    def run_rows(x: Any, w: Any, tiles: Tiles, transposed: bool, interpret: bool) -> Any:
        (p, D), experts, Z = x.shape, w.shape[0], w.shape[1 if transposed else 2]
        block, step = _block(Z), min(STEP, _block(D))
        all_rows = _Span(0, tile, tile)

        def body(x: Any, w: Any, expert: Any, y: Any) -> None:
            e, columns = expert[0], _Span(pl.program_id(0) * block, block, Z)

            def add(i: Any, total: Any) -> Any:
                shared, one = _Span(i * step, step, D), (jnp.minimum(e, experts - 1),)
                matrix = (columns, shared) if transposed else (shared, columns)
                loaded = load(x, (), all_rows, shared), load(w, one, *matrix)
                return total + gpu.dot(*loaded, trans_b=transposed)

            # Not jnp.where, which Triton's lowering turns into a truth value.
            steps = (e < experts).astype(jnp.int32) * pl.cdiv(D, step)
            zero = jnp.zeros((tile, block), jnp.float32)
            store(y, (), all_rows, columns, lax.fori_loop(0, steps, add, zero))

        def rows_of(width: int) -> Any:
            return pl.BlockSpec((tile, width), lambda j, i: (i, 0))

        return pl.pallas_call(
            body,
            grid=(pl.cdiv(Z, block), p // tile),
            in_specs=[rows_of(D), whole(w), pl.BlockSpec((1,), lambda j, i: (i,))],
            out_specs=rows_of(Z),
            out_shape=jax.ShapeDtypeStruct((p, Z), x.dtype),
            compiler_params=options,
            interpret=interpret,
            name="grouped_rows",
        )(x, w, tiles.expert_i)

    def run_matrices(x: Any, y: Any, tiles: Tiles, interpret: bool) -> Any:
        (p, D), Z, experts = x.shape, y.shape[1], tiles.first_e.size - 1
        blocks, step = (_block(D), _block(Z)), min(STEP, tile)

        def body(x: Any, y: Any, first: Any, w: Any) -> None:
            e = pl.program_id(2)
            left = _Span(pl.program_id(1) * blocks[0], blocks[0], D)
            right = _Span(pl.program_id(0) * blocks[1], blocks[1], Z)

            def add(i: Any, total: Any) -> Any:
                rows = _Span(i * step, step, p)
                loaded = load(x, (), rows, left), load(y, (), rows, right)
                return total + gpu.dot(*loaded, trans_a=True)

            begin, end = (gpu.load(first.at[e + i]) * (tile // step) for i in range(2))
            zero = jnp.zeros(blocks, jnp.float32)
            store(w, (), left, right, lax.fori_loop(begin, end, add, zero))

        return pl.pallas_call(
            body,
            grid=(pl.cdiv(Z, blocks[1]), pl.cdiv(D, blocks[0]), experts),
            in_specs=[whole(x), whole(y), whole(tiles.first_e)],
            out_specs=pl.BlockSpec((None, D, Z), lambda j, i, e: (e, 0, 0)),
            out_shape=jax.ShapeDtypeStruct((experts, D, Z), x.dtype),
            compiler_params=options,
            interpret=interpret,
            name="grouped_matrices",
        )(x, y, tiles.first_e)

    return run_rows, run_matrices


# --- TPUs -----------------------------------------------------------------------------------------


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
