"""The settings of a preparation, and the rule by which a document is for validation."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

# Settings that do not decide what is written.
NOT_CONTENT = ("out", "workers", "ray", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text into token shards for training and validation."""

    source: str  # python-stdlib, a file or folder, gs://..., or hf:NAME of a data set of the hub
    out: str  # folder to write train/ and val/ into, or gs://bucket/folder
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or a folder with a tokenizer's files
    val_share: float = 0.05  # share of the documents for validation
    shard_tokens: int = 25_000_000  # tokens in a shard at most; a process holds one in memory
    split_mb: float = 64.0  # of the source, in a split, which one process tokenizes
    max_tokens: int = 0  # stop after the document that reaches this many; 0 takes all
    workers: int = 0  # processes; 0 is one for each core that this process may use
    ray: str = ""  # run on a Ray cluster instead: HOST:PORT of its head, or local
    glob: str = "**/*"  # files of a folder to read; hidden ones are never read
    kind: Annotated[Literal["auto", "text"], tyro.conf.arg(name="as")] = "auto"  # or text for all
    text_field: str = "text"  # with the text of a row; data.text is field text of field data
    chat: bool = False  # rows are conversations, of which only the answers are learned
    chat_template: Literal["plain", "tokenizer"] = "plain"  # tokenizer: its own
    add_bos: bool = False  # begin documents with the tokenizer's BOS also where it does not say so
    hf_name: str = ""  # configuration of the data set of the hub; empty takes its default
    hf_split: str = "train"  # split of it to read
    skip_bad: bool = False  # leave out what cannot be read or has no text, and count it
    overwrite: bool = False  # remove what OUT has, and begin anew


def check(config: Prepare) -> None:
    """Raises ValueError for a setting out of range."""
    if not 0 <= config.val_share <= 1:
        raise ValueError(
            f"--val-share {config.val_share} is not a share: expected 0 to 1. Use --val-share 0.05."
        )
    for flag, least in (("shard-tokens", 1), ("max-tokens", 0), ("workers", 0), ("split-mb", 1e-7)):
        if (value := getattr(config, flag.replace("-", "_"))) < least:
            raise ValueError(f"--{flag} {value} is too small: expected at least {least}.")
    if config.out.startswith("gs:") and not config.out.removeprefix("gs://").strip("/").count("/"):
        raise ValueError(f"--out {config.out} names no folder of a bucket. Use gs://bucket/books.")


VALIDATION_RULE = (
    "a document is for validation if the first 8 bytes of the SHA-256 of 'file name:position in "
    "it', as a share of 2**64, are below val_share; where that leaves less than half of either "
    "side's share, the last tokens are for validation"
)


def in_validation(name: str, position: int, share: float) -> bool:
    """Whether the document at this position of a file is for validation, by VALIDATION_RULE."""
    digest = hashlib.sha256(f"{name}:{position}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
