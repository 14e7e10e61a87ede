"""Replace a file atomically."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, partial: Path | None = None) -> None:
    """Write a file, which has the old or the new content whenever the process or machine stops.

    partial  temporary file in the same folder, for writers that may run at the same time
    """
    partial = partial or path.with_suffix(".new")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
