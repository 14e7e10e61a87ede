"""Figures of accelerators and their links, each with its source; model FLOPs and MFU.

TPU figures are from the page of each version under cloud.google.com/tpu/docs (read 2026-11):

- A link's bandwidth is the interconnect bandwidth of a chip over its links and both directions.
  The pages give 400 GB/s on 4 links for v5e, 1,200 on 6 for v5p and v7x, 800 on 4 for v6e. For v4
  the page gives 24 TB/s through the middle of 16 x 16 x 16 chips, which 512 links cross, and for v3
  6.4 TB/s through 32 x 32, which 64 cross. Jouppi et al. (2020, doi 10.1145/3360307) give 496 Gb/s
  for v2.
- The network between slices is the chip's share of its host's cards. The cards are 2 x 100 Gb/s
  for 8 chips of v5e, 4 x 200 for 8 of v6e, and 200 Gb/s for 4 chips of v4 or v5p. v7x has 100 Gb/s
  per chip. v2 and v3 have no job of several slices.
- A device of JAX is half of a chip of v2, v3 and v7x, so their figures are halves.

GPU figures are from NVIDIA's data sheets and the white papers of its architectures. Their FLOP/s
"with sparsity" are twice these, and their NVLink and PCIe figures count both directions. GeForce
cards sum in float32 at half of the rate that their data sheets advertise. Memory is what nvidia-smi
shows, and for GB10, which shares it with the CPU, what Linux does. Besides:

- The data sheets of A10G, L4, RTX 6000 Ada and GeForce cards lack some figures. Theirs are
  multiprocessors x boost clock x FLOPs per clock, as tests/test_hardware.py repeats.
- T4 and V100 have no bfloat16: XLA multiplies it in float32 (github.com/openxla/xla/issues/12429).
- NVIDIA gives only FP4 for GB10. FP8 is half of it without sparsity and bfloat16 a quarter, as in
  the table of its cudnn-frontend: 1,024 FLOPs per clock of a multiprocessor. float32 is from its
  talk at Hot Chips 2025.
- The network of V100 and later boards is InfiniBand: 100 Gb/s for two V100 (DGX-1), 200 Gb/s for
  an A100, and 400 Gb/s from the H100 on (DGX data sheets). Eight cards share the 100 Gb/s of their
  cloud host (AWS g4dn, g5, g6), or 400 Gb/s (g6e). GB10 has 200 Gb/s, and no other link.
- MI300X: AMD's data sheet. Its FP8 has other formats than those that float8.py uses.
"""

import math
from dataclasses import dataclass
from functools import cache

import jax

import utils
import weights
from attention import kind_of
from utils import ConfigError
from weights import Tree

GB, TERA = 10**9, 10**12
GPUS_PER_HOST = 8  # of an HGX or DGX board, connected by NVLink
MEMORY_SHARE = 0.92  # of a device's memory that JAX may allocate, by run.sh
BF16_PASSES = 6  # of a TPU to multiply in float32


@dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    kinds: tuple[str, ...]  # values of jax.Device.device_kind
    flops: float  # bf16 FLOP/s without sparsity, summed in float32; without bf16 those of float32
    float32_flops: float  # FLOP/s of products in float32
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second of one link in one direction
    dims: int = 0  # of a TPU's torus; 0: a GPU behind a switch
    # of a GPU: its compute capability, 8.0 for an A100; of a TPU: v2 or v3, empty for later ones
    capability: str = ""
    # bytes per second in one direction: of a GPU to other hosts, of a TPU to other slices
    network_bandwidth: float = 0.0
    float8_flops: float = 0.0  # FP8 FLOP/s without sparsity; 0: no FP8 products

    @property
    def is_tpu(self) -> bool:
        return self.dims > 0

    @property
    def allocatable_bytes(self) -> float:
        return MEMORY_SHARE * self.memory_bytes

    def peak(self, compute_dtype: str) -> float:
        """Return the FLOP/s of products in a compute dtype."""
        return self.float32_flops if compute_dtype == "float32" else self.flops


