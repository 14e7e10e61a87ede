"""Train a run for each point of a grid of settings, and compare them.

    ./run.sh python sweep.py --config configs/tiny.toml --grid.optimizer.lr 0.01 0.02

Each run is main.py in a process, with all other flags. Its name is --run.name and its point, as
tiny-lr-0.01. The same command continues a sweep: finished runs are skipped, and others resume. A
run that fails is reported, and the others run. The end is a table, and DIR/NAME-sweep/report.html.
"""

import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dataset
import depth
import plot
import report
import utils
from runtime import cli, errors, phases, processes, resume, run_directory, storage
from runtime.console import log
from utils import Config, ConfigError


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of sweep.py besides those of main.py and --grid.SETTING VALUE ..."""

    jobs: int = 1  # runs at a time, which share the devices


def take_grid(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of each --grid.NAME, and the other arguments.

    Raises  ConfigError for an unknown name, and for values that are missing or repeated
    """
    grid, rest = {}, []
    words = rest  # where a word that is no flag belongs
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--grid."):
            words = grid.setdefault(flag[7:].replace("-", "_"), [])
            words += [value] * bool(equals)
        else:
            words = rest if argument.startswith("--") else words
            words += [argument] * (argument != "--")
    settings = [*utils.settings_of(), "depth"]
    known = [f"grid.{name}" for name in settings if name not in ("run.name", "run.dir")]
    cli.refuse_unknown([f"--grid.{name}" for name in grid if f"grid.{name}" not in known], known)
    wrong = [name for name, values in grid.items() if len(set(values)) != (len(values) or -1)]
    for name in wrong or ["optimizer.lr"] * (not grid):
        raise ConfigError(f"--grid.{name} needs values, all different, as --grid.{name} 0.01 0.02.")
    return grid, rest


def runs_of(grid: dict[str, list[str]], rest: list[str]) -> dict[str, tuple[list[str], Config]]:
    """Return the flags of main.py and the config of each run, by its name."""
    runs, base = {}, depth.parse_open(rest).run.name
    for point in itertools.product(*grid.values()):
        parts = (f"-{key}-{v}" for key, v in zip(report.brief([*grid]), point, strict=True))
        name = base + re.sub(r"[^\w.+-]+", "_", "".join(parts))
        flags = [word for n, v in zip(grid, point, strict=True) for word in (f"--{n}", v)]
        flags = [*rest, *flags, "--run.name", name]
        if name in runs:
            raise ConfigError(f"two runs would have the name {name}. Change a value of the grid.")
        config = depth.parse_open(flags)
        if source := config.run.init_from:  # as in main.parse
            file = resume.config_file(run_directory.at(source), "--run.init_from")
            config = depth.parse_open(flags, model=cli.load(file).model)
        runs[name] = flags, dataset.with_vocabulary(config)
    return runs


def is_finished(config: Config) -> bool:
    """Return whether a run has ended. Raises ConfigError if it had other settings."""
    run = run_directory.of(config)
    [line] = phases.read(run.files)[-1:] or [{"ended": False}]
    if not line["ended"] or line["step"] < config.train.steps:
        return False
    before = cli.load(run.files / "config.toml")
    now = resume.with_schedule(config, before.optimizer.schedule_steps)
    now = utils.changed(now, {"model.compute_dtype": before.model.compute_dtype})
    settings = map(dataclasses.asdict, (before, now))
    resume.check_compatible(*settings, run, line["step"])
    return True


def main() -> None:
    flags, rest = cli.parse_known(Flags, description=__doc__)
    grid, rest = take_grid(rest)
    runs, failed, base = runs_of(grid, rest), {}, depth.parse_open(rest).run
    todo = [name for name, (_, config) in runs.items() if not is_finished(config)]
    log(f"{len(runs)} runs, of which {len(runs) - len(todo)} are finished")
    out = Path("runs" if storage.is_remote(base.dir) else base.dir) / f"{base.name}-sweep"
    out.mkdir(parents=True, exist_ok=True)

    def start(name: str, _: int) -> subprocess.Popen[bytes]:
        log(f"{name} starts, with its output in {out}/{name}.log")
        command = [sys.executable, Path(__file__).with_name("main.py"), *runs[name][0]]
        with (out / f"{name}.log").open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)

    def ended(name: str, code: int) -> None:
        if code:
            failed[name] = code if code > 0 else 128 - code  # as shells have it for a signal
            text = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            log(f"{name} ended with exit code {failed[name]}: {''.join(text.splitlines()[-1:])}")

    waiting = iter(todo)
    processes.run_all(range(flags.jobs), lambda running: waiting, start, ended)
    found = {name: run_directory.of(config) for name, (_, config) in runs.items()}
    found = {name: run for name, run in found.items() if report.records_of(run.files)[0]}
    folders = {name: run.files for name, run in found.items()}
    log(report.aligned(report.table(report.facts_of(folders))))
    if found:
        files = plot.plot_runs([*folders.values()], out, [*map(str, found.values())])
        log(f"report: {files[-1]}")
    if failed:
        text = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. Fix the causes and "
        raise errors.JobFailed(f"{text}start this command again.", min(failed.values()))


if __name__ == "__main__":
    errors.run_command(main)
