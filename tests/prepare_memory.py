"""Measure the peak memory of data/prepare.py for the same text in several forms.

    ./run.sh python tests/prepare_memory.py --mb 50 500
    ./run.sh python tests/prepare_memory.py --mb 5000 --forms lines

Each size is prepared as many documents, as one file of JSON lines, as Parquet, and as one file of
text, which is a single document. Prints the peak MB of the main process and of any worker, the
number of busy workers, and seconds.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
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


def write(form: str, texts: Iterable[str], folder: Path) -> None:
    if form == "documents":
        for number, text in enumerate(texts):
            below = folder / f"{number // 1_000:04}"
            below.mkdir(exist_ok=True)
            (below / f"{number:07}.txt").write_text(text)
    elif form == "parquet":  # one row group for each million rows
        pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), folder / "a.parquet")
    else:
        lines = (json.dumps({"text": text}) + "\n" for text in texts) if form == "lines" else texts
        with (folder / ("a.jsonl" if form == "lines" else "a.txt")).open("w") as file:
            file.writelines(lines)


def texts_of(mb: int) -> Iterator[str]:
    """Yield documents from the project's own files, repeatedly."""
    paths = sorted(path for path in ROOT.glob("**/*.py") if ".venv" not in str(path))
    text = "".join(path.read_text() for path in paths)
    text += text[:DOCUMENT]
    for i in range(0, mb * 1_000_000, DOCUMENT):
        begin = i % (len(text) - DOCUMENT)
        yield text[begin : begin + DOCUMENT]


def proc(process: int, file: str) -> str:
    """Return the content of a file of a process; empty if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/{file}").read_text()
    return ""


def peak_mb(process: int) -> float:
    """Return VmHWM. ru_maxrss would start from the parent's value."""
    found = re.search("VmHWM:[^0-9]*([0-9]+)", proc(process, "status"))
    return int(found[1]) * 1024 / 1e6 if found else 0


def cpu_s(process: int) -> float:
    fields = proc(process, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0


def measured(source: Path, out: Path, workers: int) -> tuple[float, float, int, float]:
    """Return (peak MB of the main process, of the largest worker, busy workers, seconds)."""
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", source, "--out", out]
    command += ["--val-share", "0", "--workers", str(workers)]  # one document is enough
    began, own, worker, busy = time.monotonic(), 0.0, 0.0, set()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        children = [*map(int, proc(process.pid, f"task/{process.pid}/children").split())]
        own, worker = max(own, peak_mb(process.pid)), max([worker, *map(peak_mb, children)])
        busy |= {child for child in children if cpu_s(child) > BUSY_S}
        time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(process.returncode)
    return own, worker, len(busy), time.monotonic() - began


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print("MB of text  form       own MB  worker MB  busy workers  seconds")
    for mb in flags.mb:
        for form in flags.forms:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "source"
                source.mkdir()
                write(form, texts_of(mb), source)
                own, worker, busy, seconds = measured(source, Path(folder) / "out", flags.workers)
            row = f"{mb:10}  {form:9}  {own:6.0f}  {worker:9.0f}  {busy:12}  {seconds:7.1f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
