"""Describe devices to compile for without having them, and the packages that this needs.

    python -m planning.targets h100        print pip's arguments for this chip, one per line

libtpu has topologies by name. XLA's compiler for NVIDIA GPUs is part of JAX's CUDA plugin. It takes
a description of the GPU, and needs neither a GPU nor a driver.
"""

import importlib.metadata
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hardware
from hardware import GPUS_PER_HOST, Chip
from runtime import errors
from utils import ConfigError

ROOT = Path(__file__).resolve().parent.parent

# Predictions are compared with this libtpu; others plan some buffers differently.
LIBTPU = "0.0.51"
# ptxas and libdevice, which XLA uses to compile for a GPU.
NVCC = "12.9.86"
# Of packages that only the compiling process uses. Each version of JAX has its own folder, as pip
# does not replace what a folder contains.
GPU_FOLDER = ROOT / ".cache" / "gpu_compiler" / importlib.metadata.version("jax")


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that XLA's compiler needs besides those in hardware.py.

    Source  NVIDIA's white papers of the architectures, its table of compute capabilities, and for
            B200 and GB200 xla/backends/gpu/target_config/specs of XLA, in which those of other GPUs
            are the same.
    """

    multiprocessors: int
    clock_ghz: float
    l2_mib: float
    shared_kib: int  # per multiprocessor; a block can have one less
    float32_units: int = 128  # per multiprocessor
    links: int = 0  # NVLinks
    threads: int = 1536  # per multiprocessor


TPUS = ("v4", "v5e", "v5p", "v6e")  # not those whose chips are two devices of JAX
AMPERE = Gpu(108, 1.41, 40, 164, 64, 12, 2048)
HOPPER = Gpu(132, 1.98, 50, 228, 128, 18, 2048)
GPUS = {
    "a100": AMPERE,
    "a100-40gb": AMPERE,
    "a10": Gpu(72, 1.695, 6, 100),
    "rtx3090": Gpu(82, 1.695, 6, 100),
    "l4": Gpu(58, 2.04, 48, 100),
    "l40s": Gpu(142, 2.52, 96, 100),
    "rtx4090": Gpu(128, 2.52, 72, 100),
    "rtx6000-ada": Gpu(142, 2.505, 96, 100),
    "h100": HOPPER,
    "h200": HOPPER,
    "b200": Gpu(148, 1.965, 126.5, 228, 128, 18, 2048),
    "gb200": Gpu(152, 2.062, 129.25, 228, 128, 18, 2048),
    "rtx5090": Gpu(170, 2.407, 96, 100),
}


def check(chip: Chip | None) -> None:
    """Raise ConfigError, with what to install, if no compiler for this chip is installed."""
    if chip and (lacks := missing(chip)):
        raise ConfigError(
            f"--compile --chip {chip.name} needs {' and '.join(lacks)}, which is not installed in "
            "the right version (no device is needed). Use: ./run.sh uv pip install "
            f"{shlex.join(to_install(chip))}"
        )


def requirements(chip: Chip) -> dict[str, str]:
    """Return {package: version} of a chip's compiler, besides JAX.

    Raises  ConfigError for a chip without a description here.
    """
    if chip.name not in (*TPUS, *GPUS):
        raise ConfigError(
            f"--compile --chip {chip.name}: planning/targets.py does not describe this chip. Use "
            f"one of {', '.join((*TPUS, *GPUS))}, or benchmark.py step on a machine with that chip."
        )
    if chip.is_tpu:
        return {"libtpu": LIBTPU}
    jax = importlib.metadata.version("jax")
    return {"jax-cuda12-plugin": jax, "jax-cuda12-pjrt": jax, "nvidia-cuda-nvcc-cu12": NVCC}


def missing(chip: Chip) -> list[str]:
    """Return the packages of `requirements` that are not installed."""
    return [name for name, version in requirements(chip).items() if not _has(name, version)]


def to_install(chip: Chip) -> list[str]:
    """Return pip's arguments."""
    where = [] if chip.is_tpu else ["--target", str(GPU_FOLDER)]
    return where + [f"{name}=={version}" for name, version in requirements(chip).items()]


def _has(name: str, version: str) -> bool:
    """Return whether a package works. libtpu and nvcc may have another version, plugins not."""
    where = [str(GPU_FOLDER), *sys.path]
    installed = [d.version for d in importlib.metadata.distributions(name=name, path=where)]
    return version in installed or (bool(installed) and not name.startswith("jax"))


def compiler_of(chip: Chip | None) -> str:
    """Return the compiler's name and version."""
    name = f"jax {importlib.metadata.version('jax')}"
    if chip:
        package = [*requirements(chip)][-1]  # the one that the compiling process can import
        name += f", {package} {importlib.metadata.version(package)}"
    return name


def devices(chip: Chip | None, topology: str, count: int, slices: int = 1) -> list[Any]:
    """Return devices to compile for: TPU slices of a topology, GPUs, or simulated CPU devices.

    topology  sides of a TPU slice, as 2x4x4.
    count     number of devices; for TPUs the topology and `slices` determine it.
    Raises    ConfigError for a topology that libtpu refuses.
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
    # A v4 or v5p chip has two cores that form one device.
    options = {"chip_config_name": "megacore"} if chip.dims == 3 else {}
    if slices > 1:
        options["num_slices"] = slices
    name = f"{chip.name}:{topology}"
    try:
        return topologies.get_topology_desc(name, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        usual = ", ".join(hardware.TOPOLOGIES[chip.dims].values())
        first = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"libtpu refuses the topology {name}: {first}. Use --topology with one of {usual}."
        ) from None


def gpu_topology(count: int) -> str:
    """Return partitions x hosts x GPUs per host: one host if all fit, else equal parts of 8."""
    here = count if count < GPUS_PER_HOST else math.gcd(count, GPUS_PER_HOST)
    return f"1x{count // here}x{here}"


def described(chip: Chip) -> str:
    """Return the text of XLA's protocol buffer GpuTargetConfigProto of a GPU.

    It has no version of CUB, whose sort needs a device, so XLA uses its own sort.
    """
    gpu, (major, _, minor) = GPUS[chip.name], chip.capability.partition(".")
    extension = "ACCELERATED_FEATURES" if major in ("9", "10") else "NONE"
    return f"""
gpu_device_info {{
  name: "{chip.kinds[0]}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {gpu.multiprocessors} fpus_per_core: {gpu.float32_units}
  clock_rate_ghz: {gpu.clock_ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {(gpu.shared_kib - 1) * 1024}
  shared_memory_per_core: {gpu.shared_kib * 1024}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  l2_cache_size: {round(gpu.l2_mib * 2**20)} memory_bandwidth: {round(chip.memory_bandwidth)}
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
        if chip := hardware.chip_named(name):
            print(*to_install(chip), sep="\n")


if __name__ == "__main__":
    errors.run_command(main)
