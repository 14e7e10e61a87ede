"""Load tokenizers by name or path.

Names are `sample`, whose ranks are beside this file, and those of tiktoken. Paths are those of a
tokenizer.json of Hugging Face, or of a tiktoken.model as in Kimi-K2 and Moonlight.
"""

import base64
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken

from data.hf_tokenizer import (
    SETTINGS,
    SETTINGS_FILES,
    TABLE,
    HuggingFace,
    Special,
    encode,
    open_table,
    read_settings,
    read_special,
)
from utils import ConfigError

Tokenizer = tiktoken.Encoding | HuggingFace
NO_SPECIAL = Special({}, {}, None, adds_bos=False, chat_template=None, ends=[])

SAMPLE = "sample"
# Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) of 256 bytes and 3,839 merges, trained by
# the library tokenizers on the training files of python-stdlib, as guide/tokenization.md shows.
SAMPLE_RANKS = Path(__file__).with_name("sample.tiktoken")
END_OF_TEXT = "<|endoftext|>"

RANKS = "tiktoken.model"
# Pattern and number of special tokens of Moonshot's models, which their files leave to Python code.
# Runs of Chinese characters stay apart from other letters.
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

# Merges stay within a match. Names, signs and layout are separate, as in Python's grammar, so a
# small model learns faster. The possessive quantifier makes long runs take linear time.
SAMPLE_PATTERN = r" ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]|\r?\n| {4}|\s"


def load_tokenizer(name: str, sha256: str | None = None) -> Tokenizer:
    """Load a tokenizer, and compare its table with `sha256` if that is given.

    name    sample, a name of tiktoken's, or the path of a tokenizer.json or tiktoken.model, or of
            the folder of either.
    Raises  ConfigError if it does not exist, cannot be downloaded, or has another table.
    """
    if name == SAMPLE:
        tokenizer = encoding(read_ranks(SAMPLE_RANKS))
    elif is_path(name):
        file = table_file(Path(name))
        is_ranks = file.suffix == ".model" and file.is_file()
        tokenizer = TiktokenModel(file) if is_ranks else HuggingFace(file)
    else:
        tokenizer = load_tiktoken(name)
    actual = table_sha256(tokenizer)
    if sha256 is not None and actual != sha256:
        raise ConfigError(
            f"tokenizer {name} here has the table sha256 {actual}, and the data was made with "
            f"{sha256}. Use the code, or the file, that the data was made with, or prepare the "
            f"data again with data/prepare.py --tokenizer {name} --overwrite."
        )
    return tokenizer


def is_path(name: str) -> bool:
    """Return whether a name is a path, which may not exist. tiktoken's names are not paths."""
    if name in tiktoken.list_encoding_names():
        return False
    return name.endswith((".json", ".model")) or "/" in name or Path(name).is_dir()


def table_file(path: Path) -> Path:
    """Return the path of a file, or the tokenizer.json or else tiktoken.model of a folder."""
    names = (TABLE, RANKS) if path.is_dir() else ()
    return next((path / name for name in names if (path / name).is_file()), path)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Parse lines of base64 token, space, rank. Raises ConfigError for other lines."""
    # tiktoken.load would cache by path, and miss changes of the file.
    try:
        lines = map(bytes.split, file.read_bytes().splitlines())
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ConfigError(
            f"--tokenizer {file} has a line that is not TOKEN RANK ({error}), as in a "
            f"SentencePiece model. Use a folder with a {TABLE}."
        ) from error


class TiktokenModel(tiktoken.Encoding):
    """A tiktoken.model, with the special tokens of the tokenizer_config.json beside it."""

    def __init__(self, file: Path):
        """Raises ConfigError if it has no end-of-text token, or is of another class."""
        ranks, settings = read_ranks(file), read_settings(file.with_name(SETTINGS))
        named = {int(i): t["content"] for i, t in settings.get("added_tokens_decoder", {}).items()}
        ids = range(len(ranks), len(ranks) + MOONSHOT_SPECIALS)
        names = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.special = read_special(settings, file.parent, names)
        kind, eos = settings.get("tokenizer_class"), self.special.names.get("eos_token")
        if kind != "TikTokenTokenizer" or eos not in names:
            raise ConfigError(
                f"--tokenizer {file} needs its {SETTINGS} with the tokenizer_class "
                "TikTokenTokenizer, as the pattern of others is unknown, and a special eos_token. "
                f"It has {kind} and {eos}. Use a folder with a {TABLE}."
            )
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


def special_of(tokenizer: Tokenizer) -> Special:
    """Return the special tokens that the files of a tokenizer name; tiktoken's own have none."""
    return getattr(tokenizer, "special", NO_SPECIAL)


def begin_of_text(tokenizer: Tokenizer, always: bool) -> int | None:
    """Return the token that begins each document, if the tokenizer says so or `always`.

    Raises  ConfigError with `always` if there is no such token.
    """
    special = special_of(tokenizer)
    if always and special.bos is None:
        raise ConfigError(
            "--add-bos needs a tokenizer that names its bos_token in tokenizer_config.json. Add "
            "the name, or omit --add-bos."
        )
    return special.bos if always or special.adds_bos else None


