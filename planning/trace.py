"""Trace the functions of the model with their gradients, on one chip's share of a microbatch.

A layer is what sharded_model.pipeline_functions wraps. The traces of a block and of the prefix
count how often they call it. No layer is named here. No devices are needed: the mesh is abstract.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import experts
import model
import pipeline
import sharded_model
import utils
import weights
from device_kernels.choice import choose_experts_kernel, fuses_loss
from planning import jaxpr
from planning.jaxpr import Op, Program, Value
from utils import MESH_AXES, TOKEN_AXES, Config
from weights import vary

LAYER = "layer_"  # prefix of the name of a layer's call in a trace
PRIME = 10007  # sequences of a trace that serves all batch sizes: see jaxpr.Sizes


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function of the model and its gradient, on one microbatch."""

    program: Program
    known: frozenset[Value]  # weights and data, which stay in memory anyway
    gradients: frozenset[Value]  # gradients of its results
    of_matrices: frozenset[Value] = frozenset()  # gradients of its matrices

    @cached_property
    def passes(self) -> tuple[list[Op], list[Op]]:
        """Forward and backward operations.

        Backward is what depends on the gradients of the results, or was made by transposing.
        """
        backward, passes = jaxpr.depending(self.program.ops, self.gradients), ([], [])
        for op in self.program.ops:
            passes[op.transposed or not backward.isdisjoint(op.outputs)].append(op)
        return passes

    @cached_property
    def residuals(self) -> list[Value]:
        """What the backward pass reads of the forward pass if nothing is recomputed.

        Known values do not count, nor those without inputs, such as a table of rotary angles.
        """
        made = {value for op in self.passes[1] for value in op.outputs}
        some = jaxpr.depending(self.program.ops, self.program.inputs) - made
        some -= self.known | self.gradients
        return list(dict.fromkeys(v for op in self.passes[1] for v in op.inputs if v in some))

    @cached_property
    def forward(self) -> list[tuple[Op, int]]:
        """Products and collectives of the forward pass, with how often each runs."""
        return jaxpr.costs(self.passes[0])

    @cached_property
    def backward(self) -> list[tuple[Op, int]]:
        return jaxpr.costs(self.passes[1])

    @cached_property
    def weight_ops(self) -> list[Op]:
        """Backward operations that only gradients of matrices need."""
        wanted = set(self.program.outputs) - self.of_matrices
        for op in reversed(self.passes[1]):
            if not wanted.isdisjoint(op.outputs):
                wanted.update(op.inputs)
        return [op for op in self.passes[1] if wanted.isdisjoint(op.outputs)]

    @cached_property
    def backward_of_input(self) -> list[tuple[Op, int]]:
        """The backward pass without `weight_ops`."""
        weight_ops = set(self.weight_ops)
        return jaxpr.costs(op for op in self.passes[1] if op not in weight_ops)

    @cached_property
    def forward_peak(self) -> np.ndarray:
        """Peak bytes of the forward pass alone, besides known values."""
        return jaxpr.peak(self.passes[0], set(self.known))

    @cache  # noqa: B019  a traced function lives as long as the process
    def remat(self, names: str) -> jaxpr.Remat:
        """Return what a value of `train.remat` saves and recomputes."""
        forward = Program(self.program.inputs, ops=self.passes[0])
        return jaxpr.remat(forward, self.residuals, set(self.known), sharded_model.policy(names))

    @cache  # noqa: B019
    def waiting(self, names: str) -> np.ndarray:
        """Return the bytes that `weight_ops` read, besides known and saved values."""
        made = {value for op in self.passes[1] for value in op.outputs} | self.gradients
        own = {value for op in self.weight_ops for value in op.outputs}
        read = {value for op in self.weight_ops for value in op.inputs} - own
        forward, known = Program(self.program.inputs, ops=self.passes[0]), {*self.known}
        known |= self.remat(names).saved.keys()
        more = jaxpr.remat(forward, read - made, known, sharded_model.saved_for_weights(names))
        return more.bytes + sum(value.bytes for value in read & made)

    @cache  # noqa: B019
    def alive(self, names: str) -> np.ndarray:
        """Return the peak bytes of the backward pass besides known and saved values."""
        remat = self.remat(names)
        return jaxpr.peak(remat.ops + self.passes[1], {*self.known, *remat.saved})


