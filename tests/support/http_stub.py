"""A model hub on loopback: the few endpoints that fetching a model uses, with counters and faults to switch on."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStub:
    """Serves one repository from a folder. Use as a context manager; `url` is its endpoint.

    `weight_bytes` counts the payload sent for *.safetensors, `requests` what was asked for. Faults:
    `failures` holds the status codes that the next weight requests get, `cut_after` ends each weight answer
    after so many bytes (as many times as `num_cuts`), `ignores_ranges` answers 200 with everything, `gate`
    answers 403 or 401 to all.
    """

    def __init__(self, repo: str, folder: Path) -> None:
        self.repo = repo
        self.folder = folder
        self.weight_bytes = 0
        self.requests: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.failures: list[int] = []
        self.cut_after = 0
        self.num_cuts = 0
        self.ignores_ranges = False
        self.gate: tuple[int, str] | None = None
        self._lock = threading.Lock()
        stub = self

        class Handler(_Handler):
            hub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStub:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self) -> list[Path]:
        """The repository's files."""
        return sorted(file for file in self.folder.rglob("*") if file.is_file())

    def name_of(self, file: Path) -> str:
        """A file's path in the repository."""
        return file.relative_to(self.folder).as_posix()

    def count(self, kind: str) -> None:
        """Count one request."""
        with self._lock:
            self.requests[kind] += 1

    def sent(self, size: int) -> None:
        """Count payload of a weight file."""
        with self._lock:
            self.weight_bytes += size

    def next_failure(self) -> int | None:
        """Take the status that the next weight request is to fail with."""
        with self._lock:
            return self.failures.pop(0) if self.failures else None

    def next_cut(self) -> int:
        """Take the number of bytes after which this answer ends early, or 0."""
        with self._lock:
            if not self.num_cuts:
                return 0
            self.num_cuts -= 1
            return self.cut_after


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        hub.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if hub.gate is not None:
            return self._refuse(*hub.gate)
        if match := re.fullmatch(rf"/api/models/{hub.repo}/revision/([^/]+)", path):
            known = match[1] in ("main", COMMIT)
            return (
                self._json({"id": hub.repo, "sha": COMMIT})
                if known
                else self._refuse(404, "RevisionNotFound")
            )
        if path == f"/api/models/{hub.repo}/tree/{COMMIT}":
            return self._json([self._entry(file) for file in hub.files()])
        if match := re.fullmatch(rf"/{hub.repo}/resolve/(?:main|{COMMIT})/([\w./-]+)", path):
            file = hub.folder / match[1]
            return self._file(file) if file.is_file() else self._refuse(404, "EntryNotFound")
        return self._refuse(404, "RepoNotFound")

    def _entry(self, file: Path) -> dict[str, object]:
        return {
            "type": "file",
            "path": self.hub.name_of(file),
            "size": file.stat().st_size,
            "oid": _etag(file),
        }

    def _file(self, file: Path) -> None:
        is_weight = file.suffix == ".safetensors"
        self.hub.count(f"{self.command} {self.hub.name_of(file)}")
        if is_weight and self.command == "GET" and (status := self.hub.next_failure()) is not None:
            return self._refuse(status, "")
        content = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or self.hub.ignores_ranges:
            return self._answer(200, content, file, is_weight)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        extra = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return self._answer(206, content[first : last + 1], file, is_weight, extra)

    def _answer(
        self, status: int, body: bytes, file: Path, is_weight: bool, extra: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        for name, value in (headers | (extra or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.next_cut() if is_weight else 0
        body = body[:cut] if cut else body
        if is_weight:
            self.hub.sent(len(body))
        with suppress(ConnectionError):  # the client had enough
            self.wfile.write(body)
        if cut:
            self.close_connection = True

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Say nothing."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
