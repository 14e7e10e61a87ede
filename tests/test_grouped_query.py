"""Grouped-query attention: loss and gradients on every mesh, decoding, and a third attention.

The third is ALiBi, which this file adds without a change elsewhere.
"""

import dataclasses
import functools

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
import sharded_model
import utils
import weights
from common import (
    batch_of,
    canonical,
    config_of,
    decoded_logits,
    errors,
    full_logits,
    mesh_of,
    mostly_long,
    on_mesh,
    relative_error,
    transformer_of,
)
from inference import decode

BOUND = 2e-5
LLAMA3 = {
    "rope_rope_type": "llama3",
    "rope_factor": 4.0,
    "rope_original_max_position_embeddings": 12,
    "rope_theta": 10.0,
}
# Of the model's families. Each has sizes that no other letter has.
MODELS = {
    "Llama 3": {"num_key_value_heads": 2, **LLAMA3},
    "Qwen2": {"num_key_value_heads": 2, "attention_bias": True, "moe_layers": 0, "dense_layers": 2},
    "Qwen3": {"num_key_value_heads": 1, "qk_norm": True, "tie_word_embeddings": False},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 5, "prefix_layers": 1},
    "all": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "qk_norm": True,
        "sliding_window": 7,
        "rope_in_moe_layers": False,
        **hf_case.YARN,
    },
}
CASES = {  # model, shape, virtual, step
    "1x1x1": ("Llama 3", (1, 1, 1), 1, {}),
    "4x1x1": ("Qwen2", (4, 1, 1), 1, {"gather": "layer"}),
    "1x4x1": ("Qwen3", (1, 4, 1), 1, {"train": {"remat": "full"}}),
    "1x1x4": ("all", (1, 1, 4), 1, {"segments": True}),  # 2 ranks for each key head
    "1x2x4": ("Qwen3", (1, 2, 4), 1, {"gather": "layer", "train": {"remat": "attention"}}),
    "2x2x2": ("Mistral", (2, 2, 2), 1, {"segments": True, "gather": "layer"}),
    "2x2x2_virtual": ("all", (2, 2, 2), 2, {"train": {"microbatches": 2, "remat": "latents"}}),
    "2x1x2x2_virtual": ("Qwen3", (2, 1, 2, 2), 2, {}),
    # A window in the kernel, with a head of keys for each two of queries on a rank.
    "1x1x2_splash": (
        "Mistral",
        (1, 1, 2),
        1,
        {
            "segments": True,
            "attention_kernel": "splash",
            "sliding_window": 40,
            "blocks": 1,
            "train": {"seq_len": 128, "global_batch_size": 4, "microbatches": 2},
        },
    ),
}


def config_for(name, shape=(1, 1, 1), virtual=1, **step):
    fields = {"attention": "gqa", "head_dim": 10, "capacity_factor": 0.0}
    return config_of(shape, virtual=virtual, **(fields | MODELS[name] | step))


@functools.cache
def trained(name):
    kind, shape, virtual, step = CASES[name]
    config = config_for(kind, shape, virtual, **step)
    mesh, tree = mesh_of(config), hf_case.weights(config.model, 3)
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh)
    step = jax.jit(lambda w, batch: run(w, batch, jnp.int32(0)))
    batch = batch_of(config)
    grads, stats = step(transformer_of(config, mesh, tree), on_mesh(config, mesh, batch))
    if not config.data.segments:
        batch["segments"] = np.zeros_like(batch["segments"])
    wanted = jax.jit(jax.value_and_grad(reference.loss, has_aux=True), static_argnums=2)
    return config, canonical(config, grads), stats, wanted(tree, batch, config.model)


@pytest.mark.parametrize("name", mostly_long(CASES, "1x1x4", "2x2x2"))
def test_loss_and_gradients_match_the_one_device_reference(name):
    _, grads, stats, ((loss, _), wanted) = trained(name)
    assert relative_error(stats.loss, loss) <= BOUND
    worst = {leaf: e for leaf, e in errors(grads, wanted).items() if e > BOUND}
    assert not worst, worst


def test_key_heads_are_replicated_where_tensor_ranks_outnumber_them():
    config = config_for("Qwen3", (1, 1, 4))
    key_value = model.declare(config).blocks.moe.attention.key_value
    assert isinstance(key_value, attention.ReplicatedKeyValue)
    assert key_value.key.axes == ("pipeline", "fsdp")
    sharded = model.declare(config_for("Llama 3", (1, 1, 2))).blocks.moe.attention.key_value
    assert isinstance(sharded, attention.KeyValue)
    assert sharded.key.axes == ("pipeline", "fsdp", "tensor")


