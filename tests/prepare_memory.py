"""Measure the peak memory of data/prepare.py for the same text in several forms.

    ./run.sh python tests/prepare_memory.py --mb 50 500
    ./run.sh python tests/prepare_memory.py --mb 5000 --forms lines

Each size is prepared as many documents, as one file of JSON lines, as Parquet, and as one file of
text, which is a single document. Prints the peak MB of the main process and of any worker, the
number of busy workers, and seconds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tyro

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = 4_000  # characters
POLL_S = 0.05
BUSY_S = 5.0  # of CPU time, more than a start takes


@dataclass(frozen=True, kw_only=True)
class Flags:
    mb: tuple[int, ...] = (50,)  # of text
    forms: tuple[str, ...] = ("documents", "lines", "parquet", "document")
    workers: int = 2


def documents(texts: Iterable[str], folder: Path) -> None:
    for number, text in enumerate(texts):
        below = folder / f"{number // 1_000:04}"
        below.mkdir(exist_ok=True)
        (below / f"{number:07}.txt").write_text(text)


def lines(texts: Iterable[str], folder: Path) -> None:
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def parquet(texts: Iterable[str], folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), folder / "a.parquet")


def one(texts: Iterable[str], folder: Path) -> None:
    with (folder / "a.txt").open("w") as file:
        file.writelines(texts)


FORMS: dict[str, Callable[[Iterable[str], Path], None]] = {
    "documents": documents,
    "lines": lines,
    "parquet": parquet,  # one row group for each million rows
    "document": one,
}


def texts_of(mb: int) -> Iterator[str]:
    """Yield documents from the project's own files, repeatedly."""
    paths = sorted(path for path in ROOT.glob("**/*.py") if ".venv" not in str(path))
    text = "".join(path.read_text() for path in paths)
    text += text[:DOCUMENT]
    for i in range(0, mb * 1_000_000, DOCUMENT):
        begin = i % (len(text) - DOCUMENT)
        yield text[begin : begin + DOCUMENT]


def peak_mb(process: int) -> float:
    """Return VmHWM. ru_maxrss would start from the parent's value."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search("VmHWM:[^0-9]*([0-9]+)", status)
    return int(found[1]) * 1024 / 1e6 if found else 0


def cpu_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(process: int) -> list[int]:
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in found.split()]


def measured(source: Path, out: Path, workers: int) -> tuple[float, float, int, float]:
    """Return (peak MB of the main process, of the largest worker, busy workers, seconds)."""
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", source, "--out", out]
    command += ["--val-share", "0"]  # one document is enough
    began, own, worker, busy = time.monotonic(), 0.0, 0.0, set()
    process = subprocess.Popen(
        [*map(str, command), "--workers", str(workers)], stdout=subprocess.PIPE, text=True
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout))
    reader.start()
    while process.poll() is None:
        own = max(own, peak_mb(process.pid))
        worker = max([worker, *map(peak_mb, children(process.pid))])
        busy |= {child for child in children(process.pid) if cpu_s(child) > BUSY_S}
        time.sleep(POLL_S)
    reader.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    return own, worker, len(busy), time.monotonic() - began


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print("MB of text  form       own MB  worker MB  busy workers  seconds")
    for mb in flags.mb:
        for name in flags.forms:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "source"
                source.mkdir()
                FORMS[name](texts_of(mb), source)
                found = measured(source, Path(folder) / "out", flags.workers)
            own, worker, busy, seconds = found
            row = f"{mb:10}  {name:9}  {own:6.0f}  {worker:9.0f}  {busy:12}  {seconds:7.1f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
