"""Replace a file atomically; recognize pointers of Git LFS."""

import os
from pathlib import Path

from utils import ConfigError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


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


def check_not_pointer(path: Path | str, content: bytes | None = None) -> None:
    """Raise ConfigError for a file that Git LFS has not downloaded, a text that names the content.

    content  the first bytes of the file; None to read them
    """
    if content is None:
        with open(path, "rb") as file:
            content = file.read(len(LFS_POINTER))
    if content.startswith(LFS_POINTER):
        raise ConfigError(
            f"{path} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its "
            "repository, or download the file."
        )
