"""Dropless dispatch: every token reaches all its experts, however many choose the same.

Ranks gather the tokens of the others, and run those that chose their experts: in grouped products
of a kernel, or in tiles, a loop over parts of each expert's tokens.

Letters as in experts.py, and:
    J the first rows of an expert                   Z gate and up side by side, 2 G
    r tokens of this rank and those that it gathers from
    c choices, r * K      i tiles                   p rows of a tile
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import matrix
import utils
from device_kernels import grouped
from experts import (
    Activation,
    Experts,
    add_rows,
    concatenate_gate_up,
    read_rows,
    run_expert,
    slot_product,
    take_rows,
    weighted_hidden,
    with_transpose,
)
from utils import EXPERT_AXES
from weights import float32_product, matmul, vary, varying

OVERFLOW = "overflow"  # scope of tiles beyond those of the first pass; the planner leaves it out


def dropless_experts(
    w: Experts, h_btD: jax.Array, choices: Sequence[jax.Array], m: utils.Model, kernel: str
) -> jax.Array:
    """Sum weight * expert(h) over each token's choices.

    Every rank of `axes` gets the tokens of all of them, and adds what its experts, or its slices of
    all experts, contribute. So no rank can receive more tokens than there are.

    choices      choice_btK and weight_btK.
    kernel       tiles, a kernel of device_kernels/grouped.py, or batched: see divide_load.
    Collectives  all_gather(axes) of tokens, choices and routing weights, and psum_scatter(axes) of
                 the result; axes are EXPERT_AXES with expert parallelism, else tensor.
    """
    b, t, D = h_btD.shape
    axes = EXPERT_AXES if w.expert_parallel else ("tensor",)
    with jax.named_scope("dispatch"):
        gather = partial(lax.all_gather, axis_name=axes, tiled=True)
        h_rD, choice_rK, weight_rK = (gather(a.reshape(b * t, -1)) for a in (h_btD, *choices))
    h_rD = checkpoint_name(h_rD, "expert_in")
    experts = len(jax.tree.leaves(w)[0])
    if w.expert_parallel:
        choice_rK -= lax.axis_index(axes) * experts
    matrices = concatenate_gate_up(w, h_rD.dtype), matrix.expanded(w.down, h_rD.dtype)
    inputs = vary((h_rD, choice_rK, weight_rK, *matrices))
    even, act = choice_rK.size / m.n_routed_experts, Activation.of(m)
    if kernel in ("tiles", "batched"):
        load = divide_load(even, experts, 1.0 if kernel == "batched" else 0.5)
        partial_rD = local_experts(load._replace(act=act), *inputs)
    else:
        passes = divide_into_passes(kernel, even, choice_rK.shape, experts)._replace(act=act)
        partial_rD = grouped_experts(passes, *inputs)
    with jax.named_scope("return"):
        return lax.psum_scatter(partial_rD, axes, tiled=True).reshape(b, t, D)


# --- with grouped products ------------------------------------------------------------------------

# Tiles of the first pass over those of an even load. Tiles without choices take memory, but no
# products. Later passes have a part of it, as compilers keep memory for one that does not run.
HEADROOM, LATER = 1.25, 0.25


class Passes(NamedTuple):
    """How the choices of a rank's experts are divided."""

    kernel: grouped.Kernel
    tile: int  # rows of a tile
    first: int  # tiles of the first pass
    later: int  # tiles of each later pass; 0 if the first one has all choices in any case
    act: Activation = Activation()


def divide_into_passes(kernel: str, load: float, choices: tuple[int, int], experts: int) -> Passes:
    """Return passes of which the first has all choices, unless this rank's are over HEADROOM.

    load     choices of an expert, where all have the same number.
    choices  (tokens, K)
    experts  those of this rank.
    """
    tile = grouped.tile_rows(kernel, load)
    r, K = choices
    most = r * min(K, experts)  # the experts of a token differ
    # Each expert can have one tile that is partly empty, if it has a choice.
    partly = min(experts, most)
    most_tiles = (most + partly * (tile - 1)) // tile
    # Half a tile of padding for each expert is the mean.
    even_tiles = math.ceil(experts * (load / tile + 0.5))
    first = min(most_tiles, math.ceil(HEADROOM * experts * load / tile) + experts)
    later = math.ceil(LATER * first) if first < most_tiles else 0
    counted = min(even_tiles, first) * tile
    return Passes(grouped.kernel_of(kernel, tile, counted), tile, first, later)