def trace_function(
    reader: jaxpr.Reader, function: Callable, result: Any, declared: Any, w: Any, *x: Any
) -> TracedFunction:
    """Trace function(w, *x), which returns `result`, with its gradient.

    declared  the Weights of w, of which those that are not trained have no gradient
    """

    def both(w: Any, x: tuple, gradient: Any) -> Any:
        y, backward = jax.vjp(of_trained(function, w), weights.trained(declared, w), *x)
        return y, backward(gradient)

    def gradient_of(a: jax.Array) -> Any:
        floating = jnp.issubdtype(a.dtype, jnp.floating)
        return a if floating else np.zeros(a.shape, jax.dtypes.float0)

    program = reader.read(jax.make_jaxpr(both)(w, x, jax.tree.map(gradient_of, result)))
    n, both_n = len(jax.tree.leaves(w)), len(jax.tree.leaves((w, x)))
    known = frozenset((*program.inputs[:n], *program.constants))
    gradients = frozenset(program.inputs[both_n:])
    own = program.outputs[len(jax.tree.leaves(result)) :]
    matrices = [w.matrix is not None for w in jax.tree.leaves(weights.trained(declared, declared))]
    return TracedFunction(program, known, gradients, frozenset(compress(own, matrices)))


def of_trained(function: Callable, w: Any) -> Callable:
    """Return function(w, *x) as a function of the weights that are trained."""
    return lambda own, *x: function(weights.filled(own, w), *x)


def with_executor(
    config: Config, kernel: str, wrap: Callable, visit: Callable, fused_loss: bool = False
) -> Any:
    """Return visit(executor), called inside the step's shard_map over an abstract mesh.

    wrap  wraps each layer, as in sharded_model.pipeline_functions.
    """
    mesh = abstract_mesh(config)
    declared, m, results = model.declare(config), config.model, []
    experts_kernel = choose_experts_kernel(config, "cpu")  # auto has been resolved
    kernels = kernel, experts_kernel, fused_loss
    options = model.ForwardOptions(m, config.train.seed, m.capacity_factor, m.dropout, *kernels)
    options = options._replace(quantized=m.matmul_dtype == "float8")

    def local(w: model.Transformer, data: model.Batch) -> jax.Array:
        data = sharded_model.of_rank(data)
        factors = sharded_model.scales(data, m.aux_loss_alpha)
        functions = sharded_model.pipeline_functions(
            config, declared, options, jnp.int32(0), factors, wrap
        )
        w = sharded_model.gather_params(config, declared, w)
        results.append(
            visit(pipeline.Executor(functions, w, data, sharded_model.schedule_of(config)))
        )
        return jnp.zeros(())

    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), declared)
    batch = sharded_model.abstract_batch(config, mesh)
    jax.eval_shape(sharded_model.over_mesh(declared, mesh, local, out=P()), shapes, batch)
    return results[0]