def _tpu(name, kinds, flops, memory, bandwidth, link, dims, network, fp8=0) -> Chip:
    rates = (flops * TERA, flops * TERA / BF16_PASSES)
    speeds = (bandwidth * GB, link * GB, dims)
    others = {"network_bandwidth": network * GB, "float8_flops": fp8 * TERA}
    others["capability"] = name if name in ("v2", "v3") else ""
    return Chip(name, kinds, *rates, memory * 2**30, *speeds, **others)


def _gpu(name, kind, capability, flops, float32, memory, bandwidth, link, network, fp8=0) -> Chip:
    figures = (flops * TERA, float32 * TERA, memory * 2**20, bandwidth * GB, link * GB)
    others = {"network_bandwidth": network * GB, "float8_flops": fp8 * TERA}
    return Chip(name, (kind,), *figures, capability=capability, **others)


# bf16 (and for GPUs float32) TFLOP/s; memory in GiB (TPU) or MiB (GPU); GB/s of memory, of a link
# and of the network; FP8 TFLOP/s.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v2", ("TPU v2",), 23, 8, 350, 31, 2, 0),
        _tpu("v3", ("TPU v3",), 61.5, 16, 450, 50, 2, 0),
        _tpu("v4", ("TPU v4",), 275, 32, 1200, 47, 3, 6.25),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 819, 50, 2, 3.125),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2765, 100, 3, 6.25),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1638, 100, 2, 12.5),
        _tpu("v7x", ("TPU7x",), 1153.5, 96, 3690, 50, 3, 6.25, 2307),
        _gpu("t4", "Tesla T4", "7.5", 8.1, 8.1, 15360, 320, 16, 1.56),
        _gpu("v100", "Tesla V100-SXM2-16GB", "7.0", 15.7, 15.7, 16384, 900, 150, 6.25),
        _gpu("v100-32gb", "Tesla V100-SXM2-32GB", "7.0", 15.7, 15.7, 32768, 900, 150, 6.25),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", "8.0", 312, 19.5, 81920, 2039, 300, 25),
        _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", "8.0", 312, 19.5, 40960, 1555, 300, 25),
        _gpu("a100-pcie", "NVIDIA A100 80GB PCIe", "8.0", 312, 19.5, 81920, 1935, 32, 25),
        _gpu("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", "8.0", 312, 19.5, 40960, 1555, 32, 25),
        _gpu("a10", "NVIDIA A10", "8.6", 125, 31.2, 23028, 600, 32, 1.56),
        _gpu("a10g", "NVIDIA A10G", "8.6", 70, 35, 23028, 600, 32, 1.56),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", "8.6", 71, 35.6, 24576, 936, 32, 1.56),
        _gpu("l4", "NVIDIA L4", "8.9", 121, 30.3, 23034, 300, 32, 1.56, 242),
        _gpu("l40s", "NVIDIA L40S", "8.9", 362, 91.6, 46068, 864, 32, 6.25, 733),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", "8.9", 165, 82.6, 24564, 1008, 32, 1.56, 330),
        _gpu("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", "8.9",
             364, 91.1, 49140, 960, 32, 1.56, 728),
        _gpu("h100", "NVIDIA H100 80GB HBM3", "9.0", 989, 67, 81559, 3350, 450, 50, 1979),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", "9.0", 756, 51, 81559, 2000, 64, 50, 1513),
        _gpu("h200", "NVIDIA H200", "9.0", 989, 67, 143771, 4800, 450, 50, 1979),
        _gpu("b200", "NVIDIA B200", "10.0", 2250, 75, 183359, 8000, 900, 50, 4500),
        _gpu("gb200", "NVIDIA GB200", "10.0", 2500, 80, 189471, 8000, 900, 50, 5000),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", "12.0",
             209.5, 104.8, 32607, 1792, 64, 1.56, 419),
        _gpu("gb10", "NVIDIA GB10", "12.1", 125, 31, 122566, 273, 25, 25, 250),
        _gpu("mi300x", "AMD Instinct MI300X", "gfx942", 1307, 163.4, 196608, 5300, 448, 50),
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


