"""Pieces of text to tokens, as processes of one machine and nodes of a cluster do it."""

import contextlib
import functools
from typing import NamedTuple

import numpy as np
import tiktoken

from data.sources import Piece, Place
from data.tokenizer import Tokenizer, load_tokenizer


class Encoded(NamedTuple):
    """A piece as it is written."""

    ids: np.ndarray
    weight: int | None  # of the loss on them; None where all are 1
    text_bytes: int  # of the text with weight 1
    source_bytes: int
    place: Place
    ends: bool  # its document
    left_out: str  # why there is nothing of it, with --skip-bad


cached_tokenizer = functools.cache(load_tokenizer)  # a worker loads it once


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32


def encode(tokenizer: str, batch: list[Piece]) -> list[Encoded]:
    return [encode_piece(cached_tokenizer(tokenizer), piece) for piece in batch]


def encode_piece(tokenizer: Tokenizer, piece: Piece) -> Encoded:
    """Its tokens, and end-of-text after the last of a document.

    Each piece is tokenized by itself, so that no token has a part of a prompt and of an answer.
    What looks like a special token in the text is text: no document can end another one.
    """
    found, dtype = ids_of(tokenizer, piece.text), token_dtype(tokenizer)
    ids = np.empty(len(found) + piece.ends, dtype)
    ids[: len(found)] = found
    ids[len(found) :] = tokenizer.eot_token
    return Encoded(
        ids=ids,
        weight=piece.weight,
        text_bytes=0 if piece.weight == 0 else len(piece.text.encode(errors="replace")),
        source_bytes=piece.source_bytes,
        place=piece.place,
        ends=piece.ends,
        left_out=piece.left_out,
    )


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray | list[int]:
    """Those of encode_ordinary; of tiktoken without a Python object for each, which takes long."""
    if isinstance(tokenizer, tiktoken.Encoding):
        # Half a surrogate pair, which encode_ordinary replaces, is an error here.
        with contextlib.suppress(UnicodeEncodeError):
            return tokenizer.encode_to_numpy(text, disallowed_special=())
    return tokenizer.encode_ordinary(text)
