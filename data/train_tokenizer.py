"""Train the sample tokenizer: python data/train_tokenizer.py [--out FILE]

Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) of 4,096 ids: 256 bytes, 3,839 merges and
end-of-text, which is the last. It sees the training files of `python-stdlib` only, so that
validation text is as new to the tokenizer as to the model. The same interpreter gives the same
file, byte by byte.
"""

import base64
import heapq
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import regex
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prepare import STDLIB, Prepare, documents, in_validation
from data.tokenizer import SAMPLE_PATTERN, SAMPLE_RANKS, encoding


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train the sample tokenizer on the training files of python-stdlib."""

    out: Path = SAMPLE_RANKS  # rank file to write, in tiktoken's format
    vocabulary: int = 4096  # ids: 256 bytes, the merges, and end-of-text


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(TrainTokenizer, args=arguments)
    if config.vocabulary < 257:
        raise ValueError(
            f"--vocabulary {config.vocabulary} is too small: expected 256 bytes, merges and "
            "end-of-text. Use --vocabulary 4096."
        )
    splits: dict[bool, list[str]] = {False: [], True: []}
    for number, document in enumerate(documents(Prepare(source=STDLIB, out=""))):
        splits[in_validation(number)].append(document.text)
    tokens = train(splits[False], config.vocabulary - 1)
    config.out.write_bytes(rank_file(tokens))
    tokenizer = encoding({token: rank for rank, token in enumerate(tokens)})
    for name, texts in (("training", splits[False]), ("held-out", splits[True])):
        ids = sum(map(len, tokenizer.encode_ordinary_batch(texts)))
        size = sum(len(text.encode()) for text in texts)
        print(f"{name} files: {len(texts)}, {size:,} bytes, {size / ids:.3f} bytes per token")
    print(f"wrote {config.out}")


def rank_file(tokens: list[bytes]) -> bytes:
    """A line for each token: base64, a space, its rank."""
    return b"".join(
        b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)
    )


def train(texts: Iterable[str], size: int) -> list[bytes]:
    """`size` tokens by rank: the 256 bytes, then merges, the most frequent first.

    Of equally frequent ones the first in byte order is taken. There are fewer when the text has no
    more pairs.
    """
    pattern = regex.compile(SAMPLE_PATTERN)
    counts = Counter(word for text in texts for word in pattern.findall(text))
    words = Words(counts)
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < size and (token := words.most_frequent()) is not None:
        words.merge(token)
        tokens.append(token)
    return tokens


class Words:
    """Counted words, each cut into tokens; a pair is known by the bytes it would join to.

    That names one pair: the merges so far cut the same bytes, between two cuts, in the same way.
    """

    def __init__(self, counts: Counter[str]):
        self.words = [[bytes([byte]) for byte in word.encode()] for word in counts]
        self.counts = list(counts.values())
        self.pair_counts: Counter[bytes] = Counter()
        self.places: defaultdict[bytes, set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self.add(index, 1)
        # Entries are left to go stale, and put right when they come to the top.
        self.heap = [(-count, pair) for pair, count in self.pair_counts.items()]
        heapq.heapify(self.heap)

    def add(self, index: int, sign: int) -> set[bytes]:
        """Count the pairs of one word in (sign 1) or out (sign -1); returns them."""
        word = self.words[index]
        pairs = [left + right for left, right in itertools.pairwise(word)]
        for pair in pairs:
            self.pair_counts[pair] += sign * self.counts[index]
            self.places[pair].add(
                index
            )  # and stays: merge() finds nothing to join where it has gone
        return set(pairs)

    def most_frequent(self) -> bytes | None:
        """The pair with the highest count, in byte order among equals; None when none is left."""
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            current = self.pair_counts[pair]
            if current == -count and current > 0:
                return pair
            if current > 0:
                heapq.heappush(self.heap, (-current, pair))
        return None

    def merge(self, token: bytes) -> None:
        """Join neighbours that give `token`, from left to right, in every word."""
        changed = set()
        for index in self.places.pop(token):
            changed |= self.add(index, -1)
            self.words[index] = join(self.words[index], token)
            changed |= self.add(index, 1)
        for pair in changed:
            heapq.heappush(self.heap, (-self.pair_counts[pair], pair))


def join(word: list[bytes], token: bytes) -> list[bytes]:
    """The word with each two neighbours that give `token` as one, from left to right."""
    joined, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and word[i] + word[i + 1] == token:
            joined.append(token)
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return joined


if __name__ == "__main__":
    from utils import command_line

    command_line(main)
