"""Kinds of layers that this file adds without a change elsewhere, each in a class and a line.

Gated DeltaNet has a state in place of a softmax over earlier positions. The other is a feed-forward
network without a gate. `register` has the two lines.

Letters as in model.py; A is the width of queries and keys.
"""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import attention
import hardware
import hf_case
import model
import reference
import utils
import weights
from attention import norm_weight, with_norms
from common import batch_of, check_step, config_of, mesh_of, reference_step
from device_kernels import choice
from inference import sampling
from planning import cost
from weights import RESIDUAL_SCALE, matmul, normal, ones, vary, varying, weight, zeros

LINEAR = "linear_attention"


@flax.struct.dataclass
class GatedDeltaNet(attention.Attention):
    """Linear attention by the gated delta rule (arXiv:2412.06464, equation 10).

    A head has a state S [A, W]. Each position multiplies it by alpha, between 0 and 1, and moves
    what it returns for the key towards the value by a share beta:
        S = alpha S + beta k (v - (alpha S)^T k)^T
    The published layer has short convolutions and an output gate as well.
    """

    norm: jax.Array | None = norm_weight()
    query: jax.Array = weight("D/fsdp N/tensor A", normal("D"), matrix="D x N A")
    key: jax.Array = weight("D/fsdp N/tensor A", normal("D"), matrix="D x N A")
    value: jax.Array = weight("D/fsdp N/tensor W", normal("D"), matrix="D x N W")
    decay: jax.Array = weight("D/fsdp N/tensor", normal("D"))
    decay_bias: jax.Array = weight("N/tensor", zeros, decay=False, float32=True)
    share: jax.Array = weight("D/fsdp N/tensor", normal("D"))
    value_norm: jax.Array = weight("W", ones, decay=False, float32=True)
    out: jax.Array = weight("N/tensor W D/fsdp", normal("N W", RESIDUAL_SCALE), matrix="N W x D")
    norm_after: jax.Array | None = norm_weight()

    # A is another setting than in grouped-query attention.
    FLAGS = {"A": "qk_nope_head_dim", "W": "v_head_dim"}  # noqa: RUF012

    @classmethod
    def declare(cls, config, size):
        return with_norms(weights.declare(cls, size), config.model)

    @classmethod
    def flops(cls, m, keys):
        return 2.0 * m.num_attention_heads * 3 * m.qk_nope_head_dim * m.v_head_dim

    def mix(self, inputs_bTX, context, m, run, kernel):
        q, k, v = (
            matmul("bTD,DnA->bTnA", inputs_bTX, w) for w in (self.query, self.key, self.value)
        )
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        q, k = (a * lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
        decay, share = (matmul("bTD,Dn->bTn", inputs_bTX, w) for w in (self.decay, self.share))
        alpha = jnp.exp(-jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias[None, None]))
        beta = jax.nn.sigmoid(share.astype(jnp.float32))
        if context.segments is not None:
            first = context.segments != jnp.roll(context.segments, 1, axis=1)
            alpha = jnp.where(first[:, :, None], 0.0, alpha)

        @jax.named_scope("recurrence")
        def step(state_bnAW, position):
            q, k, v, alpha, beta = position
            state_bnAW = alpha[:, :, None, None] * state_bnAW
            error = beta[:, :, None] * (v - matmul("bnA,bnAW->bnW", k, state_bnAW))
            state_bnAW += k[:, :, :, None] * error[:, :, None, :]
            return state_bnAW, matmul("bnA,bnAW->bnW", q, state_bnAW)

        positions = tuple(jnp.swapaxes(a, 0, 1) for a in (q, k, v, alpha, beta))
        b, _, n, A = q.shape
        start = vary(jnp.zeros((b, n, A, v.shape[-1])), varying(positions))
        _, y_TbnW = lax.scan(step, start, positions)
        y_bTnW = weights.rms_norm(jnp.swapaxes(y_TbnW, 0, 1), self.value_norm, m.rms_norm_eps)
        return y_bTnW.astype(inputs_bTX.dtype)


