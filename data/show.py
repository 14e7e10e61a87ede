"""Print the text that a run was trained on: python data/show.py --run runs/tiny --step 12

Prints each window of a step's batch, with its number and location. Steps are counted from 1, as in
metrics.jsonl and skipped.jsonl. A window's last token is a target only. Its text may begin and end
inside a character.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# A script has its own folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import load_tokenizer, text_of
from dataset import Dataset, open_training
from runtime import cli, errors, resume, run_directory
from utils import ConfigError, setting


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print the text of windows of a run's training data. Give one of --step and --windows."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    step: int | None = setting(None, at_least=1)  # step whose batch is printed, from 1
    windows: tuple[int, ...] = ()  # numbers of single windows, as in skipped.jsonl


def main(arguments: list[str] | None = None) -> None:
    flags = cli.parse_flags(Flags, arguments)
    config = cli.load(resume.config_file(run_directory.at(flags.run), "--run"))
    if (flags.step is None) == (not flags.windows):
        raise ConfigError("expected either --step or --windows. Use one, as --step 1.")
    data, numbers = open_training(config), list(flags.windows)
    if flags.step is not None:
        numbers = data.windows_of(flags.step - 1, np.arange(data.batch_size)).tolist()
    if outside := [number for number in numbers if not 0 <= number < data.windows]:
        raise ConfigError(
            f"--windows {outside[0]} is not a window of {data.folder}. Use numbers from 0 to "
            f"{data.windows - 1}."
        )
    tokenizer = load_tokenizer(data.manifest.tokenizer, data.manifest.tokenizer_sha256)
    for number in numbers:
        dataset, window = data.dataset_of(number)
        [ids], *_ = dataset.read(np.array([window]))
        text = text_of(tokenizer, ids.tolist())
        print(f"--- window {number}: {location(dataset, window)}\n{text}")


def location(data: Dataset, window: int) -> str:
    """Return a description of the shards and tokens of a window."""
    return ", ".join(
        f"tokens {begin} to {end - 1} of {data.folder}/{data.manifest.shards[file].name}"
        for file, begin, end in data.spans(np.array([window]))
    )


if __name__ == "__main__":
    errors.run_command(main)
