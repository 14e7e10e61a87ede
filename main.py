"""Train a model: read the settings, connect the processes, resume, run the loop, report.

    ./run.sh python main.py --config configs/tiny.toml --run.name longer --train.steps 500
    ./run.sh python main.py --config configs/tune.toml --run.init_from runs/tiny --run.name chat
    ./run.sh python main.py --depth 12 --data.train data/books/train --data.val data/books/val

Every setting is a flag and a key of the TOML file (utils.py, or --help). A run is a directory
DIR/NAME; DIR may be gs://BUCKET/FOLDER. docs/usage.md lists its files.

`--run.init_from` starts a new run from the newest weights of another run, on any mesh. Optimizer
state, schedule and step count are new.
"""

import dataclasses
import shutil
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoint
import depth
import fit
import hardware
import lora
import model
import optimizer
import sharded_model
import train
import utils
import weights
from checkpoint import Checkpoints
from data.tokenizer import keep_files
from dataset import Mixture, open_datasets, with_vocabulary
from device_kernels.choice import describe_kernels
from loop import Job, Loop, resumable
from metrics import check_packages
from model import Transformer
from runtime import (
    cli,
    distributed,
    errors,
    phases,
    provenance,
    resume,
    run_directory,
    storage,
    writer_lock,
)
from runtime.console import is_primary, log
from runtime.phases import GoodputLog, Phases
from runtime.signals import StopRequest
from train import State
from utils import Config
from validate import result


