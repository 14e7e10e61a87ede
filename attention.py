"""Causal attention by XLA, and by the kernels for TPU and GPU (README says where they run).

Letters: b sequences of this rank, T query and S key positions, n heads of this rank, A width of
queries and keys, W of values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as private_config  # the one private import: see typed_as_varying

from weights import vary

MASKED = -1e30  # added to a score; finite, so that a row with nothing to see stays finite


def attend(
    q_bTnA: jax.Array,
    k_bSnA: jax.Array,
    v_bSnW: jax.Array,
    segments_bS: jax.Array | None,
    implementation: str,
) -> jax.Array:
    """softmax(q k^T / sqrt(A)) v over earlier positions of the same segment -> [b, T, n, W].

    segments_bS  number of the document that a position belongs to; None where a window is one
                 document. With T < S the queries are the last T positions.
    """
    return {"auto": _xla, "xla": _xla, "splash": _splash, "cudnn": _cudnn}[implementation](
        q_bTnA, k_bSnA, v_bSnW, segments_bS
    )


def _mask(T: int, S: int, segments_bS: jax.Array | None) -> jax.Array:
    """True where a query may see a key: [1 or b, 1, T, S]."""
    query = lax.broadcasted_iota(jnp.int32, (1, 1, T, S), 2) + (S - T)
    key = lax.broadcasted_iota(jnp.int32, (1, 1, T, S), 3)
    causal = key <= query
    if segments_bS is None:
        return causal
    same = segments_bS[:, None, S - T :, None] == segments_bS[:, None, None, :]
    return causal & same


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    precision = "highest" if q.dtype == jnp.float32 else None
    scores_bnTS = jnp.einsum(
        "bTnA,bSnA->bnTS", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    # Added rather than selected: the backward pass of an addition needs no copy of the mask.
    bias = jnp.where(_mask(q.shape[1], k.shape[1], segments), 0.0, MASKED)
    # float32: the sum of up to S exponentials.
    probs_bnTS = jax.nn.softmax(scores_bnTS * q.shape[-1] ** -0.5 + bias).astype(v.dtype)
    return jnp.einsum("bnTS,bSnW->bTnW", probs_bnTS, v, precision=precision)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    """The TPU kernel that ships with JAX; queries and keys may be wider than values."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, heads = q.shape[1], q.shape[2]
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * heads)
    kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *segment: jax.Array) -> jax.Array:
        ids = [splash.SegmentIds(s.astype(jnp.int32), s.astype(jnp.int32)) for s in segment]
        return kernel(q, k, v, *ids)

    # The kernel does not scale; it wants heads before positions.
    q_bnTA, k_bnTA, v_bnTW = (a.swapaxes(1, 2) for a in (q * q.shape[-1] ** -0.5, k, v))
    # Segment numbers travel as float: a hand-written vjp must return a gradient for each argument.
    extra = () if segments is None else (segments.astype(jnp.float32),)
    out_bnTW = typed_as_varying(jax.vmap(call))(q_bnTA, k_bnTA, v_bnTW, *extra)
    return out_bnTW.swapaxes(1, 2)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    """The fused kernel of cuDNN, which wants values as wide as keys: the missing columns are zeros,
    and cut off after.
    """
    width = v.shape[-1]
    scale = q.shape[-1] ** -0.5
    wide = -(-max(q.shape[-1], width) // 8) * 8

    def pad(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, 0)] * 3 + [(0, wide - a.shape[-1])])

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *segment: jax.Array) -> jax.Array:
        mask = None
        if segment:
            mask = segment[0][:, None, :, None] == segment[0][:, None, None, :]
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
        )

    extra = () if segments is None else (segments.astype(jnp.float32),)
    return typed_as_varying(call)(pad(q), pad(k), pad(v), *extra)[..., :width]


def typed_as_varying(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`kernel`, which knows nothing of varying-axes types, made usable where shard_map checks them
    (check_vma=True).

    Without it a stock Pallas kernel raises "`manual_axis_type` on `jax.ShapeDtypeStruct` must not
    be `None`". The check is off inside the kernel only, where there is no collective; the results
    are typed as differing along the axes that the first argument differs along, and so are all
    arguments.
    """

    @jax.custom_vjp
    def call(*args: jax.Array) -> jax.Array:
        return forward(*args)[0]

    def untyped(a: jax.Array) -> jax.Array:
        return a * jnp.ones((), a.dtype)  # a value of no type; XLA folds the product away

    def forward(*args: jax.Array) -> tuple[jax.Array, object]:
        axes = tuple(jax.typeof(args[0]).mat.varying)
        with private_config._check_vma(False):
            out, vjp = jax.vjp(kernel, *map(untyped, args))
        return vary(out, axes), jax.tree.map(lambda a: vary(a, axes), vjp)

    def backward(vjp: object, grad: jax.Array) -> tuple[jax.Array, ...]:
        axes = tuple(jax.typeof(grad).mat.varying)
        with private_config._check_vma(False):
            grads = jax.tree.map(untyped, vjp)(untyped(grad))
        return tuple(vary(g, axes) for g in grads)

    call.defvjp(forward, backward)

    def same_types(*args: jax.Array) -> jax.Array:
        axes = tuple({axis for a in args for axis in jax.typeof(a).mat.varying})
        return call(*vary(args, axes))

    return same_types
