"""Muon: momentum whose matrices are orthogonalized (arXiv:2502.16982), over the mesh.

A weight's declaration says which of its dimensions are rows and columns of a matrix; the others
count matrices, as experts and layers do. A rank has slices of many matrices and turns them into a
few whole ones: those of one shape and layout are stacked, over layers, experts and kinds, the stack
is shared out among the ranks that have slices of it, and one exchange brings each of them the other
slices of its share. Nothing is sent while they are orthogonalized; then results go back as they
came. Blocks stay in their stage, and experts that are spread on their rank; each replica does all
of it for itself. It has a shard_map of its own: left to the partitioner, each product of sliced
matrices would send.

Beside the paper: an expert that no token chose has no update but its decay, and the router is left
to AdamW, as its columns are experts that are chosen one against the other, not a map between two
widths.

Letters:
    n matrices of which a rank has slices    m whole matrices of a rank
    r rows of a slice                        c columns of a slice
    R rows                                   C columns, no fewer than rows
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from utils import MESH_AXES
from weights import Tree, Weight

# a, b and c of X <- (a + b A + c A^2) X with A = X X^T, and how often. Steep at zero rather than
# exact: singular values above 1/200 of the matrix's norm end between 0.68 and 1.16
# (kellerjordan.github.io/posts/muon).
STEPS = ((3.4445, -4.7750, 2.0315),) * 5
# Root mean square of an update, as AdamW's is (arXiv:2502.16982, section 2.2): one learning rate
# and one weight decay serve both.
RMS = 0.2
EPSILON = 1e-12  # added to a matrix's norm: one that is zero stays so


class Cut(NamedTuple):
    """Where slices of a weight's matrices are; those of weights that agree in it make one stack."""

    rows: int  # of a slice
    columns: int
    row_axes: tuple[str, ...]  # mesh axes that rows are cut over
    column_axes: tuple[str, ...]
    free: tuple[str, ...]  # axes, but for replica, along which the weight is the same

    @property
    def axes(self) -> tuple[str, ...]:
        return self.row_axes + self.column_axes


