"""The data of a run: one dataset, or several of which each gives its share of every batch.

    ./run.sh python main.py --data.mixture "web 0.7 data/web" "code 0.3 data/code"

Which dataset a sequence is from follows from its position in the run alone, and its window from
how many of that dataset came before it, which is a closed form: so a mixture resumes, like a
dataset, with nothing but the step number. Each dataset has epochs of its own.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dataset import (
    AHEAD_STEPS,
    Dataset,
    Rows,
    check_eval,
    check_learned,
    check_same_tokenizer,
)
from manifest import Manifest
from token_files import Range, Reader
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
        match = re.fullmatch(r"\s*([\w.-]+)\s+(\S+)\s+(\S.*?)/?\s*", text)
        try:
            weight = float(match[2]) if match else math.nan
        except ValueError:
            weight = math.nan
        if not (match and 0 < weight < math.inf):
            raise ValueError(
                f"--data.mixture {text!r} is not NAME WEIGHT FOLDER, with a weight above 0 and a "
                f"folder with train/ and val/. Use {EXAMPLE}."
            )
        if match[1] in found:
            raise ValueError(f"--data.mixture names {match[1]} twice. Use {EXAMPLE}.")
        found[match[1]] = Entry(match[1], weight, match[3])
    return list(found.values())


def shares(weights: list[float]) -> np.ndarray:
    """How many of PERIOD positions each has: to the nearest, by the largest remainder."""
    exact = np.array(weights) / np.sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    for k in np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]:
        counts[k] += 1
    return counts


class Mixture:
    """Windows of several datasets, numbered one dataset after the other.

    rows, windows_of, identity, ... are as of a Dataset.
    """

    def __init__(self, parts: dict[str, Dataset], weights: list[float], sequences: int = 1):
        self.parts, self.sequences = parts, sequences
        self.counts = shares(weights)  # of a period
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
        self._datasets = list(parts.values())
        self.starts = np.cumsum([0] + [data.windows for data in self._datasets])
        self.windows = int(self.starts[-1])
        # Those of a run have one.
        self.reader = next((data.reader for data in self._datasets if data.reader), None)
        for other in self._datasets[1:]:
            check_same_tokenizer(self._datasets[0], other)

    @property
    def folder(self) -> str:
        told = zip(self.parts.items(), self.shares, strict=True)
        return ", ".join(f"{name} {share:.3g} {data.folder}" for (name, data), share in told)

    @property
    def manifest(self) -> Manifest:
        """Of the first: its tokenizer is that of all."""
        return self._datasets[0].manifest

    @property
    def shares(self) -> list[float]:
        return (self.counts / PERIOD).tolist()

    @property
    def identity(self) -> str:
        """The same for two exactly when they give the same tokens in the same order."""
        content = [(int(n), d.identity) for n, d in zip(self.counts, self._datasets, strict=True)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # guide: mixture
    def windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        positions = step * self.sequences + np.asarray(rows, dtype=np.int64)
        period, place = np.divmod(positions, PERIOD)
        which = self._pattern[place]
        own = period * self.counts[which] + self._before[which, place]
        windows = self.starts[which]
        for k, data in enumerate(self._datasets):
            windows[which == k] += data.windows_at(own[which == k])
        return windows

    # guide: end

    def rows(self, step: int, rows: np.ndarray) -> Rows:
        ahead = range(step + 1, step + 1 + AHEAD_STEPS) if self.reader else ()
        return self.batch(self.windows_of(step, rows), [self.windows_of(s, rows) for s in ahead])

    def batch(self, windows: np.ndarray, soon: Sequence[np.ndarray] = ()) -> Rows:
        """As of a dataset; each gives the rows that are its own."""
        if self.reader:
            self.reader.expect(
                self.ranges(windows), [r for each in soon for r in self.ranges(each)]
            )
        return self.read(windows)

    def ranges(self, windows: np.ndarray) -> list[Range]:
        """What `read` will ask of a bucket."""
        parts = enumerate(self._datasets)
        return [r for k, data in parts for r in data.ranges(self._own(k, windows))]

    def read(self, windows: np.ndarray) -> Rows:
        """As `batch`, where the reader expects it."""
        out: Rows = {}
        for k, data in enumerate(self._datasets):
            here = self._of(k, windows)
            if not here.any():
                continue
            for name, own in data.read(self._own(k, windows)).items():
                shape = len(windows), *own.shape[1:]
                out.setdefault(name, np.empty(shape, own.dtype))[here] = own
        return out

    def _of(self, k: int, windows: np.ndarray) -> np.ndarray:
        """Which of them are of this dataset."""
        return (self.starts[k] <= windows) & (windows < self.starts[k + 1])

    def _own(self, k: int, windows: np.ndarray) -> np.ndarray:
        """Those, by their numbers there."""
        return windows[self._of(k, windows)] - self.starts[k]

    def part_of(self, window: int) -> tuple[Dataset, int]:
        """The dataset, and the window's number there."""
        k = int(np.searchsorted(self.starts, window, side="right")) - 1
        return self._datasets[k], window - int(self.starts[k])

    def _used(self, steps: int) -> list[int]:
        """Sequences of each dataset in so many steps."""
        period, place = divmod(steps * self.sequences, PERIOD)
        return (period * self.counts + self._before[:, place]).tolist()

    def progress(self, steps: int) -> dict[str, float]:
        """For the records: what was trained on of each dataset, in sequences and in epochs."""
        found = {}
        for (name, data), used in zip(self.parts.items(), self._used(steps), strict=True):
            found[f"data/{name}/sequences"] = used
            found[f"data/{name}/epochs"] = used / data.windows
        return found

    def used_up(self, step: int) -> list[str]:
        """What the step, counted from 1, has come to the end of."""
        both = zip(self.parts.items(), self._used(step - 1), self._used(step), strict=True)
        return [
            f"{name}: {text}"
            for (name, data), before, now in both
            if (text := data.ended(before, now))
        ]


