"""The sharded model against the one-device reference, and the properties of its layers.

A step takes seconds to compile, so each is compiled once (`trained`, `stats_of`) for many tests.
Properties of a layer are tested on the layer alone.

Letters as in model.py.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import hf_case
import model
import pipeline
import reference
import sharded_model
import utils
import weights
from attention import rope_frequencies, rope_magnitude, softmax_scale
from common import (
    batch_of,
    canonical,
    config_of,
    errors,
    full_logits,
    like,
    mesh_of,
    mostly_long,
    on_mesh,
    put,
    relative_error,
    transformer_of,
)
from hf_case import model_with

BOUND = 2e-5  # relative, float32
BOTH = [(1, 1, 1), (2, 2, 2)]

BASE = {
    "q_lora_rank": 24,
    "prefix_layers": 1,
    "n_shared_experts": 2,
    "z_loss": 1e-3,
    "n_group": 2,
    "latent_rms_norm_eps": 0.1,
    **hf_case.YARN,
}
# Together the cases cover every option of the model and of a step.
CASES = {
    "1x1x1": config_of(segments=True, **BASE),
    "4x1x1": config_of(
        (4, 1, 1),
        gather="layer",
        train={"microbatches": 2, "remat": "full", "loss_chunk_tokens": 64},
        tie_word_embeddings=False,
        experts_layout="sharded",
        scoring_func="softmax",
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
    ),
    "1x4x1": config_of(
        (1, 4, 1),
        train={"microbatches": 3, "global_batch_size": 12, "remat": "latents,hidden"},
        dense_layers=2,
        norm_topk_prob=False,
        n_shared_experts=0,
        rope_in_moe_layers=False,
    ),
    "1x1x4": config_of(
        (1, 1, 4),
        gather="layer",
        segments=True,
        train={"microbatches": 1, "global_batch_size": 4},
        dense_layers=0,
        tie_word_embeddings=False,
        q_lora_rank=24,
        experts_layout="sharded",
        z_loss=0.01,
    ),
    "2x2x2": config_of((2, 2, 2), gather="layer", segments=True, train={"microbatches": 8}, **BASE),
    "2x2x2_virtual": config_of(
        (2, 2, 2),
        virtual=2,
        segments=True,
        train={"microbatches": 2, "remat": "attention,expert_hidden"},
        **BASE,
    ),
    "2x2x2_dense": config_of(
        (2, 2, 2),
        train={"microbatches": 3, "global_batch_size": 12, "remat": "full", "loss_chunk_tokens": 7},
        tie_word_embeddings=False,
        moe_layers=0,
        dense_layers=2,
        prefix_layers=2,
        blocks=2,
    ),
    "2x2x2_virtual_moe": config_of(
        (2, 2, 2),
        virtual=2,
        train={"remat": "full"},
        dense_layers=0,
        prefix_layers=2,
        experts_layout="sharded",
        scoring_func="softmax",
        n_shared_experts=1,
    ),
    "2x2x2_virtual_splash": config_of(
        (2, 2, 2),
        virtual=2,
        segments=True,
        train={"seq_len": 128, "global_batch_size": 8, "microbatches": 2, "remat": "attention"},
        attention_kernel="splash",
        tie_word_embeddings=False,
    ),
    "1x1x4_splash": config_of(
        (1, 1, 4),
        gather="layer",
        train={"seq_len": 128, "global_batch_size": 4, "microbatches": 2, "remat": "none"},
        attention_kernel="splash",
        blocks=1,
        moe_layers=0,
        prefix_layers=1,
        **hf_case.YARN,
    ),
    "2x2x2x1": config_of((2, 2, 2, 1), segments=True, **BASE),
    "2x1x2x2_virtual": config_of(
        (2, 1, 2, 2),
        virtual=2,
        gather="layer",
        train={"remat": "latents,hidden"},
        tie_word_embeddings=False,
        experts_layout="sharded",
    ),
}
SAME_MODEL = ["1x1x1", "2x2x2", "2x2x2_virtual", "2x2x2x1"]
WITH_EXPERTS = [name for name in CASES if CASES[name].model.moe_layers]
OFTEN = "1x1x1", "2x2x2_virtual", "2x2x2_virtual_moe", "2x1x2x2_virtual"


class Trained(NamedTuple):
    """The results of one step."""

    config: utils.Config
    grads: dict  # a canonical tree
    stats: sharded_model.Stats
    program: str  # compiled


def step_of(config, mesh):
    """Return the compiled production step: (weights, batch) -> gradients, Stats."""
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh)
    return jax.jit(lambda w, batch: run(w, batch, jnp.int32(0)))


@functools.cache
def tree_of(fields):
    """Return weights with norms other than 1 and biases other than 0."""
    return hf_case.weights(fields, seed=3)


@functools.cache
def trained(name):
    """Run a case, once."""
    config, mesh = CASES[name], mesh_of(CASES[name])
    w, batch = transformer_of(config, mesh, tree_of(config.model)), batch_of(config)
    data = on_mesh(config, mesh, batch)
    compiled = step_of(config, mesh).lower(w, data).compile()
    grads, stats = compiled(w, data)
    return Trained(config, canonical(config, grads), stats, compiled.as_text())


@functools.cache
def expected_of(fields, segments, sequences, length):
    """Return (loss, parts), gradients of the reference for the batch of a case."""
    small = config_of(segments=segments, train={"global_batch_size": sequences, "seq_len": length})
    batch = batch_of(dataclasses.replace(small, model=fields))
    if not segments:
        batch["segments"] = np.zeros_like(batch["segments"])
    run = jax.jit(jax.value_and_grad(reference.loss, has_aux=True), static_argnums=2)
    return run(tree_of(fields), batch, fields)


def expected(config):
    train = config.train
    return expected_of(config.model, config.data.segments, train.global_batch_size, train.seq_len)


@pytest.mark.parametrize("name", mostly_long(CASES, *OFTEN))
def test_loss_and_gradients_match_the_one_device_reference(name):
    config, grads, stats, _ = trained(name)
    (loss, parts), reference_grads = expected(config)
    for part in ("cross_entropy", "balance", "z"):
        assert relative_error(getattr(stats, part), parts[part]) <= BOUND, part
    assert relative_error(stats.loss, loss) <= BOUND
    worst = {leaf: e for leaf, e in errors(grads, reference_grads).items() if e > BOUND}
    assert not worst, f"relative errors of gradients: {worst}"


@pytest.mark.parametrize(
    "name", mostly_long(WITH_EXPERTS, *(name for name in OFTEN if name in WITH_EXPERTS))
)
def test_every_choice_of_an_expert_is_counted_and_none_is_dropped_with_full_capacity(name):
    config, _, stats, _ = trained(name)
    counts = np.asarray(stats.tokens_per_expert).reshape(config.model.blocks, -1)
    (_, parts), _ = expected(config)
    assert counts.tolist() == parts["tokens_per_expert"].tolist()
    assert stats.dropped == 0


def gradient_norm(grads):
    return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)))


@pytest.mark.parametrize("name", mostly_long(SAME_MODEL[1:], "2x2x2_virtual"))
def test_balance_loss_and_gradient_norm_depend_on_neither_mesh_nor_microbatches(name):
    cases = [CASES[name] for name in SAME_MODEL]
    assert len({(case.mesh.shape, case.train.microbatches) for case in cases}) == 4
    one, other = trained(SAME_MODEL[0]), trained(name)
    assert relative_error(other.stats.balance, one.stats.balance) <= BOUND
    assert relative_error(gradient_norm(other.grads), gradient_norm(one.grads)) <= BOUND


@pytest.mark.parametrize("name", mostly_long(CASES, *OFTEN))
def test_padding_of_the_vocabulary_has_no_gradient(name):
    config, grads, _, _ = trained(name)
    for table in ("embedding", "output"):
        if grads[table] is not None:
            assert grads[table].shape[0] == 512
            assert not grads[table][config.model.vocab_size :].any()
            assert grads[table][: config.model.vocab_size].any()


@functools.cache
def evaluated(name):
    """Return evaluation statistics of a case with dropout and low capacity in training."""
    case = CASES[name]
    fields = dataclasses.replace(case.model, dropout=0.4, capacity_factor=0.5)
    config, mesh = dataclasses.replace(case, model=fields), mesh_of(case)
    w, data = transformer_of(case, mesh, tree_of(case.model)), on_mesh(case, mesh, batch_of(case))
    return jax.jit(sharded_model.evaluate(config, model.declare(config), mesh))(w, data)


@pytest.mark.parametrize(
    "name",
    mostly_long(["1x1x1", "2x2x2_virtual", "2x2x2_virtual_splash"], "1x1x1", "2x2x2_virtual"),
)
def test_evaluation_matches_the_reference_without_dropout_and_with_its_own_capacity(name):
    config, found = CASES[name], evaluated(name)
    (_, parts), _ = expected(config)
    assert relative_error(found.cross_entropy, parts["cross_entropy"]) <= BOUND
    assert relative_error(found.z, parts["z"]) <= BOUND
    # 1 at equal load: neither weighted nor summed over layers.
    mean = parts["balance"] / config.model.aux_loss_alpha / config.model.blocks
    assert relative_error(found.balance, mean) <= BOUND
    counts = np.asarray(found.tokens_per_expert).reshape(config.model.blocks, -1)
    assert counts.tolist() == parts["tokens_per_expert"].tolist()
    assert found.dropped == 0


# --- compiled programs -------------------------------------------------------------------------


def logit_buffers(program, vocabulary_slice):
    """Return the rows of each float buffer of an HLO text with the vocabulary as a dimension."""
    shapes = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", program)
    }
    found = [shape for shape in shapes if vocabulary_slice in shape]
    return {int(np.prod(shape)) // vocabulary_slice for shape in found}


def test_logits_of_a_chunk_of_tokens_exist_at_a_time():
    config, _, _, program = trained("1x1x1")
    # Rows of the embedding; those of the largest buffer of logits.
    allowed = {config.model.hidden_size, config.train.loss_chunk_tokens, 1}
    assert logit_buffers(program, 512) <= allowed

    whole = dataclasses.replace(
        config, train=dataclasses.replace(config.train, loss_chunk_tokens=64)
    )
    mesh = mesh_of(whole)
    w, data = jax.eval_shape(lambda: arguments(whole, mesh))
    program = step_of(whole, mesh).lower(w, data).as_text("hlo")
    assert 64 in logit_buffers(program, 512), "the search would not see them"


def arguments(config, mesh):
    """Return abstract weights and a batch of a config."""
    declared = model.declare(config)
    w = jax.tree.map(lambda w: jnp.zeros(w.shape), declared)
    M = config.train.microbatches
    shape = (M, config.train.global_batch_size // M, config.train.seq_len)
    integers = jnp.zeros(shape, jnp.int32)
    return w, model.Batch(integers, integers, jnp.zeros(shape), integers)


def traced(**changes):
    """Return the traced program of the step, without sizes and addresses."""
    sizes = {"microbatches": changes.pop("microbatches", 4), "global_batch_size": 64}
    config = config_of((2, 2, 1), train=sizes | {"remat": "full"}, **(BASE | changes))
    mesh = mesh_of(config)
    program = jax.make_jaxpr(step_of(config, mesh))(
        *jax.eval_shape(lambda: arguments(config, mesh))
    )
    return re.sub(r"0x[0-9a-f]+|\d+|\s+", "_", str(program))


def test_the_program_grows_with_neither_blocks_nor_dense_layers_nor_microbatches():
    small = traced()
    assert small == traced(blocks=16)
    assert small == traced(dense_layers=3)
    assert small == traced(microbatches=16)


def kept_for_backward(config):
    """Return shapes and dtypes of the residuals of a block."""
    mesh, found = mesh_of(config), []
    declared = model.declare(config)
    how = model.ForwardOptions(config.model, 0, config.model.capacity_factor)

    def local(w, data):
        run = sharded_model.pipeline_functions(
            config, declared, how, jnp.int32(0), jnp.float32(1), 1.0
        )
        prepared, data = (
            sharded_model.gather_params(config, declared, w),
            sharded_model.with_microbatch_index(data),
        )
        run = pipeline.Executor(run, prepared, data, sharded_model.schedule_of(config))
        ring, _, _ = run.probe(run.empty_x())
        found.extend((a.shape[2:], a.dtype) for a in jax.tree.leaves(ring))
        return jnp.zeros(())

    in_specs = (weights.specs(declared), sharded_model.BATCH_SPEC)
    step = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=True)
    jax.eval_shape(step, *jax.eval_shape(lambda: arguments(config, mesh)))
    return found


def test_with_full_remat_only_the_input_of_each_layer_is_saved():
    train = {"remat": "full", "global_batch_size": 24}
    config = config_of((2, 1, 2), train=train, dense_layers=3, q_lora_rank=24)
    b, t, D = 24 // 4 // 2, 16 // 2, 48
    large = [shape for shape, _ in kept_for_backward(config) if np.prod(shape) > 3]
    assert sorted(large, key=len) == [(b, t, D), (3, b, t, D)]


@pytest.mark.parametrize("gather", ["step", "layer"])
@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
def test_no_weight_is_a_residual(gather, layout):
    fields = {
        "experts_layout": layout,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
    }  # 32 tokens are others
    config = config_of((2, 1, 2), gather=gather, **fields)
    kept = {shape for shape, _ in kept_for_backward(config)}
    D, N, Q, C, F, E, G = 48, 2, 24, 20, 36, 8, 28  # of a tensor rank
    whole = [(D, Q), (Q, N, 32), (D, C + 12), (C, N, 48), (N, 28, D), (D, F), (F, D), (D, 2 * G)]
    whole += [(D, G), (G, D)]
    experts = [(E, D, G), (E, G, D), (E // 4, D, 2 * G), (E // 4, 2 * G, D), (E // 4, D, 4 * G)]
    experts += [(E, D, 2 * G)]
    assert not {*whole, *experts, (D, E)} & {shape[-3:] for shape in kept}
    assert not {*whole, (D, E)} & {shape[-2:] for shape in kept}


@pytest.mark.parametrize("gather", ["step", "layer"])
def test_no_wide_elementwise_result_is_a_residual(gather):
    """Without remat: no float32 of norms and rotary, no elementwise result of gate and up."""
    layers = {"gather": gather, "experts_layout": "expert_parallel", "q_lora_rank": 24}
    kept = kept_for_backward(config_of((2, 1, 2), compute_dtype="bfloat16", **layers))
    wide = [(shape, dtype) for shape, dtype in kept if shape and shape[-1] >= 12]
    scores = (2, 2, 16, 16)  # of attention by XLA
    assert {s[-4:] for s, dtype in wide if dtype == jnp.float32 and len(s) > 2} == {scores}
    # Gate and up of the shared experts and of the dense layer, and both of the routed ones.
    brought = (2, 16, 28)  # by attention, of each head
    others = [shape[-1] for shape, _ in wide if shape[-3:] != brought]
    assert sorted(size for size in others if size in (28, 36, 56, 112)) == [28, 28, 36, 36, 112]


# --- layers by themselves ----------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer of the production model, on global arrays."""

    config: utils.Config
    kind: str  # attention, mlp or moe
    rope: bool = True

    @property
    def declared(self):
        """The declared weights, without stacked dimensions."""
        blocks = model.declare(self.config).blocks
        tree, stack = (blocks.dense.mlp, 4) if self.kind == "mlp" else (blocks.moe, 3)
        tree = tree if self.kind == "mlp" else getattr(tree, self.kind)

        def unstacked(w):
            return dataclasses.replace(w, dim_axes=w.dim_axes[stack:], sizes=w.sizes[stack:])

        return jax.tree.map(unstacked, tree)

    @property
    def weights(self):
        """Return the weights of the first such layer, as nested dicts."""
        blocks = tree_of(self.config.model)["blocks"]
        tree, index = (blocks["dense"], (0, 0)) if self.kind == "mlp" else (blocks["moe"], 0)
        return jax.tree.map(lambda a: a[index], tree[self.kind])

    @property
    def x_spec(self):
        return P(utils.BATCH_AXES, "tensor")

    def local(self, w, x, segments):
        """(y, [1] dropped choices, [1, E] tokens per expert); nothing of the latter but in moe."""
        m, at = self.config.model, model.LayerPosition(*[jnp.int32(0)] * 3)
        how = model.ForwardOptions(m, 0, m.capacity_factor)
        w = weights.gather(self.declared, w)
        if self.kind == "attention":
            return model.attention(w, x, segments, how, at, self.rope)
        if self.kind == "mlp":
            return model.mlp(w, x, how, at), None
        y, routing = model.moe(w, x, how, at)
        return y, (routing.dropped[None], routing.tokens_per_expert[None])

    def sharded(self):
        """Return (weights, x [B, T, D], segments [B, T]) -> results of `local` per rank."""
        ranks = P(utils.TOKEN_AXES)
        return jax.shard_map(
            self.local,
            mesh=mesh_of(self.config),
            in_specs=(weights.specs(self.declared), self.x_spec, P("fsdp")),
            out_specs=(self.x_spec, (ranks, ranks) if self.kind == "moe" else None),
            check_vma=True,
        )

    def __call__(self, x, segments=None, tree=None):
        segments = np.zeros(x.shape[:2], np.int32) if segments is None else segments
        w = put(mesh_of(self.config), self.declared, like(self.declared, tree or self.weights))
        y, routing = jax.jit(self.sharded())(w, x, segments)
        return np.asarray(y), jax.tree.map(np.asarray, routing)


