"""Token shards to batches: step -> batch is a pure function, and nothing else is remembered.

A folder on a disk or in a bucket holds flat .npy shards and an index.json (manifest.py), and may
hold the loss weight of each token as a target, uint8, in files beside the shards. Windows of T+1
tokens with stride T run over the concatenation of the shards, so every token but the first is a
target once per epoch. The stream of epochs, each in its own order, is endless; step `s` is the
next `sequences` windows of it. A batch depends on neither hosts nor mesh, nor on where the shards
lie, so a run resumes with nothing but its step number.

`T` tokens of a sequence, `n` rows asked for.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from manifest import INDEX, Shard, in_bucket, prepare_command, read_manifest
from token_files import Files, Layout, Range, Reader, Span, open_files

FEISTEL_ROUNDS = 6
CHUNK_BYTES = 1 << 22  # of tokens, that --data.order blocks reads together
AHEAD_STEPS = 4  # whose windows are read from a bucket while a step's are used

Rows = dict[str, np.ndarray]  # by name, [n, T] each
Result = TypeVar("Result")


class Dataset:
    """Windows of one folder of shards.

    sequences   windows in each step's global batch
    order       of windows: "windows" or "blocks", as `shuffled` and `striped` say
    segments    number the documents within each window; without it, all of a window is document 0
    vocabulary  of the model, which the ids must fit into
    reader      of a folder in a bucket, which those of a run share
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        *,
        sequences: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: str = "windows",
        segments: bool = False,
        vocabulary: int | None = None,
        reader: Reader | None = None,
    ):
        self.folder = str(folder).rstrip("/")
        self.sequence_length, self.sequences = sequence_length, sequences
        self.seed, self.shuffle, self.order, self.segments = seed, shuffle, order, segments
        check_settings(self)
        self.manifest = read_manifest(self.folder)
        self.reader = (reader or Reader()) if in_bucket(self.folder) else None
        if vocabulary is not None:
            check_vocabulary(self, vocabulary)
        self.windows = (self.manifest.tokens - 1) // sequence_length
        check_length(self)
        shards = self.manifest.shards
        self.shards = self.opened(shards, self.manifest.dtype)
        self.weights: Files | None = None  # where all are 1
        if shards[0].weights:
            self.weights = self.opened([shard.weights for shard in shards], "uint8")
        # Where each shard begins in the concatenation, and where the last one ends.
        self.starts = np.cumsum([0] + [shard.tokens for shard in shards])
        self._bounds = self.starts.tolist()

    def opened(self, shards: list[Shard], dtype: str) -> Files:
        layout = Layout(self.folder, self.manifest, shards, np.dtype(dtype))
        return open_files(layout, self.reader, CHUNK_BYTES if self.order == "blocks" else None)

    # guide: batch
    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """These rows of the global batch of this step, each [n, T]; a pure function.

        tokens, targets, segments int32; loss_weights float32.
        """
        ahead = range(step + 1, step + 1 + AHEAD_STEPS) if self.reader else ()
        return self.batch(self.windows_of(step, rows), [self.windows_of(s, rows) for s in ahead])

    def windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Numbers of the windows that these rows of the step's batch are."""
        return self.windows_at(step * self.sequences + np.asarray(rows, dtype=np.int64))

    def windows_at(self, positions: np.ndarray) -> np.ndarray:
        """Those at these places of the endless stream of epochs."""
        windows = positions % self.windows
        if self.shuffle:
            epochs = positions // self.windows
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = self.shuffled(windows[here], int(epoch))
        return windows

    def shuffled(self, index: np.ndarray, epoch: int) -> np.ndarray:
        """A bijection of 0 .. windows-1, another one for each epoch."""
        if self.order == "windows":
            return permute(index, self.windows, self.seed, epoch)
        item = np.dtype(self.manifest.dtype).itemsize
        length = max(1, CHUNK_BYTES // (self.sequence_length * item))
        return striped(index, self.windows, self.sequences, length, self.seed, epoch)

    # guide: end

    def eval_rows(self, rows: np.ndarray, sequences: int) -> Rows:
        """These rows of `sequences` windows spread evenly over the data, the same every time."""
        check_eval(self, sequences)
        return self.batch(np.asarray(rows, dtype=np.int64) * self.windows // sequences)

    def batch(self, windows: np.ndarray, soon: Sequence[np.ndarray] = ()) -> Rows:
        """Tokens, targets, loss weights and segments of these windows.

        soon  windows that will be asked for next.
        """
        if self.reader:
            self.reader.expect(
                self.ranges(windows), [r for each in soon for r in self.ranges(each)]
            )
        return self.read(windows)

    def ranges(self, windows: np.ndarray) -> list[Range]:
        """What `read` will ask of a bucket."""
        spans = [span for spans in self.places(windows) for span in spans]
        return [r for files in self._kinds for span in spans for r in files.ranges(span)]

    def read(self, windows: np.ndarray) -> Rows:
        """As `batch`, where the reader expects it."""
        ids, *weights = self.stacked(windows)
        ids = ids.astype(np.int32)
        segments = np.zeros_like(ids[:, :-1])
        if self.segments:
            # A document's own end-of-text belongs to it, so the number goes up after it.
            ends = ids[:, :-1] == self.manifest.end_of_text
            segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1, dtype=np.int32)
        if weights:  # of the targets, as the loss is
            loss_weights = weights[0][:, 1:].astype(np.float32)
        else:
            loss_weights = np.ones(segments.shape, np.float32)
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "loss_weights": loss_weights,
            "segments": segments,
        }

    @property
    def identity(self) -> str:
        """The same for two exactly when they hold the same tokens."""
        return self.manifest.identity

    def part_of(self, window: int) -> tuple["Dataset", int]:
        """As of a mixture (mixture.py), whose part a dataset may be."""
        return self, window

    def progress(self, steps: int) -> dict[str, float]:
        """For the records, as of a mixture: nothing that the number of steps does not say."""
        return {}

    def used_up(self, step: int) -> list[str]:
        """What the step, counted from 1, has come to the end of."""
        text = self.ended((step - 1) * self.sequences, step * self.sequences)
        return [text] if text else []

    def ended(self, before: int, now: int) -> str:
        """In words, where an epoch ended between so many sequences and so many."""
        epoch = now // self.windows
        if epoch == before // self.windows:
            return ""
        return (
            f"each of the {self.windows:,} windows of {self.folder} was trained on "
            f"{'once' if epoch == 1 else f'{epoch} times'}; epoch {epoch + 1} begins"
        )

    def stacked(self, windows: np.ndarray) -> list[np.ndarray]:
        """[n, T+1] of these windows' tokens, and of their loss weights where there are some."""
        places = self.places(windows)
        return [np.stack([joined(files, spans) for spans in places]) for files in self._kinds]

    @property
    def _kinds(self) -> list[Files]:
        return [files for files in (self.shards, self.weights) if files]

    def places(self, windows: np.ndarray) -> list[list[Span]]:
        """Where the T+1 tokens of each window lie: in one shard, or in several."""
        begins = windows * self.sequence_length
        ends = begins + self.sequence_length + 1
        first = np.searchsorted(self.starts, begins, side="right") - 1
        behind = np.searchsorted(self.starts, ends, side="left")
        four = (array.tolist() for array in (begins, ends, first, behind))
        return [
            [self._span(shard, begin, end) for shard in range(a, b)]
            for begin, end, a, b in zip(*four, strict=True)
        ]

    def _span(self, shard: int, begin: int, end: int) -> Span:
        """What a shard has of the tokens from `begin` to `end` of all."""
        start, stop = self._bounds[shard : shard + 2]
        return Span(shard, max(begin, start) - start, min(end, stop) - start)


