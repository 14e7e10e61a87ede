"""A training run: parse, start the processes, resume, loop, report the result.

    ./run.sh python main.py --config configs/tiny.toml --train.steps 500
    ./run.sh python main.py --init runs/tiny --run.name chat --data.train data/chat/train ...

Every setting is a flag and a key of the TOML file (see utils.py, or --help). A run lives in
DIR/NAME: config.toml, starts.jsonl, metrics.jsonl, samples.jsonl, checkpoints/, plots/, and
skipped.jsonl, which tells of each step that was not applied why, and which windows of the data it
was on (data/show.py prints them). DIR may be gs://BUCKET/FOLDER. The steps are in loop.py.
`--init` begins a new run with the newest weights of another, on any mesh: optimizer, schedule and
steps are new, and the loss before the first step is recorded.
"""

import dataclasses
import os
import sys
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

import attention
import checkpoint
import chips
import faults
import flops
import lock
import metrics
import model
import multihost
import passes
import plot
import resume
import run_folder
import starts
import train
import utils
import weights
from checkpoint import Checkpoints
from faults import Failed
from loop import Loop, checkpoint_config, folder_of
from metrics import is_primary, say
from mixture import Mixture, open_datasets
from model import Transformer
from stop import StopRequest
from train import State
from utils import Config
from watchdog import Watchdog


