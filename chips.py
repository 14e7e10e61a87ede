"""What one chip can do: figures of accelerators, each with its source.

TPU figures are those of the page of each version under cloud.google.com/tpu/docs (read 2026-11);
"bandwidth of the interconnect per chip" there is over all links and one direction: 2,400 Gbps on 6
links for v4, 1,600 on 4 for v5e, 4,800 on 6 for v5p, and for v6e 800 GB/s of both directions on 4.
GPU figures are those of NVIDIA's data sheets of the SXM modules, whose FLOP/s "with sparsity" are
twice these; NVLink is given there for both directions together.
"""

import math
from dataclasses import dataclass

GB, TERA = 10**9, 10**12
TORUS_SIDE = 4  # of the cubes that slices of TPUs are put together from
GPUS_PER_HOST = 8  # of an HGX or DGX board, joined by NVLink


@dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    kinds: tuple[str, ...]  # `device_kind` in jax
    flops: float  # bf16 FLOP/s without sparsity
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second of one link in one direction
    dims: int = 0  # of a TPU's torus; 0: a GPU behind a switch
    network_bandwidth: float = 0.0  # of a GPU to other hosts, bytes per second in one direction

    @property
    def is_tpu(self) -> bool:
        return self.dims > 0

    def rings(self, ranks: int) -> int:
        """Axes of the torus, 4 chips long until all are in use, that so many neighbours lie on."""
        return min(self.dims, max(1, math.ceil(math.log(ranks, TORUS_SIDE) - 1e-9)))

    def axis_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second that a chip sends in a collective over `ranks` devices that are `stride`
        apart.

        A ring on a torus uses one link in each direction, and as many rings as the ranks lie on are
        at work at once; two neighbours have one link. GPUs of one host use NVLink, and the network
        beyond.
        """
        if self.is_tpu:
            return self.link_bandwidth * (1 if ranks == 2 else 2 * self.rings(ranks))
        return self.link_bandwidth if ranks * stride <= GPUS_PER_HOST else self.network_bandwidth

    def detour(self, ranks: int) -> float:
        """Links that a byte of an all-to-all passes: a quarter of each side of a torus."""
        if not self.is_tpu:
            return 1.0
        rings = self.rings(ranks)
        return max(1.0, rings * ranks ** (1 / rings) / 4)


def _tpu(name, kinds, flops, memory, bandwidth, link, dims) -> Chip:
    return Chip(name, kinds, flops * TERA, memory * 2**30, bandwidth * GB, link * GB, dims)


def _gpu(name, kinds, flops, memory, bandwidth, link, network) -> Chip:
    figures = (flops * TERA, memory * GB, bandwidth * GB, link * GB)
    return Chip(name, kinds, *figures, network_bandwidth=network * GB)


# bf16 TFLOP/s; memory in GiB (TPU) or GB (GPU); GB/s of memory, of a link, of the network.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", ("TPU v4",), 275, 32, 1228, 50, 3),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 819, 50, 2),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2765, 100, 3),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1638, 100, 2),
        # 400 Gb/s InfiniBand per GPU from the H100 on, 200 before: NVIDIA DGX data sheets.
        _gpu("a100", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312, 80, 2039, 300, 25),
        _gpu("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 312, 40, 1555, 300, 25),
        _gpu("h100", ("NVIDIA H100 80GB HBM3",), 989, 80, 3350, 450, 50),
        _gpu("h100-pcie", ("NVIDIA H100 PCIe",), 756, 80, 2000, 64, 50),
        _gpu("h200", ("NVIDIA H200",), 989, 141, 4800, 450, 50),
    )
}  # fmt: skip

# Slices that exist, by number of chips: cuboids on a 3-D torus, rectangles on a 2-D one. The sides
# are those of the tables of the same pages.
TOPOLOGIES = {
    3: {
        math.prod(sides): "x".join(map(str, sides))
        for sides in (
            (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8),
            (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16),
        )
    },
    2: {
        math.prod(sides): "x".join(map(str, sides))
        for sides in (
            (1, 1), (2, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16),
        )
    },
}  # fmt: skip


def chip_named(name: str) -> Chip:
    """The chip of this name.

    Raises  ValueError that lists the known ones.
    """
    if name.lower() not in CHIPS:
        raise ValueError(f"--chip {name} is not known. Use one of {', '.join(CHIPS)}.")
    return CHIPS[name.lower()]


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that jax calls this; None where it is not known, so that no figure is made up."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


def topology(chip: Chip, chips: int) -> str:
    """The shape of a slice, as in 2x4x4.

    Raises  ValueError where no slice has so many chips.
    """
    known = TOPOLOGIES[chip.dims]
    if chips not in known:
        nearest = known[min(known, key=lambda size: (abs(size - chips), -size))]
        raise ValueError(
            f"--chips {chips}: no usual slice of {chip.name} has so many. Use one of "
            f"{', '.join(map(str, known))}, or name its sides, as in --topology {nearest}."
        )
    return known[chips]
