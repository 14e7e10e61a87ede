"""What index.json says of a folder of token shards: files, checksums, how they were made."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from buckets import Prefix, is_bucket

INDEX = "index.json"
DOCUMENT_RULE = "every document is followed by end_of_text"
READ_BYTES = 1 << 22  # of a file at a time


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    bytes: int  # of the file
    crc32c: str  # of the file, 8 hexadecimal digits
    weights: "Shard | None" = None  # the file with these tokens' loss weights; None: all are 1


@dataclass(frozen=True)
class Manifest:
    """What index.json says."""

    split: str
    tokenizer: str
    tokenizer_sha256: str  # of its table: two tokenizers of one name that differ are told apart
    vocabulary: int
    end_of_text: int
    document_rule: str
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    shards: list[Shard]
    command: str  # that made it, without --out
    settings: dict[str, Any]  # all that decides its content
    template: str | None = None  # that made text of conversations
    learned_tokens: int | None = None  # with loss weight 1; None: all. text_bytes are theirs
    begin_of_text: int | None = None  # that begins each document; None: nothing does

    @property
    def identity(self) -> str:
        """The same for two folders with the same tokens, loss weights and tokenizer."""
        files = [(file.tokens, file.crc32c) for file in files_of(self.shards)]
        content = [self.tokenizer_sha256, self.dtype, files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: str | Path) -> Manifest:
    """index.json of a folder on a disk or in a bucket.

    Raises  ValueError when it is not there or not complete; buckets.Unanswered.
    """
    path = f"{folder}/{INDEX}"
    try:
        if is_bucket(folder):
            content = Prefix(str(folder)).read(INDEX)
        else:
            content = (Path(folder) / INDEX).read_bytes()
        fields = json.loads(content)
        shards = [shard_of(shard) for shard in fields.pop("shards")]
        manifest = Manifest(shards=shards, **fields)
        check_complete(manifest)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} does not exist: {folder} is no folder of shards, or its preparation did not "
            f"end. Run {prepare_command(folder)}."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if is_bucket(folder) and isinstance(error, OSError):  # its message has the fix
            raise
        raise ValueError(
            f"{path} cannot be read as the index of a folder of shards ({type(error).__name__}: "
            f"{error}). Run {prepare_command(folder)} --overwrite."
        ) from error
    return manifest


def check_complete(manifest: Manifest) -> None:
    """Raises ValueError for what does not fit together."""
    if manifest.document_rule != DOCUMENT_RULE:
        raise ValueError(f"document_rule is {manifest.document_rule!r}, not {DOCUMENT_RULE!r}")
    shards = manifest.shards
    if manifest.tokens != sum(shard.tokens for shard in shards):
        raise ValueError("tokens is not the sum of the shards' tokens")
    if any(shard.weights for shard in shards) and not all(
        shard.weights and shard.weights.tokens == shard.tokens for shard in shards
    ):
        raise ValueError("loss weights are not of all tokens")


def shard_of(fields: dict[str, Any]) -> Shard:
    weights = fields.get("weights")
    return Shard(**(fields | {"weights": weights and shard_of(weights)}))


def prepare_command(folder: str | Path, manifest: Manifest | None = None) -> str:
    """The command that makes the folder (again)."""
    command = manifest.command if manifest else "python data/prepare.py --source python-stdlib"
    return f"{command} --out {str(folder).rpartition('/')[0] or '.'}"


def file_crc32c(path: Path) -> str:
    """CRC32C of a file, 8 hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            crc = google_crc32c.extend(crc, content)
    return f"{crc:08x}"


def files_of(shards: Iterable[Shard]) -> Iterator[Shard]:
    """All files of shards: with loss weights each has two."""
    return (file for shard in shards for file in (shard, shard.weights) if file)


def index_text(manifest: Manifest) -> str:
    """What index.json says, without what is None."""
    fields = dataclasses.asdict(
        manifest, dict_factory=lambda items: {k: v for k, v in items if v is not None}
    )
    return json.dumps(fields, indent=1) + "\n"