@flax.struct.dataclass
class SquaredRelu:
    """down(relu(up x)^2), as in Primer (arXiv:2109.08668)."""

    norm: jax.Array | None = norm_weight()
    up: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    down: jax.Array = weight("F/tensor D/fsdp", normal("F", RESIDUAL_SCALE), matrix="F x D")
    norm_after: jax.Array | None = norm_weight()

    @classmethod
    def declare(cls, config, size):
        return with_norms(weights.declare(cls, size), config.model)

    @jax.named_scope("mlp")
    def add(self, x_btD, options, position):
        h_btD = model.normed(x_btD, self.norm, options.model)
        h_bTD = model.gather_sequence(h_btD, "input", options.sequence_parallel)
        y_bTf = jax.nn.relu(matmul("bTD,Df->bTf", h_bTD, self.up)) ** 2
        partial_bTD = matmul("bTf,fD->bTD", y_bTf, self.down)
        y_btD = model.scatter_sequence(partial_bTD, "output", options.sequence_parallel)
        return x_btD + model.normed(y_btD, self.norm_after, options.model), None


@pytest.fixture(autouse=True)
def register(monkeypatch):
    monkeypatch.setitem(attention.KINDS, LINEAR, GatedDeltaNet)
    monkeypatch.setitem(model.FEED_FORWARDS, "mlp", SquaredRelu)


def config_for(**fields):
    """Return a config with layers of GatedDeltaNet, GQA and MLA: 2, 1, 1 of them, twice."""
    types = LINEAR, LINEAR, utils.FULL_ATTENTION, "mla"
    usual = {"layer_types": types, "blocks": 2, "dense_layers": 4, "moe_layers": 0}
    usual |= {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 10}
    # A norm of values near 0, which some keys and queries have, would multiply rounding errors.
    usual["rms_norm_eps"] = 1e-2
    train = {"microbatches": 2, "global_batch_size": 8}
    return config_of((2, 2, 2), segments=True, train=train, **usual | fields)


def tree_of(config):
    """Return a canonical tree of random weights."""
    m, make = config.model, hf_case.Maker(np.random.default_rng(3), np.float32)
    tree, D, N = hf_case.weights(m, 3), m.hidden_size, m.num_attention_heads
    A, W = m.qk_nope_head_dim, m.v_head_dim
    for run in m.runs:
        del tree["blocks"][run.name]["mlp"]["gate"]
        stack, of_run = (m.blocks, run.layers), dataclasses.replace(m, attention=run.attention)
        part = tree["blocks"][run.name]
        if run.attention != LINEAR:
            part["attention"] = make.attention(of_run, stack)
        else:
            part["attention"] = make.norms(m, stack) | {
                "query": make.normal(stack, D, N, A, std=D**-0.5),
                "key": make.normal(stack, D, N, A, std=D**-0.5),
                "value": make.normal(stack, D, N, W, std=D**-0.5),
                "decay": make.normal(stack, D, N, std=D**-0.5),
                "decay_bias": make.normal(stack, N, std=1.0),
                "share": make.normal(stack, D, N, std=D**-0.5),
                "value_norm": make.norm(stack, W),
                "out": make.normal(stack, N, W, D, std=(N * W) ** -0.5),
            }
    return tree


