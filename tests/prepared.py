"""What a preparation wrote, for the files that test it."""

import numpy as np

from data.manifest import read_manifest
from data.prepare import main
from data.tokenizer import load_tokenizer


def prepare(source, out, *flags):
    main(["--source", str(source), "--out", str(out), "--workers", "1", *map(str, flags)])


def tokens_of(folder, kind=""):
    names = [s.name.replace(".npy", f"{kind}.npy") for s in read_manifest(folder).shards]
    return np.concatenate([np.load(folder / name) for name in names])


def texts_of(folder, tokenizer=None):
    """The documents of a folder, split after each end-of-text."""
    tokenizer = tokenizer or load_tokenizer("sample")
    ids = tokens_of(folder)
    ends = np.flatnonzero(ids == tokenizer.eot_token)
    assert ends[-1] == len(ids) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [
        tokenizer.decode([int(i) for i in ids[start:end]])
        for start, end in zip(starts, ends, strict=True)
    ]


def files_of(out):
    """Every file below a folder with its content, but what killed processes left."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in files
        if not path.name.endswith(".partial")
    }
