"""The model through the pipeline: loss and gradients, evaluation, token losses, on global arrays.

`pipeline_functions` builds the three functions that the pipeline runs from the layers of model.py.
`gather_params` turns this rank's weights into the ones that layers use, and `reduce_gradients`
turns its gradients into those of the model. All of it runs inside one `shard_map` (`over_mesh`).

Letters as in model.py and, in the loss, vocabulary.py.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import context_parallel
import float8
import hardware
import model
import one_stage
import pipeline
import utils
import vocabulary
import weights
from attention import Context
from device_kernels.choice import choose_experts_kernel, choose_kernel, fuses_loss
from model import (
    Batch,
    Block,
    EmbeddingAndHead,
    ForwardOptions,
    LayerPosition,
    Transformer,
)
from runtime.collective_order import after, in_turn
from schedule import Schedule
from utils import (
    BATCH_AXES,
    DATA_AXES,
    MESH_AXES,
    TOKEN_AXES,
    VOCABULARY_AXES,
    WEIGHT_AXES,
    Config,
    ConfigError,
    LayerRun,
)
from weights import reduced, vary

BATCH_SPEC = P(None, BATCH_AXES)

Policy = Callable[..., bool]  # of jax.checkpoint: whether the results of a primitive are saved

# --- rematerialization ----------------------------------------------------------------------------


# Primitives that multiply, communicate or look up. All others are elementwise or sums: recomputing
# their results moves as many bytes as saving them, and takes no memory.
COSTLY = frozenset([
    "all_gather", "all_to_all", "cumsum", "dot_general", "foreign_kernel", "gather", "pmax",
    "ppermute", "psum", "psum_invariant", "reduce_scatter", "scatter", "sort", "top_k",
])  # fmt: skip


def policy(remat: str) -> Policy:
    """Return the policy of `train.remat`: the residuals of a layer that are not recomputed."""
    if remat == "none":
        return _costly
    policies = jax.checkpoint_policies
    if remat == "full":
        return policies.nothing_saveable
    return policies.save_only_these_names(*remat.split(","))


def saved_for_weights(remat: str) -> Policy:
    """Return the policy of a split backward pass: what it saves for the gradients of matrices.

    From this and the residuals, their inputs are elementwise operations and sums.
    """
    names = () if remat == "none" else utils.REMAT_NAMES
    return jax.checkpoint_policies.save_only_these_names(weights.PRODUCT_GRADIENT, *names)


def _costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """Save results of COSTLY primitives, but no gather of weights or context, or over one rank.

    What float8.py quantizes is saved as well. It takes less memory than its source.
    """
    if primitive.name == "name":
        return params["name"] == float8.RESIDUAL
    if primitive.name != "all_gather":
        return primitive.name in COSTLY
    axes = params["axis_name"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    return not {*WEIGHT_AXES} & {*axes} and params["axis_size"] > 1


def remat(config: Config, unrolled: bool) -> Callable[[Callable, LayerRun], Callable]:
    """Return a wrapper that applies `policy` to a layer."""
    # Scanned layers run forward and backward in different loops, so XLA cannot undo the
    # recomputation. Unrolled ones share a loop.
    prevent_cse, saved = unrolled and recomputes(config), policy(config.train.remat)
    return lambda layer, run: jax.checkpoint(layer, policy=saved, prevent_cse=prevent_cse)


def recomputes(config: Config) -> bool:
    """Return whether the backward pass repeats more than elementwise operations and sums."""
    gathers = config.fsdp.gather == "layer" or config.mesh.context > 1
    return config.train.remat != "none" or gathers


# --- the functions that the pipeline runs ---------------------------------------------------------


def pipeline_functions(
    config: Config,
    declared: Transformer,
    options: ForwardOptions,
    step: jax.Array,
    factors: tuple[jax.Array, float],
    wrap: Callable[[Callable, LayerRun], Callable] = lambda layer, run: layer,
) -> pipeline.Functions:
    """Return the model as the pipeline's three functions, over weights from `gather_params`.

    factors  on a token's cross-entropy and on a sequence's balance loss, as from `scales`.
    wrap     wrapper of each layer, such as `remat`.
    """
    m, (token_scale, balance_scale) = config.model, factors

    def layer_of(declared: Any, data: Batch, run: LayerRun) -> Callable:
        """Return (w, x, number) -> model.layer under `wrap`, which may gather weights."""

        def layer(w: Any, x_btD: jax.Array, segments: jax.Array, position: LayerPosition) -> Any:
            w = weights.constant(declared, w)
            if config.fsdp.gather == "layer":
                w, x_btD = in_turn(w, x_btD) if options.ordered else (w, x_btD)
                w = weights.gather(declared, w)
            context = context_of(config, segments)  # here, as it would be a residual otherwise
            return model.layer(w, x_btD, context, options, position, run)

        wrapped = wrap(layer, run)

        def at(w: Any, x_btD: jax.Array, number: jax.Array) -> Any:
            return wrapped(w, x_btD, data.segments, LayerPosition(step, data.microbatch, number))

        return at

    def first(outer: EmbeddingAndHead, data: Batch) -> jax.Array:
        w = outer.first
        embedding = weights.constant(declared.first.embedding, w.embedding)
        x_btD = reduced(vocabulary.embed(embedding, data.tokens), "pipeline")
        x_btD = vocabulary.scaled(x_btD, m.embedding_multiplier)
        for run in m.prefix:
            layer = layer_of(declared.first.prefix, data, run)
            x_btD, _ = model.stacked_layers(w.prefix, vary(x_btD), jnp.int32(0), layer)
        return x_btD

    def block(w: Block, data: Batch, number: jax.Array, x_btD: jax.Array) -> tuple[tuple, Any]:
        layers = {run.name: layer_of(declared.blocks[run.name], data, run) for run in m.runs}
        x_btD, _, routing = model.block(w, x_btD, number, m, layers)
        loss = balance_scale * routing.partial_balance.sum() if routing else jnp.zeros(())
        return (x_btD, vary(loss)), routing

    declared_outer = EmbeddingAndHead(declared.first, declared.last)
    trained = declared_outer.output.trained
    of_loss = vocabulary.LossOptions(m.vocab_size, m.z_loss, options.fused_loss, trained)

    def last(outer: EmbeddingAndHead, data: Batch, y_btD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the loss of the last block's output, and its sums: vocabulary.chunked_loss."""
        outer = outer._replace(last=weights.constant(declared.last, outer.last))
        h_bTD = final_hidden(config, outer, y_btD)
        # Varying over pipeline from here on: each rank multiplies h by its slice of the vocabulary.
        h_nD = vary(h_bTD).reshape(data.targets.size, -1)
        inputs_n = h_nD, data.targets.reshape(-1), data.loss_weights.reshape(-1) * token_scale
        chunks_cn = vocabulary.in_chunks(inputs_n, config.train.loss_chunk_tokens)
        return vocabulary.chunked_loss(of_loss, outer.output, *chunks_cn)

    both = pipeline.Parameters(declared_outer, declared.blocks)
    return pipeline.Functions(first, block, last, both, saved_for_weights(config.train.remat))