def layer(kind, shape, rope=True, **fields):
    return Layer(config_of(shape, **({"q_lora_rank": 24} | fields)), kind, rope)


def activations(B=4, T=16, D=48, seed=5):
    return np.random.default_rng(seed).standard_normal((B, T, D)).astype(np.float32)


@pytest.mark.parametrize("shape", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["attention", "mlp", "moe"])
def test_a_layer_on_zeros_is_finite_forward_and_backward(kind, shape):
    one = layer(kind, shape)
    run, x = one.sharded(), np.zeros((4, 16, 48), np.float32)
    segments = np.zeros((4, 16), np.int32)
    w = put(mesh_of(one.config), one.declared, like(one.declared, one.weights))

    def total(w, x):
        return jnp.sum(run(w, x, segments)[0] * activations())

    for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1)))(w, x)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("shape", BOTH, ids=str)
def test_each_shared_expert_changes_the_output(shape):
    one, x = layer("moe", shape, n_shared_experts=3), activations()
    y, _ = one(x)
    G = one.config.model.moe_intermediate_size
    for number in range(3):
        tree = one.weights
        down = tree["shared"]["down"].copy()
        down[number * G : (number + 1) * G] = 0
        without, _ = one(x, tree=tree | {"shared": tree["shared"] | {"down": down}})
        assert (np.abs(y - without).max(-1) > 1e-3).all(), f"shared expert {number}"


