"""Files of a folder on a disk or in a Google Cloud Storage bucket.

    folder = storage.at("gs://bucket/runs/tiny")
    folder.write("config.toml", b"...")

Runs and data sets list, read and write their files here. Only arrays of checkpoints are read and
written by Orbax and tensorstore. Another kind of storage is a class like BucketFolder, for `at`.

Orbax opens gs:// with tensorstore for arrays and with gcsfs for the files beside them. The settings
below make gcsfs verify checksums, and not cache listings, which other programs may change.
"""

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import fsspec

from runtime.errors import TransientError, one_line
from utils import ConfigError

RETRY_S = 60.0  # time for which a failed request is retried
REQUEST_S = 20.0  # timeout to connect, and between two reads of a response
AT_ONCE = 8  # concurrent requests
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
fsspec.config.conf["gcs"] = {
    "use_listings_cache": False,
    "consistency": "md5",
    "requests_timeout": RETRY_S,
}
# Use one protocol; do not query the kind of a bucket before each request.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Orbax creates a client that requires a project and never uses it.
os.environ.setdefault("GOOGLE_CLOUD_PROJECT", "none")
# tensorstore retries a request that transfers nothing for this long.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{RETRY_S:.0f}")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


class AccessDenied(ConfigError, OSError):
    """The storage does not exist or denies access: retrying does not help."""


class Unavailable(TransientError, OSError):
    """A request failed, and may succeed later."""


class Changed(Exception):
    """The file does not have the version that the request required."""


class FileInfo(NamedTuple):
    """A file in a listing."""

    size: int
    crc32c: str = ""  # of the content, in base64; empty if the storage has none


Range = tuple[str, int, int]  # name of a file, and its bytes: begin, end
ABSENT = 0  # version of a file that does not exist


