"""Kernels of attention, splash for TPUs, cuDNN's and Triton's for NVIDIA GPUs, and what makes a
kernel that is not the project's own work where shard_map checks types. All of jax that is private
is named here, and only here.

Letters: b sequences of this rank, T positions, n heads of this rank.
"""

import dataclasses
import importlib
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

from utils import LANES
from weights import vary, varying

BLOCK = 512  # positions that splash takes at once, where that divides a sequence

# A context that sets whether varying-axes types are checked, and the gradient of the splash kernel.
CHECK = "jax._src.config._check_vma"
BACKWARD = (
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel._splash_attention_bwd"
)
TRITON_BACKWARD = "jax.experimental.pallas.ops.gpu.attention._mha_backward"
# Calls of cuDNN without questions to the device, which may not be here.
CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
# Positions at once on GPUs: those of cuDNN's tiles. Triton's can be smaller, so that the share of
# scores that it computes is less by up to a tenth.
GPU_BLOCK = 128


def private(name: str) -> Any:
    """What jax has by a name that it does not promise to keep.

    Raises  ValueError where this jax has nothing by that name.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"jax {jax.__version__} has no {name}, which is private and which kernels of attention "
            "need. Use --model.attention xla, or a jax that requirements.txt allows."
        ) from error


class Kernel(NamedTuple):
    """A kernel and its gradient, as functions of arrays [b, T, n, .] without varying-axes types.

    All also take `interpret`: to run as operations of jax, on a device that the kernel is not for.
    """

    plain: Callable[..., Any]  # q, k, v[, segments] -> out, alone
    # The same -> out, and what its backward pass needs of log(sum(exp(scores))): [b, n, T].
    forward: Callable[..., Any]
    backward: Callable[..., Any]  # gradient of out, q, k, v, and these -> gradients of q, k, v


def splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float
) -> jax.Array:
    """The kernel for TPUs that ships with jax; queries and keys may be wider than values."""
    T = k.shape[1]
    assert q.shape[1] == T and T % LANES == 0, "see attention.chosen"
    # The kernel leaves the scale to its caller. In bfloat16 it is rounded with the queries, by as
    # much as they are already.
    arrays = q * scale, k, v, () if segments is None else (segments,)
    # What is the same on some ranks, as segments are over tensor, meets there what is not.
    return _call(splash_kernel(q.shape[2], T), *vary(arrays, varying(arrays)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, extra: tuple[jax.Array, ...]
) -> jax.Array:
    [out] = foreign_p.bind(q, k, v, *extra, function=kernel.plain)
    return out


def _call_forward(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, extra: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    out, logsumexp = foreign_p.bind(q, k, v, *extra, function=kernel.forward)
    # Kept with its heads side by side: a TPU pads a last dimension to 128.
    out, logsumexp = checkpoint_name((lax.collapse(out, 2), logsumexp), "attention")
    out = out.reshape(v.shape)
    return out, (q, k, v, out, logsumexp, extra)


def _call_backward(kernel: Kernel, kept: Any, grad: jax.Array) -> Any:
    q, k, v, out, logsumexp, extra = kept
    arrays = grad, q, k, v, out, logsumexp
    return *foreign_p.bind(*arrays, *extra, function=kernel.backward), None


_call.defvjp(_call_forward, _call_backward)


def swapped(*arrays: jax.Array) -> list[jax.Array]:
    """[b, T, n, .] <-> [b, n, T, .]."""
    return [a.swapaxes(1, 2) for a in arrays]


def block_size(T: int) -> int:
    """Positions that splash takes at once."""
    return next(size for size in range(BLOCK, 0, -LANES) if T % size == 0)


@cache  # one object for one size: programs that hold it compare as equal
def splash_kernel(n: int, T: int) -> Kernel:
    """Of n heads and T positions. Inside it heads come before positions."""
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

    def splash_plain(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=False, interpret=interpret)
        run = jax.vmap(lambda q, k, v, *segments: kernel(q, k, v, ids(segments)))
        return swapped(run(*swapped(q, k, v), *segments))

    def splash_forward(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=True, interpret=interpret)

        def one(q, k, v, *segments):
            out, (logsumexp,) = kernel(q, k, v, ids(segments))
            return out, logsumexp

        out, logsumexp = jax.vmap(one)(*swapped(q, k, v), *segments)
        return *swapped(out), logsumexp

    def splash_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, *others: jax.Array, interpret: bool
    ) -> Any:
        # jax offers no call of the backward pass alone. This is the rule of its own vjp.
        kernel = make(save_residuals=False, interpret=interpret)
        infos = kernel.dq_mask_info, kernel.dkv_mask_info
        sinks = None

        def one(grad, q, k, v, out, logsumexp, *segments):
            kept = (q, k, v, ids(segments), sinks, out, logsumexp, *infos)
            return private(BACKWARD)(**kernel.kwargs, res=kept, do=grad)[3:6]

        return swapped(*jax.vmap(one)(*swapped(grad, q, k, v, out), *others))

    return Kernel(splash_plain, splash_forward, splash_backward)


# --- cuDNN ----------------------------------------------------------------------------------------


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float
) -> jax.Array:
    """The kernel of NVIDIA's library, called as jax's own attention calls it (its `implementation=
    "cudnn"` refuses values that are narrower than queries, which the library takes on Hopper
    from version 9.10 on).
    """
    assert segments is None, "see attention.chosen"
    arrays = q, k, v
    return _call(cudnn_kernel(scale), *vary(arrays, varying(arrays)), ())


@cache
def cudnn_kernel(scale: float) -> Kernel:
    """Causal, and where it is interpreted by the formulas of arXiv:2307.08691, section 2.3.2."""

    def library(name: str) -> Any:
        return private(f"{CUDNN}.{name}")

    def how() -> dict[str, Any]:
        return {
            "scale": scale,
            "seed": 0,
            "dropout_rate": 0.0,
            "variadic_args": (False, False),  # no bias and so no gradient of one
            "mask_type": library("MaskType").CAUSAL,
            "layout": library("AttentionLayout").BTNH.value,
            "sliding_window_length": None,
        }

    def none(q: Any) -> list[jax.Array]:
        """For a bias, lengths and offsets of queries and keys, tables of pages."""
        return [jnp.zeros(0, q.dtype)] * 7

    def scores(q: Any, k: Any) -> jax.Array:
        T = q.shape[1]
        product = jnp.einsum("bTnA,bSnA->bnTS", q, k, preferred_element_type=jnp.float32)
        return jnp.where(jnp.tri(T, dtype=bool), scale * product, -jnp.inf)

    def cudnn_plain(q: Any, k: Any, v: Any, interpret: bool) -> Any:
        if interpret:
            return cudnn_forward(q, k, v, interpret)[:1]
        call = library("_dot_product_attention_fwd_p")
        return call.bind(q, k, v, *none(q), is_training=False, **how())

    def cudnn_forward(q: Any, k: Any, v: Any, interpret: bool) -> Any:
        if not interpret:
            call = library("_dot_product_attention_fwd_p")
            return call.bind(q, k, v, *none(q), is_training=True, **how())
        scores_bnTS = scores(q, k)
        logsumexp = jax.nn.logsumexp(scores_bnTS, axis=-1)
        share_bnTS = jnp.exp(scores_bnTS - logsumexp[..., None]).astype(v.dtype)
        return jnp.einsum("bnTS,bSnW->bTnW", share_bnTS, v), logsumexp

    def cudnn_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, interpret: bool
    ) -> Any:
        if not interpret:
            call = library("_dot_product_attention_bwd_p")
            return call.bind(q, k, v, *none(q), logsumexp, out, grad, **how())
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        share_bnTS = jnp.exp(scores(q, k) - logsumexp[..., None])
        sum_bnT = product("bTnW,bTnW->bnT", grad, out)
        d_bnTS = product("bTnW,bSnW->bnTS", grad, v) - sum_bnT[..., None]
        d_bnTS = (scale * share_bnTS * d_bnTS).astype(q.dtype)
        d_q = product("bnTS,bSnA->bTnA", d_bnTS, k)
        d_k = product("bnTS,bTnA->bSnA", d_bnTS, q)
        d_v = product("bnTS,bTnW->bSnW", share_bnTS.astype(q.dtype), grad)
        return [d.astype(q.dtype) for d in (d_q, d_k, d_v)]

    return Kernel(cudnn_plain, cudnn_forward, cudnn_backward)


# --- Triton ---------------------------------------------------------------------------------------


def triton(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float
) -> jax.Array:
    """The kernel for NVIDIA GPUs that ships with jax. It knows documents, and heads of one width:
    values that are narrower than queries are given zeros.
    """
    wide = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - v.shape[-1])])
    arrays = q, k, wide, () if segments is None else (segments,)
    return _call(triton_kernel(scale, q.shape[-1]), *vary(arrays, varying(arrays)))[
        ..., : v.shape[-1]
    ]


@cache
def triton_kernel(scale: float, width: int) -> Kernel:
    """Causal, of heads of a width."""
    from jax.experimental.pallas.ops.gpu import attention as library

    # Tiles of the forward pass that shared memory has room for, also where it is 100 KiB.
    size = GPU_BLOCK if width <= 64 else GPU_BLOCK // 2
    blocks = dataclasses.replace(library.BlockSizes.get_default(), block_q=size, block_k=size)
    how = {
        "sm_scale": scale,
        "causal": True,
        "block_sizes": blocks,
        "backward_pass_impl": "triton",
        "num_warps": None,
        "num_stages": 2,
        "grid": None,
        "debug": False,
    }

    def triton_plain(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        return triton_forward(q, k, v, *segments, interpret=interpret)[:1]

    def triton_forward(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        return library.mha(
            q, k, v, *(segments or [None]), interpret=interpret, return_residuals=True, **how
        )

    def triton_backward(grad: Any, *kept: jax.Array, interpret: bool) -> Any:
        # As of splash: jax offers no call of the backward pass alone.
        q, k, v, out, logsumexp, *segments = kept
        found = private(TRITON_BACKWARD)(
            interpret=interpret,
            return_residuals=False,
            res=(q, k, v, *(segments or [None]), out, logsumexp),
            do=grad,
            **how,
        )
        return found[:3]

    return Kernel(triton_plain, triton_forward, triton_backward)


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
        with private(CHECK)(False), jax.default_matmul_precision(precision):
            return function(*args, interpret=interpret)

    return unchecked


@foreign_p.def_abstract_eval
def _shapes(*avals: Any, function: Callable[..., Any]) -> list[Any]:
    assert len({a.mat for a in avals}) == 1, "arguments differ along different axes"
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    found = jax.eval_shape(untyped(function, interpret=False), *plain)
    return [avals[0].update(shape=a.shape, dtype=a.dtype, weak_type=False) for a in found]


def _lower(ctx: Any, *args: Any, function: Callable[..., Any], interpret: bool) -> Any:
    # Types without axes: some operations look at them even where nothing is checked.
    plain = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    lower = mlir.lower_fun(untyped(function, interpret), multiple_results=True)
    return lower(ctx.replace(avals_in=plain), *args)


mlir.register_lowering(foreign_p, partial(_lower, interpret=True))
mlir.register_lowering(foreign_p, partial(_lower, interpret=False), platform="tpu")
mlir.register_lowering(foreign_p, partial(_lower, interpret=False), platform="cuda")
