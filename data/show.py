"""The text of what a run was trained on: python data/show.py --run runs/tiny --step 12

Prints each window of a step's batch, with its number and where it lies. Steps are counted as in
metrics.jsonl and skipped.jsonl, from 1. A window is the run's sequence length and one token more,
which is a target only; its text may begin and end inside a character.

    python data/show.py --run runs/tiny --windows 3 17
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
from data.tokenizer import load_tokenizer, text_of
from dataset import Dataset
from mixture import open_training


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print the text of windows of a run's training data."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # whose batch is printed, from 1
    windows: tuple[int, ...] = ()  # numbers of single windows, as skipped.jsonl lists them


def main(arguments: list[str] | None = None) -> None:
    flags = tyro.cli(Flags, args=arguments)
    config = utils.load(resume.config_file(run_folder.at(flags.run), "--run"))
    if (flags.step is None) == (not flags.windows) or (flags.step is not None and flags.step < 1):
        raise ValueError(
            "--step names the batch of a step, from 1, and --windows single windows. Give one of "
            "them, as --step 1."
        )
    data = open_training(config)
    numbers = list(flags.windows)
    if flags.step is not None:
        numbers = data.windows_of(flags.step - 1, np.arange(data.sequences)).tolist()
    for number in numbers:
        if not 0 <= number < data.windows:
            raise ValueError(
                f"--windows {number} is not a window of {data.folder}, which has those from 0 to "
                f"{data.windows - 1}. Use these."
            )
    tokenizer = load_tokenizer(data.manifest.tokenizer, data.manifest.tokenizer_sha256)
    for number in numbers:
        dataset, own = data.part_of(number)
        [ids], *_ = dataset.stacked(np.array([own]))
        print(f"--- window {number}: {place(dataset, own)}\n{text_of(tokenizer, ids.tolist())}")


def place(data: Dataset, window: int) -> str:
    """The shards and tokens where a window lies."""
    parts = []
    for file, begin, end in data.places(np.array([window])):
        name = data.manifest.shards[file].name
        parts.append(f"tokens {begin} to {end - 1} of {data.folder}/{name}")
    return ", ".join(parts)


if __name__ == "__main__":
    faults.command_line(main)
