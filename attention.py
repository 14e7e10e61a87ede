"""Causal attention: which implementation, and the one by XLA.

Letters: b sequences of this rank, T query and S key positions, n heads of this rank, A width of
queries and keys, W of values.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import attention_kernels
import utils
from utils import LANES

KERNELS = {"tpu": ("splash",), "gpu": ("cudnn", "triton")}  # that platforms have, best first
MASKED = -1e30  # added to a score; finite, so that a row with nothing to see stays finite


def chosen(config: utils.Config, platform: str) -> str:
    """The implementation that `--model.attention` asks for on this platform: xla or a kernel.

    auto is the first of the platform's kernels that can be used, else XLA.

    platform  as of chips.platform_of. On a CPU kernels are interpreted, which is slow.
    Raises    ValueError where a kernel is asked for and cannot run.
    """
    wanted = config.model.attention
    if wanted == "auto":
        # float32 is for checking against other devices, and XLA is on all of them.
        narrow = config.model.compute_dtype == "bfloat16"
        usable = [k for k in kernels_of(platform) if narrow and not why_not(config, platform, k)]
        return (*usable, "xla")[0]
    utils.check_attention(config)
    if wanted != "xla" and (why := why_not(config, platform, wanted)):
        raise ValueError(f"--model.attention {wanted}: {why}. Use --model.attention auto.")
    return wanted


def kernels_of(platform: str) -> tuple[str, ...]:
    return KERNELS.get(platform[:3], ())


def told(config: utils.Config, platform: str) -> str:
    """What is chosen and, where a better kernel of the platform is not, why."""
    kernel, own = chosen(config, platform), kernels_of(platform)
    if config.model.attention != "auto" or kernel in own[:1] or not own:
        return kernel
    if config.model.compute_dtype != "bfloat16":
        return f"{kernel} ({own[0]}: not for {config.model.compute_dtype})"
    better = own[: own.index(kernel)] if kernel in own else own
    return f"{kernel} ({'; '.join(f'{k}: {why_not(config, platform, k)}' for k in better)})"


def why_not(config: utils.Config, platform: str, kernel: str) -> str:
    """Why a kernel cannot run there; empty where it can."""
    m, T = config.model, config.train.sequence_length
    own = kernels_of(platform) or (kernel,)
    if kernel not in own:
        return f"it is no kernel for these devices, which have {' and '.join(own)}"
    if kernel == "splash":
        return f"sequences of {T} are no multiple of its {LANES}" if T % LANES else ""
    if m.compute_dtype != "bfloat16" and platform != "cpu":
        return f"it does not compute in {m.compute_dtype}"
    generation = platform.removeprefix("gpu")
    if platform.startswith("gpu") and (not generation.isdigit() or int(generation) < 8):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    wide, narrow = m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
    if kernel == "triton":
        if T % attention_kernels.GPU_BLOCK:
            return f"sequences of {T} are no multiple of its {attention_kernels.GPU_BLOCK}"
        if narrow > wide:
            return f"values of {narrow} are wider than queries of {wide}"
        return f"heads of {wide} are wider than 256" if wide > 256 else ""
    if config.data.segments:
        return "it knows no documents (--data.segments)"
    if wide % 8 or narrow % 8:
        return f"heads of {wide} and {narrow} are no multiples of 8"
    if platform == "gpu8" and (wide != narrow or wide > 128):
        return f"before Hopper heads have one width, up to 128, and these have {wide} and {narrow}"
    return f"heads of {wide} are wider than 256" if wide > 256 else ""


def computed_share(config: utils.Config, platform: str) -> float:
    """Share of the rectangle of scores that is computed: kernels pass over the blocks that
    causality masks whole.
    """
    T, kernel = config.train.sequence_length, chosen(config, platform)
    size = T
    if kernel == "splash":
        size = attention_kernels.block_size(T)
    elif kernel != "xla":
        size = attention_kernels.GPU_BLOCK
    blocks = -(-T // size)
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
    function = _xla if implementation == "xla" else getattr(attention_kernels, implementation)
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
    # In the order of the product: XLA for CPUs would rather multiply transposed, at half the speed.
    out_bnTW = jnp.einsum("bnTS,bSnW->bnTW", probs_bnTS, v, precision=precision)
    return checkpoint_name(out_bnTW.swapaxes(1, 2), "attention")
