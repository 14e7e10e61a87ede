"""Run kernels under a shard_map that checks types.

The paths of JAX's private modules occur only in this file. The kernels' files look up names in
them with `private`.
"""

import importlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

# The context manager that sets check_vma, and the backward passes of the Pallas kernels.
CHECK = "jax._src.config._check_vma"
SPLASH_BACKWARD = (
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel._splash_attention_bwd"
)
TRITON_BACKWARD = "jax.experimental.pallas.ops.gpu.attention._mha_backward"
# The primitives of cuDNN. They do not query the device, which may be absent when compiling.
CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
# Positions of a tile on GPUs: those of cuDNN. Triton's may be smaller, and then it computes up to a
# tenth fewer scores.
GPU_TILE = 128
GPU_KERNELS = ("cudnn", "triton")  # best first


def private(name: str) -> Any:
    """Return a private object of JAX by its dotted name.

    Raises  ImportError if this version of JAX has no such name.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"jax {jax.__version__} has no {name}, a private name that kernels need. Use "
            "--model.attention_kernel xla --model.experts_kernel tiles, or a version of jax that "
            "requirements.txt allows."
        ) from error


class Inputs(NamedTuple):
    """What attention takes: see attention.attend."""

    q: jax.Array  # [b, T, n, A]
    k: jax.Array  # [b, S, y, A]
    v: jax.Array  # [b, S, y, W]
    segments: jax.Array | None  # [b, S] index of a position's document; None if it is the only one
    scale: float
    window: int = 0  # positions that a query attends to, with its own; 0 for all earlier ones
    sinks: jax.Array | None = None  # [n] a score of each head that has no value, float32
    places: jax.Array | None = None  # [T] of the queries among S positions; None: all, in order


class Kernel(NamedTuple):
    """An attention kernel and its gradient.

    They are functions of arrays [b, T, n or y, .] without varying-axes types. Each also takes
    `interpret`: run as JAX operations, on a device without the kernel.
    """

    plain: Callable[..., Any]  # q, k, v[, segments] -> [out]
    forward: Callable[..., Any]  # q, k, v[, segments] -> out, logsumexp of scores [b, n, T]
    # gradient of out, q, k, v, out, logsumexp[, segments] -> gradients of q, k, v
    backward: Callable[..., Any]
    logarithm: float = 1.0  # of the base of its logsumexp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def call(kernel: Kernel, sinks_n: jax.Array | None, *inputs: jax.Array) -> jax.Array:
    """Run a kernel on q, k, v[, segments]."""
    if sinks_n is not None:
        return _call_forward(kernel, sinks_n, *inputs)[0]
    [out] = foreign_p.bind(*inputs, function=kernel.plain)
    return out


def _call_forward(
    kernel: Kernel, sinks_n: jax.Array | None, *inputs: jax.Array
) -> tuple[jax.Array, Any]:
    q, k, v, *segments = inputs
    out, logsumexp = foreign_p.bind(*inputs, function=kernel.forward)
    if sinks_n is not None:
        # The backward pass of a kernel divides by the sum that it is given, so with that of scores
        # and sink its gradients are those of both.
        sink_1n1 = sinks_n[None, :, None] / kernel.logarithm
        kept = jax.nn.sigmoid((logsumexp - sink_1n1) * kernel.logarithm)
        logsumexp -= jnp.log(kept) / kernel.logarithm
        out = (out * kept.swapaxes(1, 2)[..., None]).astype(out.dtype)
    # Saved with its heads concatenated, because a TPU pads the last dimension to 128.
    out, logsumexp = checkpoint_name((lax.collapse(out, 2), logsumexp), "attention")
    out = out.reshape(*q.shape[:3], v.shape[-1])
    return out, (sinks_n, q, k, v, out, logsumexp, *segments)


def _call_backward(kernel: Kernel, residuals: Any, grad: jax.Array) -> Any:
    sinks_n, *residuals = residuals
    gradients = foreign_p.bind(grad, *residuals, function=kernel.backward)
    if sinks_n is not None:
        out, logsumexp = residuals[3:5]
        share_bnT = jnp.exp(sinks_n[None, :, None] - logsumexp * kernel.logarithm)
        change_bTn = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        sinks_n = -(share_bnT * change_bTn.swapaxes(1, 2)).sum((0, 2))
    return sinks_n, *gradients, *[None] * (len(residuals) - 5)  # of segments


call.defvjp(_call_forward, _call_backward)


def repeat_heads(q: jax.Array, *keys_and_values: jax.Array) -> tuple[jax.Array, ...]:
    """Repeat each head of keys and values [b, S, y, .] for its query heads: [b, S, n, .]."""
    times = q.shape[2] // keys_and_values[0].shape[2]
    if times == 1:
        return keys_and_values
    return tuple(jnp.repeat(a, times, axis=2) for a in keys_and_values)


def swapped(*arrays: jax.Array) -> list[jax.Array]:
    """[b, T, n, .] <-> [b, n, T, .]."""
    return [a.swapaxes(1, 2) for a in arrays]


# --- the primitive --------------------------------------------------------------------------------

# shard_map with check_vma=True rejects stock Pallas kernels, which have no varying-axes types. This
# primitive is opaque to JAX: its results vary along the axes of its arguments. The kernel contains
# no collective, so it is traced without the check, for its shapes and to lower it. The primitive
# has no gradient of its own, and works under jit only.
foreign_p = Primitive("foreign_kernel")
foreign_p.multiple_results = True


def untyped(function: Callable[..., Any], interpret: bool) -> Callable[..., Any]:
    """Trace a kernel's function without check_vma, and with full float32 precision."""

    @wraps(function)
    def unchecked(*args: jax.Array) -> Any:
        precision = "highest" if args[0].dtype == jnp.float32 else "default"
        with private(CHECK)(False), jax.default_matmul_precision(precision):
            return function(*args, interpret=interpret)

    return unchecked


@foreign_p.def_abstract_eval
def _shapes(*avals: Any, function: Callable[..., Any]) -> list[Any]:
    assert len({a.mat for a in avals}) == 1, "arguments vary along different axes"
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    results = jax.eval_shape(untyped(function, interpret=False), *plain)
    return [avals[0].update(shape=a.shape, dtype=a.dtype, weak_type=False) for a in results]


def _lower(ctx: Any, *args: Any, function: Callable[..., Any], interpret: bool) -> Any:
    # Types without axes, because some operations read them even without the check.
    plain = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    lower = mlir.lower_fun(untyped(function, interpret), multiple_results=True)
    return lower(ctx.replace(avals_in=plain), *args)


mlir.register_lowering(foreign_p, partial(_lower, interpret=True))
mlir.register_lowering(foreign_p, partial(_lower, interpret=False), platform="tpu")
mlir.register_lowering(foreign_p, partial(_lower, interpret=False), platform="cuda")
