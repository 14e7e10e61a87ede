"""Export of a tokenizer to Hugging Face's files: byte-level BPE with the ids of tiktoken."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Table

from data.chat import PLAIN, PLAIN_JINJA
from data.hf_tokenizer import BYTES, SETTINGS, TABLE, HuggingFace
from data.tokenizer import Tokenizer, special_of, text_of

CHARACTERS = {byte: character for character, byte in BYTES.items()}


def as_characters(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


def write_hugging_face(
    tokenizer: Tokenizer, folder: Path, model_max_length: int, chat_template: str | None = None
) -> bool:
    """Write files for AutoTokenizer.from_pretrained that give the ids of `encode_ordinary`.

    Return whether they have a chat template.

    Special tokens in a text are encoded as text, unless the caller passes
    split_special_tokens=False. A tokenizer of Hugging Face is copied with its settings.

    chat_template  that the model was tuned with, as a Manifest has it; else the tokenizer's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": text_of(tokenizer, [tokenizer.eot_token]),
    }
    if isinstance(tokenizer, HuggingFace):
        (folder / TABLE).write_bytes(tokenizer.content)
        settings |= tokenizer.settings
    else:
        to_hugging_face(tokenizer).save(str(folder / TABLE))
        settings["split_special_tokens"] = True
        settings["pad_token"] = settings["eos_token"]  # batches need one, and there is no other
    special = special_of(tokenizer)
    settings = special.names | settings
    if special.chat_template:
        settings.setdefault("chat_template", special.chat_template)
    if chat_template:
        settings["chat_template"] = PLAIN_JINJA if chat_template == PLAIN else chat_template
    settings["model_max_length"] = model_max_length
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / SETTINGS).write_text(text, encoding="utf-8")
    return "chat_template" in settings


def to_hugging_face(tokenizer: tiktoken.Encoding) -> Table:
    """Return a tokenizer with the same tokens, merges, pre-tokenization and ids."""
    # Private, but tiktoken's documentation uses them to extend an encoding.
    ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
    names = {id: name for name, id in reversed(special.items())}  # the first of two for one id
    # Special tokens are in the vocabulary too: otherwise they would get new, consecutive ids.
    vocabulary = {as_characters(token): rank for token, rank in ranks.items()}
    vocabulary |= {name: id for id, name in names.items()}
    table = Table(models.BPE(vocab=vocabulary, merges=merges(ranks), ignore_merges=True))
    pieces = Regex(for_oniguruma(tokenizer._pat_str))
    # Text that the pattern does not match is dropped, as in tiktoken.
    cut = pre_tokenizers.Split(pieces, "removed", invert=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    table.decoder = decoders.ByteLevel()
    table.add_special_tokens([AddedToken(names[id], normalized=False) for id in sorted(names)])
    return table


def merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return the pair of tokens that each token is merged from, in order of rank.

    The pair depends on the token's bytes alone. A token that no merges lead to has none; it is
    found where it is a whole pre-token (`ignore_merges`).
    """
    parts = (split_token(ranks, token) for token in sorted(ranks, key=ranks.__getitem__))
    return [tuple(map(as_characters, pair)) for pair in parts if len(pair) == 2]


def split_token(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """Merge a token's bytes until two parts are left, or no pair is a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == math.inf:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def for_oniguruma(pattern: str) -> str:
    """Convert a tiktoken pattern to Oniguruma, which Hugging Face uses, with the same matches.

    In Oniguruma $ also matches before a line break, and {1,3}+ is a repetition, not possessive.
    """
    end, atom, count = r"(?P<end>\$)", r"(\\p\{\w+\}|\\.|\[(?:\\.|[^\]])+\]|.)", r"(\{[\d,]+\})"
    # No encoding has a group with a possessive count.
    assert not re.search(rf"(?<!\\)\){count}\+", pattern)
    converted = re.sub(f"{atom}{count}\\+", r"(?>\1\2)", pattern)
    return re.sub(rf"{end}|{atom}", lambda m: r"\z" if m["end"] else m[0], converted)
