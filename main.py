"""The training loop: mesh, jitted step, evaluation, samples, checkpoints, metrics.

    ./run.sh python main.py --config configs/tiny.toml --train.steps 500

Every setting is a flag and a key of the TOML file (see utils.py, or --help). A run lives in
DIR/NAME: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, plots/. How a layer works is not
known here.
"""

import dataclasses
import gzip
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
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
import compiler
import cost
import flops
import hlo
import model
import utils
import weights
from attention import chosen
from checkpoint import Checkpoints, what_must_match
from data.tokenizer import load_tokenizer
from dataset import Dataset, open_datasets, prefetch
from metrics import Metrics, is_primary, read, say
from model import Batch, Transformer
from plot import plot_run
from utils import MESH_AXES, Config

# --- state and optimizer --------------------------------------------------------------------------


@flax.struct.dataclass
class State:
    """All that a step changes; with the config, all that continuing a run needs."""

    weights: Transformer
    optimizer: Any
    step: jax.Array  # steps done, applied or not
    skipped: jax.Array  # steps not applied: their loss or gradient norm was not finite
    skipped_in_row: jax.Array


def learning_rate(config: Config) -> Callable[[jax.Array], jax.Array]:
    """Step number (from 0) -> learning rate: linear warmup, then cosine, or stable and linear
    decay.
    """
    o = config.optimizer
    length = o.schedule_steps or config.train.steps
    low = o.lr * o.min_lr_ratio
    warmup = min(o.warmup_steps, length)
    if o.schedule == "cosine":
        after = optax.cosine_decay_schedule(o.lr, max(1, length - warmup), o.min_lr_ratio)
        parts, bounds = [after], []
    else:
        decay = max(1, round(o.decay_share * length))
        parts = [optax.constant_schedule(o.lr), optax.linear_schedule(o.lr, low, decay)]
        bounds = [max(warmup, length - decay)]
    rise = optax.linear_schedule(0.0, o.lr, max(1, warmup))
    schedule = optax.join_schedules([rise, *parts], [warmup, *bounds])

    def rate(step: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            return schedule(step + 1)  # the first step is not at 0, and the last is at the end

    return rate


def optimizer(config: Config, declared: Transformer) -> optax.GradientTransformation:
    """Clip by the whole model's norm, AdamW (arXiv:1711.05101) with decay where the weight's
    declaration says; without the rate.
    """
    o = config.optimizer
    decayed = jax.tree.map(
        lambda w: w.decay and (w.group != "embedding" or o.decay_embeddings), declared
    )
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity(),
        optax.scale_by_adam(o.beta1, o.beta2, o.epsilon),
        optax.add_decayed_weights(o.weight_decay, decayed),
    )


def state_shardings(config: Config, mesh: Mesh) -> State:
    """The layout of each array of the state: the optimizer's follow the weights they are for."""
    declared = model.declare(config)
    rule = optimizer(config, declared)
    spec = weights.specs(declared)
    shapes = jax.eval_shape(rule.init, shapes_of(declared))
    slots = optax.tree.map_params(
        rule, lambda _, s: s, shapes, spec, transform_non_params=lambda _: P()
    )
    specs = State(spec, slots, P(), P(), P())
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def shapes_of(declared: Transformer) -> Transformer:
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)


def abstract_state(config: Config, mesh: Mesh) -> State:
    """Shape and layout of each array of the state."""
    declared = model.declare(config)
    shapes = jax.eval_shape(
        lambda w: State(w, optimizer(config, declared).init(w), *[jnp.int32(0)] * 3),
        shapes_of(declared),
    )
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        shapes,
        state_shardings(config, mesh),
    )


def initial_state(config: Config, mesh: Mesh) -> State:
    """The state before the first step; the same bits on every mesh."""
    declared = model.declare(config)
    shardings = state_shardings(config, mesh)
    w = weights.initialize(declared, mesh, config.train.seed)
    slots = jax.jit(optimizer(config, declared).init, out_shardings=shardings.optimizer)(w)
    zero, count, row = (jax.device_put(np.int32(0), shardings.step) for _ in range(3))
    return State(w, slots, zero, count, row)


# --- one step -------------------------------------------------------------------------------------


