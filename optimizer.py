"""Learning rate, AdamW, and Muon over the mesh.

Muon is momentum whose matrices are orthogonalized (arXiv:2502.16982). The declaration of a weight
names the rows and columns of its matrices. Its other dimensions, such as layers and experts, are
batch dimensions. A rank holds slices of many matrices, and exchanges them for a few complete ones:

1. Slices of one shape and layout are stacked, over layers, experts and kinds of weights.
2. One all_to_all gives each rank that holds slices of the stack a share of the complete matrices.
3. The rank orthogonalizes them without communication, and a second all_to_all returns the slices.

Matrices stay in their pipeline stage, experts under expert parallelism on their rank, and each
replica does the same work. The update has its own shard_map, because the partitioner would
communicate in each product of sharded matrices.

Differences from the paper: an expert that no token chose is only decayed; and AdamW updates the
router, whose columns are competing experts and not a map between two widths.

Letters of this file:
    n matrices of which a rank holds slices  m complete matrices of a rank
    r rows of a slice                        c columns of a slice
    R rows                                   C columns, at least as many as rows
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

import depth
from utils import MESH_AXES, Config
from weights import Tree, Weight, trained

FAR_FACTOR = 10.0  # a learning rate that is off by this causes a warning
# a, b and c of X <- (a + b A + c A^2) X with A = X X^T, for each step. Steep at zero rather
# than exact: singular values above 1/200 of the matrix's norm end between 0.68 and 1.16
# (kellerjordan.github.io/posts/muon).
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
# Root mean square of an update. AdamW's is about the same (arXiv:2502.16982, section 2.2), so one
# learning rate and one weight decay serve both.
UPDATE_RMS = 0.2
EPSILON = 1e-12  # added to a matrix's norm, so that a zero matrix stays zero

# --- learning rate and AdamW ----------------------------------------------------------------------


class LearningRates(NamedTuple):
    """Linear warmup, then a cosine, or a constant and a linear decay (wsd); float32 numbers.

    They are arguments of the compiled step, so other learning rates need no other program.
    """

    peak: np.float32
    low: np.float32  # at the end
    warmup: np.float32  # steps
    begin: np.float32  # steps before the decay
    length: np.float32  # of the decay, in steps
    cosine: np.float32  # the shape of the decay: 1, or 0 for linear


def learning_rates(config: Config) -> LearningRates:
    """Return the learning rates of `config.optimizer`."""
    o, steps = config.optimizer, config.optimizer.schedule_steps or config.train.steps
    warmup, begin = o.phases(steps)
    low, length = o.lr * o.min_lr_ratio, max(1, steps - begin)
    numbers = o.lr, low, warmup, begin, length, o.schedule == "cosine"
    return LearningRates(*map(np.float32, numbers))


def learning_rate(rates: LearningRates, step: jax.Array) -> jax.Array:
    """Return the learning rate of a step, counted from 0, in float32.

    The first one is above 0, and the last one is the lowest.
    """
    peak, low, warmup, begin, length, cosine = rates
    done = step.astype(jnp.float32) + 1
    share = jnp.clip((done - begin) / length, 0, 1)  # of the decay
    left = jnp.where(cosine > 0, (1 + jnp.cos(jnp.pi * share)) / 2, 1 - share)
    return jnp.where(done < warmup, peak * done / warmup, low + (peak - low) * left)


def learning_rate_warning(config: Config) -> str:
    """Return a warning about a learning rate far outside the tuned range, or an empty string.

    An optimizer that is not in depth.LR has no such range, nor have adapters. For a run from given
    weights (--run.init_from) the range is one of pretraining, which undoes what the weights have
    learned.
    """
    o = config.optimizer
    if o.name not in depth.LR or config.lora.rank:
        return ""
    best = depth.best_lr(config)
    low, high = best / FAR_FACTOR, best * FAR_FACTOR
    if config.run.init_from and not config.run.init_optimizer:
        return (
            f"warning: --optimizer.lr {o.lr:g} is in the range of pretraining, and this run starts "
            f"from trained weights. To tune them, use a rate below {low:.2g}, as configs/tune.toml "
            "does."
        ) * (o.lr >= low)
    if low <= o.lr <= high:
        return ""
    return (
        f"warning: --optimizer.lr {o.lr:g} is far from what was tuned (docs/experiments.md): with "
        f"--optimizer.name {o.name} and --model.hidden_size {config.model.hidden_size} expect the "
        f"best between {low:.2g} and {high:.2g}, as --optimizer.lr {best:.2g}."
    )


def make_optimizer(config: Config, declared: Tree, mesh: Mesh) -> optax.GradientTransformation:
    """Return the optimizer, without the learning rate.

    Its arguments are of the weights that are trained, with None for the others.

    It clips by the global norm, scales by AdamW (arXiv:1711.05101) or for matrices by Muon if
    selected, and applies weight decay as declared.
    """
    o, declared = config.optimizer, trained(declared, declared)
    decayed = jax.tree.map(
        lambda w: w.decay and (w.group != "embedding" or o.decay_embeddings), declared
    )
    rules = {"adamw": optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)}
    if o.name == "muon":
        dtype = jnp.dtype(config.model.compute_dtype)
        rules["muon"] = scale_by_muon(declared, mesh, o.muon_beta, dtype)
    names = jax.tree.map(partial(optimizer_of, o.name), declared)
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity(),
        # Raises for a name without an entry in `rules`.
        rules["adamw"] if o.name == "adamw" else optax.partition(rules, names),
        optax.add_decayed_weights(o.weight_decay, decayed),
    )


def optimizer_of(matrices: str, w: Weight) -> str:
    """Return the optimizer of a weight: `matrices` for the matrices of layers, else adamw."""
    groups = {"matrix": matrices, "embedding": "adamw", "rest": "adamw"}
    assert w.group in groups, f"{w.name} is of the group {w.group!r}, which has no optimizer"
    return groups[w.group]


# --- Muon -----------------------------------------------------------------------------------------


class SliceLayout(NamedTuple):
    """The layout of slices of matrices. Weights with the same layout share one stack."""

    rows: int  # of a slice
    columns: int
    row_axes: tuple[str, ...]  # mesh axes that rows are sharded over
    column_axes: tuple[str, ...]
    free: tuple[str, ...]  # axes, except replica, along which the weight is replicated

    @property
    def axes(self) -> tuple[str, ...]:
        return self.row_axes + self.column_axes


def scale_by_muon(
    declared: Tree, mesh: Mesh, beta: float, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Return Muon: gradients -> updates whose root mean square is about UPDATE_RMS.

    The state is Nesterov's momentum, float32, in the layout of the weights.

    declared  all weights, of which those of the group "matrix" are updated.
    dtype     of communication and products.
    """
    momentum = optax.trace(beta, nesterov=True)
    matrices = [w for w in jax.tree.leaves(declared) if w.group == "matrix"]
    specs = [w.spec for w in matrices]

    def local(momenta: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("muon"):
            return muon_updates(matrices, momenta, grads, dtype)

    def update(grads: Any, state: Any, _: Any = None) -> tuple[Any, Any]:
        over_mesh = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=True
        )
        momenta, state = momentum.update(grads, state)
        leaves, tree = jax.tree.flatten(momenta)
        return tree.unflatten(over_mesh(leaves, tree.flatten_up_to(grads))), state

    return optax.GradientTransformation(momentum.init, update)