def scale_by_muon(
    declared: Tree, mesh: Any, beta: float, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Gradients -> updates whose root mean square is about 0.2; the state is Nesterov's momentum,
    float32, laid out as the weights.

    declared  all weights, of which those of the group "matrix" are updated.
    mesh      not needed for the state.
    dtype     of what is sent and multiplied.
    """
    momentum = optax.trace(beta, nesterov=True)
    matrices = [w for w in jax.tree.leaves(declared) if w.group == "matrix"]
    specs = [w.spec for w in matrices]

    def local(momenta: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("muon"):
            return orthogonalized(matrices, momenta, grads, dtype)

    def update(grads: Any, state: Any, _: Any = None) -> tuple[Any, Any]:
        assert mesh is not None, "updates need the mesh that the weights are on"
        over_mesh = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=True
        )
        momenta, state = momentum.update(grads, state)
        leaves, tree = jax.tree.flatten(momenta)
        return tree.unflatten(over_mesh(leaves, tree.flatten_up_to(grads))), state

    return optax.GradientTransformation(momentum.init, update)


# --- inside shard_map -----------------------------------------------------------------------------


# guide: muon
def orthogonalized(
    declared: list[Weight], momenta: list[jax.Array], grads: list[jax.Array], dtype: jnp.dtype
) -> list[jax.Array]:
    """This rank's slices of momenta -> of updates, float32.

    Sends  as on_whole_matrices and learns do.
    """
    alike: dict[Cut, list[int]] = {}
    for i, w in enumerate(declared):
        alike.setdefault(cut_of(w, momenta[i].shape), []).append(i)
    updates = list(momenta)
    for cut, numbers in alike.items():
        stacks = [slices_of(declared[i], momenta[i].astype(dtype)) for i in numbers]
        ends = np.cumsum([len(stack) for stack in stacks])[:-1]
        done = on_whole_matrices(cut, jnp.concatenate(stacks))
        for i, stack in zip(numbers, jnp.split(done, ends), strict=True):
            w = declared[i]
            update = array_of(w, stack, momenta[i].shape).astype(jnp.float32)
            updates[i] = update * (RMS * max(map(math.prod, sides(w, w.shape))) ** 0.5)
    return [
        jnp.where(learns(w, grad), update, 0) if w.active < 1 else update
        for w, grad, update in zip(declared, grads, updates, strict=True)
    ]


def on_whole_matrices(cut: Cut, slices_nrc: jax.Array) -> jax.Array:
    """Slices of n matrices, orthogonalized as whole ones, of which each rank does m.

    Sends  all_to_all(axes of the cut) there and back, all_gather(free axes) back.
    """
    n, r, c = slices_nrc.shape
    by_row, by_column, free = (math.prod(map(lax.axis_size, axes)) for axes in cut[2:])
    m = -(-n // (by_row * by_column * free))
    slices_nrc = jnp.pad(slices_nrc, ((0, by_row * by_column * free * m - n), (0, 0), (0, 0)))
    if cut.free:
        slices_nrc = slices_nrc.reshape(free, -1, r, c)[lax.axis_index(cut.free)]
    if cut.axes:
        slices_nrc = lax.all_to_all(slices_nrc, cut.axes, 0, 0, tiled=True)
    parts = slices_nrc.reshape(by_row, by_column, m, r, c)
    x_mRC = parts.transpose(2, 0, 3, 1, 4).reshape(m, by_row * r, by_column * c)
    parts = orthogonalize(x_mRC).reshape(m, by_row, r, by_column, c)
    slices_nrc = parts.transpose(1, 3, 0, 2, 4).reshape(-1, r, c)
    if cut.axes:
        slices_nrc = lax.all_to_all(slices_nrc, cut.axes, 0, 0, tiled=True)
    if cut.free:
        slices_nrc = lax.all_gather(slices_nrc, cut.free, tiled=True, to="invarying")
    return slices_nrc[:n]


def orthogonalize(x_mRC: jax.Array) -> jax.Array:
    """U V^T of each matrix U S V^T, nearly: five steps of Newton and Schulz. Products are of the
    argument's dtype, sums float32.
    """
    dtype = x_mRC.dtype

    def product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        precision = "highest" if dtype == jnp.float32 else None
        x, y = x.astype(dtype), y.astype(dtype)
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)

    def step(x_mRC: jax.Array, factors: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = factors
        A_mRR = product("mRC,mSC->mRS", x_mRC, x_mRC)
        B_mRR = b * A_mRR + c * product("mRS,mST->mRT", A_mRR, A_mRR)
        x_mRC = a * x_mRC.astype(jnp.float32) + product("mRS,mSC->mRC", B_mRR, x_mRC)
        return x_mRC.astype(dtype), None

    x32 = x_mRC.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x32 * x32, axis=(1, 2), keepdims=True))
    x_mRC = (x32 / (norm + EPSILON)).astype(dtype)
    return lax.scan(step, x_mRC, jnp.array(STEPS, jnp.float32))[0]


def learns(w: Weight, grad: jax.Array) -> jax.Array:
    """Whether a matrix has any gradient: of an expert that no token chose, what is left of the
    momentum would be made as large as any.

    Sends  psum(axes that a matrix is cut over) of a number for each matrix.
    """
    rows, columns = w.matrix
    found = (grad != 0).any(axis=rows + columns, keepdims=True)
    axes = tuple(axis for dim in rows + columns for axis in w.cuts[dim])
    return lax.psum(found.astype(jnp.int32), axes) > 0 if axes else found


# guide: end


# --- arrays as stacks of slices -------------------------------------------------------------------


def turned(w: Weight) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of (rows, columns), exchanged where whole columns would be fewer."""
    rows, columns = w.matrix
    fewer = math.prod(w.shape[d] for d in rows) <= math.prod(w.shape[d] for d in columns)
    return (rows, columns) if fewer else (columns, rows)


def sides(w: Weight, shape: tuple[int, ...]) -> list[list[int]]:
    """Sizes of the dimensions of (rows, columns), turned; shape is the whole one, or a slice's."""
    return [[shape[dim] for dim in side] for side in turned(w)]


def cut_of(w: Weight, shape: tuple[int, ...]) -> Cut:
    """shape  of this rank's slice."""
    rows, columns = map(math.prod, sides(w, shape))
    axes = [tuple(axis for dim in side for axis in w.cuts[dim]) for side in turned(w)]
    free = tuple(axis for axis in MESH_AXES[1:] if axis not in w.axes)
    return Cut(rows, columns, *axes, free)


def slices_of(w: Weight, x: jax.Array) -> jax.Array:
    """This rank's slice of a weight -> [n, r, c]."""
    return x.transpose(_order(w)).reshape(-1, *map(math.prod, sides(w, x.shape)))


def array_of(w: Weight, slices_nrc: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[n, r, c] -> this rank's slice of a weight, which has this shape."""
    order = _order(w)
    return slices_nrc.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))


def _order(w: Weight) -> list[int]:
    """Dimensions that count matrices, then those of rows, then of columns."""
    rows, columns = turned(w)
    dims = [dim % len(w.cuts) for dim in rows + columns]
    return [dim for dim in range(len(w.cuts)) if dim not in dims] + dims