# guide: step
def train_step(
    config: Config, mesh: Mesh
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """(state, batch [M, B, T]) -> the next state, and what the step tells; jitted, the state's
    memory is reused.

    A step whose loss or gradient norm is not finite changes nothing but the counters.
    """
    declared = model.declare(config)
    loss_and_gradients = model.loss_and_gradients(config, mesh)
    rule, rate = optimizer(config, declared), learning_rate(config)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        grads, stats = loss_and_gradients(state.weights, batch, state.step)
        norm, lr = optax.tree.norm(grads), rate(state.step)
        with jax.numpy_dtype_promotion("standard"):
            updates, slots = rule.update(grads, state.optimizer, state.weights)
        new = jax.tree.map(lambda w, u: w - lr * u, state.weights, updates)
        new = balance_router(config, new, stats.tokens_per_expert)
        finite = jnp.isfinite(stats.loss) & jnp.isfinite(norm)
        new, slots = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before),
            (new, slots),
            (state.weights, state.optimizer),
        )
        skipped = 1 - finite.astype(jnp.int32)
        row = (state.skipped_in_row + 1) * skipped
        state = State(new, slots, state.step + 1, state.skipped + skipped, row)
        told = {"stats": stats, "grad_norm": norm, "lr": lr, "skipped": state.skipped, "row": row}
        return state, told

    shardings = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
        compiler_options=compiler_options(mesh),
    )


