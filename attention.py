"""Attention, and its kinds: latent (MLA) and grouped-query (GQA).

A kind is a class of weights with the methods of `Attention`.

Letters as in model.py. A rank has b sequences, n query heads, and y heads of keys and values; there
are T query and S key positions. In latent attention:
    H head width without position      R rotary width      A = H + R      U = H + W
    Q query latent                     C key-value latent
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import matrix
import utils
import weights
from context_parallel import gather_positions
from device_kernels.adapter import GPU_KERNELS, Inputs, repeat_heads
from device_kernels.cudnn import cudnn
from device_kernels.splash import splash
from device_kernels.triton import triton
from rope import rotate, rotate_last, softmax_scale
from utils import BATCH_AXES, FULL_ATTENTION, SLIDING_ATTENTION, ConfigError, LayerRun, Rope
from weights import (
    RESIDUAL_SCALE,
    Size,
    matmul,
    normal,
    ones,
    rms_norm,
    vary,
    varying,
    weight,
    zeros,
)

Heads = tuple[jax.Array, jax.Array, jax.Array]  # queries, keys and values


class CacheArray(NamedTuple):
    """One array [layers, B, S, heads, width] of a cache."""

    heads: int
    width: int
    axis: str | None  # mesh axis that heads are sharded over
    values: int = 0  # first columns of the last array, which are values

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(None, BATCH_AXES, None, self.axis)


class Context(NamedTuple):
    """What attention knows of the tokens of a microbatch."""

    positions: jax.Array  # [b, T], or [1, T] for all sequences
    segments: jax.Array | None  # [b, S] index of the document; None if a window is one document
    places: jax.Array | None = None  # as in Inputs


class Attention(Protocol):
    """What training and planning use of a kind of attention. Decoding uses SoftmaxAttention."""

    FLAGS: ClassVar[Mapping[str, str]]  # of Model, for each letter of its layouts
    norm: jax.Array | None  # [D], of the input
    norm_after: jax.Array | None  # [D], of the output
    out: jax.Array  # [n, W, D], from heads to the output
    out_bias: jax.Array | None = None  # [D], of the output

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> Self:
        """Return the Weights."""

    @classmethod
    def flops(cls, m: utils.Model, keys: float) -> float:
        """Return FLOPs of a token's forward pass, but of weights, with so many earlier `keys`."""

    def inputs(self, h_btD: jax.Array, m: utils.Model) -> jax.Array:
        """Return what is gathered over tensor, [b, t, X], from the input after the norm."""
        return h_btD

    def mix(
        self, inputs_bTX: jax.Array, context: Context, m: utils.Model, run: LayerRun, kernel: str
    ) -> jax.Array:
        """Return the values [b, T, n, W] of this rank's heads. A softmax runs in the kernel."""


