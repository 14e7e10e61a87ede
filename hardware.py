"""Figures of accelerators and their links, each with its source; model FLOPs and MFU.

TPU figures are from the page of each version under cloud.google.com/tpu/docs (read 2026-11):

- A link's bandwidth is the interconnect bandwidth of a chip over its links and both directions.
  The pages give 400 GB/s on 4 links for v5e, 1,200 on 6 for v5p, 800 on 4 for v6e. For v4 the page
  gives 24 TB/s through the middle of 16 x 16 x 16 chips, which 512 links cross.
- The network between slices is the chip's share of its host's cards. The cards are 2 x 100 Gb/s
  for 8 chips of v5e, 4 x 200 for 8 of v6e, and 200 Gb/s for 4 chips of v4 or v5p.

GPU figures are from NVIDIA's data sheets. Their FLOP/s "with sparsity" are twice these, and their
NVLink and PCIe figures count both directions. Memory is what nvidia-smi shows.
"""

import math
from dataclasses import dataclass

import utils
import weights
from attention import kind_of
from model import Transformer
from utils import ConfigError

GB, TERA = 10**9, 10**12
GPUS_PER_HOST = 8  # of an HGX or DGX board, connected by NVLink
MEMORY_SHARE = 0.92  # of a device's memory that JAX may allocate, by run.sh
BF16_PASSES = 6  # of a TPU to multiply in float32


@dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    kinds: tuple[str, ...]  # values of jax.Device.device_kind
    flops: float  # bf16 FLOP/s without sparsity
    float32_flops: float  # FLOP/s of products in float32
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second of one link in one direction
    dims: int = 0  # of a TPU's torus; 0: a GPU behind a switch
    generation: int = 0  # of a GPU: its major compute capability, 8 for Ampere, 9 for Hopper
    # bytes per second in one direction: of a GPU to other hosts, of a TPU to other slices
    network_bandwidth: float = 0.0
    float8_flops: float = 0.0  # FP8 FLOP/s without sparsity; 0: no FP8 products

    @property
    def is_tpu(self) -> bool:
        return self.dims > 0

    @property
    def allocatable_bytes(self) -> float:
        return MEMORY_SHARE * self.memory_bytes


def _tpu(name, kinds, flops, memory, bandwidth, link, dims, network) -> Chip:
    rates = (flops * TERA, flops * TERA / BF16_PASSES)
    speeds = (bandwidth * GB, link * GB, dims)
    return Chip(name, kinds, *rates, memory * 2**30, *speeds, network_bandwidth=network * GB)


def _gpu(name, kinds, generation, flops, float32, memory, bandwidth, link, network, fp8=0) -> Chip:
    figures = (flops * TERA, float32 * TERA, memory * 2**20, bandwidth * GB, link * GB)
    others = {"network_bandwidth": network * GB, "float8_flops": fp8 * TERA}
    return Chip(name, kinds, *figures, generation=generation, **others)


# bf16 (and for GPUs float32) TFLOP/s; memory in GiB (TPU) or MiB (GPU); GB/s of memory, of a link
# and of the network; FP8 TFLOP/s. A GPU's network is InfiniBand, 400 Gb/s from the H100 on and 200
# before (DGX data sheets).
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", ("TPU v4",), 275, 32, 1200, 47, 3, 6.25),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 819, 50, 2, 3.125),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2765, 100, 3, 6.25),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1638, 100, 2, 12.5),
        _gpu("a100", ("NVIDIA A100-SXM4-80GB",), 8, 312, 19.5, 81920, 2039, 300, 25),
        _gpu("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 8, 312, 19.5, 40960, 1555, 300, 25),
        _gpu("a100-pcie", ("NVIDIA A100 80GB PCIe",), 8, 312, 19.5, 81920, 1935, 32, 25),
        _gpu("a100-pcie-40gb", ("NVIDIA A100-PCIE-40GB",), 8, 312, 19.5, 40960, 1555, 32, 25),
        _gpu("h100", ("NVIDIA H100 80GB HBM3",), 9, 989, 67, 81559, 3350, 450, 50, 1979),
        _gpu("h100-pcie", ("NVIDIA H100 PCIe",), 9, 756, 51, 81559, 2000, 64, 50, 1513),
        _gpu("h200", ("NVIDIA H200",), 9, 989, 67, 143771, 4800, 450, 50, 1979),
    )
}  # fmt: skip