# guide: end


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """What the compiler is asked for beside its defaults.

    By default a TPU v4 waits for every gather and all-to-all where it stands; so asked, it computes
    meanwhile what does not need them. Later TPUs refuse this or gain nothing. What
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


# --- data -----------------------------------------------------------------------------------------


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
    sharding = NamedSharding(mesh, model.BATCH_SPEC)
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
    layout = NamedSharding(mesh, model.BATCH_SPEC)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)
    return Batch(tokens=ids, targets=ids, loss_weights=weights, segments=ids)


def batches(config: Config, mesh: Mesh, data: Dataset, first_step: int) -> Iterator[Batch]:
    """The batch of each step from `first_step` on, made ahead by a thread."""
    t = config.train

    def batch(step: int) -> Batch:
        rows = partial(data.rows, step)
        return put_batch(mesh, t.microbatches, rows, (t.sequences, t.sequence_length))

    return prefetch(batch, range(first_step, t.steps))


# --- evaluation and samples -----------------------------------------------------------------------


class Evaluation:
    """Loss and routing on fixed validation windows, in forward passes as large as a training
    step's.
    """

    def __init__(self, config: Config, mesh: Mesh, data: Dataset):
        self.config, self.mesh, self.data = config, mesh, data
        rounds = config.eval.sequences // config.train.sequences
        self.microbatches = config.train.microbatches * rounds
        train = dataclasses.replace(config.train, microbatches=self.microbatches)
        self.run = jax.jit(
            model.evaluate(dataclasses.replace(config, train=train), mesh),
            compiler_options=compiler_options(mesh),
        )
        self.batch: Batch | None = None

    def __call__(self, w: Transformer) -> dict[str, Any]:
        """The record of an evaluation, without its step."""
        sequences, T = self.config.eval.sequences, self.config.train.sequence_length
        if self.batch is None:
            rows = partial(self.data.eval_rows, sequences=sequences)
            self.batch = put_batch(self.mesh, self.microbatches, rows, (sequences, T))
        stats = jax.device_get(replicated(self.mesh, self.run(w, self.batch)))
        m = self.config.model
        record = {
            "loss/val": float(stats.cross_entropy),
            "loss/val_balance": None,
            "moe/tokens_per_expert": [],
            "moe/dropped": None,
        }
        if stats.tokens_per_expert is not None:
            choices = sequences * T * m.experts_per_token * m.blocks
            record["loss/val_balance"] = float(stats.balance)
            record["moe/tokens_per_expert"] = stats.tokens_per_expert.reshape(m.blocks, -1).tolist()
            record["moe/dropped"] = int(stats.dropped) / choices
        return record


def replicated(mesh: Mesh, tree: Any) -> Any:
    """The tree on every device, so that every process can read all of it."""
    whole = NamedSharding(mesh, P())
    return jax.jit(lambda t: t, out_shardings=whole)(tree)


class Sampler:
    """Continues prompts: a whole forward pass over the padded sequence for each new token."""

    def __init__(self, config: Config, mesh: Mesh, data: Dataset):
        m = data.manifest
        self.config, self.mesh = config, mesh
        self.tokenizer = load_tokenizer(m.tokenizer, m.tokenizer_sha256)
        self.end_of_text = m.end_of_text
        mesh_sizes, prompts = config.mesh, config.sample.prompts
        # Interleaved stages take microbatches in groups of one per rank.
        self.M = mesh_sizes.pipeline if mesh_sizes.virtual > 1 else 1
        self.B = -(-len(prompts) // (self.M * mesh_sizes.fsdp)) * mesh_sizes.fsdp
        train = dataclasses.replace(config.train, microbatches=self.M)
        logits = model.next_token_logits(dataclasses.replace(config, train=train), mesh)
        self.next = jax.jit(
            partial(self._next, logits), donate_argnums=1, out_shardings=NamedSharding(mesh, P())
        )

    def _next(
        self, logits: Callable, w: Transformer, tokens: jax.Array, at: jax.Array, key: jax.Array
    ) -> jax.Array:
        """tokens [M, B, T] with the token after position `at` [M, B] drawn from the model."""
        zeros = jnp.zeros_like(tokens)
        batch = Batch(tokens, zeros, zeros.astype(jnp.float32), zeros)
        logits_MBV = logits(w, batch, at)
        hot = self.config.sample.temperature
        drawn = jax.random.categorical(key, logits_MBV / hot) if hot else logits_MBV.argmax(-1)
        # A row that is full keeps its last token.
        position = jnp.arange(tokens.shape[-1])[None, None, :]
        return jnp.where(position == at[..., None] + 1, drawn[..., None].astype(jnp.int32), tokens)

    def __call__(self, w: Transformer, step: int) -> list[dict[str, Any]]:
        """For each prompt {"step", "prompt", "text"}."""
        T, new = self.config.train.sequence_length, self.config.sample.tokens
        prompts = self.config.sample.prompts
        ids = [self.tokenizer.encode_ordinary(p)[-max(1, T - new) :] for p in prompts]
        ids = [i or [self.end_of_text] for i in ids]
        tokens = np.zeros((self.M * self.B, T), np.int32)
        length = np.ones(self.M * self.B, np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)], length[row] = prompt, len(prompt)
        whole = NamedSharding(self.mesh, P())
        shape = (self.M, self.B)
        out = jax.device_put(tokens.reshape(*shape, T), whole)
        key = jax.random.key(step)
        for i in range(min(new, T - 1)):
            at = np.minimum(length + i, T) - 1
            out = self.next(w, out, at.reshape(shape), jax.random.fold_in(key, i))
        out = np.asarray(out).reshape(-1, T)
        return [
            {
                "step": step,
                "prompt": prompt,
                "text": self._text(out[row, len(ids[row]) : length[row] + new]),
            }
            for row, prompt in enumerate(prompts)
        ]

    def _text(self, ids: np.ndarray) -> str:
        """Up to the end of the document."""
        ends = np.flatnonzero(ids == self.end_of_text)
        ids = ids[: ends[0]] if len(ends) else ids
        return self.tokenizer.decode([int(i) for i in ids if i < self.tokenizer.n_vocab])


# --- the run --------------------------------------------------------------------------------------


def start_processes() -> None:
    """Joins the other processes of the job, if there are any, before a device is touched.

    With JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set, those; on a TPU pod,
    what its workers know.
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        address = os.environ["JAX_COORDINATOR_ADDRESS"]
        count, number = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        if count is None or number is None:
            raise ValueError(
                "JAX_COORDINATOR_ADDRESS is set without JAX_NUM_PROCESSES and JAX_PROCESS_ID. Set "
                "all three, or none."
            )
        jax.distributed.initialize(address, int(count), int(number))
    elif len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        jax.distributed.initialize()


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The (fsdp, pipeline, tensor) mesh over this job's devices, or over those given."""
    devices = jax.devices() if devices is None else devices
    need = math.prod(config.mesh.shape)
    if need > len(devices) or (need < len(devices) and jax.process_count() > 1):
        hint = (
            f" For pretend devices, set XLA_FLAGS=--xla_force_host_platform_device_count={need}, "
            "or start through ./run.sh."
            if devices[0].platform == "cpu" and need > len(devices)
            else ""
        )
        raise ValueError(
            f"--mesh.fsdp {config.mesh.fsdp} x --mesh.pipeline {config.mesh.pipeline} x "
            "--mesh.tensor "
            f"{config.mesh.tensor} is {need} devices, and there are {len(devices)}. Use sizes "
            f"whose product is {len(devices)}.{hint}"
        )
    # An axis of the torus may be split: on 4x4x4 chips a mesh axis of 2 has none of its own.
    placed = mesh_utils.create_device_mesh(
        config.mesh.shape, devices[:need], allow_split_physical_axes=True
    )
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def continued(config: Config) -> Config:
    """The config with the schedule's length filled in, after a look at what its run folder holds.

    Raises ValueError when the folder and --run.resume do not go together, or its run was another
    one.
    """
    folder, resume = run_folder(config), config.run.resume
    saved = folder / "checkpoints"
    steps = [p.name for p in saved.iterdir() if p.name.isdigit()] if saved.is_dir() else []
    if not steps:
        if resume == "must":
            raise ValueError(
                f"--run.resume must, and {folder} has no checkpoint to resume from. Check "
                "--run.name and --run.dir, or "
                f"use --run.resume auto."
            )
        return with_schedule(config, config.train.steps)
    if resume == "never":
        raise ValueError(
            f"--run.resume never, and {folder} has checkpoints, which a new run would overwrite. "
            "Use another --run.name, "
            f"or --run.resume auto to continue it."
        )
    before = utils.load(folder / "config.toml")
    config = with_schedule(config, before.optimizer.schedule_steps)
    what_must_match(dataclasses.asdict(before), dataclasses.asdict(config))
    return config


