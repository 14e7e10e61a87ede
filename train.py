"""One training step, and all that it runs on: mesh, state, optimizer, batches on the mesh.

A step is one jitted function of (state, batch); shapes and layouts of both can be had without any
array, to compile it ahead of time. Functions take the config, the weights that model.declare made
of it, and the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import chips
import model
import muon
import passes
import utils
import weights
from model import Batch, Transformer
from utils import MESH_AXES, Config

# The best rates that benchmark.py recipe found, of each optimizer of matrices, at this width; with
# wider models they are taken to fall as 1 / width (arXiv:2203.03466). Those FAR times off are told.
TUNED, TUNED_WIDTH, FAR = {"adamw": 5.7e-3, "muon": 1.6e-2}, 160, 10.0
NORMS = 128  # steps whose gradient norms a spike is judged by
LEAST_NORMS = 16  # with fewer, no step is judged

# --- mesh -----------------------------------------------------------------------------------------


def for_devices(config: Config, devices: Sequence[jax.Device]) -> tuple[Config, str]:
    """(the config with what it leaves to the devices filled in, what was chosen and why).

    A mesh is made only where none was set (utils.UNSET_MESH). Of the meshes that this model and
    batch can be cut over, it uses the most devices. Among these, simulated CPU devices get the
    one whose largest axis is smallest, so that every axis is exercised; others get the one with
    most fsdp ranks, then most tensor ranks, as these communicate least.

    Raises  ValueError where processes have devices that no mesh can use.
    """
    config = utils.for_platform(config, devices[0].platform)
    if config.mesh != utils.UNSET_MESH:
        return config, ""
    slices = len({slice_of(device) for device in devices})
    each, balanced = len(devices) // slices, devices[0].platform == "cpu"
    # Each process must have a part in the mesh.
    fewest = each if jax.process_count() > 1 else 1
    for used in range(each, fewest - 1, -1):
        for mesh in meshes(used, slices, balanced):
            made = dataclasses.replace(config, mesh=mesh)
            if problem_of(made) is None:
                return made, (
                    f"no mesh was set: made (fsdp, pipeline, tensor) = {mesh.shape[1:]} with "
                    f"{mesh.virtual} virtual stage{'s' * (mesh.virtual > 1)} for "
                    f"{used * slices} of {len(devices)} {devices[0].platform} devices"
                    + ("" if used == each else ", the most that divide this model and batch")
                    + ". Set --mesh.fsdp, --mesh.pipeline and --mesh.tensor to choose another."
                )
    best = dataclasses.replace(config, mesh=next(meshes(each, slices, balanced)))
    raise ValueError(
        f"no mesh over the {len(devices)} devices of {jax.process_count()} processes divides this "
        f"model and batch, and none may stay idle. {problem_of(best)}"
    )


def meshes(devices: int, slices: int, balanced: bool) -> Iterator[utils.Mesh]:
    """Meshes over so many devices of each slice, best first (see for_devices)."""
    shapes = [
        (fsdp, pipeline, devices // fsdp // pipeline)
        for fsdp in range(1, devices + 1)
        if devices % fsdp == 0
        for pipeline in range(1, devices // fsdp + 1)
        if devices // fsdp % pipeline == 0
    ]
    most = [-max(shape) if balanced else 0 for shape in shapes]
    order = sorted(zip(most, shapes, strict=True), key=lambda o: (o[0], o[1][0], o[1][2]))
    for _, (fsdp, pipeline, tensor) in reversed(order):
        for virtual in (2, 1) if pipeline > 1 else (1,):
            yield utils.Mesh(
                replica=slices, fsdp=fsdp, pipeline=pipeline, tensor=tensor, virtual=virtual
            )


def problem_of(config: Config) -> str | None:
    """Why this model and batch cannot be cut over the config's mesh; None where they can."""
    try:
        utils.check(config)
        model.declare(config)
        passes.schedule_of(config)
    except ValueError as error:
        return str(error)
    return None


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The (replica, fsdp, pipeline, tensor) mesh over this job's devices, or over those given."""
    if jax.config.jax_enable_x64:
        raise ValueError(
            "JAX_ENABLE_X64 is set, and weights and token ids are 32 bits wide here. Unset it."
        )
    devices = jax.devices() if devices is None else devices
    need, hosts = math.prod(config.mesh.shape), jax.process_count()
    if need > len(devices) or (need < len(devices) and hosts > 1):
        replicas = f"--mesh.replica {config.mesh.replica} x " * (config.mesh.replica > 1)
        hint = (
            f" For simulated devices, set XLA_FLAGS=--xla_force_host_platform_device_count={need}, "
            "or start through ./run.sh."
            if devices[0].platform == "cpu" and need > len(devices)
            else ""
        )
        raise ValueError(
            f"{replicas}--mesh.fsdp {config.mesh.fsdp} x --mesh.pipeline {config.mesh.pipeline} x "
            "--mesh.tensor "
            f"{config.mesh.tensor} is {need} devices, and there are {len(devices)}"
            f"{f' on {hosts} hosts' * (hosts > 1)}. Use sizes "
            f"whose product is {len(devices)}, as --mesh.fsdp {len(devices)} --mesh.pipeline 1 "
            f"--mesh.tensor 1.{hint}"
        )
    return Mesh(placed(config, devices[:need]), MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def slice_of(device: jax.Device) -> int:
    """The slice that a TPU is in. Only TPUs are in slices: XLA numbers the hosts of CPU and GPU
    devices in the same attribute.
    """
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def placed(config: Config, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as a mesh, neighbours along its inner axes; a slice of TPUs is one replica, or
    some of them.
    """
    slices = len({slice_of(device) for device in devices})
    replica, *inner = config.mesh.shape
    if replica % slices:
        raise ValueError(
            f"--mesh.replica {replica} is not a multiple of the {slices} slices that there are, "
            f"between which no other axis may lie. Use --mesh.replica {slices}."
        )
    # An axis of the torus may be split: on 4x4x4 chips a mesh axis of 2 has none of its own.
    how = {"devices": devices, "allow_split_physical_axes": True}
    if slices == 1:
        return mesh_utils.create_device_mesh(config.mesh.shape, **how)
    of_slice, between = (replica // slices, *inner), (slices, 1, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(of_slice, between, **how)


# --- state and optimizer --------------------------------------------------------------------------


@flax.struct.dataclass
class State:
    """All that a step changes; with the config, all that continuing a run needs."""

    weights: Transformer
    optimizer: Any
    step: jax.Array  # steps done, applied or not
    skipped: jax.Array  # steps not applied: not finite, or a spike (see judge)
    skipped_in_row: jax.Array
    # [NORMS] gradient norms of the last steps applied, oldest first, infinite before the first;
    # None without --train.skip_spikes
    norms: jax.Array | None = None


def learning_rate(config: Config) -> Callable[[jax.Array], jax.Array]:
    """Step number (from 0) -> learning rate: linear warmup, then cosine, or stable and linear
    decay. Where warmup and decay overlap, the decay is shorter: both end where they should.
    """
    o = config.optimizer
    length = o.schedule_steps or config.train.steps
    low = o.lr * o.min_lr_ratio
    # At least one step is left for what follows, so that it reaches its minimum.
    warmup = min(o.warmup_steps, max(1, length - 1))
    if o.schedule == "cosine":
        after = optax.cosine_decay_schedule(o.lr, max(1, length - warmup), o.min_lr_ratio)
        parts, bounds = [after], []
    else:
        decay = min(max(1, round(o.decay_share * length)), length - warmup)
        parts = [optax.constant_schedule(o.lr), optax.linear_schedule(o.lr, low, max(1, decay))]
        bounds = [length - decay]
    rise = optax.linear_schedule(0.0, o.lr, max(1, warmup))
    schedule = optax.join_schedules([rise, *parts], [warmup, *bounds])

    def rate(step: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            return schedule(step + 1)  # the first step is not at 0, and the last is at the end

    return rate


def far_rate(config: Config) -> str:
    """Says so where the rate is far from those that were tuned, for first weights that are drawn;
    else nothing.
    """
    o = config.optimizer
    best = TUNED[o.matrices] * min(1, TUNED_WIDTH / config.model.width)
    low, high = best / FAR, best * FAR
    if config.run.init or low <= o.lr <= high:
        return ""
    return (
        f"warning: --optimizer.lr {o.lr:g} is far from what was tuned (EXPERIMENTS.md): with "
        f"--optimizer.matrices {o.matrices} and --model.width {config.model.width} expect the best "
        f"between {low:.2g} and {high:.2g}, as --optimizer.lr {best:.2g}."
    )


def optimizer(
    config: Config, declared: Transformer, mesh: Any = None
) -> optax.GradientTransformation:
    """Clip by the whole model's norm, AdamW (arXiv:1711.05101), for matrices Muon where it is asked
    for, and decay where the weight's declaration says; without the rate.

    mesh    where updates are computed; not needed for the state.
    Raises  ValueError for a weight of a group that has no optimizer.
    """
    o = config.optimizer
    decayed = jax.tree.map(
        lambda w: w.decay and (w.group != "embedding" or o.decay_embeddings), declared
    )
    rules = jax.tree.map(partial(rule_of, o.matrices), declared)
    scale = optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)
    if o.matrices == "muon":
        dtype = jnp.dtype(config.model.compute_dtype)
        of_matrices = muon.scale_by_muon(declared, mesh, o.muon_beta, dtype)
        scale = optax.partition({"adamw": scale, "muon": of_matrices}, rules)
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity(),
        scale,
        optax.add_decayed_weights(o.weight_decay, decayed),
    )


def rule_of(matrices: str, w: weights.Weight) -> str:
    """Which optimizer a weight has, by its group; `matrices` is that of matrices."""
    groups = {"matrix": matrices, "embedding": "adamw", "rest": "adamw"}
    if w.group not in groups:
        raise ValueError(
            f"{w.name} is of the group {w.group!r}, which has no optimizer. Declare it with one of "
            f"{', '.join(groups)}, or give this one an optimizer in train.rule_of."
        )
    return groups[w.group]


def abstract_state(config: Config, declared: Transformer, mesh: Mesh) -> State:
    """Shape and layout of each array of the state: the optimizer's lie as the weights they are
    for.
    """
    rule, spec = optimizer(config, declared), weights.specs(declared)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)
    norms = abstract_norms(NamedSharding(mesh, P())) if config.train.skip_spikes else None
    shapes = jax.eval_shape(lambda w: State(w, rule.init(w), *[jnp.int32(0)] * 3), w)

    def masked(a: Any) -> bool:  # what another optimizer has
        return isinstance(a, optax.MaskedNode)

    slots = optax.tree.map_params(
        rule,
        lambda a, s: a if masked(a) else s,
        shapes.optimizer,
        spec,
        transform_non_params=lambda _: P(),
        is_leaf=masked,
    )
    return jax.tree.map(
        lambda s, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)),
        State(spec, slots, P(), P(), P(), P() if norms else None),
        shapes.replace(norms=norms),
        is_leaf=lambda s: isinstance(s, P),
    )


def abstract_norms(sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """`State.norms` of a run with --train.skip_spikes."""
    return jax.ShapeDtypeStruct((NORMS,), jnp.float32, sharding=sharding)


def shardings_of(shapes: Any) -> Any:
    """The layouts of a tree from abstract_state."""
    return jax.tree.map(lambda a: a.sharding, shapes)


def initial_state(
    config: Config, declared: Transformer, mesh: Mesh, w: Transformer | None = None
) -> State:
    """The state before the first step; the same bits on every mesh.

    w  weights to begin with; drawn from the seed if not given.
    """
    shardings = shardings_of(abstract_state(config, declared, mesh))
    if w is None:
        w = weights.initialize(declared, mesh, config.train.seed)
    slots = jax.jit(optimizer(config, declared).init, out_shardings=shardings.optimizer)(w)
    zero, count, row = (jax.device_put(np.int32(0), shardings.step) for _ in range(3))
    norms = no_norms(shardings.norms) if shardings.norms else None
    return State(w, slots, zero, count, row, norms)


def no_norms(sharding: NamedSharding) -> jax.Array:
    """`State.norms` before any step was applied."""
    return jax.device_put(np.full(NORMS, np.inf, np.float32), sharding)


# --- one step -------------------------------------------------------------------------------------


# guide: step
def jitted_step(
    config: Config, declared: Transformer, mesh: Mesh
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """(state, batch [M, B, T]) -> the next state, and a report on the step; jitted, the state's
    memory is reused.

    A step whose loss or gradient norm is not finite, or that is a spike, changes nothing but the
    counters.
    """
    loss_and_gradients = passes.loss_and_gradients(config, declared, mesh)
    rule, rate = optimizer(config, declared, mesh), learning_rate(config)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        grads, stats = loss_and_gradients(state.weights, batch, state.step)
        norm, lr = optax.tree.norm(grads), rate(state.step)
        with jax.numpy_dtype_promotion("standard"):
            updates, slots = rule.update(grads, state.optimizer, state.weights)
        new = jax.tree.map(lambda w, u: w - lr * u, state.weights, updates)
        new = balance_router(config, new, stats.tokens_per_expert)
        finite = jnp.isfinite(stats.loss) & jnp.isfinite(norm)
        applied, norms, judged = judge(config.train.skip_spikes, state.norms, norm, finite)
        new, slots = jax.tree.map(
            lambda after, before: jnp.where(applied, after, before),
            (new, slots),
            (state.weights, state.optimizer),
        )
        skipped = 1 - applied.astype(jnp.int32)
        in_row = (state.skipped_in_row + 1) * skipped
        state = State(new, slots, state.step + 1, state.skipped + skipped, in_row, norms)
        counters = {"skipped": state.skipped, "skipped_in_row": in_row}
        return state, {"stats": stats, "grad_norm": norm, "lr": lr} | counters | judged

    shardings = shardings_of(abstract_state(config, declared, mesh))
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
        compiler_options=compiler_options(mesh),
    )


# guide: end


def judge(
    factor: float, norms: jax.Array | None, norm: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    """(whether a step is applied, the norms that the next is judged by, what is told of this).

    A spike is a gradient norm above `factor` times the median of `norms`. Spikes in a row count as
    steps that are not finite do: the median moves with steps that are applied, so that a norm which
    has risen for good would be left out for ever.
    """
    if norms is None:
        return finite, None, {}
    median = median_norm(norms)
    spike = finite & (norm > factor * median)
    applied = finite & ~spike
    later = jnp.concatenate([norms[1:], norm[None]])
    return applied, jnp.where(applied, later, norms), {"spike": spike, "median": median}


def median_norm(norms: jax.Array) -> jax.Array:
    """The median of those that are there; infinite, above which no norm is, while they are few."""
    count = jnp.isfinite(norms).sum()
    ordered = jnp.sort(norms)  # those that are not there come last
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return jnp.where(count >= LEAST_NORMS, median, jnp.inf)


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """What the compiler is asked for beside its defaults.

    By default a TPU v4 waits for every gather and all-to-all where it stands; so asked, it computes
    meanwhile what does not need them. Later TPUs refuse this or gain nothing. GPUs do it unasked,
    and none of the options that were tried there moves less through memory (MEASURED.md). What
    LIBTPU_INIT_ARGS asks for is read by libtpu itself.
    """
    if mesh.devices.flat[0].device_kind not in chips.CHIPS["v4"].kinds:
        return None
    return {"xla_enable_async_all_gather": True, "xla_tpu_enable_async_all_to_all": True}


def balance_router(config: Config, w: Transformer, count: jax.Array | None) -> Transformer:
    """bias += speed * sign(mean load - load) for each expert (arXiv:2412.19437, equation 16 and
    after).

    count  [virtual, stage, block, E] choices in the whole step, on all ranks, before any was
           dropped.
    """
    speed = config.model.router_bias_speed
    if count is None or not speed:
        return w
    load = count.astype(jnp.float32)
    bias = w.blocks.moe.moe.bias + speed * jnp.sign(load.mean(-1, keepdims=True) - load)
    layer = w.blocks.moe
    return w.replace(blocks=w.blocks.replace(moe=layer.replace(moe=layer.moe.replace(bias=bias))))


# --- batches --------------------------------------------------------------------------------------


def put_batch(
    mesh: Mesh, microbatches: int, rows: Callable[[np.ndarray], dict[str, np.ndarray]], shape: tuple
) -> Batch:
    """The global batch [M, B, T] on the mesh; this process reads only the rows that its devices
    hold.

    rows   row numbers of the batch -> their arrays [n, T].
    shape  (sequences, T).
    """
    sequences, T = shape
    per_microbatch = sequences // microbatches
    sharding = NamedSharding(mesh, passes.BATCH_SPEC)
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def piece(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[1].indices(per_microbatch)
        if (start, stop) not in found:
            numbers = np.arange(microbatches)[:, None] * per_microbatch + np.arange(start, stop)
            found[start, stop] = rows(numbers.reshape(-1))
        return found[start, stop][name].reshape(microbatches, stop - start, T)

    whole = (microbatches, per_microbatch, T)
    return Batch(
        **{
            name: jax.make_array_from_callback(whole, sharding, partial(piece, name))
            for name in ("tokens", "targets", "loss_weights", "segments")
        }
    )


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """Shape and layout of a step's batch."""
    t = config.train
    shape = (t.microbatches, t.sequences // t.microbatches, t.sequence_length)
    layout = NamedSharding(mesh, passes.BATCH_SPEC)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout)
    real = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)
    return Batch(tokens=ids, targets=ids, loss_weights=real, segments=ids)


# --- compilation and memory -----------------------------------------------------------------------


def compiled(program: Any, *arguments: Any) -> Any:
    """A jitted function compiled for arguments of these shapes and layouts.

    Raises  RuntimeError where the compiler fails with a status that, from a device, would be a
            fault that may pass: the same program fails again.
    """
    lowered = program.lower(*arguments)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith("INTERNAL:"):
            raise RuntimeError(f"the compiler failed, and will again: {error}") from error
        raise


def planned_bytes(step: Any) -> int:
    """Memory of one device as the compiler of a step planned it: arguments, temporaries, and
    results that do not take an argument's place.
    """
    plan = step.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + results


def peak_bytes(mesh: Mesh, step: Any) -> tuple[int, str]:
    """Memory of one device at its fullest, and where the number is from."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "at its fullest"
    return planned_bytes(step), "planned by the compiler"
