"""Pictures that wait a while to be fetched under a URL of their own: in memory, within a bound, each for its time.

Whoever knows the URL may fetch: it holds 192 random bits, so that a page can show a picture without the API key.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from app.api.errors import ApiError
from app.media.pictures import PICTURE_TYPES, PictureFormat

FOLDER = "/v1/images/content/"
PATH = FOLDER + "{name}"
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){0,8}")


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes = field(repr=False)
    form: PictureFormat
    until: float  # on time.monotonic


class PictureLinks:
    """What is kept, oldest first; the oldest makes room."""

    def __init__(self, max_bytes: int, lifetime_s: float) -> None:
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._kept: dict[str, _Kept] = {}
        self.size_bytes = 0

    def keep(self, content: bytes, form: PictureFormat) -> str:
        """Keep a picture and return its path. Raises `ApiError` 400 for one that never fits."""
        if len(content) > self._max_bytes:
            message = "this gateway keeps no pictures of that size: ask for b64_json"
            raise ApiError(400, "invalid_value", message, param="response_format")
        name = f"{secrets.token_urlsafe(24)}.{form}"
        self._kept[name] = _Kept(content, form, time.monotonic() + self._lifetime_s)
        self.size_bytes += len(content)
        self._drop_old()
        return FOLDER + name

    async def fetch(self, request: Request) -> Response:
        """`GET`: the picture, or 404 once its time is over."""
        self._drop_old()
        kept = self._kept.get(request.path_params["name"])
        if kept is None:
            raise ApiError(404, "not_found", "no such picture, or its time is over")
        headers = {"cache-control": f"private, max-age={max(0, int(kept.until - time.monotonic()))}"}
        return Response(kept.content, media_type=PICTURE_TYPES[kept.form], headers=headers)

    def _drop_old(self) -> None:
        now = time.monotonic()
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if oldest.until > now and self.size_bytes <= self._max_bytes:
                return
            del self._kept[name]
            self.size_bytes -= len(oldest.content)


def public_base(request: Request) -> str:
    """Where this gateway is, as its client or the proxy before it says; never the address that is bound.

    Who sends wrong headers gets a wrong URL, and nobody else does.
    """
    headers = request.headers
    scheme = _first(headers.get("x-forwarded-proto", "")).lower()
    scheme = scheme if scheme in ("http", "https") else request.url.scheme
    host = _first(headers.get("x-forwarded-host", ""))
    host = host if HOST.fullmatch(host) else headers.get("host", "")
    if not HOST.fullmatch(host):
        server = request.scope.get("server") or ("127.0.0.1", None)
        host = server[0] if server[1] is None else f"{server[0]}:{server[1]}"
    prefix = _first(headers.get("x-forwarded-prefix", "")).rstrip("/")
    return f"{scheme}://{host}{prefix if PREFIX.fullmatch(prefix) else ''}"


def _first(value: str) -> str:
    """The header's first entry: that of the proxy which the client reached."""
    return value.partition(",")[0].strip()
