"""Minimum time of a collective, with its links at full bandwidth."""

import functools
import itertools
import math

from hardware import GPUS_PER_HOST, TOPOLOGIES, Chip
from utils import ConfigError

Groups = tuple[tuple[int, int], ...]


def collective_s(chip: Chip, kind: str, whole: float, groups: Groups, chips: int) -> float:
    """Return the minimum seconds of a collective within a TPU slice, or over GPUs.

    whole   bytes of a chip: before a reduce-scatter or all-reduce, after an all-gather, or sent
            in an all-to-all or collective-permute.
    groups  (ranks, stride) along each mesh axis of the group. The stride is the distance between
            device numbers.
    chips   chips of the slice or job.
    """
    passes = 2 if kind == "all-reduce" else 1
    if chip.is_tpu:
        return passes * _torus_s(chip, kind, whole, math.prod(n for n, _ in groups), chips)
    return passes * _hosts_s(chip, kind, whole, groups)


def between_slices_s(chip: Chip, kind: str, whole: float, ranks: int) -> float:
    """Return the seconds of a collective between TPU slices, over the network of their hosts.

    Raises  ConfigError for a TPU that has no jobs of several slices.
    """
    if not chip.network_bandwidth:
        raise ConfigError(f"a job on TPU {chip.name} has one slice. Use --mesh.replica 1.")
    share = whole * (ranks - 1) / ranks / chip.network_bandwidth
    return share * (2 if kind == "all-reduce" else 1)


def _torus_s(chip: Chip, kind: str, whole: float, ranks: int, chips: int) -> float:
    if kind == "collective-permute":
        return whole / chip.link_bandwidth
    sides = sides_of(chip.dims, ranks, slice_sides(chip.dims, chips))
    links = sum(n for _, n in sides)
    share = whole * (ranks - 1) / ranks / (links * chip.link_bandwidth)
    if kind != "all-to-all":
        return share
    # Half of the bytes that a chip sends cross the middle of each side.
    middle = max(side / (4 * n) for side, n in sides)
    return max(share, whole * middle / chip.link_bandwidth)


def _hosts_s(chip: Chip, kind: str, whole: float, groups: Groups) -> float:
    ranks = math.prod(n for n, _ in groups)
    offsets = itertools.product(*(range(0, n * stride, stride) for n, stride in groups))
    here = sum(sum(offset) < GPUS_PER_HOST for offset in offsets)  # ranks of the group on one host
    if kind == "collective-permute":
        return whole / (chip.link_bandwidth if here == ranks else chip.network_bandwidth)
    if kind == "all-to-all":
        away, near = (ranks - here) / ranks, (here - 1) / ranks
    else:  # each host fetches the data of others once, over the network of all its ranks
        hosts = ranks / here
        away, near = (hosts - 1) / hosts / here, (here - 1) / here
    beyond = away / chip.network_bandwidth if away else 0.0
    return whole * max(beyond, near / chip.link_bandwidth)


@functools.cache
def slice_sides(dims: int, chips: int) -> tuple[int, ...]:
    """Return the sides of a slice: those of TOPOLOGIES, or else as near to a cube as possible."""
    if dims == 1:
        return (chips,)
    if chips in TOPOLOGIES[dims]:
        return tuple(map(int, TOPOLOGIES[dims][chips].split("x")))
    side = max(n for n in range(1, round(chips ** (1 / dims)) + 1) if chips % n == 0)
    return (side, *slice_sides(dims - 1, chips // side))


@functools.cache
def sides_of(dims: int, ranks: int, sides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (length, links of a chip) along each side of a slice that neighbouring ranks occupy.

    A side of a 3-D slice is a ring, with two links, if the slice consists of 4 x 4 x 4 cubes. A
    side of a 2-D slice is a ring if it is 16 long. Other sides are lines, whose ends have one link.
    """
    closed = all(side % 4 == 0 for side in sides) if dims == 3 else max(sides) >= 16
    occupied = []
    for side in sorted(sides, reverse=True):
        length = min(side, ranks)
        if length > 1:
            ring = closed and length == side and (dims == 3 or side >= 16)
            occupied.append((length, 2 if ring else 1))
        ranks = -(-ranks // length)
    return tuple(occupied)
