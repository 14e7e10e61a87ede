"""Read tokenizer.json of Hugging Face: byte-level BPE, or SentencePiece's with bytes as fallback.

The first spells each byte as one character. The second spells a space as SPACE, puts one before
a text, and spells bytes of characters that it does not know as <0x00> to <0xFF>.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, pre_tokenizers

from runtime.storage import check_not_pointer
from utils import ConfigError

TABLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"  # beside it; names the end-of-text token
SPECIAL_NAMES = "special_tokens_map.json"  # names of special tokens that SETTINGS lacks
CHAT_TEMPLATE = "chat_template.jinja"  # if it is not in the settings
MODEL_SETTINGS = ("generation_config.json", "config.json")  # ids of the tokens that end a text
SETTINGS_FILES = (SETTINGS, SPECIAL_NAMES, CHAT_TEMPLATE, *MODEL_SETTINGS)


# The byte that each character spells: its own number if that is below 256, else the next of those
# that no character has, as in bytes_to_unicode of GPT-2's encoder.py.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_OTHERS = sorted({*range(256)} - {*map(ord, _ALPHABET)})
BYTES = dict(zip(_ALPHABET, [*(ord(c) for c in _ALPHABET if ord(c) < 256), *_OTHERS], strict=True))
SPACE = "\u2581"
FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class Special(NamedTuple):
    """Special tokens, and the settings that refer to them."""

    ids: dict[str, int]  # by name
    names: dict[str, str]  # bos_token and others, as chat templates call them
    bos: int | None
    adds_bos: bool
    chat_template: str | None
    ends: list[int]  # tokens that end a generated text, such as the end of a turn; may be empty


def read_special(settings: dict[str, Any], folder: Path, ids: dict[str, int]) -> Special:
    given = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in given.items()}
    names = {f"{n}_token": text for n, text in texts.items() if isinstance(text, str)}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (file := folder / CHAT_TEMPLATE).is_file():
        template = file.read_text(encoding="utf-8")
    bos = ids.get(names.get("bos_token", ""))
    ends = (read_settings(folder / name).get("eos_token_id") for name in MODEL_SETTINGS)
    end_ids = next((end for end in ends if end is not None), [])
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return Special(ids, names, bos, bool(settings.get("add_bos_token")), template, end_ids)


def read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, empty if the file does not exist."""
    if not file.is_file():
        return {}
    check_not_pointer(file)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}). Correct it.") from None
    return settings if isinstance(settings, dict) else {}