class DiskFolder:
    """A folder on a disk, by the names of its files in it, with "/" between the levels.

    BucketFolder has the same methods, and more for versions. All raise OSError; of a bucket this is
    FileNotFoundError, AccessDenied or Unavailable.

    tensorstore_context  settings with which tensorstore opens arrays in the folder
    """

    tensorstore_context: ClassVar[dict[str, Any]] = {}

    def __init__(self, url: str | os.PathLike[str]):
        self.url, self.path = os.fspath(url).rstrip("/"), Path(url)

    def names(self) -> list[str]:
        """Return the sorted names of the first level. Those of folders end with "/"."""
        entries = os.scandir(self.path) if self.exists() else ()
        return sorted(entry.name + "/" * entry.is_dir() for entry in entries)

    def files(self, below: str = "") -> dict[str, FileInfo]:
        """Return all files whose names start with `below`."""
        infos = {}
        for path in (self.path / below.rpartition("/")[0]).rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if name.startswith(below) and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # another program removed it
                    infos[name] = FileInfo(path.stat().st_size)
        return infos

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or a file in it, exists."""
        try:  # unlike Path.exists, raise if the disk cannot be read
            (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def open_file(self, name: str) -> IO[bytes]:
        """Open a file for unbuffered reads. Use `translated_errors` while it is read."""
        return io.FileIO(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically and durably."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)

    def move(self, name: str, to: str, first: str) -> None:
        """Rename a folder. Where this is several requests, its file `first` is moved first."""
        os.rename(self.path / name, self.path / to)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that may not exist."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self.path / name)

    def explained(self, error: Exception, name: str = "") -> Exception:
        """Return the exception to raise for an error of any client of this storage."""
        if not isinstance(error, OSError | ValueError):
            return error
        return ConfigError(
            f"{self.path / name} cannot be used ({type(error).__name__}: {one_line(error)}). Free "
            "disk space, grant read and write permission, or use another --run.dir."
        )

    @contextlib.contextmanager
    def translated_errors(self, name: str = "") -> Iterator[None]:
        """Run a block, and raise `explained` for the errors of clients in it."""
        yield


class BucketFolder:
    """A folder gs://BUCKET/FOLDER. Files are objects; each write of one is a new version of it."""

    path = None  # it is on no disk
    tensorstore_context: ClassVar = {"gcs_request_retries": {"max_retries": 6}}  # about RETRY_S

    def __init__(self, url: str | os.PathLike[str]):
        self.url = os.fspath(url).rstrip("/")
        self._bucket, _, below = self.url.removeprefix("gs://").partition("/")
        self._below = f"{below}/" if below else ""

    def _blob(self, name: str) -> Any:
        return client().bucket(self._bucket).blob(f"{self._below}{name}")

    def _list(self, below: str, fields: str, **how: Any) -> tuple[list[Any], set[str]]:
        """Return the objects whose names start with `below`, and the folders beside them."""
        prefix, how = f"{self._below}{below}", how | _retried()
        with self.translated_errors(below):
            listed = client().list_blobs(
                self._bucket, prefix=prefix, fields=f"{fields},nextPageToken", **how
            )
            return [*listed], listed.prefixes

    def names(self) -> list[str]:
        blobs, folders = self._list("", "items(name),prefixes", delimiter="/")
        names = {blob.name for blob in blobs} | folders
        return sorted(name.removeprefix(self._below) for name in names)

    def files(self, below: str = "") -> dict[str, FileInfo]:
        blobs, _ = self._list(below, "items(name,size,crc32c)")
        return {b.name.removeprefix(self._below): FileInfo(b.size, b.crc32c) for b in blobs}

    def exists(self, name: str = "") -> bool:
        return bool(self._list(name, "items(name)", max_results=1)[0])

    def read(self, name: str) -> bytes:
        content, version = self.read_with_version(name)
        if version == ABSENT:
            raise FileNotFoundError(f"{self.url}/{name} does not exist")
        return content

    def read_with_version(self, name: str) -> tuple[bytes, int]:
        """Return the content, with its checksum verified, and the version; b"" if ABSENT."""
        from google.api_core.exceptions import NotFound

        with self.translated_errors(name), contextlib.suppress(NotFound):
            blob = self._blob(name)
            content = blob.download_as_bytes(checksum="crc32c", **_retried())
            return content, int(blob.generation)
        return b"", ABSENT

    def open_file(self, name: str) -> IO[bytes]:
        return fsspec.filesystem("gs").open(f"{self.url}/{name}", "rb", cache_type="none")

    def read_ranges(self, ranges: list[Range]) -> list[bytes]:
        """Read byte ranges of files concurrently."""
        paths = [f"{self.url}/{name}" for name, _, _ in ranges]
        begins, ends = ([r[n] for r in ranges] for n in (1, 2))
        with self.translated_errors():
            contents = fsspec.filesystem("gs").cat_ranges(paths, begins, ends)
        for (name, begin, end), content in zip(ranges, contents, strict=True):
            with self.translated_errors(name):
                if isinstance(content, Exception):
                    raise content
                if len(content) != end - begin:
                    raise OSError(f"{len(content)} of {end - begin} bytes came")
        return contents

    def write(self, name: str, content: bytes, version: int | None = None) -> int:
        """Write a file and return its new version.

        version  to replace, or ABSENT; None to replace any
        Raises   Changed if the file has another version. After a lost response this may be the one
                 that this call wrote.
        """
        how = {"checksum": "crc32c", "if_generation_match": version, **_retried()}
        with self.translated_errors(name):
            blob = self._blob(name)
            blob.upload_from_string(content, **how)
            return int(blob.generation)

    def move(self, name: str, to: str, first: str) -> None:
        names = self.files(f"{name}/")
        for file in sorted(names, key=lambda file: file != f"{name}/{first}"):
            with self.translated_errors(file):
                blob, new = self._blob(file), self._blob(f"{to}{file.removeprefix(name)}")
                blob.bucket.copy_blob(blob, blob.bucket, new.name, **_retried())
            self.remove([file])

    def remove(self, names: Iterable[str], version: int | None = None) -> None:
        """Remove files that may not exist. Raises Changed if one has another version."""
        from google.api_core.exceptions import NotFound

        def one(name: str) -> None:
            with self.translated_errors(name), contextlib.suppress(NotFound):
                self._blob(name).delete(if_generation_match=version, **_retried())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names))

    def remove_folder(self, name: str) -> None:
        self.remove(self.files(f"{name}/"))

    def explained(self, error: Exception, name: str = "") -> Exception:
        path, text = f"{self.url}/{name}".rstrip("/"), one_line(error)
        if isinstance(error, AccessDenied | Unavailable):
            return error
        if fix := refusal(self._bucket, error):
            return AccessDenied(f"{path} cannot be used. {fix}. ({text})")
        return Unavailable(f"a request for {path} failed: {text}. Start again.")

    @contextlib.contextmanager
    def translated_errors(self, name: str = "") -> Iterator[None]:
        """Run a block. Raise FileNotFoundError, AccessDenied, Unavailable or Changed for errors of
        Google's client and of gcsfs.
        """
        import aiohttp
        from gcsfs.retry import ChecksumError, HttpError
        from google.api_core.exceptions import GoogleAPIError, PreconditionFailed
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        of_google = (GoogleAPIError, GoogleAuthError, DataCorruption)
        of_gcsfs = (HttpError, ChecksumError, aiohttp.ClientError)
        try:
            yield
        except (FileNotFoundError, AccessDenied, Unavailable):
            raise
        except PreconditionFailed as error:
            raise Changed(f"{self.url}/{name} was changed by another program") from error
        except (*of_google, *of_gcsfs, OSError) as error:
            raise self.explained(error, name) from error


