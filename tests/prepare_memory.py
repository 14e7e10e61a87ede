"""Most memory that any process of data/prepare.py takes, for one text in several forms.

    ./run.sh python tests/prepare_memory.py --mb 50 500

Each size is prepared as many documents, as one file of JSON lines, as Parquet, and as one file of
text, which is a single document. Prints a table: MB of the process that writes and of the largest
worker, and seconds.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tyro

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = 4_000  # characters
LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Flags:
    mb: tuple[int, ...] = (50,)  # of text
    workers: int = 2


def documents(text: str, folder: Path) -> None:
    for number, i in enumerate(range(0, len(text), DOCUMENT)):
        place = folder / f"{number // 1_000:04}"
        place.mkdir(exist_ok=True)
        (place / f"{number:07}.txt").write_text(text[i : i + DOCUMENT])


def lines(text: str, folder: Path) -> None:
    with (folder / "a.jsonl").open("w") as file:
        for i in range(0, len(text), DOCUMENT):
            file.write(json.dumps({"text": text[i : i + DOCUMENT]}) + "\n")


def parquet(text: str, folder: Path) -> None:
    rows = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / "a.parquet")


def one(text: str, folder: Path) -> None:
    (folder / "a.txt").write_text(text)


FORMS: dict[str, Callable[[str, Path], None]] = {
    "documents": documents,
    "JSON lines": lines,
    "Parquet, one row group": parquet,
    "one document": one,
}


def text_of(mb: int) -> str:
    """The project's own files, again and again."""
    text = "".join(
        path.read_text() for path in sorted(ROOT.glob("**/*.py")) if ".venv" not in str(path)
    )
    return (text * (mb * 1_000_000 // len(text) + 1))[: mb * 1_000_000]


def peak_mb(process: int) -> float:
    """VmHWM: not ru_maxrss, which begins with what the parent had."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search("VmHWM:[^0-9]*([0-9]+)", status)
    return int(found[1]) * 1024 / 1e6 if found else 0


def children(process: int) -> list[int]:
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in found.split()]


def measured(source: Path, out: Path, workers: int) -> tuple[float, float, float]:
    """(MB of the process that writes, of the largest of its workers, seconds)."""
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", source, "--out", out]
    command += ["--val-share", "0"]  # one document is enough
    began, own, worker = time.monotonic(), 0.0, 0.0
    process = subprocess.Popen(
        [*map(str, command), "--workers", str(workers)], stdout=subprocess.PIPE, text=True
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout))
    reader.start()
    while process.poll() is None:
        own = max(own, peak_mb(process.pid))
        worker = max([worker, *map(peak_mb, children(process.pid))])
        time.sleep(LOOK_S)
    reader.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    return own, worker, time.monotonic() - began


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print("MB of text  form                    writer MB  worker MB  seconds")
    for mb in flags.mb:
        for name, make in FORMS.items():
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "source"
                source.mkdir()
                make(text_of(mb), source)
                found = measured(source, Path(folder) / "out", flags.workers)
            print(
                f"{mb:10}  {name:22}  {found[0]:9.0f}  {found[1]:9.0f}  {found[2]:7.1f}", flush=True
            )


if __name__ == "__main__":
    main()
