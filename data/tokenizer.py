"""Tokenizers by name: `sample`, whose ranks lie beside this file, and all that tiktoken knows; by
path: those of Hugging Face.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from data.hf_tokenizer import TABLE, HuggingFace

Tokenizer = tiktoken.Encoding | HuggingFace

SAMPLE = "sample"
SAMPLE_RANKS = Path(__file__).with_name("sample.tiktoken")
END_OF_TEXT = "<|endoftext|>"

# Where no merge may cross: a word or a sign, with the space before it; a digit; a line break; a
# level of indentation; any other white space. Names, signs and layout stay apart, as in Python's
# own grammar, which a small model learns sooner. A possessive quantifier keeps long runs linear.
SAMPLE_PATTERN = r" ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]|\r?\n| {4}|\s"


def load_tokenizer(name: str, sha256: str | None = None) -> Tokenizer:
    """The tokenizer called `name`; its table is checked against `sha256` if that is given.

    name    sample, a name of tiktoken's, or the path of a tokenizer.json or of its folder.
    Raises  ValueError when there is none, it cannot be fetched, or it is not the one that was
    expected.
    """
    if name == SAMPLE:
        tokenizer = load_sample(SAMPLE_RANKS)
    elif is_path(name):
        tokenizer = HuggingFace(Path(name))
    else:
        tokenizer = load_tiktoken(name)
    found = table_sha256(tokenizer)
    if sha256 is not None and found != sha256:
        raise ValueError(
            f"tokenizer {name} here has the table sha256 {found}, and the data was made with "
            f"{sha256}. Use the code, or the file, that the data was made with, or prepare the "
            f"data again with data/prepare.py --tokenizer {name} --overwrite."
        )
    return tokenizer


def is_path(name: str) -> bool:
    """Also of what is not there any more. A folder called as an encoding is needs ./ before it."""
    if name in tiktoken.list_encoding_names():
        return False
    return name.endswith(".json") or "/" in name or Path(name).is_dir()


def load_sample(ranks: Path) -> tiktoken.Encoding:
    """Byte-level BPE from a rank file: lines of base64 token, space, rank."""
    # Not read through tiktoken.load, which caches by path and would miss that the file has changed.
    lines = ranks.read_bytes().splitlines()
    table = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return encoding(table)


def encoding(table: dict[bytes, int]) -> tiktoken.Encoding:
    """The sample tokenizer with this table; end-of-text is the id after the last rank."""
    special = {END_OF_TEXT: len(table)}
    return tiktoken.Encoding(
        SAMPLE,
        pat_str=SAMPLE_PATTERN,
        mergeable_ranks=table,
        special_tokens=special,
        explicit_n_vocab=len(table) + 1,
    )


def load_tiktoken(name: str) -> tiktoken.Encoding:
    """The encoding that tiktoken calls `name`; its first use fetches the table over the network."""
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise ValueError(
            f"--tokenizer {name} is unknown: expected {SAMPLE}, the path of a {TABLE} or of its "
            f"folder, or a name of tiktoken's, one of {', '.join(names)}. Use --tokenizer {SAMPLE}."
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # requests' errors are among these
        raise ValueError(
            f"--tokenizer {name} could not be fetched ({type(error).__name__}), and it is not in "
            "tiktoken's cache. Connect to the network once, set TIKTOKEN_CACHE_DIR to a folder "
            f"that has it, or use --tokenizer {SAMPLE}, which needs no network."
        ) from error


def table_sha256(tokenizer: Tokenizer) -> str:
    """sha256 of all that decides the ids of a text: pattern, tokens by rank, end-of-text; or of the
    content of tokenizer.json.

    Two tokenizers of one name that differ are told apart by it.
    """
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.sha256
    # Neither has a public reader; tiktoken's own guide to extending an encoding reads them so.
    pattern, ranks = tokenizer._pat_str, tokenizer._mergeable_ranks
    table = sorted((rank, token.hex()) for token, rank in ranks.items())
    content = json.dumps([pattern, table, tokenizer.eot_token])
    return hashlib.sha256(content.encode()).hexdigest()


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Nothing for what is no token: a hole among the ids, a pad of the vocabulary."""
    try:
        return tokenizer.decode_single_token_bytes(token) if token >= 0 else b""
    except KeyError:
        return b""


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Without what is no token: the end of a text, and pads of the vocabulary."""
    return b"".join(token_bytes(tokenizer, i) for i in ids).decode("utf-8", "replace")