def context_of(config: Config, segments_bS: jax.Array) -> Context:
    """Return positions and segments as `config.data` has them.

    segments_bS  index of each token's document within the window, of all ranks of context.
    """
    number_1S = jnp.arange(segments_bS.shape[1], dtype=jnp.int32)[None]
    positions = number_1S
    if config.data.positions == "document":
        is_first = segments_bS != jnp.roll(segments_bS, 1, axis=1)
        positions = number_1S - lax.cummax(jnp.where(is_first, number_1S, 0), axis=1)
    places = context_parallel.places(segments_bS.shape[1])
    segments = segments_bS if config.data.segments else None
    return Context(context_parallel.own(positions, 1), segments, places)


@jax.named_scope("loss")
def final_hidden(config: Config, outer: EmbeddingAndHead, y_btD: jax.Array) -> jax.Array:
    """Return the input [b, T, D] of the output matrix.  Collectives: all_gather(tensor) of it."""
    y_btD = reduced(y_btD, "pipeline")  # before the norm's weight, which varies
    h_btD = weights.rms_norm(y_btD, outer.last.norm, config.model.rms_norm_eps)
    return model.gather_sequence(h_btD, "input")


# --- weights and gradients ------------------------------------------------------------------------


def gather_params(
    config: Config, declared: Transformer, w: Transformer, ordered: bool = False
) -> pipeline.Parameters:
    """Cast a rank's weights, gather them over fsdp, and type them as varying along every axis.

    Because replicated weights are varying here, their gradients accumulate locally and are reduced
    once, in `reduce_gradients`. With `fsdp.gather = "layer"`, blocks and prefix stay sharded and
    each layer gathers its own. Output and embedding are gathered in any case.

    ordered  whether the embedding, which layers need first, comes after all other weights.

    Collectives  as weights.gather.
    """
    w = weights.cast(declared, w, jnp.dtype(config.model.compute_dtype))
    if config.fsdp.gather == "step":
        w = weights.gather(declared, w)
    else:
        embedding = weights.gather(declared.first.embedding, w.first.embedding)
        first = w.first.replace(embedding=embedding)
        w = w.replace(first=first, last=weights.gather(declared.last, w.last))
    if ordered:
        embedding = after(w.first.embedding, (w.first.prefix, w.blocks, w.last))
        w = w.replace(first=w.first.replace(embedding=embedding))
    w = vary(w)
    blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), w.blocks)
    return pipeline.Parameters(EmbeddingAndHead(w.first, w.last), blocks)


