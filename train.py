"""The training step and what it runs on: mesh, state, optimizer, batches on the devices.

A step is one jitted function of (state, batch, learning rates). Shapes and layouts of state and
batch are available without arrays, to compile it ahead of time. Functions take the config, the
Weights of model.declare, and the mesh.
"""

import collections
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hardware
import memory
import sharded_model
import utils
import weights
from model import Batch, Transformer
from optimizer import LearningRates, learning_rate, make_optimizer
from runtime import errors
from runtime.console import log
from utils import GIB, MESH_AXES, Config, ConfigError

AHEAD_STEPS = 4  # steps whose batches are prepared in advance
NORMS = 128  # steps whose gradient norms define a spike
MIN_NORMS = 16  # with fewer, no step is a spike

Result = TypeVar("Result")

# --- mesh -----------------------------------------------------------------------------------------


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh of MESH_AXES, by default over all devices of the job."""
    if jax.config.jax_enable_x64:
        raise ConfigError(
            "JAX_ENABLE_X64 is set, but weights and token ids have 32 bits. Unset it."
        )
    devices = jax.devices() if devices is None else devices
    need, available = math.prod(config.mesh.shape), len(devices)
    if need > available or (need < available and jax.process_count() > 1):
        simulated = (
            f" For simulated devices, set XLA_FLAGS=--xla_force_host_platform_device_count={need}, "
            "or start through ./run.sh."
        ) * (devices[0].platform == "cpu" and need > available)
        raise ConfigError(
            f"the mesh {config.mesh} has {need} devices, and this run has {available}. Use sizes "
            f"whose product is {available}, as --mesh.fsdp {available} --mesh.pipeline 1 "
            f"{'--mesh.context 1 ' * (config.mesh.context > 1)}--mesh.tensor 1.{simulated}"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(arrange_devices(config, devices[:need]), MESH_AXES, axis_types=auto)


def slice_of(device: jax.Device) -> int:
    """Return the slice of a TPU; 0 for others, whose attribute of this name counts hosts."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def arrange_devices(config: Config, devices: Sequence[jax.Device]) -> np.ndarray:
    """Arrange devices in the shape of the mesh, with neighbours along its inner axes.

    A slice of TPUs holds one or more complete replicas.
    """
    slices = len({slice_of(device) for device in devices})
    replica, *inner = config.mesh.shape
    if replica % slices:
        raise ConfigError(
            f"--mesh.replica {replica} is not a multiple of the {slices} slices: no other axis may "
            f"cross slices. Use --mesh.replica {slices}."
        )
    # Mesh axes may share an axis of the torus: on 4x4x4 chips, a mesh axis of 2 has to.
    options = {"devices": devices, "allow_split_physical_axes": True}
    if slices == 1:
        return mesh_utils.create_device_mesh(config.mesh.shape, **options)
    within, between = (replica // slices, *inner), (slices, *[1] * len(inner))
    return mesh_utils.create_hybrid_device_mesh(within, between, **options)


# --- state and optimizer --------------------------------------------------------------------------


@flax.struct.dataclass
class State:
    """All that a step changes. With the config it is all that resuming needs."""

    weights: Transformer
    optimizer: Any
    step: jax.Array  # steps run, applied or not
    skipped: jax.Array  # steps not applied: not finite, or a spike (detect_spike)
    skipped_in_row: jax.Array
    # [NORMS] gradient norms of the last applied steps, oldest first, padded with infinity; None
    # without --train.skip_spikes
    norms: jax.Array | None = None


def abstract_state(config: Config, declared: Transformer, mesh: Mesh) -> State:
    """Return the shape and layout of each array of the state.

    Arrays of the optimizer have the layout of their weight.
    """

    def array(spec: P, shape: tuple[int, ...] = (), dtype: Any = np.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def masked(a: Any) -> bool:  # an array of the other optimizer
        return isinstance(a, optax.MaskedNode)

    w = jax.tree.map(lambda w: array(w.spec, w.shape, w.dtype), declared)
    optimizer = make_optimizer(config, declared, mesh)
    optimizer_state = optax.tree.map_params(
        optimizer,
        lambda a, w: a if masked(a) else array(w.spec, a.shape, a.dtype),
        jax.eval_shape(optimizer.init, weights.trained(declared, w)),
        weights.trained(declared, declared),
        transform_non_params=lambda a: array(P(), a.shape, a.dtype),
        is_leaf=masked,
    )
    norms = array(P(), (NORMS,)) if config.train.skip_spikes else None
    return State(w, optimizer_state, *[array(P(), dtype=np.int32)] * 3, norms)


def shardings_of(shapes: Any) -> Any:
    """Return the layouts of a tree from abstract_state."""
    return jax.tree.map(lambda a: a.sharding, shapes)


def initial_state(
    config: Config, declared: Transformer, mesh: Mesh, w: Transformer | None = None
) -> State:
    """Return the state before the first step, bit-identical on every mesh.

    w  initial weights; drawn from the seed if not given.
    """
    shardings = shardings_of(abstract_state(config, declared, mesh))
    if w is None:
        w = weights.initialize(declared, mesh, config.train.seed)
    optimizer = make_optimizer(config, declared, mesh)
    with_gradient = weights.trained(declared, w)
    optimizer_state = jax.jit(optimizer.init, out_shardings=shardings.optimizer)(with_gradient)
    step, skipped, in_row = (jax.device_put(np.int32(0), shardings.step) for _ in range(3))
    norms = initial_norms(shardings.norms) if shardings.norms else None
    return State(w, optimizer_state, step, skipped, in_row, norms)


def initial_norms(sharding: NamedSharding) -> jax.Array:
    """Return `State.norms` before the first applied step."""
    return jax.device_put(np.full(NORMS, np.inf, np.float32), sharding)


# --- one step -------------------------------------------------------------------------------------


def jitted_step(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[State, Batch, LearningRates], tuple[State, dict[str, jax.Array]]]:
    """Return the jitted step: (state, batch [M, B, T], learning rates) -> (next state, report).

    The state is donated. A step whose loss or gradient norm is not finite, or that is a spike,
    changes only the counters.
    """
    loss_and_gradients = sharded_model.loss_and_gradients(config, declared, mesh)
    optimizer = make_optimizer(config, declared, mesh)

    def step(
        state: State, batch: Batch, rates: LearningRates
    ) -> tuple[State, dict[str, jax.Array]]:
        grads, stats = loss_and_gradients(state.weights, batch, state.step)
        norm, lr = optax.tree.norm(grads), learning_rate(rates, state.step)
        old = weights.trained(declared, state.weights)
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(grads, state.optimizer, old)
        new = jax.tree.map(lambda w, u: w - lr * u, old, updates)
        new = balance_router(config, weights.filled(new, state.weights), stats.tokens_per_expert)
        finite = jnp.isfinite(stats.loss) & jnp.isfinite(norm)
        applied, norms, spike = detect_spike(config.train.skip_spikes, state.norms, norm, finite)
        new, optimizer_state = jax.tree.map(
            lambda new, old: old if new is old else jnp.where(applied, new, old),
            (new, optimizer_state),
            (state.weights, state.optimizer),
        )
        skipped = 1 - applied.astype(jnp.int32)
        in_row = (state.skipped_in_row + 1) * skipped
        state = State(new, optimizer_state, state.step + 1, state.skipped + skipped, in_row, norms)
        counters = {"skipped": state.skipped, "skipped_in_row": in_row}
        return state, {"stats": stats, "grad_norm": norm, "lr": lr} | counters | spike

    shardings = shardings_of(abstract_state(config, declared, mesh))
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
        compiler_options=compiler_options(mesh),
    )


def detect_spike(
    factor: float, norms: jax.Array | None, norm: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    """Return (whether the step is applied, the next norms, entries of the report).

    A spike is a gradient norm above `factor` times the median of `norms`. Only applied steps move
    the median, so a norm that rises for good would be skipped forever. Spikes therefore count as
    steps skipped in a row.
    """
    if norms is None:
        return finite, None, {}
    count = jnp.isfinite(norms).sum()
    ordered = jnp.sort(norms)  # padding comes last
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    median = jnp.where(count >= MIN_NORMS, median, jnp.inf)
    spike = finite & (norm > factor * median)
    applied = finite & ~spike
    later = jnp.concatenate([norms[1:], norm[None]])
    return applied, jnp.where(applied, later, norms), {"spike": spike, "median": median}


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """Return options of the compiler, beside those of LIBTPU_INIT_ARGS, which libtpu reads itself.

    On a TPU v4 these overlap all-gathers and all-to-alls with computation, which by default they
    block. Later TPUs reject the options or gain nothing. On GPUs products are those of cuBLAS: they
    add to a gradient in place, which those of Triton do not (docs/measured.md), and multiply in FP8
    what float8.py has quantized. An option in XLA_FLAGS takes precedence.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        option = "xla_gpu_enable_triton_gemm"
        return None if option in os.environ.get("XLA_FLAGS", "") else {option: False}
    if device.device_kind in hardware.CHIPS["v4"].kinds:
        return {"xla_enable_async_all_gather": True, "xla_tpu_enable_async_all_to_all": True}
    return None


def balance_router(config: Config, w: Transformer, count: jax.Array | None) -> Transformer:
    """bias += speed * sign(mean load - load) for each expert (arXiv:2412.19437, equation 16).

    A frozen bias stays as it is.

    count  [virtual, stage, layer with experts, E] choices of the step on all ranks, before any is
           dropped.
    """
    speed = config.model.router_bias_update_speed
    if count is None or not speed or config.lora.rank:
        return w
    load, m = count.astype(jnp.float32), config.model
    load = load.reshape(*load.shape[:2], -1, m.moe_layers, load.shape[-1])
    blocks, first = dict(w.blocks), 0
    for run in (run for run in m.runs if run.experts):
        layer, end = blocks[run.name], first + run.layers
        here = load[..., first:end, :].reshape(layer.moe.bias.shape)
        bias = layer.moe.bias + speed * jnp.sign(here.mean(-1, keepdims=True) - here)
        blocks[run.name] = layer.replace(moe=layer.moe.replace(bias=bias))
        first = end
    return w.replace(blocks=blocks)


# --- batches --------------------------------------------------------------------------------------


def put_batch(
    mesh: Mesh, microbatches: int, rows: Callable[[np.ndarray], dict[str, np.ndarray]], shape: tuple
) -> Batch:
    """Put the global batch [M, B, T] on the mesh. A process reads only the rows of its devices.

    rows   row numbers of the batch -> their arrays [n, T].
    shape  (sequences, T).
    """
    sequences, T = shape
    per_microbatch = sequences // microbatches
    sharding = NamedSharding(mesh, sharded_model.BATCH_SPEC)

    @cache
    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        numbers = np.arange(microbatches)[:, None] * per_microbatch + np.arange(start, stop)
        return rows(numbers.reshape(-1))

    def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[1].indices(per_microbatch)
        return read(start, stop)[name].reshape(microbatches, stop - start, T)

    global_shape = (microbatches, per_microbatch, T)
    return Batch(
        **{
            name: jax.make_array_from_callback(global_shape, sharding, partial(shard, name))
            for name in ("tokens", "targets", "loss_weights", "segments")
        }
    )


def batches(
    config: Config,
    mesh: Mesh,
    rows: Callable[[int, np.ndarray], dict[str, np.ndarray]],
    first_step: int,
) -> Iterator[Batch]:
    """Yield the batch of each step from `first_step` on, prepared ahead by threads.

    rows  (step, row numbers of its batch) -> their arrays [n, T]: see dataset.Mixture.rows.
    """
    t, shape = config.train, (config.train.global_batch_size, config.train.seq_len)

    def batch(step: int) -> Batch:
        return put_batch(mesh, t.microbatches, partial(rows, step), shape)

    return prefetch(batch, range(first_step, t.steps))


def prefetch(
    function: Callable[[Any], Result], inputs: Iterable[Any], depth: int = AHEAD_STEPS
) -> Iterator[Result]:
    """Yield function(x) for each x, in order, computed up to `depth` ahead, each in a thread.

    An exception of the function is raised in place of its result. close() of the iterator cancels
    pending calls and ends the threads.
    """
    pool = ThreadPoolExecutor(depth, thread_name_prefix="prefetch")
    pending: collections.deque[Future[Result]] = collections.deque()
    try:
        for x in inputs:
            pending.append(pool.submit(function, x))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# --- evaluation -----------------------------------------------------------------------------------


def evaluation_config(config: Config) -> Config:
    """Return the config whose batch has the windows of an evaluation, in usual microbatches.

    Where windows are no multiple of the global batch, the last one is full nevertheless.
    """
    t, rounds = config.train, -(-config.eval.sequences // config.train.global_batch_size)
    sizes = {"microbatches": rounds * t.microbatches}
    sizes["global_batch_size"] = rounds * t.global_batch_size
    return utils.changed(config, {f"train.{name}": size for name, size in sizes.items()})


def jitted_evaluation(config: Config, declared: Transformer, mesh: Mesh) -> Any:
    """Return the jitted (weights, batch [M, B, T] of `evaluation_config`) -> Stats."""
    return jax.jit(
        sharded_model.evaluate(evaluation_config(config), declared, mesh),
        out_shardings=NamedSharding(mesh, P()),  # every process reads the whole result
        compiler_options=compiler_options(mesh),
    )


# --- compilation ----------------------------------------------------------------------------------


def compile_step(config: Config, declared: Transformer, mesh: Mesh, *arguments: Any) -> Any:
    """Compile the step for arguments of these shapes and layouts.

    With `--train.layers auto` layers are scanned after all if the unrolled step does not fit.
    """
    step = errors.compile_lowered(jitted_step(config, declared, mesh).lower(*arguments))
    unrolled = sharded_model.is_unrolled(config, sharded_model.platform(mesh))
    usable = memory.usable_bytes(mesh)
    if config.train.layers != "auto" or not unrolled or not usable:
        return step
    needed = memory.planned_bytes(step)
    # All processes decide alike, as their programs have to be the same.
    if multihost_utils.process_allgather(np.bool_(needed <= usable)).all():
        return step
    log(
        f"the step with unrolled layers needs {needed / GIB:.1f} GiB of {usable / GIB:.1f} per "
        "device, so the layers are scanned (--train.layers)"
    )
    scanned = utils.changed(config, {"train.layers": "scanned"})
    return errors.compile_lowered(jitted_step(scanned, declared, mesh).lower(*arguments))
