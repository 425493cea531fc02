"""`POST /v1/completions`: prompts that are continued as they are, whole or streamed, and scored where that is asked.

The journey of a request, read downwards: parse, find the engine, plan, generate, write.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.api.body import BodyLimits, read_json_object
from app.api.compat import ignored_params
from app.api.completing import Completing, PlannedAnswer
from app.api.completion_protocol import CompletionRequest, Prompt, parse_completion
from app.api.completion_reply import CompletionReply
from app.api.echo import Echo, echo_of
from app.api.errors import invalid
from app.api.generation import context_exceeded, sampling_params
from app.api.scope import caller_of, request_id_of
from app.api.sse import EventStream, until_disconnect
from app.engine.request import GenerationRequest, TextEngine
from app.gateway import Gateway
from app.keys import Caller
from app.text_meter import TextMeter

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt as token ids; `param` is its field."""

    ids: tuple[int, ...]
    echo: Echo | None
    param: str


class Completions:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Continue prompts. Streams when the body says `"stream": true`."""
        arrived = time.perf_counter()
        body = await read_json_object(request, self._limits)
        asked, is_alone = parse_completion(body)
        if asked.num_choices > (most := self._gateway.settings.max_choices):
            raise invalid("n", f"n is at most {most} here")
        beginning = self._begin(
            asked, request_id_of(request.scope), arrived, caller_of(request.scope), is_alone=is_alone
        )
        completing = await until_disconnect(request.receive, beginning)
        ignored = ignored_params(body, CompletionRequest)
        if asked.stream:
            return EventStream(completing.frames(), partial(self._gateway.failure, request.scope), ignored)
        return await until_disconnect(request.receive, completing.whole(ignored))

    async def _begin(
        self, asked: CompletionRequest, request_id: str, arrived: float, caller: Caller, *, is_alone: bool
    ) -> Completing:
        engine = await self._gateway.ready_engine(asked.model, caller.key)
        completion_id = f"cmpl-{secrets.token_hex(12)}"
        async with asyncio.timeout(self._gateway.settings.request_timeout_s or None):
            prompts = await asyncio.to_thread(_read_all, asked, engine, is_alone)
        answers = list(self._planned(asked, engine, prompts, completion_id, caller.tenant))
        meter = TextMeter(
            self._gateway.metrics,
            model=engine.model_name,
            endpoint=PATH,
            is_stream=bool(asked.stream),
            arrived=arrived,
        )
        reply = CompletionReply(
            completion_id,
            int(time.time()),
            asked.model,
            num_choices=asked.num_choices,
            counts_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        )
        return Completing(self._gateway, engine, asked, answers, reply, meter, request_id, caller)

    def _planned(
        self,
        asked: CompletionRequest,
        engine: TextEngine,
        prompts: list[_Read],
        completion_id: str,
        tenant: bytes,
    ) -> Iterator[PlannedAnswer]:
        """The answers, prompt by prompt. A prompt's answers are those that it has by itself with the same seed."""
        own, wishes = self._gateway.settings, asked.diffuse
        route = own.route if wishes is None else wishes.over(own.route)
        draft = own.draft if wishes is None or wishes.draft is None else wishes.draft
        stop_ids = frozenset() if asked.ignore_eos else engine.tokenizer.stop_token_ids
        for number, prompt in enumerate(prompts):
            sampling = sampling_params(asked, engine)
            for choice in range(asked.num_choices):
                index = number * asked.num_choices + choice
                request = GenerationRequest(
                    request_id=f"{completion_id}-{index}",
                    model=engine.model_name,
                    prompt_ids=prompt.ids,
                    sampling=replace(sampling, stream=choice),
                    max_tokens=min(asked.token_limit, engine.answer_room(len(prompt.ids))),
                    stop=asked.stops,
                    stop_token_ids=stop_ids,
                    deadline_s=own.request_timeout_s or None,
                    continues_text=True,
                    route=route,
                    draft=draft,
                    tenant=tenant,
                    num_logprobs=asked.logprobs,
                    scores_prompt=asked.scores_prompt,
                )
                yield PlannedAnswer(request, prompt.echo, prompt.param)


def _read_all(asked: CompletionRequest, engine: TextEngine, is_alone: bool) -> list[_Read]:
    return [
        _read(prompt, "prompt" if is_alone else f"prompt.{number}", asked, engine)
        for number, prompt in enumerate(asked.prompt)
    ]


def _read(prompt: Prompt, param: str, asked: CompletionRequest, engine: TextEngine) -> _Read:
    """Tokenize a prompt, with the special tokens that the model begins with. Raises `ApiError` 400."""
    tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        if len(prompt) > engine.max_positions * tokenizer.max_token_chars:
            raise context_exceeded(engine, param=param)
        ids = tuple(tokenizer.encode_whole(prompt))
    else:
        ids = prompt
    if not ids:
        raise invalid(param, "the prompt is empty, and the model has no token that a text begins with")
    if max(ids) >= engine.vocab_size:
        raise invalid(param, f"a token lies outside the vocabulary of {engine.vocab_size}")
    if engine.answer_room(len(ids)) < (0 if asked.max_tokens == 0 else 1):
        raise context_exceeded(engine, len(ids), param=param)
    return _Read(ids, echo_of(tokenizer, prompt, ids) if asked.echo else None, param)