@pytest.mark.parametrize("shape", BOTH, ids=str)
def test_attention_does_not_cross_documents(shape):
    one, x = layer("attention", shape), activations()
    segments = np.broadcast_to(np.repeat(np.int32([4, 9]), [5, 11]), (4, 16))
    changed = x.copy()
    changed[:, 2] += 1
    (before, _), (after, _) = one(x, segments), one(changed, segments)
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])
    assert (np.abs(before - after)[:, 2:5].max(-1) > 1e-4).all()
    (before, _), (after, _) = one(x), one(changed)
    assert (np.abs(before - after)[:, 5:].max(-1) > 1e-4).all()


@pytest.mark.parametrize("shape", BOTH, ids=str)
@pytest.mark.parametrize("rope", [True, False])
def test_attention_scores_of_every_head_depend_on_distance_only(rope, shape, monkeypatch):
    def scores(q, k, v, *_):
        return jnp.einsum("bTnA,bSnA->bTnS", q, k)

    monkeypatch.setattr(model, "attend", scores)
    # The layer returns its scores: a value head is as wide as the number of keys, and the output
    # matrix is the identity.
    B, N, T = 4, 4, 16
    one = layer("attention", shape, rope=rope, hidden_size=N * T, v_head_dim=T, rope_theta=30.0)
    tree = one.weights | {"out": np.eye(N * T, dtype=np.float32).reshape(N, T, N * T)}
    x = np.broadcast_to(activations(B, 1, N * T), (B, T, N * T))
    score_BTNS = (one(x, tree=tree)[0] - x).reshape(B, T, N, T)
    for distance in range(1 - T, T):
        along = np.diagonal(score_BTNS, -distance, axis1=1, axis2=3)  # [B, N, pairs]
        spread = along.max(-1) - along.min(-1)
        assert (spread <= 2e-5).all(), f"distance {distance}: {spread.max()}"
    varied = np.ptp(score_BTNS[:, 0], axis=-1)
    assert (varied > 0.1).all() if rope else (varied <= 2e-5).all()


