"""Sends a file, or the one piece of it that a `Range` header asks for, without holding it in memory.

Knows nothing of where the file is.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.api.errors import ApiError
from app.state.state import JobFile, StateError

RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def file_answer(request: Request, file: JobFile, media_type: str, tag: str) -> Response:
    """Return 200 with the whole file or 206 with a piece, and close it. Raises `ApiError` 416.

    `tag` names the content: with `If-Range` of another one the whole is sent. Several ranges at once are answered
    with the whole file, as RFC 9110 allows.
    """
    size = file.size
    try:
        span = _asked(request, size, tag)
    except ApiError:
        await file.close()
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
        await file.close()
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


async def _pieces(file: JobFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
    """Raises `StateError` where the file goes meanwhile: an answer that breaks off is seen to be no whole one."""
    try:
        while start < end:
            piece = await file.read(start, end)
            if not piece:
                raise StateError("the file was removed while it was sent")
            start += len(piece)
            yield piece
    finally:
        await file.close()
