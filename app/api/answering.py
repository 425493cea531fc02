"""One accepted chat request being answered: events from the engine in, a whole answer or frames out.

Every answer ends in exactly one way, counted once: finished, failed, or aborted because the client left.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.responses import Response

from app.api.accounting import accounted_events
from app.api.call_parser import Piece
from app.api.chat_reply import AnswerTimings, ChatCompletion, ChatReply, usage
from app.api.choice_parts import ChoiceParts
from app.api.logprobs import ChoiceLogprobs, LogprobsWriter, TokenLogprob, writers_of
from app.api.protocol import ChatRequest
from app.api.sse import DONE, KEEPALIVE, frame
from app.engine.request import (
    Admitted,
    Finished,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    TextDelta,
    TextEngine,
    Timings,
)
from app.gateway import Gateway
from app.keys import Caller
from app.text_meter import TextMeter

TICKS = 4  # looks at the clock per keep-alive interval: a sign of life is at most a quarter late

Item = tuple[int, GenerationEvent] | None


@dataclass(slots=True)
class Answering:
    """The choices of one request, from admission to their end."""

    gateway: Gateway
    engine: TextEngine
    requests: Sequence[GenerationRequest] = field(repr=False)
    reply: ChatReply
    meter: TextMeter
    request_id: str
    caller: Caller

    async def whole(self, headers: Mapping[str, str]) -> Response:
        """Wait for every choice and return the answer as one document, with these headers and its own."""
        completion = await self.completion()
        headers = {**headers, **timing_headers(completion.timings)}
        return Response(completion.model_dump_json(), media_type="application/json", headers=headers)

    async def completion(self) -> ChatCompletion:
        """Wait for every choice and return the answer."""
        parts = [ChoiceParts(request) for request in self.requests]
        ends: dict[int, Finished] = {}
        writers = writers_of(self.engine.tokenizer, self.requests)
        tokens: list[list[TokenLogprob]] = [[] for _ in self.requests]
        async with aclosing(self._events(silence_s=float("inf"))) as events:
            async for item in events:
                match item:
                    case (index, TextDelta(text) as delta):
                        parts[index].think(delta.thought)
                        parts[index].push(text)
                        if (writer := writers[index]) is not None:
                            tokens[index] += writer.take(delta)
                    case (index, Finished() as end):
                        parts[index].finish()
                        ends[index] = end
        ordered = [ends[index] for index in range(len(self.requests))]
        logprobs = [
            None if writer is None else ChoiceLogprobs(content=[*tokens[index], *writer.finish()])
            for index, writer in enumerate(writers)
        ]
        return self.reply.completion(parts, ordered, logprobs)

    async def frames(self, asked: ChatRequest) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream: roles, text, ends, usage if asked, `[DONE]`; comments in between."""
        async with aclosing(self.chunks(asked)) as chunks:
            async for chunk in chunks:
                yield KEEPALIVE if chunk is None else frame(chunk)
        yield DONE

    async def chunks(self, asked: ChatRequest) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield the chunks of a stream in the order clients rely on, and None where a comment is due."""
        pulse = Pulse(self.gateway.settings.keepalive_s, self.gateway.settings.heartbeat_s)
        logprobs = writers_of(self.engine.tokenizer, self.requests)
        writer = ChunkWriter(self.reply, asked, [ChoiceParts(request) for request in self.requests], logprobs)
        async with aclosing(self._events(silence_s=pulse.tick_s)) as events:
            async for item in events:
                chunks = writer.take(item, is_late=pulse.is_due)
                for chunk in chunks:
                    yield chunk
                if chunks:
                    pulse.note_chunk()
                elif writer.is_open and pulse.wants_chunk:
                    yield writer.heartbeat()
                    pulse.note_chunk()
                elif writer.is_open and pulse.is_due:
                    yield None
                    pulse.note_comment()
        for chunk in writer.last():
            yield chunk

    def _events(self, *, silence_s: float) -> AsyncGenerator[Item, None]:
        return accounted_events(
            self.gateway,
            self.meter,
            (self.engine.generate(request) for request in self.requests),
            caller=self.caller,
            num_answers=len(self.requests),
            silence_s=silence_s,
            count=self._count,
            counts={"prompt_tokens": len(self.requests[0].prompt_ids), "choices": len(self.requests)},
            record=self.gateway.records.begin(
                self.request_id,
                answer_id=self.reply.id,
                tenant=self.requests[0].tenant,
                model=self.engine.model_name,
                endpoint=self.meter.endpoint,
            ),
        )

    def _count(self, index: int, event: GenerationEvent) -> None:
        match event:
            case Admitted():
                self.reply.fingerprint = event.fingerprint
                if index == 0:
                    self.meter.count_prompt(event.prompt_tokens)
            case TextDelta():
                self.meter.count_tokens(index, event.num_tokens)
            case Finished():
                self.meter.count_finished(event)


class ChunkWriter:
    """Turns events into chunks, in the order clients rely on."""

    def __init__(
        self,
        reply: ChatReply,
        asked: ChatRequest,
        parts: Sequence[ChoiceParts],
        logprobs: Sequence[LogprobsWriter | None] = (),
    ) -> None:
        self._reply = reply
        self._asked = asked
        self._parts = parts
        self._num_choices = len(parts)
        self._num_admitted = 0
        self._early: list[tuple[int, GenerationEvent]] = []  # what came before the stream was open
        self._progress: PrefillProgress | None = None
        self._prompt_tokens = 0
        self._num_tokens = 0
        self._ends: dict[int, Finished] = {}
        self._logprobs = logprobs or [None] * len(parts)
        self._tokens: list[list[TokenLogprob]] = [[] for _ in parts]  # of chunks to come
        self.is_open = False

    def take(self, item: Item, *, is_late: bool) -> list[dict[str, Any]]:
        """Return the chunks due now. The stream opens when all choices are admitted, or when that takes long."""
        if item is not None:
            self._num_admitted += isinstance(item[1], Admitted)
        if self.is_open:
            return self._chunks(*item) if item is not None else []
        if item is not None:
            self._early.append(item)
        if self._num_admitted < self._num_choices and not is_late:
            return []
        self.is_open = True
        roles = [self._reply.role_chunk(index) for index in range(self._num_choices)]
        return roles + [chunk for early in self._early for chunk in self._chunks(*early)]

    def heartbeat(self) -> dict[str, Any]:
        """A chunk without text, with how far prefill got."""
        return self._reply.heartbeat_chunk(self._progress)

    def last(self) -> list[dict[str, Any]]:
        """Return what follows the last choice's end."""
        ends = [self._ends[index] for index in range(self._num_choices)]
        options = self._asked.stream_options
        return [self._reply.usage_chunk(ends)] if options and options.include_usage else []

    def _chunks(self, index: int, event: GenerationEvent) -> list[dict[str, Any]]:
        match event:
            case Admitted():
                self._prompt_tokens = event.prompt_tokens
            case PrefillProgress():
                self._progress = event
            case TextDelta():
                self._progress = None
                self._num_tokens += event.num_tokens
                if (writer := self._logprobs[index]) is not None:
                    self._tokens[index] += writer.take(event)
                thought = self._reply.thought_chunk(index, event.thought)
                self._parts[index].think(event.thought)
                pieces = self._parts[index].push(event.text) if event.text else ()
                chunks = [*([thought] if thought else []), *(self._piece_chunk(index, one) for one in pieces)]
                return [chunk | self._extras(event.timings) for chunk in chunks]
            case Finished():
                self._ends[index] = event
                pieces = self._parts[index].finish()
                last = [self._piece_chunk(index, piece) for piece in pieces]
                reason = self._reply.reason_of(event, self._parts[index])
                return [*last, *self._last_tokens(index), self._reply.finish_chunk(index, event, reason)]
        return []

    def _piece_chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            return self._text_chunk(index, piece)
        return self._reply.piece_chunk(index, piece)

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Text with its tokens, where those are asked for."""
        if self._logprobs[index] is None:
            return self._reply.text_chunk(index, text)
        tokens, self._tokens[index] = self._tokens[index], []
        return self._reply.text_chunk(index, text, tokens)

    def _last_tokens(self, index: int) -> list[dict[str, Any]]:
        """Tokens that no text came with: special ones, and those of a character that was never completed."""
        if (writer := self._logprobs[index]) is not None:
            self._tokens[index] += writer.finish()
        return [self._text_chunk(index, "")] if self._tokens[index] else []

    def _extras(self, timings: Timings | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._asked.timings_per_token and timings is not None:
            extras["timings"] = asdict(timings)
        options = self._asked.stream_options
        if options and options.include_usage and options.continuous_usage_stats:
            extras["usage"] = usage(self._prompt_tokens, self._num_tokens).model_dump()
        return extras


class Pulse:
    """When a silent stream owes its client a sign of life: a comment, or a chunk for clients blind to comments."""

    def __init__(self, keepalive_s: float, heartbeat_s: float) -> None:
        self._keepalive_s = keepalive_s or float("inf")
        self._heartbeat_s = heartbeat_s
        self.tick_s = min(self._keepalive_s, heartbeat_s) / TICKS
        self._last_sent = self._last_chunk = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._last_sent >= self._keepalive_s or self.wants_chunk

    @property
    def wants_chunk(self) -> bool:
        return time.monotonic() - self._last_chunk >= self._heartbeat_s

    def note_chunk(self) -> None:
        self._last_sent = self._last_chunk = time.monotonic()

    def note_comment(self) -> None:
        self._last_sent = time.monotonic()


def timing_headers(timings: Timings | AnswerTimings) -> dict[str, str]:
    """Say where the time went: `Server-Timing` (W3C, in milliseconds) and OpenAI's own header."""
    parts = {
        "total": timings.total_s,
        "prefill": timings.prefill_s,
        "decode": timings.decode_s,
        "compute": timings.compute_s,
        "network": timings.network_s,
        "crypto": timings.crypto_s,
        "queue": timings.queue_s,
        "local": timings.local_s,
    }
    entries = [f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items()]
    return {
        "server-timing": ", ".join(entries),
        "openai-processing-ms": str(round(timings.total_s * 1000)),
    }
