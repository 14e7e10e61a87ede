"""What index.json says of a folder of token shards: files, checksums, how they were made."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

INDEX = "index.json"
DOCUMENT_RULE = "every document is followed by end_of_text"
BLOCK_BYTES = 1 << 22  # of a file that have a checksum of their own, so that they can be read alone
CRC_DIGITS = 8  # hexadecimal


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    bytes: int  # of the file
    crc32c: str  # of the file, 8 hexadecimal digits
    weights: "Shard | None" = None  # the file with these tokens' loss weights; None: all are 1
    blocks: str | None = None  # of the manifest's block_bytes of the file each: their crc32c


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
    block_bytes: int | None = None  # None: the shards have no blocks

    @property
    def identity(self) -> str:
        """The same for two folders exactly when they hold the same tokens of the same tokenizer,
        with the same loss weights.
        """
        files = [(f.tokens, f.crc32c) for s in self.shards for f in (s, s.weights) if f]
        content = [self.tokenizer_sha256, self.dtype, files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: str | Path) -> Manifest:
    """index.json of a folder on a disk or in a bucket.

    Raises  ValueError when it is not there or not whole; buckets.Unanswered.
    """
    path = f"{folder}/{INDEX}"
    try:
        fields = json.loads(read_index(folder))
        shards = [shard_of(shard) for shard in fields.pop("shards")]
        manifest = Manifest(shards=shards, **fields)
        check_whole(manifest)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} does not exist: {folder} is no folder of shards, or its preparation did not "
            f"end. Run {prepare_command(folder)}."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if in_bucket(folder) and isinstance(error, OSError):  # it says itself what helps
            raise
        raise ValueError(
            f"{path} cannot be read as the index of a folder of shards ({type(error).__name__}: "
            f"{error}). Run {prepare_command(folder)} --overwrite."
        ) from error
    if manifest.document_rule != DOCUMENT_RULE:
        raise ValueError(
            f"{path} has the document rule {manifest.document_rule!r}: expected {DOCUMENT_RULE!r}. "
            f"Run {prepare_command(folder)} --overwrite."
        )
    return manifest


def in_bucket(folder: str | Path) -> bool:
    return str(folder).startswith("gs://")


def read_index(folder: str | Path) -> bytes:
    if in_bucket(folder):
        from buckets import Prefix  # late: who prepares data need not wait for it

        return Prefix(str(folder)).read(INDEX)
    return (Path(folder) / INDEX).read_bytes()


def check_whole(manifest: Manifest) -> None:
    """Raises ValueError for what does not fit together."""
    shards = manifest.shards
    if manifest.tokens != sum(shard.tokens for shard in shards):
        raise ValueError("tokens is not the sum of the shards' tokens")
    weights = [shard.weights for shard in shards if shard.weights]
    whole = all(shard.weights.tokens == shard.tokens for shard in shards if shard.weights)
    if not whole or len(weights) not in (0, len(shards)):
        raise ValueError("loss weights are not of all tokens")
    size = manifest.block_bytes
    for file in (*shards, *weights):
        if (size is None) != (file.blocks is None):
            raise ValueError(f"{file.name} has blocks, or block_bytes is given, and not both")
        if size and len(file.blocks) != CRC_DIGITS * -(-file.bytes // size):
            raise ValueError(f"{file.name} has not the blocks of {file.bytes} bytes")


def shard_of(fields: dict[str, Any]) -> Shard:
    weights = fields.get("weights")
    return Shard(**(fields | {"weights": weights and Shard(**weights)}))


def prepare_command(folder: str | Path, manifest: Manifest | None = None) -> str:
    """The command that makes the folder (again)."""
    command = manifest.command if manifest else "python data/prepare.py --source python-stdlib"
    return f"{command} --out {str(folder).rpartition('/')[0] or '.'}"


def checksums(path: Path, block_bytes: int) -> tuple[str, str]:
    """CRC32C of a file, and those of its blocks one after another: 8 hexadecimal digits each."""
    crc, blocks = 0, []
    with path.open("rb") as file:
        while block := file.read(block_bytes):
            crc = google_crc32c.extend(crc, block)
            blocks.append(digits(google_crc32c.value(block)))
    return digits(crc), "".join(blocks)


def file_crc32c(path: Path) -> str:
    return checksums(path, BLOCK_BYTES)[0]


def digits(crc: int) -> str:
    return f"{crc:08x}"
