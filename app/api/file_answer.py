"""Sends a file, or the one piece of it that a `Range` header asks for, without holding it in memory."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.api.errors import ApiError

PIECE_BYTES = 256 << 10
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def file_answer(request: Request, path: Path, media_type: str, tag: str) -> Response:
    """Return 200 with the whole file or 206 with a piece. Raises `ApiError` 404 and 416.

    `tag` names the content: with `If-Range` of another one the whole is sent. Several ranges at once are answered
    with the whole file, as RFC 9110 allows.
    """
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError:
        raise ApiError(404, "not_found", "there is no such file any more") from None
    size = os.fstat(file.fileno()).st_size
    try:
        span = _asked(request, size, tag)
    except ApiError:
        file.close()
        raise
    start, end = span or (0, size)
    headers = {
        "accept-ranges": "bytes",
        "etag": f'"{tag}"',
        "content-length": str(end - start),
        "cache-control": "private",
    }
    if span is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    if request.method == "HEAD":
        file.close()
        return Response(status_code=206 if span else 200, headers=headers, media_type=media_type)
    pieces = _pieces(file, start, end)
    return StreamingResponse(pieces, 206 if span else 200, headers=headers, media_type=media_type)


def _asked(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Return the piece [start, end) that is asked for; None: all of it. Raises `ApiError` 416."""
    match = RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if (
        match is None
        or match.groups() == ("", "")
        or request.headers.get("if-range", f'"{tag}"') != f'"{tag}"'
    ):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= size or (first and last and int(last) < int(first)):
        headers = {"content-range": f"bytes */{size}"}
        raise ApiError(416, "invalid_range", f"the file has {size} bytes", headers=headers)
    return start, end


async def _pieces(file: BinaryIO, start: int, end: int) -> AsyncGenerator[bytes, None]:
    try:
        file.seek(start)
        while start < end and (piece := await asyncio.to_thread(file.read, min(PIECE_BYTES, end - start))):
            start += len(piece)
            yield piece
    finally:
        file.close()
