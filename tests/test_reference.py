"""reference.py against NumPy and Hugging Face transformers.

The committed values of the latter are made by make_hf_reference.py. Letters as in reference.py.
"""

import re

import jax
import numpy as np
import pytest

import hf_case
import reference
import utils
from common import batch_of, config_of

T = 7
CONFIG = config_of(
    train={"global_batch_size": 2, "seq_len": 6}, vocab_size=250, hidden_size=12, blocks=2,
    prefix_layers=1, num_attention_heads=3, q_lora_rank=11, kv_lora_rank=8, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=7, rope_theta=50.0, intermediate_size=13, z_loss=0.02,
    moe_intermediate_size=9, n_routed_experts=6, n_shared_experts=2, aux_loss_alpha=0.3,
)  # fmt: skip
SMALL, BATCH = CONFIG.model, batch_of(CONFIG)
GROUPS = {"n_group": 3, "topk_group": 2}
GREEDY = GROUPS | {"topk_method": "group_limited_greedy"}
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


@pytest.mark.parametrize(
    ("scores", "normalize", "groups", "shared"),
    [("sigmoid", True, GROUPS, 2), ("softmax", False, GREEDY, 0), ("softmax", True, {}, 1)],
)
def test_moe_matches_a_loop_over_tokens(scores, normalize, groups, shared):
    model = small(scoring_func=scores, norm_topk_prob=normalize, n_shared_experts=shared, **groups)
    w = jax.tree.map(lambda leaf: leaf[0], weights_of(model)["blocks"]["moe"]["moe"])
    x_TD = np.random.default_rng(3).standard_normal((T, model.hidden_size))
    y_BTD, counts_BE, balance = jax.jit(reference.moe, static_argnums=2)(w, x_TD[None], model)
    expected_TD, choices_TK, expected_balance = reference.numpy_moe(w, x_TD, model)
    np.testing.assert_allclose(y_BTD[0], expected_TD, rtol=1e-12, atol=1e-13)
    assert counts_BE[0].tolist() == np.bincount(choices_TK.ravel(), minlength=6).tolist()
    np.testing.assert_allclose(balance, expected_balance, rtol=1e-12)


def test_the_loss_and_its_parts_match_numpy():
    weights = weights_of(ONE_LAYER)
    batch = BATCH | {"loss_weights": BATCH["loss_weights"].astype(np.float64)}
    total, parts = loss_of(weights, batch, ONE_LAYER)
    args = weights, batch["tokens"], ONE_LAYER, batch["segments"]
    logits = np.asarray(logits_of(*args))
    assert np.isneginf(logits[..., 250:]).all() and np.isfinite(logits[..., :250]).all()
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    target = np.take_along_axis(logits, batch["targets"][:, :, None], axis=-1)[:, :, 0]
    share = batch["loss_weights"] / np.sum(batch["loss_weights"])
    w = jax.tree.map(lambda leaf: leaf[0], weights["blocks"]["moe"])
    x = weights["embedding"][batch["tokens"]]
    x += reference.attention(w["attention"], x, ONE_LAYER, batch["segments"], rotary=True)
    found = [reference.numpy_moe(w["moe"], x_TD, ONE_LAYER) for x_TD in np.asarray(x)]
    expected = {
        "cross_entropy": np.sum(share * (log_z - target)),
        "balance": 0.3 * np.mean([balance for *_, balance in found]),
        "z": 0.02 * np.sum(share * log_z**2),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(total, sum(expected.values()), rtol=1e-12)
    counts = np.bincount(np.ravel([choices for _, choices, _ in found]), minlength=6)
    assert parts["tokens_per_expert"].tolist() == [counts.tolist()]


def test_the_logits_of_a_document_do_not_depend_on_its_neighbours():
    weights, tokens = weights_of(SMALL), BATCH["tokens"]
    segments = np.array([[0, 0, 1, 1, 1, 1]] * 2)
    together = logits_of(weights, tokens, SMALL, segments)
    alone = logits_of(weights, tokens[:, 2:], SMALL)
    np.testing.assert_allclose(together[:, 2:, :250], alone[..., :250], rtol=1e-9, atol=1e-10)
    as_one = logits_of(weights, tokens, SMALL)
    assert np.abs(as_one - together)[:, 2:, :250].max() > 0.1


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_positions_are_omitted_in_every_layer_of_an_interval(interval):
    counts = {"dense_layers": 1, "no_rope_layer_interval": interval, "blocks": 1}
    models = [small(rope_theta=theta, **counts) for theta in (50.0, 5000.0)]
    weights, tokens = weights_of(models[0]), BATCH["tokens"]
    one, other = (logits_of(weights, tokens, model)[..., :250] for model in models)
    assert (np.abs(one - other).max() > 1e-3) == (interval != 1)


@pytest.mark.parametrize(
    "name",
    ["moe", "prefix_query_latent_two_shared", "interleaved_tied", "weights_not_normalized",
     "yarn_groups", "yarn_no_mscale"],
)  # fmt: skip
def test_logits_match_hugging_face_transformers(name):
    case = hf_case.CASES[name]
    model = hf_case.model_with(utils.Model(), **case.model)
    weights, tokens = hf_case.weights(model, case.seed), hf_case.tokens(model.vocab_size)
    with jax.enable_x64(False):
        ours = np.asarray(logits_of(weights, tokens, model))
    with np.load(hf_case.LOGITS_FILE) as file:
        theirs = file[name]
        assert set(file) == {"versions", *hf_case.CASES}
        assert {"transformers 5", "torch 2"} <= {*re.findall(r"\w+ \d", str(file["versions"]))}
    assert theirs.dtype == np.float32 and np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs, rtol=0, atol=1e-4)
