"""Routing: which experts a token chooses, and the loss that balances them.

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences    T positions    D model width    E experts    K experts per token
    U expert groups               k the best of some experts or groups
A value whose name starts with `partial_` is still to be reduced over ranks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import utils
from utils import SEQUENCE_AXES
from weights import matmul


class Routing(NamedTuple):
    """Routing statistics of this rank's tokens in one MoE layer."""

    # Sum over sequences of sum_e f_e P_e (arXiv:2412.19437, equation 17); differentiable.
    partial_balance: jax.Array
    tokens_per_expert: jax.Array  # [E] int32, before any is dropped
    dropped: jax.Array  # int32: choices beyond an expert's capacity


@jax.named_scope("router")
def route(w: Any, h_btD: jax.Array, m: utils.Model) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose each token's K experts and their weights (arXiv:2412.19437, equations 12-16).

    In float32, because a rounding error can change the choice. `bias` changes the choice, and not
    the weights.

    w  model.Moe
    Returns  share_btE (scores that sum to 1), choice_btK int32, weight_btK.
    """
    logits_btE = matmul("btD,DE->btE", h_btD.astype(jnp.float32), w.router)
    if w.router_bias is not None:
        logits_btE += jnp.expand_dims(w.router_bias, (0, 1))
    scores_btE = (
        jax.nn.sigmoid(logits_btE) if m.scoring_func == "sigmoid" else jax.nn.softmax(logits_btE)
    )
    ranking_btE = lax.stop_gradient(scores_btE + jnp.expand_dims(w.bias, (0, 1)))
    if m.topk_group < m.n_group:
        ranking_btE = best_groups(ranking_btE, m)
    _, choice_btK = lax.top_k(ranking_btE, m.num_experts_per_tok)
    weight_btK = jnp.take_along_axis(scores_btE, choice_btK, axis=-1)
    if m.norm_topk_prob:
        weight_btK /= weight_btK.sum(-1, keepdims=True) + 1e-20
    share_btE = scores_btE / scores_btE.sum(-1, keepdims=True)
    return share_btE, choice_btK, weight_btK * m.routed_scaling_factor


def best_groups(ranking_btE: jax.Array, m: utils.Model) -> jax.Array:
    """Set the ranking outside each token's best groups to -inf.

    A group ranks by the sum of its two best experts (arXiv:2412.19437, section 2.1.2), or by its
    best one (arXiv:2405.04434, section 2.2.2).
    """
    ranking_btUe = ranking_btE.reshape(*ranking_btE.shape[:2], m.n_group, -1)
    counted = 1 if m.topk_method == "group_limited_greedy" else 2
    counted_btUk, _ = lax.top_k(ranking_btUe, counted)
    _, best_btk = lax.top_k(counted_btUk.sum(-1), m.topk_group)
    groups = jnp.arange(m.n_group, dtype=best_btk.dtype)[None, None, :, None]
    seen_btU = (best_btk[:, :, None, :] == groups).any(-1)
    return jnp.where(seen_btU[..., None], ranking_btUe, -jnp.inf).reshape(ranking_btE.shape)


@jax.named_scope("balance")
def balance(
    share_btE: jax.Array, choice_btK: jax.Array, m: utils.Model
) -> tuple[jax.Array, jax.Array]:
    """Return the partial sum over sequences of sum_e f_e P_e, and [E] choices of each expert.

    f is E / K times the share of the sequence's tokens that chose e, without gradient. The loss is
    linear in P, so the partial sums of ranks add up (arXiv:2412.19437, equations 17-20).

    Collectives  psum(context x tensor) of [b, E] integers.
    """
    experts = jnp.arange(m.n_routed_experts, dtype=choice_btK.dtype)[None, None, None, :]
    count_bE = (choice_btK[..., None] == experts).sum((1, 2), dtype=jnp.int32)
    T = share_btE.shape[1] * lax.axis_size(SEQUENCE_AXES)
    f_bE = lax.psum(count_bE, SEQUENCE_AXES).astype(jnp.float32) * (
        m.n_routed_experts / (m.num_experts_per_tok * T)
    )
    partial_P_bE = share_btE.sum(1) / T
    return (f_bE * partial_P_bE).sum(), count_bE.sum(0)
