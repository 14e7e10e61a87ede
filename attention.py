"""Causal attention by XLA, and by the splash kernel on TPUs.

Letters: b sequences of this rank, T query and S key positions, n heads of this rank, A width of
queries and keys, W of values.
"""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as private_config  # private: see untyped
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

import utils
from utils import LANES
from weights import vary

MASKED = -1e30  # added to a score; finite, so that a row with nothing to see stays finite
BLOCK = 512  # positions that splash takes at once, where that divides a sequence


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


def attend(
    q_bTnA: jax.Array,
    k_bSnA: jax.Array,
    v_bSnW: jax.Array,
    segments_bS: jax.Array | None,
    implementation: str,
) -> jax.Array:
    """softmax(q k^T / sqrt(A)) v over earlier positions of the same segment -> [b, T, n, W].

    Named "attention" for train.remat, with what a kernel's backward pass needs beside it.

    segments_bS  number of the document that a position belongs to; None where a window is one
                 document. With T < S (XLA only) the queries are the last T positions.
    """
    return {"xla": _xla, "splash": _splash}[implementation](q_bTnA, k_bSnA, v_bSnW, segments_bS)


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
    out_bTnW = jnp.einsum("bnTS,bSnW->bTnW", probs_bnTS, v, precision=precision)
    return checkpoint_name(out_bTnW, "attention")


# --- splash ---------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel and its gradient, as functions of arrays without varying-axes types.

    All also take `interpret`: to run as operations of jax, on a device that the kernel is not for.
    """

    plain: Callable[..., Any]  # q, k, v[, segments] -> out, alone
    forward: Callable[..., Any]  # the same -> out, log(sum(exp(scores)))
    backward: Callable[..., Any]  # gradient of out, q, k, v, and these -> gradients of q, k, v


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    """The kernel for TPUs that ships with jax; queries and keys may be wider than values."""
    T = k.shape[1]
    assert q.shape[1] == T and T % LANES == 0, "see chosen"
    # The kernel leaves the scale to its caller. In bfloat16 it is rounded with the queries, by as
    # much as they are already.
    arrays = q * q.shape[-1] ** -0.5, k, v, () if segments is None else (segments,)
    types = [jax.typeof(a).mat.varying for a in jax.tree.leaves(arrays)]
    # What is the same on some ranks, as segments are over tensor, meets there what is not.
    axes = tuple(axis for axis in utils.MESH_AXES if any(axis in varying for varying in types))
    return _call(splash_kernel(q.shape[2], T), *vary(arrays, axes))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, extra: tuple[jax.Array, ...]
) -> jax.Array:
    """[b, T, n, .] in and out; the kernel wants heads before positions."""
    [out] = foreign_p.bind(*swapped(q, k, v), *extra, function=kernel.plain)
    return out.swapaxes(1, 2)


def _call_forward(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, extra: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    out, logsumexp = foreign_p.bind(*swapped(q, k, v), *extra, function=kernel.forward)
    [out] = swapped(out)
    # Kept with its heads side by side: a TPU pads a last dimension to 128.
    out, logsumexp = checkpoint_name((lax.collapse(out, 2), logsumexp), "attention")
    out = out.reshape(v.shape)
    return out, (q, k, v, out, logsumexp, extra)


def _call_backward(kernel: Kernel, kept: Any, grad: jax.Array) -> Any:
    q, k, v, out, logsumexp, extra = kept
    arrays = swapped(grad, q, k, v, out)
    found = foreign_p.bind(*arrays, logsumexp, *extra, function=kernel.backward)
    return *swapped(*found), None


_call.defvjp(_call_forward, _call_backward)


def swapped(*arrays: jax.Array) -> list[jax.Array]:
    """[b, T, n, .] <-> [b, n, T, .]."""
    return [a.swapaxes(1, 2) for a in arrays]


def block_size(T: int) -> int:
    """Positions that splash takes at once."""
    return next(size for size in range(BLOCK, 0, -LANES) if T % size == 0)


def computed_share(config: utils.Config, platform: str) -> float:
    """Share of the rectangle of scores that is computed: splash passes over the blocks that
    causality masks whole.
    """
    T = config.train.sequence_length
    blocks = T // block_size(T) if chosen(config, platform) == "splash" else 1
    return (blocks + 1) / (2 * blocks)


@cache  # one object for one size: programs that hold it compare as equal
def splash_kernel(n: int, T: int) -> Kernel:
    """Of arrays [b, n, T, .]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sizes = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    blocks = library.BlockSizes(**{f"block_{name}": block_size(T) for name in sizes})

    def make(**how: bool) -> Any:
        mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * n)
        return library.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, **how
        )

    def ids(segments: tuple[jax.Array, ...]) -> Any:
        return library.SegmentIds(*segments, *segments) if segments else None

    def plain(*arrays: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=False, interpret=interpret)
        return [jax.vmap(lambda q, k, v, *segments: kernel(q, k, v, ids(segments)))(*arrays)]

    def forward(*arrays: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=True, interpret=interpret)

        def one(q, k, v, *segments):
            out, (logsumexp,) = kernel(q, k, v, ids(segments))
            return out, logsumexp

        return jax.vmap(one)(*arrays)

    def backward(*arrays: jax.Array, interpret: bool) -> Any:
        # Private: jax offers no call of the backward pass alone. This is the rule of its own vjp.
        kernel = make(save_residuals=False, interpret=interpret)
        infos = kernel.dq_mask_info, kernel.dkv_mask_info
        sinks = None

        def one(grad, q, k, v, out, logsumexp, *segments):
            kept = (q, k, v, ids(segments), sinks, out, logsumexp, *infos)
            found = library._splash_attention_bwd(**kernel.kwargs, res=kept, do=grad)
            return found[3:6]

        return jax.vmap(one)(*arrays)

    return Kernel(plain, forward, backward)


# --- a kernel where types are checked -------------------------------------------------------------

# A stock Pallas kernel knows nothing of varying-axes types and is refused where shard_map checks
# them (check_vma=True). This operation is opaque to jax: its results differ along the axes that its
# arguments differ along, and the kernel, in which there is no collective, is looked into without
# the check, to know its shapes and when the program is lowered. It has no gradient of its own, and
# works under jit only.
foreign_p = Primitive("foreign_kernel")
foreign_p.multiple_results = True


def untyped(function: Callable[..., Any], interpret: bool) -> Callable[..., Any]:
    """A function of a Kernel, traced without the check and with exact products of float32."""

    @wraps(function)
    def unchecked(*args: jax.Array) -> Any:
        precision = "highest" if args[0].dtype == jnp.float32 else "default"
        with private_config._check_vma(False), jax.default_matmul_precision(precision):
            return function(*args, interpret=interpret)

    return unchecked


@foreign_p.def_abstract_eval
def _shapes(*avals: Any, function: Callable[..., Any]) -> list[Any]:
    assert len({a.mat for a in avals}) == 1, "arguments differ along different axes"
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    found = jax.eval_shape(untyped(function, interpret=False), *plain)
    return [avals[0].update(shape=a.shape, dtype=a.dtype, weak_type=False) for a in found]


def _lower(ctx: Any, *args: Any, function: Callable[..., Any], interpret: bool) -> Any:
    return mlir.lower_fun(untyped(function, interpret), multiple_results=True)(ctx, *args)


mlir.register_lowering(foreign_p, partial(_lower, interpret=True))
mlir.register_lowering(foreign_p, partial(_lower, interpret=False), platform="tpu")
