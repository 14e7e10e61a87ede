"""Which attention kernel runs on a platform: attention.attend takes its name.

A tile is the positions that a kernel loads at once.
"""

import utils
from attention import kind_of
from kernels.adapter import GPU_KERNELS, GPU_TILE
from kernels.splash import tile_size
from utils import LANES, ConfigError

PLATFORM_KERNELS = {"tpu": ("splash",), "gpu": GPU_KERNELS}  # best first


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
    wide, narrow = kind_of(m).widths(m)
    if kernel == "triton":
        if window(config):
            return "it does not support --model.sliding_window"
        if T % GPU_TILE:
            return f"sequences of {T} are not a multiple of {GPU_TILE}"
        if narrow > wide:
            return f"values of {narrow} are wider than queries of {wide}"
    elif config.data.segments:
        return "it does not support --data.segments"
    elif wide % 8 or narrow % 8:
        return f"head widths {wide} and {narrow} are not multiples of 8"
    elif platform == "gpu8" and (wide != narrow or wide > 128):
        return f"before Hopper it needs one head width up to 128, not {wide} and {narrow}"
    return f"heads of {wide} are wider than 256" if wide > 256 else ""


def window(config: utils.Config) -> int:
    """Return the positions that a query attends to; 0 for all earlier ones."""
    size = config.model.sliding_window
    return size if size < config.train.seq_len else 0


def computed_share(config: utils.Config, platform: str) -> float:
    """Return the share of the T x T scores that is computed.

    Kernels skip the tiles that the mask covers completely.
    """
    T, kernel = config.train.seq_len, choose_kernel(config, platform)
    size = T if kernel == "xla" else tile_size(T) if kernel == "splash" else GPU_TILE
    tiles = -(-T // size)
    # A tile is as far from the diagonal as the window and its own size reach.
    farthest = (window(config) or T) + size - 2
    computed = sum(min(i, farthest // size) + 1 for i in range(tiles))
    return computed / tiles**2
