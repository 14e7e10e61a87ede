"""Which kernels run on a platform.

attention.attend and dropless.dropless_experts take a name, and vocabulary.chunked_loss a yes or no.

A tile is the positions that a kernel loads at once.
"""

import utils
from attention import SoftmaxAttention, kind_of
from device_kernels.adapter import GPU_KERNELS, GPU_TILE
from device_kernels.grouped import ALIGNED
from device_kernels.splash import tile_size
from experts import uses_expert_parallelism
from utils import LANES, ConfigError, capability

PLATFORM_KERNELS = {"tpu": ("splash",), "gpu": GPU_KERNELS}  # best first
EXPERTS_KERNELS = {"tpu": "megablox", "gpu": "triton"}
OLD_GPU = "it needs an NVIDIA GPU of compute capability 8.0 or later"
# Mosaic does not multiply bfloat16 there (github.com/jax-ml/jax/issues/23989).
OLD_TPUS, OLD_TPU = ("tpuv2", "tpuv3"), "it needs a TPU v4 or later"


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


def describe_kernels(config: utils.Config, platform: str) -> str:
    """Describe the kernels of attention and of dropless experts, if there are any."""
    where = " in evaluation" * (config.model.capacity_factor > 0)
    found = {
        "attention": describe_kernel(config, platform),
        f"dropless experts{where}": describe_experts(config, platform),
    }
    return ", ".join(f"{part} {kernel}" for part, kernel in found.items() if kernel)


def kernel_problem(config: utils.Config, platform: str, kernel: str) -> str:
    """Return why a kernel cannot run on the platform, or an empty string if it can."""
    m = config.model
    own = platform_kernels(platform) or (kernel,)
    if kernel not in own:
        return f"these devices have {' and '.join(own)}"
    if platform in OLD_TPUS:
        return OLD_TPU
    kinds = {kind_of(m, run) for run in m.layer_runs}
    widths = {kind.widths(m) for kind in kinds if issubclass(kind, SoftmaxAttention)}
    if not widths:
        return "no layer has a softmax of scores"
    if kernel == "splash":
        return length_problem(config, LANES)
    if m.compute_dtype != "bfloat16" and platform != "cpu":
        return f"it does not support {m.compute_dtype}"
    if is_old_gpu(platform):
        return OLD_GPU
    problems = (width_problem(config, platform, kernel, *pair) for pair in sorted(widths))
    return next(filter(None, problems), "")


def width_problem(config: utils.Config, platform: str, kernel: str, wide: int, narrow: int) -> str:
    """Return the same of cudnn or triton, for the widths of a query and of a value head."""
    T, context = config.train.seq_len, config.mesh.context
    window = any(0 < run.window < T for run in config.model.runs)
    if context > 1 and (config.data.segments or window):
        setting = "--data.segments" if config.data.segments else "--model.sliding_window"
        return f"it does not support {setting} with --mesh.context {context}"
    only_narrow = platform.startswith("gpu") and not 9 <= capability(platform) < 12
    if kernel == "triton":
        if window:
            return "it does not support --model.sliding_window"
        if problem := length_problem(config, GPU_TILE):
            return problem
        if narrow > wide:
            return f"values of {narrow} are wider than queries of {wide}"
    elif config.data.segments:
        return "it does not support --data.segments"
    elif wide % 8 or narrow % 8:
        return f"head widths {wide} and {narrow} are not multiples of 8"
    # Gradients on Hopper, and on Blackwell in data centers, do not need this. For capability 12 JAX
    # has no check, and PyTorch has this one (github.com/pytorch/pytorch/issues/181379).
    elif only_narrow and (wide != narrow or wide > 128):
        return f"on these GPUs it needs one head width up to 128, not {wide} and {narrow}"
    return f"heads of {wide} are wider than 256" if wide > 256 else ""


def square(config: utils.Config) -> int:
    """Return the positions of the causal squares of scores: the sequence, or a chunk of it."""
    c = config.mesh.context
    return config.train.seq_len // (2 * c) if c > 1 else config.train.seq_len


