"""The sharded model against the one-device reference, and the properties of its layers.

A step takes seconds to compile, so each is compiled once (common.step_of) for several tests. Other
meshes and models are in system/test_models.py. Letters as in model.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dropless
import hf_case
import model
import reference
import sharded_model
import utils
import vocabulary
import weights
from common import (
    batch_of,
    check_routing,
    check_step,
    config_of,
    like,
    mesh_of,
    on_mesh,
    put,
    reference_step,
    relative_error,
    step_of,
    transformer_of,
)
from planning import hlo, trace

BOUND = 2e-5  # relative, float32
# Together the two cases cover the options of latent attention, of experts with a capacity and of a
# step. Chunks of the loss are not all full in the first.
CASES = {
    "virtual": config_of(
        (2, 2, 2), virtual=2, segments=True,
        train={"microbatches": 2, "remat": "attention,expert_hidden", "loss_chunk_tokens": 15},
        q_lora_rank=24, prefix_layers=1, n_shared_experts=2, z_loss=1e-3, n_group=2,
        latent_rms_norm_eps=0.1, no_rope_layer_interval=2, **hf_case.YARN,
    ),
    "layer": config_of(
        (2, 2, 2), gather="layer",
        train={"microbatches": 3, "global_batch_size": 12, "remat": "full"},
        prefix_layers=1, dense_layers=0, tie_word_embeddings=False, experts_layout="sharded",
        scoring_func="softmax", norm_topk_prob=False, n_shared_experts=0, n_group=4, topk_group=2,
        topk_method="group_limited_greedy",
    ),
}  # fmt: skip


CASES["virtual"] = utils.changed(CASES["virtual"], {"data.positions": "document"})


@functools.cache
def tree_of(fields):
    """Return weights with norms other than 1 and biases other than 0."""
    return hf_case.weights(fields, seed=3)


def test_positions_are_those_in_the_window_or_in_the_document():
    segments = jnp.asarray([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]], jnp.int32)

    def context_of(name):
        run = jax.shard_map(
            lambda segments: sharded_model.context_of(CASES[name], segments),
            mesh=mesh_of(config_of()), in_specs=P(), out_specs=P(),
        )  # fmt: skip
        return run(segments)

    by_window = context_of("layer")
    assert by_window.segments is None
    np.testing.assert_array_equal(by_window.positions, [range(5)])
    by_document = context_of("virtual")
    np.testing.assert_array_equal(by_document.segments, segments)
    expected = [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2], range(5)]
    np.testing.assert_array_equal(by_document.positions, [[*row] for row in expected])


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_routing_match_the_one_device_reference(name):
    check_step(CASES[name], tree_of(CASES[name].model), BOUND)


def test_a_step_on_zeros_is_finite_forward_and_backward():
    config = CASES["layer"]
    mesh, tree = mesh_of(config), tree_of(config.model)
    tree = tree | {"embedding": np.zeros_like(tree["embedding"])}
    data = on_mesh(config, mesh, batch_of(config))
    results = step_of(config)(transformer_of(config, mesh, tree), data)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def test_evaluation_matches_the_reference_without_dropout_and_with_its_own_capacity():
    case = CASES["virtual"]
    fields = dataclasses.replace(case.model, dropout=0.4, capacity_factor=0.5)
    config, mesh = dataclasses.replace(case, model=fields), mesh_of(case)
    tree, batch = tree_of(case.model), batch_of(case)
    run = jax.jit(sharded_model.evaluate(config, model.declare(config), mesh))
    stats = run(transformer_of(case, mesh, tree), on_mesh(case, mesh, batch))
    (_, parts), _ = reference_step(tree, batch, case.model)
    assert relative_error(stats.cross_entropy, parts["cross_entropy"]) <= BOUND
    assert relative_error(stats.z, parts["z"]) <= BOUND
    # 1 at equal load: neither weighted nor summed over layers.
    mean = parts["balance"] / case.model.aux_loss_alpha / case.model.blocks
    assert relative_error(stats.balance, mean) <= BOUND
    check_routing(case, stats, parts)


# --- programs ----------------------------------------------------------------------------------


def arguments(config):
    """Return abstract weights and batch of a config."""
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), model.declare(config))
    return w, sharded_model.abstract_batch(config, mesh_of(config))


def logit_buffers(config):
    """Return the rows of each float buffer of the step that has the vocabulary as a dimension."""
    program = step_of(config).lower(*arguments(config)).as_text("hlo")
    shapes = re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", program)
    shapes = [tuple(map(int, dims.split(","))) for dims in shapes]
    return {int(np.prod(shape)) // 512 for shape in shapes if 512 in shape}


def test_logits_of_a_chunk_of_tokens_exist_at_a_time():
    config = config_of()
    # Rows of the embedding; those of the largest buffer of logits.
    allowed = {config.model.hidden_size, config.train.loss_chunk_tokens, 1}
    assert logit_buffers(config) <= allowed
    assert 64 in logit_buffers(config_of(train={"loss_chunk_tokens": 64})), "it would not see them"


def traced(microbatches=4, **fields):
    """Return the traced program of the step, without sizes and addresses."""
    train = {"microbatches": microbatches, "global_batch_size": 64, "remat": "full"}
    config = config_of((2, 2, 1), train=train, prefix_layers=1, **fields)
    program = jax.make_jaxpr(step_of(config))(*arguments(config))
    return re.sub(r"0x[0-9a-f]+|\d+|\s+", "_", str(program))


def test_the_program_grows_with_neither_blocks_nor_dense_layers_nor_microbatches():
    assert traced() == traced(blocks=16, dense_layers=3, microbatches=16)


def kept_for_backward(gather="step", remat="none", sequences=16, **fields):
    """Return shapes and dtypes of the residuals of a block on (2, 1, 2)."""
    train = {"remat": remat, "global_batch_size": sequences}
    config = config_of((2, 1, 2), gather=gather, train=train, q_lora_rank=24, **fields)
    residuals = []

    def visit(run):
        ring, _ = run.empty_ring(run.empty_x())
        residuals.extend((a.shape[2:], a.dtype) for a in jax.tree.leaves(ring))

    trace.with_executor(config, "xla", sharded_model.remat(config, False), visit)
    return residuals


def test_with_full_remat_only_the_input_of_each_layer_is_saved():
    kept = kept_for_backward(remat="full", sequences=24, dense_layers=3)
    b, t, D = 24 // 4 // 2, 16 // 2, 48
    large = [shape for shape, _ in kept if np.prod(shape) > 3]
    assert sorted(large, key=len) == [(b, t, D), (3, b, t, D)]


@pytest.mark.parametrize(("gather", "layout"), [("step", "expert_parallel"), ("layer", "sharded")])
def test_no_weight_is_a_residual(gather, layout):
    kept = kept_for_backward(gather, experts_layout=layout, kv_lora_rank=20)  # 32 tokens are others
    D, N, Q, C, F, E, G = 48, 2, 24, 20, 36, 8, 28  # of a tensor rank
    whole = [(D, Q), (Q, N, 32), (D, C + 12), (C, N, 48), (N, 28, D), (D, F), (F, D), (D, 2 * G)]
    whole += [(D, G), (G, D), (D, E)]
    experts = [(E, D, G), (E, G, D), (E // 4, D, 2 * G), (E // 4, 2 * G, D), (E // 4, D, 4 * G)]
    experts += [(E, D, 2 * G)]
    assert not {*whole, *experts} & {shape[-3:] for shape, _ in kept}
    assert not {*whole} & {shape[-2:] for shape, _ in kept}


@pytest.mark.parametrize("gather", ["step", "layer"])
def test_no_wide_elementwise_result_is_a_residual(gather):
    """Without remat: no float32 of norms and rotary, no elementwise result of gate and up."""
    kept = kept_for_backward(gather, compute_dtype="bfloat16", experts_layout="expert_parallel")
    wide = [(shape, dtype) for shape, dtype in kept if shape and shape[-1] >= 12]
    scores = (2, 2, 16, 16)  # of attention by XLA
    assert {s[-4:] for s, dtype in wide if dtype == jnp.float32 and len(s) > 2} == {scores}
    # Gate and up of the shared experts and of the dense layer, and both of the routed ones.
    brought = (2, 16, 28)  # by attention, of each head
    others = [shape[-1] for shape, _ in wide if shape[-3:] != brought]
    assert sorted(size for size in others if size in (28, 36, 56, 112)) == [28, 28, 36, 36, 112]


# --- capacity ----------------------------------------------------------------------------------


def numpy_kept(choice, ranks, factor, E):
    """Whether each choice is within capacity: by position, then sequence, on each rank."""
    B, T, K = choice.shape
    b, t = B // ranks[0], T // ranks[1]
    slots, kept = -(-factor * K * b * t // E), np.zeros(choice.shape, bool)
    for rank in np.ndindex(ranks):
        filled = np.zeros(E)
        for i, j, k in np.ndindex(t, b, K):
            here = rank[0] * b + j, rank[1] * t + i, k
            kept[here] = filled[choice[here]] < slots
            filled[choice[here]] += 1
    return kept


@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
def test_choices_beyond_capacity_are_dropped_in_order_of_position_and_counted(layout):
    fields = {"capacity_factor": 0.6, "experts_layout": layout, "n_shared_experts": 0}
    config = config_of((2, 2, 2), **fields)
    m, mesh = config.model, mesh_of(config)
    declared = jax.tree.map(
        lambda w: dataclasses.replace(w, dim_axes=w.dim_axes[3:], sizes=w.sizes[3:]),
        model.declare(config).blocks["moe"].moe,
    )
    how = model.ForwardOptions(m, 0, m.capacity_factor)
    at = model.LayerPosition(*[jnp.int32(0)] * 3)

    def local(w, x):
        y, routing = model.moe(weights.gather(declared, w), x, how, at)
        return y, routing.dropped[None], routing.tokens_per_expert[None]

    ranks, spec = P(utils.TOKEN_AXES), P(utils.BATCH_AXES, utils.SEQUENCE_AXES)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(weights.specs(declared), spec), out_specs=(spec, ranks, ranks)
    )
    w = jax.tree.map(lambda a: a[0], tree_of(m)["blocks"]["moe"]["moe"])
    x = np.random.default_rng(5).standard_normal((4, 16, 48)).astype(np.float32)
    y, dropped, counts = jax.jit(run)(put(mesh, declared, like(declared, w)), x)
    x = x.astype(np.float64)
    choices = np.stack([reference.numpy_moe(w, x_TD, m)[1] for x_TD in x])
    kept = numpy_kept(choices, (2, 2), m.capacity_factor, m.n_routed_experts)
    expected = [reference.numpy_moe(w, x[b], m, kept[b])[0] for b in range(4)]
    assert counts.sum() == 4 * 16 * 2
    assert dropped.sum() == np.sum(~kept) > 0
    np.testing.assert_allclose(y - x, expected, rtol=0, atol=2e-5)


# --- dropless experts; r rows of tokens, e experts of a rank ------------------------------------

# Added to the balancing bias of each expert, which changes choices and not their weights.
ROUTINGS = {
    "balanced": [0] * 8,
    "all tokens choose two experts": [0, 0, 100, 90, 0, 0, 0, 0],  # of the same rank
    "one expert has no token": [0, 0, -100, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_loss_and_gradients_match_the_reference_under_any_routing_of_dropless_experts(routing):
    config = config_of(
        (2, 1, 2),
        train={"microbatches": 2, "remat": "latents,expert_in"},
        capacity_factor=0.0,
        experts_layout="expert_parallel",
    )
    tree = hf_case.weights(config.model, 3)
    tree["blocks"]["moe"]["moe"]["bias"] += np.float32(ROUTINGS[routing])
    parts = check_step(config, tree, BOUND)
    assert (parts["tokens_per_expert"] == 0).any() == (routing != "balanced")


def test_experts_multiply_few_more_rows_than_are_chosen():
    n, D, G, E, K = 2048, 32, 48, 64, 6

    def run(*inputs):
        y_rD = dropless.local_experts(dropless.divide_load(n * K / E, E), *inputs)
        return (y_rD**2).sum()  # not linear, so that its gradient needs y

    shapes = [(n, D), (n, K), (n, K), (E, D, 2 * G), (E, G, D)]
    dtypes = [jnp.float32, jnp.int32, *[jnp.float32] * 3]
    inputs = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]
    local = jax.shard_map(run, mesh=mesh_of(config_of()), in_specs=jax.P(), out_specs=jax.P())
    text = jax.jit(jax.grad(local, (0, 2, 3, 4))).lower(*inputs).compile().as_text()
    chosen = 3 * 2 * n * K * 3 * D * G  # three products of each direction
    assert chosen <= hlo.dot_flops(text) <= 1.1 * chosen


# --- dropout -----------------------------------------------------------------------------------


def dropout_on(shape, branch):
    """Return the function of a LayerPosition to the dropout by 1/4 of ones [8, 16, 64]."""
    config, spec = config_of(shape), P(utils.BATCH_AXES, utils.SEQUENCE_AXES)
    how = model.ForwardOptions(config.model, 3, None, 0.25)

    def local(x, at):
        return model.dropout(x, how, model.LayerPosition(*at), branch)

    run = jax.shard_map(local, mesh=mesh_of(config), in_specs=(spec, P()), out_specs=spec)
    run, ones = jax.jit(run), np.ones((8, 16, 64), np.float32)
    return lambda *at: np.asarray(run(ones, np.int32(at)))


def agreement(one, other):
    """Return the share of equal elements of two masks: 0.625 for independent masks of 1/4."""
    return np.mean((one == 0) == (other == 0))


def test_dropout_keeps_the_mean_and_differs_between_steps_microbatches_layers_and_branches():
    one, other = (dropout_on((1, 1, 1), branch) for branch in (0, 1))
    base = one(5, 1, 2)
    assert abs(np.mean(base == 0) - 0.25) < 0.02
    assert np.unique(base).tolist() == [0, np.float32(4 / 3)]
    np.testing.assert_array_equal(base, one(5, 1, 2))
    for mask in (one(6, 1, 2), one(5, 0, 2), one(5, 1, 3), one(1, 5, 2), other(5, 1, 2)):
        assert abs(agreement(base, mask) - 0.625) < 0.03


@pytest.mark.parametrize(("shape", "batch"), [((2, 2, 1, 2), 4), ((1, 2, 1, 2, 2), 2)])
def test_dropout_differs_between_ranks_that_hold_different_data(shape, batch):
    sequence = 8 // batch
    slices = dropout_on(shape, 0)(5, 1, 2).reshape(batch, 8 // batch, sequence, 16 // sequence, 64)
    ranks = [slices[i, :, j] for i in range(batch) for j in range(sequence)]
    for i in range(8):
        for j in range(i):
            assert abs(agreement(ranks[i], ranks[j]) - 0.625) < 0.07


def test_dropout_of_a_run_depends_on_step_and_microbatch():
    """The loss is of one of two microbatches with the same tokens."""
    config = config_of(train={"microbatches": 2}, blocks=1, moe_layers=0, dropout=0.3)
    mesh = mesh_of(config)
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh)
    stats_of = jax.jit(lambda w, batch, step: run(w, batch, step)[1])
    w, batch = transformer_of(config, mesh, tree_of(config.model)), batch_of(config)

    def loss(step, microbatch):
        twice = {name: np.concatenate([a[:8], a[:8]]) for name, a in batch.items()}
        chosen = np.repeat(np.arange(2) == microbatch, 8)[:, None] * np.ones((1, 16))
        twice["loss_weights"] = chosen.astype(np.float32)
        return float(stats_of(w, on_mesh(config, mesh, twice), jnp.int32(step)).cross_entropy)

    losses = [loss(step, microbatch) for step in (0, 1) for microbatch in (0, 1)]
    assert len(set(losses)) == 4
    assert losses[3] == loss(1, 1)


def test_each_layer_of_a_model_has_its_own_dropout_index(monkeypatch):
    """Each layer writes its index into a column of the residual stream, which is 0 before."""

    def write(y, how, at, branch):
        column = jnp.arange(y.shape[-1])[None, None] == 2 * at.layer + branch
        return jnp.broadcast_to(column, y.shape).astype(y.dtype) + 0 * y

    monkeypatch.setattr(model, "dropout", write)
    config = config_of((1, 2, 1), virtual=2, prefix_layers=2, dense_layers=2)
    mesh, tree = mesh_of(config), tree_of(config.model)
    tree = tree | {"embedding": np.zeros_like(tree["embedding"])}
    run = sharded_model.after_layers(
        config, model.declare(config), mesh, lambda _, data, h: lax.pmax(h, utils.VOCABULARY_AXES)
    )
    w, data = transformer_of(config, mesh, tree), on_mesh(config, mesh, batch_of(config))
    written = np.asarray(jax.jit(run)(w, data)) != 0
    assert (written == (np.arange(48) < 2 * config.model.num_hidden_layers)).all()


# --- embedding and loss ------------------------------------------------------------------------


def test_products_with_the_vocabulary_accumulate_in_float32():
    """Compilers for TPUs and GPUs round a bfloat16 product; the one for CPUs may not."""
    n, v, D = 12, 512, 6
    table, h = jnp.ones((v, D), jnp.bfloat16), jnp.ones((23, D), jnp.bfloat16)

    def local(table, h, targets, token_weights):
        table, h = weights.vary((table, h), utils.VOCABULARY_AXES)
        chunks = vocabulary.in_chunks((h, targets, token_weights), 16)
        return vocabulary.chunked_loss(
            vocabulary.LossOptions(500, 0.01, False, True), table, *chunks
        )

    specs = (P(utils.VOCABULARY_AXES), P(), P(), P())
    run = jax.shard_map(local, mesh=mesh_of(config_of()), in_specs=specs, out_specs=P())
    step = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    text = step.lower(table, h, jnp.ones(23, jnp.int32), jnp.ones(23)).as_text()
    types = r"dot_general .*: \(tensor<(\w+)>, tensor<(\w+)>\) -> tensor<(\w+)>"
    logits = f"{n}x{D}xbf16", f"{v}x{D}xbf16", f"{n}x{v}xf32"
    of_table = f"{n}x{v}xbf16", f"{n}x{D}xbf16", f"{v}x{D}xf32"
    of_h = f"{n}x{v}xbf16", f"{v}x{D}xbf16", f"{n}x{D}xbf16"
    assert sorted(re.findall(types, text)) == sorted([logits, of_table, of_h])


def test_the_gradient_of_a_common_tokens_embedding_is_a_float32_sum():
    """A sum in bfloat16 ends at 256."""

    def total(table):
        rows = vocabulary.lookup(weights.vary(table), jnp.full((2, 1000), 5, jnp.int32))
        return rows.astype(jnp.float32).sum()

    mesh, spec = mesh_of(config_of()), P(utils.VOCABULARY_AXES)
    run = jax.jit(jax.shard_map(jax.grad(total), mesh=mesh, in_specs=spec, out_specs=spec))
    gradient = np.asarray(run(jnp.ones((8, 4), jnp.bfloat16)), np.float32)
    assert (gradient[5] == 2000).all() and gradient.sum() == 4 * 2000


@pytest.mark.parametrize(
    ("tokens", "most", "count"), [(64, 16, 4), (5, 9, 1), (5003, 64, 79), (84, 18, 6)]
)
def test_chunks_are_few_and_at_most_the_requested_size(tokens, most, count):
    """5003 is prime. 84 is divided evenly by 6, and not by the 5 that would be enough."""
    x_n = np.arange(1, tokens + 1, dtype=np.int32)
    chunks_cn = np.asarray(vocabulary.in_chunks(jnp.asarray(x_n), most))
    assert chunks_cn.shape[0] == count and chunks_cn.shape[1] <= most
    padding = chunks_cn.reshape(-1)[tokens:]
    np.testing.assert_array_equal(chunks_cn.reshape(-1)[:tokens], x_n)
    assert not padding.any() and padding.size < count


def test_losses_of_tokens_match_the_reference_if_the_last_chunk_is_padded():
    train = {"microbatches": 1, "global_batch_size": 5, "loss_chunk_tokens": 7}
    fields = {"blocks": 1, "moe_layers": 0, "tie_word_embeddings": False}
    config = config_of((1, 1, 1, 2, 2), train=train, **fields)
    assert 5 * 8 % vocabulary.num_chunks(5 * 8, 7) != 0
    mesh, tree, batch = mesh_of(config), tree_of(config.model), batch_of(config)
    # Rows are similar, so that all logits of some tokens are negative.
    tree = tree | {"output": tree["output"][:1] + tree["output"] / 10}
    logits = np.asarray(reference.logits(tree, batch["tokens"], config.model))
    likeliest = np.arange(16) % 2 == 0  # every other target is the likeliest token
    batch["targets"] = np.where(likeliest, logits.argmax(-1), batch["targets"]).astype(np.int32)
    run = jax.jit(sharded_model.token_losses(config, model.declare(config), mesh))
    losses = np.asarray(run(transformer_of(config, mesh, tree), on_mesh(config, mesh, batch)))[0]
    picked = np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    expected = jax.nn.logsumexp(logits, axis=-1) - picked
    np.testing.assert_allclose(losses[..., 0], expected, rtol=1e-5, atol=1e-5)
    assert (losses[..., 1] == (picked == logits.max(-1))).all() and losses[..., 1].mean() > 0.4


# --- guards ------------------------------------------------------------------------------------


def test_a_missing_sum_over_ranks_is_an_error_at_trace_time(monkeypatch):
    config = config_of((1, 1, 2), moe_layers=0)
    monkeypatch.setattr(weights, "reduce_gradients", lambda declared, grads, gathered: grads)
    with pytest.raises((TypeError, ValueError), match="out_specs"):
        jax.eval_shape(step_of(config), *arguments(config))


SHARED = {"moe_intermediate_size": 63, "n_shared_experts": 3}
SIX = {"n_routed_experts": 6, "experts_layout": "expert_parallel"}


@pytest.mark.parametrize(
    ("shape", "virtual", "fields", "name", "works"),
    [
        ((1, 1, 8), 1, {"num_attention_heads": 12}, "num_attention_heads", 16),
        ((1, 2, 1), 2, {"num_hidden_layers": 12}, "num_hidden_layers", 16),
        ((2, 1, 2), 1, SIX, "n_routed_experts", 8),
        ((1, 1, 2), 1, SHARED, "moe_intermediate_size", 64),
    ],
)
def test_a_size_that_does_not_divide_is_an_error_with_one_that_does(
    shape, virtual, fields, name, works
):
    message = rf"--model.{name} {fields[name]} is .*not divisible.*Use --model.{name} {works}\b"
    with pytest.raises(utils.ConfigError, match=message):
        model.declare(config_of(shape, virtual=virtual, **fields))
    model.declare(config_of(shape, virtual=virtual, **(fields | {name: works})))


def test_a_vocabulary_that_does_not_divide_is_an_error_with_a_mesh_that_works():
    message = r"--model.vocab_size 500 .*512 with padding.* Use --mesh.pipeline 1 --mesh.tensor 2.$"
    with pytest.raises(utils.ConfigError, match=message):
        model.declare(config_of((1, 3, 2), blocks=6))
    model.declare(config_of((1, 1, 2), blocks=6))
