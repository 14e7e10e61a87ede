"""The model through the pipeline: loss and gradients, evaluation, logits, on global arrays.

`functions` gives the pipeline its three functions, in layers of model.py; `prepare` makes of this
rank's weights what they multiply by, and `finish` of its gradients those of the whole model. All
of it runs inside one `shard_map`, which `over_mesh` makes.

Letters as in model.py; M microbatches of a step, S positions asked for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import attention
import pipeline
import utils
import weights
from model import (
    At,
    Batch,
    Block,
    Ends,
    First,
    How,
    Transformer,
    chunked_loss,
    chunks,
    dense_layer,
    dense_layers,
    embed,
    gather_sequence,
    local_ids,
    log_loss,
    moe_layer,
    rms_norm,
    slice_logits,
)
from schedule import Schedule
from utils import BATCH_AXES, MESH_AXES, TOKEN_AXES, VOCABULARY_AXES, Config
from weights import vary

BATCH_SPEC = P(None, BATCH_AXES)

Policy = Callable[..., bool]  # of jax.checkpoint: whether a primitive's results are kept

# --- what the backward pass finds -----------------------------------------------------------------


# Primitives that multiply, meet other ranks or look up. All else is elementwise or a sum: to make
# it again takes the way through memory that to keep it would take, and no room.
COSTLY = frozenset([
    "all_gather", "all_to_all", "cumsum", "dot_general", "foreign_kernel", "gather", "pmax",
    "ppermute", "psum", "psum_invariant", "reduce_scatter", "scatter", "sort", "top_k",
])  # fmt: skip


def policy(remat: str) -> Policy:
    """What `train.remat` keeps of a layer for its backward pass, which makes the rest again."""
    if remat == "none":
        return _costly
    policies = jax.checkpoint_policies
    if remat == "full":
        return policies.nothing_saveable
    return policies.save_only_these_names(*remat.split(","))


def _costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """But for weights that are gathered in their layer, which are never kept, and what a rank has
    gathered of itself alone.
    """
    if primitive.name != "all_gather":
        return primitive.name in COSTLY
    axes = params["axis_name"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    return "fsdp" not in axes and params["axis_size"] > 1


def remat(config: Config) -> Callable[[Callable], Callable]:
    """The wrapper of a layer whose backward pass finds what `policy` keeps."""
    # Forward and backward run in different loops: there is nothing that could be merged by mistake.
    return partial(jax.checkpoint, policy=policy(config.train.remat), prevent_cse=False)


# --- the model as the pipeline runs it ------------------------------------------------------------


def functions(
    config: Config,
    declared: Transformer,
    how: How,
    step: jax.Array,
    token_scale: jax.Array,
    balance_scale: float,
    wrapped: Callable[[Callable], Callable] | None = None,
) -> pipeline.Functions:
    """The model as the pipeline's three functions, over weights from `prepare`.

    token_scale, balance_scale  what a token's cross-entropy and a sequence's balance loss are
                                multiplied by, so that losses add up.
    wrapped                     goes around each layer; `remat` if not given.
    """
    m, wrapped = config.model, wrapped or remat(config)

    def at(data: Batch, layer: jax.Array) -> At:
        return At(step, data.number, layer)

    def segments(data: Batch) -> jax.Array | None:
        return data.segments if config.data.segments else None

    def gathered(declared: Any, w: Any) -> Any:
        return weights.gather(declared, w) if config.fsdp.gather == "layer" else w

    def ready(layer: Callable, declared: Any) -> Callable:
        """`layer` that gathers its weights, and keeps what the remat policy says."""
        return wrapped(lambda w, *args, **options: layer(gathered(declared, w), *args, **options))

    def first(ends: Ends, data: Batch) -> jax.Array:
        w = ends.first
        x_btD = embed(w.embedding, data.tokens)
        if w.prefix is not None:
            run = ready(partial(dense_layer, how=how), declared.first.prefix)
            start = at(data, jnp.int32(0))
            x_btD = dense_layers(w.prefix, vary(x_btD), segments(data), start, run)
        return x_btD

    def block(w: Block, data: Batch, number: jax.Array, x_btD: jax.Array) -> tuple[tuple, Any]:
        layer, routing = m.prefix_layers + number * (m.dense_layers + m.moe_layers), None
        if w.dense is not None:
            run = ready(partial(dense_layer, how=how), declared.blocks.dense)
            x_btD = dense_layers(w.dense, x_btD, segments(data), at(data, layer), run)
        if w.moe is not None:
            run = ready(partial(moe_layer, how=how), declared.blocks.moe)
            here = at(data, layer + m.dense_layers)
            x_btD, routing = run(w.moe, x_btD, segments(data), at=here)
        loss = balance_scale * routing.part_balance if routing else jnp.zeros(())
        return (x_btD, vary(loss)), routing

    return pipeline.Functions(first, block, partial(last_loss, config, token_scale))


def last_loss(
    config: Config, token_scale: jax.Array, ends: Ends, data: Batch, y_btD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A microbatch's loss, of what the last block made, and its sums: see chunked_loss."""
    h_bTD = final_hidden(config, ends, y_btD)
    n = data.targets.size
    c = chunks(n, config.train.loss_chunk_tokens)
    # h differs between pipeline ranks from here on, by type: each multiplies it by its slice of the
    # vocabulary.
    h_cnD = vary(h_bTD).reshape(c, n // c, -1)
    targets_cn, weights_cn = (a.reshape(c, n // c) for a in (data.targets, data.loss_weights))
    options = config.model.vocabulary, config.model.z_loss
    return chunked_loss(options, ends.output, h_cnD, targets_cn, weights_cn * token_scale)


@jax.named_scope("loss")
def final_hidden(config: Config, ends: Ends, y_btD: jax.Array) -> jax.Array:
    """What the output matrix multiplies: [b, T, D].  Sends all_gather(tensor) of it."""
    return gather_sequence(rms_norm(y_btD, ends.last.norm, config.model.norm_epsilon), "input")


# --- weights as the functions want them, and gradients back ---------------------------------------


def prepare(config: Config, declared: Transformer, w: Transformer) -> pipeline.Parameters:
    """This rank's weights for all microbatches of a step: cast, gathered over fsdp, and typed as
    differing along every axis.

    Made varying here, replicated weights have their gradients added up locally, and reduced once,
    in `finish`. With `fsdp.gather = "layer"` blocks and prefix stay cut, and are gathered in their
    layers; embedding and output never are.
    """
    w = weights.cast(declared, w, jnp.dtype(config.model.compute_dtype))
    if config.fsdp.gather == "step":
        w = weights.gather(declared, w)
    else:
        embedding = weights.gather(declared.first.embedding, w.first.embedding)
        w = w.replace(
            first=w.first.replace(embedding=embedding), last=weights.gather(declared.last, w.last)
        )
    w = vary(w)
    blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), w.blocks)
    return pipeline.Parameters(Ends(w.first, w.last), blocks)


def finish(config: Config, declared: Transformer, grads: pipeline.Parameters) -> Transformer:
    """This rank's part of the gradients -> the whole model's, laid out as the weights."""
    stack = (config.mesh.virtual, 1, -1)  # of one pipeline rank
    first, last = grads.ends
    blocks = jax.tree.map(lambda g: g.reshape(*stack, *g.shape[1:]), grads.blocks)
    per_step = config.fsdp.gather == "step"
    reduce = weights.reduce_gradients
    return Transformer(
        first=First(
            prefix=reduce(declared.first.prefix, first.prefix, gathered=per_step),
            embedding=reduce(declared.first.embedding, first.embedding, gathered=True),
        ),
        blocks=reduce(declared.blocks, blocks, gathered=per_step),
        last=reduce(declared.last, last, gathered=True),
    )


# --- what a pass tells ----------------------------------------------------------------------------


@flax.struct.dataclass
class Stats:
    """What a pass tells, the same on every rank: losses as added (float32), and routing in
    integers.
    """

    cross_entropy: jax.Array
    z: jax.Array
    balance: jax.Array
    dropped: jax.Array  # choices of an expert that had no room
    # [virtual, stage, block, E], before any is dropped; None without experts
    tokens_per_expert: jax.Array | None

    @property
    def loss(self) -> jax.Array:
        return self.cross_entropy + self.z + self.balance


def stats_specs(m: utils.Model) -> Stats:
    return Stats(P(), P(), P(), P(), P(None, "pipeline") if m.moe_layers else None)


def summarize(config: Config, sums: jax.Array, routing: Any, balance_scale: float) -> Stats:
    """This rank's sums -> the step's.  Sends psums of scalars and of [blocks, E] integers."""
    cross_entropy, log_z = lax.psum(sums, BATCH_AXES)
    stats = Stats(
        cross_entropy, config.model.z_loss * log_z, jnp.zeros(()), jnp.zeros((), jnp.int32), None
    )
    if routing is None:
        return stats
    count = routing.tokens_per_expert.reshape(config.mesh.virtual, 1, -1, config.model.experts)
    return stats.replace(
        balance=balance_scale * lax.psum(routing.part_balance.sum(), MESH_AXES),
        dropped=lax.psum(routing.dropped.sum(), MESH_AXES),
        tokens_per_expert=lax.psum(count, TOKEN_AXES),
    )


def scales(data: Batch, balance_loss: float) -> tuple[jax.Array, float]:
    """What a token's cross-entropy and a sequence's balance loss count for in the step's mean."""
    total = lax.psum(data.loss_weights.sum(), BATCH_AXES)
    sequences = data.tokens.shape[0] * data.tokens.shape[1] * lax.axis_size(BATCH_AXES)
    return 1 / jnp.maximum(total, 1e-9), balance_loss / sequences


def numbered(data: Batch) -> Batch:
    return data.replace(number=jnp.arange(data.tokens.shape[0], dtype=jnp.int32))


# --- over the mesh --------------------------------------------------------------------------------


def platform(mesh: Mesh) -> str:
    """Of devices that are here or are compiled for, as of chips.platform_of."""
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return device.platform
    return f"gpu{device.compute_capability.partition('.')[0]}"


def schedule_of(config: Config) -> Schedule:
    return Schedule(config.mesh.pipeline, config.mesh.virtual, config.train.microbatches)


def how_of(config: Config, mesh: Mesh, capacity_factor: float | None, dropout: float = 0.0) -> How:
    kernel = attention.chosen(config, platform(mesh))
    return How(config.model, config.train.seed, capacity_factor, dropout, kernel)


def over_mesh(
    declared: Transformer, mesh: Any, local: Callable, *in_specs: P, out: Any
) -> Callable:
    """local(weights, batch, *rest) of a rank -> the same on global arrays."""
    specs = (weights.specs(declared), BATCH_SPEC, *in_specs)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=True)


