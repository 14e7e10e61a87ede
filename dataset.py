"""Token shards to batches: step -> batch is a pure function, and nothing else is remembered.

A folder holds flat .npy shards and an index.json (data/prepare.py writes both), and may hold the
loss weight of each token as a target, uint8, in files beside the shards. Windows of T+1
tokens with stride T run over the concatenation of the shards, so every token but the first is a
target once per epoch. The stream of epochs, each in its own order, is endless; step `s` is the
next `sequences` windows of it. A batch depends on neither hosts nor mesh, so a run resumes with
nothing but its step number.

`T` tokens of a sequence, `n` rows asked for.
"""

import collections
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import google_crc32c
import numpy as np

if TYPE_CHECKING:  # data/prepare.py's workers import this file, and need not wait for utils
    from utils import Config

INDEX = "index.json"
DOCUMENT_RULE = "every document is followed by end_of_text"
CHUNK_BYTES = 1 << 24
FEISTEL_ROUNDS = 6

Rows = dict[str, np.ndarray]  # by name, [n, T] each
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    bytes: int  # of the file
    crc32c: str  # of the file, 8 hexadecimal digits
    weights: "Shard | None" = None  # the file with these tokens' loss weights; None: all are 1


@dataclass(frozen=True)
class Manifest:
    """What index.json says."""

    split: str
    tokenizer: str
    tokenizer_sha256: str  # of its table: two tokenizers of one name that differ are told apart
    vocabulary: int
    end_of_text: int
    document_rule: str
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    shards: list[Shard]
    command: str  # that made it, without --out
    settings: dict[str, Any]  # all that decides its content
    template: str | None = None  # that made text of conversations
    learned_tokens: int | None = None  # with loss weight 1; None: all. text_bytes are theirs

    @property
    def identity(self) -> str:
        """The same for two folders exactly when they hold the same tokens of the same tokenizer,
        with the same loss weights.
        """
        files = [(f.tokens, f.crc32c) for s in self.shards for f in (s, s.weights) if f]
        content = [self.tokenizer_sha256, self.dtype, files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """index.json of the folder. Raises ValueError when it is not there or not whole."""
    path = folder / INDEX
    try:
        fields = json.loads(path.read_text())
        shards = [shard_of(shard) for shard in fields.pop("shards")]
        manifest = Manifest(shards=shards, **fields)
        if manifest.tokens != sum(shard.tokens for shard in shards):
            raise ValueError("tokens is not the sum of the shards' tokens")
        weighted = [shard for shard in shards if shard.weights]
        whole = all(shard.weights.tokens == shard.tokens for shard in weighted)
        if not whole or len(weighted) not in (0, len(shards)):
            raise ValueError("loss weights are not of all tokens")
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} does not exist: {folder} is no folder of shards, or its preparation did not "
            f"end. Run {prepare_command(folder)}."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read as the index of a folder of shards ({type(error).__name__}: "
            f"{error}). Run {prepare_command(folder)} --overwrite."
        ) from error
    if manifest.document_rule != DOCUMENT_RULE:
        raise ValueError(
            f"{path} has the document rule {manifest.document_rule!r}: expected {DOCUMENT_RULE!r}. "
            f"Run {prepare_command(folder)} --overwrite."
        )
    return manifest


def shard_of(fields: dict[str, Any]) -> Shard:
    weights = fields.get("weights")
    return Shard(**(fields | {"weights": weights and Shard(**weights)}))


def prepare_command(folder: Path, manifest: Manifest | None = None) -> str:
    """The command that makes the folder (again)."""
    command = manifest.command if manifest else "python data/prepare.py --source python-stdlib"
    return f"{command} --out {folder.parent}"


