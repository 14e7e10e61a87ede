"""Objects of a Google Cloud Storage bucket: list, read, write, move and remove them by name.

Orbax opens gs:// with tensorstore for arrays and with gcsfs for the files beside them. The settings
below make gcsfs verify checksums, and not cache listings, which other programs may change.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import fsspec

from runtime.errors import TransientError
from utils import ConfigError

SCHEME = "gs://"
RETRY_S = 60.0  # time for which a failed request is retried
REQUEST_S = 20.0  # timeout to connect, and between two reads of a response
AT_ONCE = 8  # concurrent requests
PART = ".part"  # suffix of the temporary object of `append`
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
    """The bucket does not exist or denies access: retrying does not help."""


class Unavailable(TransientError, OSError):
    """A request failed, and may succeed later."""


class Changed(Exception):
    """The object's generation is not the one that the request required."""


class ObjectInfo(NamedTuple):
    """An object in a listing."""

    size: int
    crc32c: str  # of the content, in base64


def is_bucket(url: Any) -> bool:
    return str(url).startswith(SCHEME)


def refusal(path: str, error: Exception) -> str | None:
    """Explain why a request for `path` will fail again, with the fix; None if a retry may help.

    Google's client has exception classes for this, gcsfs has codes, and tensorstore has messages.
    """
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError

    def is_any(kind: type[Exception], code: int, *prefixes: str) -> bool:
        same_code = getattr(error, "code", None) == code
        return isinstance(error, kind) or same_code or str(error).startswith(prefixes)

    # An unreachable token server also raises GoogleAuthError.
    causes = (error, error.__cause__, *error.args[:1])
    away = getattr(error, "retryable", False) or any(isinstance(c, TransportError) for c in causes)
    no_login = isinstance(error, GoogleAuthError) and not away
    if isinstance(error, exceptions.NotFound):
        bucket = path.removeprefix(SCHEME).partition("/")[0]
        fix = f"There is no bucket {bucket}. Create it, or use another"
    elif is_any(exceptions.Forbidden, 403, "Forbidden: ", "PERMISSION_DENIED: "):
        fix = (
            "Grant this account roles/storage.objectUser and roles/storage.legacyBucketReader on "
            "the bucket, or use another account: gcloud auth application-default login"
        )
    elif no_login or is_any(exceptions.Unauthorized, 401, "UNAUTHENTICATED: "):
        fix = (
            "There are no valid credentials. Run gcloud auth application-default login, or attach "
            "a service account to the machine"
        )
    else:
        return None
    return f"{path} cannot be used. {fix}. ({one_line(error)})"


