"""Declare a weight once: shape, layout, first value, and how the optimizer treats it.

    gate: jax.Array = weight("D/fsdp F/tensor", normal("D"))

says that `gate` has dimensions D and F, that D is cut over the mesh axis `fsdp` and F over
`tensor`, that its first values have standard deviation 1/sqrt(D), and (by default) that weight
decay applies. `declare` turns a class of such fields into a tree of `Weight`s for given sizes;
everything else is derived from that tree: partition specs, initial values, the gather before use
and the reduction of gradients after it, counts, the optimizer's masks. Nothing here knows which
model the weights are for.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from utils import LANES, MESH_AXES

Tree = Any  # a nest of flax.struct dataclasses with arrays, or Weights, as leaves
Init = Callable[[jax.Array, tuple[int, ...], Mapping[str, "Size"]], jax.Array]


class Size(NamedTuple):
    """A dimension's whole size; for error messages, the flag that sets it, and how."""

    size: int
    flag: str
    times: int = 1  # the size over the flag's value
    fixed: str = ""  # where no other may be chosen: the flag's value, and why


@dataclass(frozen=True)
class Weight:
    """What is known of one array before it exists. Dimensions are whole, not this rank's slice.

    matrix  dimensions, from the end, that are rows and columns of a matrix; others count matrices.
    """

    name: str
    cuts: tuple[tuple[str, ...], ...]  # per dimension, the mesh axes it is cut over
    sizes: tuple[Size, ...]  # per dimension
    init: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    decay: bool
    group: str
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None
    trained: bool
    float32: bool
    active: float  # share of its elements that one token uses

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size.size for size in self.sizes)

    @property
    def spec(self) -> PartitionSpec:
        entries = [axes[0] if len(axes) == 1 else axes or None for axes in self.cuts]
        return PartitionSpec(*entries)

    @property
    def gathered_dim(self) -> int | None:
        """The dimension cut over fsdp alone, from the end (so that stacking does not move it), if
        there is one.

        A dimension cut over fsdp and another axis (experts spread over a plane) stays cut while it
        is used.
        """
        dims = [i - len(self.cuts) for i, axes in enumerate(self.cuts) if axes == ("fsdp",)]
        return dims[0] if dims else None

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that its slices differ along."""
        return tuple(axis for axes in self.cuts for axis in axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# --- declaring ------------------------------------------------------------------------------------


def weight(
    layout: str,
    init: Init,
    *,
    decay: bool = True,
    group: str = "",
    matrix: str = "",
    trained: bool = True,
    float32: bool = False,
    active: tuple[str, str] | None = None,
) -> Any:
    """A dataclass field for one weight.

    layout   dimensions by letter, each with the axes it is cut over: "V/pipeline+tensor D/fsdp".
    decay    weight decay applies.
    group    which of the optimizer's settings apply: "matrix" where there is one, else "rest".
    matrix   "D x N A": the letters of its rows and of its columns; others count matrices.
    trained  has a gradient; else something other than the optimizer moves it.
    float32  is not cast to the compute dtype.
    active   ("K", "E"): of its E slices a token uses K.
    """
    options = {
        "decay": decay,
        "group": group or ("matrix" if matrix else "rest"),
        "matrix": matrix,
        "trained": trained,
        "float32": float32,
        "active": active,
    }
    return dataclasses.field(metadata={"weight": {"layout": layout, "init": init, **options}})


def ones(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def normal(inputs: str, scale: float = 1.0) -> Init:
    """N(0, scale^2 / inputs).

    `inputs` names the contracted dimensions, whole, so that the mesh cannot change the scale.
    """

    def init(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
        std = scale * math.prod(sizes[letter].size for letter in inputs.split()) ** -0.5
        return std * jax.random.normal(key, shape, jnp.float32)

    return init


def declare(cls: type, sizes: Mapping[str, Size], **children: Tree) -> Tree:
    """`cls` with a Weight in each field that `weight` made, and `children` in the other nodes (None
    if not given).
    """
    fields = {
        f.name: _declared(f.name, sizes, **f.metadata["weight"])
        if "weight" in f.metadata
        else children.get(f.name)
        for f in dataclasses.fields(cls)
        if f.metadata.get("pytree_node", True)
    }
    return cls(**fields)


def _declared(
    name: str,
    sizes: Mapping[str, Size],
    layout: str,
    init: Init,
    active: Any,
    matrix: str,
    **options: Any,
) -> Weight:
    letters, cuts = _parse(layout)
    return Weight(
        name=name,
        cuts=cuts,
        matrix=_sides(name, letters, matrix) if matrix or options["group"] == "matrix" else None,
        sizes=tuple(sizes[letter] for letter in letters),
        init=lambda key, shape: init(key, shape, sizes),
        active=sizes[active[0]].size / sizes[active[1]].size if active else 1.0,
        **options,
    )


def _parse(layout: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """ "V/pipeline+tensor D" -> ("V", "D"), (("pipeline", "tensor"), ())."""
    parts = [part.partition("/") for part in layout.split()]
    cuts = tuple(tuple(axes.split("+")) if axes else () for _, _, axes in parts)
    unknown = {axis for axes in cuts for axis in axes} - set(MESH_AXES)
    assert not unknown, f"layout {layout!r} names axes {unknown} that the mesh does not have"
    return tuple(letter for letter, _, _ in parts), cuts


def _sides(name: str, letters: tuple[str, ...], matrix: str) -> tuple[tuple[int, ...], ...]:
    """ "D x N A" -> the dimensions of rows and of columns, from the end."""
    sides = [side.split() for side in matrix.split(" x ")]
    named = [letter for side in sides for letter in side]
    if len(sides) != 2 or not all(sides) or sorted({*named} & {*letters}) != sorted(named):
        raise ValueError(
            f"{name} is {matrix!r} as a matrix, in dimensions {' '.join(letters)}. Name those of "
            'its rows and those of its columns, as matrix="D x N A", or give it another group.'
        )
    return tuple(tuple(letters.index(x) - len(letters) for x in side) for side in sides)


def stacked(tree: Tree, layout: str, sizes: Mapping[str, Size]) -> Tree:
    """The same weights with the dimensions of `layout` put in front of each."""
    letters, cuts = _parse(layout)
    front = tuple(sizes[letter] for letter in letters)

    def stack(w: Weight) -> Weight:
        return dataclasses.replace(w, cuts=cuts + w.cuts, sizes=front + w.sizes)

    return jax.tree.map(stack, tree)


def named(tree: Tree) -> Tree:
    """The same weights, each named by its path in the tree, e.g. `blocks.dense.mlp.gate`."""

    def name(path: tuple, w: Weight) -> Weight:
        return dataclasses.replace(w, name=jax.tree_util.keystr(path, simple=True, separator="."))

    return jax.tree_util.tree_map_with_path(name, tree)


# --- derived --------------------------------------------------------------------------------------


def specs(declared: Tree) -> Tree:
    """The PartitionSpec of each weight."""
    return jax.tree.map(lambda w: w.spec, declared)


def check_cuts(declared: Tree, ranks: Mapping[str, int]) -> None:
    """Every dimension can be cut into equal slices over the axes that it is cut over.

    Raises ValueError that names the flag of the dimension with a value that works, and ranks that
    do.
    """
    cuts = [
        (w.name, size, axes, math.prod(ranks[axis] for axis in axes))
        for w in jax.tree.leaves(declared)
        for size, axes in zip(w.sizes, w.cuts, strict=True)
    ]
    for name, size, axes, parts in cuts:
        if size.size % parts == 0:
            continue
        value = size.size // size.times
        # A flag may set several dimensions: the value is to work for all of them.
        step = math.lcm(*(n // math.gcd(n, s.times) for _, s, _, n in cuts if s.flag == size.flag))
        works = "" if size.fixed else f"--{size.flag} {-(-value // step) * step}, or "
        where = name if size.times == 1 else f"{name} has {size.times} times as many"
        mesh = " x ".join(f"--mesh.{axis} {ranks[axis]}" for axis in axes)
        raise ValueError(
            f"--{size.flag} {size.fixed or value} cannot be cut over {mesh} ({where}): every rank "
            f"must hold an equal slice. Use {works}{_dividing(size.size, axes, ranks)}."
        )


def _dividing(size: int, axes: tuple[str, ...], ranks: Mapping[str, int]) -> str:
    """The most ranks whose product divides size, of divisors of `ranks`, which therefore divide
    what `ranks` do.
    """
    flags = []
    for axis in axes:
        fewer = math.gcd(size, ranks[axis])
        size //= fewer
        flags.append(f"--mesh.{axis} {fewer}")
    return " ".join(flags)


def initialize(declared: Tree, mesh: Mesh, seed: int) -> Tree:
    """First values, float32, laid out as declared.

    Whole matrices are drawn under jit and the partitioner cuts them, so the values are
    bit-identical on every mesh. A weight's key is folded from its name: a new weight does not move
    the others.
    """

    def draw(key: jax.Array) -> Tree:
        return jax.tree.map(
            lambda w: w.init(jax.random.fold_in(key, zlib.crc32(w.name.encode())), w.shape),
            declared,
        )

    shardings = jax.tree.map(lambda w: NamedSharding(mesh, w.spec), declared)
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


def count(declared: Tree) -> tuple[int, int]:
    """Parameters in all, and those that one token uses."""
    leaves = jax.tree.leaves(declared)
    return sum(w.size for w in leaves), round(sum(w.size * w.active for w in leaves))


# --- inside shard_map -----------------------------------------------------------------------------


def varying(tree: Tree) -> tuple[str, ...]:
    """The mesh axes that some leaf is typed as differing along."""
    types = [jax.typeof(a).mat.varying for a in jax.tree.leaves(tree)]
    return tuple(axis for axis in MESH_AXES if any(axis in axes for axes in types))


def vary(tree: Tree, axes: tuple[str, ...] = MESH_AXES) -> Tree:
    """Type every leaf as differing along `axes` (no data moves)."""

    def one(a: jax.Array) -> jax.Array:
        need = tuple(axis for axis in axes if axis not in varying(a))
        return lax.pcast(a, need, to="varying") if need else a

    return jax.tree.map(one, tree)


def cast(declared: Tree, arrays: Tree, dtype: jnp.dtype) -> Tree:
    """Weights in the dtype that they are used in, before any is gathered."""
    return jax.tree.map(lambda w, a: a if w.float32 else a.astype(dtype), declared, arrays)


def gather(declared: Tree, arrays: Tree) -> Tree:
    """Weights whole along fsdp: what a layer multiplies by.

    Sends  all_gather(fsdp) of each weight with a dimension cut over fsdp alone.
    """
    return jax.tree.map(
        lambda w, a: a if w.gathered_dim is None else _gather(a, w.gathered_dim % a.ndim),
        declared,
        arrays,
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(a: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(a, "fsdp", axis=dim, tiled=True)


def _gather_forward(a: jax.Array, dim: int) -> tuple[jax.Array, None]:
    # Not _gather itself: a remat policy could not see that this is a gather, and would keep the
    # result.
    return lax.all_gather(a, "fsdp", axis=dim, tiled=True), None


def _gather_backward(dim: int, _: None, grad: jax.Array) -> tuple[jax.Array]:
    # Written by hand because the transpose of a bfloat16 gather would add up the ranks' gradients
    # in bfloat16.
    return (_scatter(grad.astype(jnp.float32), dim).astype(grad.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def _scatter(part: jax.Array, dim: int) -> jax.Array:
    """Parts of a sum -> this rank's slice of the sum, cut over fsdp along `dim`."""
    if lax.axis_size("fsdp") == 1:
        return part
    # libtpu scatters along the dimension that is second from the last in memory; for any other it
    # makes an all-reduce, which sends twice as much.
    minor = part.ndim - 1 if dim < part.ndim - 1 else part.ndim - 2
    order = (*(d for d in range(part.ndim) if d not in (dim, minor)), dim, minor)
    part = with_layout_constraint(part, Layout(major_to_minor=order))
    own = lax.psum_scatter(part, "fsdp", scatter_dimension=dim, tiled=True)
    # Said again of the slice, or another layout of what is made of it would reach the sum.
    return with_layout_constraint(own, Layout(major_to_minor=order))


