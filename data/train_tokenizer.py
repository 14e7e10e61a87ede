"""Train the sample tokenizer: python data/train_tokenizer.py [--out FILE]

Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) of 4,096 ids: 256 bytes, 3,839 merges and
end of text, the last id. It is trained on the training files of `python-stdlib` only, so validation
text is new to the tokenizer too. The result is deterministic for each version of Python.
"""

import base64
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tyro
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.hf_tokenizer import BYTES
from data.settings import Prepare, in_validation
from data.sources import STDLIB, documents
from data.tokenizer import SAMPLE_PATTERN, SAMPLE_RANKS, encoding
from utils import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train the sample tokenizer on the training files of python-stdlib."""

    out: Path = SAMPLE_RANKS  # rank file to write, in tiktoken's format
    vocab_size: int = 4096  # 256 bytes, the merges, and end of text


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(TrainTokenizer, args=arguments)
    if config.vocab_size < 257:
        raise ConfigError(f"--vocab-size {config.vocab_size} is too small: expected at least 257.")
    splits: dict[bool, list[str]] = {False: [], True: []}
    for document, text in documents(Prepare(source=STDLIB, out="")):
        held_out = in_validation(document.name, document.position, Prepare.val_share)
        splits[held_out].append(text)
    tokens = train(splits[False], config.vocab_size - 1)
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
    """Return `size` tokens by rank: the 256 bytes, then merges, the most frequent first.

    There are fewer if the text has no more pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SAMPLE_PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    tokens = [bytes(BYTES[c] for c in token) for token in sorted(ids, key=ids.__getitem__)]
    return [bytes([byte]) for byte in range(256)] + tokens[256:]


if __name__ == "__main__":
    from runtime.errors import run_command

    run_command(main)