def grouped_experts(passes: Passes, *inputs: jax.Array) -> jax.Array:
    """Sum weight * expert(h) over the choices of these experts, 0 to e - 1.

    inputs  here and below: h_rD, choice_rK, weight_rK, gate_up_eDZ, down_eGD.
    """
    h_rD, choice_rK, weight_rK, gate_up_eDZ, down_eGD = inputs
    numbers_e = jnp.arange(down_eGD.shape[0])
    if numbers_e.size < choice_rK.shape[1]:
        # Their few experts take the place of the token's K choices: fewer rows to add.
        own_rKe = choice_rK[..., None] == numbers_e[None, None]
        weight_rK = jnp.where(own_rKe, weight_rK[..., None], 0).sum(1)
        choice_rK = jnp.where(own_rKe.any(1), numbers_e[None], -1)
        inputs = h_rD, choice_rK, weight_rK, gate_up_eDZ, down_eGD
    y_rD = run_tiles(passes, jnp.int32(0), passes.first, *inputs)
    return add_later_passes(passes, y_rD, *inputs) if passes.later else y_rD


def run_tiles(passes: Passes, begin: jax.Array, count: int, *inputs: jax.Array) -> jax.Array:
    """Sum weight * expert(h) over the choices in `count` tiles from `begin` on."""
    h_rD, choice_rK, weight_rK, gate_up_eDZ, down_eGD = inputs
    K = choice_rK.shape[1]
    row_rK, choice_p, tiles = assign_rows(passes.tile, begin, count, choice_rK, down_eGD.shape[0])
    x_pD = take_rows(h_rD, choice_p // K, row_rK)
    weight_p = take_rows(weight_rK.reshape(-1), choice_p, row_rK.reshape(-1, 1))
    product = partial(grouped_product, passes, tiles)
    y_pD = run_expert(product, passes.act, gate_up_eDZ, down_eGD, x_pD, weight_p)
    return add_rows(y_pD, row_rK, choice_p // K)


def grouped_product(passes: Passes, tiles: grouped.Tiles, x_pD: jax.Array, w: Any) -> jax.Array:
    """Multiply each row with the matrix of its tile's expert, and with its adapter."""
    if isinstance(w, matrix.Biased):
        bias_pZ = jnp.repeat(read_rows(w.bias, tiles.expert_i), passes.tile, axis=0)
        return grouped_product(passes, tiles, x_pD, w.base) + bias_pZ
    if not isinstance(w, matrix.Adapted):
        return grouped.product(passes.kernel, tiles, x_pD, w)
    y_pZ = grouped.product(passes.kernel, tiles, x_pD, lax.stop_gradient(w.base))
    # Kernels have no products of so few columns. A tile reads its expert's adapter.
    a_iDr, b_irZ = (read_rows(m, tiles.expert_i) for m in (w.a, w.b))
    x_ipD = x_pD.reshape(len(a_iDr), -1, x_pD.shape[-1])
    change_ipZ = matmul("ipr,irZ->ipZ", matmul("ipD,iDr->ipr", x_ipD, a_iDr), b_irZ)
    return y_pZ + w.scale * change_ipZ.reshape(y_pZ.shape)


@jax.named_scope("dispatch")
def assign_rows(
    tile: int, begin: jax.Array, count: int, choice_rK: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, grouped.Tiles]:
    """Assign the rows of `count` tiles from `begin` on to choices, sorted by expert.

    The place of a token is the number of earlier ones with the same expert, which it chooses once.
    A sort is many kernels on a GPU.

    Returns  row_rK, past the last row for choices in other tiles and of other ranks; choice_p, the
             choice in each row, or r * K for an empty one; the experts of the tiles.
    """
    rows = count * tile
    own_rKe = choice_rK[..., None] == jnp.arange(experts)[None, None]
    chosen_re = own_rKe.any(1)
    place_re = jnp.cumsum(chosen_re, 0, dtype=jnp.int32) - 1
    last_e = jnp.cumsum(-(-chosen_re.sum(0, dtype=jnp.int32) // tile))
    first_e = jnp.concatenate([jnp.zeros_like(last_e[:1]), last_e]) - begin
    row_re = first_e[None, :-1] * tile + place_re
    row_re = jnp.where((row_re >= 0) & (row_re < rows), row_re, rows)
    row_rK = jnp.where(own_rKe, row_re[:, None], rows).min(-1)
    numbers = jnp.arange(row_rK.size, dtype=jnp.int32)
    empty_p = vary(jnp.full(rows, row_rK.size, jnp.int32), varying(row_rK))
    choice_p = empty_p.at[row_rK.reshape(-1)].set(numbers, mode="drop")
    first_e = jnp.clip(first_e, 0, count)
    tile_i = jnp.arange(count, dtype=jnp.int32)
    expert_i = (first_e[None, 1:] <= tile_i[:, None]).sum(1, dtype=jnp.int32)
    return row_rK, choice_p, grouped.Tiles(expert_i, first_e)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_later_passes(passes: Passes, y_rD: jax.Array, *inputs: jax.Array) -> jax.Array:
    """Add the tiles after the first pass, which only a load beyond HEADROOM has.

    The backward pass repeats them, so that they save nothing.
    """
    return _later_passes_forward(passes, y_rD, *inputs)[0]


def _over_later_passes(passes: Passes, inputs: tuple, add: Callable, start: Any) -> Any:
    _, choice_rK, _, _, down_eGD = inputs
    e = jnp.arange(down_eGD.shape[0])
    count_e = (choice_rK.reshape(-1, 1) == e[None]).sum(0, dtype=jnp.int32)
    tiles = (-(-count_e // passes.tile)).sum()
    with jax.named_scope(OVERFLOW):
        return lax.fori_loop(0, -((passes.first - tiles) // passes.later), add, start)


def _later_passes_forward(
    passes: Passes, y_rD: jax.Array, *inputs: jax.Array
) -> tuple[jax.Array, tuple]:
    def add(i: jax.Array, y_rD: jax.Array) -> jax.Array:
        return y_rD + run_tiles(passes, passes.first + i * passes.later, passes.later, *inputs)

    return _over_later_passes(passes, inputs, add, y_rD), inputs


def _later_passes_backward(passes: Passes, inputs: tuple, d_y_rD: jax.Array) -> tuple:
    h_rD, choice_rK, *others = inputs

    def add(i: jax.Array, grads: list) -> list:
        def run(h_rD: jax.Array, *others: jax.Array) -> jax.Array:
            first = passes.first + i * passes.later
            return run_tiles(passes, first, passes.later, h_rD, choice_rK, *others)

        new = list(jax.vjp(run, h_rD, *others)[1](d_y_rD))
        return jax.tree.map(lambda sum_, one: sum_ + one.astype(jnp.float32), grads, new)

    all_ = [h_rD, *others]
    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), all_)
    grads = _over_later_passes(passes, inputs, add, zeros)
    grads = jax.tree.map(lambda g, a: g.astype(a.dtype), grads, all_)
    return d_y_rD, grads[0], None, *grads[1:]


add_later_passes.defvjp(_later_passes_forward, _later_passes_backward)


# --- with tiles -----------------------------------------------------------------------------------


class Load(NamedTuple):
    """How the choices of an expert are divided."""

    batched: int  # its first choices, in one product with those of the other experts
    tile: int  # rows of a tile
    tiles: int  # of all experts, where all have as many choices
    act: Activation = Activation()


def divide_load(load: float, experts: int, share: float = 0.5) -> Load:
    """Divide the choices of an expert, where all have the same number.

    Half of them are batched. A batch of more would be faster, and empty where loads are uneven. A
    tile is a power of two, at most an eighth of a load. A product of fewer than 8 rows is slow,
    and one of 512 fills any device. For a search, whose trace serves all sizes, all are batched.

    share  of the choices that is batched.
    """
    batched = int(load * share)
    tile = min(512, max(8, 1 << (max(1, int(load / 8)).bit_length() - 1)))
    tiles = int(experts * (load - batched)) // tile + experts if share < 1 else 0
    return Load(batched, tile, tiles)


class SortedChoices(NamedTuple):
    """Choices sorted by expert."""

    order_c: jax.Array  # choices by expert; those of other ranks come last
    first_e: jax.Array  # [experts + 1] position of each expert's first choice in `order_c`
    rest_e: jax.Array  # [experts] position of each expert's first choice in tiles
    last_e: jax.Array  # [experts] tiles up to and including each expert's

    def read(self, begin: jax.Array, end: jax.Array, rows: int) -> jax.Array:
        """Return the choices at positions from begin to end [...], padded to [..., rows].

        The padding is the number of choices.
        """
        offset = jnp.expand_dims(jnp.arange(rows, dtype=jnp.int32), range(begin.ndim))
        position = begin[..., None] + offset
        c = self.order_c.size
        return jnp.where(position < end[..., None], read_rows(self.order_c, position), c)

    def tile(self, i: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """Return the expert of tile i and its choices [rows]. Tiles past the last are empty."""
        e = jnp.minimum((self.last_e <= i).sum(dtype=jnp.int32), self.last_e.size - 1)
        end = self.first_e[e + 1]
        tiles = (end - self.rest_e[e] + rows - 1) // rows
        begin = self.rest_e[e] + (i - self.last_e[e] + tiles) * rows
        return e, self.read(begin, jnp.where(i < self.last_e[-1], end, 0), rows)


def sort_choices(choice_rK: jax.Array, experts: int, skip: int, tile: int) -> SortedChoices:
    """Sort choices of this rank's experts, 0 to `experts` - 1, and ignore all others.

    skip  how many choices of each expert are in no tile.
    """
    choice_c = choice_rK.reshape(-1)
    choice_c = jnp.where((choice_c >= 0) & (choice_c < experts), choice_c, experts)
    order_c = jnp.argsort(choice_c, stable=True).astype(jnp.int32)
    numbers = jnp.arange(experts + 1, dtype=choice_c.dtype)
    first_e = jnp.searchsorted(choice_c[order_c], numbers).astype(jnp.int32)
    rest_e = jnp.minimum(first_e[:-1] + skip, first_e[1:])
    last_e = jnp.cumsum((first_e[1:] - rest_e + tile - 1) // tile)
    return SortedChoices(order_c, first_e, rest_e, last_e)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def local_experts(load: Load, *inputs: jax.Array) -> jax.Array:
    """Sum weight * expert(h) over the choices of these experts, 0 to e - 1.

    The first choices of each expert are one batched product. The others are tiles of one expert
    each. `load.tiles` of them run in any case, so compilers and the planner know them. A second
    loop runs only where these experts have more.
    """
    return _local_experts_forward(load, *inputs)[0]


@jax.named_scope("experts")
def _local_experts_forward(load: Load, *inputs: jax.Array) -> tuple[jax.Array, tuple]:
    h_rD, choice_rK, *weights = inputs
    weight_rK, gate_up_eDZ, down_eGD = weights
    choices = sort_choices(choice_rK, down_eGD.shape[0], load.batched, load.tile)
    batched = partial(batched_experts, load, choices)
    y_rD, pull_back = jax.vjp(batched, h_rD, *weights)

    def run(y_rD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        e, choice_p = choices.tile(i, load.tile)
        token_p = choice_p // weight_rK.shape[1]
        both_pZ = matmul("pD,DZ->pZ", read_rows(h_rD, token_p), of_expert(gate_up_eDZ, e))
        weight_p = read_rows(weight_rK.reshape(-1), choice_p)
        weighted_pG = weighted_hidden(load.act, both_pZ, weight_p)
        y_pD = matmul("pG,GD->pD", weighted_pG, of_expert(down_eGD, e))
        return add_distinct(y_rD, token_p, y_pD), both_pZ

    y_rD, both_ipZ = lax.scan(run, y_rD, jnp.arange(load.tiles, dtype=jnp.int32))
    both_ipZ = checkpoint_name(both_ipZ, "expert_hidden")
    with jax.named_scope(OVERFLOW):
        end = jnp.maximum(load.tiles, choices.last_e[-1])
        y_rD = lax.fori_loop(load.tiles, end, lambda i, y_rD: run(y_rD, i)[0], y_rD)
    return y_rD, (choices, h_rD, weights, pull_back, both_ipZ)


@jax.named_scope("experts")
def _local_experts_backward(load: Load, saved: tuple, d_y_rD: jax.Array) -> tuple:
    choices, h_rD, (weight_rK, gate_up_eDZ, down_eGD), pull_back, both_ipZ = saved

    def run(grads: tuple, i: jax.Array, both_pZ: jax.Array | None) -> tuple:
        d_h_rD, d_weight_c, d_gate_up_eDZ, d_down_eGD = grads
        e, choice_p = choices.tile(i, load.tile)
        token_p = choice_p // weight_rK.shape[1]
        x_pD, d_y_pD = read_rows(h_rD, token_p), read_rows(d_y_rD, token_p)
        gate_up_DZ, down_GD = of_expert(gate_up_eDZ, e), of_expert(down_eGD, e)
        if both_pZ is None:
            both_pZ = matmul("pD,DZ->pZ", x_pD, gate_up_DZ)
        weight_p = read_rows(weight_rK.reshape(-1), choice_p)
        weighted_pG, to_inputs = jax.vjp(partial(weighted_hidden, load.act), both_pZ, weight_p)
        d_weighted_pG, d_down_GD = product_gradients(weighted_pG, down_GD, d_y_pD)
        d_both_pZ, d_weight_p = to_inputs(d_weighted_pG)
        d_x_pD, d_gate_up_DZ = product_gradients(x_pD, gate_up_DZ, d_both_pZ)
        return (
            add_distinct(d_h_rD, token_p, d_x_pD),
            d_weight_c.at[choice_p].set(d_weight_p, mode="drop", unique_indices=True),
            jax.tree.map(lambda sum_, d: sum_.at[e].add(d), d_gate_up_eDZ, d_gate_up_DZ),
            jax.tree.map(lambda sum_, d: sum_.at[e].add(d), d_down_eGD, d_down_GD),
        )

    d_h_rD, d_weight_rK, *d_w = pull_back(d_y_rD)
    # In float32, for the sum over tiles.
    d_w = jax.tree.map(lambda d: d.astype(jnp.float32), d_w)
    grads = d_h_rD, d_weight_rK.reshape(-1), *d_w
    tiles = jnp.arange(load.tiles, dtype=jnp.int32), both_ipZ
    grads, _ = lax.scan(lambda grads, one: (run(grads, *one), None), grads, tiles)
    with jax.named_scope(OVERFLOW):
        end = jnp.maximum(load.tiles, choices.last_e[-1])
        grads = lax.fori_loop(load.tiles, end, lambda i, grads: run(grads, i, None), grads)
    d_h_rD, d_weight_c, *d_w = grads
    d_w = jax.tree.map(lambda d: d.astype(h_rD.dtype), d_w)
    return d_h_rD, None, d_weight_c.reshape(weight_rK.shape), *d_w


local_experts.defvjp(_local_experts_forward, _local_experts_backward)


def of_expert(w: Any, e: jax.Array) -> Any:
    return jax.tree.map(lambda a: a[e], w)


def product_gradients(x: jax.Array, w: Any, d_y: jax.Array) -> tuple[jax.Array, Any]:
    """Return the gradients of x [p, A] and, in float32, of w [A, B], from that of x w."""
    if isinstance(w, matrix.Biased):
        d_x, d_base = product_gradients(x, w.base, d_y)
        return d_x, w.replace(base=d_base, bias=d_y.astype(jnp.float32).sum(0))
    if isinstance(w, matrix.Adapted):
        d_x, d_w = jax.vjp(partial(matmul, "pA,AB->pB"), x, w)[1](d_y)
        return d_x, jax.tree.map(lambda d: d.astype(jnp.float32), d_w)
    return matmul("pB,AB->pA", d_y, w), float32_product("pA,pB->AB", x, d_y)


def batched_experts(
    load: Load, choices: SortedChoices, h_rD: jax.Array, *weights: jax.Array
) -> jax.Array:
    """Sum weight * expert(h) over the first choices of each expert."""
    weight_rK, gate_up_eDZ, down_eGD = weights
    choice_eJ = choices.read(choices.first_e[:-1], choices.first_e[1:], load.batched)
    token_eJ = choice_eJ // weight_rK.shape[1]
    weight_eJ = read_rows(weight_rK.reshape(-1), choice_eJ, unique_indices=True)
    add = partial(add_tokens, h_rD.shape[0])
    x_eJD = with_transpose(read_rows, add)(h_rD, token_eJ, token_eJ)
    slots = checkpoint_name((x_eJD, weight_eJ), "expert_in")
    y_eJD = run_expert(slot_product, load.act, gate_up_eDZ, down_eGD, *slots)
    return with_transpose(add, read_rows)(y_eJD, token_eJ, token_eJ)


def add_distinct(y_rD: jax.Array, token_p: jax.Array, x_pD: jax.Array) -> jax.Array:
    """Add rows to those of distinct tokens in increasing order, and drop rows past the end."""
    distinct = {"indices_are_sorted": True, "unique_indices": True}
    return y_rD.at[token_p].add(x_pD, mode="drop", **distinct)


def add_tokens(rows: int, y_eJD: jax.Array, token_eJ: jax.Array) -> jax.Array:
    """Add each row of y to the row of its token. The tokens of an expert differ.

    One expert after the other, because a GPU adds rows of the same token in any order.
    """

    def add(y_rD: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        y_JD, token_J = one
        return add_distinct(y_rD, token_J, y_JD), None

    zero = vary(jnp.zeros((rows, y_eJD.shape[2]), y_eJD.dtype), varying(y_eJD))
    return lax.scan(add, zero, (y_eJD, token_eJ))[0]
