"""Compare gigatoken with tiktoken: encodings it can load, ids of each document, speed.

    ./run.sh python -m pip install gigatoken
    ./run.sh python tests/try_gigatoken.py --wheels wheels          the text of tests/tokens_same.py

data/prepare.py does not use it; docs/measured.md says why. Special tokens in the text are plain
text, so gigatoken gets none. Both tokenize the same documents, none longer than a chunk of the
preparation, and every character of Unicode among others.
"""

import argparse
import base64
import functools
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokens_same
from benchmarks.common import spread
from data.tokenizer import load_tokenizer
from hf.tokenizer_export import as_characters, merges, to_hugging_face

SCHEMES = {"p50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}  # cuts by its names
ROUNDS = 3
AMONG = "a{0}b 1{0}2 {0}{0}'s"  # a character among others
# Only letters have tokens.
LETTER = tiktoken.Encoding(
    "letters",
    pat_str=r"\p{L}",
    mergeable_ranks={bytes([byte]): byte for byte in range(256)},
    special_tokens={},
)


def from_ranks(encoding: tiktoken.Encoding, gigatoken):
    """Raises  RuntimeError where ids have a hole, ValueError where the cuts are unknown to it."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{encoding.name}.tiktoken"
        rows = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
        file.write_bytes(b"".join(rows))
        return gigatoken.Tokenizer.from_tiktoken(file, SCHEMES.get(encoding.name), {})


def from_json(encoding: tiktoken.Encoding, gigatoken):
    """From tokenizer.json with the same cuts.

    Raises  RuntimeError where the cuts are unknown to it.
    """
    return gigatoken.Tokenizer.from_json(to_hugging_face(encoding).to_str())


def from_gpt2(encoding: tiktoken.Encoding, gigatoken):
    """From tokenizer.json with GPT-2's cuts, which are those of p50k_base in other words."""
    ranks = encoding._mergeable_ranks
    vocabulary = {as_characters(token): rank for token, rank in ranks.items()}
    table = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges(ranks)))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    table.decoder = decoders.ByteLevel()
    return gigatoken.Tokenizer.from_json(table.to_str())


def way_of(encoding: tiktoken.Encoding, gigatoken):
    """Return the first loader that works, or None. Prints the failures."""
    for way in [from_ranks, from_json] + [from_gpt2] * (encoding.name == "p50k_base"):
        try:
            way(encoding, gigatoken)
        except (ValueError, RuntimeError) as error:
            print(f"{encoding.name}, {way.__name__}: {' '.join(str(error).split())[:160]}")
        else:
            print(f"{encoding.name}, {way.__name__}: loaded")
            return functools.partial(way, encoding, gigatoken)
    return None


def ids_of(other, text: str) -> list[int] | str:
    try:
        return other.encode_batch_list([text], parallel=False)[0]
    except TypeError as error:
        return f"TypeError: {error}"


def compare(encoding: tiktoken.Encoding, other, texts: list[str]) -> None:
    differ = [text for text in texts if ids_of(other, text) != encoding.encode_ordinary(text)]
    halves = sum(not is_whole(text) for text in differ)
    print(
        f"  {len(differ)} of {len(texts):,} documents differ, {halves} with half a surrogate pair"
    )
    for text in differ[:3]:
        print(f"    {text[:30]!r}: {str(ids_of(other, text))[:70]}")
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    found = other.encode_batch_list([AMONG.format(c) for c in characters], parallel=False)
    differ = [
        (c, ids)
        for c, ids in zip(characters, found, strict=True)
        if encoding.encode_ordinary(AMONG.format(c)) != ids
    ]
    letters = sum(bool(LETTER.encode_ordinary(c)) for c, _ in differ)
    print(
        f"  {len(differ):,} of {len(characters):,} characters differ among others, {letters:,} of "
        "them letters to tiktoken"
    )
    for c, ids in differ[:1]:
        theirs = encoding.encode_ordinary(AMONG.format(c))
        print(f"    {AMONG.format(c)!a}: {ids}, and tiktoken {theirs}")


def is_whole(text: str) -> bool:
    """Return whether the text has no half of a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def speeds(encoding: tiktoken.Encoding, load, texts: list[str]) -> None:
    """Print speeds, with gigatoken loaded anew each time because it caches words."""
    ways = {
        "tiktoken, one thread": lambda _: sum(map(len, map(encoding.encode_ordinary, texts))),
        "gigatoken, one thread": lambda new: count(new.encode_batch(texts, parallel=False)),
        "gigatoken, its own threads": lambda new: count(new.encode_batch(texts, parallel=True)),
    }
    taken = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            new = load()
            start = time.perf_counter()
            tokens = way(new)
            taken[name].append(tokens / (time.perf_counter() - start) / 1e6)
    for name, rates in taken.items():
        print(f"  {name}: {spread(rates)} M tokens/s")


def count(rows) -> int:
    import awkward  # comes with gigatoken

    return int(awkward.count(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["sample", *SCHEMES])
    parser.add_argument("--mb", type=float, default=24)
    parser.add_argument("--wheels", type=Path)
    flags = parser.parse_args()
    import gigatoken  # late: --help needs none

    limit, documents = tokens_same.CHUNK_CHARACTERS, tokens_same.mixed(flags.mb, flags.wheels)
    texts = [text[cut : cut + limit] for text in documents for cut in range(0, len(text), limit)]
    size = sum(len(text.encode(errors="replace")) for text in texts)
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, gigatoken {version('gigatoken')}")
    for name in flags.names:
        encoding = load_tokenizer(name)
        if load := way_of(encoding, gigatoken):
            compare(encoding, load(), texts)
            speeds(encoding, load, [*filter(is_whole, texts)])
    print(f"Speeds are medians of {ROUNDS} (least to most), in turns.")


if __name__ == "__main__":
    main()
