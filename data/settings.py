"""The settings of a preparation, and which document is for validation.

Shared by data/prepare.py, which prepares on one machine, and data/cluster.py, on many.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

# Settings that do not decide what is written.
NOT_CONTENT = ("out", "staging", "workers", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text into token shards for training and validation."""

    source: str  # python-stdlib, a file or folder of text, .jsonl or .parquet, gs://..., or hf:NAME
    out: str  # folder to write train/ and val/ into, or gs://bucket/folder
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or path of a tokenizer.json
    val_share: float = 0.05  # share of documents for validation, evenly spaced in their order
    shard_tokens: int = 100_000_000  # tokens in each shard but the last
    max_tokens: int = 0  # stop after the document that reaches this many; 0 takes all
    workers: int = 0  # processes that tokenize; 0 is one per core
    glob: str = "**/*"  # files of a folder to read; hidden ones are never read
    text_field: str = "text"  # field of a JSON line, Parquet or Hugging Face row with the text
    chat: bool = False  # lines or rows are conversations, of which only the answers are learned
    hf_name: str = ""  # configuration of the Hugging Face dataset; empty takes its default
    hf_split: str = "train"  # split of the Hugging Face dataset to read
    skip_bad: bool = False  # leave out what cannot be read or has no text, and tell how much
    staging: str = ""  # folder for what is on its way to a bucket; empty: data/staging
    overwrite: bool = False  # begin anew, even where OUT is finished or can be gone on with


def check(config: Prepare) -> None:
    """Raises ValueError for a setting out of range."""
    if not 0 <= config.val_share <= 1:
        raise ValueError(
            f"--val-share {config.val_share} is not a share: expected 0 to 1. Use --val-share 0.05."
        )
    for name, least in (("shard_tokens", 1), ("max_tokens", 0), ("workers", 0)):
        value = getattr(config, name)
        if value < least:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {value} is too small: expected at least {least}. Leave it out."
            )


def in_validation(number: int, share: float = Prepare.val_share) -> bool:
    """Whether document `number` (from 0) is one of a share spread evenly over their order.

    With documents in order of path, every folder gives its share to both sides.
    """
    exact = Fraction(str(share))
    return math.floor((number + 1) * exact) > math.floor(number * exact)


VALIDATION_RULE = (
    "document number n, from 0 and in order (files by path), is for validation if "
    "floor((n + 1) * val_share) > floor(n * val_share): the 20th, 40th, ... for 0.05"
)