def encoding(table: dict[bytes, int]) -> tiktoken.Encoding:
    """Return the sample tokenizer with this table; end of text is the id after the last rank."""
    return tiktoken.Encoding(
        SAMPLE,
        pat_str=SAMPLE_PATTERN,
        mergeable_ranks=table,
        special_tokens={END_OF_TEXT: len(table)},
        explicit_n_vocab=len(table) + 1,
    )


def load_tiktoken(name: str) -> tiktoken.Encoding:
    """Load an encoding of tiktoken, which downloads its table at the first use."""
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise ConfigError(
            f"--tokenizer {name} is unknown: expected {SAMPLE}, the path of a {TABLE} or of its "
            f"folder, or a name of tiktoken's, one of {', '.join(names)}. Use --tokenizer {SAMPLE}."
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # requests' errors are among these
        raise ConfigError(
            f"--tokenizer {name} could not be downloaded ({type(error).__name__}), and tiktoken's "
            "cache does not have it. Connect to the network once, set TIKTOKEN_CACHE_DIR to a "
            f"folder that has it, or use --tokenizer {SAMPLE}, which needs no network."
        ) from error


def table_sha256(tokenizer: Tokenizer) -> str:
    """Return the sha256 of tokenizer.json, or else of pattern, tokens by rank and end of text."""
    if isinstance(tokenizer, HuggingFace):
        return hashlib.sha256(tokenizer.content).hexdigest()
    # tiktoken has no public access to these; its guide to extending an encoding reads them so.
    pattern, ranks = tokenizer._pat_str, tokenizer._mergeable_ranks
    table = sorted((rank, token.hex()) for token, rank in ranks.items())
    specials = [tokenizer.special.ids] if isinstance(tokenizer, TiktokenModel) else []
    content = json.dumps([pattern, table, tokenizer.eot_token, *specials])
    return hashlib.sha256(content.encode()).hexdigest()


def encode_continuation(tokenizer: Tokenizer, text: str, after_special: bool = False) -> list[int]:
    """Encode text that follows other text, before which SentencePiece puts no space."""
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.encode_continuation(text, after_special)
    return tokenizer.encode_ordinary(text)


def encode_special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text in which names of special tokens are these tokens."""
    if not isinstance(tokenizer, HuggingFace):
        return tokenizer.encode(text, allowed_special="all")
    table = open_table(tokenizer.content, tokenizer.path)
    table.encode_special_tokens = False
    return encode(table, text)


def check_ids(texts: Iterable[Iterable[int]], vocab_size: int) -> None:
    """Raise ConfigError for an id that a model with so many ids has no embedding for."""
    if (largest := max(itertools.chain.from_iterable(texts), default=0)) >= vocab_size:
        raise ConfigError(
            f"the text has a token of id {largest}, and the model has embeddings of ids below "
            f"{vocab_size} (--model.vocab_size): its tokenizer has more tokens. Change the text."
        )


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token; none for an id without a token, like vocabulary padding."""
    try:
        return tokenizer.decode_single_token_bytes(token) if token >= 0 else b""
    except KeyError:
        return b""


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, ignoring those without a token."""
    return b"".join(token_bytes(tokenizer, i) for i in ids).decode("utf-8", "replace")


# --- the tokenizer of a run -----------------------------------------------------------------------


class TextTokens(NamedTuple):
    """The tokenizer of a run, and the tokens that begin and end its texts."""

    tokenizer: Tokenizer
    begin: list[int]  # of each document; empty or one
    ends: list[int]  # the end of text, and others that a generated text ends with


def keep_files(name: str, folder: Path) -> None:
    """Copy the files of a tokenizer that is named by a path to a folder of a run, once."""
    if not is_path(name) or not Path(name).exists() or folder.exists():
        return
    table, part = table_file(Path(name)), folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copy(table, part / (RANKS if table.suffix == ".model" else TABLE))
    for setting in SETTINGS_FILES:
        if (table.parent / setting).is_file():
            shutil.copy(table.parent / setting, part)
    part.rename(folder)


def text_tokens(tokens: dict[str, Any], run: Any) -> TextTokens:
    """Return the tokenizer of a run (runtime.run_directory.RunDirectory).

    tokens  of a checkpoint's config
    """
    if not tokens["tokenizer"]:
        raise ConfigError(
            f"run {run.name} has no tokenizer: the folder it was imported from had no {TABLE} or "
            f"{RANKS}. Put one there and import it again."
        )
    tokenizer = load_tokenizer(run.tokenizer(tokens["tokenizer"]), tokens["tokenizer_sha256"])
    ends = [tokens["end_of_text"], *special_of(tokenizer).ends]
    return TextTokens(tokenizer, tokens.get("begin_of_text", []), list(dict.fromkeys(ends)))
