"""Decide whether a run may be resumed, and read the config of a run for other commands."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import utils
from data.manifest import Manifest
from runtime import cli, jsonl, run_directory
from runtime.console import log
from utils import Config, ConfigError


def config_of(run: run_directory.RunDirectory, arguments: Sequence[str], flags: type) -> Config:
    """Return the config of a run, with flags of main.py applied.

    Its weights are those that checkpoint.load_weights returns: adapters are merged.

    flags   the dataclass of the command's own flags, for messages about unknown ones
    Raises  ConfigError if the folder is not a run's, and as cli.parse
    """
    if any(argument.partition("=")[0] == "--config" for argument in arguments):
        raise ConfigError(
            f"--config cannot be combined with --run, whose config is {run}/config.toml. "
            "Override it with single flags, such as --eval.sequences 64."
        )
    config = cli.parse(["--config", str(config_file(run, "--run")), *arguments], flags)
    return utils.changed(config, {"lora.rank": 0})


def config_file(run: run_directory.RunDirectory, flag: str) -> Path:
    """Return config.toml. Raises ConfigError if the folder, from `flag`, is not a run's."""
    file = run.files / "config.toml"
    if not file.is_file():
        what = "has no config.toml" if run.exists() else "does not exist"
        fix = f"Give the folder of a run, as {flag} runs/tiny."
        if any((run.files / name).is_file() for name in ("config.json", "adapter_config.json")):
            fix = (
                "It is of Hugging Face. Import it first: python convert.py import --folder "
                f"{run} --out runs/base, and use {flag} runs/base."
            )
        raise ConfigError(f"{flag} {run} {what}. {fix}")
    return file


def resolve(config: Config) -> Config:
    """Return the config with the settings of the run's first start: the length of the schedule and,
    when it resumes, --run.init_from with its step.

    Raises  ConfigError if the directory does not fit --run.resume or --run.init_from, or holds a
            run with other settings
    """
    directory, mode, source = run_directory.of(config), config.run.resume, config.run.init_from
    if source and run_directory.at(source).files.resolve() == directory.files.resolve():
        raise ConfigError(
            f"--run.init_from {source} is this run's own folder, and a new run needs another. Use "
            f"another --run.name, as {config.run.name}-2."
        )
    if not (steps := directory.saved_steps()):
        if mode == "must":
            raise ConfigError(
                f"--run.resume must, and {directory} has no checkpoint to resume from. Check "
                "--run.name and --run.dir, or use --run.resume auto."
            )
        r = config.run
        if r.init_optimizer and not (source and r.init_from_step):
            raise ConfigError(
                "--run.init_optimizer continues a checkpoint of another run: name both, as "
                "--run.init_from runs/tiny --run.init_from_step 800."
            )
        begin = r.init_from_step * r.init_optimizer
        check_records(directory, begin, config.checkpoint.every_steps)
        if source:
            run = run_directory.at(source)
            theirs = cli.load(config_file(run, "--run.init_from")).model
            check_same_model(run, theirs, config.model, longer=not config.lora.rank)
        return with_schedule(config, config.train.steps)
    if mode == "never" or not config.checkpoint.every_steps:
        raise ConfigError(
            f"{directory} has checkpoints, which a run with --run.resume never or "
            "--checkpoint.every_steps 0 cannot continue. Use another --run.name, or omit these."
        )
    before = cli.load(directory.files / "config.toml")
    if source not in ("", before.run.init_from) and not config.lora.rank:
        log(
            f"warning: --run.init_from {source} is not read: {directory} has checkpoints and "
            "resumes. Use another --run.name for a new run."
        )
    names = ("init_from", "init_from_step", "init_optimizer")
    if config.lora.rank and source:  # the base, which may have moved
        names = names[1:]
    first = {f"run.{name}": getattr(before.run, name) for name in names}
    config = with_schedule(utils.changed(config, first), before.optimizer.schedule_steps)
    check_compatible(dataclasses.asdict(before), dataclasses.asdict(config), directory, steps[-1])
    return config