Data = Dataset | Mixture


# --- of a run -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_datasets(config: Config) -> Iterator[tuple[Data, Data]]:
    """(training data, validation data), checked against the model, the run and each other."""
    with contextlib.closing(Reader()) as reader:
        train, val = open_training(config, reader), open_validation(config, reader)
        check_same_tokenizer(train, val)
        yield train, val


def open_training(config: Config, reader: Reader | None = None) -> Data:
    """The training data, checked against the model and the run."""
    reader, sequences = reader or Reader(), config.train.sequences

    def opened(folder: str, count: int = PERIOD) -> Dataset:
        return Dataset(
            folder,
            config.train.sequence_length,
            sequences=max(1, round(int(count) * sequences / PERIOD)),
            seed=config.data.seed,
            order=config.data.order,
            segments=config.data.segments,
            vocabulary=config.model.vocabulary,
            reader=reader,
        )

    if not config.data.mixture:
        return opened(config.data.train)
    found = entries(config.data.mixture)
    weights = [entry.weight for entry in found]
    both = zip(found, shares(weights), strict=True)  # as identity has them, not as they are written
    parts = {entry.name: opened(f"{entry.folder}/train", count) for entry, count in both}
    return Mixture(parts, weights, sequences)


def open_validation(config: Config, reader: Reader | None = None) -> Data:
    """The validation data, checked against the model and the run."""
    reader, sequences = reader or Reader(), config.eval.sequences

    def opened(folder: str) -> Dataset:
        val = Dataset(
            folder,
            config.train.sequence_length,
            sequences=sequences,
            shuffle=False,
            segments=config.data.segments,
            vocabulary=config.model.vocabulary,
            reader=reader,
        )
        check_eval(val, sequences)
        check_learned(val, sequences)
        return val

    if not config.data.mixture:
        return opened(config.data.val)
    found = entries(config.data.mixture)
    parts = {entry.name: opened(f"{entry.folder}/val") for entry in found}
    return Mixture(parts, [entry.weight for entry in found], sequences)
