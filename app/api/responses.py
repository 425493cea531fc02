"""`POST /v1/responses`, stateless: the same answers as a chat's, in the shapes of OpenAI's newer endpoint.

A request becomes a chat request and goes the chat's way; what comes back is translated. Nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.answering import Answering, timing_headers
from app.api.body import BodyLimits, read_json_object
from app.api.chat import ChatCompletions
from app.api.compat import PASSED_FIELDS, ignored_params
from app.api.errors import ApiError, is_client_gone
from app.api.protocol import ChatRequest
from app.api.responses_protocol import AskedResponse, ResponsesRequest
from app.api.responses_reply import ResponseReply
from app.api.scope import caller_of, request_id_of
from app.api.sse import KEEPALIVE, EventStream, named_frame, until_disconnect
from app.gateway import Gateway

PATH = "/v1/responses"


class Responses:
    """The endpoint, over the chat's."""

    def __init__(self, gateway: Gateway, chats: ChatCompletions) -> None:
        self._gateway = gateway
        self._chats = chats
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Answer. Streams when the body says `"stream": true`."""
        arrived = time.perf_counter()
        asked_for = await read_json_object(request, self._limits)
        asked = AskedResponse(asked_for)
        ignored = ignored_params(asked_for, ResponsesRequest, ChatRequest, passed=PASSED_FIELDS)
        beginning = self._chats.begin(
            asked.chat,
            request_id_of(request.scope),
            arrived,
            caller_of(request.scope),
            endpoint=PATH,
            id_prefix="resp_",
        )
        with asked.renaming():
            answering = await until_disconnect(request.receive, beginning)
        chat = answering.reply
        reply = ResponseReply(chat.id, chat.created, asked.request, answering.requests[0].sampling)
        failure = partial(self._gateway.failure, request.scope)
        if asked.request.stream:
            return EventStream(frames(answering, asked, reply, failure), failure, ignored)
        with asked.renaming():
            completion = await until_disconnect(request.receive, answering.completion())
        headers = {**ignored, **timing_headers(completion.timings)}
        body = reply.whole(completion).model_dump_json()
        return Response(body, media_type="application/json", headers=headers)


async def frames(
    answering: Answering,
    asked: AskedResponse,
    reply: ResponseReply,
    translate: Callable[[Exception], ApiError],
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream, from `response.created` to the one event that ends it; comments in between.

    Raises what happens before the first frame; what happens later is told as `response.failed`.
    """
    is_open = False
    with asked.renaming():
        try:
            async with aclosing(answering.chunks(asked.chat)) as chunks:
                async for chunk in chunks:
                    for event in [] if is_open else reply.begin():
                        yield _frame(event)
                    is_open = True
                    for event in [] if chunk is None else reply.take(chunk):
                        yield _frame(event)
                    if chunk is None:
                        yield KEEPALIVE
            for event in reply.finish():
                yield _frame(event)
        except Exception as error:
            if not is_open or is_client_gone(error):
                raise
            yield _frame(reply.fail(translate(error)))


def _frame(event: dict[str, Any]) -> bytes:
    return named_frame(event["type"], event)