def _default_layout(grad: jax.Array) -> jax.Array:
    """In the layout of its weight, or libtpu would copy weight and state of the optimizer to that
    of the gradient, and back. A TPU's default is row-major where that fills its registers.
    """
    if grad.shape[-1] % LANES:
        return grad
    return with_layout_constraint(grad, Layout(major_to_minor=tuple(range(grad.ndim))))


def reduce_gradients(declared: Tree, grads: Tree, gathered: bool) -> Tree:
    """Each rank's part of the gradients -> their sums, float32, laid out as the weights.

    gathered  the gradients are of weights whole along fsdp (they were gathered once, before); else
              the gather's own backward has already scattered them.
    Sends     psum_scatter(fsdp) of gathered weights, psum over the axes of a slice along which a
              weight is replicated, then psum(replica) of what a rank holds.
    """

    def reduce(w: Weight, part: jax.Array) -> jax.Array:
        if gathered and w.gathered_dim is not None:
            dim = w.gathered_dim % part.ndim
            part = _default_layout(_scatter(part, dim))
        replicated = tuple(axis for axis in MESH_AXES[1:] if axis not in w.axes)
        part = lax.psum(part, replicated) if replicated else part
        return lax.psum(part, "replica")

    return jax.tree.map(reduce, declared, grads)