# --- inside shard_map -----------------------------------------------------------------------------


def muon_updates(
    declared: list[Weight], momenta: list[jax.Array], grads: list[jax.Array], dtype: jnp.dtype
) -> list[jax.Array]:
    """Return this rank's slices of updates, float32, from its slices of momenta.

    Collectives  those of orthogonalize_slices and has_gradient.
    """
    groups: dict[SliceLayout, list[int]] = {}
    for i, w in enumerate(declared):
        groups.setdefault(slice_layout(w, momenta[i].shape), []).append(i)
    updates = list(momenta)
    for layout, members in groups.items():
        stacks = [to_slices(declared[i], momenta[i].astype(dtype)) for i in members]
        splits = np.cumsum([len(stack) for stack in stacks])[:-1]
        slices_nrc = orthogonalize_slices(layout, jnp.concatenate(stacks))
        for i, stack in zip(members, jnp.split(slices_nrc, splits), strict=True):
            w = declared[i]
            update = from_slices(w, stack, momenta[i].shape).astype(jnp.float32)
            longest = max(side_sizes(w, w.shape))
            updates[i] = update * (UPDATE_RMS * longest**0.5)
    return [
        jnp.where(has_gradient(w, grad), update, 0) if w.active < 1 else update
        for w, grad, update in zip(declared, grads, updates, strict=True)
    ]


