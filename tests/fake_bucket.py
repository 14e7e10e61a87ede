"""A bucket for tests: gcp-storage-emulator behind a proxy that can inject faults.

The fixture `bucket` (conftest.py) gives each test an empty bucket. It sets the environment of
google-cloud-storage, gcsfs and tensorstore, also for child processes:

    def test_...(bucket):
        fault = bucket.fault(503, on="upload", path="*/checkpoints/*", after=2, times=2)
        ... write to bucket.url + "/run" ...  # its third and fourth upload there get 503
        assert fault.done == 2

`on` is the operation of a request: `upload`, `start` of a chunked upload, `read`, `look`, `list`,
`delete`, `copy`, `compose` or `other`. It may also be one of the groups `write` and `any`. `path`
matches the object's name in the bucket; for a copy, the new one.

The proxy adds what the emulator lacks: atomic preconditions on generations, generations of reads,
ranges from the end and beyond it, and offsets of lists.
"""

import contextlib
import fnmatch
import http
import http.client
import json
import logging
import re
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

WRITES = {"upload", "start", "delete", "copy", "compose", "other"}
UNSENT = {"connection", "content-length", "keep-alive", "server", "date"}  # set by the proxy

# --- faults ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Fault:
    """A fault of matching requests: the first `after` of them pass, and the next `times` fail.

    kind  an HTTP status to respond with; or
          "cut request": reset the connection before the request arrives,
          "cut response": execute the request, and cut the response in the middle,
          "flip request", "flip response": flip one bit at the end of the content,
          "delay": wait for `seconds`, or until `stopped` is set.
    """

    kind: int | str
    on: str = "any"
    path: str = "*"
    after: int = 0
    times: float = float("inf")
    seconds: float = 60.0
    seen: int = 0  # requests that matched
    done: int = 0  # of these, failed
    stopped: threading.Event = field(default_factory=threading.Event)

    def hits(self, request: "Request") -> bool:
        """Count the request, and return whether it fails."""
        if self.on not in request.words or not fnmatch.fnmatchcase(request.name, self.path):
            return False
        self.seen += 1
        if self.stopped.is_set() or self.seen <= self.after or self.done >= self.times:
            return False
        self.done += 1
        return True


def flipped(content: bytes, end: int) -> bytes:
    """Flip one bit of the last byte before `end`, if there is one."""
    at = max(0, end - 1)
    return content[:at] + bytes(byte ^ 1 for byte in content[at:end]) + content[end:]


# --- requests -------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def error(status: int, message: str = "") -> Answer:
    message = message or http.HTTPStatus(status).phrase
    error = {"code": status, "message": message, "errors": [{"reason": "test"}]}
    body = b"" if status == 304 else json.dumps({"error": error}).encode()
    return Answer(status, {"Content-Type": "application/json"}, body)


class Request:
    """A request, with its operation, bucket and object."""

    def __init__(
        self, method: str, target: str, headers: dict[str, str], body: bytes, starts: dict[str, Any]
    ):
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.query = {key: values[0] for key, values in query.items()}
        self.query = starts.get(self.query.get("upload_id"), {}) | self.query
        found = re.search(r"/b/([^/]+)(/o(?:/(.*))?)?$", self.path)
        bucket, objects, name = found.groups("") if found else ("", "", "")
        self.does = self._does(bool(objects), name)
        if self.does == "compose":
            name = name.removesuffix("/compose")
        if self.does == "copy":
            _, bucket, name = re.split("/(?:rewrite|copy)To/b/(.+)/o/", name)
        self.bucket, self.name = bucket, self._name(unquote(name))
        self.words = {"any", self.does} | ({"write"} if self.does in WRITES else set())

    def _does(self, objects: bool, name: str) -> str:
        if self.path.startswith("/upload/"):
            whole = self.query.get("uploadType") != "resumable" or "upload_id" in self.query
            return "upload" if whole else "start"
        if re.search("/(rewrite|copy)To/", name):
            return "copy"
        if self.method == "POST" and name.endswith("/compose"):
            return "compose"
        if self.method == "GET":
            media = self.query.get("alt") == "media" or self.path.startswith("/download/")
            return ("read" if media else "look") if name or not objects else "list"
        return "delete" if self.method == "DELETE" and name else "other"

    def _name(self, name: str) -> str:
        """Return the name of the object, or the prefix of a list."""
        if self.does == "list":
            return self.query.get("prefix", "")
        if self.does in ("upload", "start"):
            found = re.search(rb"\{.*?\}", self.body, re.DOTALL)  # before any content
            return self.query.get("name") or json.loads(found[0])["name"]
        return name

    def end(self) -> int:
        """Return the end of the object's content in the body."""
        parts = self.headers.get("content-type", "").startswith("multipart/related")
        return self.body.rindex(b"\r\n--") if parts else len(self.body)


