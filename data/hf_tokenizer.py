"""Read a tokenizer.json of Hugging Face: byte-level BPE, which spells each byte of a token as one
character.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders

TABLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"  # beside it, with the name of the token that ends a text
CHAT_TEMPLATE = "chat_template.jinja"  # where it is not in the settings
MODEL_SETTINGS = ("generation_config.json", "config.json")  # which may have that token's id


def byte_characters() -> list[str]:
    """The character that stands for each byte: its own where that can be seen, or else one from 256
    on, in order. Source: bytes_to_unicode of GPT-2's encoder.py.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class Special(NamedTuple):
    """Special tokens, and what the settings beside a tokenizer say of them."""

    ids: dict[str, int]  # by name
    names: dict[str, str]  # bos_token and others, as chat templates call them
    bos: int | None
    adds_bos: bool
    chat_template: str | None


def special_of(settings: dict[str, Any], folder: Path, ids: dict[str, int]) -> Special:
    """folder  of the settings."""
    given = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in given.items()}
    names = {f"{n}_token": text for n, text in texts.items() if isinstance(text, str)}
    template = settings.get("chat_template")
    if isinstance(template, list):  # of several the one called default
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (file := folder / CHAT_TEMPLATE).is_file():
        template = file.read_text()
    bos = ids.get(names.get("bos_token", ""))
    return Special(ids, names, bos, bool(settings.get("add_bos_token")), template)


def settings_of(file: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing if there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Correct it.") from None
    return found if isinstance(found, dict) else {}


class HuggingFace:
    """What this project uses of a tiktoken.Encoding, of a tokenizer.json. What looks like a special
    token in a text is text; tokens that were added without being special are found in it.
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
        self.n_vocab = 1 + max(self.table.get_vocab(with_added_tokens=True).values())
        added = self.table.get_added_tokens_decoder()
        self.added = {id: token.content for id, token in added.items()}
        ids = {token.content: id for id, token in added.items() if token.special}
        special = special_of(self.settings, self.path.parent, ids)
        bos = self.table.token_to_id(special.names.get("bos_token", ""))  # special or not
        first = self.table.encode("", add_special_tokens=True).ids[:1]
        self.special = special._replace(bos=bos, adds_bos=special.adds_bos or first == [bos])
        self.eot_token = self.end_of_text()

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
        name = self.special.names.get("eos_token")
        if name is not None:
            found = self.table.token_to_id(name)
        else:
            files = [settings_of(self.path.with_name(other)) for other in MODEL_SETTINGS]
            given = [file["eos_token_id"] for file in files if file.get("eos_token_id") is not None]
            found = [*given, None][0]
            found = found[0] if isinstance(found, list) else found
        if found is None:
            what = "names none" if name is None else f"names {name!r}, which is no token of it"
            raise ValueError(
                f"--tokenizer {self.path} has no end of text: {self.path.with_name(SETTINGS)} "
                f"{what}, and {' and '.join(MODEL_SETTINGS)} beside it have no eos_token_id. Write "
                f'{SETTINGS} with {{"eos_token": "<|endoftext|>"}}, or as its special token is '
                "called."
            )
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
