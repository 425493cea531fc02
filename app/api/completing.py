"""One accepted completion request being answered: events from the engine in, a whole answer or frames out.

A request may ask for hundreds of answers: few run at once, the others in turn. It ends in exactly one way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.responses import Response

from app.api.accounting import accounted_events
from app.api.answering import Pulse, timing_headers
from app.api.chat_reply import usage
from app.api.completion_protocol import CompletionRequest
from app.api.completion_reply import CompletionLogprobs, CompletionReply, LegacyLogprobs, joined
from app.api.echo import Echo
from app.api.recording import note_event
from app.api.sse import DONE, KEEPALIVE, frame
from app.engine.request import (
    Admitted,
    Finished,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    RequestError,
    TextDelta,
    TextEngine,
    Timings,
)
from app.gateway import Gateway
from app.keys import Caller
from app.text_meter import TextMeter
from slicing.token_scores import TokenScore

Indexed = tuple[int, GenerationEvent]


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """One choice: what the engine is asked, and the prompt where it is told back. `param` is the prompt's field."""

    request: GenerationRequest = field(repr=False)
    echo: Echo | None
    param: str


@dataclass(slots=True)
class Completing:
    """The choices of one request, from admission to their end."""

    gateway: Gateway
    engine: TextEngine
    asked: CompletionRequest = field(repr=False)
    answers: Sequence[PlannedAnswer] = field(repr=False)
    reply: CompletionReply
    meter: TextMeter
    request_id: str
    caller: Caller

    async def whole(self, headers: Mapping[str, str]) -> Response:
        """Wait for every choice and return the answer as one document, with these headers and its own."""
        writers = [ChoiceWriter(self, index) for index in range(len(self.answers))]
        texts: list[list[str]] = [[] for _ in writers]
        logprobs: list[list[CompletionLogprobs]] = [[] for _ in writers]
        async with aclosing(self._events(silence_s=float("inf"))) as events:
            async for item in events:
                for text, told in [] if item is None else writers[item[0]].take(item[1]):
                    assert item is not None
                    texts[item[0]].append(text)
                    logprobs[item[0]] += [] if told is None else [told]
        ends = [writer.finished for writer in writers]
        asks = self.asked.logprobs is not None
        completion = self.reply.completion(
            ["".join(pieces) for pieces in texts],
            [joined(parts) if asks else None for parts in logprobs],
            ends,
        )
        headers = {**headers, **timing_headers(completion.timings)}
        return Response(completion.model_dump_json(), media_type="application/json", headers=headers)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream: text, ends, usage if asked, `[DONE]`; comments in between."""
        pulse = Pulse(self.gateway.settings.keepalive_s, self.gateway.settings.heartbeat_s)
        writers = [ChoiceWriter(self, index) for index in range(len(self.answers))]
        async with aclosing(self._events(silence_s=pulse.tick_s)) as events:
            async for item in events:
                chunks = [] if item is None else writers[item[0]].chunks(item[1])
                for chunk in chunks:
                    yield frame(chunk)
                if chunks:
                    pulse.note_chunk()
                elif pulse.wants_chunk:
                    yield frame(self.reply.text_chunk(0, ""))
                    pulse.note_chunk()
                elif pulse.is_due:
                    yield KEEPALIVE
                    pulse.note_comment()
        options = self.asked.stream_options
        if options and options.include_usage:
            yield frame(self.reply.usage_chunk([writer.finished for writer in writers]))
        yield DONE

    # Events ---------------------------------------------------------------------------------------------------

    async def _events(self, *, silence_s: float) -> AsyncGenerator[Indexed | None, None]:
        record = self.gateway.records.begin(
            self.request_id,
            answer_id=self.reply.id,
            tenant=self.answers[0].request.tenant,
            model=self.engine.model_name,
            endpoint=self.meter.endpoint,
        )

        def count(_: int, item: Indexed) -> None:
            note_event(record, *item)
            self._count(*item)

        settings, waiting = self.gateway.settings, deque(range(len(self.answers)))
        most = self.caller.key.max_concurrent or settings.max_requests
        num_lanes = min(len(waiting), settings.max_choices, settings.max_requests, most)
        accounted = accounted_events(
            self.gateway,
            self.meter,
            (self._lane(waiting) for _ in range(num_lanes)),
            caller=self.caller,
            num_answers=num_lanes,
            silence_s=silence_s,
            count=count,
            counts={
                "prompt_tokens": sum(
                    len(one.request.prompt_ids) for one in self.answers[:: self.asked.num_choices]
                ),
                "choices": len(self.answers),
            },
            record=record,
        )
        async with aclosing(accounted) as events:
            async for item in events:
                yield None if item is None else item[1]

    async def _lane(self, waiting: deque[int]) -> AsyncGenerator[Indexed, None]:
        """Make answers that nobody has taken yet, one after the other."""
        while waiting:
            index = waiting.popleft()
            planned = self.answers[index]
            try:
                async with aclosing(self._answer(planned.request)) as events:
                    async for event in events:
                        yield index, event
            except RequestError as error:
                raise _of_prompt(error, planned.param) from None

    async def _answer(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if request.max_tokens or request.scores_prompt:
            async with aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    yield event
            return
        yield Admitted(len(request.prompt_ids))  # a prompt that is only told back: nothing is computed
        yield Finished("length", len(request.prompt_ids), 0, Timings())

    def _count(self, index: int, event: GenerationEvent) -> None:
        match event:
            case Admitted():
                self.reply.fingerprint = event.fingerprint or self.reply.fingerprint
                if index % self.asked.num_choices == 0:
                    self.meter.count_prompt(event.prompt_tokens)
            case TextDelta():
                self.meter.count_tokens(index, event.num_tokens)
            case Finished():
                self.meter.count_finished(event)


class ChoiceWriter:
    """Turns the events of one choice into text and tokens, the prompt first where it is told back."""

    def __init__(self, completing: Completing, index: int) -> None:
        planned = completing.answers[index]
        self._index = index
        self._reply = completing.reply
        self._asked = completing.asked
        self._echo = planned.echo
        self._scores_prompt = planned.request.scores_prompt
        self._scores: list[TokenScore] = []  # of the prompt
        self._prompt_tokens = 0
        self._num_tokens = 0
        self._end: Finished | None = None
        self._logprobs: LegacyLogprobs | None = None
        if completing.asked.logprobs is not None:
            self._logprobs = LegacyLogprobs(completing.engine.tokenizer, planned.request, planned.echo)

    @property
    def finished(self) -> Finished:
        """How it ended; it has."""
        assert self._end is not None
        return self._end

    def take(self, event: GenerationEvent) -> list[tuple[str, CompletionLogprobs | None]]:
        """Return the texts that are final because of an event, each with its tokens."""
        writer = self._logprobs
        match event:
            case Admitted():
                self._prompt_tokens = event.prompt_tokens
                if self._echo is not None and not self._scores_prompt:
                    return [(self._echo.text, None)]
            case PrefillProgress():
                self._scores += event.scores
            case TextDelta():
                self._num_tokens += event.num_tokens
                told = None if writer is None else writer.take(event)
                if event.text or (told is not None and told.tokens):
                    return [*self._prompt(), (event.text, told)]
            case Finished():
                self._end = event
                return [*self._prompt(), ("", None if writer is None else writer.finish())]
        return []

    def chunks(self, event: GenerationEvent) -> list[dict[str, Any]]:
        """Return the chunks due because of an event."""
        parts = self.take(event)
        match event:
            case Admitted() if not parts:
                return [self._reply.text_chunk(self._index, "")]  # the stream begins
            case Finished():
                *before, (_, rest) = parts
                told = rest if rest is not None and rest.tokens else None
                made = [self._reply.text_chunk(self._index, *part) for part in before]
                return [*made, self._reply.finish_chunk(self._index, told, event)]
        extras = self._extras(event.timings) if isinstance(event, TextDelta) else {}
        return [self._reply.text_chunk(self._index, *part) | extras for part in parts]

    def _prompt(self) -> list[tuple[str, CompletionLogprobs | None]]:
        """The prompt with its scores, once, when all of them are there."""
        if not self._scores_prompt or self._echo is None or self._logprobs is None:
            return []
        self._scores_prompt = False
        return [(self._echo.text, self._logprobs.prompt(self._scores))]

    def _extras(self, timings: Timings | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._asked.timings_per_token and timings is not None:
            extras["timings"] = asdict(timings)
        options = self._asked.stream_options
        if options and options.include_usage and options.continuous_usage_stats:
            extras["usage"] = usage(self._prompt_tokens, self._num_tokens).model_dump()
        return extras


def _of_prompt(error: RequestError, param: str) -> RequestError:
    """An engine's refusal, which speaks of messages, as one of the prompt."""
    if error.param != "messages":
        return error
    message = error.message.replace("the messages", "the prompt")
    return RequestError(param, error.code, message, status=error.status)
