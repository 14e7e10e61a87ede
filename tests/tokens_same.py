"""Compare the ids of prepared shards with those of tiktoken, document by document.

    ./run.sh python tests/tokens_same.py
    ./run.sh python tests/tokens_same.py --wheels wheels --mb 40 --tokenizer cl100k_base

The text: awkward cases; words of every script of Unicode; what lies in --wheels; the standard
library. Wheels with text in many languages: ./run.sh python -m pip download --no-deps --dest wheels
django sphinx. The preparation is the command itself. A document of more than 400,000 characters is
tokenized in chunks, and compared in the same chunks. Exit code 1 if anything differs.
"""

import itertools
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.encode import CHUNK_CHARACTERS
from data.tokenizer import load_tokenizer
from prepared import tokens_of

ROOT = Path(__file__).resolve().parent.parent
TEXT_FILES = (".po", ".py", ".txt", ".md", ".rst", ".html", ".js", ".json", ".css", ".xml")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Compare ids of prepared shards with those of tiktoken."""

    tokenizer: str = "sample"  # sample, or a name of tiktoken's
    mb: float = 24  # of text to compare, if there is that much
    wheels: Path | None = None  # folder of .whl files with more text


RUNS = [c * n for c in " \t\n\r\xa0\u3000a1.é漢🙂" for n in (1, 2, 3, 4, 5, 7, 8, 9, 31, 1000)]
AWKWARD = [
    *(f"<|{name}|>" for name in ("endoftext", "fim_prefix", "endofprompt", "im_start")),
    "a<|endoftext|>b\n<|endoftext|><|endoftext|> <|endoftext|",
    *RUNS,
    *(f"x{run}y" for run in RUNS),
    "\r\n\r\n  \r\n\t\r\nif x:\r\n    y = 1\r\n",
    *("a\ud800b", "\udfff\ud800"),  # halves of surrogate pairs, which are replaced
    # Emoji that are joined, a flag, a colour of skin, a keycap.
    "\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd 1\ufe0f\u20e3",
    "e\u0301 n\u0303 a\u0327\u0323 \u0915\u094d\u0937 \u200f\u200e\u202e\ufeff",
    "\u0000 \u007f \u0085 \u2028 \u2029 \u00ad It's I'LL THEY'D don\u2019t \u017f'\u017f K'K\u212a",
    *("0123456789" * 500, "Donaudampfschifffahrt" * 2000, "漢字かな" * 2000),
    *(" " * (CHUNK_CHARACTERS + 5), "word " * (CHUNK_CHARACTERS // 2)),
]


def scripts() -> Iterator[str]:
    """Yield words of each script: every letter, mark and digit once, then random ones."""
    draw, found = random.Random(0), defaultdict(list)
    between = [*[""] * 30, " ", " ", " ", ", ", ".\n", "  ", "\n\n", "-", "'s "]
    for character in map(chr, range(0xA0, sys.maxunicode + 1)):
        if unicodedata.category(character)[0] in "LMN":
            found[unicodedata.name(character, "").split(" ")[0]].append(character)
    for characters in found.values():
        letters = characters + draw.choices(characters, k=1500)
        yield "".join(letter + draw.choice(between) for letter in letters)


def of_wheels(folder: Path) -> Iterator[str]:
    """Text of the packages in a folder."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            for name in sorted(packed.namelist()):
                if name.endswith(TEXT_FILES):
                    yield packed.read(name).decode(errors="replace")


def mixed(mb: float, wheels: Path | None = None) -> list[str]:
    """Return documents of about `mb`."""
    of_packages = of_wheels(wheels) if wheels else ()
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    of_python = (file.read_text(errors="replace") for file in files)
    found, left = [], mb * 1e6
    for text in filter(None, itertools.chain(AWKWARD, scripts(), of_packages, of_python)):
        if left <= 0:
            break
        found.append(text)
        left -= len(text.encode(errors="replace"))
    return found


def prepared_ids(documents: list[str], out: Path, tokenizer: str) -> list[list[int]]:
    """Return the ids of each document without end-of-text, as they are read back from shards."""
    source = out.with_name("documents.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", source, "--out", out]
    command += ["--tokenizer", tokenizer, "--workers", "2", "--val-share", "0"]
    command += ["--shard-tokens", "300000"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ids = tokens_of(out / "train")
    ends = np.flatnonzero(ids == load_tokenizer(tokenizer).eot_token)
    assert ends[-1] == len(ids) - 1
    return [ids[start + 1 : end].tolist() for start, end in itertools.pairwise([-1, *ends])]


def differing(
    documents: list[str], coded: Iterable[list[int]], tokenizer: tiktoken.Encoding
) -> list[int]:
    """Return numbers of documents that differ, or that only one side has."""
    found = []
    for number, (text, ids) in enumerate(itertools.zip_longest(documents, coded)):
        cuts = range(0, len(text or ""), CHUNK_CHARACTERS)
        chunks = [tokenizer.encode_ordinary(text[cut : cut + CHUNK_CHARACTERS]) for cut in cuts]
        if text is None or [*itertools.chain(*chunks)] != ids:
            found.append(number)
    return found


def main() -> int:
    flags = tyro.cli(Flags, description=__doc__)
    documents = mixed(flags.mb, flags.wheels)
    with tempfile.TemporaryDirectory(prefix="tokens-same-") as folder:
        coded = prepared_ids(documents, Path(folder) / "out", flags.tokenizer)
    differ = differing(documents, coded, load_tokenizer(flags.tokenizer))
    mb = sum(len(text.encode(errors="replace")) for text in documents) / 1e6
    tokens = sum(map(len, coded))
    print(f"{len(documents):,} documents, {mb:.1f} MB, {tokens:,} tokens of {flags.tokenizer}:")
    print(f"{len(differ)} documents differ from tiktoken {differ[:5] or ''}")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
