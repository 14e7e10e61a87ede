"""Read and write JSON lines: one record per line, each with the `step` that it belongs to."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from runtime.console import is_primary, log
from runtime.storage import write_atomically


def plain(value: Any) -> Any:
    """Convert a value for JSON: arrays to lists, nan and infinity to null."""
    text = json.dumps(value, default=lambda array: np.asarray(array).tolist())
    return json.loads(text, parse_constant=lambda name: None)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, none if it does not exist. Skip a line that was cut off by a
    kill or a full disk.
    """
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def has(path: Path, step: int, key: str) -> bool:
    """Return whether the file has a record of this step with this key."""
    return any(record["step"] == step and key in record for record in read(path))


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records from process 0 and flush them to disk. On a full disk, log and drop them."""
    if not is_primary():
        return
    try:
        with path.open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # ends a line that a full disk cut off
            file.writelines((json.dumps(plain(r)) + "\n").encode() for r in records)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log(f"warning: {path} takes no more records: {error}")


def truncate(path: Path, step: int) -> None:
    """Remove the records after `step` steps, or all if it is 0, if the file exists."""
    if path.exists():
        write(path, [record for record in read(path) if 0 < step >= record["step"]])


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace all records, atomically."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
