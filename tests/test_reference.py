"""reference.py against NumPy, against finite differences, and against Hugging Face transformers.

The committed values of the latter are made by make_hf_reference.py. Letters as in reference.py.
"""

import jax
import numpy as np
import pytest

import hf_case
import reference
import utils

T = 7
SEGMENTS_T = np.array([4, 4, 4, 4, 9, 9, 9])
SMALL = hf_case.model_with(
    utils.Model(),
    vocab_size=250,  # 6 pads
    hidden_size=12,
    blocks=2,
    dense_layers=1,
    moe_layers=1,
    prefix_layers=1,
    num_attention_heads=3,
    q_lora_rank=11,
    kv_lora_rank=8,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=7,
    rope_theta=50.0,
    intermediate_size=13,
    moe_intermediate_size=9,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    routed_scaling_factor=1.7,
    aux_loss_alpha=0.3,
    z_loss=0.02,
)


GROUPS = {"n_group": 3, "topk_group": 2}

ONE_LAYER = hf_case.model_with(
    SMALL, blocks=1, dense_layers=0, prefix_layers=0, tie_word_embeddings=False
)

logits_of = jax.jit(reference.logits, static_argnums=2)
loss_of = jax.jit(reference.loss, static_argnums=2)


def small(**fields):
    return hf_case.model_with(SMALL, **fields)


def weights_of(model):
    return hf_case.weights(model, seed=2, dtype=np.float64)


@pytest.fixture(autouse=True)
def float64():
    """Rounding out of the way: what is left is a difference of definition."""
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=3):
    return np.random.default_rng(seed).standard_normal(shape)


def batch_of(model, sequences=2, length=6):
    """A batch whose loss weights and documents are not all alike."""
    ids = hf_case.tokens(model.vocab_size, sequences, length + 1)
    weights = normal(sequences, length) ** 2
    weights[0, 1] = 0.0
    segments = np.repeat(np.array([[0, 1]], np.int32), length // 2, axis=1)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_weights": weights,
        "segments": np.broadcast_to(segments, ids[:, 1:].shape),
    }


def layer(model, kind):
    """The first MoE layer's attention or feed-forward, in float64."""
    weights = weights_of(model)
    return jax.tree.map(lambda leaf: leaf[0], weights["blocks"]["moe"][kind])


def slopes(function, tree, h=1e-6):
    """Of each leaf, a direction and the central difference of `function` along it."""
    leaves, shape = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        direction = normal(*leaf.shape, seed=i)
        ends = [
            function(shape.unflatten([*leaves[:i], leaf + step * direction, *leaves[i + 1 :]]))
            for step in (h, -h)
        ]
        yield direction, (ends[0] - ends[1]) / (2 * h)


def assert_gradient(gradient, function, tree):
    """`gradient` of every leaf is what a small step of that leaf does to `function`."""
    gradients = jax.tree.leaves(gradient)
    expected = list(slopes(function, tree))
    assert len(gradients) == len(expected) > 0
    for g, (direction, slope) in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(np.sum(g * direction), slope, rtol=2e-6, atol=1e-8)


def attention_pair(model, rotary):
    """`attention` of one sequence in both forms, as functions of (weights, x)."""

    def in_jax(w, x_TD):
        return reference.attention(w, x_TD[None], model, SEGMENTS_T[None], rotary)[0]

    def in_numpy(w, x_TD):
        return reference.numpy_attention(w, x_TD, model, SEGMENTS_T, rotary)

    return jax.jit(in_jax), in_numpy


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"q_lora_rank": 0},
        hf_case.YARN,
        hf_case.YARN | {"rope_mscale": 0.0},
        hf_case.YARN | {"rope_mscale_all_dim": 0.0, "latent_rms_norm_eps": 0.1},
    ],
    ids=["query latent", "none", "YaRN", "no mscale", "no mscale_all_dim, epsilon"],
)
def test_attention_matches_loops_over_tokens_and_heads(fields, rotary):
    model = small(**fields)
    in_jax, in_numpy = attention_pair(model, rotary)
    w, x_TD = layer(model, "attention"), normal(T, model.hidden_size)
    np.testing.assert_allclose(in_jax(w, x_TD), in_numpy(w, x_TD), rtol=1e-12, atol=1e-13)