def one_line(error: Exception) -> str:
    """Return the message in one line. A long one is cut in the middle: the cause is often last.

    TensorStore's messages end with its own settings and the lines of its source, which are left
    out: otherwise they would hide the cause.
    """
    text = " ".join(re.split(r" \[(?:source locations|tensorstore_spec)=", str(error))[0].split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"


@contextlib.contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Convert any client's exception to FileNotFoundError, AccessDenied, Unavailable or Changed."""
    import aiohttp
    from gcsfs.retry import ChecksumError, HttpError
    from google.api_core.exceptions import GoogleAPIError, PreconditionFailed
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption

    of_google, of_gcsfs = (
        (GoogleAPIError, GoogleAuthError, DataCorruption),
        (HttpError, ChecksumError),
    )
    try:
        yield
    except (FileNotFoundError, AccessDenied, Unavailable):
        raise
    except PreconditionFailed as error:
        raise Changed(f"{path} was changed by another program") from error
    except (*of_google, *of_gcsfs, aiohttp.ClientError, OSError) as error:
        if why := refusal(path, error):
            raise AccessDenied(why) from error
        raise Unavailable(f"a request for {path} failed: {one_line(error)}") from error


def filesystem() -> Any:
    """Return gcsfs with the settings above. Wrap its calls in `translated_errors`."""
    return fsspec.filesystem("gs")


@cache
def client() -> Any:
    from google.cloud import storage  # late: only runs in buckets need it

    return storage.Client(project=None)


def _retried() -> dict[str, Any]:
    """Return the retry arguments of a request. All requests here are idempotent."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(RETRY_S), "timeout": (REQUEST_S, REQUEST_S)}


class Prefix:
    """The objects below gs://BUCKET/FOLDER, by their names in the folder.

    One program writes at a time (runtime/writer_lock.py). Raises as `translated_errors`.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._bucket, _, below = self.url.removeprefix(SCHEME).partition("/")
        self._below = f"{below}/" if below else ""

    def list_objects(self, below: str = "", records_only: bool = False) -> dict[str, ObjectInfo]:
        """List objects by the prefix `below`; with `records_only`, none of subfolders."""
        with translated_errors(f"{self.url}/{below}"):
            listed = client().list_blobs(
                self._bucket,
                prefix=f"{self._below}{below}",
                delimiter="/" if records_only else None,
                fields="items(name,size,crc32c),nextPageToken",
                **_retried(),
            )
            return {b.name.removeprefix(self._below): ObjectInfo(b.size, b.crc32c) for b in listed}

    def _blob(self, name: str) -> Any:
        return client().bucket(self._bucket).blob(f"{self._below}{name}")

    def read(self, name: str) -> bytes:
        return self.read_with_generation(name)[0]

    def read_with_generation(self, name: str) -> tuple[bytes, int]:
        """Return the content, with its checksum verified, and the object's generation."""
        from google.api_core.exceptions import NotFound

        with translated_errors(f"{self.url}/{name}"):
            try:
                blob = self._blob(name)
                content = blob.download_as_bytes(checksum="crc32c", **_retried())
                return content, int(blob.generation)
            except NotFound as error:
                raise FileNotFoundError(f"{self.url}/{name} does not exist") from error

    def generation(self, name: str) -> int:
        """Return the object's generation; 0 if it does not exist."""
        with translated_errors(f"{self.url}/{name}"):
            found = client().bucket(self._bucket).get_blob(f"{self._below}{name}", **_retried())
            return int(found.generation) if found else 0

    def write(self, name: str, content: bytes, if_generation_match: int | None = None) -> int:
        """Write the object and return its generation. The bucket verifies the checksum.

        if_generation_match  the generation to replace; 0 if the object must not exist
        Raises               Changed for any other generation. After a lost response this may be
                             the generation that this call wrote.
        """
        how = {"checksum": "crc32c", "if_generation_match": if_generation_match, **_retried()}
        with translated_errors(f"{self.url}/{name}"):
            blob = self._blob(name)
            blob.upload_from_string(content, **how)
            return int(blob.generation)

    def append(self, name: str, content: bytes, generation: int) -> int:
        """Append to an object, and return its new generation.

        The content is uploaded as NAME.part, and Cloud Storage concatenates both (`compose`).

        generation  the generation to append to
        Raises      Changed for any other generation, as in `write`, or if the object was removed
        """
        from google.api_core.exceptions import NotFound

        added = self.write(f"{name}{PART}", content)
        with translated_errors(f"{self.url}/{name}"):
            blob, part = self._blob(name), self._blob(f"{name}{PART}")
            how = {"if_source_generation_match": [None, added], **_retried()}
            try:
                blob.compose([blob, part], if_generation_match=generation, **how)
            except NotFound as error:
                raise Changed(f"{self.url}/{name} was removed") from error
        self.remove([f"{name}{PART}"])
        return int(blob.generation)

    def move(self, name: str, to: str) -> None:
        with translated_errors(f"{self.url}/{name}"):
            blob = self._blob(name)
            blob.bucket.copy_blob(blob, blob.bucket, self._blob(to).name, **_retried())
        self.remove([name])

    def remove(self, names: Iterable[str], if_generation_match: int | None = None) -> None:
        """Remove objects that may not exist. Raises Changed for another generation."""
        from google.api_core.exceptions import NotFound

        def one(name: str) -> None:
            with translated_errors(f"{self.url}/{name}"), contextlib.suppress(NotFound):
                self._blob(name).delete(if_generation_match=if_generation_match, **_retried())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names))
