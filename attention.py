"""Causal attention: the choice of a kernel, and the implementation in XLA.

Letters as in model.py: b sequences of this rank, T query and S key positions, n heads of this rank,
A width of queries and keys, W of values.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import utils
from attention_kernels.adapter import GPU_BLOCK
from attention_kernels.cudnn import cudnn
from attention_kernels.splash import block_size, splash
from attention_kernels.triton import triton
from utils import LANES, ConfigError
from weights import vary, varying

PLATFORM_KERNELS = {"tpu": ("splash",), "gpu": ("cudnn", "triton")}  # best first
MASKED = -1e30  # score of a masked position; finite, so that the softmax of such a row is finite


def choose_kernel(config: utils.Config, platform: str) -> str:
    """Return xla or the kernel that `--model.attention_kernel` selects on this platform.

    auto is the first kernel of the platform that can run, else xla. On a CPU kernels run in
    interpret mode, which is slow.

    platform  as hardware.platform_of names it.
    Raises    ConfigError for a selected kernel that cannot run.
    """
    setting = config.model.attention_kernel
    if setting == "auto":
        # float32 serves to compare devices, and xla runs on all of them.
        own = platform_kernels(platform) if config.model.compute_dtype == "bfloat16" else ()
        return next((k for k in own if not kernel_problem(config, platform, k)), "xla")
    utils.check_attention(config)
    if setting != "xla" and (problem := kernel_problem(config, platform, setting)):
        raise ConfigError(
            f"--model.attention_kernel {setting}: {problem}. Use --model.attention_kernel auto."
        )
    return setting


def platform_kernels(platform: str) -> tuple[str, ...]:
    return PLATFORM_KERNELS.get(platform[:3], ())


def describe_kernel(config: utils.Config, platform: str) -> str:
    """Describe the chosen kernel and, under auto, why better ones of the platform cannot run."""
    kernel, own = choose_kernel(config, platform), platform_kernels(platform)
    if config.model.attention_kernel != "auto" or kernel in own[:1] or not own:
        return kernel
    if config.model.compute_dtype != "bfloat16":
        return f"{kernel} ({own[0]}: not for {config.model.compute_dtype})"
    better = own[: own.index(kernel)] if kernel in own else own
    return f"{kernel} ({'; '.join(f'{k}: {kernel_problem(config, platform, k)}' for k in better)})"


def kernel_problem(config: utils.Config, platform: str, kernel: str) -> str:
    """Return why a kernel cannot run on the platform, or an empty string if it can."""
    m, T = config.model, config.train.seq_len
    own = platform_kernels(platform) or (kernel,)
    if kernel not in own:
        return f"these devices have {' and '.join(own)}"
    if kernel == "splash":
        return f"sequences of {T} are not a multiple of {LANES}" if T % LANES else ""
    if m.compute_dtype != "bfloat16" and platform != "cpu":
        return f"it does not support {m.compute_dtype}"
    generation = platform.removeprefix("gpu")
    if platform.startswith("gpu") and (not generation.isdigit() or int(generation) < 8):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    wide, narrow = m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
    if kernel == "triton":
        if T % GPU_BLOCK:
            return f"sequences of {T} are not a multiple of {GPU_BLOCK}"
        if narrow > wide:
            return f"values of {narrow} are wider than queries of {wide}"
    elif config.data.segments:
        return "it does not support --data.segments"
    elif wide % 8 or narrow % 8:
        return f"head widths {wide} and {narrow} are not multiples of 8"
    elif platform == "gpu8" and (wide != narrow or wide > 128):
        return f"before Hopper it needs one head width up to 128, not {wide} and {narrow}"
    return f"heads of {wide} are wider than 256" if wide > 256 else ""


def computed_share(config: utils.Config, platform: str) -> float:
    """Return the share of the T x T scores that is computed.

    Kernels skip the blocks that the causal mask covers completely.
    """
    T, kernel = config.train.seq_len, choose_kernel(config, platform)
    size = T if kernel == "xla" else block_size(T) if kernel == "splash" else GPU_BLOCK
    blocks = -(-T // size)
    return (blocks + 1) / (2 * blocks)


@jax.named_scope("scores")
def attend(
    q_bTnA: jax.Array,
    k_bSnA: jax.Array,
    v_bSnW: jax.Array,
    segments_bS: jax.Array | None,
    kernel: str,
    scale: float,
) -> jax.Array:
    """softmax(scale q k^T) v over this and earlier positions of a segment -> [b, T, n, W].

    For train.remat, the result and the other residuals of a kernel have the name "attention".

    segments_bS  index of each position's document; None if a window is one document.
    """
    arrays = q_bTnA, k_bSnA, v_bSnW, segments_bS
    if kernel != "xla":  # kernels need arrays that vary along the same mesh axes
        arrays = vary(arrays, varying(arrays))
    return IMPLEMENTATIONS[kernel](*arrays, scale)


def _xla(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float
) -> jax.Array:
    precision = "highest" if q.dtype == jnp.float32 else None
    scores_bnTS = jnp.einsum(
        "bTnA,bSnA->bnTS", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    T = q.shape[1]
    query, key = (lax.broadcasted_iota(jnp.int32, (1, 1, T, T), dim) for dim in (2, 3))
    mask = key <= query
    if segments is not None:
        mask &= segments[:, None, :, None] == segments[:, None, None, :]
    # Added rather than selected, because the backward pass of an addition needs no mask.
    bias = jnp.where(mask, 0.0, MASKED)
    # In float32, for the sum of up to S exponentials.
    probs_bnTS = jax.nn.softmax(scores_bnTS * scale + bias).astype(v.dtype)
    # Transposed after the product: XLA for CPUs would fuse it in, and run at half the speed.
    out_bnTW = jnp.einsum("bnTS,bSnW->bnTW", probs_bnTS, v, precision=precision)
    return checkpoint_name(out_bnTW.swapaxes(1, 2), "attention")


IMPLEMENTATIONS = {"xla": _xla, "splash": splash, "cudnn": cudnn, "triton": triton}
