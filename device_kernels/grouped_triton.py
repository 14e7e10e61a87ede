"""The kernels of grouped.py for NVIDIA GPUs: Pallas kernels that Triton compiles.

Programs that run at the same time share an expert's matrix and rows in the L2 cache, so tiles and
experts are the slowest dimension of a grid.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import triton

# Widths of the blocks that one program multiplies, and the shared dimension of a step. Three steps
# in flight fit in shared memory, even where it has only 100 KiB.
BLOCKS, STEP, STEPS = (128, 64, 32, 16), 64, 3


def rows(
    tile: int, x: jax.Array, w: jax.Array, tiles: Any, transposed: bool, interpret: bool
) -> jax.Array:
    """Return the product of each tile of x [p, D] with its expert's matrix: [p, Z].

    tile   its rows.
    w      [e, D, Z], or [e, Z, D] if transposed.
    tiles  grouped.Tiles
    """
    (p, D), experts, Z = x.shape, w.shape[0], w.shape[1 if transposed else 2]
    block, step = _block(Z), min(STEP, _block(D))
    all_rows = _Span(0, tile, tile)

    def body(x: Any, w: Any, expert: Any, y: Any) -> None:
        e, columns = expert[0], _Span(pallas.program_id(0) * block, block, Z)

        def add(i: Any, total: Any) -> Any:
            shared, one = _Span(i * step, step, D), (jnp.minimum(e, experts - 1),)
            matrix = (columns, shared) if transposed else (shared, columns)
            loaded = _load(x, (), all_rows, shared), _load(w, one, *matrix)
            return total + triton.dot(*loaded, trans_b=transposed)

        # Not jnp.where, which Triton's lowering turns into a truth value.
        steps = (e < experts).astype(jnp.int32) * pallas.cdiv(D, step)
        zero = jnp.zeros((tile, block), jnp.float32)
        _store(y, all_rows, columns, lax.fori_loop(0, steps, add, zero))

    def rows_of(width: int) -> Any:
        return pallas.BlockSpec((tile, width), lambda j, i: (i, 0))

    return pallas.pallas_call(
        body,
        grid=(pallas.cdiv(Z, block), p // tile),
        in_specs=[rows_of(D), _whole(w), pallas.BlockSpec((1,), lambda j, i: (i,))],
        out_specs=rows_of(Z),
        out_shape=jax.ShapeDtypeStruct((p, Z), x.dtype),
        compiler_params=_options(tile),
        interpret=interpret,
        name="grouped_rows",
    )(x, w, tiles.expert_i)


def matrices(tile: int, x: jax.Array, y: jax.Array, tiles: Any, interpret: bool) -> jax.Array:
    """Return x^T y [e, D, Z] of the rows of each expert, from x [p, D] and y [p, Z].

    tiles  grouped.Tiles
    """
    (p, D), Z, experts = x.shape, y.shape[1], tiles.first_e.size - 1
    blocks, step = (_block(D), _block(Z)), min(STEP, tile)

    def body(x: Any, y: Any, first: Any, w: Any) -> None:
        e = pallas.program_id(2)
        left = _Span(pallas.program_id(1) * blocks[0], blocks[0], D)
        right = _Span(pallas.program_id(0) * blocks[1], blocks[1], Z)

        def add(i: Any, total: Any) -> Any:
            some = _Span(i * step, step, p)
            loaded = _load(x, (), some, left), _load(y, (), some, right)
            return total + triton.dot(*loaded, trans_a=True)

        begin, end = (triton.load(first.at[e + i]) * (tile // step) for i in range(2))
        zero = jnp.zeros(blocks, jnp.float32)
        _store(w, left, right, lax.fori_loop(begin, end, add, zero))

    return pallas.pallas_call(
        body,
        grid=(pallas.cdiv(Z, blocks[1]), pallas.cdiv(D, blocks[0]), experts),
        in_specs=[_whole(x), _whole(y), _whole(tiles.first_e)],
        out_specs=pallas.BlockSpec((None, D, Z), lambda j, i, e: (e, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((experts, D, Z), x.dtype),
        compiler_params=_options(tile),
        interpret=interpret,
        name="grouped_matrices",
    )(x, y, tiles.first_e)


def _options(tile: int) -> Any:
    # 256 threads for the largest blocks, of 64 sums each.
    return triton.CompilerParams(num_warps=8 if tile == BLOCKS[0] else 4, num_stages=STEPS)


def _whole(a: jax.Array) -> Any:
    return pallas.BlockSpec(a.shape, lambda *_: (0,) * a.ndim)


# --- blocks ---------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A block's positions in a dimension of `size`. The last block may reach over its end."""

    begin: Any
    length: int
    size: int


def _block(width: int) -> int:
    """Return the block that pads a width least; of those, the largest."""
    blocks = BLOCKS[:2] if width > BLOCKS[1] else BLOCKS
    return min(blocks, key=lambda block: (-width % block, -block))


def _load(ref: Any, first: tuple, rows: _Span, columns: _Span) -> Any:
    """Load a block of the last two dimensions, with zeros for what does not exist."""
    block, exists = _part(ref, first, rows, columns)
    return triton.load(block, mask=exists, other=None if exists is None else 0.0)


def _store(ref: Any, rows: _Span, columns: _Span, value: Any) -> None:
    block, exists = _part(ref, (), rows, columns)
    triton.store(block, value.astype(ref.dtype), mask=exists)


def _part(ref: Any, first: tuple, rows: _Span, columns: _Span) -> tuple[Any, Any]:
    """Return a block, and which of its elements exist: None for all."""
    exists = None
    for dim, span in enumerate((rows, columns)):
        if span.size % span.length:
            inside = span.begin + jnp.arange(span.length, dtype=jnp.int32) < span.size
            inside = jnp.expand_dims(inside, 1 - dim)
            exists = inside if exists is None else exists & inside
    if exists is not None:
        exists = jnp.broadcast_to(exists, (rows.length, columns.length))
    return ref.at[*first, *(pallas.ds(s.begin, s.length) for s in (rows, columns))], exists