# Figures of a chip that is not in CHIPS. The first four must be given.
FIGURES = ("flops", "memory", "bandwidth", "link", "float32", "float8", "network")
EXAMPLE = "--chip name=mycard,flops=165,memory=24,bandwidth=1008,link=32,capability=8.9"


def chip_named(name: str) -> Chip | None:
    """Return the chip of a name, device kind or figures, or None for cpu, which has no figures.

    name    as in CHIPS, as jax.Device.device_kind, or figures as in EXAMPLE.
    Raises  ConfigError with the known names.
    """
    if "=" in name:
        return chip_of_figures(name)
    if name.lower() == "cpu":
        return None
    chip = CHIPS.get(name.lower()) or chip_of_kind(name)
    if not chip:
        raise ConfigError(
            f"--chip {name} is not known. Use one of {', '.join(CHIPS)}, cpu, or give the chip's "
            f"figures, as in {EXAMPLE}."
        )
    return chip


def chip_of_figures(text: str) -> Chip:
    """Return a GPU from its figures: TFLOP/s, GiB and GB/s, as in EXAMPLE.

    `flops` are those of bfloat16. `float32` has the same default, `network` that of the link, and
    `capability` 8.0. Without `float8` there are no products in FP8.

    Raises  ConfigError that names the wrong or missing figure.
    """
    words = (word.partition("=") for word in text.split(","))
    given = {key.strip(): value.strip() for key, _, value in words}
    figures, problem = {}, ""
    for key in sorted(given.keys() - {*FIGURES, "name", "capability"}):
        problem = f"{key or 'an empty word'} is none of name, capability, {', '.join(FIGURES)}"
    for key in FIGURES:
        try:
            figures[key] = float(given[key])
        except KeyError:
            problem = f"{key} is missing" if key in FIGURES[:4] else problem
        except ValueError:
            figures[key] = math.nan
        if not 0 < figures.get(key, 1) < math.inf:
            problem = f"{key} {given[key]} is not a positive number"
    capability = given.get("capability", "8.0")
    if not utils.capability(f"gpu{capability}"):
        problem = f"capability {capability} is not a compute capability, as 8.9"
    name = given.get("name") or "gpu"
    if name in CHIPS:
        problem = f"name {name} is that of a known chip"
    if problem:
        raise ConfigError(f"--chip {text}: {problem}. Use for example {EXAMPLE}.")
    flops, memory, bandwidth, link = (figures[key] for key in FIGURES[:4])
    products, memory = (capability, flops, figures.get("float32", flops)), round(1024 * memory)
    network, float8 = figures.get("network", link), figures.get("float8", 0.0)
    return _gpu(name, "", *products, memory, bandwidth, link, network, float8)


def platform_of(chip: Chip | None) -> str:
    """Return tpu (tpuv2 and tpuv3 before v4), gpu with its capability (gpu8.9), or cpu for None."""
    if chip is None:
        return "cpu"
    return f"{'tpu' if chip.is_tpu else 'gpu'}{chip.capability}"


def platform_of_device(device: jax.Device) -> str:
    """Return the platform of a present or target device, as platform_of names it."""
    if device.platform == "tpu" and (chip := chip_of_kind(device.device_kind)):
        return platform_of(chip)
    capability = getattr(device, "compute_capability", "") if device.platform == "gpu" else ""
    return f"{device.platform}{capability}"


