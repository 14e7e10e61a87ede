"""Objects of a bucket by name: list, read, write, move, remove; and in words what fails.

Arrays go there through Orbax, which opens gs:// with tensorstore, and what is beside them with
gcsfs: set here to compare what arrived, and not to remember what others may have changed.
"""

import base64
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import google_crc32c

from faults import Fault

SCHEME = "gs://"
RETRY_S = 60.0  # in which a request that may pass is made again
REQUEST_S = 20.0  # to connect, and between two parts of an answer
AT_ONCE = 8  # requests
SEND_TRIES = 4  # for a file, each with its own RETRY_S
SEND_PAUSE_S = 1.0  # before the second of these; then twice as long each time
fsspec.config.conf["gcs"] = {
    "use_listings_cache": False,
    "consistency": "md5",
    "requests_timeout": RETRY_S,
}
# Buckets are asked over one protocol, and not which kinds they are of before each request.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Orbax makes a client that wants to know one, and asks nothing of it.
os.environ.setdefault("GOOGLE_CLOUD_PROJECT", "none")
# A request over which nothing comes for so long has failed, and is made again, by tensorstore too.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{RETRY_S:.0f}")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


class Refused(ValueError, OSError):
    """A bucket that is not there or not for us: asking again does not help."""


class Unanswered(Fault, OSError):
    """It did not do what it was asked for, and may when asked again."""


class Found(NamedTuple):
    size: int
    crc32c: str  # of the content, in base64, as `crc32c` gives it


def is_bucket(url: Any) -> bool:
    return str(url).startswith(SCHEME)


def crc32c(content: bytes) -> str:
    return encoded(google_crc32c.Checksum(content))


def encoded(checksum: google_crc32c.Checksum) -> str:
    return base64.b64encode(checksum.digest()).decode()


# --- what fails -----------------------------------------------------------------------------------


def transient() -> tuple[type[Exception], ...]:
    """What asking a bucket raises, by any of its clients: each may pass, where the caller does not
    know better.
    """
    import aiohttp
    import gcsfs.retry
    import requests
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption

    of_google = (GoogleAPIError, GoogleAuthError, DataCorruption)
    of_gcsfs = (gcsfs.retry.HttpError, gcsfs.retry.ChecksumError, aiohttp.ClientError)
    return (*of_google, *of_gcsfs, requests.RequestException, OSError)


def _is_of_credentials(error: Exception) -> bool:
    """And not of the server that was asked for them, which may be away."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    causes = (error, error.__cause__, *error.args[:1])
    away = getattr(error, "retryable", False) or any(isinstance(c, TransportError) for c in causes)
    return isinstance(error, GoogleAuthError) and not away


def refusal(path: str, error: Exception) -> str | None:
    """In words why asking for `path` again does not help, and what does; None where it may.

    Each client has its own words for what Google's library has exceptions for.
    """
    from google.api_core import exceptions

    bucket = path.removeprefix(SCHEME).partition("/")[0]
    code, text = getattr(error, "code", None), str(error)
    if isinstance(error, exceptions.NotFound):
        mend = f"There is no bucket {bucket}. Make it, or give another"
    elif (
        isinstance(error, exceptions.Forbidden)
        or code == 403
        or text.startswith(("Forbidden: ", "PERMISSION_DENIED: "))
    ):
        mend = (
            "Grant who runs this roles/storage.objectUser and roles/storage.legacyBucketReader on "
            "the bucket, or log in as another: gcloud auth application-default login"
        )
    elif (
        isinstance(error, exceptions.Unauthorized)
        or code == 401
        or text.startswith("UNAUTHENTICATED: ")
        or _is_of_credentials(error)
    ):
        mend = (
            "There are no credentials that are taken. Run gcloud auth application-default login, "
            "or give the machine a service account"
        )
    else:
        return None
    return f"{path} cannot be used. {mend}. ({one_line(error)})"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def told(path: str) -> Iterator[None]:
    """What a bucket raises within becomes one of FileNotFoundError, Refused and Unanswered."""
    try:
        yield
    except (FileNotFoundError, Refused, Unanswered):
        raise
    except transient() as error:
        if why := refusal(path, error):
            raise Refused(why) from error
        raise Unanswered(f"{path} did not answer as it should: {one_line(error)}") from error


# --- what is there --------------------------------------------------------------------------------


def filesystem() -> Any:
    """gcsfs, as it is set above; what it raises is for `told`."""
    return fsspec.filesystem("gs")


@cache
def client() -> Any:
    from google.cloud import storage  # late: only buckets need it

    return storage.Client(project=None)


def _how() -> dict[str, Any]:
    """How each request is made: those that change something do so once, however often."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(RETRY_S), "timeout": (REQUEST_S, REQUEST_S)}


