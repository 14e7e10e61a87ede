"""The hidden tests of the coding problems. guide/check.py runs that of a problem's stub.

A test takes the reader's module and yields what is wrong with it. Its docstring says what it
tests.
"""

import dataclasses
import io
import math
import random
from collections.abc import Iterator
from types import ModuleType

import answers
import jax
import jax.numpy as jnp
import numpy as np
from answers import Schedule
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optimizer
import rope
from data import readers
from dataset import feistel, mix


def assign(own: ModuleType) -> Iterator[str]:
    """30 sequences, and no late token changes an early one."""
    rng = random.Random(0)
    for _ in range(30):
        experts, K, tokens = rng.randint(2, 8), rng.randint(1, 2), rng.randint(1, 20)
        capacity = rng.randint(1, 6)
        choices = [rng.sample(range(experts), K) for _ in range(tokens)]
        true = answers.assigned(choices, experts, capacity)
        found = [[*slots] for slots in own.assign(choices, experts, capacity)]
        if found != true:
            yield (
                f"{experts} experts, capacity {capacity}, choices {choices}.\n"
                f"The slots are {true}, and yours {found}"
            )
        early = own.assign(choices[: tokens // 2], experts, capacity)
        if [[*slots] for slots in early] != found[: tokens // 2]:
            yield "late tokens change the slots of early ones"


def feistel_inverse(own: ModuleType) -> Iterator[str]:
    """3 keys, 256 pairs each."""
    bits, mask = 4, 15
    for key in np.array([1, 2**40 + 7, 2**63 + 12345], np.uint64):

        def hashed(x: int, key: np.uint64 = key) -> int:
            return int(mix(np.array([x], np.uint64) ^ key)[0]) & mask

        for value, after in enumerate(feistel(np.arange(256, dtype=np.uint64), bits, [key])):
            before, pair = divmod(value, 1 << bits), divmod(int(after), 1 << bits)
            found = tuple(int(x) for x in own.inverse(*pair, hashed))
            if found != before:
                yield f"a round maps {before} to {pair}, and you return {found} for {pair}"


def lost_share(own: ModuleType) -> Iterator[str]:
    """3 cases."""
    for save_s, failure_s in ((5.0, 21_600.0), (1.0, 3600.0), (60.0, 86_400.0)):
        best, least = math.sqrt(2 * save_s * failure_s), math.sqrt(2 * save_s / failure_s)
        lost = own.lost_share(best, save_s, failure_s)
        if not math.isclose(lost, least, rel_tol=1e-6):
            yield (
                f"saves of {save_s} s, failures every {failure_s} s, interval {best:.0f} s:\n"
                f"the share is {least:.4f}, and you return {lost:.4f}"
            )
        near = [own.lost_share(best * factor, save_s, failure_s) for factor in (0.5, 0.9, 1.1, 2)]
        if min(near) <= lost:
            yield "the share is smallest at sqrt(2 * save_s * failure_s), and not in yours"


def newton_schulz(own: ModuleType) -> Iterator[str]:
    """4 matrices, and their singular values."""
    rng = np.random.default_rng(0)
    for rows, columns in ((1, 1), (3, 5), (16, 16), (20, 64)):
        x = rng.normal(size=(rows, columns))
        true = np.asarray(optimizer.orthogonalize(jnp.asarray(x, jnp.float32)[None]))[0]
        found = np.asarray(own.orthogonalize(x))
        if found.shape != x.shape or not np.allclose(found, true, atol=1e-3):
            yield (
                f"of a {rows} x {columns} matrix, the first row begins with\n"
                f"{true[0, :4]}, and yours with {found[0, :4]}"
            )
        values = np.linalg.svd(found, compute_uv=False)
        large = values[np.linalg.svd(x / np.linalg.norm(x), compute_uv=False) > 0.01]
        if not ((large > 0.6) & (large < 1.3)).all():
            yield f"singular values are {values}"


def owner(own: ModuleType) -> Iterator[str]:
    """50 files."""
    rng = random.Random(0)
    for _ in range(50):
        lines = [b"x" * rng.randrange(6) + b"\n" for _ in range(20)]
        content, first = b"".join(lines), 0
        begins = [0, *sorted(rng.sample(range(1, len(content)), 4))]
        starts = [readers.seek_line(io.BytesIO(content), begin) for begin in begins]
        for line in lines:
            # The reader of a split reads from its start to that of the next split.
            true = max(i for i, start in enumerate(starts) if start <= first)
            found = own.owner(first, begins)
            if found != true:
                yield (
                    f"splits begin at {begins}. The line at byte {first} is read by split\n"
                    f"{true}, and you return {found}"
                )
            first += len(line)


def rotary(own: ModuleType) -> Iterator[str]:
    """3 widths, 4 positions, and scores that depend on the distance."""
    rng = np.random.default_rng(0)
    for R, theta in ((2, 10_000.0), (8, 100.0), (64, 500_000.0)):
        m = dataclasses.replace(answers.config_of("tiny").model, rope_theta=theta)
        x, y = rng.normal(size=(2, R)).astype(np.float32)
        for position in (0, 1, 7, 100):
            at = jnp.array([[position]])
            true = np.asarray(rope.rotate(jnp.asarray(x)[None, None, None], m, at)).ravel()
            found = np.asarray(own.rotate(x, position, theta))
            if found.shape != x.shape or not np.allclose(found, true, atol=1e-4):
                yield (
                    f"for R = {R}, theta = {theta:g}, position {position} the first numbers\n"
                    f"are {true[:4]}, and yours {found[:4]}"
                )
        pairs = (9, 4), (29, 24)
        scores = [own.rotate(x, a, theta) @ own.rotate(y, b, theta) for a, b in pairs]
        if not np.isclose(*scores, atol=1e-3):
            yield f"the scores at positions (9, 4) and (29, 24) differ: {scores}"


def schedule_tasks(own: ModuleType) -> Iterator[str]:
    """40 schedules."""
    for pipeline in (1, 2, 3, 4, 8):
        for microbatches in range(1, 9):
            schedule = Schedule(pipeline, 1, microbatches)
            for rank, tick in np.ndindex(pipeline, schedule.ticks):
                for way, _, microbatch in schedule.tasks_at(tick, rank):
                    found = own.backward_tick(pipeline, rank, microbatch)
                    if way == "bwd" and found != tick:
                        yield (
                            f"with {pipeline} ranks, rank {rank} runs the backward task of "
                            f"microbatch {microbatch} at tick {tick}, and you return {found}"
                        )


def tensor_parallel_mlp(own: ModuleType) -> Iterator[str]:
    """Values and gradients on 1, 2 and 4 ranks."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (3, 8), (8, 12), (12, 8)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def value_and_gradients(mlp):
        def loss(*arrays):
            y = mlp(*arrays)
            return jnp.sum(y**2), y

        gradients, y = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
        return [y, *gradients]

    true = value_and_gradients(lambda x, up, down: jax.nn.relu(x @ up) @ down)
    for ranks in (1, 2, 4):
        devices = jax.devices()[:ranks]
        mesh = jax.make_mesh((ranks,), ("tensor",), (AxisType.Auto,), devices=devices)
        specs = (P(), P(None, "tensor"), P("tensor", None))
        sharded = jax.shard_map(own.mlp, mesh=mesh, in_specs=specs, out_specs=P())
        try:
            found = value_and_gradients(sharded)
        except ValueError as error:
            if "replicat" not in str(error):
                raise
            yield "the result differs between tensor ranks. Which sum is missing?"
            return
        names = ("value", "gradient of x", "gradient of up", "gradient of down")
        for name, a, b in zip(names, found, true, strict=True):
            if not np.allclose(a, b, rtol=1e-4, atol=1e-4):
                yield f"on {ranks} ranks the {name} differs from that of one device"