def with_schedule(config: Config, steps: int) -> Config:
    """Return the config with the schedule's length filled in.

    Raises  ConfigError for steps after the learning rate has reached 0, which would have no effect
    """
    length = config.optimizer.schedule_steps or steps
    begin = config.optimizer.phases(length)[1]
    if config.train.steps > length and not config.optimizer.min_lr_ratio:
        raise ConfigError(
            f"--train.steps {config.train.steps}, and the learning rate is 0 after {length} "
            "(--optimizer.schedule_steps, --optimizer.min_lr_ratio 0.0), so later steps have no "
            f"effect. Use --train.steps {length}, or start a new run from these weights: "
            f"--run.init_from {run_directory.of(config)} with another --run.name."
            + how_to_extend(run_directory.of(config), begin * (config.optimizer.schedule == "wsd"))
        )
    return utils.changed(config, {"optimizer.schedule_steps": length})


def how_to_extend(run: run_directory.RunDirectory, begin: int) -> str:
    """Name the newest checkpoint of at most `begin` steps, and the flags to continue it; an empty
    string without one.
    """
    if not (steps := [step for step in run.saved_steps() if 0 < step <= begin]):
        return ""
    return (
        f" The checkpoint of step {steps[-1]} is before the decay: another --run.name with "
        f"--run.init_from {run} --run.init_from_step {steps[-1]} --run.init_optimizer "
        "continues it, with another --optimizer.schedule_steps."
    )


def next_commands(
    run: run_directory.RunDirectory, config: Config, finished: bool = True
) -> list[str]:
    """Return commands that use the checkpoints of a run, or take more steps."""
    name, file = shlex.quote(str(run)), f"--config {shlex.quote(f'{run}/config.toml')}"
    commands = [f"generate.py --run {name} --prompt 'def '"]
    commands += [f"validate.py --run {name}"] * (config.eval.sequences > 0)
    own = " --remote_code" * (config.model.attention == "mla")
    commands.append(f"convert.py export --run {name} --out exported{own}")
    if run.checkpoints == run.files / run_directory.CHECKPOINTS:  # not in a bucket
        more = f" --train.steps {2 * config.train.steps}" * finished
        # No steps follow a schedule that ends at 0.
        commands += [f"main.py {file}{more}"] * (not finished or config.optimizer.min_lr_ratio > 0)
    commands += [f"main.py --run.init_from {name} --run.name more"] * finished
    return [f"./run.sh python {command}" for command in commands]


def check_compatible(
    saved: dict[str, Any], now: dict[str, Any], run: run_directory.RunDirectory, step: int
) -> None:
    """Raise ConfigError, with both values of each setting, for settings that must not change.

    saved, now  `dataclasses.asdict` of both configs, with `optimizer.schedule_steps` resolved, and
                `tokens` of Mixture.stored: tokens.train identifies the data, the others describe it
    run, step   the run, and its checkpoint to continue
    """
    refused, before_decay = [], _before_decay(saved["optimizer"], now["optimizer"])
    declared = utils.settings_of()
    default, old, new = (
        cli.flat(json.loads(json.dumps(c))) for c in (dataclasses.asdict(Config()), saved, now)
    )
    old = default | old  # a setting that is newer than the run had the effect of its default
    for name in sorted(old | new):
        before, after = old.get(name), new.get(name)
        rule = declared[name].resume if name in declared else "fixed"
        # An imported run has no tokens.train. Checkpoints.restore refuses it, with the fix.
        if name.startswith("tokens.") and (name != "tokens.train" or before is None):
            rule = "free"
        if name.startswith("base."):  # lora.described; the folder may have moved
            rule = "fixed" if name == "base.digest" else "free"
        if before == after or rule == "free" or (rule == "until_decay" and step <= before_decay):
            continue
        if name == "base.digest":
            raise ConfigError(
                f"--run.init_from {saved['run']['init_from']} does not have the weights that the "
                f"adapters of {run} were trained on. Restore it, or use another --run.name."
            )
        if rule == "warned":
            log(f"warning: the run resumes with another {name} {before!r} -> {after!r}")
        else:
            refused.append(f"{name} {before!r} -> {after!r}")
    if refused:
        raise ConfigError(
            f"this run was started with other settings and cannot be continued with these: "
            f"{', '.join(refused)}. Use the old values, or start a new run with --run.name."
            + how_to_extend(run, before_decay)
        )


