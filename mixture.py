"""The data of a run: one dataset, or several of which each gives its share of every batch.

    ./run.sh python main.py --data.mixture "web 0.7 data/web" "code 0.3 data/code"

Which dataset a sequence is from follows from its position in the run alone, and its window from
how many of that dataset came before it, in closed form. Each dataset has epochs of its own.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dataset import Dataset, Rows, check_eval, check_same_tokenizer
from utils import Config

PERIOD = 1 << 16  # positions after which the datasets follow each other in the same order again
EXAMPLE = "--data.mixture 'web 0.7 data/web' 'code 0.3 data/code'"


class Entry(NamedTuple):
    """One of --data.mixture."""

    name: str
    weight: float
    folder: str  # with train/ and val/


def entries(texts: Iterable[str]) -> list[Entry]:
    """Raises ValueError for one that is not NAME WEIGHT FOLDER, or a name that comes twice."""
    found: dict[str, Entry] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.-]+)\s+(\d*\.?\d+(?:e-?\d+)?)\s+(\S.*?)/?\s*", text)
        if not match or not 0 < float(match[2]) < math.inf:
            raise ValueError(
                f"--data.mixture {text!r} is not NAME WEIGHT FOLDER, with a weight above 0 and a "
                f"folder with train/ and val/. Use {EXAMPLE}."
            )
        if match[1] in found:
            raise ValueError(f"--data.mixture names {match[1]} twice. Use {EXAMPLE}.")
        found[match[1]] = Entry(match[1], float(match[2]), match[3])
    return list(found.values())


def shares(weights: list[float]) -> np.ndarray:
    """How many of PERIOD positions each has: to the nearest, by the largest remainder."""
    exact = np.array(weights) / np.sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    for k in np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]:
        counts[k] += 1
    return counts


class Mixture:
    """Windows of one dataset, whose name is empty, or of several, numbered one after the other."""

    def __init__(self, parts: dict[str, Dataset], weights: list[float], sequences: int = 1):
        self.parts, self.sequences = parts, sequences
        self.counts = shares(weights)  # of a period
        self.shares: list[float] = (self.counts / PERIOD).tolist()
        for entry, weight, count in zip(parts, weights, self.counts, strict=True):
            if count < 1:
                raise ValueError(
                    f"--data.mixture gives {entry} the weight {weight:g}, which is less than one "
                    f"of {PERIOD} sequences. Give it more, or leave it out."
                )
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        which = np.repeat(np.arange(len(parts)), self.counts)
        self._pattern = which[np.argsort(places, kind="stable")]  # [PERIOD]
        ones = self._pattern == np.arange(len(parts))[:, None]
        self._before = np.cumsum(ones, axis=1) - ones  # [datasets, PERIOD], in this period
        self._datasets = first, *others = list(parts.values())
        self.starts = np.cumsum([0] + [data.windows for data in self._datasets])
        self.windows = int(self.starts[-1])
        self.folder = ", ".join(data.folder for data in self._datasets)
        self.manifest = first.manifest  # of which the tokenizer is that of all
        for other in others:
            check_same_tokenizer(first, other)

    @property
    def identity(self) -> str:
        """The same for two exactly when they give the same tokens in the same order."""
        each = [data.manifest.identity for data in self._datasets]
        content = json.dumps([*zip(self.counts.tolist(), each, strict=True)])
        return each[0] if len(each) == 1 else hashlib.sha256(content.encode()).hexdigest()

    # guide: mixture
    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """These rows of the global batch of this step; a pure function."""
        return self.batch(self.windows_of(step, rows))

    def windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Numbers of the windows that these rows of the step's batch are."""
        positions = step * self.sequences + np.asarray(rows, dtype=np.int64)
        period, place = np.divmod(positions, PERIOD)
        which = self._pattern[place]
        own = period * self.counts[which] + self._before[which, place]
        windows = self.starts[which]
        for k, data in enumerate(self._datasets):
            windows[which == k] += data.windows_at(own[which == k])
        return windows

    # guide: end

    def batch(self, windows: np.ndarray) -> Rows:
        """As of a dataset; each gives the rows that are its own."""
        found: Rows = {}
        which = self._which(windows)
        for k in np.unique(which):
            here = which == k
            for name, own in self._datasets[k].batch(windows[here] - self.starts[k]).items():
                shape = len(windows), *own.shape[1:]
                found.setdefault(name, np.empty(shape, own.dtype))[here] = own
        return found

    def _which(self, windows: np.ndarray) -> np.ndarray:
        """The number of each window's dataset."""
        return np.searchsorted(self.starts, windows, side="right") - 1

    def part_of(self, window: int) -> tuple[Dataset, int]:
        """The dataset, and the window's number there."""
        k = int(self._which(np.array(window)))
        return self._datasets[k], window - int(self.starts[k])

    def _used(self, steps: int) -> list[int]:
        """Sequences of each dataset in so many steps."""
        period, place = divmod(steps * self.sequences, PERIOD)
        return (period * self.counts + self._before[:, place]).tolist()

    def progress(self, steps: int) -> dict[str, float]:
        """For the records: what was trained on of each of several, in sequences and in epochs."""
        found = {}
        for (name, data), used in zip(self.parts.items(), self._used(steps), strict=True):
            if name:
                found[f"data/{name}/sequences"] = used
                found[f"data/{name}/epochs"] = used / data.windows
        return found

    def used_up(self, step: int) -> list[str]:
        """In words, the epochs that end in this step, which is counted from 1."""
        ends = zip(self._datasets, self._used(step - 1), self._used(step), strict=True)
        return [
            f"epoch {now // data.windows} of {data.folder} is over, of {data.windows:,} windows"
            for data, before, now in ends
            if now // data.windows > before // data.windows
        ]


def open_datasets(config: Config) -> tuple[Mixture, Mixture]:
    """(training data, validation data), checked against the model, the run and each other."""
    train, val = open_training(config), open_validation(config)
    check_same_tokenizer(train, val)
    return train, val


def open_training(config: Config) -> Mixture:
    """The training data, checked against the model and the run."""
    return opened(config, "train", config.train.sequences, config.data.order)


def open_validation(config: Config) -> Mixture:
    """The validation data, checked against the model and the run."""
    val = opened(config, "val", config.eval.sequences, "windows")
    for data in val.parts.values():
        check_eval(data, config.eval.sequences)
    return val


def opened(config: Config, split: str, sequences: int, order: str) -> Mixture:
    """--data.mixture; or else --data.train or --data.val, whichever the split is."""
    found = entries(config.data.mixture) or [Entry("", 1.0, "")]
    weights = [entry.weight for entry in found]
    parts = {}
    # By shares, as the identity has them, and not by weights as they are written.
    for entry, count in zip(found, shares(weights).tolist(), strict=True):
        parts[entry.name] = Dataset(
            f"{entry.folder}/{split}" if entry.name else getattr(config.data, split),
            config.train.sequence_length,
            sequences=max(1, round(count * sequences / PERIOD)),
            seed=config.data.seed,
            order=order,
            segments=config.data.segments,
            vocabulary=config.model.vocabulary,
        )
    return Mixture(parts, weights, sequences)
