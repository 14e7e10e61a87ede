"""The settings of a preparation, and the rule that selects documents for validation."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from utils import ConfigError, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Documents to read, and which of them are for training."""

    source: str  # python-stdlib, a file or folder, gs://..., or hf:NAME of a data set of the hub
    val_share: float = setting(0.05, at_most=1)  # share of the documents for validation
    glob: str = "**/*"  # files of a folder to read; hidden files are never read
    kind: Annotated[Literal["auto", "text"], tyro.conf.arg(name="as")] = "auto"  # or text for all
    text_field: str = "text"  # field with a row's text; data.text is field text of field data
    hf_name: str = ""  # configuration of the data set of the hub; empty: its default
    hf_split: str = "train"  # split of the data set of the hub
    skip_bad: bool = False  # leave out and count files and rows that are damaged or have no text


@dataclass(frozen=True, kw_only=True)
class Prepare(SourceFlags):
    """Convert text to token shards for training and validation.

    What is free does not affect the result.
    """

    # folder to write train/ and val/ into, or gs://bucket/folder
    out: str = setting(resume="free")
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or a folder with a tokenizer's files
    shard_tokens: int = 25_000_000  # maximum per shard; a process holds one shard in memory
    # of the source per split, which one process tokenizes
    split_mb: float = setting(64.0, at_least=1e-6)
    max_tokens: int = 0  # stop after the document that reaches this many; 0: no limit
    # processes; 0: one per core that this process may use
    workers: int = setting(0, resume="free")
    # run on a Ray cluster instead: HOST:PORT of its head, or local
    ray: str = setting("", resume="free")
    chat: bool = False  # rows are conversations; only their answers are learned
    chat_template: Literal["plain", "tokenizer"] = "plain"  # tokenizer: its own template
    # with --chat: pad each conversation to a multiple of this, the --train.seq_len; 0: no padding
    row_tokens: int = 0
    add_bos: bool = False  # begin documents with BOS even if the tokenizer does not say so
    # remove an earlier preparation in OUT and start over
    overwrite: bool = setting(False, resume="free")


NOT_CONTENT = tuple(name for name, own in settings_of(Prepare).items() if own.resume == "free")


def check(config: Prepare) -> None:
    """Raise ConfigError for settings that do not go together."""
    if config.row_tokens and not config.chat:
        raise ConfigError("--row-tokens pads conversations. Add --chat, or omit --row-tokens.")
    if config.out.startswith("gs:") and not config.out.removeprefix("gs://").strip("/").count("/"):
        raise ConfigError(f"--out {config.out} names no folder of a bucket. Use gs://bucket/books.")


VALIDATION_RULE = (
    "a document is for validation if the first 8 bytes of the SHA-256 of 'file name:position in "
    "it', as a share of 2**64, are below val_share; if that leaves less than half of either "
    "subset's share, the last tokens are for validation"
)


def in_validation(name: str, position: int, share: float) -> bool:
    """Return whether VALIDATION_RULE selects the document at this position of a file."""
    digest = hashlib.sha256(f"{name}:{position}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