# Slices that libtpu compiles for, by number of chips: cuboids of a 3-D torus, rectangles of a 2-D
# one.
TOPOLOGIES = {
    dims: {math.prod(map(int, shape.split("x"))): shape for shape in shapes.split()}
    for dims, shapes in {
        2: "1x1 2x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
        3: "1x1x1 2x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
    }.items()
}


def chip_named(name: str) -> Chip | None:
    """Return the chip of a name, or None for cpu, which has no figures.

    Raises  ConfigError with the known names.
    """
    if name.lower() == "cpu":
        return None
    if name.lower() not in CHIPS:
        raise ConfigError(f"--chip {name} is not known. Use one of {', '.join(CHIPS)}, cpu.")
    return CHIPS[name.lower()]


def platform_of(chip: Chip | None) -> str:
    """Return tpu, gpu with its generation (gpu9), or cpu if there is no chip."""
    if chip is None:
        return "cpu"
    return "tpu" if chip.is_tpu else f"gpu{chip.generation}"


def chip_of_kind(device_kind: str) -> Chip | None:
    """Return the chip of a jax.Device.device_kind, or None if it is unknown."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


def uses_float8(config: utils.Config, platform: str, chip: Chip | None) -> bool:
    """Return whether `--model.matmul_dtype` selects products in FP8. CPUs emulate them.

    platform  as platform_of names it.
    chip      None for a CPU or a chip without figures, of which a TPU may have FP8 products.
    Raises    ConfigError for a chip that has none.
    """
    if config.model.matmul_dtype != "float8":
        return False
    generation = platform.removeprefix("gpu")
    if platform.startswith("gpu"):
        runs = generation.isdigit() and int(generation) >= 9
    else:
        runs = chip is None or chip.float8_flops > 0
    if not runs:
        raise ConfigError(
            f"--model.matmul_dtype float8: no FP8 products on {chip.name if chip else platform}. "
            "They need an NVIDIA GPU of compute capability 9.0 or later (Hopper), or a TPU v7x. "
            "Use --model.matmul_dtype compute."
        )
    return True


def topology(chip: Chip, chips: int) -> str:
    """Return the shape of a slice, as 2x4x4.

    Raises  ConfigError if TOPOLOGIES has no slice of this many chips.
    """
    known = TOPOLOGIES[chip.dims]
    if chips not in known:
        nearest = known[min(known, key=lambda size: (abs(size - chips), -size))]
        raise ConfigError(
            f"--chips {chips} is not the size of a usual {chip.name} slice. Use one of "
            f"{', '.join(map(str, known))}, or set the sides, as in --topology {nearest}."
        )
    return known[chips]


# --- model FLOPs and MFU --------------------------------------------------------------------------

MFU_RULE = (
    "MFU = tokens/s * model FLOPs per token / bf16 peak, also with FP8; model FLOPs by appendix B "
    "of arXiv:2204.02311: 6 per active parameter (embedding lookup not counted), causal attention "
    "as half of its rectangle, no recomputation."
)


def palm_flops_per_token(m: utils.Model, declared: Transformer, sequence_length: int) -> float:
    """6 * active parameters + 6 * layers * heads * keys * (query width + value width).

    An untied embedding is only looked up, and does not count. A tied one counts as the output
    matrix. The source has 12 * layers * heads * head width * T for attention. Here queries and
    values have their own widths, and keys are those that a query attends to on average: T / 2 under
    the causal mask, and fewer with a sliding window.

    Source  Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    _, active = weights.count(declared)
    lookup = 0 if m.tie_word_embeddings else declared.first.embedding.size
    window = min(m.sliding_window or sequence_length, sequence_length)
    keys = window * (1 - window / (2 * sequence_length))
    heads = m.num_hidden_layers * m.num_attention_heads
    return 6.0 * (active - lookup) + 6.0 * heads * keys * sum(kind_of(m).widths(m))