def with_schedule(config: Config, steps: int) -> Config:
    length = config.optimizer.schedule_steps or steps
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=length)
    )


def checkpoint_config(config: Config, data: Dataset) -> dict[str, Any]:
    """What a checkpoint says of its run: the config, and which tokens it was trained on."""
    return dataclasses.asdict(config) | {"tokens": {"train": data.manifest.identity}}


def restore(config: Config, mesh: Mesh, saved: Checkpoints, data: Dataset) -> State | None:
    """The state of the newest good checkpoint, on this mesh; None where there is none."""
    step = saved.latest()
    if step is None:
        return None
    what_must_match(saved.config(step), checkpoint_config(config, data))
    state = saved.restore(step, unstacked_shapes(config, mesh))
    return jax.jit(
        partial(map_weights, partial(model.stack_blocks, config)),
        out_shardings=state_shardings(config, mesh),
    )(state)


def unstacked(config: Config, mesh: Mesh, state: State) -> State:
    """The state as a checkpoint holds it: blocks [blocks, ...], whatever the mesh."""
    shardings = jax.tree.map(lambda s: s.sharding, unstacked_shapes(config, mesh))
    return jax.jit(partial(map_weights, model.unstack_blocks), out_shardings=shardings)(state)


def map_weights(function: Callable[[Transformer], Transformer], state: State) -> State:
    """function of the weights, and of everything in the optimizer that is laid out like them."""

    def is_weights(x: Any) -> bool:
        return isinstance(x, Transformer)

    return jax.tree.map(lambda x: function(x) if is_weights(x) else x, state, is_leaf=is_weights)


def unstacked_shapes(config: Config, mesh: Mesh) -> State:
    """Shape and layout of what a checkpoint holds."""
    shapes = jax.eval_shape(
        partial(map_weights, model.unstack_blocks), abstract_state(config, mesh)
    )
    layout = map_weights(model.unstacked_shardings, state_shardings(config, mesh))
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layout
    )


