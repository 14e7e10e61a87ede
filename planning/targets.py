"""Devices to compile for that are not on this machine, and what has to be installed for that.

    python -m planning.targets h100        what pip has to be given to compile for it, a word a line

libtpu knows its topologies by name. XLA's compiler for NVIDIA GPUs, which jax's CUDA plugin brings
along, takes a description of the GPU, and wants neither a GPU nor a driver.
"""

import importlib.metadata
import importlib.util
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chips
import faults
from chips import GPUS_PER_HOST, Chip

ROOT = Path(__file__).resolve().parent.parent

# The libtpu that predictions are compared with; others plan some buffers differently.
LIBTPU = "0.0.51"
# ptxas and libdevice, with which XLA ends what it compiles for a GPU.
NVCC = "12.9.86"
# For the process that compiles alone: the plugin complains wherever it finds no driver. One of each
# jax, for pip leaves alone what it finds in a folder.
GPU_FOLDER = ROOT / ".cache" / "gpu_compiler" / importlib.metadata.version("jax")


@dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of a GPU beside the figures in chips.py (NVIDIA's white papers of
    the two architectures, and its table of compute capabilities).
    """

    capability: str
    multiprocessors: int
    clock_ghz: float
    l2_mib: int
    shared_kib: int  # of a multiprocessor; a block can have one less
    float32_units: int  # of a multiprocessor
    links: int  # of NVLink


AMPERE = Gpu("major: 8", 108, 1.41, 40, 164, 64, 12)
HOPPER = Gpu("major: 9 feature_extension: ACCELERATED_FEATURES", 132, 1.98, 50, 228, 128, 18)
GPUS = {"a100": AMPERE, "a100-40gb": AMPERE, "h100": HOPPER, "h200": HOPPER}


def check(chip: Chip | None) -> None:
    """Raises ValueError where nothing here compiles for this chip: what to install, if it helps."""
    if chip and (lacks := missing(chip)):
        install = [sys.executable, "-m", "pip", "install"]
        if importlib.util.find_spec("pip") is None:  # an environment that uv made
            install = ["uv", "pip", "install", "--python", sys.executable]
        command, needs = shlex.join(install + to_install(chip)), " and ".join(lacks)
        raise ValueError(
            f"--compile --chip {chip.name} needs {needs}, which is not installed in the version "
            f"that it takes (no device is needed). Use: {command}"
        )


def wanted(chip: Chip) -> dict[str, str]:
    """{package: version} that compile for this chip, beside jax.

    Raises  ValueError for a GPU that is not described here.
    """
    if chip.is_tpu:
        return {"libtpu": LIBTPU}
    if chip.name not in GPUS:
        raise ValueError(
            f"--compile --chip {chip.name}: this GPU is not described to a compiler. Use one of "
            f"{', '.join(GPUS)}, or benchmark.py step on a machine with that GPU."
        )
    jax = importlib.metadata.version("jax")
    return {"jax-cuda12-plugin": jax, "jax-cuda12-pjrt": jax, "nvidia-cuda-nvcc-cu12": NVCC}


def missing(chip: Chip) -> list[str]:
    """The packages of `wanted` that are not installed."""
    return [name for name, version in wanted(chip).items() if not _has(name, version)]


def to_install(chip: Chip) -> list[str]:
    """What pip is given."""
    where = [] if chip.is_tpu else ["--target", str(GPU_FOLDER)]
    return where + [f"{name}=={version}" for name, version in wanted(chip).items()]


def environment(chip: Chip | None) -> dict[str, str]:
    """Of the process that compiles."""
    if chip is None or chip.is_tpu:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(GPU_FOLDER), os.environ.get("PYTHONPATH", "")])}


def _has(name: str, version: str) -> bool:
    """A libtpu and an nvcc of another version serve too; a plugin is of one jax."""
    where = [str(GPU_FOLDER), *sys.path]
    found = [d.version for d in importlib.metadata.distributions(name=name, path=where)]
    return version in found or (bool(found) and not name.startswith("jax"))


def compiler_of(chip: Chip | None) -> str:
    """Its name and version, as what it planned is reported."""
    name = f"jax {importlib.metadata.version('jax')}"
    if chip:
        package = [*wanted(chip)][-1]  # which the process that compiles can import
        name += f", {package} {importlib.metadata.version(package)}"
    return name


def devices(chip: Chip | None, topology: str, count: int, slices: int = 1) -> list[Any]:
    """Devices to compile for: of so many slices of a TPU topology, as 2x4x4; so many GPUs; or
    this machine's CPU, which pretends to be as many.

    Raises  ValueError for a topology that libtpu refuses.
    """
    import jax
    from jax.experimental import topologies

    if chip is None:
        jax.config.update("jax_num_cpu_devices", count)
        return jax.devices("cpu")
    if not chip.is_tpu:
        return topologies.get_topology_desc(
            "", platform="cuda", target_config=described(chip), topology=gpu_topology(count)
        ).devices
    # A v4 or v5p chip has two cores, which act as one device.
    options = {"chip_config_name": "megacore"} if chip.dims == 3 else {}
    if slices > 1:
        options["num_slices"] = slices
    name = f"{chip.name}:{topology}"
    try:
        return topologies.get_topology_desc(name, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        usual = ", ".join(chips.TOPOLOGIES[chip.dims].values())
        first = str(error).splitlines()[0][:200]
        raise ValueError(
            f"libtpu refuses the topology {name}: {first}. Use --topology with one of {usual}."
        ) from None


def gpu_topology(count: int) -> str:
    """Partitions, hosts and GPUs of each: one host where all fit, else hosts of a part of 8."""
    here = count if count < GPUS_PER_HOST else math.gcd(count, GPUS_PER_HOST)
    return f"1x{count // here}x{here}"


def described(chip: Chip) -> str:
    """A GPU as the text of XLA's protocol buffer GpuTargetConfigProto.

    Without a version of CUB, whose sort would be asked for a device: XLA's own sorts.
    """
    gpu = GPUS[chip.name]
    return f"""
gpu_device_info {{
  name: "{chip.kinds[0]}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ {gpu.capability} }}
  core_count: {gpu.multiprocessors} fpus_per_core: {gpu.float32_units}
  clock_rate_ghz: {gpu.clock_ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {(gpu.shared_kib - 1) * 1024}
  shared_memory_per_core: {gpu.shared_kib * 1024}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  l2_cache_size: {gpu.l2_mib * 2**20} memory_bandwidth: {round(chip.memory_bandwidth)}
  device_memory_size: {chip.memory_bytes} device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0" device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.kinds[0]}"
"""


def main() -> None:
    for name in sys.argv[1:]:
        if chip := chips.chip_named(name):
            print(*to_install(chip), sep="\n")


if __name__ == "__main__":
    faults.command_line(main)
