"""Causal attention: which implementation, and the one by XLA.

Letters: b sequences of this rank, T query and S key positions, n heads of this rank, A width of
queries and keys, W of values.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import kernels
import utils
from utils import LANES

MASKED = -1e30  # added to a score; finite, so that a row with nothing to see stays finite


def chosen(config: utils.Config, platform: str) -> str:
    """The implementation that `--model.attention` asks for on this platform: xla or splash.

    auto is splash on a TPU where it can be used, else XLA.

    platform  as jax names it: cpu, gpu or tpu. On a CPU splash is interpreted, which is slow.
    Raises    ValueError where splash is asked for and cannot run.
    """
    wanted, T = config.model.attention, config.train.sequence_length
    if wanted == "auto":
        # float32 is for checking against other devices, and XLA is on all of them.
        fits = T % LANES == 0 and config.model.compute_dtype == "bfloat16"
        return "splash" if platform == "tpu" and fits else "xla"
    utils.check_attention(config)
    if wanted == "splash" and platform == "gpu":
        raise ValueError(
            "--model.attention splash is a kernel for TPUs, and these devices are GPUs. Use "
            "--model.attention auto."
        )
    return wanted


def computed_share(config: utils.Config, platform: str) -> float:
    """Share of the rectangle of scores that is computed: splash passes over the blocks that
    causality masks whole.
    """
    T = config.train.sequence_length
    blocks = T // kernels.block_size(T) if chosen(config, platform) == "splash" else 1
    return (blocks + 1) / (2 * blocks)


@jax.named_scope("scores")
def attend(
    q_bTnA: jax.Array,
    k_bSnA: jax.Array,
    v_bSnW: jax.Array,
    segments_bS: jax.Array | None,
    implementation: str,
    scale: float,
) -> jax.Array:
    """softmax(scale q k^T) v over earlier positions of the same segment -> [b, T, n, W].

    Named "attention" for train.remat, with what a kernel's backward pass needs beside it.

    segments_bS  number of the document that a position belongs to; None where a window is one
                 document. With T < S (XLA only) the queries are the last T positions.
    """
    function = {"xla": _xla, "splash": kernels.splash}[implementation]
    return function(q_bTnA, k_bSnA, v_bSnW, segments_bS, scale)


def _mask(T: int, S: int, segments_bS: jax.Array | None) -> jax.Array:
    """True where a query may see a key: [1 or b, 1, T, S]."""
    query = lax.broadcasted_iota(jnp.int32, (1, 1, T, S), 2) + (S - T)
    key = lax.broadcasted_iota(jnp.int32, (1, 1, T, S), 3)
    causal = key <= query
    if segments_bS is None:
        return causal
    same = segments_bS[:, None, S - T :, None] == segments_bS[:, None, None, :]
    return causal & same


def _xla(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float
) -> jax.Array:
    precision = "highest" if q.dtype == jnp.float32 else None
    scores_bnTS = jnp.einsum(
        "bTnA,bSnA->bnTS", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    # Added rather than selected: the backward pass of an addition needs no copy of the mask.
    bias = jnp.where(_mask(q.shape[1], k.shape[1], segments), 0.0, MASKED)
    # float32: the sum of up to S exponentials.
    probs_bnTS = jax.nn.softmax(scores_bnTS * scale + bias).astype(v.dtype)
    out_bTnW = jnp.einsum("bnTS,bSnW->bTnW", probs_bnTS, v, precision=precision)
    return checkpoint_name(out_bTnW, "attention")
