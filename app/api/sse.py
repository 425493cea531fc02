"""Server-sent events as the official clients can read them: `data:` frames and comments.

No `id:`, no `retry:` and no empty frame anywhere, and no named events in a chat: each of them crashes an official
client (openai.md, sections 0 and 1.5); streams of pictures, sounds and responses name theirs as OpenAI does. An answer
that fails after its first frame says so in a frame and ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.errors import ApiError, ClientGoneError

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
STALLED_CLIENT_S = (
    300.0  # a client that reads nothing for so long is gone; its answer holds memory on every node
)
ENCODER = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
)  # made once: there is a frame for each token
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def frame(chunk: Mapping[str, Any]) -> bytes:
    """Encode one chunk as one frame."""
    return b"data: " + ENCODER.encode(chunk).encode() + b"\n\n"


def named_frame(name: str, event: Mapping[str, Any]) -> bytes:
    """Encode one event of an endpoint whose events have names: responses, pictures, sounds, video jobs, never chat."""
    return b"event: " + name.encode() + b"\n" + frame(event)


class EventStream(Response):
    """Sends frames as they are made; the status line waits for the first one.

    An error before the first frame is raised, and becomes an ordinary error response; a later one is told to
    `translate` and sent as a frame. When the client leaves, `frames` is closed at once and `ClientGoneError`
    raised.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        translate: Callable[[Exception], ApiError],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **(headers or {})}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._frames = frames
        self._translate = translate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        is_started = False
        async with aclosing(self._frames) as frames:
            try:
                async for data in frames:
                    if not is_started:
                        is_started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await _write(send, data)
            except ClientGoneError:
                raise
            except Exception as error:
                if not is_started:
                    raise
                await _write(send, frame(self._translate(error).envelope()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    try:
        async with asyncio.timeout(STALLED_CLIENT_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGoneError from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, but drop it the moment the client leaves: it is cancelled and `ClientGoneError` raised.

    The request's body must have been read: what `receive` says next can then only be that the client left.
    """
    listening = asyncio.create_task(_disconnected(receive))
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        listening.cancel()
        working.cancel()
        await asyncio.gather(listening, working, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