# --- YaRN and groups of experts ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "factor", "beta_fast", "kept", "slowed"),
    [(10000.0, 40.0, 32.0, 10, 23), (50000.0, 32.0, 1.0, 19, 20)],
    ids=["DeepSeek-V3", "Kimi K2"],
)
def test_yarn_scales_the_same_frequencies_as_in_published_models(
    theta, factor, beta_fast, kept, slowed
):
    """Both were trained with 4,096 tokens and 32 pairs; `kept` is the last unchanged pair."""
    fields = {"rope_theta": theta, "rope_beta_fast": beta_fast, "qk_rope_head_dim": 64}
    plain = model_with(utils.Model(), **fields)
    yarn = model_with(plain, rope_factor=factor)
    ratio = np.asarray(rope_frequencies(yarn, 64) / rope_frequencies(plain, 64))
    np.testing.assert_allclose(ratio[: kept + 1], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[slowed:], 1 / factor, rtol=1e-6)
    share = np.arange(slowed - kept + 1) / (slowed - kept)
    np.testing.assert_allclose(ratio[kept : slowed + 1], 1 - share + share / factor, rtol=1e-5)
    found = [rope_frequencies(yarn, 64), reference.frequencies(yarn, 64)]
    found.append([reference.numpy_frequency(i, yarn) for i in range(32)])
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=2e-6)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "rotary", "scores"),
    [
        (1.0, 1.0, 1.0, 1.3688879),
        (0.5, 1.0, 1.1844440 / 1.3688879, 1.3688879),
        (0.0, 1.0, 1.3688879, 1.3688879),
        (1.0, 0.0, 1.3688879, 1.0),
    ],
)
def test_yarn_scales_attention_by_the_logarithm_of_its_factor(mscale, all_dim, rotary, scores):
    """For a factor of 40: 1 + log(40) / 10 is 1.3688879."""
    m = model_with(utils.Model(), rope_factor=40.0, rope_mscale=mscale, rope_mscale_all_dim=all_dim)
    np.testing.assert_allclose(rope_magnitude(m), rotary, rtol=1e-6)
    np.testing.assert_allclose(softmax_scale(m, 1), scores**2, rtol=1e-6)


