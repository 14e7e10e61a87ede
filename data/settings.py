"""The settings of a preparation, and the rule that selects documents for validation."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from utils import ConfigError

# Settings that do not affect the result.
NOT_CONTENT = ("out", "workers", "ray", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Convert text to token shards for training and validation."""

    source: str  # python-stdlib, a file or folder, gs://..., or hf:NAME of a data set of the hub
    out: str  # folder to write train/ and val/ into, or gs://bucket/folder
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or a folder with a tokenizer's files
    val_share: float = 0.05  # share of the documents for validation
    shard_tokens: int = 25_000_000  # maximum per shard; a process holds one shard in memory
    split_mb: float = 64.0  # of the source per split, which one process tokenizes
    max_tokens: int = 0  # stop after the document that reaches this many; 0: no limit
    workers: int = 0  # processes; 0: one per core that this process may use
    ray: str = ""  # run on a Ray cluster instead: HOST:PORT of its head, or local
    glob: str = "**/*"  # files of a folder to read; hidden files are never read
    kind: Annotated[Literal["auto", "text"], tyro.conf.arg(name="as")] = "auto"  # or text for all
    text_field: str = "text"  # field with a row's text; data.text is field text of field data
    chat: bool = False  # rows are conversations; only their answers are learned
    chat_template: Literal["plain", "tokenizer"] = "plain"  # tokenizer: its own template
    # with --chat: pad each conversation to a multiple of this, the --train.seq_len; 0: no padding
    row_tokens: int = 0
    add_bos: bool = False  # begin documents with BOS even if the tokenizer does not say so
    hf_name: str = ""  # configuration of the data set of the hub; empty: its default
    hf_split: str = "train"  # split of the data set of the hub
    skip_bad: bool = False  # leave out and count files and rows that are damaged or have no text
    overwrite: bool = False  # remove an earlier preparation in OUT and start over


def check(config: Prepare) -> None:
    """Raise ConfigError for a setting out of range."""
    if not 0 <= config.val_share <= 1:
        raise ConfigError(
            f"--val-share {config.val_share} is not a share: expected 0 to 1. Use --val-share 0.05."
        )
    limits = {"shard-tokens": 1, "max-tokens": 0, "workers": 0, "row-tokens": 0, "split-mb": 1e-7}
    for flag, least in limits.items():
        if (value := getattr(config, flag.replace("-", "_"))) < least:
            raise ConfigError(f"--{flag} {value} is too small: expected at least {least}.")
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
