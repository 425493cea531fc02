"""`POST /v1/chat/completions`: one question, one or several answers, whole or streamed.

The journey of a request, read downwards: parse, find the engine, plan, generate, write.
"""

from __future__ import annotations

import secrets
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.api.answering import Answering
from app.api.body import BodyLimits, read_json_object
from app.api.chat_reply import ChatReply
from app.api.compat import ignored_params
from app.api.errors import invalid
from app.api.generation import plan_generation
from app.api.media_parts import intake_of
from app.api.protocol import ChatRequest, parse_chat
from app.api.scope import caller_of, request_id_of
from app.api.sse import EventStream, until_disconnect
from app.gateway import Gateway
from app.keys import Caller
from app.text_meter import TextMeter

PATH = "/v1/chat/completions"


class ChatCompletions:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)
        self._intake = intake_of(gateway.settings)

    async def create(self, request: Request) -> Response:
        """Answer a chat. Streams when the body says `"stream": true`."""
        arrived = time.perf_counter()
        body = await read_json_object(request, self._limits)
        asked = parse_chat(body)
        self._check_choices(asked)
        beginning = self.begin(asked, request_id_of(request.scope), arrived, caller_of(request.scope))
        answering = await until_disconnect(request.receive, beginning)
        ignored = ignored_params(body, ChatRequest)
        if asked.stream:
            return EventStream(
                answering.frames(asked), partial(self._gateway.failure, request.scope), ignored
            )
        return await until_disconnect(request.receive, answering.whole(ignored))

    async def begin(
        self,
        asked: ChatRequest,
        request_id: str,
        arrived: float,
        caller: Caller,
        *,
        endpoint: str = PATH,
        id_prefix: str = "chatcmpl-",
    ) -> Answering:
        """Plan what a valid request asks for. Raises `ApiError` and what `ready_engine` and `plan_generation` do."""
        own, wishes = self._gateway.settings, asked.diffuse
        route = own.route if wishes is None else wishes.over(own.route)
        draft = own.draft if wishes is None or wishes.draft is None else wishes.draft
        engine = await self._gateway.ready_engine(asked.model, caller.key)
        completion_id = f"{id_prefix}{secrets.token_hex(12)}"
        deadline_s = self._gateway.settings.request_timeout_s or None
        planned = await plan_generation(
            asked,
            engine,
            completion_id,
            self._intake,
            deadline_s=deadline_s,
            route=route,
            draft=draft,
            tenant=caller.tenant,
        )
        meter = TextMeter(
            self._gateway.metrics,
            model=engine.model_name,
            endpoint=endpoint,
            is_stream=bool(asked.stream),
            arrived=arrived,
        )
        counts_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        reply = ChatReply(
            completion_id,
            int(time.time()),
            asked.model,
            counts_usage=counts_usage,
            tells_reasoning=asked.tells_reasoning,
            says_functions=asked.says_functions,
        )
        return Answering(self._gateway, engine, planned, reply, meter, request_id, caller)

    def _check_choices(self, asked: ChatRequest) -> None:
        most = min(self._gateway.settings.max_choices, self._gateway.settings.max_requests)
        if asked.num_choices > most:
            raise invalid("n", f"n is at most {most} here")
