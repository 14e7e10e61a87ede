"""Declare a weight once: shape, layout, initial values, and how the optimizer treats it.

    gate: jax.Array = weight("D/fsdp F/tensor", normal("D"))

declares `gate` with dimensions D, sharded over the mesh axis `fsdp`, and F, sharded over `tensor`.
Its initial values have standard deviation 1/sqrt(D), and weight decay applies by default. `declare`
turns a class of such fields into a tree of `Weight`s of given sizes. All else is derived from that
tree: partition specs, initial values, the gather before use, the reduction of gradients, parameter
counts and the optimizer's masks. Nothing here depends on the model.
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from utils import LANES, MESH_AXES, WEIGHT_AXES, ConfigError

Tree = Any  # nested flax.struct dataclasses with arrays, or Weights, as leaves
Init = Callable[[jax.Array, tuple[int, ...], Mapping[str, "Size"]], jax.Array]

# Scale of the initial values of each projection into the residual stream, times 1/sqrt(fan-in).
# Layers begin as a small change of the embedding, which trains first: 0.4 nats better after 120
# steps of a tiny model.
RESIDUAL_SCALE = 0.1


class Size(NamedTuple):
    """The global size of a dimension and, for error messages, the flag that sets it."""

    size: int
    flag: str
    times: int = 1  # the size over the flag's value
    fixed: str = ""  # for a value that the user cannot change: the value, and why


@dataclass(frozen=True)
class Weight:
    """The declaration of one array. Dimensions are global.

    matrix  the dimensions, from the end, of the rows and of the columns of a matrix. The others
            are batch dimensions.
    """

    name: str
    dim_axes: tuple[tuple[str, ...], ...]  # per dimension, the mesh axes it is sharded over
    sizes: tuple[Size, ...]  # per dimension
    init: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    decay: bool
    group: str
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None
    trained: bool
    float32: bool
    active: float  # share of its elements that a token uses
    dtype: str = "float32"  # as stored
    frozen: bool = False  # is that of --run.init_from, of which a run keeps no copy: lora.py
    parameters: float = 1.0  # of the model, for each element

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size.size for size in self.sizes)

    @property
    def spec(self) -> PartitionSpec:
        entries = [axes[0] if len(axes) == 1 else axes or None for axes in self.dim_axes]
        return PartitionSpec(*entries)

    @property
    def gathered_dim(self) -> int | None:
        """The dimension sharded over fsdp alone, from the end, so that stacking does not move it.

        A dimension sharded over fsdp and another axis (expert parallelism) is not gathered.
        """
        dims = [
            i - len(self.dim_axes) for i, axes in enumerate(self.dim_axes) if axes == WEIGHT_AXES
        ]
        return dims[0] if dims else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is sharded over."""
        return tuple(axis for axes in self.dim_axes for axis in axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# --- declaring ------------------------------------------------------------------------------------


class Declaration(NamedTuple):
    """The arguments of `weight`."""

    # Dimensions by letter, each with its mesh axes: "V/pipeline+tensor D/fsdp". If a class has two
    # layouts, "Y/tensor A | Y A".
    layout: str
    init: Init
    decay: bool = True  # whether weight decay applies
    group: str = ""  # of optimizer settings; by default "matrix" if there is a matrix, else "rest"
    matrix: str = ""  # "D x N A": letters of rows and of columns; others are batch dimensions
    trained: bool = True  # whether it has a gradient and state of the optimizer
    float32: bool = False  # whether it stays float32 in compute
    active: tuple[str, str] | None = None  # ("K", "E"): a token uses K of its E slices


def weight(layout: str, init: Init, **options: Any) -> Any:
    """Declare a weight as a dataclass field, with the options of Declaration."""
    return dataclasses.field(metadata={"weight": Declaration(layout, init, **options)})


def ones(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def normal(inputs: str, scale: float = 1.0) -> Init:
    """N(0, scale^2 / fan-in). The fan-in is the global size of `inputs`, the contracted letters."""

    def init(key: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Size]) -> jax.Array:
        std = scale * math.prod(sizes[letter].size for letter in inputs.split()) ** -0.5
        return std * jax.random.normal(key, shape, jnp.float32)

    return init


def declare(cls: type, sizes: Mapping[str, Size], layout: int = 0, **others: Any) -> Tree:
    """Return `cls` with a Weight in each declared field, and `others` or None in the others.

    layout  which one, for the fields that have two.
    """
    fields = {
        f.name: _declared(f.name, sizes, f.metadata["weight"], layout)
        if "weight" in f.metadata
        else others.get(f.name)
        for f in dataclasses.fields(cls)
    }
    return cls(**fields)


def kept(tree: Tree, **is_kept: bool) -> Tree:
    """Return the dataclass with None in the fields that are not kept."""
    return tree.replace(**{name: None for name, is_so in is_kept.items() if not is_so})


def _declared(name: str, sizes: Mapping[str, Size], d: Declaration, layout: int) -> Weight:
    layouts = d.layout.split(" | ")
    letters, dim_axes = _parse_layout(layouts[min(layout, len(layouts) - 1)])
    group = d.group or ("matrix" if d.matrix else "rest")
    return Weight(
        name=name,
        dim_axes=dim_axes,
        sizes=tuple(_size(letter, sizes) for letter in letters),
        init=lambda key, shape: d.init(key, shape, sizes),
        decay=d.decay,
        group=group,
        matrix=_matrix(letters, d.matrix) if group == "matrix" else None,
        trained=d.trained,
        float32=d.float32,
        active=sizes[d.active[0]].size / sizes[d.active[1]].size if d.active else 1.0,
    )


def _size(letters: str, sizes: Mapping[str, Size]) -> Size:
    """Return the size of a letter, or of several side by side, such as C+R."""
    parts = [sizes[letter] for letter in letters.split("+")]
    return parts[0]._replace(size=sum(part.size for part in parts))


def _parse_layout(layout: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """ "V/pipeline+tensor D" -> ("V", "D"), (("pipeline", "tensor"), ()).

    In a layout, fsdp means fsdp and context: no two of these ranks hold the same slice.
    """
    layout = layout.replace("fsdp", "+".join(WEIGHT_AXES))
    parts = [part.partition("/") for part in layout.split()]
    dim_axes = tuple(tuple(axes.split("+")) if axes else () for _, _, axes in parts)
    return tuple(letter for letter, _, _ in parts), dim_axes


def _matrix(letters: tuple[str, ...], matrix: str) -> tuple[tuple[int, ...], ...]:
    """ "D x N A" -> the dimensions of rows and of columns, from the end."""
    rows, columns = (side.split() for side in matrix.split(" x "))
    return tuple(tuple(letters.index(x) - len(letters) for x in side) for side in (rows, columns))


def stacked(tree: Tree, layout: str, sizes: Mapping[str, Size]) -> Tree:
    """Prepend the dimensions of `layout` to each weight."""
    letters, dim_axes = _parse_layout(layout)
    front = tuple(sizes[letter] for letter in letters)

    def one(w: Weight) -> Weight:
        return dataclasses.replace(w, dim_axes=dim_axes + w.dim_axes, sizes=front + w.sizes)

    return jax.tree.map(one, tree)


def named(tree: Tree) -> Tree:
    """Name each weight by its path in the tree, as `blocks.dense.mlp.gate`."""

    def name(path: tuple, w: Weight) -> Weight:
        return dataclasses.replace(w, name=jax.tree_util.keystr(path, simple=True, separator="."))

    return jax.tree_util.tree_map_with_path(name, tree)


# --- derived --------------------------------------------------------------------------------------


def specs(declared: Tree) -> Tree:
    """Return the PartitionSpec of each weight."""
    return jax.tree.map(lambda w: w.spec, declared)


def trained(declared: Tree, tree: Tree) -> Tree:
    """Return the tree with None in place of what belongs to weights without a gradient."""
    return jax.tree.map(lambda w, part: part if w.trained else None, declared, tree)


def own(declared: Tree, tree: Tree) -> Tree:
    """Return the tree with None in place of what belongs to frozen weights."""
    return jax.tree.map(lambda w, part: None if w.frozen else part, declared, tree)


def filled(tree: Tree, others: Tree) -> Tree:
    """Return the tree with the parts of `others` where it has None."""

    def fill(part: Any, other: Any) -> Any:
        return other if part is None else part

    return jax.tree.map(fill, tree, others, is_leaf=lambda part: part is None)


def check_divisible(declared: Tree, ranks: Mapping[str, int]) -> None:
    """Check that every dimension divides into equal slices over its mesh axes.

    Raises  ConfigError with the flag of the dimension, a value that works, and ranks that do.
    """
    sharded = [
        (w.name, size, [a for a in axes if ranks[a] > 1], math.prod(ranks[a] for a in axes))
        for w in jax.tree.leaves(declared)
        for size, axes in zip(w.sizes, w.dim_axes, strict=True)
    ]
    for name, size, axes, slices in sharded:
        if size.size % slices == 0:
            continue
        value = size.size // size.times
        # A flag may set several dimensions, and the value must work for all of them.
        same = [(n, s.times) for _, s, _, n in sharded if s.flag == size.flag]
        step = math.lcm(*(n // math.gcd(n, times) for n, times in same))
        value_hint = "" if size.fixed else f"--{size.flag} {-(-value // step) * step}, or "
        where = name if size.times == 1 else f"{name} has {size.times} times as many"
        mesh = " x ".join(f"--mesh.{axis} {ranks[axis]}" for axis in axes)
        raise ConfigError(
            f"--{size.flag} {size.fixed or value} is not divisible by {mesh} ({where}): every rank "
            f"holds an equal slice. Use {value_hint}{_divisors(size.size, axes, ranks)}."
        )


def _divisors(size: int, axes: Sequence[str], ranks: Mapping[str, int]) -> str:
    """Return flags with the most ranks, each a divisor of `ranks`, whose product divides size."""
    flags = []
    for axis in axes:
        fewer = math.gcd(size, ranks[axis])
        size //= fewer
        flags.append(f"--mesh.{axis} {fewer}")
    return " ".join(flags)


def initialize(declared: Tree, mesh: Mesh, seed: int) -> Tree:
    """Return initial values, float32, in the declared layout; bit-identical on every mesh.

    Global arrays are drawn under jit, and the partitioner slices them. Each key is folded from the
    weight's name, so a new weight does not change the others.
    """

    def draw(key: jax.Array) -> Tree:
        return jax.tree.map(
            lambda w: w.init(jax.random.fold_in(key, zlib.crc32(w.name.encode())), w.shape),
            declared,
        )

    shardings = jax.tree.map(lambda w: NamedSharding(mesh, w.spec), declared)
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


def count(declared: Tree) -> tuple[int, int]:
    """Return the number of parameters, and of those that a token uses."""
    sizes = [(w.size * w.parameters, w.active) for w in jax.tree.leaves(declared)]
    return round(sum(n for n, _ in sizes)), round(sum(n * active for n, active in sizes))


# --- inside shard_map -----------------------------------------------------------------------------


def varying(tree: Tree) -> tuple[str, ...]:
    """Return the mesh axes along which any leaf varies, by its type."""
    types = [jax.typeof(a).mat.varying for a in jax.tree.leaves(tree)]
    return tuple(axis for axis in MESH_AXES if any(axis in axes for axes in types))


def vary(tree: Tree, axes: tuple[str, ...] = MESH_AXES) -> Tree:
    """Type every leaf as varying along `axes`. No data moves."""

    def one(a: jax.Array) -> jax.Array:
        need = tuple(axis for axis in axes if axis not in varying(a))
        return lax.pcast(a, need, to="varying") if need else a

    return jax.tree.map(one, tree)


def reduced(x: jax.Array, axis: str) -> jax.Array:
    """Return x. A type that varies along `axis` is a collective that is missing before."""
    if axis in varying(x):
        raise TypeError(f"a {jax.typeof(x)} varies along {axis}: its psum({axis}) is missing")
    return x


def cast(declared: Tree, arrays: Tree, dtype: jnp.dtype) -> Tree:
    """Cast weights to the compute dtype, before they are gathered; not codes of 4 bits."""

    def one(w: Weight, a: jax.Array) -> jax.Array:
        return a if w.float32 or not jnp.issubdtype(a.dtype, jnp.floating) else a.astype(dtype)

    return jax.tree.map(one, declared, arrays)


def constant(declared: Tree, arrays: Tree) -> Tree:
    """Return the arrays, of which those of weights without a gradient are constants of it."""
    return jax.tree.map(lambda w, a: a if w.trained else lax.stop_gradient(a), declared, arrays)


def gather(declared: Tree, arrays: Tree) -> Tree:
    """Gather weights over fsdp.

    Collectives  all_gather(fsdp) of each weight with a dimension sharded over fsdp alone.
    """

    def one(w: Weight, a: jax.Array) -> jax.Array:
        if w.gathered_dim is None:
            return a
        dim = w.gathered_dim % a.ndim
        if not w.trained:
            return lax.all_gather(lax.stop_gradient(a), WEIGHT_AXES, axis=dim, tiled=True)
        return _gather(a, dim)

    return jax.tree.map(one, declared, arrays)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(a: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(a, WEIGHT_AXES, axis=dim, tiled=True)


_gather.defvjp(
    # Not _gather itself, in which a remat policy could not see the all_gather.
    lambda a, dim: (lax.all_gather(a, WEIGHT_AXES, axis=dim, tiled=True), None),
    # Custom, because the transpose of a bfloat16 gather sums the ranks' gradients in bfloat16.
    lambda dim, _, grad: (_scatter(grad.astype(jnp.float32), dim).astype(grad.dtype),),
)


def _scatter(partial_grad: jax.Array, dim: int) -> jax.Array:
    """Reduce partial gradients to this rank's slice of the sum, sharded over fsdp along `dim`."""
    if lax.axis_size(WEIGHT_AXES) == 1:
        return partial_grad
    # libtpu scatters the second-to-last dimension in memory. For any other it emits an all-reduce,
    # which sends twice as much.
    ndim = partial_grad.ndim
    minor = ndim - 1 if dim < ndim - 1 else ndim - 2
    order = (*(d for d in range(ndim) if d not in (dim, minor)), dim, minor)
    partial_grad = with_layout_constraint(partial_grad, Layout(major_to_minor=order))
    grad = lax.psum_scatter(partial_grad, WEIGHT_AXES, scatter_dimension=dim, tiled=True)
    # Constrained again, or the layout of the slice's consumer would propagate to the sum.
    return with_layout_constraint(grad, Layout(major_to_minor=order))


def _default_layout(grad: jax.Array) -> jax.Array:
    """Constrain a gradient to the default layout of its weight.

    Otherwise libtpu copies weight and optimizer state to the layout of the gradient, and back. The
    default on a TPU is row-major if that fills its registers.
    """
    if grad.shape[-1] % LANES:
        return grad
    return with_layout_constraint(grad, Layout(major_to_minor=tuple(range(grad.ndim))))


def reduce_gradients(declared: Tree, grads: Tree, gathered: bool) -> Tree:
    """Reduce partial gradients over ranks, to float32 sums in the layout of the weights.

    gathered  whether the gradients are of gathered weights. If not, the backward pass of `gather`
              has already scattered them.

    Collectives  psum_scatter(fsdp) of gathered weights, psum over the other axes along which a
                 weight is replicated, then psum(replica) of this rank's slice.
    """

    def reduce(w: Weight, grad: jax.Array) -> jax.Array:
        if gathered and w.gathered_dim is not None:
            grad = _default_layout(_scatter(grad, w.gathered_dim % grad.ndim))
        replicated = tuple(axis for axis in MESH_AXES[1:] if axis not in w.axes)
        grad = lax.psum(grad, replicated) if replicated else grad
        return lax.psum(grad, "replica")

    return jax.tree.map(reduce, declared, grads)


# --- in a layer ---------------------------------------------------------------------------------

PRODUCT_GRADIENT = "product_gradient"  # a name: that of the matrix follows from it and x
named_gradient = jax.custom_vjp(lambda y: y)
named_gradient.defvjp(lambda y: (y, None), lambda _, g: (checkpoint_name(g, PRODUCT_GRADIENT),))


def matmul(formula: str, x: jax.Array, w: Any) -> jax.Array:
    """Multiply as einsum, in the arguments' dtype; float32 at full precision on every device.

    w  an array, or what multiplies itself: matrix.Adapted and matrix.Quantized.

    The first two dimensions of x are flattened into one. Where the gradient of a weight sums over
    two dimensions, XLA for CPUs would first write transposed copies of both operands.
    """
    if hasattr(w, "multiply"):
        return w.multiply(matmul, formula, x)
    precision = "highest" if x.dtype == jnp.float32 else None
    x_dims, w_dims, y_dims = re.split(",|->", formula)
    if y_dims[:2] != x_dims[:2] or set(x_dims[:2]) & set(w_dims):
        return named_gradient(jnp.einsum(formula, x, w, precision=precision))
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    y = jnp.einsum(f"{x_dims[1:]},{w_dims}->{y_dims[1:]}", flat, w, precision=precision)
    return named_gradient(y).reshape(*x.shape[:2], *y.shape[1:])


def float32_product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply as einsum into float32. JAX's gradient of it would multiply in float32 as well."""
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467), in float32 for the sum."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x32 * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)
