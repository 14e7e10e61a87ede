"""index.json of a folder of token shards: its files, their checksums, and how they were made."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from runtime import storage
from utils import ConfigError

INDEX = "index.json"
DOCUMENT_RULE = "every document is followed by end_of_text"
READ_BYTES = 1 << 22  # per read of a file


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    bytes: int  # of the file
    crc32c: str  # of the file, 8 hexadecimal digits
    weights: "Shard | None" = None  # file of the tokens' loss weights; None: all are 1


@dataclass(frozen=True)
class Manifest:
    """The content of index.json, which omits fields that are None."""

    subset: str  # train or val
    tokenizer: str
    tokenizer_sha256: str  # of its table: distinguishes tokenizers of the same name
    vocab_size: int
    end_of_text: int
    document_rule: str
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    shards: list[Shard]
    command: str  # that made the folder, without --out
    settings: dict[str, Any]  # everything that determines the content
    template: str | None = None  # chat template of conversations
    learned_tokens: int | None = None  # with loss weight 1, which text_bytes refers to; None: all
    begin_of_text: int | None = None  # first token of each document; None: no such token

    @property
    def identity(self) -> str:
        """Hash of tokens, loss weights and tokenizer."""
        files = [(file.tokens, file.crc32c) for file in files_of(self.shards)]
        content = [self.tokenizer_sha256, self.dtype, files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: str | Path) -> Manifest:
    """Read index.json of a folder on a disk or in a bucket.

    Raises  ConfigError if it is missing or inconsistent; storage.Unavailable.
    """
    path = f"{folder}/{INDEX}"
    try:
        fields = json.loads(storage.at(folder).read(INDEX))
        shards = [shard_of(shard) for shard in fields.pop("shards")]
        manifest = Manifest(shards=shards, **fields)
        check_consistent(manifest)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist: {folder} is not a folder of shards, or its preparation did "
            f"not finish. Run {prepare_command(folder)}."
        ) from error
    except (storage.AccessDenied, storage.Unavailable):
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read as the index of a folder of shards ({type(error).__name__}: "
            f"{error}). Run {prepare_command(folder)} --overwrite."
        ) from error
    return manifest


def check_consistent(manifest: Manifest) -> None:
    """Raise ConfigError if fields contradict each other."""
    tokens = [shard.tokens for shard in manifest.shards]
    if manifest.tokens != sum(tokens):
        raise ConfigError("tokens is not the sum of the shards' tokens")
    weighted = [shard.weights.tokens for shard in manifest.shards if shard.weights]
    if weighted and weighted != tokens:
        raise ConfigError("loss weights do not cover all tokens")


def shard_of(fields: dict[str, Any]) -> Shard:
    weights = fields.get("weights")
    return Shard(**(fields | {"weights": weights and shard_of(weights)}))


def prepare_command(folder: str | Path, manifest: Manifest | None = None) -> str:
    """Return the command that prepares the folder."""
    command = manifest.command if manifest else "python data/prepare.py --source python-stdlib"
    return f"{command} --out {str(folder).rpartition('/')[0] or '.'}"


def file_crc32c(folder: storage.Folder, name: str) -> str:
    """Return the CRC32C of a file as 8 hexadecimal digits."""
    crc = 0
    with folder.translated_errors(name), folder.open_file(name) as file:
        while content := file.read(READ_BYTES):
            crc = google_crc32c.extend(crc, content)
    return f"{crc:08x}"


def files_of(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield all files of shards: two per shard with loss weights."""
    return (file for shard in shards for file in (shard, shard.weights) if file)


def index_text(manifest: Manifest) -> str:
    """Return the content of index.json."""
    fields = dataclasses.asdict(
        manifest, dict_factory=lambda items: {k: v for k, v in items if v is not None}
    )
    return json.dumps(fields, indent=1) + "\n"