def test_gradients_of_attention_match_finite_differences():
    model = small(**hf_case.YARN, latent_rms_norm_eps=0.1)
    in_jax, in_numpy = attention_pair(model, rotary=True)
    w, x_TD, probe_TD = layer(model, "attention"), normal(T, 12), normal(T, 12, seed=5)
    gradient = jax.grad(lambda both: (in_jax(*both) * probe_TD).sum())((w, x_TD))
    assert_gradient(gradient, lambda both: np.sum(in_numpy(*both) * probe_TD), (w, x_TD))


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("normalize", "groups"), [(True, {}), (False, {}), (True, GROUPS)])
def test_moe_matches_a_loop_over_tokens(scores, normalize, groups, shared):
    model = small(scoring_func=scores, norm_topk_prob=normalize, n_shared_experts=shared, **groups)
    w, x_TD = layer(model, "moe"), normal(T, model.hidden_size)
    y_BTD, counts_BE, balance = jax.jit(reference.moe, static_argnums=2)(w, x_TD[None], model)
    expected_TD, choices_TK, expected_balance = reference.numpy_moe(w, x_TD, model)
    np.testing.assert_allclose(y_BTD[0], expected_TD, rtol=1e-12, atol=1e-13)
    assert counts_BE[0].tolist() == np.bincount(choices_TK.ravel(), minlength=6).tolist()
    np.testing.assert_allclose(balance, expected_balance, rtol=1e-12)


def test_gradients_of_moe_match_finite_differences():
    model = small(**GROUPS)
    w, x_TD, probe_TD = layer(model, "moe"), normal(T, 12), normal(T, 12, seed=5)

    def in_jax(both):
        y_BTD, _, balance = reference.moe(both[0], both[1][None], model)
        return (y_BTD[0] * probe_TD).sum() + balance

    def in_numpy(both):
        y_TD, choices_TK, balance = reference.numpy_moe(*both, model)
        assert set(choices_TK.ravel()) == set(range(6)), "an expert without tokens has no gradient"
        return np.sum(y_TD * probe_TD) + balance

    assert_gradient(jax.jit(jax.grad(in_jax))((w, x_TD)), in_numpy, (w, x_TD))


@pytest.mark.parametrize("groups_per_token", [1, 2])
def test_groups_change_choices_unless_all_are_eligible(groups_per_token):
    models = [small(), small(n_group=2, topk_group=groups_per_token)]
    w, x_TD = layer(SMALL, "moe"), normal(40, 12)
    one, other = (reference.numpy_moe(w, x_TD, model)[1] for model in models)
    assert (one == other).all() == (groups_per_token == 2)


def numpy_logits(weights, batch, b):
    """Logits [T, vocabulary] of sequence b of a model of one MoE layer, its choices and balance."""
    model, w = ONE_LAYER, jax.tree.map(lambda leaf: leaf[0], weights["blocks"]["moe"])
    x_TD = weights["embedding"][batch["tokens"][b]]
    segments_T = batch["segments"][b]
    x_TD = x_TD + reference.numpy_attention(w["attention"], x_TD, model, segments_T, rotary=True)
    y_TD, choices_TK, balance = reference.numpy_moe(w["moe"], x_TD, model)
    h = [reference.numpy_rms_norm(x, weights["final_norm"], 1e-6) for x in x_TD + y_TD]
    return h @ weights["output"][: model.vocab_size].T, choices_TK, balance