def deltanet_reference(w, x_BTD, m, segments_BT):
    """Return the layer without the residual: equation 10, whose state is [W, A], with a matrix."""
    einsum, h_BTD = reference.einsum, reference.norm_of(w, "norm", x_BTD, m)
    q, k, v = (einsum("BTD,DNA->BTNA", h_BTD, w[name]) for name in ("query", "key", "value"))
    q, k = (a / jnp.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    decay = einsum("BTD,DN->BTN", h_BTD, w["decay"]) + w["decay_bias"][None, None]
    alpha = 1 / (1 + jnp.exp(decay))
    beta = 1 / (1 + jnp.exp(-einsum("BTD,DN->BTN", h_BTD, w["share"])))
    B, T, N, A = k.shape
    state, found = jnp.zeros((B, N, v.shape[-1], A), x_BTD.dtype), []
    for t in range(T):
        same = segments_BT[:, t] == segments_BT[:, max(t - 1, 0)]
        state = jnp.where(same[:, None, None, None], state, 0.0)
        kk = einsum("BNA,BNZ->BNAZ", k[:, t], k[:, t])
        keep = jnp.eye(A)[None, None] - beta[:, t, :, None, None] * kk
        state = einsum("BNWA,BNAZ->BNWZ", alpha[:, t, :, None, None] * state, keep)
        state = state + einsum("BNW,BNA->BNWA", beta[:, t, :, None] * v[:, t], k[:, t])
        found.append(einsum("BNWA,BNA->BNW", state, q[:, t]))
    y = reference.rms_norm(jnp.stack(found, axis=1), w["value_norm"], m.rms_norm_eps)
    return einsum("BTNW,NWD->BTD", y, w["out"])


def squared_relu_reference(w, x_BTD, m):
    """Return the feed-forward layer without the residual."""
    h_BTF = reference.einsum("BTD,DF->BTF", reference.norm_of(w, "norm", x_BTD, m), w["up"])
    return reference.einsum("BTF,FD->BTD", jnp.maximum(h_BTF, 0) ** 2, w["down"])


def test_two_steps_on_every_axis_match_the_one_device_reference(monkeypatch):
    softmax_attention = reference.attention

    def attention_reference(w, x_BTD, m, segments_BT, rotary):
        if "decay" in w:
            return deltanet_reference(w, x_BTD, m, segments_BT)
        return softmax_attention(w, x_BTD, m, segments_BT, rotary)

    monkeypatch.setattr(reference, "attention", attention_reference)
    monkeypatch.setattr(reference, "mlp", squared_relu_reference)
    config = config_for()
    tree, batch = tree_of(config), batch_of(config)
    before = check_step(config, tree)
    _, gradients = reference_step(tree, batch, config.model)
    after = check_step(config, jax.tree.map(lambda w, g: np.asarray(w - g), tree, gradients))
    assert after["cross_entropy"] < before["cross_entropy"] - 0.1


def test_memory_and_flops_of_a_recurrence_are_planned_and_its_parameters_counted():
    config, T = config_for(), 16
    m, plan = config.model, cost.predict(config, None)
    A, W, layers = m.qk_nope_head_dim, m.v_head_dim, 4
    assert plan.parameters == sum(w.size for w in jax.tree.leaves(tree_of(config)))
    assert plan.memory_bytes_per_chip == sum(plan.memory.values())
    products = layers * m.num_attention_heads * 2 * 2 * A * W  # of state with key, and with query
    share = config.train.global_batch_size * T // 8  # of a chip
    assert plan.flops["attention recurrence"]["forward"] == products * share
    assert plan.flops["attention recurrence"]["backward"] == 2 * products * share
    linear = config_for(layer_types=(LINEAR,))
    found = [hardware.palm_flops_per_token(linear.model, model.declare(linear), t) for t in (T, 99)]
    assert found[0] == found[1]


def test_a_kernel_needs_layers_with_a_softmax_and_the_widths_of_all_of_them():
    def kernel(*types):
        c = config_for(layer_types=types, compute_dtype="bfloat16", head_dim=16)
        return choice.describe_kernel(utils.changed(c, {"data.segments": False}), "gpu9.0")

    assert kernel(LINEAR, utils.FULL_ATTENTION) == "cudnn"
    assert kernel(LINEAR, utils.FULL_ATTENTION, "mla").startswith(
        "xla (cudnn: head widths 32 and 28"
    )
    assert kernel(LINEAR).startswith("xla (cudnn: no layer has a softmax")


def test_a_pattern_names_kinds_of_layers_and_only_sliding_attention_has_the_window():
    types = LINEAR, utils.SLIDING_ATTENTION, "mla", utils.FULL_ATTENTION
    runs = config_for(layer_types=types, sliding_window=5).model.runs
    assert [run.attention for run in runs] == [LINEAR, "gqa", "mla", "gqa"]
    assert [run.window for run in runs] == [0, 5, 0, 0]


def test_a_word_without_a_layer_and_text_from_layers_without_a_cache_are_refused():
    config = config_for(layer_types=(LINEAR, "linear"))
    with pytest.raises(utils.ConfigError, match=f"types linear: .* gqa, {LINEAR}"):
        model.declare(config)
    for config in (config_for(), config_for(layer_types=(LINEAR,))):
        with pytest.raises(utils.ConfigError, match=f"{LINEAR}.*: only a model of one"):
            sampling.for_samples(config, mesh_of(config), 16, [])
