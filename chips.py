"""What one chip can do, and the links between chips: figures of accelerators, each with its source.

TPU figures are those of the page of each version under cloud.google.com/tpu/docs (read 2026-11). A
link's is the page's interconnect bandwidth of a chip, over its links and both directions: 400 GB/s
on 4 links for v5e, 1,200 on 6 for v5p, 800 on 4 for v6e; for v4 the page says that 24 TB/s go
through the middle of 16 x 16 x 16 chips, which 512 links cross. What a chip has of the network
between slices is its part of the cards of its host: 2 x 100 Gb/s for the 8 chips of v5e, 4 x 200
for the 8 of v6e; for 4 chips of v4 and v5p 200 Gb/s. GPU figures are those of NVIDIA's
data sheets, whose FLOP/s "with sparsity" are twice these and whose NVLink and PCIe are of both
directions; memory is what nvidia-smi shows.
"""

import functools
import itertools
import math
from dataclasses import dataclass

GB, TERA = 10**9, 10**12
GPUS_PER_HOST = 8  # of an HGX or DGX board, joined by NVLink
BF16_PASSES = 6  # in which a TPU multiplies float32


@dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    kinds: tuple[str, ...]  # `device_kind` in jax
    flops: float  # bf16 FLOP/s without sparsity
    float32_flops: float  # of products in float32
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second of one link in one direction
    dims: int = 0  # of a TPU's torus; 0: a GPU behind a switch
    generation: int = 0  # of a GPU: 8 of Ampere, 9 of Hopper, the first of its compute capability
    # of a chip to other hosts, or of a TPU to other slices, bytes per second in one direction
    network_bandwidth: float = 0.0

    @property
    def is_tpu(self) -> bool:
        return self.dims > 0

    def collective_s(
        self, kind: str, whole: float, groups: tuple[tuple[int, int], ...], chips: int
    ) -> float:
        """Least seconds of a collective, its links at full bandwidth.

        whole   bytes that a chip has before a reduce-scatter or all-reduce, or after an all-gather,
                or that it sends in an all-to-all or collective-permute.
        groups  (ranks, stride) along each mesh axis of the group: devices of a group are those
                numbers apart.
        chips   of the slice or job.
        """
        seconds = self._torus_s if self.is_tpu else self._hosts_s
        return seconds(kind, whole, groups, chips) * (2 if kind == "all-reduce" else 1)

    def between_slices_s(self, kind: str, whole: float, ranks: int) -> float:
        """As `collective_s`, between TPUs of so many slices, over the network of their hosts."""
        share = whole * (ranks - 1) / ranks / self.network_bandwidth
        return share * (2 if kind == "all-reduce" else 1)

    def _torus_s(
        self, kind: str, whole: float, groups: tuple[tuple[int, int], ...], chips: int
    ) -> float:
        ranks = math.prod(n for n, _ in groups)
        if kind == "collective-permute":
            return whole / self.link_bandwidth
        sides = sides_of(self.dims, ranks, slice_sides(self.dims, chips))
        links = sum(n for _, n in sides)
        share = whole * (ranks - 1) / ranks / (links * self.link_bandwidth)
        if kind != "all-to-all":
            return share
        # Half of what a chip sends crosses the middle of each side.
        middle = max(side / (4 * n) for side, n in sides)
        return max(share, whole * middle / self.link_bandwidth)

    def _hosts_s(
        self, kind: str, whole: float, groups: tuple[tuple[int, int], ...], chips: int
    ) -> float:
        ranks = math.prod(n for n, _ in groups)
        offsets = itertools.product(*(range(0, n * stride, stride) for n, stride in groups))
        here = sum(sum(offset) < GPUS_PER_HOST for offset in offsets)  # of the group on one host
        if kind == "collective-permute":
            return whole / (self.link_bandwidth if here == ranks else self.network_bandwidth)
        if kind == "all-to-all":
            away, near = (ranks - here) / ranks, (here - 1) / ranks
        else:  # each host fetches what others have once, over the network of all its ranks
            hosts = ranks / here
            away, near = (hosts - 1) / hosts / here, (here - 1) / here
        beyond = away / self.network_bandwidth if away else 0.0
        return whole * max(beyond, near / self.link_bandwidth)


@functools.cache
def slice_sides(dims: int, chips: int) -> tuple[int, ...]:
    """Sides of the slice: the usual one, or one as near to a cube as the number allows."""
    if dims == 1:
        return (chips,)
    if chips in TOPOLOGIES[dims]:
        return tuple(map(int, TOPOLOGIES[dims][chips].split("x")))
    side = max(n for n in range(1, round(chips ** (1 / dims)) + 1) if chips % n == 0)
    return (side, *slice_sides(dims - 1, chips // side))


@functools.cache
def sides_of(dims: int, ranks: int, sides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(length, links of a chip) along each side of a slice that so many neighbours lie on.

    A side is a ring, with two links, on a 3-D slice of whole cubes of 4 x 4 x 4, and on a 2-D one
    if it is 16 long; else it is a line, whose ends have one.
    """
    closed = all(side % 4 == 0 for side in sides) if dims == 3 else max(sides) >= 16
    found = []
    for side in sorted(sides, reverse=True):
        length = min(side, ranks)
        if length > 1:
            ring = closed and length == side and (dims == 3 or side >= 16)
            found.append((length, 2 if ring else 1))
        ranks = -(-ranks // length)
    return tuple(found)


def _tpu(name, kinds, flops, memory, bandwidth, link, dims, network) -> Chip:
    rates = (flops * TERA, flops * TERA / BF16_PASSES)
    speeds = (bandwidth * GB, link * GB, dims)
    return Chip(name, kinds, *rates, memory * 2**30, *speeds, network_bandwidth=network * GB)


def _gpu(name, kinds, generation, flops, float32, memory, bandwidth, link, network) -> Chip:
    figures = (flops * TERA, float32 * TERA, memory * 2**20, bandwidth * GB, link * GB)
    return Chip(name, kinds, *figures, generation=generation, network_bandwidth=network * GB)


# bf16 (and for GPUs float32) TFLOP/s; memory in GiB (TPU) or MiB (GPU); GB/s of memory, of a link,
# of the network, which is 400 Gb/s InfiniBand per GPU from the H100 on and 200 before (DGX data
# sheets).
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
        _gpu("h100", ("NVIDIA H100 80GB HBM3",), 9, 989, 67, 81559, 3350, 450, 50),
        _gpu("h100-pcie", ("NVIDIA H100 PCIe",), 9, 756, 51, 81559, 2000, 64, 50),
        _gpu("h200", ("NVIDIA H200",), 9, 989, 67, 143771, 4800, 450, 50),
    )
}  # fmt: skip

# Slices by number of chips, as libtpu compiles for them: cuboids on a 3-D torus, rectangles on a
# 2-D one.
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


def chip_named(name: str) -> Chip | None:
    """The chip of this name; None for cpu, of which no figures are known.

    Raises  ValueError that lists the known ones.
    """
    if name.lower() == "cpu":
        return None
    if name.lower() not in CHIPS:
        raise ValueError(f"--chip {name} is not known. Use one of {', '.join(CHIPS)}, cpu.")
    return CHIPS[name.lower()]


def platform_of(chip: Chip | None) -> str:
    """tpu, or gpu with the generation, as gpu9; cpu where there is no chip."""
    if chip is None:
        return "cpu"
    return "tpu" if chip.is_tpu else f"gpu{chip.generation}"


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