class HuggingFace:
    """A tokenizer.json with the interface of tiktoken.Encoding that this project uses.

    Special tokens in a text are encoded as text; added tokens that are not special are recognized.
    """

    def __init__(self, path: Path):
        """path  the file or its folder, which also has the settings.

        Raises  ConfigError if it is missing, of another kind, or has no end-of-text token.
        """
        self.path = path / TABLE if path.is_dir() else path
        try:
            self.content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"--tokenizer {path}: {self.path} cannot be read ({error.strerror}). Use a "
                f"{TABLE} of Hugging Face or its folder; data and checkpoints that name it need "
                "the same file in the same place."
            ) from None
        self.table = open_table(self.content, self.path)
        parts = json.loads(self.table.to_str())
        self.is_byte_level = check_decoder(parts["decoder"] or {}, self.path)
        # `inner` puts no space before a text. Some put one after a special token too.
        first = {name: parts[name] for name in ("normalizer", "pre_tokenizer")}
        self.inner = self.table
        if (other := without_prefix(first)) != first:
            self.inner = open_table(json.dumps(parts | other).encode(), self.path)
        always = ('"Prepend"', '"always"', '"add_prefix_space": true')
        self.prefix_after_special = any(words in json.dumps(first) for words in always)
        settings = read_settings(self.path.with_name(SETTINGS))
        given = {name: value for name, value in settings.items() if value is not None}
        self.settings = read_settings(self.path.with_name(SPECIAL_NAMES)) | given
        self.added = self.table.get_added_tokens_decoder()
        # 1 + the largest id that text may have: special tokens in it are text, and others may exist
        # that a model has no embeddings for.
        texts = [id for id, token in self.added.items() if not token.special]
        self.text_vocab = 1 + max(*self.table.get_vocab(with_added_tokens=False).values(), *texts)
        self.n_vocab = 1 + max(self.table.get_vocab(with_added_tokens=True).values())
        ids = {token.content: id for id, token in self.added.items() if token.special}
        special = read_special(self.settings, self.path.parent, ids)
        bos = self.table.token_to_id(special.names.get("bos_token", ""))  # special or not
        adds_bos = self.table.encode("", add_special_tokens=True).ids[:1] == [bos]
        self.special = special._replace(bos=bos, adds_bos=special.adds_bos or adds_bos)
        self.eot_token = self.end_of_text()

    def encode_ordinary(self, text: str) -> list[int]:
        return encode(self.table, text)

    def encode_continuation(self, text: str, after_special: bool) -> list[int]:
        """Encode text that follows other text, or a special token."""
        has_prefix = after_special and self.prefix_after_special
        return encode(self.table if has_prefix else self.inner, text)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Raises KeyError for an id without a token."""
        if token in self.added:
            return self.added[token].content.encode()
        spelling = self.table.id_to_token(token) if token >= 0 else None
        if spelling is None:
            raise KeyError(f"no token has the id {token}")
        if not self.is_byte_level:
            byte = FALLBACK.fullmatch(spelling)
            return bytes.fromhex(byte[1]) if byte else spelling.replace(SPACE, " ").encode()
        if set(spelling) <= BYTES.keys():
            return bytes(BYTES[character] for character in spelling)
        return spelling.encode()

    def end_of_text(self) -> int:
        """Return the id of SETTINGS' eos_token, or else of MODEL_SETTINGS' eos_token_id."""
        name = self.special.names.get("eos_token")
        end = self.table.token_to_id(name) if name else next(iter(self.special.ends), None)
        if end is None:
            raise ConfigError(
                f"--tokenizer {self.path} has no end of text: {SETTINGS} beside it has the "
                f"eos_token {name}, which is not a token, and {' and '.join(MODEL_SETTINGS)} give "
                f'no eos_token_id in its place. Write {SETTINGS} with {{"eos_token": '
                '"<|endoftext|>"}, or the name of its token.'
            )
        return end


def open_table(content: bytes, path: Path) -> Tokenizer:
    """Raises ConfigError for malformed content."""
    check_not_pointer(path, content)
    try:
        table = Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(
            f"--tokenizer {path} is not a {TABLE} of Hugging Face ({error}). Use one that the "
            "tokenizers library opens."
        ) from None
    table.no_truncation()
    table.no_padding()
    table.encode_special_tokens = True  # as text
    return table


def encode(table: Tokenizer, text: str) -> list[int]:
    try:
        return table.encode(text, add_special_tokens=False).ids
    except TypeError:  # half a surrogate pair; replace it as tiktoken does
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return encode(table, whole)


def check_decoder(decoder: dict[str, Any], path: Path) -> bool:
    """Return whether it is byte-level. Raises ConfigError if single tokens have no bytes."""
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    if kinds == {"ByteLevel"}:
        return True
    if "ByteFallback" in kinds and kinds & {"Replace", "Metaspace"}:
        return False
    raise ConfigError(
        f"--tokenizer {path} is neither byte-level nor SentencePiece's with byte fallback (its "
        f"decoder is {decoder or None}), so single tokens have no bytes. Use a tokenizer like that "
        "of GPT-2, Llama, Qwen, Mistral or DeepSeek."
    )


def without_prefix(part: Any) -> Any:
    """Return a part of a tokenizer.json that puts no space before a text."""
    if isinstance(part, list):
        kept = (p for p in part if not (isinstance(p, dict) and p.get("type") == "Prepend"))
        return [without_prefix(p) for p in kept]
    if not isinstance(part, dict):
        return part
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never.get(name, without_prefix(value)) for name, value in part.items()}