def abstract_mesh(config: Config) -> AbstractMesh:
    return AbstractMesh(config.mesh.shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


Layers = list[tuple[TracedFunction, int]]  # each with its number of calls


@cache
def stage_functions(
    config: Config, kernel: str, shares: tuple[tuple[int, float], ...], batches: tuple[int, ...]
) -> tuple[Layers, Layers, TracedFunction]:
    """Trace the layers of a block and of the prefix, and what runs before them.

    config   a result of `one_microbatch`.
    shares   (window, share of attention's scores that the kernel computes) of all layers.
    batches  sequences of a microbatch and rank that counts are for: the config's, or any if the
             config has PRIME.
    """
    sizes = jaxpr.Sizes(config.train.global_batch_size // config.mesh.fsdp, batches)
    reader = jaxpr.Reader(sizes, 1.0)
    outer = dataclasses.replace(reader, skipped=LAYER)
    layers: list[TracedFunction] = []
    numbers: dict[Any, int] = {}
    tree = model.declare(config)

    def wrap(layer: Callable, run: utils.LayerRun) -> Callable:
        def call(w: Any, x: jax.Array, *rest: Any, **options: Any) -> Any:
            def one(w: Any, x: jax.Array) -> Any:
                return layer(w, x, *rest, **options)

            types = str(jax.tree.map(jax.typeof, (w, x)))
            number = numbers.setdefault((layer, types), len(layers))
            one.__name__ = f"{LAYER}{number}"
            result = jax.jit(one)(w, x)
            if number == len(layers):
                at = dataclasses.replace(reader, kernel_share=dict(shares)[run.window])
                declared = tree.blocks.get(run.name, tree.first.prefix)
                layers.append(trace_function(at, one, result, declared, w, x))
            return result

        return call

    def calls(ops: list[Op]) -> Layers:
        # The last call of a layer counts: that of its loop, which one call may precede.
        named = {str(op.eqn.params.get("name")): times for op, times in jaxpr.runs(ops)}
        numbered = {n.removeprefix(LAYER): t for n, t in named.items() if n.startswith(LAYER)}
        return [(layers[int(number)], times) for number, times in numbered.items()]

    def visit(run: pipeline.Executor) -> tuple[Layers, Layers, TracedFunction]:
        zero, x = jnp.int32(0), run.empty_x()
        inputs = run.block_inputs(zero, zero, zero)
        block = jax.make_jaxpr(lambda x: run.functions.block(*inputs, x))(x)

        def first(w: Any) -> jax.Array:
            return vary(run.functions.first(w, run.microbatch(zero)))

        declared = run.functions.declared.outer
        traced = trace_function(outer, first, x, declared, run.w.outer)
        return calls(outer.read(block).ops), calls(traced.passes[0]), traced

    return with_executor(config, kernel, wrap, visit)


@cache
def output_program(
    config: Config, platform: str, batches: tuple[int, ...], trained: bool = True
) -> Program:
    """Trace what runs after the last stage, with its gradient if `trained`.

    config, batches  as for `stage_functions`.
    """
    b = config.train.global_batch_size // config.mesh.fsdp

    def visit(run: pipeline.Executor) -> Program:
        last, w = run.functions.last, run.w.outer
        if trained:
            last = jax.value_and_grad(of_trained(last, w), argnums=(0, 2), has_aux=True)
            w = weights.trained(run.functions.declared.outer, w)
        ranks = config.mesh.context * config.mesh.tensor
        y = jnp.zeros((b, config.train.seq_len // ranks, config.model.hidden_size))
        y = vary(y.astype(config.model.compute_dtype), TOKEN_AXES)
        closed = jax.make_jaxpr(last)(w, run.microbatch(0), y)
        sizes = jaxpr.Sizes(b, batches) if b == PRIME else jaxpr.Sizes()
        return jaxpr.Reader(sizes, 1.0, same_type=platform[:3] != "tpu").read(closed)

    fused = fuses_loss(config, platform)
    return with_executor(config, "xla", lambda layer, run: layer, visit, fused)


def one_microbatch(config: Config, mesh: utils.Mesh, sequences: int) -> Config:
    """Return a config with what a trace of one microbatch depends on, and defaults elsewhere.

    sequences  sequences of one fsdp rank.
    """
    t, m = config.train, config.model
    layout = "expert_parallel" if experts.uses_expert_parallelism(config) else "sharded"
    m = dataclasses.replace(m, experts_layout=layout)
    if sequences == PRIME and m.moe_layers and m.capacity_factor:  # it grows with the batch
        tokens = t.seq_len // (mesh.context * mesh.tensor)
        slots = PRIME * experts.expert_capacity(m, tokens, m.capacity_factor) - 0.5
        factor = slots * m.n_routed_experts / (m.num_experts_per_tok * PRIME * tokens)
        m = dataclasses.replace(m, capacity_factor=factor)
    layers = m.first_k_dense_replace + mesh.pipeline * m.period
    return Config(
        mesh=dataclasses.replace(mesh, virtual=1),
        model=dataclasses.replace(m, num_hidden_layers=layers),
        train=utils.Train(
            global_batch_size=sequences * mesh.fsdp,
            seq_len=t.seq_len,
            microbatches=1,
            loss_chunk_tokens=t.loss_chunk_tokens,
        ),
        data=utils.Data(segments=config.data.segments, positions=config.data.positions),
        lora=config.lora,
    )