def refusal(bucket: str, error: Exception) -> str | None:
    """Return the cause and the fix if a request will fail again; None if a retry may help.

    Exceptions of Google's client and of gcsfs have codes; tensorstore and aiohttp have messages.
    """
    from google.auth.exceptions import GoogleAuthError, TransportError

    code, text = getattr(error, "code", None), str(error)
    # An unreachable token server also raises GoogleAuthError.
    causes = (error, error.__cause__, *error.args[:1])
    away = getattr(error, "retryable", False) or any(isinstance(c, TransportError) for c in causes)
    no_login = isinstance(error, GoogleAuthError) and not away
    if code == 404:
        return f"There is no bucket {bucket}. Create it, or use another"
    if code == 403 or text.startswith(("Forbidden: ", "PERMISSION_DENIED: ")):
        return (
            "Grant this account roles/storage.objectUser and roles/storage.legacyBucketReader on "
            "the bucket, or use another account: gcloud auth application-default login"
        )
    if no_login or code == 401 or text.startswith("UNAUTHENTICATED: "):
        return (
            "There are no valid credentials. Run gcloud auth application-default login, or attach "
            "a service account to the machine"
        )
    return None


@cache
def client() -> Any:
    from google.cloud import storage  # late: only runs in buckets need it

    return storage.Client(project=None)


def _retried() -> dict[str, Any]:
    """Return the retry arguments of a request. All requests here are idempotent."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(RETRY_S), "timeout": (REQUEST_S, REQUEST_S)}


Folder = DiskFolder | BucketFolder


def is_remote(url: Any) -> bool:
    """Return whether a path or URL is in storage that has no file system."""
    return "://" in str(url)


def at(url: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL. Raises ConfigError for an unknown kind of storage."""
    if not is_remote(url):
        return DiskFolder(url)
    if not str(url).startswith("gs://"):
        raise ConfigError(f"{url} is in no known storage. Use a folder on a disk, or gs://.")
    return BucketFolder(url)


def of_file(path: str) -> tuple[Folder, str]:
    """Return the folder that holds a file, and the file's name there."""
    folder, name = os.path.split(path)
    return at(folder), name


# --- files on a disk ------------------------------------------------------------------------------


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, which has the old or the new content whenever the process or machine stops."""
    # Another process may write the same file, so each uses its own temporary name.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
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