class SoftmaxAttention(Attention):
    """Attention by a softmax of scores. Its subclasses make queries, keys and values."""

    DECODING_ORDER: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # of dimensions of weights
    sinks: jax.Array | None = None  # [n], as in Inputs

    @staticmethod
    def widths(m: utils.Model) -> tuple[int, int]:
        """Return the widths of a query and key head, and of a value head."""

    @classmethod
    def scale(cls, m: utils.Model, rope: Rope | None) -> float:
        """Return the factor on scores."""
        return softmax_scale(rope or m, cls.widths(m)[0])

    def heads(
        self,
        inputs_bTX: jax.Array,
        m: utils.Model,
        position_bT: jax.Array,
        rope: Rope | None,
        kernel: str = "xla",
    ) -> Heads:
        """Return queries, keys and values of this rank, rotated by `rope`, for the kernel."""

    @staticmethod
    def cache(m: utils.Model, tensor: int) -> tuple[CacheArray, ...]:
        """Return the arrays that hold earlier positions: keys first, and values last."""

    def cached_heads(
        self, inputs_bTX: jax.Array, m: utils.Model, position_bT: jax.Array, rope: Rope | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return queries over cached keys, and what to cache of these positions."""
        q_bTnA, *keys_and_values = self.heads(inputs_bTX, m, position_bT, rope)
        return q_bTnA, tuple(keys_and_values)

    def values(self, y_bTnC: jax.Array, m: utils.Model) -> jax.Array:
        """Return heads [b, T, n, W] from weighted sums of cached values."""
        return y_bTnC

    @classmethod
    def flops(cls, m: utils.Model, keys: float) -> float:
        return 2.0 * m.num_attention_heads * keys * sum(cls.widths(m))

    def mix(
        self, inputs_bTX: jax.Array, context: Context, m: utils.Model, run: LayerRun, kernel: str
    ) -> jax.Array:
        heads = self.heads(inputs_bTX, m, context.positions, run.rope, kernel)
        window = run.window if run.window < heads[1].shape[1] else 0
        options = self.scale(m, run.rope), window, self.sinks, context.places
        # attend names its own residuals "attention".
        return attend(kernel, Inputs(*heads, context.segments, *options))


def norm_weight() -> Any:
    """Declare the scale of an RMSNorm of a layer's input or output."""
    return weight("D", ones, decay=False, float32=True)


def with_norms(w: Any, m: utils.Model) -> Any:
    """Return the weights of a layer with the norms that `--model.norms` has."""
    return weights.kept(w, norm=m.norms != "after", norm_after=m.norms != "before")


# --- latent attention -----------------------------------------------------------------------------


@flax.struct.dataclass
class Query:
    """Query projection without a latent."""

    up: jax.Array = weight("D/fsdp N/tensor H+R", normal("D"), matrix="D x N H+R")


@flax.struct.dataclass
class LowRankQuery:
    """Query projection through a latent (arXiv:2405.04434, equations 12-13)."""

    down: jax.Array = weight("D/fsdp Q", normal("D"), matrix="D x Q")
    norm: jax.Array = weight("Q", ones, decay=False, float32=True)
    up: jax.Array = weight("Q/fsdp N/tensor H+R", normal("Q"), matrix="Q x N H+R")


@flax.struct.dataclass
class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    kv_down projects to the key-value latent (C) and the rotary key (R).
    """

    query: Query | LowRankQuery
    norm: jax.Array | None = norm_weight()
    kv_down: jax.Array = weight("D/fsdp C+R", normal("D"), matrix="D x C+R")
    kv_norm: jax.Array = weight("C", ones, decay=False, float32=True)
    kv_up: jax.Array = weight("C/fsdp N/tensor H+W", normal("C"), matrix="C x N H+W")
    out: jax.Array = weight("N/tensor W D/fsdp", normal("N W", RESIDUAL_SCALE), matrix="N W x D")
    norm_after: jax.Array | None = norm_weight()

    FLAGS: ClassVar[dict[str, str]] = {
        "Q": "q_lora_rank",
        "C": "kv_lora_rank",
        "H": "qk_nope_head_dim",
        "R": "qk_rope_head_dim",
        "W": "v_head_dim",
    }
    # [N, H + W, C]: decoding contracts it in this order, and would transpose it for every token.
    DECODING_ORDER: ClassVar[dict[str, tuple[int, ...]]] = {"kv_up": (-2, -1, -3)}

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> "LatentAttention":
        query = weights.declare(LowRankQuery if config.model.q_lora_rank else Query, size)
        return with_norms(weights.declare(cls, size, query=query), config.model)

    @staticmethod
    def widths(m: utils.Model) -> tuple[int, int]:
        return m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim

    def inputs(self, h_btD: jax.Array, m: utils.Model) -> jax.Array:
        """Return the inputs of the query and key-value up-projections, and the rotary key.

        They are gathered, because they are narrower than queries, keys and values. Without a query
        latent the input of the query is h.
        """
        latent_btC, key_btR = jnp.split(
            matmul("btD,DC->btC", h_btD, self.kv_down), [m.kv_lora_rank], axis=-1
        )
        epsilon = m.latent_rms_norm_eps or m.rms_norm_eps
        latent_btC = rms_norm(latent_btC, self.kv_norm, epsilon)
        query_btQ = h_btD
        if m.q_lora_rank:
            query_btQ = matmul("btD,DQ->btQ", h_btD, self.query.down)
            query_btQ = rms_norm(query_btQ, self.query.norm, epsilon)
        return jnp.concatenate([query_btQ, latent_btC, key_btR], axis=-1)

    def heads(
        self,
        inputs_bTX: jax.Array,
        m: utils.Model,
        position_bT: jax.Array,
        rope: Rope | None,
        kernel: str = "xla",
    ) -> Heads:
        """Equations 9-19 of the paper."""
        if kernel in GPU_KERNELS and isinstance(self.kv_up, jax.Array):
            return self._heads_in_place(inputs_bTX, m, position_bT, rope)
        q_bTnH, q_bTnR, latent_bTC, key_bT1R = self._project(inputs_bTX, m, position_bT, rope)
        latent_bSC, key_bS1R = gather_positions(latent_bTC), gather_positions(key_bT1R)
        kv_bSnU = matmul("bSC,CnU->bSnU", latent_bSC, self.kv_up)
        k_bSnH, v_bSnW = jnp.split(kv_bSnU, [m.qk_nope_head_dim], axis=-1)
        key_bSnR = jnp.broadcast_to(key_bS1R, (*k_bSnH.shape[:3], m.qk_rope_head_dim))
        q_bTnA = jnp.concatenate([q_bTnH, q_bTnR], axis=-1)
        return q_bTnA, jnp.concatenate([k_bSnH, key_bSnR], axis=-1), v_bSnW

    def _heads_in_place(
        self, inputs_bTX: jax.Array, m: utils.Model, position_bT: jax.Array, rope: Rope | None
    ) -> Heads:
        """Return the same heads, of which nothing is copied.

        Queries are rotated in place. The rotary key passes through an identity beside the matrix
        that expands the latent, so that one product writes complete keys. It multiplies more, and
        on GPUs is faster, as a copy of the keys takes as long as their product.
        """
        query_bTQ, latent_bTC, key_bTR = self._split(inputs_bTX, m)
        H, R = m.qk_nope_head_dim, m.qk_rope_head_dim
        q_bTnA = matmul("bTQ,QnA->bTnA", query_bTQ, self.query.up)
        if rope:
            q_bTnA = rotate_last(q_bTnA, rope, position_bT, R)
            key_bTR = rotate(key_bTR[:, :, None, :], rope, position_bT)[:, :, 0, :]
        to_key_CnH, to_value_CnW = jnp.split(self.kv_up, [H], axis=-1)
        identity_RnR = jnp.broadcast_to(jnp.eye(R)[:, None], (R, to_key_CnH.shape[1], R))
        identity_RnR = vary(identity_RnR.astype(to_key_CnH.dtype), varying(to_key_CnH))
        to_key = jnp.concatenate(
            [
                jnp.pad(to_key_CnH, ((0, 0), (0, 0), (0, R))),
                jnp.pad(identity_RnR, ((0, 0), (0, 0), (H, 0))),
            ]
        )
        both_bSC = gather_positions(jnp.concatenate([latent_bTC, key_bTR], axis=-1))
        k_bSnA = matmul("bSC,CnA->bSnA", both_bSC, to_key)
        latent_bSC = both_bSC[..., : m.kv_lora_rank]
        return q_bTnA, k_bSnA, matmul("bSC,CnW->bSnW", latent_bSC, to_value_CnW)

    @staticmethod
    def _split(inputs_bTX: jax.Array, m: utils.Model) -> list[jax.Array]:
        """Return the input of the query, the key-value latent and the rotary key."""
        query = inputs_bTX.shape[-1] - m.kv_lora_rank - m.qk_rope_head_dim
        return jnp.split(inputs_bTX, [query, query + m.kv_lora_rank], axis=-1)

    def _project(
        self, inputs_bTX: jax.Array, m: utils.Model, position_bT: jax.Array, rope: Rope | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return queries without and with position, the key-value latent and the rotary key."""
        query_bTQ, latent_bTC, key_bTR = self._split(inputs_bTX, m)
        q_bTnA = matmul("bTQ,QnA->bTnA", query_bTQ, self.query.up)
        q_bTnH, q_bTnR = jnp.split(q_bTnA, [m.qk_nope_head_dim], axis=-1)
        key_bT1R = key_bTR[:, :, None, :]
        if rope:
            q_bTnR, key_bT1R = (
                rotate(q_bTnR, rope, position_bT),
                rotate(key_bT1R, rope, position_bT),
            )
        return q_bTnH, q_bTnR, latent_bTC, key_bT1R

    @staticmethod
    def cache(m: utils.Model, tensor: int) -> tuple[CacheArray, ...]:
        """The latent and the rotary key, for all heads and on every tensor rank."""
        return (CacheArray(1, m.kv_lora_rank + m.qk_rope_head_dim, None, m.kv_lora_rank),)

    def cached_heads(
        self, inputs_bTX: jax.Array, m: utils.Model, position_bT: jax.Array, rope: Rope | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Keys and values are not materialized.

        The matrix that would expand them is absorbed into query and output (section 2.1.2).
        """
        q_bTnH, q_bTnR, latent_bTC, key_bT1R = self._project(inputs_bTX, m, position_bT, rope)
        to_key_nHC = self.kv_up[:, : m.qk_nope_head_dim]
        q_bTnC = matmul("bTnH,nHC->bTnC", q_bTnH, to_key_nHC)
        new_bT1A = jnp.concatenate([latent_bTC[:, :, None, :], key_bT1R], axis=-1)
        return jnp.concatenate([q_bTnC, q_bTnR], axis=-1), (new_bT1A,)

    def values(self, y_bTnC: jax.Array, m: utils.Model) -> jax.Array:
        return matmul("bTnC,nWC->bTnW", y_bTnC, self.kv_up[:, m.qk_nope_head_dim :])


# --- grouped-query attention ----------------------------------------------------------------------


@flax.struct.dataclass
class KeyValue:
    """Key and value projections, whose heads are sharded over tensor.

    On more tensor ranks than heads, all ranks hold all heads (replicated), and use one.
    """

    replicated: bool = flax.struct.field(pytree_node=False)
    key: jax.Array = weight("D/fsdp Y/tensor A | D/fsdp Y A", normal("D"), matrix="D x Y A")
    value: jax.Array = weight("D/fsdp Y/tensor A | D/fsdp Y A", normal("D"), matrix="D x Y A")
    key_bias: jax.Array | None = weight("Y/tensor A | Y A", zeros, decay=False)
    value_bias: jax.Array | None = weight("Y/tensor A | Y A", zeros, decay=False)
    norm: jax.Array | None = weight("Y/tensor A | Y A", ones, decay=False, float32=True)

    def of_rank(self) -> "KeyValue":
        """Return the heads that this rank's queries use: those it holds, or one of all.

        The gradient of the others is 0 here, and weights.reduce_gradients sums over tensor.
        """
        if not self.replicated:
            return self
        heads = self.key.shape[-2]
        one = lax.axis_index("tensor") * heads // lax.axis_size("tensor")

        def of_rank(w: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(w, one, 1, w.ndim - 2)

        return jax.tree.map(
            lambda w: matrix.of_side(w, "b", of_rank), self, is_leaf=matrix.is_matrix
        )


@flax.struct.dataclass
class GroupedQueryAttention(SoftmaxAttention):
    """Grouped-query attention (arXiv:2305.13245): Y heads of keys and values for N of queries.

    Multi-head attention if Y = N. The norms of queries and keys are those of Qwen3
    (arXiv:2505.09388), over each head, or of OLMo 2 (arXiv:2501.00656), over all heads. The biases
    are those of Qwen2, and those of the output and the sinks of gpt-oss (arXiv:2508.10925).
    """

    key_value: KeyValue
    norm: jax.Array | None = norm_weight()
    query: jax.Array = weight("D/fsdp N/tensor A", normal("D"), matrix="D x N A")
    query_bias: jax.Array | None = weight("N/tensor A", zeros, decay=False)
    query_norm: jax.Array | None = weight("A | N/tensor A", ones, decay=False, float32=True)
    key_norm: jax.Array | None = weight("A", ones, decay=False, float32=True)
    out: jax.Array = weight("N/tensor A D/fsdp", normal("N A", RESIDUAL_SCALE), matrix="N A x D")
    out_bias: jax.Array | None = weight("D", zeros, decay=False)
    sinks: jax.Array | None = weight("N/tensor", zeros, decay=False, float32=True)
    norm_after: jax.Array | None = norm_weight()

    FLAGS: ClassVar[dict[str, str]] = {"A": "head_dim", "Y": "num_key_value_heads"}

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> "GroupedQueryAttention":
        m, tensor = config.model, config.mesh.tensor
        replicated = m.num_key_value_heads < tensor and tensor % m.num_key_value_heads == 0
        key_value = weights.declare(KeyValue, size, layout=int(replicated), replicated=replicated)
        all_heads = m.qk_norm and m.qk_norm_all_heads
        biases = {"key_bias": m.attention_bias, "value_bias": m.attention_bias}
        key_value = weights.kept(key_value, **biases, norm=all_heads)
        w = weights.declare(cls, size, layout=int(all_heads), key_value=key_value)
        w = weights.kept(
            w,
            query_bias=m.attention_bias,
            query_norm=m.qk_norm,
            key_norm=m.qk_norm and not all_heads,
            out_bias=m.attention_out_bias,
            sinks=m.attention_sinks,
        )
        return with_norms(w, m)

    @staticmethod
    def widths(m: utils.Model) -> tuple[int, int]:
        return m.head_dim, m.head_dim

    @classmethod
    def scale(cls, m: utils.Model, rope: Rope | None) -> float:
        return softmax_scale(rope or m, m.query_pre_attn_scalar or m.head_dim)

    def heads(
        self,
        h_bTD: jax.Array,
        m: utils.Model,
        position_bT: jax.Array,
        rope: Rope | None,
        kernel: str = "xla",
    ) -> Heads:
        kv = self.key_value.of_rank()
        q_bTnA = _project(h_bTD, self.query, self.query_bias)
        k_bTyA = _project(h_bTD, kv.key, kv.key_bias)
        v_bTyA = _project(h_bTD, kv.value, kv.value_bias)
        if m.qk_norm:
            norm = norm_over_heads if m.qk_norm_all_heads else rms_norm
            q_bTnA = norm(q_bTnA, self.query_norm, m.rms_norm_eps)
            k_bTyA = norm(k_bTyA, kv.norm if m.qk_norm_all_heads else self.key_norm, m.rms_norm_eps)
        if rope:
            q_bTnA, k_bTyA = rotate(q_bTnA, rope, position_bT), rotate(k_bTyA, rope, position_bT)
        return q_bTnA, gather_positions(k_bTyA), gather_positions(v_bTyA)

    @staticmethod
    def cache(m: utils.Model, tensor: int) -> tuple[CacheArray, ...]:
        """Keys and values of each head; a head that several tensor ranks use has several copies."""
        heads = max(m.num_key_value_heads, tensor)
        return (CacheArray(heads, m.head_dim, "tensor", m.head_dim),) * 2


def norm_over_heads(x_bTnA: jax.Array, scale_nA: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the heads of all tensor ranks.  Collectives: psum(tensor) of [b, T]."""
    x32 = x_bTnA.astype(jnp.float32)
    mean = lax.pmean(jnp.mean(x32 * x32, axis=(2, 3), keepdims=True), "tensor")
    return (x32 * lax.rsqrt(mean + epsilon) * scale_nA[None, None]).astype(x_bTnA.dtype)


def _project(h_bTD: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    y_bTnA = matmul("bTD,DnA->bTnA", h_bTD, w)
    return y_bTnA if bias is None else y_bTnA + jnp.expand_dims(bias, (0, 1))


KINDS: dict[str, type[Attention]] = {"mla": LatentAttention, "gqa": GroupedQueryAttention}


def kind_of(m: utils.Model, run: LayerRun | None = None) -> type[Attention]:
    """Return the class of a run's attention; without a run that of all layers, for decoding.

    Raises  ConfigError for an unknown word of --model.layer_types, or layers that do not decode.
    """
    words = {one.attention for one in ((run,) if run else m.layer_runs)}
    if unknown := sorted(words - KINDS.keys()):
        raise ConfigError(
            f"--model.layer_types {' '.join(unknown)}: there is no such attention. Use "
            f"{', '.join([FULL_ATTENTION, SLIDING_ATTENTION, *KINDS])}."
        )
    kind, *others = (KINDS[word] for word in words)
    if not run and (others or not issubclass(kind, SoftmaxAttention)):
        raise ConfigError(
            f"layers of {', '.join(sorted(words))}: only a model of one softmax attention "
            f"generates text. Use --model.layer_types {FULL_ATTENTION} {SLIDING_ATTENTION}."
        )
    return kind


# --- attention itself -----------------------------------------------------------------------------

MASKED = -1e30  # score of a masked position; finite, so that the softmax of such a row is finite


@jax.named_scope("scores")
def attend(kernel: str, inputs: Inputs) -> jax.Array:
    """softmax(scale q k^T) v over this and earlier positions of a segment -> [b, T, n, W].

    For train.remat, the result and the other residuals of a kernel have the name "attention".

    kernel  xla, or what device_kernels/choice.py has chosen.
    """
    if kernel != "xla":  # kernels need arrays that vary along the same mesh axes
        arrays = inputs._replace(scale=None, window=None)
        inputs = vary(arrays, varying(arrays))._replace(scale=inputs.scale, window=inputs.window)
    return KERNELS[kernel](inputs)


def xla(inputs: Inputs) -> jax.Array:
    """Run `attend` as operations that XLA compiles, with all scores in memory."""
    q, k, v, segments, scale, window, sinks, places = inputs
    k, v = repeat_heads(q, k, v)
    precision = "highest" if q.dtype == jnp.float32 else None
    scores_bnTS = jnp.einsum(
        "bTnA,bSnA->bnTS", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    shape = 1, 1, q.shape[1], k.shape[1]
    query, key = (lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (2, 3))
    if places is not None:
        query = places[None, None, :, None]
    mask = key <= query
    if window:
        mask &= key > query - window
    if segments is not None:
        own_segments = segments if places is None else jnp.take(segments, places, axis=1)
        mask &= own_segments[:, None, :, None] == segments[:, None, None, :]
    # Added rather than selected, because the backward pass of an addition needs no mask.
    bias = jnp.where(mask, 0.0, MASKED)
    # In float32, for the sum of up to S exponentials.
    scores_bnTS = scores_bnTS * scale + bias
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores_bnTS.shape[:3], 1))
        scores_bnTS = jnp.concatenate([scores_bnTS, sinks], axis=-1)
    probs_bnTS = jax.nn.softmax(scores_bnTS)[..., : k.shape[1]].astype(v.dtype)
    # Transposed after the product: XLA for CPUs would fuse it in, and run at half the speed.
    out_bnTW = jnp.einsum("bnTS,bSnW->bnTW", probs_bnTS, v, precision=precision)
    return checkpoint_name(out_bnTW.swapaxes(1, 2), "attention")


KERNELS = {"xla": xla, "splash": splash, "cudnn": cudnn, "triton": triton}