def test_key_heads_that_neither_divide_the_ranks_nor_are_divided_by_them_are_refused():
    config = config_of((1, 1, 4), attention="gqa", num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(utils.ConfigError, match=r"num_key_value_heads 6 is not divisible by"):
        model.declare(config)


def decoded(config, tree):
    """Return the logits of incremental decoding, and those of the full forward pass."""
    mesh, batch = mesh_of(config), batch_of(config, 1)
    w = transformer_of(config, mesh, tree)
    run = full_logits(config, model.declare(config), mesh)
    whole = np.asarray(run(w, on_mesh(config, mesh, batch)))[0]
    seen = whole > -np.inf
    return decoded_logits(config, tree, batch["tokens"])[seen], whole[seen]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Llama 3", (2, 1, 2)),
        pytest.param("Qwen2", (1, 1, 1), marks=pytest.mark.long),
        pytest.param("Qwen3", (1, 1, 4), marks=pytest.mark.long),
        pytest.param("Mistral", (2, 1, 2), marks=pytest.mark.long),
        ("all", (1, 1, 4)),
    ],
)
def test_decoding_gives_the_logits_of_the_full_forward_pass(name, shape, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 8)
    train = {"microbatches": 1, "global_batch_size": 4, "seq_len": 24}
    config = config_for(name, shape, train=train)
    found, whole = decoded(config, hf_case.weights(config.model, 3))
    assert relative_error(found, whole) <= 1e-5


def test_a_head_of_keys_is_cached_once_per_head_and_token():
    """The point of fewer heads (arXiv:2305.13245): a cache of Y / N of the size."""
    config = config_for("Llama 3")
    assert decode.values_per_token(config) == 2 * 2 * 10
    many = dataclasses.replace(config.model, num_key_value_heads=4)
    assert decode.values_per_token(dataclasses.replace(config, model=many)) == 2 * 4 * 10


def test_model_flops_count_the_positions_in_the_window():
    config = config_for("Mistral")
    declared, T, window = model.declare(config), 16, 5
    pairs = sum(min(t + 1, window) for t in range(T))
    heads = config.model.num_hidden_layers * config.model.num_attention_heads
    whole = dataclasses.replace(config.model, sliding_window=0)
    found, full = (hardware.palm_flops_per_token(m, declared, T) for m in (config.model, whole))
    # The rule leaves out half of the diagonal.
    expected = 6 * heads * 20 * ((pairs - window / 2) / T - T / 2)
    assert found - full == pytest.approx(expected, rel=1e-6)


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

    def heads(self, h_bTD, m, position_bT, rope):
        q, k, v = super().heads(h_bTD, m, position_bT, rope=False)
        b, T, n, _ = q.shape
        if position_bT is None:
            position_bT = jnp.arange(T)[None]
        first = jax.lax.axis_index("tensor") * n
        number_n = (first + jnp.arange(n, dtype=jnp.int32)).astype(jnp.float32)
        slope_n = 2.0 ** (-1.0 - number_n) / self.scale(m)
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


@pytest.fixture
def alibi(monkeypatch):
    monkeypatch.setitem(attention.KINDS, "alibi", Alibi)
    monkeypatch.setattr(reference, "grouped_attention", alibi_reference)
    monkeypatch.setattr(decode, "BLOCK", 8)
    train = {"microbatches": 1, "global_batch_size": 4}
    config = config_for("Llama 3", (1, 1, 2), train=train)
    return utils.changed(config, {"model.attention": "alibi"})


def test_another_attention_is_trained_decoded_planned_and_counted_without_other_changes(alibi):
    gqa = utils.changed(alibi, {"model.attention": "gqa"})
    tree, batch = hf_case.weights(gqa.model, 3), batch_of(alibi)
    batch["segments"] = np.zeros_like(batch["segments"])
    mesh, declared = mesh_of(alibi), model.declare(alibi)
    run = sharded_model.loss_and_gradients(alibi, declared, mesh)
    step = jax.jit(lambda w, batch: run(w, batch, jnp.int32(0)))
    grads, stats = step(transformer_of(alibi, mesh, tree), on_mesh(alibi, mesh, batch))
    wanted = jax.jit(jax.value_and_grad(reference.loss, has_aux=True), static_argnums=2)
    (loss, _), wanted_grads = wanted(tree, batch, gqa.model)
    assert relative_error(stats.loss, loss) <= BOUND
    worst = {k: e for k, e in errors(canonical(alibi, grads), wanted_grads).items() if e > BOUND}
    assert not worst, worst

    found, whole = decoded(alibi, tree)
    assert relative_error(found, whole) <= 1e-5

    from planning import cost

    plans = [cost.predict(c, None) for c in (alibi, gqa)]
    assert plans[0].flops_per_chip > plans[1].flops_per_chip
    assert weights.count(declared) == weights.count(model.declare(gqa))
    flops = [hardware.palm_flops_per_token(c.model, declared, 16) for c in (alibi, gqa)]
    assert flops[0] > flops[1]
