"""The text of what a run was trained on: python data/show.py --run runs/tiny --step 12

Prints each window of a step's batch, with its number and where it lies. Steps are counted as in
metrics.jsonl and skipped.jsonl, from 1. A window is the run's sequence length and one token more,
which is a target only; its text may begin and end inside a character.

    python data/show.py --run runs/tiny --windows 3 17

The run's data must still lie where its config says. What is printed is compared with its checksums
first.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faults
import resume
import run_folder
import utils
from data.tokenizer import Tokenizer, load_tokenizer, text_of
from mixture import Data, open_training


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print the text of windows of a run's training data."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # whose batch is printed, from 1
    windows: tuple[int, ...] = ()  # numbers of single windows, as skipped.jsonl lists them


def main(arguments: list[str] | None = None) -> None:
    flags = tyro.cli(Flags, args=arguments)
    config = utils.load(resume.config_file(run_folder.at(flags.run), "--run"))
    check(flags)
    data = open_training(config)
    check_windows(flags.windows, data)
    numbers = list(flags.windows)
    if flags.step is not None:
        numbers = data.windows_of(flags.step - 1, np.arange(data.sequences)).tolist()
    m = data.manifest
    tokenizer = load_tokenizer(m.tokenizer, m.tokenizer_sha256)
    for number in numbers:
        print(f"--- {place(data, number)}\n{text(data, tokenizer, number)}")


def check(flags: Flags) -> None:
    """Raises ValueError for a step before the first, or not exactly one of --step and --windows."""
    if (flags.step is None) == (not flags.windows):
        raise ValueError(
            "--step names the batch of a step, and --windows single windows. Give one of them, as "
            "--step 1."
        )
    if flags.step is not None and flags.step < 1:
        raise ValueError(f"--step {flags.step} is below 1, which is the first step. Use 1 or more.")


def check_windows(numbers: tuple[int, ...], data: Data) -> None:
    """Raises ValueError for a window that there is not."""
    outside = [number for number in numbers if not 0 <= number < data.windows]
    if outside:
        raise ValueError(
            f"--windows {outside[0]} is not a window of {data.folder}, which has those from 0 to "
            f"{data.windows - 1}. Use these."
        )


def place(data: Data, number: int) -> str:
    """A window's number, and the shards and tokens where it lies."""
    parts = []
    of, own = data.part_of(number)
    for file, first, end in of.places(np.array([own]))[0]:
        name = of.manifest.shards[file].name
        parts.append(f"tokens {first} to {end - 1} of {of.folder}/{name}")
    return f"window {number}: {', '.join(parts)}"


def text(data: Data, tokenizer: Tokenizer, number: int) -> str:
    of, own = data.part_of(number)
    [window], *_ = of.stacked(np.array([own]))
    return text_of(tokenizer, window.tolist())


if __name__ == "__main__":
    faults.command_line(main)
