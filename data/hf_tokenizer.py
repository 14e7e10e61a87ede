"""Tokenizers of Hugging Face: a tiktoken encoding written as their files, and such files read.

Byte-level BPE in both directions: `tokenizer.json` spells each byte of a token as one character.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

TABLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"  # beside it, with the name of the token that ends a text
CHAT_TEMPLATE = "chat_template.jinja"  # where it is not in the settings
MODEL_SETTINGS = ("generation_config.json", "config.json")  # which may have that token's id


def byte_characters() -> list[str]:
    """The character that stands for each byte: its own where that can be seen, or else one from 256
    on, in order.

    Source: bytes_to_unicode of GPT-2's encoder.py.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()
BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def spelled(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


# --- written --------------------------------------------------------------------------------------


def write_hugging_face(
    tokenizer: "tiktoken.Encoding | HuggingFace", folder: Path, model_max_length: int
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


# --- read -----------------------------------------------------------------------------------------


class HuggingFace:
    """What this project uses of a tiktoken.Encoding, of a `tokenizer.json`.

    What looks like a special token in a text is text; tokens that were added without being special
    are found in it.
    """

    def __init__(self, path: Path):
        """path    the file, or the folder that has it; beside it lies what names the end of a text.
        Raises  ValueError where it is missing, is no byte-level tokenizer, or no end is named.
        """
        self.path = path / TABLE if path.is_dir() else path
        try:
            self.content = self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"--tokenizer {path}: {self.path} cannot be read ({error.strerror}). Give a "
                f"{TABLE} of Hugging Face or the folder that holds one; data and checkpoints that "
                "name it need the same file in the same place."
            ) from None
        self.table = opened(self.content, self.path)
        self.settings = settings_of(self.path.with_name(SETTINGS))
        self.added = {i: t.content for i, t in self.table.get_added_tokens_decoder().items()}
        self.n_vocab = 1 + max(self.table.get_vocab(with_added_tokens=True).values())
        self.eot_token = self.end_of_text()
        decoder = self.table.get_added_tokens_decoder()
        self.special_ids = {t.content: i for i, t in decoder.items() if t.special}
        self.special_names = token_names(self.settings)
        self.chat_template = chat_template(self.settings, self.path.parent)
        first = self.table.encode("", add_special_tokens=True).ids[:1]
        self.bos_token = self.table.token_to_id(self.special_names.get("bos_token", ""))
        self.adds_bos = bool(self.settings.get("add_bos_token")) or first == [self.bos_token]

    @property
    def sha256(self) -> str:
        """As sha256sum prints it of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            return self.table.encode(text, add_special_tokens=False).ids
        except TypeError:  # of half a surrogate pair, which tiktoken replaces so
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self.encode_ordinary(whole)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Raises  KeyError for an id that is no token."""
        if token in self.added:
            return self.added[token].encode()
        spelling = self.table.id_to_token(token) if token >= 0 else None
        if spelling is None:
            raise KeyError(f"no token has the id {token}")
        if set(spelling) <= BYTES.keys():
            return bytes(BYTES[character] for character in spelling)
        return spelling.encode()

    def decode(self, tokens: Sequence[int]) -> str:
        text = b"".join(map(self.decode_single_token_bytes, tokens))
        return text.decode("utf-8", "replace")

    def end_of_text(self) -> int:
        """The id of SETTINGS' eos_token, or else what MODEL_SETTINGS say."""
        named = self.settings.get("eos_token")
        name = named.get("content") if isinstance(named, dict) else named
        if name is not None:
            found = self.table.token_to_id(name)
        else:
            files = [settings_of(self.path.with_name(other)) for other in MODEL_SETTINGS]
            given = [file["eos_token_id"] for file in files if file.get("eos_token_id") is not None]
            first = given[0] if given else None
            found = first[0] if isinstance(first, list) else first
        if found is None:
            what = "names none" if name is None else f"names {name!r}, which is no token of it"
            raise ValueError(
                f"--tokenizer {self.path} has no end of text: {self.path.with_name(SETTINGS)} "
                f"{what}, and {' and '.join(MODEL_SETTINGS)} beside it have no eos_token_id. Write "
                f"{SETTINGS} with {self.an_end()}."
            )
        return found

    def an_end(self) -> str:
        """What SETTINGS should say, with a special token as the example, if possible of the end."""
        names = sorted(self.added.values(), key=lambda name: "end" not in name)
        return json.dumps({"eos_token": (names or ["<|endoftext|>"])[0]}, ensure_ascii=False)


def token_names(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token and others, as templates call them."""
    found = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    named = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {f"{name}_token": value for name, value in named.items() if isinstance(value, str)}


def chat_template(settings: dict[str, Any], folder: Path) -> str | None:
    """Of the settings, or of the file beside them; of several the one called default."""
    if (file := folder / CHAT_TEMPLATE).is_file():
        return file.read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def opened(content: bytes, path: Path) -> Tokenizer:
    """Raises  ValueError for what is no tokenizer, or not one of bytes."""
    try:
        table = Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(
            f"--tokenizer {path} is no {TABLE} of Hugging Face ({error}). Give one that its own "
            "library opens."
        ) from None
    if not isinstance(table.decoder, decoders.ByteLevel):
        raise ValueError(
            f"--tokenizer {path} is not byte-level (its decoder is {table.decoder}), so single "
            "tokens have no text of their own. Use one of the kind of GPT-2, Llama 3, Qwen or "
            "DeepSeek."
        )
    table.no_truncation()
    table.no_padding()
    table.encode_special_tokens = True  # as the text that they are
    return table


def settings_of(file: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing if there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Correct it.") from None
    return found if isinstance(found, dict) else {}