def reduce_gradients(
    config: Config, declared: Transformer, grads: pipeline.Parameters
) -> Transformer:
    """Reduce partial gradients over ranks, to the layout of the weights that are trained."""
    declared = weights.trained(declared, declared)
    stack = (config.mesh.virtual, 1, -1)  # [virtual, stage, block] of one pipeline rank
    first, last = grads.outer
    blocks = jax.tree.map(lambda g: g.reshape(*stack, *g.shape[1:]), grads.blocks)
    per_step = config.fsdp.gather == "step"
    reduce = weights.reduce_gradients
    return Transformer(
        first=model.InputLayers(
            prefix=reduce(declared.first.prefix, first.prefix, gathered=per_step),
            embedding=reduce(declared.first.embedding, first.embedding, gathered=True),
        ),
        blocks=reduce(declared.blocks, blocks, gathered=per_step),
        last=reduce(declared.last, last, gathered=True),
    )


# --- statistics -----------------------------------------------------------------------------------


@flax.struct.dataclass
class Stats:
    """Losses (float32) and routing counts (int32) of a pass, the same on every rank."""

    cross_entropy: jax.Array
    z: jax.Array
    balance: jax.Array
    dropped: jax.Array  # choices beyond an expert's capacity
    # [virtual, stage, layer with experts, E], before any is dropped; None in a dense model
    tokens_per_expert: jax.Array | None

    @property
    def loss(self) -> jax.Array:
        return self.cross_entropy + self.z + self.balance


STATS_SPECS = Stats(P(), P(), P(), P(), P(None, "pipeline"))


def summarize(config: Config, sums: jax.Array, routing: Any, balance_scale: float) -> Stats:
    """Reduce this rank's sums.  Collectives: psums of scalars and of [blocks, E] integers."""
    cross_entropy_sum, log_z_sum = lax.psum(sums, DATA_AXES)
    z = config.model.z_loss * log_z_sum
    stats = Stats(cross_entropy_sum, z, jnp.zeros(()), jnp.zeros((), jnp.int32), None)
    if routing is None:
        return stats
    count = routing.tokens_per_expert.reshape(
        config.mesh.virtual, 1, -1, config.model.n_routed_experts
    )
    return stats.replace(
        balance=balance_scale * lax.psum(routing.partial_balance.sum(), MESH_AXES),
        dropped=lax.psum(routing.dropped.sum(), MESH_AXES),
        tokens_per_expert=lax.psum(count, TOKEN_AXES),
    )


def scales(data: Batch, balance_loss: float) -> tuple[jax.Array, float]:
    """Return the factors on a token's cross-entropy and a sequence's balance loss in the means."""
    total = lax.psum(data.loss_weights.sum(), BATCH_AXES)
    sequences = data.tokens.shape[0] * data.tokens.shape[1] * lax.axis_size(BATCH_AXES)
    return 1 / jnp.maximum(total, 1e-9), balance_loss / sequences


