"""cuDNN attention for NVIDIA GPUs.

Letters: b sequences of this rank, T positions, n heads of this rank.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from device_kernels.adapter import CUDNN, Inputs, Kernel, call, private, repeat_heads
from device_kernels.chunks import in_chunks


def cudnn(inputs: Inputs) -> jax.Array:
    """Attention by NVIDIA's library, called as jax.nn.dot_product_attention calls it.

    That function rejects values narrower than queries, which cuDNN 9.10 and later support on
    Hopper.
    """
    q, k, v, segments, scale, window, sinks, places = inputs
    assert segments is None, "see choice.choose_kernel"
    if places is None:
        return call(cudnn_kernel(scale, window), sinks, q, k, v)
    assert not window, "see choice.choose_kernel"
    squares = in_chunks(cudnn_kernel(scale, 0), cudnn_kernel(scale, 0, causal=False))
    return call(squares, sinks, q, k, v, places)


@cache
def cudnn_kernel(scale: float, window: int, causal: bool = True) -> Kernel:
    """Return the kernel. Interpreted: the formulas of arXiv:2307.08691, section 2.3.2.

    window  positions that a query attends to; 0 for all earlier ones.
    """

    def library(name: str) -> Any:
        return private(f"{CUDNN}.{name}")

    def options() -> dict[str, Any]:
        # jax 0.12 and later: no function of the scores.
        unmodified = {"score_mod_name": None, "score_mod_jaxpr": None}
        return (unmodified if jax.__version_info__ >= (0, 12) else {}) | {
            "scale": scale,
            "seed": 0,
            "dropout_rate": 0.0,
            "variadic_args": (False, False),  # no bias, and no gradient of it
            "mask_type": getattr(library("MaskType"), "CAUSAL" if causal else "NO_MASK"),
            "layout": library("AttentionLayout").BTNH.value,
            "sliding_window_length": window or None,
        }

    def absent(q: Any) -> list[jax.Array]:
        """The bias, lengths and offsets of queries and keys, and page tables: none here."""
        return [jnp.zeros(0, q.dtype)] * 7

    def cudnn_plain(q: Any, k: Any, v: Any, interpret: bool) -> Any:
        return cudnn_forward(q, k, v, interpret, is_training=False)[:1]

    def cudnn_forward(q: Any, k: Any, v: Any, interpret: bool, is_training: bool = True) -> Any:
        if not interpret:
            call = library("_dot_product_attention_fwd_p")
            return call.bind(q, k, v, *absent(q), is_training=is_training, **options())
        k, v = repeat_heads(q, k, v)
        scores_bnTS = scores(q, k, scale, window, causal)
        logsumexp = jax.nn.logsumexp(scores_bnTS, axis=-1)
        share_bnTS = jnp.exp(scores_bnTS - logsumexp[..., None]).astype(v.dtype)
        return jnp.einsum("bnTS,bSnW->bTnW", share_bnTS, v), logsumexp

    def cudnn_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, interpret: bool
    ) -> Any:
        if not interpret:
            call = library("_dot_product_attention_bwd_p")
            return call.bind(q, k, v, *absent(q), logsumexp, out, grad, **options())
        product, key = partial(jnp.einsum, preferred_element_type=jnp.float32), k
        k, v = repeat_heads(q, k, v)
        share_bnTS = jnp.exp(scores(q, k, scale, window, causal) - logsumexp[..., None])
        sum_bnT = product("bTnW,bTnW->bnT", grad, out)
        d_bnTS = product("bTnW,bSnW->bnTS", grad, v) - sum_bnT[..., None]
        d_bnTS = (scale * share_bnTS * d_bnTS).astype(q.dtype)
        d_q = product("bnTS,bSnA->bTnA", d_bnTS, k)
        d_k = product("bnTS,bTnA->bSnA", d_bnTS, q)
        d_v = product("bnTS,bTnW->bSnW", share_bnTS.astype(q.dtype), grad)
        # Summed over the query heads of each key head.
        d_k, d_v = (d.reshape(*key.shape[:3], -1, d.shape[-1]).sum(3) for d in (d_k, d_v))
        return [d.astype(q.dtype) for d in (d_q, d_k, d_v)]

    return Kernel(cudnn_plain, cudnn_forward, cudnn_backward)


# --- interpreted ----------------------------------------------------------------------------------


def scores(q: Any, k: Any, scale: float, window: int, causal: bool) -> jax.Array:
    """Return [b, n, T, T], with -inf for positions that a query does not attend to."""
    T = q.shape[1]
    product = jnp.einsum("bTnA,bSnA->bnTS", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tri(T, dtype=bool) | (not causal)
    if window:
        visible &= ~jnp.tri(T, k=-window, dtype=bool)
    return jnp.where(visible, scale * product, -jnp.inf)