class Loop:
    """One run, from its state to its last step."""

    def __init__(
        self, config: Config, mesh: Mesh, train: Dataset, val: Dataset, saved: Checkpoints | None
    ):
        self.config, self.mesh, self.train_data, self.saved = config, mesh, train, saved
        self.folder = run_folder(config)
        self.evaluate = Evaluation(config, mesh, val)
        self.sample = Sampler(config, mesh, train) if config.sample.prompts else None
        shapes = abstract_state(config, mesh), abstract_batch(config, mesh)
        started = time.perf_counter()
        self.step = train_step(config, mesh).lower(*shapes).compile()
        say(f"the step is compiled, in {time.perf_counter() - started:.0f} s")
        self.taken_s: list[float] = []  # of each step, without what is between steps
        per_token = flops.palm_flops_per_token(config.model, config.train.sequence_length)
        chip = chips.chip_of_kind(mesh.devices.flat[0].device_kind)
        self.flops_per_token = per_token
        self.peak = chip and chip.flops * mesh.devices.size

    def run(self, state: State) -> State:
        """All steps from `state` on."""
        first = int(state.step)
        with Metrics(self.config, self.folder, first, dataclasses.asdict(self.config)) as metrics:
            source = batches(self.config, self.mesh, self.train_data, first)
            try:
                return self._steps(state, first, source, metrics)
            finally:
                source.close()

    def _steps(self, state: State, first: int, source: Iterator[Batch], metrics: Metrics) -> State:
        done_at = time.perf_counter()
        for number in range(first, self.config.train.steps):
            self._profile(number)
            asked = time.perf_counter()
            batch = next(source)
            waited = time.perf_counter() - asked
            state, told = self.step(state, batch)
            told = jax.device_get(told)
            now = time.perf_counter()
            self.taken_s.append(now - done_at)
            metrics.train(self._record(number + 1, told, now - done_at, waited))
            self._stop_if_lost(number + 1, told)
            done_at = now
            if self._between_steps(state, number + 1, metrics):
                done_at = time.perf_counter()  # the next step's time is its own
        self._profile(self.config.train.steps)
        return state

    def _record(
        self, step: int, told: dict[str, Any], step_s: float, waited_s: float
    ) -> dict[str, Any]:
        t, stats = self.config.train, told["stats"]
        tokens = t.sequences * t.sequence_length
        rate = tokens / step_s
        return {
            "step": step,
            "tokens": step * tokens,
            "loss/train": float(stats.loss),
            "loss/cross_entropy": float(stats.cross_entropy),
            "loss/balance": float(stats.balance),
            "loss/z": float(stats.z),
            "grad_norm": float(told["grad_norm"]),
            "lr": float(told["lr"]),
            "tokens_per_s": rate,
            "step_s": step_s,
            "data_wait_s": waited_s,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "skipped": int(told["skipped"]),
        }

    def _stop_if_lost(self, step: int, told: dict[str, Any]) -> None:
        most = self.config.train.max_skipped_in_row
        if told["row"] >= most:
            raise ValueError(
                f"stopped after step {step}: {most} steps in a row had a loss or gradient norm "
                "that was not finite and were not "
                "applied (--train.max_skipped_in_row). Lower --optimizer.lr, or look at the "
                "data; the last checkpoint is "
                f"in {self.folder / 'checkpoints'}."
            )

    def _between_steps(self, state: State, step: int, metrics: Metrics) -> bool:
        """What is due after `step` steps; whether anything was."""
        last = step == self.config.train.steps

        def due(every: int) -> bool:
            return last or (every > 0 and step % every == 0)

        evaluate, sample = due(self.config.eval.every_steps), due(self.config.sample.every_steps)
        save = self.saved is not None and due(self.config.checkpoint.every_steps)
        if evaluate:
            metrics.evaluation({"step": step} | self.evaluate(state.weights))
        if sample and self.sample is not None:
            self._write_samples(self.sample(state.weights, step))
        if save:  # last: what was recorded up to a checkpoint is not recorded again
            self.saved.save(
                step,
                unstacked(self.config, self.mesh, state),
                checkpoint_config(self.config, self.train_data),
            )
        return evaluate or sample or save

    def _write_samples(self, samples: list[dict[str, Any]]) -> None:
        for sample in samples:
            say(f"step {sample['step']}  {sample['prompt']!r} -> {sample['text']!r}")
        if is_primary():
            with (self.folder / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in samples)

    def _profile(self, number: int) -> None:
        """Starts or ends the trace of `profile.steps` steps."""
        p, folder = self.config.profile, self.folder / "profile"
        if p.steps and number == p.first_step:
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
        if p.steps and number == min(p.first_step + p.steps, self.config.train.steps):
            jax.profiler.stop_trace()
            names = hlo.scopes(self.step.as_text())
            for file in folder.rglob("perfetto_trace.json.gz"):
                name_layers(file, names)
            say(
                f"trace of steps {p.first_step} to {number - 1}: {folder} (open "
                "perfetto_trace.json.gz in Perfetto)"
            )

    def measured(self) -> str:
        """Memory and step time as they were, beside the plan that was printed at the start."""
        memory, source = peak_bytes(self.mesh, self.step)
        later = self.taken_s[1:] or self.taken_s
        seconds = f"; {statistics.median(later):.3g} s per step (median)" if later else ""
        return f"measured: {memory / utils.GIB:.3g} GiB per device ({source}){seconds}"