def joined(files: Files, spans: list[Span]) -> np.ndarray:
    parts = [files.elements(span) for span in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_settings(data: Dataset) -> None:
    for flag, value, least in (
        ("train.sequence_length", data.sequence_length, 1),
        ("train.sequences", data.sequences, 1),
        ("data.seed", data.seed, 0),
    ):
        if value < least:
            raise ValueError(
                f"--{flag} {value} is too small: expected at least {least}. Use --{flag} {least}."
            )


def check_vocabulary(data: Dataset, vocabulary: int) -> None:
    if data.manifest.vocabulary > vocabulary:
        raise ValueError(
            f"{data.folder}/{INDEX} has token ids up to {data.manifest.vocabulary - 1} (tokenizer "
            f"{data.manifest.tokenizer}), and --model.vocabulary {vocabulary} has no row for those "
            f"from {vocabulary} on. Use --model.vocabulary {data.manifest.vocabulary}, or prepare "
            "the data with another --tokenizer."
        )


def check_length(data: Dataset) -> None:
    if data.windows < 1:
        tokens = data.manifest.tokens
        raise ValueError(
            f"--train.sequence_length {data.sequence_length} is longer than the data: it needs "
            f"{data.sequence_length + 1} tokens, and {data.folder} has {tokens}. "
            f"Use --train.sequence_length {tokens - 1} or less, or more data."
        )


def check_eval(data: Dataset, sequences: int) -> None:
    """Raises ValueError when there are not that many windows."""
    if sequences > data.windows:
        raise ValueError(
            f"--eval.sequences {sequences} is more than the {data.windows} windows of "
            f"{data.sequence_length} tokens in {data.folder}, and none may be counted twice. Use "
            f"--eval.sequences {data.windows} or less, or more data."
        )


def check_learned(data: Dataset, sequences: int) -> None:
    """Raises ValueError when no target of the evaluation windows counts."""
    if data.weights and not data.eval_rows(np.arange(sequences), sequences)["loss_weights"].any():
        raise ValueError(
            f"--eval.sequences {sequences}: these windows of {data.folder} hold prompts alone, so "
            f"they have no loss. Use more of its {data.windows} windows, or more data."
        )


def check_same_tokenizer(train: Dataset, val: Dataset) -> None:
    """Raises ValueError when an id does not mean the same text in both."""
    if train.manifest.tokenizer_sha256 != val.manifest.tokenizer_sha256:
        raise ValueError(
            f"{val.folder} was made with another tokenizer ({val.manifest.tokenizer}, table sha256 "
            f"{val.manifest.tokenizer_sha256}) than {train.folder} ({train.manifest.tokenizer}, "
            f"{train.manifest.tokenizer_sha256}), so their losses cannot be compared. "
            f"Run {prepare_command(val.folder, train.manifest)} --overwrite."
        )


# guide: permute
def striped(
    index: np.ndarray, size: int, rows: int, length: int, seed: int, epoch: int
) -> np.ndarray:
    """A bijection of 0 .. size-1 in which each of the `rows` of a batch walks through a chunk of
    `length` neighbouring windows, in an order of its own, before it goes on to another one.

    So a host reads, of what is large, only the chunks of its own rows, and each chunk once. Rows
    are in chunks that lie anywhere. The windows that do not fill a chunk for each row, the last of
    the data, come last.
    """
    chunks = size // (rows * length) * rows
    index = np.asarray(index, np.int64)
    group, place = np.divmod(index, rows * length)
    step, row = np.divmod(place, rows)
    windows, tail = np.empty_like(index), group * rows >= chunks
    if not tail.all():
        chunk = permute((group * rows + row)[~tail], chunks, seed, epoch)
        turn = mix(chunk.astype(np.uint64)) % np.uint64(length)
        inside = permute(step[~tail], length, seed, epoch) + turn.astype(np.int64)
        windows[~tail] = chunk * length + inside % length
    first = chunks * length
    windows[tail] = first + permute(index[tail] - first, size - first, seed, epoch)
    return windows


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A bijection of 0 .. size-1, another one for each (seed, epoch), without a table.

    A Feistel network permutes 0 .. 4**k - 1, the least such range that covers size; what falls
    outside 0 .. size-1 goes through again until it falls inside, at most 3 times more on average.

    Source  cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)
    value = feistel(np.asarray(index, np.uint64), half_bits, keys)
    while (outside := value >= size).any():
        value[outside] = feistel(value[outside], half_bits, keys)
    return value.astype(np.int64)


def feistel(value: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """(left, right) -> (right, left ^ hash(right, key)) for each key: a bijection."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele et al. 2014): a bit of x moves every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# guide: end


def prefetch(
    function: Callable[[Any], Result],
    found: Iterable[Any],
    depth: int = 2,
    pool: Executor | None = None,
) -> Iterator[Result]:
    """function(x) for each x, in order, computed up to `depth` ahead by the pool, or one thread.

    An error of the function is raised where its result would have come. close() of the iterator
    drops what is under way and ends the pool.
    """
    pool = pool or ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    pending: collections.deque[Future[Result]] = collections.deque()
    try:
        for x in found:
            pending.append(pool.submit(function, x))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
