"""`/`: the page that shows a swarm at work, from files of this package. Asks nobody else for anything.

Its files are open without a key, they say nothing; what the page then asks of the API needs one as ever.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from app.api.errors import ApiError

ROOT: Final = "/"
FOLDER: Final = "/page/"
FILE_PATH: Final = "/page/{name}"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Pictures and sounds that were made here are shown from memory: data: and blob: are that, and no address.
POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # ask each time: another version of the gateway brings another page
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    content: bytes = field(repr=False)
    media_type: str
    tag: str


class Page:
    """The page's files, read once."""

    def __init__(self) -> None:
        self._files = _read()

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(INDEX, request)

    async def file(self, request: Request) -> Response:
        """One of the files that it is made of."""
        return self._answer(request.path_params["name"], request)

    def _answer(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise ApiError(404, "not_found", "the page has no such file")
        headers = HEADERS | {"etag": file.tag}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def _read() -> dict[str, PageFile]:
    files = {}
    for entry in (resources.files("app") / "page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[entry.name] = PageFile(content, TYPES[suffix], tag)
    return files
