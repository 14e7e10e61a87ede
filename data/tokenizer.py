"""Tokenizers by name: `sample`, whose ranks lie beside this file, and all that tiktoken knows; by
path: a tokenizer.json of Hugging Face, and a tiktoken.model as Kimi-K2 and Moonlight have it.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from data.hf_tokenizer import SETTINGS, TABLE, HuggingFace, settings_of, special_of

Tokenizer = tiktoken.Encoding | HuggingFace

SAMPLE = "sample"
SAMPLE_RANKS = Path(__file__).with_name("sample.tiktoken")
END_OF_TEXT = "<|endoftext|>"

RANKS = "tiktoken.model"
# The pattern and the number of special tokens of Moonshot's models, which their files leave to
# Python code: runs of Chinese characters stay apart from other letters.
MOONSHOT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MOONSHOT_SPECIALS = 256

# Where no merge may cross: names, signs and layout stay apart, as in Python's own grammar, which a
# small model learns sooner. A possessive quantifier keeps long runs linear.
SAMPLE_PATTERN = r" ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]|\r?\n| {4}|\s"


def load_tokenizer(name: str, sha256: str | None = None) -> Tokenizer:
    """The tokenizer called `name`; its table is checked against `sha256` if that is given.

    name    sample, a name of tiktoken's, or the path of a tokenizer.json or tiktoken.model, or of
            the folder of either.
    Raises  ValueError when there is none, it cannot be fetched, or it is another one.
    """
    if name == SAMPLE:
        tokenizer = encoding(read_ranks(SAMPLE_RANKS))
    elif is_path(name):
        tokenizer = load_file(Path(name))
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
    return name.endswith((".json", ".model")) or "/" in name or Path(name).is_dir()


def load_file(path: Path) -> Tokenizer:
    """A tokenizer.json, or else a tiktoken.model; path  of either, or of its folder."""
    if path.is_dir() and not (path / TABLE).exists() and (path / RANKS).is_file():
        path = path / RANKS
    is_ranks = path.suffix == ".model" and path.is_file()
    return TiktokenModel(path) if is_ranks else HuggingFace(path)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Of lines of base64 token, space, rank. Raises ValueError where it has others."""
    # Not read through tiktoken.load, which caches by path and would miss that the file has changed.
    try:
        lines = map(bytes.split, file.read_bytes().splitlines())
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(
            f"--tokenizer {file} has a line that is not TOKEN RANK ({error}): a SentencePiece "
            f"model is none of tiktoken's. Give a folder with a {TABLE}."
        ) from error


class TiktokenModel(tiktoken.Encoding):
    """A tiktoken.model with the tokenizer_config.json beside it, which names special tokens."""

    def __init__(self, file: Path):
        """Raises  ValueError where it has no end of text, or is of another class."""
        ranks, settings = read_ranks(file), settings_of(file.with_name(SETTINGS))
        if settings.get("tokenizer_class") != "TikTokenTokenizer":
            raise ValueError(
                f"--tokenizer {file} needs its {SETTINGS} with the tokenizer_class "
                f"TikTokenTokenizer, and has {settings.get('tokenizer_class')}: the pattern of "
                "others is not known here."
            )
        named = {int(i): t["content"] for i, t in settings.get("added_tokens_decoder", {}).items()}
        ids = range(len(ranks), len(ranks) + MOONSHOT_SPECIALS)
        names = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.special = special_of(settings, file.parent, names)
        if self.special.names.get("eos_token") not in names:
            raise ValueError(f"--tokenizer {file}: name a special eos_token in {SETTINGS}.")
        super().__init__(
            file.parent.name,
            pat_str=MOONSHOT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=names,
            explicit_n_vocab=ids.stop,
        )

    @property
    def eot_token(self) -> int:
        return self.special.ids[self.special.names["eos_token"]]


def begin_of_text(tokenizer: Tokenizer, always: bool) -> int | None:
    """The token that begins each document: as the tokenizer says, or `always`. Raises ValueError
    where it has none.
    """
    special = getattr(tokenizer, "special", None)  # tiktoken's own have none
    if always and (special is None or special.bos is None):
        raise ValueError(
            "--add-bos needs a tokenizer that names its bos_token, in tokenizer_config.json. Leave "
            "it out, or add the name."
        )
    return special.bos if special and (always or special.adds_bos) else None


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
    """
    if isinstance(tokenizer, HuggingFace):
        return hashlib.sha256(tokenizer.content).hexdigest()
    # Neither has a public reader; tiktoken's own guide to extending an encoding reads them so.
    pattern, ranks = tokenizer._pat_str, tokenizer._mergeable_ranks
    table = sorted((rank, token.hex()) for token, rank in ranks.items())
    specials = [tokenizer.special.ids] if isinstance(tokenizer, TiktokenModel) else []
    content = json.dumps([pattern, table, tokenizer.eot_token, *specials])
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