def test_the_loss_and_its_parts_match_numpy():
    weights, batch = weights_of(ONE_LAYER), batch_of(ONE_LAYER)
    total, parts = loss_of(weights, batch, ONE_LAYER)
    logits, choices, balances = zip(*(numpy_logits(weights, batch, b) for b in (0, 1)), strict=True)
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    target = np.take_along_axis(np.array(logits), batch["targets"][:, :, None], axis=-1)[:, :, 0]
    share = batch["loss_weights"] / np.sum(batch["loss_weights"])
    expected = {
        "cross_entropy": np.sum(share * (log_z - target)),
        "balance": 0.3 * np.mean(balances),
        "z": 0.02 * np.sum(share * log_z**2),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(total, sum(expected.values()), rtol=1e-12)
    counts = np.bincount(np.ravel(choices), minlength=6)
    assert parts["tokens_per_expert"].tolist() == [counts.tolist()]
    assert parts["tokens_per_expert"].dtype == np.int32


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_the_loss_match_finite_differences_for_every_weight(tied):
    model = small(tie_word_embeddings=tied)
    weights, batch = weights_of(model), batch_of(model)
    gradient, parts = jax.jit(jax.grad(reference.loss, has_aux=True), static_argnums=2)(
        weights, batch, model
    )
    assert (parts["tokens_per_expert"] > 0).all(), "an expert without tokens has no gradient"
    assert_gradient(gradient, lambda w: loss_of(w, batch, model)[0], weights)
    assert not gradient["embedding" if tied else "output"][model.vocab_size :].any()


def test_a_dense_model_has_no_balance_loss_and_no_choices():
    model = small(moe_layers=0)
    _, parts = loss_of(weights_of(model), batch_of(model), model)
    assert parts["balance"] == 0.0
    assert parts["tokens_per_expert"].shape == (0, 0)


def test_padding_of_the_vocabulary_has_no_probability():
    logits = np.asarray(logits_of(weights_of(SMALL), batch_of(SMALL)["tokens"], SMALL))
    assert logits.shape[-1] == 256
    assert np.isneginf(logits[..., 250:]).all()
    assert np.isfinite(logits[..., :250]).all()


def test_a_later_token_changes_no_earlier_logit():
    weights, tokens = weights_of(SMALL), batch_of(SMALL)["tokens"]
    changed = tokens.copy()
    changed[:, 4] = (tokens[:, 4] + 1) % SMALL.vocab_size
    before, after = (
        np.asarray(logits_of(weights, ids, SMALL))[..., :250] for ids in (tokens, changed)
    )
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(axis=-1).all()


def test_the_logits_of_a_document_do_not_depend_on_its_neighbours():
    weights, tokens = weights_of(SMALL), batch_of(SMALL)["tokens"]
    segments = np.array([[0, 0, 1, 1, 1, 1]] * 2)
    together = logits_of(weights, tokens, SMALL, segments)
    alone = logits_of(weights, tokens[:, 2:], SMALL)
    np.testing.assert_allclose(together[:, 2:, :250], alone[..., :250], rtol=1e-9, atol=1e-10)
    as_one = logits_of(weights, tokens, SMALL)
    assert np.abs(as_one - together)[:, 2:, :250].max() > 0.1


@pytest.mark.parametrize("kind", ["moe", "dense", "prefix"])
def test_only_layers_with_experts_can_omit_positions(kind):
    counts = {"prefix_layers": int(kind == "prefix"), "dense_layers": int(kind == "dense")}
    counts |= {"rope_in_moe_layers": False, "blocks": 1}
    models = [small(rope_theta=theta, **counts) for theta in (50.0, 5000.0)]
    weights, tokens = weights_of(models[0]), batch_of(SMALL)["tokens"]
    one, other = (logits_of(weights, tokens, model)[..., :250] for model in models)
    assert (np.abs(one - other).max() > 1e-3) == (kind != "moe")


def hf_logits(name, moe=None, **fields):
    """Logits of a case here, in float32, and there; ours with other MoE weights or model fields."""
    case = hf_case.CASES[name]
    model = hf_case.model_with(utils.Model(), **case.model)
    weights, tokens = hf_case.weights(model, case.seed), hf_case.tokens(model.vocab_size)
    weights["blocks"]["moe"]["moe"] |= moe or {}
    with jax.enable_x64(False):
        ours = np.asarray(logits_of(weights, tokens, hf_case.model_with(model, **fields)))
    with np.load(hf_case.LOGITS_FILE) as file:
        return ours, file[name]


@pytest.mark.parametrize("name", hf_case.CASES)
def test_logits_match_hugging_face_transformers(name):
    ours, theirs = hf_logits(name)
    assert theirs.dtype == np.float32
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"moe": {"bias": np.zeros((4, 12), np.float32)}},
        {"moe": {"shared": None}},
        {"scoring_func": "softmax"},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"num_experts_per_tok": 2},
        {"rope_theta": 200.0},
        {"rope_in_moe_layers": False},
        {"rms_norm_eps": 1e-2},
        {"latent_rms_norm_eps": 1e-2},
        {"topk_group": 3},
        {"n_group": 4},
        {"rope_factor": 9.0},
        {"rope_original_max_position_embeddings": 32},
        {"rope_beta_fast": 2.0},
        {"rope_beta_slow": 1.0},
        {"rope_mscale": 0.8},
        {"rope_mscale_all_dim": 1.2},
    ],
    ids=lambda change: next(iter(change.get("moe", change))),
)
def test_the_comparison_with_transformers_detects_a_change_of(change):
    ours, theirs = hf_logits("yarn_groups", **change)
    assert np.abs(ours[..., : theirs.shape[-1]] - theirs).max() > 0.01


def test_committed_logits_record_their_versions_and_cover_every_case():
    with np.load(hf_case.LOGITS_FILE) as file:
        assert set(file) == {"versions", *hf_case.CASES}
        assert "transformers 5" in str(file["versions"])
        assert "torch 2" in str(file["versions"])


def test_weights_of_a_seed_are_reproducible():
    for left, right in zip(
        *(jax.tree.leaves(hf_case.weights(SMALL, 5)) for _ in "ab"), strict=True
    ):
        np.testing.assert_array_equal(left, right)
