"""Time each kind of collective over all devices, beside the time that the planner gives it.

    ./run.sh python benchmark.py links
    ./launcher.sh --hosts hosts.txt -- python benchmark.py links

The planner divides bytes by the peak bandwidth of the links (hardware.py). The bandwidth measured
here, and the time of a small collective, show how far real links are from that.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import hardware
from benchmarks.common import NoFlags, median_seconds
from planning import collectives
from runtime import cli, distributed
from runtime.console import is_primary
from utils import ConfigError

SMALL, LARGE = 1 << 12, 1 << 26  # bytes of a device: as `whole` of planning/collectives.py
# Each kind, and whether its operand on a device is one part of `whole`.
KINDS: dict[str, tuple[Callable, bool]] = {
    "all-gather": (lambda a: lax.all_gather(a, "x", tiled=True), True),
    "reduce-scatter": (lambda a: lax.psum_scatter(a, "x", tiled=True), False),
    "all-reduce": (lambda a: lax.psum(a, "x"), False),
    "all-to-all": (lambda a: lax.all_to_all(a, "x", 0, 0, tiled=True), False),
    "collective-permute": (lambda a: lax.ppermute(a, "x", next_ranks()), False),
}


def next_ranks() -> list[tuple[int, int]]:
    n = lax.axis_size("x")
    return [(i, (i + 1) % n) for i in range(n)]


def collective(kind: str, whole: int) -> Callable[[], Any]:
    """Return a compiled collective over all devices on `whole` bytes of float32 of each."""
    function, is_part = KINDS[kind]
    # Not by jax.make_mesh, which reorders devices and refuses CPUs with different boot ids.
    mesh = Mesh(jax.devices(), ("x",), axis_types=(AxisType.Auto,))
    n, spec = mesh.size, PartitionSpec("x")
    numbers = math.ceil(whole / 4 / n) * (1 if is_part else n)  # of a device, divisible by n
    ones = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))

    def run(a: jax.Array) -> jax.Array:
        return function(a).sum(keepdims=True)

    # Without check_vma: whether the results are equal on all devices does not matter here.
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return partial(mapped, ones((n * numbers,)))


def main(arguments: list[str]) -> None:
    cli.parse_flags(NoFlags, arguments, __doc__)
    with distributed.job():
        devices = jax.devices()
        n, kind = len(devices), devices[0].device_kind
        if n == 1:
            raise ConfigError("one device has no links. Run this on several devices or hosts.")
        table = time_collectives(hardware.chip_of_kind(kind), n)
        if is_primary():
            Console(width=120).print(table)
            print(
                f"{n} x {kind}, processes: {jax.process_count()}. GB/s: bytes of a device over "
                "time. The plan has all links at their peak, and no latency."
            )


def time_collectives(chip: hardware.Chip | None, n: int) -> Table:
    """Return a row of each kind; without a known chip nothing is planned."""
    table = Table("collective", "ms of 4 KiB", "ms of 64 MiB", "GB/s", "planned ms", "ratio")
    for kind in KINDS:
        small_s, large_s = (median_seconds(collective(kind, size)) for size in (SMALL, LARGE))
        cells = [f"{1e3 * small_s:.3f}", f"{1e3 * large_s:.2f}", f"{LARGE / large_s / 1e9:.2f}"]
        if chip:
            planned_s = collectives.collective_s(chip, kind, LARGE, ((n, 1),), n)
            cells += [f"{1e3 * planned_s:.2f}", f"{large_s / planned_s:.2f}"]
        table.add_row(kind, *cells)
    return table