def test_experts_are_chosen_from_the_groups_whose_two_best_sum_highest():
    ranking = np.float32([[[0.9, 0.0, 0.1, 0.5, 0.6, 0.2, 0.4, 0.3, 0.55]]])  # 0.9+0.1, 1.1, 0.95
    for groups, seen in [(1, [1]), (2, [0, 1]), (3, [0, 1, 2])]:
        m = utils.Model(n_routed_experts=9, n_group=3, topk_group=groups)
        found = np.asarray(model.best_groups(jnp.asarray(ranking), m)).reshape(3, 3)
        expected = np.where(np.isin(np.arange(3), seen)[:, None], ranking.reshape(3, 3), -np.inf)
        np.testing.assert_array_equal(found, expected)


# --- capacity ----------------------------------------------------------------------------------


def numpy_route(w, h, m):
    """Return choices and weights [B, T, K] of sigmoid scores, normalized."""
    score = 1 / (1 + np.exp(-(h @ w["router"])))
    choice = np.argsort(-(score + w["bias"]), axis=-1, kind="stable")[..., : m.num_experts_per_tok]
    weight = np.take_along_axis(score, choice, axis=-1)
    return choice, weight / weight.sum(-1, keepdims=True) * m.routed_scaling_factor


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


def numpy_moe(one, x, factor):
    """Return y of a MoE layer without shared experts, and the number of dropped choices."""
    m, w = one.config.model, one.weights
    E, shape = m.n_routed_experts, (one.config.mesh.fsdp, one.config.mesh.tensor)
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + m.rms_norm_eps) * w["norm"]
    choice, weight = numpy_route(w, h, m)
    kept = numpy_kept(choice, shape, factor, E)
    matrices = [w["experts"][name] for name in ("gate", "up", "down")]
    outputs = [reference.numpy_swiglu(*(a[e] for a in matrices), h) for e in range(E)]
    picked = np.take_along_axis(np.stack(outputs, 2), choice[..., None], axis=2)
    return x + np.sum(picked * (weight * kept)[..., None], axis=2), np.sum(~kept)


@pytest.mark.parametrize("shape", BOTH, ids=str)
@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_choices_beyond_capacity_are_dropped_in_order_of_position_and_counted(
    factor, layout, shape
):
    one = layer("moe", shape, capacity_factor=factor, experts_layout=layout, n_shared_experts=0)
    x = activations()
    y, (dropped, counts) = one(x)
    expected_y, expected_drops = numpy_moe(one, x.astype(np.float64), factor)
    assert counts.sum() == 4 * 16 * 2
    assert dropped.sum() == expected_drops > 0
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=2e-5)


def even_routing():
    """Return tokens and a router such that 4 consecutive positions choose each expert once."""
    x = 0.01 * activations()
    for position in range(16):
        x[:, position, 2 * position % 8] = 1.0
        x[:, position, (2 * position + 1) % 8] = 0.9
    return x, np.eye(48, 8, dtype=np.float32)


@pytest.mark.parametrize("shape", BOTH, ids=str)
def test_nothing_is_dropped_with_capacity_factor_1_and_equal_load(shape):
    x, router = even_routing()
    one = layer("moe", shape, capacity_factor=1.0)
    changes = {"router": router, "bias": np.zeros(8), "norm": np.ones(48)}
    tree = one.weights | changes
    _, (dropped, counts) = one(x, tree=tree)
    assert (counts == counts[0, 0]).all()
    assert dropped.sum() == 0
    x[1, 3] = x[1, 4]  # two choices of full experts instead of two others
    _, (dropped, _) = one(x, tree=tree)
    assert dropped.sum() == 2


@functools.cache
def scarce(shape):
    """Return config, mesh, weights, batch -> Stats of a training step that drops many tokens."""
    config = config_of(shape, blocks=2, capacity_factor=0.5, q_lora_rank=24)
    mesh, step = mesh_of(config), step_of(config, mesh_of(config))
    w = transformer_of(config, mesh, tree_of(config.model))
    return config, mesh, w, jax.jit(lambda w, batch: step(w, batch)[1])


@pytest.mark.parametrize("shape", mostly_long(BOTH, (2, 2, 2)), ids=str)
def test_no_later_token_changes_an_earlier_logit_when_tokens_are_dropped(shape):
    """The loss is of the earlier positions of all sequences, while later tokens change."""
    config, mesh, w, stats_of = scarce(shape)
    batch = batch_of(config)

    def stats_at(first_changed, weighted):
        ids = batch["tokens"].copy()
        ids[::3, first_changed:] = (ids[::3, first_changed:] + 7) % config.model.vocab_size
        chosen = np.broadcast_to(weighted, ids.shape).astype(np.float32)
        return stats_of(w, on_mesh(config, mesh, batch | {"tokens": ids, "loss_weights": chosen}))

    for first_changed in (1, 5, 8, 11, 15):
        earlier = np.arange(16) < first_changed
        before, after = stats_at(16, earlier), stats_at(first_changed, earlier)
        assert min(before.dropped, after.dropped) > 100
        assert before.cross_entropy == after.cross_entropy, first_changed
        later = (
            stats_at(16, ~earlier).cross_entropy,
            stats_at(first_changed, ~earlier).cross_entropy,
        )
        assert abs(later[0] - later[1]) > 1e-3