def peak_bytes(mesh: Mesh, step: Any) -> tuple[int, str]:
    """Memory of one device at its fullest, and where the number is from."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "at its fullest"
    return compiler.memory_bytes(step), "planned by the compiler"


def name_layers(file: Path, names: dict[str, str]) -> None:
    """Puts the layer that an operation belongs to in front of its name in a trace.

    names  {operation: named scopes}; a CPU's trace has the compiler's names alone.
    """
    trace = json.loads(gzip.decompress(file.read_bytes()))
    for event in trace["traceEvents"]:
        scope = names.get(event.get("args", {}).get("hlo_op", ""))
        if scope:
            event["name"] = f"{scope} {event['name']}"
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))


def result(config: Config) -> str:
    """What a finished run came to, and where its files are."""
    folder = run_folder(config)
    records = read(folder / "metrics.jsonl")
    losses = [r for r in records if r.get("loss/val") is not None]
    text = f"{folder}: {config.train.steps} steps"
    if losses:
        text += f", validation loss {losses[-1]['loss/val']:.4f} after {losses[-1]['step']}"
    names = ["metrics.jsonl", "samples.jsonl", "plots", "checkpoints", "config.toml"]
    return f"{text}\nfiles: {', '.join(str(folder / n) for n in names if (folder / n).exists())}"


def train(config: Config) -> None:
    """A run, new or continued, to its end."""
    config = continued(config)
    model.declare(config)
    model.schedule(config)
    train_data, val_data = open_datasets(config)
    start_processes()
    mesh = make_mesh(config)
    chip = chips.chip_of_kind(mesh.devices.flat[0].device_kind)
    planned = cost.predict(config, chip, model.platform(mesh)).line()
    folder = run_folder(config)
    saved = (
        Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        if config.checkpoint.every_steps
        else None
    )
    try:
        state = restore(config, mesh, saved, train_data) if saved else None
        if state is not None and int(state.step) >= config.train.steps:
            say(f"finished before.\n{result(config)}")
            return
        state = begin(config, mesh, state)
        say(planned)
        loop = Loop(config, mesh, train_data, val_data, saved)
        loop.run(state)
        say(f"{planned}\n{loop.measured()}")
    finally:
        if saved:
            saved.close()
    if is_primary():
        plot_run(folder)
        say(result(config))


def begin(config: Config, mesh: Mesh, state: State | None) -> State:
    """Says what is about to run, and gives the state that it starts from."""
    folder, m = run_folder(config), config.model
    total, active = weights.count(model.declare(config))
    device = mesh.devices.flat[0]
    say(
        f"{total:,} parameters, {active:,} active; {m.layers} layers; mesh (fsdp, pipeline, "
        f"tensor) = {config.mesh.shape} on {mesh.devices.size} x {device.device_kind}, attention "
        f"{chosen(config, model.platform(mesh))}; {config.train.sequences} x "
        f"{config.train.sequence_length} tokens per step"
    )
    say(flops.MFU_RULE)
    if is_primary():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(utils.to_toml(config))
    if state is None:
        say(f"{folder}: a new run")
        return initial_state(config, mesh)
    say(f"{folder}: continues after step {int(state.step)}")
    return state


def main() -> None:
    train(utils.parse())


if __name__ == "__main__":
    utils.command_line(main)