def _before_decay(*optimizers: dict[str, Any]) -> int:
    """Return the steps for which both schedules have the same rate, if only the decay of wsd
    differs; else 0.
    """
    known = utils.settings_of(utils.Optimizer)
    one, other = (
        utils.Optimizer(**{name: o[name] for name in known if name in o}) for o in optimizers
    )
    (warmup, begin), (other_warmup, other_begin) = (
        o.phases(o.schedule_steps) for o in (one, other)
    )
    same = (one.schedule, one.lr, warmup) == (other.schedule, other.lr, other_warmup)
    return min(begin, other_begin) * (same and one.schedule == "wsd")


def check_records(folder: run_directory.RunDirectory, first: int, every_steps: int) -> None:
    """Raise ConfigError if a new run would remove the records of a run without checkpoints.

    A run that was killed before its first checkpoint was complete may start again. In this case
    the folder of checkpoints exists, and there are no records from after the second save.

    first        steps before the new run's own
    every_steps  --checkpoint.every_steps of the new run
    """
    steps = [r["step"] for r in jsonl.read(folder.files / "metrics.jsonl")]
    if (before := folder.files / "config.toml").is_file():
        c = cli.load(before)
        every_steps = every_steps and min(c.checkpoint.every_steps, c.train.steps)
    allowed = (2 if folder.has_checkpoints() else 1) * every_steps
    if steps and 0 < steps[-1] - first >= allowed:
        raise ConfigError(
            f"{folder} holds records of {steps[-1]} steps and no checkpoint to resume from. A new "
            "run would start at step 0 and remove them. Copy checkpoints/ into the folder if it "
            "was moved, use another --run.name, or remove the folder."
        )


def check_same_model(
    run: run_directory.RunDirectory,
    theirs: utils.Model,
    ours: utils.Model,
    flag: str = "--run.init_from",
    longer: bool = False,
) -> None:
    """Raise ConfigError if a run's weights do not fit this model.

    flag    names the run
    longer  whether rope_scaling may differ, to extend the context
    """
    differ = [
        f"model.{name} {before!r} there and {after!r} here"
        for name, setting in utils.settings_of(utils.Model).items()
        if (before := utils.get(theirs, name)) != (after := utils.get(ours, name))
        and setting.resume == "fixed"
        and (setting.weights or (name.startswith("rope_scaling") and not longer))
    ]
    if differ:
        raise ConfigError(
            f"{flag} {run} is of another model: {', '.join(differ)}. Leave out --config and these "
            "flags to use its [model], or set these values."
        )


def check_same_tokenizer(
    run: run_directory.RunDirectory, tokens: dict[str, Any], data: str, manifest: Manifest
) -> None:
    """Raise ConfigError if the data has another tokenizer than the run of the weights."""
    if "tokenizer_sha256" not in tokens:
        raise ConfigError(
            f"--run.init_from {run} was imported without a tokenizer, so the meaning of its ids is "
            "unknown. Import it again from a folder with a tokenizer.json."
        )
    if tokens["tokenizer_sha256"] != manifest.tokenizer_sha256:
        name = run.tokenizer(tokens["tokenizer"])
        raise ConfigError(
            f"--run.init_from {run} was trained with the tokenizer {name} (table sha256 "
            f"{tokens['tokenizer_sha256']}), and {data} was made with {manifest.tokenizer} "
            f"({manifest.tokenizer_sha256}), whose ids have another meaning. Prepare the data with "
            f"data/prepare.py --tokenizer {name}."
        )