# --- dropout -----------------------------------------------------------------------------------


def dropped_out(shape, at, branch=0, rate=0.25):
    """Return the dropout of ones [8, 16, 64] at a LayerPosition."""
    config = config_of(shape, dropout=rate)
    how = model.ForwardOptions(config.model, 3, None, rate)

    def local(x):
        return model.dropout(x, how, model.LayerPosition(*map(jnp.int32, at)), branch)

    spec = P(utils.BATCH_AXES, "tensor")
    run = jax.shard_map(local, mesh=mesh_of(config), in_specs=spec, out_specs=spec)
    return np.asarray(jax.jit(run)(np.ones((8, 16, 64), np.float32)))


def agreement(one, other):
    """Return the share of equal elements of two masks: 0.625 for independent masks of 1/4."""
    return np.mean((one == 0) == (other == 0))


def test_dropout_differs_between_steps_microbatches_layers_and_branches_and_nothing_else():
    base = dropped_out((1, 1, 1), (5, 1, 2))
    np.testing.assert_array_equal(base, dropped_out((1, 1, 1), (5, 1, 2)))
    others = [((6, 1, 2), 0), ((5, 0, 2), 0), ((5, 1, 3), 0), ((5, 1, 2), 1), ((1, 5, 2), 0)]
    for at, branch in others:
        assert abs(agreement(base, dropped_out((1, 1, 1), at, branch)) - 0.625) < 0.03, at


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 1, 1, 2)])
def test_dropout_differs_between_ranks_that_hold_different_data(shape):
    slices = dropped_out(shape, (5, 1, 2)).reshape(2, 4, 2, 8, 64)
    ranks = [slices[i, :, j] for i in (0, 1) for j in (0, 1)]
    for i in range(4):
        for j in range(i):
            assert abs(agreement(ranks[i], ranks[j]) - 0.625) < 0.05


def test_dropout_keeps_the_mean():
    y = dropped_out((2, 1, 2), (0, 0, 0))
    assert abs(np.mean(y == 0) - 0.25) < 0.02
    assert np.unique(y).tolist() == [0, np.float32(4 / 3)]


def test_dropout_of_a_run_depends_on_step_and_microbatch():
    """The loss is of one of two microbatches with the same tokens."""
    config = config_of(train={"microbatches": 2}, blocks=1, dropout=0.3)
    mesh = mesh_of(config)
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh)
    stats_of = jax.jit(lambda w, batch, step: run(w, batch, step)[1])
    w, batch = transformer_of(config, mesh, tree_of(config.model)), batch_of(config)

    def stats_at(step, microbatch):
        twice = {name: np.concatenate([a[:8], a[:8]]) for name, a in batch.items()}
        chosen = np.repeat(np.arange(2) == microbatch, 8)[:, None] * np.ones((1, 16))
        twice["loss_weights"] = chosen.astype(np.float32)
        return float(stats_of(w, on_mesh(config, mesh, twice), jnp.int32(step)).cross_entropy)

    losses = [stats_at(step, microbatch) for step in (0, 1) for microbatch in (0, 1)]
    assert len(set(losses)) == 4
    assert losses == [stats_at(step, microbatch) for step in (0, 1) for microbatch in (0, 1)]


def test_each_layer_of_a_model_has_its_own_dropout_index(monkeypatch):
    """Each layer writes its index into a column of the residual stream."""

    def write(y, how, at, branch):
        column = jnp.arange(y.shape[-1])[None, None] == 2 * at.layer + branch
        return jnp.broadcast_to(column, y.shape).astype(y.dtype) + 0 * y

    monkeypatch.setattr(model, "dropout", write)
    config = config_of(prefix_layers=2, dense_layers=2, blocks=3)
    declared, mesh = model.declare(config), mesh_of(config)

    def local(w, data):
        how = model.ForwardOptions(config.model, 0, None)
        run = sharded_model.pipeline_functions(
            config, declared, how, jnp.int32(0), jnp.float32(1), 1.0
        )
        w, data = (
            sharded_model.gather_params(config, declared, w),
            pipeline.index(sharded_model.with_microbatch_index(data), 0),
        )
        x = run.first(w.outer, data)
        x = x - model.embed(w.outer.first.embedding, data.tokens)
        for number in range(3):
            block = pipeline.index(w.blocks, number)
            (x, _), _ = run.block(block, data, weights.vary(jnp.int32(number)), x)
        return lax.psum(x, ("pipeline",))

    specs = (weights.specs(declared), sharded_model.BATCH_SPEC)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(utils.BATCH_AXES, "tensor"))
    w = transformer_of(config, mesh, tree_of(config.model))
    x = np.asarray(jax.jit(run)(w, on_mesh(config, mesh, batch_of(config))))
    layers = 2 + 3 * (2 + 1)
    expected_row = (np.arange(48) < 2 * layers).astype(np.float32)
    np.testing.assert_allclose(x, np.broadcast_to(expected_row, x.shape), atol=1e-5)


# --- embedding and loss ------------------------------------------------------------------------


def test_gradients_of_take_rows_match_those_of_indexing():
    random = np.random.default_rng(0)
    x, cotangent = jnp.asarray(random.standard_normal((2, 9, 5)), jnp.float32)
    index = jnp.int32([3, 9, 0, 3, 8, 1, 9, 3, 4])  # 9 is past the end
    back = np.full((9, 3), len(index), np.int32)
    for row in range(9):
        places = np.flatnonzero(np.asarray(index) == row)
        back[row, : len(places)] = places

    def plain(x):
        return jnp.where(index[:, None] < 9, x[jnp.minimum(index, 8)], 0)

    found, vjp = jax.vjp(lambda x: model.take_rows(x, index, jnp.asarray(back)), x)
    wanted, plain_vjp = jax.vjp(plain, x)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(vjp(cotangent)[0], plain_vjp(cotangent)[0], rtol=1e-6)
    # add_rows is the transpose of take_rows.
    added, back_vjp = jax.vjp(lambda x: model.add_rows(x, jnp.asarray(back), index), cotangent)
    np.testing.assert_allclose(added, vjp(cotangent)[0], rtol=1e-6)
    np.testing.assert_array_equal(back_vjp(x)[0], found)