def chip_of_kind(device_kind: str) -> Chip | None:
    """Return the chip of a jax.Device.device_kind, or None if it is unknown."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


def uses_float8(config: utils.Config, platform: str, chip: Chip | None) -> bool:
    """Return whether `--model.matmul_dtype` selects products in FP8. CPUs emulate them.

    XLA gives them to cuBLASLt, which has them from Ada (compute capability 8.9) on.

    platform  as platform_of names it.
    chip      None for a CPU or a chip without figures. A TPU without figures has no FP8 products.
    Raises    ConfigError for a chip that has none.
    """
    if config.model.matmul_dtype != "float8":
        return False
    if not (chip.float8_flops if chip else platform == "cpu" or utils.capability(platform) >= 8.9):
        raise ConfigError(
            f"--model.matmul_dtype float8: no FP8 products on {chip.name if chip else platform}. "
            "They need an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), "
            "or a TPU v7x. Use --model.matmul_dtype compute."
        )
    return True


def notes(config: utils.Config, device: jax.Device) -> list[str]:
    """Return lines about MFU and bfloat16 on a device, for the start of a run."""
    kind, platform, found = device.device_kind, platform_of_device(device), []
    if chip_of_kind(kind):
        found.append(MFU_RULE)
    elif platform != "cpu":
        found.append(
            f"no MFU: hardware.py has no figures of {kind!r}. plan.py takes them, as in {EXAMPLE}"
        )
    return [*found, *bfloat16_warning(config, platform, kind)]


def bfloat16_warning(config: utils.Config, platform: str, name: str) -> list[str]:
    """Return a warning if the config selects bfloat16 on a GPU that has none."""
    slow = platform != "cpu" and not utils.has_bfloat16(platform)
    return [
        f"warning: {name} has no bfloat16, which XLA computes in float32, and slower than float32 "
        "itself. Use --model.compute_dtype float32."
    ] * (slow and config.model.compute_dtype == "bfloat16")


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


# --- meshes ---------------------------------------------------------------------------------------


MeshShape = tuple[int, int, int, int]  # (fsdp, pipeline, context, tensor)
LEAST_POSITIONS = 4096  # of a rank of context, in a mesh that is not set


@cache
def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def meshes(config: utils.Config, chips: int, sizes: MeshShape = (0, 0, 0, 0)) -> list[MeshShape]:
    """Return every shape of a replica with these sizes, 0 for any; `chips` are of all replicas.

    A rank of context has at least LEAST_POSITIONS, unless its size is given.
    """
    each = chips // config.mesh.replica
    shapes = (
        (each // (pipeline * context * tensor), pipeline, context, tensor)
        for pipeline in (divisors(each) if chips % config.mesh.replica == 0 else [])
        for context in divisors(each // pipeline)
        for tensor in divisors(each // (pipeline * context))
        if context == 1 or sizes[2] or context * LEAST_POSITIONS <= config.train.seq_len
    )
    return [s for s in shapes if all(size in (0, n) for size, n in zip(sizes, s, strict=True))]


# --- model FLOPs and MFU --------------------------------------------------------------------------

MFU_RULE = (
    "MFU = tokens/s * model FLOPs per token / peak of the compute dtype, also with FP8; model "
    "FLOPs by appendix B of arXiv:2204.02311: 6 per active parameter (embedding lookup not "
    "counted), causal attention as half of its rectangle, no recomputation."
)


def palm_flops_per_token(m: utils.Model, declared: Tree, sequence_length: int) -> float:
    """6 * active parameters + 3 * FLOPs of attention, 2 * heads * keys * (query + value width).

    A frozen parameter has 4 in place of 6, as it has no gradient. An untied embedding is only
    looked up, and does not count. A tied one counts as the output matrix. The source has
    12 * layers * heads * head width * T for attention. Here queries and values have their own
    widths, and keys are those that a query attends to on average: T / 2 under
    the causal mask, and fewer with a sliding window.

    declared  those of a model.Transformer.
    Source    Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    _, active = weights.count(declared)
    _, own = weights.count(weights.own(declared, declared))
    lookup = 0 if m.tie_word_embeddings else declared.first.embedding.size
    unused = lookup * declared.first.embedding.frozen
    attention = 0.0
    for run, times in (*((run, 1) for run in m.prefix), *((run, m.blocks) for run in m.runs)):
        window = min(run.window or sequence_length, sequence_length)
        keys = window * (1 - window / (2 * sequence_length))
        attention += times * run.layers * kind_of(m, run).flops(m, keys)
    products = 6.0 * (active - lookup) - 2.0 * (active - own - unused)
    return products + 3.0 * attention