def loss_and_gradients(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch, jax.Array], tuple[Transformer, Stats]]:
    """(weights, batch [M, B, T], step) -> gradients of the step's loss, float32, laid out as the
    weights; Stats.
    """
    m = config.model
    how = how_of(config, mesh, m.capacity_factor, m.dropout)

    def local(w: Transformer, data: Batch, step: jax.Array) -> tuple[Transformer, Stats]:
        data = numbered(data)
        token_scale, balance_scale = scales(data, m.balance_loss)
        run = functions(config, declared, how, step, token_scale, balance_scale)
        w = prepare(config, declared, w)
        grads, routing, sums = pipeline.forward_backward(run, w, data, schedule_of(config))
        return finish(config, declared, grads), summarize(config, sums, routing, balance_scale)

    out = (weights.specs(declared), stats_specs(m))
    return over_mesh(declared, mesh, local, P(), out=out)


def evaluate(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch], Stats]:
    """(weights, batch [M, B, T]) -> Stats; `balance` is the mean over layers and sequences, 1 where
    every expert has as much.
    """
    m = config.model
    how = how_of(config, mesh, m.eval_capacity_factor)

    def local(w: Transformer, data: Batch) -> Stats:
        data = numbered(data)
        token_scale, balance_scale = scales(data, 1 / max(1, m.blocks * m.moe_layers))
        run = functions(config, declared, how, jnp.int32(0), token_scale, balance_scale)
        w = prepare(config, declared, w)
        routing, sums = pipeline.forward(run, w, data, schedule_of(config), BATCH_AXES)
        return summarize(config, sums.sum(0), routing, balance_scale)

    return over_mesh(declared, mesh, local, out=stats_specs(m))