# --- the proxy ------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay, as clients expect
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        if "transfer-encoding" in headers:
            self.send_error(501, "no chunked requests here")
            return
        body = self.rfile.read(int(headers.get("content-length", 0)))
        answer, cut = self.server.owner.answer(self.command, self.path, headers, body)
        if answer is None:  # as from a host that went away
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in UNSENT:
                self.send_header(key, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        self.close_connection |= cut

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client went away, as killed ones do
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass


class Emulator(RequestHandler):
    disable_nagle_algorithm = True
    log_message = Handler.log_message


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    owner: "Server"


class Server:
    """The emulator and its proxy, in threads of this process, on free ports."""

    def __init__(self) -> None:
        for name in ("gcp_storage_emulator", "api"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        emulator = partial(Emulator, Storage(use_memory_fs=True))
        self._emulator = Proxy(("127.0.0.1", 0), emulator)
        self._proxy = Proxy(("127.0.0.1", 0), Handler)
        self._proxy.owner = self
        self._one = threading.Lock()  # a precondition holds until its request is done
        # Query and object name of the first request of chunked uploads, by upload_id.
        self._starts: dict[str, dict[str, str]] = {}
        self._buckets: dict[str, Bucket] = {}
        url = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": url,  # google-cloud-storage and gcsfs
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",  # tensorstore
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # speaks gRPC, which is not emulated
            "NO_GCE_CHECK": "true",  # no client looks for a metadata server
            # google-cloud-storage makes no further requests
            "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",
        }

    def __enter__(self) -> "Server":
        for server in (self._emulator, self._proxy):
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self._proxy, self._emulator):
            server.shutdown()
            server.server_close()

    def bucket(self) -> "Bucket":
        """Return a new, empty bucket without soft deletion."""
        bucket = Bucket(f"bucket-{len(self._buckets)}", self.environment)
        settings = {"name": bucket.name, "softDeletePolicy": {"retentionDurationSeconds": "0"}}
        headers = {"content-type": "application/json"}
        with self._one:
            made = self._emulated("POST", "/storage/v1/b", headers, json.dumps(settings).encode())
        assert made.status == 200, made
        self._buckets[bucket.name] = bucket
        return bucket

    def remove_buckets(self) -> None:
        """Remove all buckets. The emulator writes a list of all objects with each new one."""
        with self._one:
            removed = self._emulated("GET", "/wipe", {}, b"")
        assert removed.status == 200, removed

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[Answer | None, bool]:
        """Return (the response, None if there is none; whether it is cut in the middle)."""
        request = Request(method, target, headers, body, self._starts)
        bucket = self._buckets.get(request.bucket)
        kinds = bucket.faults_of(request) if bucket else set()
        answer = self._respond(request, kinds)
        if bucket:
            bucket.log.append(f"{request.does} {request.name} {answer.status if answer else 'cut'}")
        cut = answer is not None and "cut response" in kinds
        return (None if cut and not answer.body else answer), cut

    def _respond(self, request: Request, kinds: set[int | str]) -> Answer | None:
        if "cut request" in kinds:
            return None
        for status in kinds:
            if isinstance(status, int):
                return error(status)
        if "flip request" in kinds:
            request.body = flipped(request.body, request.end())
        with self._one:
            answer = self._refusal(request) or self._done(request)
        if "flip response" in kinds:
            answer.body = flipped(answer.body, len(answer.body))
        return answer

    # --- what the emulator lacks

    def _done(self, request: Request) -> Answer:
        answer = self._emulated(request.method, request.target, request.headers, request.body)
        if request.does == "start" and "Location" in answer.headers:
            [upload] = parse_qs(urlsplit(answer.headers["Location"]).query)["upload_id"]
            self._starts[upload] = request.query | {"name": request.name}
        if request.does == "read" and answer.status in (200, 206):
            answer.headers["X-Goog-Generation"] = self._object(request)["generation"]
            answer.headers["X-Goog-Metageneration"] = "1"
        if request.does == "list" and answer.status == 200:
            start, end = request.query.get("startOffset", ""), request.query.get("endOffset")
            found = json.loads(answer.body)
            items = {i["name"]: i for i in found["items"] if i["name"] >= start}
            found["items"] = [items[n] for n in sorted(items) if not end or n < end]
            answer.body = json.dumps(found).encode()
        return answer

    def _object(self, request: Request, name: str = "") -> dict[str, Any]:
        """Return the emulator's metadata; generation 0 if the object does not exist."""
        path = f"/storage/v1/b/{request.bucket}/o/{quote(name or request.name, safe='')}"
        found = self._emulated("GET", path, {}, b"")
        return json.loads(found.body) if found.status == 200 else {"generation": "0"}

    def _refusal(self, request: Request) -> Answer | None:
        """Return the error for a precondition that does not hold, or an empty range."""
        query, reads = request.query, request.does in ("read", "look")
        if request.does == "compose" and (refused := self._refused_source(request)):
            return refused
        conditions = {"ifGenerationMatch", "ifGenerationNotMatch", "generation"} & query.keys()
        ranged = request.does == "read" and "range" in request.headers
        if request.does in ("list", "other") or not (conditions or ranged):
            return None
        known = self._object(request)
        now = known["generation"]
        if reads and (now == "0" or query.get("generation", now) != now):
            return error(404)
        if query.get("ifGenerationMatch", now) != now:
            return error(412)
        if query.get("ifGenerationNotMatch") == now:
            return error(304 if reads else 412)
        return self._ranged(request, int(known["size"])) if ranged else None

    def _refused_source(self, request: Request) -> Answer | None:
        """Return the error for the first missing or changed object of a compose request."""
        for source in json.loads(request.body)["sourceObjects"]:
            now = self._object(request, source["name"])["generation"]
            required = source.get("objectPreconditions", {}).get("ifGenerationMatch", now)
            if now == "0" or str(required) != now:
                return error(404 if now == "0" else 412)
        return None

    def _ranged(self, request: Request, size: int) -> Answer | None:
        """Convert a range from the end to one from the start; return the error for an empty one."""
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        if not first:
            first = str(max(0, size - int(last)))
            request.headers["range"] = f"bytes={first}-"
        refused = error(416)
        refused.headers["Content-Range"] = f"bytes */{size}"
        return refused if int(first) >= size else None

    def _emulated(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        emulator = http.client.HTTPConnection(*self._emulator.server_address[:2])
        try:
            headers = {key: value for key, value in headers.items() if key not in UNSENT}
            emulator.request(method, target, body or None, headers)
            found = emulator.getresponse()
            return Answer(found.status, dict(found.headers.items()), found.read())
        except http.client.HTTPException as failed:  # the emulator has printed a traceback
            return error(400, f"{method} {target} cannot be emulated: {failed!r}")
        finally:
            emulator.close()


class Bucket:
    """One bucket, its faults, and its requests."""

    def __init__(self, name: str, environment: dict[str, str]):
        self.name, self.url, self.environment = name, f"gs://{name}", environment
        self.log: list[str] = []  # "upload run/lock 200", in the order of the answers
        self._faults: list[Fault] = []
        self._counting = threading.Lock()

    def fault(self, kind: int | str, **how: Any) -> Fault:
        """Add a fault; `how` are the fields of Fault."""
        fault = Fault(kind=kind, **how)
        self._faults.append(fault)
        return fault

    def faults_of(self, request: Request) -> set[int | str]:
        """Return the kinds of faults of this request, after its delays."""
        with self._counting:
            hit = [fault for fault in self._faults if fault.hits(request)]
        for fault in hit:
            if fault.kind == "delay":
                fault.stopped.wait(fault.seconds)
        return {fault.kind for fault in hit}

    def clear_faults(self) -> None:
        """End all faults."""
        for fault in self._faults:
            fault.stopped.set()


def main(delay_ms: str) -> None:
    """Serve a bucket until this process ends. Print its url and environment as JSON.

    python tests/fake_bucket.py DELAY_MS   added to each response
    """
    with Server() as server:
        bucket = server.bucket()
        bucket.fault("delay", seconds=float(delay_ms) / 1e3)
        print(json.dumps({"url": bucket.url, "environment": bucket.environment}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