def of_rank(data: Batch) -> Batch:
    """Return the positions of this rank of context, and the index of each microbatch.

    Segments stay complete, as those of keys are needed too.
    """
    names = "tokens", "targets", "loss_weights"
    parts = {name: context_parallel.own(getattr(data, name), 2) for name in names}
    return data.replace(**parts, microbatch=jnp.arange(data.tokens.shape[0], dtype=jnp.int32))


# --- over the mesh --------------------------------------------------------------------------------


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """Return the shape and layout of a step's batch."""
    t = config.train
    shape = (t.microbatches, t.global_batch_size // t.microbatches, t.seq_len)
    layout = NamedSharding(mesh, BATCH_SPEC)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout)
    real = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)
    return Batch(tokens=ids, targets=ids, loss_weights=real, segments=ids)


def platform(mesh: Mesh) -> str:
    """Return the platform of present or target devices, as hardware.platform_of names it."""
    return hardware.platform_of_device(mesh.devices.flat[0])


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of the pipeline.

    Raises  ConfigError if unrolled layers are selected for a pipeline.
    """
    split = config.pipeline.split_backward
    schedule = Schedule(config.mesh.pipeline, config.mesh.virtual, config.train.microbatches, split)
    if config.train.layers == "unrolled" and not schedule.single_stage:
        raise ConfigError(
            "--train.layers unrolled needs a single stage. Use --mesh.pipeline 1 --mesh.virtual 1, "
            "or --train.layers auto."
        )
    return schedule


def check_split(config: Config) -> None:
    """Raise ConfigError if the backward pass is to be split, and cannot be."""
    m = config.model
    dropless = bool(m.moe_layers) and not m.capacity_factor
    for found, problem, fix in (
        (config.mesh.pipeline == 1, "shortens the bubble of a pipeline", "mesh.pipeline 2 or more"),
        (config.train.remat == "full", "keeps what remat recomputes", "train.remat none or names"),
        (config.mesh.context > 1, "repeats the gather of keys", "mesh.context 1"),
        (config.fsdp.gather == "layer", "delays what a layer reduces", "fsdp.gather step"),
        (dropless, "cannot divide the loop of dropless experts", "model.capacity_factor 1.5"),
        (m.matmul_dtype == "float8", "has no FP8", "model.matmul_dtype compute"),
    ):
        if found and config.pipeline.split_backward:
            raise ConfigError(f"--pipeline.split_backward {problem}. Use --{fix}, or omit it.")


def is_unrolled(config: Config, platform: str) -> bool:
    """Return whether gradients are those of one_stage.py, with the layers unrolled."""
    layers, single = config.train.layers, schedule_of(config).single_stage
    # XLA for CPUs would compute once what the backward pass of an unrolled layer repeats.
    auto = platform.startswith("gpu") or (platform == "cpu" and not recomputes(config))
    # XLA would copy the frozen weights of all layers out of their stacks, at once.
    auto = auto and not config.lora.rank
    return single and (layers == "unrolled" or (layers == "auto" and auto))


def forward_options(
    config: Config, mesh: Mesh, capacity_factor: float, dropout: float = 0.0
) -> ForwardOptions:
    m, seed, on = config.model, config.train.seed, platform(mesh)
    kernels = choose_kernel(config, on), choose_experts_kernel(config, on), fuses_loss(config, on)
    return ForwardOptions(m, seed, capacity_factor, dropout, *kernels, ordered=on == "cpu")


def over_mesh(
    declared: Transformer, mesh: Any, local: Callable, *in_specs: P, out: Any
) -> Callable:
    """Turn local(weights, batch, *rest), of one rank, into a function of global arrays."""
    specs = (weights.specs(declared), BATCH_SPEC, *in_specs)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=True)


def loss_and_gradients(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch, jax.Array], tuple[Transformer, Stats]]:
    """Return (weights, batch [M, B, T], step) -> (gradients, Stats).

    Gradients are of the step's loss, float32, in the layout of the weights, and None for weights
    that are not trained.
    """
    check_split(config)
    m, chip = config.model, hardware.chip_of_kind(mesh.devices.flat[0].device_kind)
    options = forward_options(config, mesh, m.capacity_factor, m.dropout)
    options = options._replace(quantized=hardware.uses_float8(config, platform(mesh), chip))
    unrolled = is_unrolled(config, platform(mesh))

    def local(w: Transformer, data: Batch, step: jax.Array) -> tuple[Transformer, Stats]:
        factors = _, balance_scale = scales(data, m.aux_loss_alpha)
        data = of_rank(data)
        wrap = remat(config, unrolled)
        run = pipeline_functions(config, declared, options, step, factors, wrap)
        w = gather_params(config, declared, w, options.ordered)
        if unrolled:
            grads, routing, sums = one_stage.forward_backward(run, w, data)
        else:
            grads, routing, sums = pipeline.forward_backward(run, w, data, schedule_of(config))
        grads, routing = after((grads, routing), grads) if options.ordered else (grads, routing)
        grads = reduce_gradients(config, declared, grads)
        return grads, summarize(config, sums, routing, balance_scale)

    specs = weights.specs(weights.trained(declared, declared))
    return over_mesh(declared, mesh, local, P(), out=(specs, STATS_SPECS))


def evaluate(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch], Stats]:
    """Return (weights, batch [M, B, T]) -> Stats.

    `balance` is the mean over layers and sequences: 1 if all experts have the same load.
    """
    m = config.model
    options = forward_options(config, mesh, m.eval_capacity_factor)

    def local(w: Transformer, data: Batch) -> Stats:
        factors = _, balance_scale = scales(data, 1 / max(1, m.blocks * m.moe_layers))
        run = pipeline_functions(config, declared, options, jnp.int32(0), factors)
        w = gather_params(config, declared, w, options.ordered)
        routing, sums = pipeline.forward(run, w, of_rank(data), schedule_of(config))
        routing = after(routing, sums) if options.ordered else routing
        return summarize(config, sums.sum(0), routing, balance_scale)

    return over_mesh(declared, mesh, local, out=STATS_SPECS)


def after_layers(
    config: Config, declared: Transformer, mesh: Mesh, make: Callable
) -> Callable[[Transformer, Batch], jax.Array]:
    """Return (weights, batch [M, B, T]) -> [M, B, T, ...] make(outer, data, h_bTD).

    No token is dropped. The result of `make` varies along DATA_AXES alone.
    """
    options = forward_options(config, mesh, 0.0)

    def local(w: Transformer, data: Batch) -> jax.Array:
        def last(outer: EmbeddingAndHead, data: Batch, y_btD: jax.Array) -> tuple[None, jax.Array]:
            return None, make(outer, data, final_hidden(config, outer, y_btD))

        run = pipeline_functions(config, declared, options, jnp.int32(0), (jnp.float32(1), 0.0))
        run, w = run._replace(last=last), gather_params(config, declared, w, options.ordered)
        _, made = pipeline.forward(run, w, of_rank(data), schedule_of(config))
        return context_parallel.complete(made, 2)

    return over_mesh(declared, mesh, local, out=BATCH_SPEC)


def token_losses(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[Transformer, Batch], jax.Array]:
    """Return (weights, batch [M, B, T]) -> [M, B, T, 2] float32, dropping no token.

    For each target: its cross-entropy, and 1 if no token is more likely, else 0.
    """

    def of_chunk(table_vD: jax.Array, h_nD: jax.Array, targets_n: jax.Array) -> jax.Array:
        logits_nv = vocabulary.local_logits(table_vD, h_nD, config.model.vocab_size)
        target_n, logsumexp_n = vocabulary.target_logits(logits_nv, targets_n)
        is_likeliest_n = target_n == lax.pmax(logits_nv.max(-1), VOCABULARY_AXES)
        return jnp.stack([logsumexp_n - target_n, is_likeliest_n.astype(jnp.float32)], -1)

    def make(outer: EmbeddingAndHead, data: Batch, h_bTD: jax.Array) -> jax.Array:
        n = data.targets.size
        inputs_n = vary(h_bTD).reshape(n, -1), data.targets.reshape(-1)
        chunks_cn = vocabulary.in_chunks(inputs_n, config.train.loss_chunk_tokens)
        losses_cn = lax.map(lambda chunk: of_chunk(outer.output, *chunk), chunks_cn)
        return losses_cn.reshape(-1, 2)[:n].reshape(*data.targets.shape, 2)

    return after_layers(config, declared, mesh, make)