def length_problem(config: utils.Config, tile: int) -> str:
    T = square(config)
    what = f"chunks of --mesh.context {config.mesh.context} of {T} positions"
    what = what if config.mesh.context > 1 else f"sequences of {T}"
    return f"{what} are not a multiple of {tile}" if T % tile else ""


def is_old_gpu(platform: str) -> bool:
    return platform.startswith("gpu") and capability(platform) < 8


def fuses_loss(config: utils.Config, platform: str) -> bool:
    """Return whether the loss and its gradient are one kernel: device_kernels/cross_entropy.py.

    Its rows are complete, so the vocabulary is not sharded. As with attention, float32 and the
    choice of xla leave all operations to XLA.

    platform  as hardware.platform_of names it.
    """
    m, complete = config.model, config.mesh.pipeline == config.mesh.tensor == 1
    uses_kernels = m.compute_dtype == "bfloat16" and m.attention_kernel != "xla"
    on_gpu = platform.startswith("gpu") and not is_old_gpu(platform)
    return on_gpu and uses_kernels and complete


def choose_experts_kernel(config: utils.Config, platform: str) -> str:
    """Return tiles or the kernel that `--model.experts_kernel` selects, as in choose_kernel.

    Raises  ConfigError for a selected kernel that cannot run.
    """
    setting = config.model.experts_kernel
    if setting == "auto":
        # Not megablox: on a TPU its rows take more memory than tiles, and neither has been timed.
        own = platform.startswith("gpu") and EXPERTS_KERNELS["gpu"]
        return own if own and not experts_problem(config, platform, own) else "tiles"
    if setting != "tiles" and (problem := experts_problem(config, platform, setting)):
        raise ConfigError(
            f"--model.experts_kernel {setting}: {problem}. Use --model.experts_kernel auto."
        )
    return setting


def experts_problem(config: utils.Config, platform: str, kernel: str) -> str:
    """Return why a kernel of dropless experts cannot run, or an empty string if it can."""
    m, own = config.model, EXPERTS_KERNELS.get(platform[:3], kernel)
    width = m.moe_intermediate_size
    if not uses_expert_parallelism(config):
        width //= config.mesh.tensor
    if kernel != own:
        return f"these devices have {own}"
    if m.compute_dtype != "bfloat16" and platform != "cpu":
        return f"it does not support {m.compute_dtype}"
    if is_old_gpu(platform) or platform in OLD_TPUS:
        return OLD_TPU if platform in OLD_TPUS else OLD_GPU
    if kernel == "triton" and (m.hidden_size % ALIGNED or width % ALIGNED):
        return f"widths {m.hidden_size} and {width} are not multiples of {ALIGNED}"
    return ""


def describe_experts(config: utils.Config, platform: str) -> str:
    """Describe how dropless experts run, or return an empty string if there are none."""
    m = config.model
    if not m.moe_layers or (m.capacity_factor and m.eval_capacity_factor):
        return ""
    kernel, own = choose_experts_kernel(config, platform), EXPERTS_KERNELS.get(platform[:3])
    why = experts_problem(config, platform, own) if own and m.experts_kernel == "auto" else ""
    return f"{kernel} ({own}: {why})" if why else kernel


def computed_share(config: utils.Config, platform: str, window: int = 0) -> float:
    """Return the share of the T x T scores that is computed in layers with a window.

    Kernels skip the tiles that the mask covers completely.
    """
    T, kernel = config.train.seq_len, choose_kernel(config, platform)
    size = (
        T
        if kernel == "xla"
        else tile_size(square(config), window)
        if kernel == "splash"
        else GPU_TILE
    )
    tiles = -(-T // size)
    # A tile is as far from the diagonal as the window and its own size reach.
    farthest = min(window or T, T) + size - 2
    computed = sum(min(i, farthest // size) + 1 for i in range(tiles))
    return computed / tiles**2


def window_shares(config: utils.Config, platform: str) -> tuple[tuple[int, float], ...]:
    """Return `computed_share` of each window in the model."""
    windows = {run.window for run in config.model.layer_runs}
    return tuple((window, computed_share(config, platform, window)) for window in sorted(windows))
