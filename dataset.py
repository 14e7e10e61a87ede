"""Token shards to batches: step -> batch is a pure function, and nothing else is remembered.

A folder on a disk or in a bucket holds flat .npy shards and an index.json (manifest.py), and may
hold the loss weight of each token as a target, uint8, in files beside the shards. Windows of T+1
tokens with stride T run over the concatenation of the shards, so every token but the first is a
target once per epoch. The stream of epochs, each in its own order, is endless; step `s` is the
next `sequences` windows of it. A batch depends on neither hosts nor mesh, nor on where the shards
lie, so a run resumes with nothing but its step number. `T` tokens of a sequence, `n` rows.
"""

from pathlib import Path

import numpy as np

from manifest import prepare_command, read_manifest
from token_files import CACHED_CHUNKS, Span, open_files

FEISTEL_ROUNDS = 6
CHUNK_BYTES = 1 << 22  # of a file in a bucket

Rows = dict[str, np.ndarray]  # by name, [n, T] each


class Dataset:
    """Windows of one folder of shards.

    sequences   of this folder in each step's global batch
    order       of windows: "windows" or "blocks", as `shuffled` and `striped` say
    segments    number the documents within each window; without it, all of a window is document 0
    vocabulary  of the model, which the ids must fit into
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        *,
        sequences: int = 1,
        seed: int = 0,
        order: str = "windows",
        segments: bool = False,
        vocabulary: int | None = None,
    ):
        self.folder = str(folder).rstrip("/")
        self.sequence_length, self.sequences = sequence_length, sequences
        self.seed, self.order, self.segments = seed, order, segments
        self.manifest = read_manifest(self.folder)
        self.windows = (self.manifest.tokens - 1) // sequence_length
        check_fits(self, vocabulary)
        # Of the tokens; then of their loss weights, unless all are 1.
        chunks = sum(-(-shard.bytes // CHUNK_BYTES) for shard in self.manifest.shards)
        in_chunks = order == "blocks" or chunks <= CACHED_CHUNKS
        self.files = open_files(self.folder, self.manifest, CHUNK_BYTES if in_chunks else None)
        for files in self.files:
            files.check()
        # Where each shard begins in the concatenation, and where the last one ends.
        self.starts = np.cumsum([0] + [shard.tokens for shard in self.manifest.shards])
        self._bounds = self.starts.tolist()

    # guide: batch
    def windows_at(self, positions: np.ndarray) -> np.ndarray:
        """Numbers of the windows at these positions of the endless stream of epochs."""
        epochs, windows = np.divmod(positions, self.windows)
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
        return self.batch(np.asarray(rows, dtype=np.int64) * self.windows // sequences)

    def batch(self, windows: np.ndarray) -> Rows:
        """These windows, [n, T] each: tokens, targets, segments int32; loss_weights float32."""
        ids, *weights = self.stacked(windows)
        ids = ids.astype(np.int32)
        segments = np.zeros_like(ids[:, :-1])
        if self.segments:
            # A document's own end-of-text belongs to it, so the number goes up after it.
            ends = ids[:, :-1] == self.manifest.end_of_text
            segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1, dtype=np.int32)
        loss_weights = weights[0] if weights else np.ones_like(ids)
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "loss_weights": loss_weights[:, 1:].astype(np.float32),  # of the targets
            "segments": segments,
        }

    def stacked(self, windows: np.ndarray) -> list[np.ndarray]:
        """[n, T+1] of these windows' tokens, and of their loss weights where there are some."""
        spans, shape = self.places(windows), (len(windows), self.sequence_length + 1)
        return [np.concatenate(files.elements(spans)).reshape(shape) for files in self.files]

    def places(self, windows: np.ndarray) -> list[Span]:
        """Where the T+1 tokens of each window lie, one after the other: in a shard, or several."""
        begins = windows * self.sequence_length
        ends = begins + self.sequence_length + 1
        first = np.searchsorted(self.starts, begins, side="right") - 1
        behind = np.searchsorted(self.starts, ends, side="left")
        at, four = self._bounds, (array.tolist() for array in (begins, ends, first, behind))
        return [
            Span(shard, max(begin, at[shard]) - at[shard], min(end, at[shard + 1]) - at[shard])
            for begin, end, a, b in zip(*four, strict=True)
            for shard in range(a, b)
        ]


def check_fits(data: Dataset, vocabulary: int | None) -> None:
    """Raises ValueError when the model has no row for an id, or there is no window."""
    m, longest = data.manifest, data.manifest.tokens - 1
    if vocabulary is not None and m.vocabulary > vocabulary:
        raise ValueError(
            f"{data.folder} has token ids up to {m.vocabulary - 1} (tokenizer {m.tokenizer}), and "
            f"--model.vocabulary {vocabulary} has no row for those from {vocabulary} on. Use "
            f"--model.vocabulary {m.vocabulary}, or prepare the data with another --tokenizer."
        )
    if data.sequence_length > longest:
        raise ValueError(
            f"--train.sequence_length {data.sequence_length} is longer than the data: "
            f"{data.folder} has {m.tokens} tokens, and each sequence takes one more. Use "
            f"--train.sequence_length {longest} or less, or more data."
        )


def check_eval(data: Dataset, sequences: int) -> None:
    """Raises ValueError when there are not that many windows, or no target of them counts."""
    flag, rows = f"--eval.sequences {sequences}", np.arange(sequences)
    if sequences > data.windows:
        raise ValueError(
            f"{flag} is more than the {data.windows} windows of {data.sequence_length} tokens in "
            f"{data.folder}, and none may be counted twice. Use --eval.sequences {data.windows} or "
            "less, or more data."
        )
    weighted = len(data.files) > 1
    if weighted and not data.eval_rows(rows, sequences)["loss_weights"].any():
        raise ValueError(
            f"{flag}: these windows of {data.folder} hold prompts alone, so they have no loss. Use "
            f"more of its {data.windows} windows, or more data."
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

    So a host reads, of what is large, only the chunks of its own rows, and each chunk once. The
    windows that do not fill a chunk for each row, the last of the data, come last.
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
