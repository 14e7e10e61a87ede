"""The functions of the model, each traced with its gradient on one chip's share of a microbatch.

Layers are found by their calls: what passes.functions wraps is a layer, and how often a block or
the prefix calls it is counted in their traces. Nothing here knows which layers there are. Devices
are not needed; a mesh is its shape.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import model
import passes
import pipeline
import train
import utils
from planning import jaxpr
from planning.fusion import Fused
from planning.jaxpr import Op, Program, Value
from utils import MESH_AXES, TOKEN_AXES, Config
from weights import vary

LAYER = "layer_"  # begins the name of a layer's call in a trace
PRIME = 10007  # sequences of a trace that serves all sizes: see jaxpr.Sizes


@dataclass(frozen=True, eq=False)
class Piece:
    """A function of the model and its gradient, on one microbatch."""

    program: Program
    known: frozenset[Value]  # weights and data: held whatever this piece does
    gradients: frozenset[Value]  # of its results
    results: int  # of the program's outputs; the others are gradients of its arguments

    @cached_property
    def ways(self) -> tuple[list[Op], list[Op]]:
        """Forward and backward operations."""
        return jaxpr.split(self.program, self.gradients)

    @cached_property
    def residuals(self) -> list[Value]:
        """What the backward pass finds where nothing is computed again."""
        return jaxpr.residuals(self.program, set(self.gradients), set(self.known))

    @cached_property
    def forward(self) -> list[tuple[Op, int]]:
        """What multiplies or sends in the forward pass, with how often each runs."""
        return list(jaxpr.costs(self.ways[0]))

    @cached_property
    def backward(self) -> list[tuple[Op, int]]:
        return list(jaxpr.costs(self.ways[1]))

    @cache  # noqa: B019  a piece lives as long as the process
    def remat(self, names: str) -> jaxpr.Remat:
        """What `train.remat` keeps and computes again."""
        forward = Program(self.program.inputs, ops=self.ways[0])
        return jaxpr.remat(forward, self.residuals, set(self.known), passes.policy(names))

    @cache  # noqa: B019
    def kernels(self, names: str, alone: frozenset[str]) -> tuple[Fused, Fused]:
        """Of the forward and of the backward pass; alone as there."""
        remat, (forward, backward) = self.remat(names), self.ways
        results = [*self.program.outputs[: self.results], *remat.kept]
        gradients = self.program.outputs[self.results :]
        return Fused(forward, alone, results), Fused(remat.ops + backward, alone, gradients)

    @cache  # noqa: B019
    def alive(self, names: str) -> np.ndarray:
        """Most bytes of the backward pass beside what is known and kept."""
        found = self.remat(names)
        return jaxpr.peak(found.ops + self.ways[1], {*self.known, *found.kept})


def piece(reader: jaxpr.Reader, function: Callable, result: Any, w: Any, *x: Any) -> Piece:
    """Traces function(w, *x), whose result is given, and its gradient."""

    def both(w: Any, x: tuple, gradient: Any) -> Any:
        y, backward = jax.vjp(function, w, *x)
        return y, backward(gradient)

    def gradient_of(a: jax.Array) -> Any:
        has_one = jnp.issubdtype(a.dtype, jnp.floating)
        return a if has_one else np.zeros(a.shape, jax.dtypes.float0)

    gradient = jax.tree.map(gradient_of, result)
    traced = jax.make_jaxpr(both)(w, x, gradient)
    program = reader.read(traced)
    sizes = [len(jax.tree.leaves(part)) for part in (w, x)]
    inputs = program.inputs
    known = (*inputs[: sizes[0]], *program.constants)
    gradients, results = frozenset(inputs[sum(sizes) :]), len(jax.tree.leaves(result))
    return Piece(program, frozenset(known), gradients, results)


def look(config: Config, kernel: str, wrapped: Callable, at: Callable) -> None:
    """at(executor) inside the step's shard_map, over devices that are not there.

    wrapped  goes around each layer, as in passes.functions.
    """
    mesh = abstract_mesh(config)
    declared, m = model.declare(config), config.model
    how = model.How(m, config.train.seed, m.capacity_factor, m.dropout, kernel)

    def local(w: model.Transformer, data: model.Batch) -> jax.Array:
        data = passes.numbered(data)
        scales = passes.scales(data, m.balance_loss)
        run = passes.functions(config, declared, how, jnp.int32(0), *scales, wrapped=wrapped)
        w = passes.prepare(config, declared, w)
        at(pipeline.Executor(run, w, data, passes.schedule_of(config)))
        return jnp.zeros(())

    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)
    batch = train.abstract_batch(config, mesh)
    jax.eval_shape(passes.over_mesh(declared, mesh, local, out=P()), shapes, batch)


def abstract_mesh(config: Config) -> AbstractMesh:
    return AbstractMesh(config.mesh.shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclass(frozen=True)
class Pieces:
    """What runs up to the last stage: layers, each with how many there are of it."""

    block: list[tuple[Piece, int]]
    prefix: list[tuple[Piece, int]]
    first: Piece  # before the first stage, without the prefix

    @property
    def sized_by_fsdp(self) -> bool:
        """Whether something that is sent along fsdp grows or shrinks with its ranks. No layer of
        this model has it: experts are exchanged, weights gathered outside, sums keep their size.
        """
        pieces = [self.first, *(piece for piece, _ in self.block + self.prefix)]
        sends = [op.send for p in pieces for op, _ in p.forward + p.backward if op.send]
        return any("fsdp" in s.axes and s.kind in ("all-gather", "reduce-scatter") for s in sends)


@cache
def pieces(config: Config, kernel: str, share: float, cuts: tuple[tuple[int, int], ...]) -> Pieces:
    """config  as `one_microbatch` leaves it.
    cuts  (sequences of a microbatch and rank, ranks of fsdp) that counts are for: those of the
          config, or any sequences where it has PRIME, and any ranks where it has one.
    """
    spread = spread_bytes(config) if config.mesh.fsdp == 1 else frozenset()
    sizes = jaxpr.Sizes(config.train.sequences // config.mesh.fsdp, cuts, spread)
    reader = jaxpr.Reader(sizes, share)
    outer = dataclasses.replace(reader, skipped=LAYER)
    layers: list[Piece] = []
    numbers: dict[Any, int] = {}
    found: dict[str, Any] = {}

    def wrapped(layer: Callable) -> Callable:
        def call(w: Any, x: jax.Array, *rest: Any, **options: Any) -> Any:
            def one(w: Any, x: jax.Array) -> Any:
                return layer(w, x, *rest, **options)

            types = str(jax.tree.map(jax.typeof, (w, x)))
            number = numbers.setdefault((layer, types), len(layers))
            one.__name__ = f"{LAYER}{number}"
            result = jax.jit(one)(w, x)
            if number == len(layers):
                layers.append(piece(reader, one, result, w, x))
            return result

        return call

    def at(run: pipeline.Executor) -> None:
        zero, x = jnp.int32(0), run.empty_x()
        block = jax.make_jaxpr(lambda x: run.functions.block(*run.known(zero, zero, zero), x))(x)

        def first(w: Any) -> jax.Array:
            return vary(run.functions.first(w, run.microbatch(zero)))

        found["first"] = piece(outer, first, x, run.w.ends)
        for name, ops in (
            ("block", outer.read(block).ops),
            ("prefix", found["first"].ways[0]),
        ):
            calls = jaxpr.calls(ops, LAYER)
            found[name] = [(layers[number], times) for number, times in calls.items()]

    look(config, kernel, wrapped, at)
    return Pieces(**found)


@cache
def after(config: Config, kernel: str, rows: tuple[int, ...]) -> Program:
    """What runs after the last stage, with its gradient.

    config  as `one_microbatch` leaves it.
    rows    of a rank's slice of the vocabulary, that counts are for: the config's, or fewer. Few
            vocabularies divide other sizes, so one trace serves for all.
    """
    b = config.train.sequences // config.mesh.fsdp
    sizes = jaxpr.Sizes(local_rows(config), tuple((n, 1) for n in rows))
    found: list[Program] = []

    def at(run: pipeline.Executor) -> None:
        gradient = jax.value_and_grad(run.functions.last, argnums=(0, 2), has_aux=True)
        y = jnp.zeros((b, config.train.sequence_length // config.mesh.tensor, config.model.width))
        y = vary(y.astype(config.model.compute_dtype), TOKEN_AXES)
        last = jax.make_jaxpr(gradient)(run.w.ends, run.microbatch(0), y)
        found.append(jaxpr.Reader(sizes, 1.0).read(last))

    look(config, kernel, lambda layer: layer, at)
    return found[0]


def spread_bytes(config: Config) -> frozenset[int]:
    """Of a layer's weights and gradients on one rank, that more ranks of fsdp have less of also in
    use: experts. Their first dimension is the one that is cut.
    """
    found = set()
    for w in jax.tree.leaves(model.declare(config)):
        if "fsdp" in w.axes and w.gathered_dim is None:
            first = next(dim for dim, axes in enumerate(w.cuts) if "fsdp" in axes)
            size = math.prod(w.shape[first:]) // config.mesh.tensor
            dtypes = jnp.float32, config.model.compute_dtype
            # Alone, and as wide as two side by side.
            found |= {n * size * jnp.dtype(dtype).itemsize for dtype in dtypes for n in (1, 2)}
    return frozenset(found)


def local_rows(config: Config) -> int:
    """Of a rank's slice of the vocabulary."""
    return config.model.padded_vocabulary // (config.mesh.pipeline * config.mesh.tensor)


def one_microbatch(config: Config, mesh: utils.Mesh, sequences: int) -> Config:
    """What a trace of one microbatch depends on, all else as by default.

    sequences  of one fsdp rank.
    """
    t, m = config.train, config.model
    layout = "spread" if model.spread_experts(config) else "gathered"
    m = dataclasses.replace(m, experts_layout=layout)
    if sequences == PRIME and m.moe_layers:  # slots that grow with the batch
        tokens = t.sequence_length // mesh.tensor
        slots = PRIME * model.expert_slots(m, tokens, m.capacity_factor) - 0.5
        factor = slots * m.experts / (m.experts_per_token * PRIME * tokens)
        m = dataclasses.replace(m, capacity_factor=factor)
    return Config(
        mesh=dataclasses.replace(mesh, virtual=1),
        model=dataclasses.replace(m, blocks=mesh.pipeline),
        train=utils.Train(
            sequences=sequences * mesh.fsdp,
            sequence_length=t.sequence_length,
            microbatches=1,
            loss_chunk_tokens=t.loss_chunk_tokens,
        ),
        data=utils.Data(segments=config.data.segments),
    )
