"""Token shards to batches: step -> batch is a pure function without other state.

A folder on a disk or in a bucket holds flat .npy shards and an index.json (data/manifest.py), and
optionally a loss weight per target token, uint8, in files beside the shards. Windows of T+1 tokens
with stride T run over the concatenated shards, so every token but the first is a target once per
epoch. Epochs, each in its own order, form an endless stream; step `s` is its `s`-th batch of
windows. A batch does not depend on hosts, mesh, or location of the shards, so a run resumes with
nothing but its step number. `T` tokens per sequence, `n` rows.
"""

import bisect
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.manifest import prepare_command, read_manifest
from data.token_files import CACHED_PAGES, Span, open_files
from utils import Config, ConfigError, changed

FEISTEL_ROUNDS = 6
PAGE_BYTES = 1 << 22  # of a file in a bucket; also the tokens of a block of windows

Rows = dict[str, np.ndarray]  # by name, [n, T] each
PERIOD = 1 << 16  # sequences after which the order of datasets in a mixture repeats
EXAMPLE = "--data.mixture 'web 0.7 data/web' 'code 0.3 data/code'"


@dataclass(eq=False)
class Dataset:
    """Windows of one folder of shards."""

    folder: str | Path
    seq_len: int
    batch_size: int = 1  # sequences of this folder in each step's global batch
    seed: int = 0
    order: str = "windows"  # `permute`, or blocks, which is `striped`
    segments: bool = False  # number the documents of a window, to mask them; otherwise all are 0
    vocab_size: int | None = None  # of the model, which must cover all ids

    def __post_init__(self) -> None:
        self.folder = str(self.folder).rstrip("/")
        self.manifest = read_manifest(self.folder)
        self.windows = (self.manifest.tokens - 1) // self.seq_len
        check_fits(self)
        pages = sum(-(-shard.bytes // PAGE_BYTES) for shard in self.manifest.shards)
        in_pages = self.order == "blocks" or pages <= CACHED_PAGES
        # Files of tokens, then of loss weights unless all are 1.
        self.files = open_files(self.folder, self.manifest, PAGE_BYTES if in_pages else None)
        for files in self.files:
            files.check()
        # Where each shard begins in the concatenation, and where the last one ends.
        tokens = (shard.tokens for shard in self.manifest.shards)
        self.starts = list(itertools.accumulate(tokens, initial=0))

    def windows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the windows at these positions of the endless stream of epochs."""
        epochs, windows = np.divmod(positions, self.windows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = self.shuffle(windows[here], int(epoch))
        return windows

    def shuffle(self, index: np.ndarray, epoch: int) -> np.ndarray:
        """Apply a bijection of 0 .. windows-1, which differs per epoch."""
        if self.order == "windows":
            return permute(index, self.windows, self.seed, epoch)
        item = np.dtype(self.manifest.dtype).itemsize
        length = max(1, PAGE_BYTES // (self.seq_len * item))
        return striped(index, self.windows, self.batch_size, length, self.seed, epoch)

    def eval_rows(self, rows: np.ndarray, sequences: int) -> Rows:
        """Return these rows of `sequences` fixed windows, evenly spaced over the data."""
        return self.batch(np.asarray(rows, dtype=np.int64) * self.windows // sequences)

    def batch(self, windows: np.ndarray) -> Rows:
        """Return tokens, targets and segments as int32 [n, T], and loss_weights as float32."""
        ids, *weights = self.read(windows)
        ids = ids.astype(np.int32)
        segments = np.zeros_like(ids[:, :-1])
        if self.segments:
            # End of text belongs to the document it ends, so the number increases after it.
            ends = ids[:, :-1] == self.manifest.end_of_text
            segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1, dtype=np.int32)
        loss_weights = weights[0] if weights else np.ones_like(ids)
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "loss_weights": loss_weights[:, 1:].astype(np.float32),  # of the targets
            "segments": segments,
        }

    def read(self, windows: np.ndarray) -> list[np.ndarray]:
        """Return [n, T+1] arrays: tokens, and loss weights if there are any."""
        spans, shape = self.spans(windows), (len(windows), self.seq_len + 1)
        return [np.concatenate(files.read(spans)).reshape(shape) for files in self.files]

    def spans(self, windows: np.ndarray) -> list[Span]:
        """Return the ranges of the windows' T+1 tokens in order: one or more shards each."""
        starts, spans = self.starts, []
        for begin in (windows * self.seq_len).tolist():
            end = begin + self.seq_len + 1
            for i in range(bisect.bisect_right(starts, begin) - 1, bisect.bisect_left(starts, end)):
                low, high = max(begin, starts[i]), min(end, starts[i + 1])
                spans.append(Span(i, low - starts[i], high - starts[i]))
        return spans


def check_fits(data: Dataset) -> None:
    """Raise ConfigError if the model has no embedding for an id, or the data has no window."""
    m, longest, vocab_size = data.manifest, data.manifest.tokens - 1, data.vocab_size
    if vocab_size is not None and m.vocab_size > vocab_size:
        raise ConfigError(
            f"{data.folder} has token ids up to {m.vocab_size - 1} (tokenizer {m.tokenizer}), but "
            f"--model.vocab_size {vocab_size} covers only ids below {vocab_size}. Use "
            f"--model.vocab_size {m.vocab_size}, or prepare the data with another --tokenizer."
        )
    if data.seq_len > longest:
        rows = f", or data/prepare.py --chat --row-tokens {data.seq_len}, which pads conversations"
        raise ConfigError(
            f"--train.seq_len {data.seq_len} is longer than the data: {data.folder} has {m.tokens} "
            f"tokens, and each sequence needs one more than its length. Use --train.seq_len "
            f"{longest} or less, or more data{rows * bool(m.template)}."
        )
    if (rows := m.settings.get("row_tokens")) and data.seq_len % rows:
        raise ConfigError(
            f"{data.folder} was prepared with --row-tokens {rows}, one conversation in each row. "
            f"Use --train.seq_len {rows}, or prepare it with --row-tokens {data.seq_len}."
        )


def check_eval(data: Dataset, sequences: int) -> None:
    """Raise ConfigError if there are too few windows, or all their loss weights are 0."""
    flag = f"--eval.sequences {sequences}"
    if sequences > data.windows:
        raise ConfigError(
            f"{flag} is more than the {data.windows} windows of {data.seq_len} tokens in "
            f"{data.folder}, and each may count only once. Use --eval.sequences {data.windows} or "
            "less, or more data."
        )
    weighted = len(data.files) > 1
    if weighted and not data.eval_rows(np.arange(sequences), sequences)["loss_weights"].any():
        raise ConfigError(
            f"{flag}: these windows of {data.folder} hold prompts alone, so they have no loss. Use "
            f"more of its {data.windows} windows, or more data."
        )


def check_same_tokenizer(train: Dataset, val: Dataset) -> None:
    """Raise ConfigError if an id does not mean the same text in both."""
    if train.manifest.tokenizer_sha256 != val.manifest.tokenizer_sha256:
        raise ConfigError(
            f"{val.folder} was made with another tokenizer ({val.manifest.tokenizer}, table sha256 "
            f"{val.manifest.tokenizer_sha256}) than {train.folder} ({train.manifest.tokenizer}, "
            f"{train.manifest.tokenizer_sha256}), so their losses cannot be compared. "
            f"Run {prepare_command(val.folder, train.manifest)} --overwrite."
        )


def striped(
    index: np.ndarray, size: int, rows: int, length: int, seed: int, epoch: int
) -> np.ndarray:
    """Apply a bijection of 0 .. size-1 for which each row of a batch stays in one block of windows.

    A block is `length` neighbouring windows. Each of the `rows` of a batch reads all windows of its
    block, shuffled, before the next block. So a host reads only the blocks of its own rows, each
    once. The last windows of the data, too few for a block per row, come last.
    """
    blocks = size // (rows * length) * rows
    index = np.asarray(index, np.int64)
    group, position = np.divmod(index, rows * length)
    step, row = np.divmod(position, rows)
    windows, tail = np.empty_like(index), group * rows >= blocks
    if not tail.all():
        block = permute((group * rows + row)[~tail], blocks, seed, epoch)
        turn = mix(block.astype(np.uint64)) % np.uint64(length)
        inside = permute(step[~tail], length, seed, epoch) + turn.astype(np.int64)
        windows[~tail] = block * length + inside % length
    first = blocks * length
    windows[tail] = first + permute(index[tail] - first, size - first, seed, epoch)
    return windows


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Apply a bijection of 0 .. size-1, which differs per (seed, epoch), without a table.

    A Feistel network permutes 0 .. 4**k - 1, the smallest such range that covers size. A value
    outside 0 .. size-1 is permuted again until it is inside, at most 3 times more on average.

    Source  cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)
    value = feistel(np.asarray(index, np.uint64), half_bits, keys)
    while (outside := value >= size).any():
        value[outside] = feistel(value[outside], half_bits, keys)
    return value.astype(np.int64)


def feistel(value: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """Apply the bijection (left, right) -> (right, left ^ hash(right, key)) for each key."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer (Steele et al. 2014): each bit of x affects every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- mixtures -------------------------------------------------------------------------------------


def parse_mixture(texts: Iterable[str]) -> dict[str, tuple[float, str]]:
    """Return {name: (weight, folder)} of texts that are NAME WEIGHT FOLDER.

    Raises  ConfigError for other text, or a repeated name.
    """
    entries: dict[str, tuple[float, str]] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.-]+)\s+(\d*\.?\d+(?:e-?\d+)?)\s+(\S.*?)/?\s*", text)
        if not match or match[1] in entries or not 0 < float(match[2]) < math.inf:
            raise ConfigError(
                f"--data.mixture {text!r} is not NAME WEIGHT FOLDER, with a name of its own, a "
                f"weight above 0 and a folder with train/ and val/. Use {EXAMPLE}."
            )
        entries[match[1]] = float(match[2]), match[3]
    return entries


def shares(weights: list[float]) -> np.ndarray:
    """Return each dataset's count of PERIOD positions, rounded by largest remainder."""
    exact = np.array(weights) / np.sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    for k in np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]:
        counts[k] += 1
    return counts


class Mixture:
    """Windows of several datasets, numbered consecutively; or of one, whose name is empty."""

    def __init__(self, parts: dict[str, Dataset], weights: list[float], batch_size: int = 1):
        self.parts, self.batch_size = parts, batch_size
        self.counts = shares(weights)  # of a period
        self.shares: list[float] = (self.counts / PERIOD).tolist()
        for entry, weight, count in zip(parts, weights, self.counts, strict=True):
            if count < 1:
                raise ConfigError(
                    f"--data.mixture gives {entry} the weight {weight:g}, which is less than one "
                    f"of {PERIOD} sequences. Increase the weight, or remove {entry}."
                )
        positions = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        which = np.repeat(np.arange(len(parts)), self.counts)
        self._pattern = which[np.argsort(positions, kind="stable")]  # [PERIOD]
        ones = self._pattern == np.arange(len(parts))[:, None]
        self._before = np.cumsum(ones, axis=1) - ones  # [datasets, PERIOD], in this period
        self._datasets = first, *others = list(parts.values())
        self.starts = np.cumsum([0] + [data.windows for data in self._datasets])
        self.windows = int(self.starts[-1])
        self.folder = ", ".join(data.folder for data in self._datasets)
        self.manifest = first.manifest  # the tokenizer is the same in all
        for other in others:
            check_same_tokenizer(first, other)

    @property
    def identity(self) -> str:
        """Hash that is equal exactly if tokens and their order are."""
        each = [data.manifest.identity for data in self._datasets]
        content = json.dumps([*zip(self.counts.tolist(), each, strict=True)])
        return each[0] if len(each) == 1 else hashlib.sha256(content.encode()).hexdigest()

    def stored(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the data: its identity, tokenizer and template."""
        m, templates = self.manifest, [data.manifest.template for data in self._datasets]
        tokens = {"train": self.identity, "tokenizer": m.tokenizer, "end_of_text": m.end_of_text}
        if m.begin_of_text is not None:
            tokens["begin_of_text"] = [m.begin_of_text]
        if template := next(filter(None, templates), None):
            tokens["chat_template"] = template
        return {"tokens": tokens | {"tokenizer_sha256": m.tokenizer_sha256}}

    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """Return these rows of the global batch of this step; a pure function."""
        return self.batch(self.windows_of(step, rows))

    def windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Return the window numbers of these rows of the step's batch."""
        positions = step * self.batch_size + np.asarray(rows, dtype=np.int64)
        period, position = np.divmod(positions, PERIOD)
        which = self._pattern[position]
        own = period * self.counts[which] + self._before[which, position]
        windows = self.starts[which]
        for k, data in enumerate(self._datasets):
            windows[which == k] += data.windows_at(own[which == k])
        return windows

    def batch(self, windows: np.ndarray) -> Rows:
        """Return the rows of Dataset.batch, each from its own dataset."""
        batch: Rows = {}
        which = self._which(windows)
        for k in np.unique(which):
            here = which == k
            for name, own in self._datasets[k].batch(windows[here] - self.starts[k]).items():
                shape = len(windows), *own.shape[1:]
                batch.setdefault(name, np.empty(shape, own.dtype))[here] = own
        return batch

    def _which(self, windows: np.ndarray) -> np.ndarray:
        """Return the index of each window's dataset."""
        return np.searchsorted(self.starts, windows, side="right") - 1

    def dataset_of(self, window: int) -> tuple[Dataset, int]:
        """Return the dataset, and the window's number in it."""
        k = int(self._which(np.array(window)))
        return self._datasets[k], window - int(self.starts[k])

    def _used(self, steps: int) -> list[int]:
        """Return the sequences of each dataset in the first steps."""
        period, position = divmod(steps * self.batch_size, PERIOD)
        return (period * self.counts + self._before[:, position]).tolist()

    def progress(self, steps: int) -> dict[str, float]:
        """Return for metrics the sequences and epochs of each named dataset trained on so far."""
        metrics = {}
        for (name, data), used in zip(self.parts.items(), self._used(steps), strict=True):
            if name:
                metrics[f"data/{name}/sequences"] = used
                metrics[f"data/{name}/epochs"] = used / data.windows
        return metrics

    def finished_epochs(self, step: int) -> list[str]:
        """Return a message for each epoch that ends in this step, counted from 1."""
        ends = zip(self._datasets, self._used(step - 1), self._used(step), strict=True)
        return [
            f"epoch {now // data.windows} of {data.folder} is over, of {data.windows:,} windows"
            for data, before, now in ends
            if now // data.windows > before // data.windows
        ]


def open_datasets(config: Config) -> tuple[Mixture, Mixture | None]:
    """Return (training data, validation data), checked against the config and each other.

    Without evaluation (--eval.sequences 0) there is no validation data.
    """
    train = open_training(config)
    if not config.eval.sequences:
        return train, None
    val = open_validation(config)
    check_same_tokenizer(train, val)
    return train, val


def open_training(config: Config) -> Mixture:
    return open_subset(config, "train", config.train.global_batch_size, config.data.order)


def open_validation(config: Config) -> Mixture:
    if not config.eval.sequences:
        raise ConfigError("--eval.sequences 0 is no evaluation. Use --eval.sequences 64.")
    val = open_subset(config, "val", config.eval.sequences, "windows")
    for data in val.parts.values():
        check_eval(data, config.eval.sequences)
    return val


def with_vocabulary(config: Config) -> Config:
    """Return the config with the vocabulary of the training data for `--model.vocab_size 0`."""
    if config.model.vocab_size:
        return config
    entries = parse_mixture(config.data.mixture).values()
    folders = [f"{folder}/train" for _, folder in entries] or [config.data.train]
    size = max(read_manifest(folder).vocab_size for folder in folders)
    return changed(config, {"model.vocab_size": size})


def open_subset(config: Config, subset: str, batch_size: int, order: str) -> Mixture:
    """Open --data.mixture, or else --data.train or --data.val. subset  train or val."""
    entries = parse_mixture(config.data.mixture) or {"": (1.0, "")}
    weights = [weight for weight, _ in entries.values()]
    # Rounded shares, as in the identity: equal mixtures may write their weights differently.
    sizes = (shares(weights) * batch_size / PERIOD).tolist()
    parts = {
        name: Dataset(
            f"{folder}/{subset}" if name else getattr(config.data, subset),
            config.train.seq_len,
            batch_size=max(1, round(size)),
            seed=config.data.seed,
            order=order,
            segments=config.data.segments,
            vocab_size=config.model.vocab_size,
        )
        for (name, (_, folder)), size in zip(entries.items(), sizes, strict=True)
    }
    return Mixture(parts, weights, batch_size)