class Prefix:
    """The objects whose names begin with that of a folder, which is gs://BUCKET/FOLDER.

    One program writes there at a time (lock.py). Every method raises what `told` does.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._bucket, _, below = self.url.removeprefix(SCHEME).partition("/")
        self._below = f"{below}/" if below else ""

    def found(self, below: str = "", records_only: bool = False) -> dict[str, Found]:
        """All objects whose names begin with `below`, by their names in the folder; with
        `records_only` those that lie in no folder of their own.
        """
        fields = "items(name,size,crc32c),nextPageToken"
        with told(f"{self.url}/{below}"):
            listed = client().list_blobs(
                self._bucket,
                prefix=f"{self._below}{below}",
                delimiter="/" if records_only else None,
                fields=fields,
                **_how(),
            )
            return {b.name.removeprefix(self._below): Found(b.size, b.crc32c) for b in listed}

    def _blob(self, name: str) -> Any:
        return client().bucket(self._bucket).blob(f"{self._below}{name}")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """What is between two bytes; the bucket's checksum is compared where it is all of it."""
        from google.api_core.exceptions import NotFound

        how = {"checksum": "crc32c"}
        if end is not None:
            how = {"checksum": None, "start": begin, "end": end - 1}
        with told(f"{self.url}/{name}"):
            try:
                return self._blob(name).download_as_bytes(**how, **_how())
            except NotFound as error:
                raise FileNotFoundError(f"{self.url}/{name} is not there") from error

    def fetch(self, name: str, path: Path) -> None:
        """To a file, whose checksum is compared."""
        from google.api_core.exceptions import NotFound

        with told(f"{self.url}/{name}"):
            try:
                self._blob(name).download_to_filename(str(path), checksum="crc32c", **_how())
            except NotFound as error:
                raise FileNotFoundError(f"{self.url}/{name} is not there") from error

    def write(self, name: str, content: bytes) -> None:
        """Whole or not at all; the bucket compares what arrived."""
        with told(f"{self.url}/{name}"):
            self._blob(name).upload_from_string(content, checksum="crc32c", **_how())

    def send(self, files: dict[str, Path], expected: dict[str, Found]) -> None:
        """Files, several at once, each whole or not at all; what the bucket then says of them is
        compared with what is expected.
        """
        from google.cloud.storage import transfer_manager

        left, pause_s = dict(files), SEND_PAUSE_S
        for attempt in range(1, SEND_TRIES + 1):
            blobs = [self._blob(name) for name in left]
            met = transfer_manager.upload_many(
                [(str(path), blob) for path, blob in zip(left.values(), blobs, strict=True)],
                upload_kwargs={"checksum": "crc32c", **_how()},
                max_workers=AT_ONCE,
                worker_type=transfer_manager.THREAD,
            )
            try:
                for name, blob, error in zip(list(left), blobs, met, strict=True):
                    with told(f"{self.url}/{name}"):
                        if isinstance(error, Exception):
                            raise error
                        if Found(blob.size, blob.crc32c) != expected[name]:
                            raise OSError("what arrived is not what was sent")
                    del left[name]
                return
            except Unanswered:
                if attempt == SEND_TRIES:
                    raise
            time.sleep(pause_s)
            pause_s *= 2

    def move(self, name: str, to: str) -> None:
        with told(f"{self.url}/{name}"):
            blob = self._blob(name)
            blob.bucket.copy_blob(blob, blob.bucket, self._blob(to).name, **_how())
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Also of what is not there."""
        from google.api_core.exceptions import NotFound

        def one(name: str) -> None:
            with told(f"{self.url}/{name}"), contextlib.suppress(NotFound):
                self._blob(name).delete(**_how())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names))
