"""Pictures that wait a while to be fetched under a URL of their own: within a bound, each for its time.

Whoever knows the URL may fetch: it holds 192 random bits, so that a page can show a picture without the API key.
"""

from __future__ import annotations

import re
import secrets
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from app.api.errors import ApiError
from app.media.pictures import PICTURE_TYPES, PictureFormat
from app.state.state import Bound, State

FOLDER = "/v1/images/content/"
PATH = FOLDER + "{name}"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){0,8}")


class PictureLinks:
    """What is kept by all gateways that share a state, oldest first; the oldest makes room."""

    def __init__(self, state: State, max_bytes: int, lifetime_s: float) -> None:
        self._max_bytes = max_bytes
        self._kept = state.shelf("pictures", Bound(max_bytes, lifetime_s, counts_bytes=True))

    async def keep(self, content: bytes, form: PictureFormat) -> str:
        """Keep a picture and return its path. Raises `ApiError` 400 for one that never fits, StateError."""
        if len(content) > self._max_bytes:
            message = "this gateway keeps no pictures of that size: ask for b64_json"
            raise ApiError(400, "invalid_value", message, param="response_format")
        name = f"{secrets.token_urlsafe(24)}.{form}"
        await self._kept.put(name, content)
        return FOLDER + name

    async def fetch(self, request: Request) -> Response:
        """`GET`: the picture, or 404 once its time is over."""
        name = request.path_params["name"]
        form = cast("PictureFormat", name.rpartition(".")[2])
        kept = await self._kept.get(name) if NAME.fullmatch(name) and form in PICTURE_TYPES else None
        if kept is None:
            raise ApiError(404, "not_found", "no such picture, or its time is over")
        headers = {"cache-control": f"private, max-age={int(kept.seconds_left)}"}
        return Response(kept.value, media_type=PICTURE_TYPES[form], headers=headers)


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
