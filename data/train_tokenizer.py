"""Train the sample tokenizer: python data/train_tokenizer.py [--out FILE]

Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) of 4,096 ids: 256 bytes, 3,839 merges and
end-of-text, which is the last. It sees the training files of `python-stdlib` only, so that
validation text is as new to the tokenizer as to the model. The same interpreter gives the same
file, byte by byte.
"""

import base64
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import regex
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.settings import Prepare, in_validation
from data.sources import STDLIB, documents
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
    for document in documents(Prepare(source=STDLIB, out="")):
        held_out = in_validation(document.name, document.position, Prepare.val_share)
        splits[held_out].append(document.text)
    tokens = train(splits[False], config.vocabulary - 1)
    table = {token: rank for rank, token in enumerate(tokens)}
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in table.items()]
    config.out.write_bytes(b"".join(lines))
    tokenizer = encoding(table)
    for name, texts in (("training", splits[False]), ("held-out", splits[True])):
        ids = sum(map(len, tokenizer.encode_ordinary_batch(texts)))
        size = sum(len(text.encode()) for text in texts)
        print(f"{name} files: {len(texts)}, {size:,} bytes, {size / ids:.3f} bytes per token")
    print(f"wrote {config.out}")


def train(texts: Iterable[str], size: int) -> list[bytes]:
    """`size` tokens by rank: the 256 bytes, then merges, the most frequent first.

    Of equally frequent ones the first in byte order is taken. There are fewer when the text has no
    more pairs.
    """
    pattern = regex.compile(SAMPLE_PATTERN)
    counts = Counter(word for text in texts for word in pattern.findall(text))
    words = Words(counts)
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < size and (most := max(words.pair_counts.values(), default=0)):
        token = min(pair for pair, count in words.pair_counts.items() if count == most)
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

    def add(self, index: int, sign: int) -> None:
        """Count the pairs of one word in (sign 1) or out (sign -1)."""
        for left, right in itertools.pairwise(self.words[index]):
            self.pair_counts[left + right] += sign * self.counts[index]
            # It stays there: merge() finds nothing to join where a pair has gone.
            self.places[left + right].add(index)

    def merge(self, token: bytes) -> None:
        """Join neighbours that give `token`, from left to right, in every word."""
        for index in self.places.pop(token):
            self.add(index, -1)
            self.words[index] = join(self.words[index], token)
            self.add(index, 1)


def join(word: list[bytes], token: bytes) -> list[bytes]:
    """The word with each two neighbours that give `token` as one, from left to right."""
    joined = []
    for part in word:
        if joined and joined[-1] + part == token:
            joined[-1] = token
        else:
            joined.append(part)
    return joined


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