def parse(arguments: list[str] | None = None) -> Config:
    """Return the config from flags, --config and --depth, as `depth.parse_open` does.

    With --run.init_from and no [model] in --config, [model] defaults to that of the other run, or,
    when this run resumes, to its own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    config = depth.parse_open(arguments)
    if not config.run.init_from:
        return config
    source = run_directory.of(config)
    if not source.saved_steps():
        source = run_directory.at(config.run.init_from)
    file = source.files / "config.toml"
    return depth.parse_open(arguments, model=cli.load(file).model if file.is_file() else None)


def restore(
    run: run_directory.RunDirectory,
    saved: Checkpoints,
    shapes: State,
    settings: dict[str, Any],
    step: int | None = None,
) -> State | None:
    """Return the state of a step, or of the newest undamaged checkpoint, in these shapes and
    layouts; None without checkpoints.

    --train.skip_spikes may change between starts: gradient norms that are not stored start empty,
    and stored ones that are not needed are discarded.
    """
    replicated = shapes.step.sharding
    norms = jax.ShapeDtypeStruct((train.NORMS,), np.float32, sharding=replicated)
    _, state = saved.newest(
        lambda names: shapes.replace(norms=norms if "norms" in names else None),
        lambda config, step: resume.check_compatible(config, settings, run, step),
        only=step,
    ) or (0, None)
    if state is None:
        return None
    norms = train.initial_norms(replicated) if state.norms is None else state.norms
    return state.replace(norms=norms if shapes.norms else None)


def load_initial(
    config: Config, shapes: State, settings: dict[str, Any], data: Mixture
) -> tuple[Config, Transformer | None, State | None]:
    """Load --run.init_from. Return the config with its step, and either weights or a state."""
    source, step = run_directory.at(config.run.init_from), config.run.init_from_step or None
    if config.run.init_optimizer:
        with Checkpoints(source.checkpoints) as saved:
            return config, None, restore(source, saved, shapes, settings, step)
    step, w, stored = checkpoint.load_weights(source, step, shapes.weights)
    resume.check_same_tokenizer(source, stored["tokens"], data.folder, data.manifest)
    return utils.changed(config, {"run.init_from_step": step}), w, None


def load_base(
    config: Config, declared: Transformer, mesh: Mesh, data: Mixture
) -> tuple[Config, Transformer, dict[str, Any]]:
    """Load the frozen weights that adapters are trained on.

    Returns  the config with the step of --run.init_from, the weights, of which adapters have their
             initial values, and what checkpoints record of the base
    """
    r = config.run
    record, arrays = checkpoint.open_base(r.init_from, r.init_from_step)
    tokens, step = record["config"]["tokens"], record["step"]
    resume.check_same_tokenizer(run_directory.at(r.init_from), tokens, data.folder, data.manifest)
    config = utils.changed(config, {"run.init_from_step": step})
    adapters = weights.initialize(weights.own(declared, declared), mesh, config.train.seed)
    w = weights.filled(adapters, lora.load_base(declared, mesh, arrays))
    return config, w, lora.described(config, declared, step, record["arrays"])


def run(config: Config) -> None:
    """Start or resume a run and train to its last step. Every process of the job calls this."""
    r, w, state = config.run, None, None
    limit_s = cli.seconds(r.time_limit) if r.time_limit else None
    with (
        Phases(60 * r.stall_minutes) as watchdog,
        distributed.job(r.peer_seconds, config.mesh.replica),
        StopRequest(watchdog, limit_s) as stop,
        ExitStack() as stack,
    ):
        watchdog.phase("opening of the data")
        with distributed.shared_errors():
            lora.check(config)
            config, chosen = fit.for_devices(with_vocabulary(config), jax.devices())
            check_packages(config)
            config = resume.resolve(config)
            declared, mesh = model.declare(config), train.make_mesh(config)
            train.jitted_step(config, declared, mesh)  # refuses what these devices cannot run
            (data, val), directory = open_datasets(config), run_directory.of(config)
            is_new = not directory.saved_steps()
            settings = dataclasses.asdict(config) | data.stored()
        if chosen:
            log(chosen)
        stack.enter_context(fit.explained(config, mesh))
        watchdog.phase("initial weights" if is_new and not r.init_from else "restore")
        shapes = train.abstract_state(config, declared, mesh)
        if config.lora.rank:
            config, w, settings["base"] = load_base(config, declared, mesh, data)
        elif r.init_from and is_new:
            config, w, state = load_initial(config, shapes, settings, data)
        directory.check_lock = stack.enter_context(writer_lock.held(str(directory), r.take_over))
        stack.enter_context(directory.synced() if is_primary() else nullcontext())
        c, saved = config.checkpoint, None
        if c.every_steps:
            saved = Checkpoints(directory.checkpoints, c.keep, keep_every_steps=c.keep_every_steps)
        with saved or nullcontext():
            job = Job(config, declared, mesh, data, val, directory, saved, settings, watchdog, stop)
            if saved:
                own = shapes.replace(weights=weights.own(declared, shapes.weights))
                state = restore(directory, saved, own, settings) or state
                if state and config.lora.rank:
                    state = state.replace(weights=weights.filled(state.weights, w))
            finished = state is not None and int(state.step) >= config.train.steps
            if not finished:
                train_from(job, state, w, is_new)
        watchdog.phase("pictures")
        if is_primary():
            report_result(job, finished)


def train_from(job: Job, state: State | None, w: Transformer | None, is_new: bool) -> None:
    """Log what is about to run, write what describes it, and run the loop to the last step.

    state   the state to continue from, of this run or of --run.init_from
    w       weights of --run.init_from for a new state
    is_new  this run had no checkpoint
    """
    config, directory = job.config, job.directory
    plan_line = plan(config, job.mesh)
    describe(job)
    write_config(job)
    source = f"{config.run.init_from} at step {config.run.init_from_step}"
    if state is None:
        log(f"{directory}: a new run{f', weights from {source}' if w else ''}")
    else:
        of = f" of {config.run.init_from}" * is_new
        log(f"{directory}: continues after step {int(state.step)}{of}")
    first = 0 if state is None else int(state.step)
    start = provenance.record(directory.files, first)
    with GoodputLog(directory.files, job.watchdog, first) as goodput_log:
        if is_primary():
            keep_sources(config, job.data, is_new and bool(config.run.init_from))
        log(plan_line)
        if job.stop.reached():
            raise job.stop.stopped(resumable(job.saved))
        if job.saved:
            job.saved.made_by = start
        loop = Loop(job, goodput_log)
        with distributed.shared_errors():
            fit.check_memory(config, job.mesh, loop.needed)
        if state is None:
            job.watchdog.phase("initial weights")
            state = train.initial_state(config, job.declared, job.mesh, w)
        loop.run(state)
        job.watchdog.phase("save at the end")
        if job.saved:
            job.saved.wait()
        if loop.reports.peak:
            log(plan_line)  # again, beside what it predicts
        log(loop.measured())


def describe(job: Job) -> None:
    """Log the model, the mesh and the batch."""
    config, mesh = job.config, job.mesh
    total, active = weights.count(job.declared)
    own, _ = weights.count(weights.trained(job.declared, job.declared))
    trained = f", {own:,} of them trained" * bool(config.lora.rank)
    kernels = describe_kernels(config, sharded_model.platform(mesh))
    stages = f" with {config.mesh.virtual} virtual stages" * (config.mesh.virtual > 1)
    log(
        f"{total:,} parameters{trained}, {active:,} active; "
        f"{config.model.num_hidden_layers} layers; mesh {config.mesh}{stages} on "
        f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}, {kernels}; "
        f"{config.train.global_batch_size} x {config.train.seq_len} tokens per step"
    )
    for note in hardware.notes(config, mesh.devices.flat[0]):
        log(note)
    if warning := optimizer.learning_rate_warning(config):
        log(warning)


def write_config(job: Job) -> None:
    """Write config.toml. Raises ConfigError if the directory cannot be written."""
    files_of = job.directory.files
    if not is_primary():
        return
    kept = utils.changed(job.config, {"run.take_over": False})  # is of this start only
    try:
        storage.write_atomically(files_of / "config.toml", cli.to_toml(kept))
    except OSError as error:
        raise storage.at(files_of).explained(error, "config.toml") from error


def keep_sources(config: Config, data: Mixture, from_other: bool) -> None:
    """Copy to the run what its export needs: the tokenizer's files, and if it starts `from_other`
    run, the settings of the imported base.
    """
    directory = run_directory.of(config)
    keep_files(data.manifest.tokenizer, directory.folder(run_directory.TOKENIZER))
    if from_other:
        base = run_directory.at(config.run.init_from).folder(run_directory.HF)
        if base.is_dir():
            shutil.copytree(base, directory.folder(run_directory.HF), dirs_exist_ok=True)
    directory.upload(directory.files.rglob("*"))


def plan(config: Config, mesh: Mesh) -> str:
    """Return one line with the memory and time that a step is predicted to take."""
    chip = hardware.chip_of_kind(mesh.devices.flat[0].device_kind)
    try:
        from planning import cost  # late: training needs nothing else of it

        return cost.predict(config, chip, sharded_model.platform(mesh)).line()
    except Exception as error:  # training does not depend on the prediction
        return f"no plan: {type(error).__name__}: {error}"


def report_result(job: Job, finished: bool) -> None:
    """Draw the plots, write the report, and log goodput and result.

    finished  the run had no steps left
    """
    directory = job.directory
    if lines := phases.read(directory.files):
        log(phases.summary(lines))
    if (directory.files / "metrics.jsonl").exists():
        try:
            import plot  # late, so that a run starts fast

            plot.plot_runs([directory.files], urls=[str(directory)])
        except Exception as error:  # the run is complete without its report
            why = f"{type(error).__name__}: {errors.one_line(error)}"
            log(f"warning: no report, or an old one: {why}. python plot.py --run {directory}")
    log(f"{'finished before.' if finished else ''}\n{result(job.config, job.val)}".lstrip())


def main() -> None:
    """Run, or with --print_config only print what config.toml would be on this host's devices."""
    arguments = sys.argv[1:]
    rest = [argument for argument in arguments if argument != "--print_config"]
    config = parse(rest)
    if rest == arguments:
        run(config)
        return
    config, chosen = fit.for_devices(with_vocabulary(config), jax.devices())
    comment = "".join(f"# {line}\n" for line in chosen.splitlines())
    print(comment + cli.to_toml(resume.resolve(config)), end="")


if __name__ == "__main__":
    errors.run_command(main)