def parse(arguments: list[str] | None = None) -> Config:
    """As utils.parse; with --init and without --config, [model] is that run's, or, when the run
    continues, its own. A mesh that neither flags nor --config set is utils.UNSET_MESH.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    config, model = utils.parse(arguments, checked=False), None
    if config.run.init:
        own = folder_of(config)
        file = (own if own.saved_steps() else run_folder.at(config.run.init)).files / "config.toml"
        if file.is_file():
            model = utils.load(file).model
    if utils.sets_mesh(arguments):
        return utils.parse(arguments, model=model)
    config = utils.parse(arguments, checked=False, model=model)
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    utils.check(dataclasses.replace(config, mesh=one))  # what does not depend on the mesh
    return dataclasses.replace(config, mesh=utils.UNSET_MESH)


def continued(config: Config) -> Config:
    """The config with the schedule's length and what the run began with filled in, after a look at
    what its run folder holds.

    Raises ValueError when the folder and --run.resume or --init do not go together, or its run was
    another one.
    """
    folder, asked = folder_of(config), config.run.resume
    if config.run.init and run_folder.at(config.run.init).is_same(folder):
        raise ValueError(
            f"--init {config.run.init} is this run's own folder, and a new run needs another. Use "
            f"another --run.name, as --run.name {config.run.name}-2."
        )
    if not folder.saved_steps():
        if asked == "must":
            raise ValueError(
                f"--run.resume must, and {folder} has no checkpoint to resume from. Check "
                "--run.name and --run.dir, or use --run.resume auto."
            )
        resume.must_not_be_lost(folder, config.checkpoint.every_steps)
        if config.run.init:
            source = run_folder.at(config.run.init)
            theirs = utils.load(resume.config_file(source, "--init")).model
            resume.same_model(source, theirs, config.model)
        return with_schedule(config, config.train.steps)
    if not config.checkpoint.every_steps:
        raise ValueError(
            f"--checkpoint.every_steps 0, and {folder} has checkpoints, which such a run neither "
            "goes on from nor leaves as they are. Use --checkpoint.every_steps 100, or another "
            "--run.name."
        )
    if asked == "never":
        raise ValueError(
            f"--run.resume never, and {folder} has checkpoints, which a new run would overwrite. "
            "Use another --run.name, or --run.resume auto to continue it."
        )
    before = utils.load(folder.files / "config.toml")
    if config.run.init not in ("", before.run.init):
        say(
            f"warning: --init {config.run.init} is not read: {folder} has checkpoints and "
            "continues. Use another --run.name for a new run."
        )
    began = {"init": before.run.init, "init_step": before.run.init_step}
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, **began))
    config = with_schedule(config, before.optimizer.schedule_steps)
    resume.what_must_match(dataclasses.asdict(before), dataclasses.asdict(config))
    return config


def with_schedule(config: Config, steps: int) -> Config:
    """The config with the schedule's length filled in.

    Raises  ValueError for steps behind a schedule that ends at 0: they would change nothing.
    """
    length = config.optimizer.schedule_steps or steps
    if config.train.steps > length and not config.optimizer.min_lr_ratio:
        raise ValueError(
            f"--train.steps {config.train.steps}, and the learning rate is 0 after {length} "
            "(--optimizer.schedule_steps, --optimizer.min_lr_ratio 0.0): steps after that would "
            f"learn nothing. Use --train.steps {length}. What has come to its end goes on as the "
            f"start of a new run: --init {folder_of(config)} with another --run.name."
        )
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=length)
    )


def restore(saved: Checkpoints, shapes: State, settings: dict[str, Any]) -> State | None:
    """The state of the newest good checkpoint, in these shapes and layouts; None where there is
    none.

    With --train.skip_spikes it begins without norms where none are stored; without it, stored ones
    are left behind.
    """

    def there(step: int) -> State:
        norms = train.abstract_norms(replicated) if "norms" in saved.names(step) else None
        return shapes.replace(norms=norms)

    replicated = shapes.step.sharding
    found = saved.newest(
        lambda step: checkpoint.stored_shapes(there(step)),
        lambda told: resume.what_must_match(told, settings),
    )
    if found is None:
        return None
    step, arrays = found
    state = checkpoint.reshaped(arrays, there(step))
    if (state.norms is None) == (shapes.norms is None):
        return state
    return state.replace(norms=train.no_norms(replicated) if shapes.norms else None)


def weights_from(
    config: Config, declared: Transformer, mesh: Mesh, data: Mixture
) -> tuple[Config, Transformer]:
    """(the config that names the step, the weights of that checkpoint) of the run of --init."""
    source = run_folder.at(config.run.init)
    shapes = train.abstract_state(config, declared, mesh).weights
    step = config.run.init_step or None
    step, w, told = resume.weights_of(source, step, shapes, "--init")
    resume.same_tokenizer(source, told["tokens"], data.folder, data.manifest)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, init_step=step)), w


def result(config: Config) -> str:
    """What a finished run came to, and where its files are."""
    folder = folder_of(config)
    records = metrics.read(folder.files / "metrics.jsonl")
    losses = [r for r in records if r.get("loss/val") is not None]
    text = f"{folder}: {config.train.steps} steps"
    if losses:
        text += f", validation loss {losses[-1]['loss/val']:.4f} after {losses[-1]['step']}"
    names = ["metrics.jsonl", "samples.jsonl", "plots", "config.toml"]
    there = [folder.path(name) for name in names if (folder.files / name).exists()]
    if folder.has_checkpoints():
        there.append(str(folder.checkpoints))
    return f"{text}\nfiles: {', '.join(there)}"


def run(config: Config) -> None:
    """A run, new or continued, to its end, in each process of the job."""
    r = config.run
    limit_s = utils.seconds(r.time_limit) if r.time_limit else None
    with (
        Watchdog(60 * r.stall_minutes) as watchdog,
        multihost.job(r.peer_seconds, config.mesh.replica),
        StopRequest(watchdog, limit_s) as stop,
        ExitStack() as stack,
    ):
        watchdog.phase("opening of the data")
        with multihost.shared_errors():
            config, made = train.for_devices(config, jax.devices())
            config = continued(config)
            declared, mesh = model.declare(config), train.make_mesh(config)
            passes.schedule_of(config)
            data, folder = open_datasets(config), folder_of(config)
            is_new, w = not folder.saved_steps(), None
        if made:
            say(made)
        watchdog.phase("restore")
        if config.run.init and is_new:
            config, w = weights_from(config, declared, mesh, data[0])
        stack.enter_context(lock.held(str(folder), end_at_once))
        stack.enter_context(folder.in_step() if is_primary() else nullcontext())
        _run(config, declared, mesh, data, watchdog, stop, w)


def end_at_once(text: str) -> NoReturn:
    """Ends this process, from any thread, after a fault that starting again can help."""
    try:
        print(text, file=sys.stderr, flush=True)
    finally:
        os._exit(faults.Exit.AGAIN)


def _run(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    data: tuple[Mixture, Mixture],
    watchdog: Watchdog,
    stop: StopRequest,
    w: Transformer | None,
) -> None:
    """w  weights that a new run begins with."""
    planned = plan(config, mesh)
    folder, saved = folder_of(config), None
    if config.checkpoint.every_steps:
        c = config.checkpoint
        saved = Checkpoints(folder.checkpoints, c.keep, keep_every_steps=c.keep_every_steps)
    try:
        state = None
        if saved:
            shapes = train.abstract_state(config, declared, mesh)
            state = restore(saved, shapes, checkpoint_config(config, data[0]))
        finished = state is not None and int(state.step) >= config.train.steps
        if not finished:
            state = begin(config, declared, mesh, state, w)
            start = starts.record(folder.files, int(state.step))
            if is_primary():
                folder.send()
            say(planned)
            if stop.reached():
                newest = saved.newest_whole() if saved else "none"
                raise stop.stopped(f"the newest checkpoint is {newest}")
            loop = Loop(config, declared, mesh, data, saved, watchdog, stop)
            if saved:
                saved.made_by = start
            state = loop.run(state)
            watchdog.phase("save at the end")
            if saved:
                saved.must_have(int(state.step))
            say(f"{planned}\n{loop.measured()}")
    except Exception as error:
        # It waits for the other processes, which come only after errors that all of them raise.
        if saved and (not jax.distributed.is_initialized() or isinstance(error, Failed)):
            saved.close()
        raise
    if saved:
        saved.close()
    watchdog.phase("pictures")
    if is_primary():
        if (folder.files / "metrics.jsonl").exists():
            plot.plot_run(folder.files, again=not finished)
        say(f"{'finished before.' if finished else ''}\n{result(config)}".lstrip())


def plan(config: Config, mesh: Mesh) -> str:
    """What a step is expected to need, in a line."""
    chip = chips.chip_of_kind(mesh.devices.flat[0].device_kind)
    try:
        from planning import cost  # late: training needs nothing else of it

        return cost.predict(config, chip, passes.platform(mesh)).line()
    except Exception as error:  # a run that cannot be planned can be trained
        return f"no plan: {type(error).__name__}: {error}"


def begin(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    state: State | None,
    w: Transformer | None = None,
) -> State:
    """Says what is about to run, and gives the state that it starts from.

    w  weights that a new run begins with; its own first values if not given.
    """
    folder, m = folder_of(config), config.model
    total, active = weights.count(declared)
    device, kernel = mesh.devices.flat[0], attention.told(config, passes.platform(mesh))
    say(
        f"{total:,} parameters, {active:,} active; {m.layers} layers; mesh "
        f"{config.mesh} on {mesh.devices.size} x {device.device_kind}, attention "
        f"{kernel}; {config.train.sequences} x {config.train.sequence_length} tokens per step"
    )
    say(flops.MFU_RULE)
    if far := train.far_rate(config):
        say(far)
    if is_primary():
        try:
            folder.files.mkdir(parents=True, exist_ok=True)
            metrics.replace(folder.files / "config.toml", utils.to_toml(config))
        except OSError as error:
            raise ValueError(
                f"{folder} cannot be written: {error}. Give a --run.dir that can be written."
            ) from error
    if state is None:
        source = f", weights from {config.run.init} at step {config.run.init_step}" if w else ""
        say(f"{folder}: a new run{source}")
        return train.initial_state(config, declared, mesh, w)
    say(f"{folder}: continues after step {int(state.step)}")
    return state


if __name__ == "__main__":
    faults.command_line(lambda: run(parse()))