@functools.cache
def chunked(shape, chunk):
    """Return (value, both sums), (gradients of table and h) of the loss in chunks, not all full."""
    table, h, targets, token_weights = loss_inputs()
    mesh = mesh_of(config_of(shape))

    def local(table, h, targets, token_weights):
        table, h = weights.vary((table, h), utils.VOCABULARY_AXES)
        chunks = [model.in_chunks(a, chunk) for a in (h, targets, token_weights)]
        return model.chunked_loss(500, 0.01, table, *chunks)

    specs = (P(utils.VOCABULARY_AXES), P(), P(), P())
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    both = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    return both(table, h, targets, token_weights)


def loss_inputs():
    random = np.random.default_rng(2)
    table, h = (3 * random.standard_normal((n, 6)).astype(np.float32) for n in (512, 23))
    return table, h, random.integers(0, 500, 23, np.int32), random.random(23, np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("chunk", [24, 4])
def test_the_chunked_loss_matches_that_of_full_logits(chunk, shape):
    table, h, targets, token_weights = loss_inputs()

    def plain(table, h):
        log_z = jax.nn.logsumexp(h @ table[:500].T, axis=-1)
        nll = log_z - (h * table[targets]).sum(-1)
        sums = jnp.stack([(token_weights * a).sum() for a in (nll, log_z**2)])
        return sums[0] + 0.01 * sums[1], sums

    (value, sums), grads = chunked(shape, chunk)
    (wanted, wanted_sums), wanted_grads = jax.value_and_grad(plain, (0, 1), has_aux=True)(table, h)
    assert relative_error(value, wanted) <= 1e-6
    assert relative_error(sums, wanted_sums) <= 1e-6
    for g, e in zip(grads, wanted_grads, strict=True):
        assert relative_error(g, e) <= 5e-6
    assert not np.asarray(grads[0])[500:].any()


def test_products_with_the_vocabulary_accumulate_in_float32():
    """Compilers for TPUs and GPUs round a bfloat16 product; the one for CPUs may not."""
    table, h, targets, token_weights = loss_inputs()
    table, h = table.astype(jnp.bfloat16), h.astype(jnp.bfloat16)

    def local(table, h, targets, token_weights):
        table, h = weights.vary((table, h), utils.VOCABULARY_AXES)
        chunks = [model.in_chunks(a, 16) for a in (h, targets, token_weights)]
        return model.chunked_loss(500, 0.01, table, *chunks)

    specs = (P(utils.VOCABULARY_AXES), P(), P(), P())
    run = jax.shard_map(local, mesh=mesh_of(config_of()), in_specs=specs, out_specs=P())
    step = jax.value_and_grad(run, (0, 1), has_aux=True)
    products = re.findall(
        r"dot_general .*: \(tensor<(\w+)>, tensor<(\w+)>\) -> tensor<(\w+)>",
        jax.jit(step).lower(table, h, targets, token_weights).as_text(),
    )
    n, v, D = 12, 512, 6
    logits = f"{n}x{D}xbf16", f"{v}x{D}xbf16", f"{n}x{v}xf32"
    of_table = f"{n}x{v}xbf16", f"{n}x{D}xbf16", f"{v}x{D}xf32"
    of_h = f"{n}x{v}xbf16", f"{v}x{D}xbf16", f"{n}x{D}xbf16"
    assert sorted(products) == sorted([logits, of_table, of_h])


def test_the_gradient_of_a_common_tokens_embedding_is_a_float32_sum():
    """A sum in bfloat16 ends at 256."""
    table, ids = jnp.ones((8, 4), jnp.bfloat16), jnp.full((2, 1000), 5, jnp.int32)

    def run(table):
        return model.lookup(weights.vary(table), ids).astype(jnp.float32).sum()

    local = jax.shard_map(
        jax.grad(run), mesh=mesh_of(config_of()), in_specs=P(utils.VOCABULARY_AXES),
        out_specs=P(utils.VOCABULARY_AXES),
    )  # fmt: skip
    wanted = np.zeros((8, 4))
    wanted[5] = 2000
    np.testing.assert_array_equal(jax.jit(local)(table).astype(jnp.float32), wanted)


@pytest.mark.parametrize(
    ("tokens", "most", "count"),
    [(64, 16, 4), (60, 16, 4), (7, 4, 2), (5, 9, 1), (1, 1, 1), (5003, 64, 79), (84, 18, 6)],
)
def test_chunks_are_few_and_at_most_the_requested_size(tokens, most, count):
    """5003 is prime. 84 is divided evenly by 6, and not by the 5 that would be enough."""
    assert model.num_chunks(tokens, most) == count
    x_n = np.arange(1, tokens + 1, dtype=np.int32)
    chunks_cn = np.asarray(model.in_chunks(jnp.asarray(x_n), most))
    assert chunks_cn.shape[0] == count and chunks_cn.shape[1] <= most
    flat, padding = chunks_cn.reshape(-1)[:tokens], chunks_cn.reshape(-1)[tokens:]
    assert (flat == x_n).all() and not padding.any() and padding.size < count


def test_losses_of_tokens_match_the_reference_if_the_last_chunk_is_padded():
    train = {"microbatches": 1, "global_batch_size": 5, "loss_chunk_tokens": 7}
    config = config_of((1, 1, 2), train=train, blocks=1, moe_layers=0, dense_layers=1)
    assert 5 * 16 % model.num_chunks(5 * 16, 7) != 0
    mesh, tree, batch = mesh_of(config), tree_of(config.model), batch_of(config)
    logits = np.asarray(reference.logits(tree, batch["tokens"], config.model))
    likeliest = np.arange(16) % 2 == 0  # every other target is the likeliest token
    batch["targets"] = np.where(likeliest, logits.argmax(-1), batch["targets"]).astype(np.int32)
    run = jax.jit(sharded_model.token_losses(config, model.declare(config), mesh))
    found = np.asarray(run(transformer_of(config, mesh, tree), on_mesh(config, mesh, batch)))[0]
    picked = np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    expected = jax.nn.logsumexp(logits, axis=-1) - picked
    np.testing.assert_allclose(found[..., 0], expected, rtol=1e-5, atol=1e-5)
    assert (found[..., 1] == (picked == logits.max(-1))).all() and found[..., 1].mean() > 0.4


# --- Hugging Face ------------------------------------------------------------------------------


@functools.cache
def hf_logits(name, shape):
    """Return production logits [B, T, V] of a case."""
    case, tokens = hf_case.CASES[name], hf_case.tokens(hf_case.SIZES["vocab_size"])
    (B, T), ranks = tokens.shape, shape[0]
    M = B // ranks
    train = {"microbatches": M, "global_batch_size": B, "seq_len": T}
    config = config_of(shape, train=train, **case.model)
    mesh = mesh_of(config)
    w = transformer_of(config, mesh, hf_case.weights(config.model, case.seed))
    nothing = np.zeros(tokens.shape, np.float32)
    batch = {"tokens": tokens, "targets": tokens, "loss_weights": nothing, "segments": tokens}
    run = full_logits(config, model.declare(config), mesh)
    found = np.asarray(run(w, on_mesh(config, mesh, batch)))
    return found.reshape(B, -1, found.shape[-1])


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (1, 1, 1)) for name in hf_case.CASES), ("prefix_query_latent_two_shared", (2, 2, 2))],
    ids=str,
)
def test_logits_match_hugging_face_transformers(name, shape):
    found = hf_logits(name, shape)
    with np.load(hf_case.LOGITS_FILE) as file:
        theirs = file[name]
    vocabulary = theirs.shape[-1]
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(found[..., :vocabulary], theirs, rtol=0, atol=1e-4)
    assert np.isneginf(found[..., vocabulary:]).all()
    assert found.shape[-1] == 256


