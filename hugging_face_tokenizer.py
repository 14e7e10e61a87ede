"""A tokenizer as Hugging Face's files, for an export: byte-level BPE with the ids of tiktoken."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from data.hf_tokenizer import BYTES, SETTINGS, TABLE, HuggingFace

CHARACTERS = {byte: character for character, byte in BYTES.items()}


def spelled(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


def write_hugging_face(
    tokenizer: tiktoken.Encoding | HuggingFace, folder: Path, model_max_length: int
) -> None:
    """Writes files with which AutoTokenizer.from_pretrained(folder) gives the ids that
    `encode_ordinary` gives: what looks like a special token in a text is text there as well, unless
    split_special_tokens=False is asked for.

    One that was read from such files is copied, with the settings that lay beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.decode([tokenizer.eot_token]),
    }
    if isinstance(tokenizer, HuggingFace):
        (folder / TABLE).write_bytes(tokenizer.content)
        settings |= tokenizer.settings
    else:
        table_of(tokenizer).save(str(folder / TABLE))
        settings["split_special_tokens"] = True
        settings["pad_token"] = settings["eos_token"]  # there is no other, and batches need one
    settings["model_max_length"] = model_max_length
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def table_of(tokenizer: tiktoken.Encoding) -> Tokenizer:
    """The same tokens, merges and cuts, and the same ids, with holes where there were any."""
    # No public reader; tiktoken's own guide to extending an encoding reads them so.
    ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
    names = {id: name for name, id in reversed(special.items())}  # the first of two for one id
    # Special tokens are among the others: apart from them they would be numbered anew, in a row.
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    vocabulary |= {name: id for id, name in names.items()}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges(ranks), ignore_merges=True))
    pieces = Regex(for_oniguruma(tokenizer._pat_str))
    # What the pattern does not match is left out, as tiktoken does.
    cut = pre_tokenizers.Split(pieces, "removed", invert=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(names[id], normalized=False) for id in sorted(names)])
    return found


def merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The two tokens that each token is joined from, in order of rank.

    A token has one pair, that of its bytes alone: what is around it has no part in the merges
    inside. One that no merges lead to has none, and is found where it is a whole piece of text
    (`ignore_merges`).
    """
    parts = (halves(ranks, token) for token in sorted(ranks, key=ranks.__getitem__))
    return [(spelled(found[0]), spelled(found[1])) for found in parts if len(found) == 2]


def halves(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """A token's bytes, joined as in any text until two are left, or no pair is a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == math.inf:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken's with the same matches in Oniguruma, which Hugging Face uses.

    There $ also matches before a line break, and {1,3}+ repeats instead of keeping what it has.
    """
    end, atom, count = r"(?P<end>\$)", r"(\\p\{\w+\}|\\.|\[(?:\\.|[^\]])+\]|.)", r"(\{[\d,]+\})"
    # A group that is counted so has no place in any encoding.
    assert not re.search(rf"(?<!\\)\){count}\+", pattern)
    found = re.sub(f"{atom}{count}\\+", r"(?>\1\2)", pattern)
    return re.sub(rf"{end}|{atom}", lambda m: r"\z" if m["end"] else m[0], found)