def file_crc32c(path: Path) -> str:
    """CRC32C of a file, as 8 hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = google_crc32c.extend(crc, chunk)
    return f"{crc:08x}"


def open_shard(folder: Path, shard: Shard, manifest: Manifest, dtype: str) -> np.ndarray:
    """The shard, mapped into memory. Raises ValueError when it is not what index.json says."""
    path = folder / shard.name
    mend = f"Run {prepare_command(folder, manifest)} --overwrite"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {folder / INDEX} expects checksum {shard.crc32c}. {mend}, or "
            "bring the file back."
        )
    size, crc32c = path.stat().st_size, file_crc32c(path)
    if (size, crc32c) != (shard.bytes, shard.crc32c):
        what = "truncated" if size < shard.bytes else "altered"
        raise ValueError(
            f"{path} is {what}: expected checksum {shard.crc32c} and {shard.bytes} bytes, found "
            f"{crc32c} and {size} bytes. {mend}, or copy the file again."
        )
    array = np.load(path, mmap_mode="r")
    if array.dtype.name != dtype or array.shape != (shard.tokens,):
        raise ValueError(
            f"{path} holds {array.dtype.name} of shape {array.shape}: {folder / INDEX} expects "
            f"{dtype} of shape {(shard.tokens,)}. {mend}."
        )
    return array


class Dataset:
    """Windows of one folder of shards.

    sequences   windows in each step's global batch
    vocabulary  of the model, which the ids must fit into
    segments    number the documents within each window; without it, all of a window is document 0
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        *,
        sequences: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        segments: bool = False,
        vocabulary: int | None = None,
    ):
        self.folder = Path(folder)
        self.sequence_length, self.sequences = sequence_length, sequences
        self.seed, self.shuffle, self.segments = seed, shuffle, segments
        check_settings(self)
        self.manifest = read_manifest(self.folder)
        if vocabulary is not None:
            check_vocabulary(self, vocabulary)
        self.windows = (self.manifest.tokens - 1) // sequence_length
        check_length(self)
        self.shards = self.opened(self.manifest.shards, self.manifest.dtype)
        weights = [shard.weights for shard in self.manifest.shards if shard.weights]
        self.weights = self.opened(weights, "uint8")  # none where all are 1
        # Where each shard begins in the concatenation, and where the last one ends.
        self.starts = np.cumsum([0] + [shard.tokens for shard in self.manifest.shards])

    def opened(self, shards: list[Shard], dtype: str) -> list[np.ndarray]:
        return [open_shard(self.folder, shard, self.manifest, dtype) for shard in shards]

    # guide: batch
    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """These rows of the global batch of this step, each [n, T]; a pure function.

        tokens, targets, segments int32; loss_weights float32.
        """
        return self.batch(self.windows_of(step, rows))

    def windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Numbers of the windows that these rows of the step's batch are."""
        positions = step * self.sequences + np.asarray(rows, dtype=np.int64)
        windows = positions % self.windows
        if self.shuffle:
            epochs = positions // self.windows
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = permute(windows[here], self.windows, self.seed, int(epoch))
        return windows

    # guide: end

    def eval_rows(self, rows: np.ndarray, sequences: int) -> Rows:
        """These rows of `sequences` windows spread evenly over the data, the same every time."""
        check_eval(self, sequences)
        return self.batch(np.asarray(rows, dtype=np.int64) * self.windows // sequences)

    def batch(self, windows: np.ndarray) -> Rows:
        """Tokens, targets, loss weights and segments of these windows."""
        ids = self.stacked(windows, self.shards).astype(np.int32)
        segments = np.zeros_like(ids[:, :-1])
        if self.segments:
            # A document's own end-of-text belongs to it, so the number goes up after it.
            ends = ids[:, :-1] == self.manifest.end_of_text
            segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1, dtype=np.int32)
        weights = np.ones(segments.shape, np.float32)
        if self.weights:  # of the targets, as the loss is
            weights = self.stacked(windows, self.weights)[:, 1:].astype(np.float32)
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "loss_weights": weights,
            "segments": segments,
        }

    def stacked(self, windows: np.ndarray, shards: list[np.ndarray]) -> np.ndarray:
        return np.stack([self.window(int(window), shards) for window in windows])

    def window(self, number: int, shards: list[np.ndarray]) -> np.ndarray:
        """[T+1] elements from number * T on, over as many shards as they lie in."""
        return np.concatenate([shards[i][part] for i, part in self.places(number)])

    def places(self, number: int) -> list[tuple[int, slice]]:
        """Where a window lies: numbers of shards, and which elements of each."""
        begin = number * self.sequence_length
        end = begin + self.sequence_length + 1
        first = int(np.searchsorted(self.starts, begin, side="right")) - 1
        last = int(np.searchsorted(self.starts, end, side="left"))
        return [
            (i, slice(max(begin - start, 0), end - start))
            for i, start in zip(range(first, last), self.starts[first:last].tolist(), strict=True)
        ]


def open_datasets(config: "Config") -> tuple[Dataset, Dataset]:
    """(training data, validation data), checked against the model, the run and each other."""
    train = open_training(config)
    val = open_validation(config)
    check_same_tokenizer(train, val)
    return train, val


def open_training(config: "Config") -> Dataset:
    """The training data, checked against the model and the run."""
    return Dataset(
        config.data.train,
        config.train.sequence_length,
        sequences=config.train.sequences,
        seed=config.data.seed,
        segments=config.data.segments,
        vocabulary=config.model.vocabulary,
    )


def open_validation(config: "Config") -> Dataset:
    """The validation data, checked against the model and the run."""
    val = Dataset(
        config.data.val,
        config.train.sequence_length,
        sequences=config.eval.sequences,
        shuffle=False,
        segments=config.data.segments,
        vocabulary=config.model.vocabulary,
    )
    check_eval(val, config.eval.sequences)
    check_learned(val, config.eval.sequences)
    return val


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
            f"{data.folder / INDEX} has token ids up to {data.manifest.vocabulary - 1} (tokenizer "
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