# --- guards ------------------------------------------------------------------------------------


def trace(config):
    mesh = mesh_of(config)
    step = sharded_model.loss_and_gradients(config, model.declare(config), mesh)
    return jax.eval_shape(step, *jax.eval_shape(lambda: arguments(config, mesh)), jnp.int32(0))


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4)], ids=str)
def test_a_missing_psum_is_an_error_at_trace_time(shape, monkeypatch):
    def forgetful(declared, grads, gathered):
        def reduce(w, part):
            if gathered and w.gathered_dim is not None:
                dim = w.gathered_dim % part.ndim
                part = lax.psum_scatter(part, "fsdp", scatter_dimension=dim, tiled=True)
            return part

        return jax.tree.map(reduce, declared, grads)

    config = config_of(shape)
    trace(config)
    monkeypatch.setattr(weights, "reduce_gradients", forgetful)
    with pytest.raises((TypeError, ValueError), match="out_specs"):
        trace(config)


def test_an_unreduced_loss_is_an_error_at_trace_time(monkeypatch):
    monkeypatch.setattr(sharded_model, "summarize", unreduced)
    with pytest.raises((TypeError, ValueError), match="out_specs"):
        trace(config_of((2, 1, 1), moe_layers=0))


def unreduced(config, sums, routing, balance_scale):
    zero = jnp.zeros(())
    return sharded_model.Stats(sums[0], zero, zero, jnp.int32(0), None)


@pytest.mark.parametrize(
    ("shape", "virtual", "fields", "flag", "works"),
    [
        ((1, 1, 8), 1, {"num_attention_heads": 12}, "model.num_attention_heads", 16),
        ((1, 2, 1), 2, {"num_hidden_layers": 12}, "model.num_hidden_layers", 16),
        ((8, 1, 1), 1, {"hidden_size": 44}, "model.hidden_size", 48),
        (
            (2, 1, 2),
            1,
            {"n_routed_experts": 6, "experts_layout": "expert_parallel"},
            "model.n_routed_experts",
            8,
        ),
        ((1, 1, 2), 1, {"intermediate_size": 71}, "model.intermediate_size", 72),
        (
            (1, 1, 2),
            1,
            {"moe_intermediate_size": 63, "n_shared_experts": 3},
            "model.moe_intermediate_size",
            64,
        ),
    ],
)
def test_a_size_that_does_not_divide_is_an_error_with_one_that_does(
    shape, virtual, fields, flag, works
):
    name = flag.split(".")[1]
    message = rf"--{flag} {fields[name]} is .*not divisible.*Use --{flag} {works}\b"
    with pytest.raises(ValueError, match=message):
        model.declare(config_of(shape, virtual=virtual, **fields))
    model.declare(config_of(shape, virtual=virtual, **(fields | {name: works})))


def test_a_vocabulary_that_does_not_divide_is_an_error_with_a_mesh_that_works():
    message = r"--model.vocab_size 500 .*512 with padding.* Use --mesh.pipeline 1 --mesh.tensor 2.$"
    with pytest.raises(ValueError, match=message):
        model.declare(config_of((1, 3, 2), blocks=6))
    model.declare(config_of((1, 1, 2), blocks=6))