def after_layers(
    config: Config, declared: Transformer, mesh: Mesh, make: Callable, axes: tuple[str, ...]
) -> Callable[[Transformer, Batch], jax.Array]:
    """(weights, batch) of a rank -> [M, ...] make(ends, data, h_bTD) of each microbatch; nothing is
    dropped.

    axes  of the mesh along which what is made differs.
    """
    how = how_of(config, mesh, None)

    def local(w: Transformer, data: Batch) -> jax.Array:
        def last(ends: Ends, data: Batch, y_btD: jax.Array) -> tuple[None, jax.Array]:
            return None, make(ends, data, final_hidden(config, ends, y_btD))

        run = functions(config, declared, how, jnp.int32(0), jnp.float32(1), 0.0)
        run, w = run._replace(last=last), prepare(config, declared, w)
        return pipeline.forward(run, w, numbered(data), schedule_of(config), axes)[1]

    return local


def token_losses(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch], jax.Array]:
    """(weights, batch [M, B, T]) -> [M, B, T, 2] float32: cross-entropy of each target, and 1 where
    no token is likelier; nothing is dropped.
    """

    def of_chunk(ends: Ends, h_nD: jax.Array, targets_n: jax.Array) -> jax.Array:
        args = ends.output, h_nD, targets_n, config.model.vocabulary
        return jnp.stack([log_loss(*args)[0], is_likeliest(*args).astype(jnp.float32)], -1)

    def make(ends: Ends, data: Batch, h_bTD: jax.Array) -> jax.Array:
        n = data.targets.size
        c = chunks(n, config.train.loss_chunk_tokens)
        parts = vary(h_bTD).reshape(c, n // c, -1), data.targets.reshape(c, n // c)
        found = lax.map(lambda part: of_chunk(ends, *part), parts)
        return found.reshape(*data.targets.shape, 2)

    local = after_layers(config, declared, mesh, make, BATCH_AXES)
    return over_mesh(declared, mesh, local, out=BATCH_SPEC)


def is_likeliest(
    table_vD: jax.Array, h_nD: jax.Array, targets_n: jax.Array, vocabulary: int
) -> jax.Array:
    """Whether no logit is above the target's, of each token [n].  Sends two pmax of [n]."""
    logits_nv = slice_logits(table_vD, h_nD, vocabulary)
    is_target_nv = local_ids(table_vD)[None, :] == targets_n[:, None]
    picked_n = lax.pmax(jnp.where(is_target_nv, logits_nv, -jnp.inf).max(-1), VOCABULARY_AXES)
    return picked_n == lax.pmax(logits_nv.max(-1), VOCABULARY_AXES)


def logits(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch, jax.Array | None], jax.Array]:
    """(weights, batch [M, B, T], positions [M, B, S], all if not given) -> [M, B, S, V] float32
    logits of what follows each position; nothing is dropped.

    The batch's targets and loss weights are not looked at. Those of pads of the vocabulary are
    -inf.
    """

    def make(ends: Ends, data: Batch, h_bTD: jax.Array) -> jax.Array:
        h_bSD = jnp.take_along_axis(h_bTD, data.targets[..., None], axis=1)
        b, S, D = h_bSD.shape
        part = slice_logits(ends.output, h_bSD.reshape(b * S, D), config.model.vocabulary)
        return part.reshape(b, S, -1)

    layers = after_layers(config, declared, mesh, make, MESH_AXES)

    def local(w: Transformer, data: Batch, positions_MbS: jax.Array) -> jax.Array:
        return layers(w, data.replace(targets=positions_MbS))

    out = P(None, BATCH_AXES, None, VOCABULARY_AXES)
    run = over_mesh(declared, mesh, local, BATCH_SPEC, out=out)

    def called(w: Transformer, data: Batch, positions_MBS: jax.Array | None = None) -> jax.Array:
        if positions_MBS is None:
            every = jnp.arange(data.tokens.shape[-1], dtype=jnp.int32)
            positions_MBS = jnp.broadcast_to(every, data.tokens.shape)
        return run(w, data, positions_MBS)

    return called