def orthogonalize_slices(layout: SliceLayout, slices_nrc: jax.Array) -> jax.Array:
    """Orthogonalize n matrices from their slices; each rank computes m of them.

    Collectives  all_to_all(layout.axes) there and back, all_gather(layout.free) back.
    """
    n, r, c = slices_nrc.shape
    by_row, by_column, free = (math.prod(map(lax.axis_size, axes)) for axes in layout[2:])
    m = -(-n // (by_row * by_column * free))
    slices_nrc = jnp.pad(slices_nrc, ((0, by_row * by_column * free * m - n), (0, 0), (0, 0)))
    if layout.free:
        slices_nrc = slices_nrc.reshape(free, -1, r, c)[lax.axis_index(layout.free)]
    if layout.axes:
        # XLA for CPUs refuses a program if it can see that the parts have different layouts.
        slices_nrc = lax.optimization_barrier(slices_nrc)
        slices_nrc = lax.all_to_all(slices_nrc, layout.axes, 0, 0, tiled=True)
    grid = slices_nrc.reshape(by_row, by_column, m, r, c)
    x_mRC = grid.transpose(2, 0, 3, 1, 4).reshape(m, by_row * r, by_column * c)
    grid = orthogonalize(x_mRC).reshape(m, by_row, r, by_column, c)
    slices_nrc = grid.transpose(1, 3, 0, 2, 4).reshape(-1, r, c)
    if layout.axes:
        slices_nrc = lax.all_to_all(slices_nrc, layout.axes, 0, 0, tiled=True)
    if layout.free:
        slices_nrc = lax.all_gather(slices_nrc, layout.free, tiled=True, to="invarying")
    return slices_nrc[:n]


def orthogonalize(x_mRC: jax.Array) -> jax.Array:
    """Return nearly U V^T of each matrix U S V^T, by five Newton-Schulz steps.

    Products are in the argument's dtype, sums in float32.
    """
    dtype = x_mRC.dtype

    product = partial(jnp.einsum, precision="highest" if dtype == jnp.float32 else None)
    identity_1RR = jnp.eye(x_mRC.shape[1], dtype=jnp.float32)[None]

    def step(x_mRC: jax.Array, factors: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = factors
        A_mRR = product("mRC,mSC->mRS", x_mRC, x_mRC)
        A2_mRR = product("mRS,mST->mRT", A_mRR, A_mRR)
        # a X + b A X + c A^2 X, as one small matrix times X: nothing is added to a large product.
        p_mRR = a * identity_1RR + b * A_mRR.astype(jnp.float32) + c * A2_mRR.astype(jnp.float32)
        return product("mRS,mSC->mRC", p_mRR.astype(dtype), x_mRC), None

    x32 = x_mRC.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x32 * x32, axis=(1, 2), keepdims=True))
    x_mRC = (x32 / (norm + EPSILON)).astype(dtype)
    factors = jnp.array(NEWTON_SCHULZ, jnp.float32)
    return lax.scan(step, x_mRC, factors, unroll=True)[0]  # a loop would copy x


def has_gradient(w: Weight, grad: jax.Array) -> jax.Array:
    """Whether any gradient of each matrix is nonzero.

    Orthogonalizing scales what remains of the momentum of an unused expert to a full update.

    Collectives  psum(axes that a matrix is sharded over) of one integer per matrix.
    """
    rows, columns = w.matrix
    nonzero = (grad != 0).any(axis=rows + columns, keepdims=True)
    axes = tuple(axis for dim in rows + columns for axis in w.dim_axes[dim])
    return lax.psum(nonzero.astype(jnp.int32), axes) > 0 if axes else nonzero


# --- arrays as stacks of slices -------------------------------------------------------------------


def matrix_sides(w: Weight) -> list[tuple[int, ...]]:
    """Return the dimensions of (rows, columns), swapped if there are globally fewer columns."""
    return sorted(w.matrix, key=lambda side: math.prod(w.shape[dim] for dim in side))


def side_sizes(w: Weight, shape: tuple[int, ...]) -> list[int]:
    """Return the number of (rows, columns), in a global shape or a slice's."""
    return [math.prod(shape[dim] for dim in side) for side in matrix_sides(w)]


def slice_layout(w: Weight, shape: tuple[int, ...]) -> SliceLayout:
    """Return the layout of a weight's matrices; `shape` is that of this rank's slice."""
    axes = [tuple(axis for dim in side for axis in w.dim_axes[dim]) for side in matrix_sides(w)]
    free = tuple(axis for axis in MESH_AXES[1:] if axis not in w.axes)
    return SliceLayout(*side_sizes(w, shape), *axes, free)


def to_slices(w: Weight, x: jax.Array) -> jax.Array:
    """Reshape this rank's slice of a weight to [n, r, c]."""
    return x.transpose(_order(w)).reshape(-1, *side_sizes(w, x.shape))


def from_slices(w: Weight, slices_nrc: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshape [n, r, c] to this rank's slice of a weight, of the given shape."""
    order = _order(w)
    return slices_nrc.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))


def _order(w: Weight) -> list[int]:
    """Return the batch dimensions, then those of rows, then of columns."""
    rows, columns = matrix_sides(w)
    dims = [dim % len(w.dim_axes) for dim in rows + columns]
    return [dim for dim in range(len(w.dim_axes)) if dim not in dims] + dims
