"""Grouped-query attention: loss and gradients, decoding, and a third attention.

The third is ALiBi, which this file adds without a change elsewhere.
"""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
import hardware
import hf_case
import model
import reference
import utils
import weights
from common import batch_of, check_step, config_of, decoded_logits, relative_error
from inference import decode
from planning import cost

LLAMA3 = {
    "rope_rope_type": "llama3", "rope_factor": 4.0, "rope_theta": 10.0,
    "rope_original_max_position_embeddings": 12,
}  # fmt: skip


def config_for(shape=(1, 1, 1), gather="step", segments=False, train=None, **fields):
    """Return the config of a model of which each size is one that no other letter has."""
    fields = {"num_key_value_heads": 2, "head_dim": 10, "capacity_factor": 0.0} | LLAMA3 | fields
    return config_of(shape, 1, gather, segments, train, attention="gqa", **fields)


def test_loss_and_gradients_match_the_one_device_reference():
    """With every option, experts that are dropless and sharded, 2 ranks for each key head."""
    options = {"attention_bias": True, "qk_norm": True, "sliding_window": 7}
    config = config_for((2, 1, 4), "layer", segments=True, experts_layout="sharded", **options)
    check_step(config, hf_case.weights(config.model, 3))


def test_a_head_of_keys_is_cached_once_per_head_and_token():
    """The point of fewer heads (arXiv:2305.13245): a cache of Y / N of the size."""
    for heads in (2, 4):
        config = config_for(num_key_value_heads=heads)
        cached = attention.kind_of(config.model).cache(config.model, config.mesh.tensor)
        assert sum(array.heads * array.width for array in cached) == 2 * heads * 10


def test_model_flops_count_the_positions_in_the_window():
    config, T, window = config_for(sliding_window=5), 16, 5
    declared = model.declare(config)
    pairs = sum(min(t + 1, window) for t in range(T))
    heads = config.model.num_hidden_layers * config.model.num_attention_heads
    whole = dataclasses.replace(config.model, sliding_window=0)
    windowed, full = (hardware.palm_flops_per_token(m, declared, T) for m in (config.model, whole))
    # The rule leaves out half of the diagonal.
    expected = 6 * heads * 20 * ((pairs - window / 2) / T - T / 2)
    assert windowed - full == pytest.approx(expected, rel=1e-6)
    types = (utils.FULL_ATTENTION, utils.SLIDING_ATTENTION, utils.SLIDING_ATTENTION)
    third = config_for(sliding_window=5, layer_types=types, num_hidden_layers=6)
    six = config_for(sliding_window=0, num_hidden_layers=6)
    some, none = (hardware.palm_flops_per_token(c.model, declared, T) for c in (third, six))
    layers = 6 / config.model.num_hidden_layers
    assert some - none == pytest.approx(2 / 3 * layers * expected, rel=1e-6)


# --- a third attention ----------------------------------------------------------------------------


@flax.struct.dataclass
class Alibi(attention.GroupedQueryAttention):
    """Attention with linear biases (arXiv:2108.12409): a score falls with the distance of its key.

    A query adds a constant to all of its scores without effect. So -slope * (t - s) is slope * s,
    the product of one more column of queries and keys.
    """

    @staticmethod
    def widths(m):
        return m.head_dim + 1, m.head_dim

    @staticmethod
    def cache(m, tensor):
        keys, values = attention.GroupedQueryAttention.cache(m, tensor)
        return keys._replace(width=m.head_dim + 1), values

    def heads(self, h_bTD, m, position_bT, rope, kernel="xla"):
        q, k, v = super().heads(h_bTD, m, position_bT, rope=None)
        b, T, n, _ = q.shape
        first = jax.lax.axis_index("tensor") * n
        number_n = (first + jnp.arange(n, dtype=jnp.int32)).astype(jnp.float32)
        slope_n = 2.0 ** (-1.0 - number_n) / self.scale(m, None)
        slope = jnp.broadcast_to(slope_n[None, None, :, None].astype(q.dtype), (b, T, n, 1))
        place = position_bT[:, :, None, None].astype(k.dtype)
        place = jnp.broadcast_to(place, (b, T, k.shape[2], 1))
        return jnp.concatenate([q, slope], -1), jnp.concatenate([k, place], -1), v


def alibi_reference(w, x_BTD, fields, segments_BT, rotary):
    """Return the attention of `Alibi`, by its distances."""
    h = reference.rms_norm(x_BTD, w["norm"], fields.rms_norm_eps)
    kv, T = w["key_value"], x_BTD.shape[1]
    q, k, v = (jnp.einsum("BTD,DNA->BTNA", h, a) for a in (w["query"], kv["key"], kv["value"]))
    distance = jnp.asarray(np.arange(T)[:, None] - np.arange(T)[None, :], x_BTD.dtype)
    y = jnp.zeros_like(x_BTD)
    for n in range(q.shape[2]):
        of_key = n // (q.shape[2] // k.shape[2])
        score = jnp.einsum("BTA,BSA->BTS", q[:, :, n], k[:, :, of_key]) * q.shape[-1] ** -0.5
        score = score - (2.0 ** -(n + 1) * distance)[None]
        score = jnp.where(reference.visible(segments_BT, fields)[:, 0], score, -jnp.inf)
        mixed = jnp.einsum("BTS,BSA->BTA", jax.nn.softmax(score, axis=-1), v[:, :, of_key])
        y += jnp.einsum("BTA,AD->BTD", mixed, w["out"][n])
    return y


def test_another_attention_is_trained_decoded_planned_and_counted(monkeypatch):
    monkeypatch.setitem(attention.KINDS, "alibi", Alibi)
    monkeypatch.setattr(reference, "grouped_attention", alibi_reference)
    monkeypatch.setattr(decode, "KEY_BLOCK", 8)
    train = {"microbatches": 1, "global_batch_size": 4}
    gqa = config_for((1, 1, 2), train=train, blocks=2, moe_layers=0)
    alibi = utils.changed(gqa, {"model.attention": "alibi"})
    tree, tokens = hf_case.weights(gqa.model, 3), batch_of(alibi)["tokens"]
    check_step(alibi, tree)
    expected = np.asarray(reference.logits(tree, tokens, alibi.model))
    seen = expected > -np.inf
    logits = decoded_logits(alibi, tree, tokens)
    assert relative_error(logits[seen], expected[seen]) <= 1e-5
    plans = [cost.predict(c, None) for c in (alibi, gqa)]
    assert plans[0].flops_per_chip > plans[1].flops_per_chip
    declared = model.declare(alibi)
    assert weights.count(declared) == weights.count(model.declare(gqa))
    flops = [hardware.palm_flops_per_token(c.model, declared, 16) for c in (alibi, gqa)]
    assert flops[0] > flops[1]
