"""`POST /v1/audio/transcriptions` and `/translations`: what is said in a recording, whole or as it is heard.

The journey of a request, read downwards: parse the form, find the engine, decode the file, listen, write.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from app.api.accounting import accounted_events
from app.api.answering import Pulse, timing_headers
from app.api.body import BodyLimits
from app.api.errors import invalid
from app.api.multipart import read_fields
from app.api.recordings import Recordings
from app.api.scope import caller_of, request_id_of
from app.api.sse import KEEPALIVE, EventStream, named_frame, until_disconnect
from app.api.transcription_protocol import (
    FORM_TYPES,
    TranscriptionAnswer,
    TranscriptionEvent,
    TranscriptionFields,
    duration_usage,
    parse_transcription,
    segment_field,
    token_usage,
    verbose_answer,
)
from app.engine.request import RequestError
from app.engine.speech import SpeechEngine, Task, Transcribed, TranscriptionRequest, WindowDone
from app.gateway import Gateway
from app.keys import Caller
from app.media.subtitles import SUBRIP_TYPE, WEBVTT_TYPE, subrip, webvtt
from app.speech_metrics import SpeechMeter

PATH = "/v1/audio/transcriptions"
TRANSLATIONS_PATH = "/v1/audio/translations"
KINDS = frozenset({"speech"})
SHORTEST_S = 0.1  # as OpenAI's
TEXT_TYPE = "text/plain; charset=utf-8"
ENGLISH = "english"

Item = tuple[int, WindowDone | Transcribed] | None


@dataclass(slots=True)
class _Listening:
    """One accepted recording, from admission to its end."""

    engine: SpeechEngine
    planned: TranscriptionRequest
    meter: SpeechMeter
    request_id: str
    caller: Caller
    has_spoken: bool = False


class Transcriptions:
    """The endpoints, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self._gateway = gateway
        self._limits = BodyLimits(settings.max_upload_bytes, settings.body_timeout_s)
        self._recordings = Recordings(settings)

    async def create(self, request: Request) -> Response:
        """Write down what is said. Streams when the form says `stream`."""
        return await self._answer(request, "transcribe")

    async def translate(self, request: Request) -> Response:
        """Write down in English what is said in another language."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: Task) -> Response:
        arrived = time.perf_counter()
        with self._recordings.counted() as count:
            fields = await read_fields(request, self._limits, FORM_TYPES, count)
            asked, content = parse_transcription(fields, task)
            beginning = self._begin(request, asked, content, task, arrived)
            del fields, content
            listening = await until_disconnect(request.receive, beginning)
        if asked.stream:
            return EventStream(self._frames(asked, listening), partial(self._gateway.failure, request.scope))
        return await until_disconnect(request.receive, self._whole(asked, listening))

    async def _begin(
        self, request: Request, asked: TranscriptionFields, content: bytes, task: Task, arrived: float
    ) -> _Listening:
        settings, wishes, caller = self._gateway.settings, asked.diffuse, caller_of(request.scope)
        engine = cast("SpeechEngine", await self._gateway.ready(asked.model, KINDS, caller.key))
        language = _language(asked.language, engine)
        if task == "translate" and not engine.is_multilingual:
            message = (
                f"the model `{engine.model_name}` understands English only: there is nothing to translate"
            )
            raise invalid("model", message, code="unsupported_value")
        samples = await self._recordings.decoded(content, engine.rate, "file")
        if len(samples) < SHORTEST_S * engine.rate:
            raise invalid(
                "file", f"the recording is shorter than {SHORTEST_S:g} seconds", code="audio_too_short"
            )
        planned = TranscriptionRequest(
            request_id=f"transcript_{secrets.token_hex(12)}",
            model=engine.model_name,
            samples=samples,
            language=language,
            task=task,
            prompt=asked.prompt or "",
            temperature=asked.temperature or 0.0,
            seed=asked.seed or 0,
            wants_times=asked.wants_times,
            deadline_s=settings.request_timeout_s or None,
            route=settings.route if wishes is None else wishes.over(settings.route),
            tenant=caller.tenant,
        )
        path = PATH if task == "transcribe" else TRANSLATIONS_PATH
        meter = SpeechMeter(self._gateway.metrics, model=engine.model_name, endpoint=path, arrived=arrived)
        return _Listening(engine, planned, meter, request_id_of(request.scope), caller)

    async def _whole(self, asked: TranscriptionFields, listening: _Listening) -> Response:
        """Wait for the end, then answer as it was asked for."""
        made: Transcribed | None = None
        async with aclosing(self._events(listening, float("inf"))) as events:
            async for item in events:
                match item:
                    case (_, Transcribed() as made):
                        pass
        if made is None:
            raise RequestError(None, None, "the recording was not written down", status=500)
        return _written(asked, made, listening)

    async def _frames(self, asked: TranscriptionFields, listening: _Listening) -> AsyncGenerator[bytes, None]:
        """Yield the text of each window as it is heard, and all of it at the end; comments in between."""
        pulse = Pulse(self._gateway.settings.keepalive_s, float("inf"))
        async with aclosing(self._events(listening, pulse.tick_s)) as events:
            async for item in events:
                match item:
                    case (_, WindowDone() as window):
                        for event in _told(asked, window, listening):
                            yield _frame(event)
                            pulse.note_chunk()
                    case (_, Transcribed() as made):
                        end = TranscriptionEvent(
                            type="transcript.text.done", text=made.text, usage=token_usage(made)
                        )
                        yield _frame(end)
                    case None if pulse.is_due:
                        yield KEEPALIVE
                        pulse.note_comment()

    async def _events(self, listening: _Listening, silence_s: float) -> AsyncGenerator[Item, None]:
        """What the engine tells, while the recording is held and counted."""
        with self._recordings.held(listening.planned.samples), _own_names():
            events = accounted_events(
                self._gateway,
                listening.meter,
                (listening.engine.transcribe(listening.planned),),
                caller=listening.caller,
                num_answers=1,
                silence_s=silence_s,
                count=lambda _, event: listening.meter.count(event),
                counts={"recording_s": round(len(listening.planned.samples) / listening.engine.rate, 1)},
                record=self._gateway.records.begin(
                    listening.request_id,
                    answer_id=listening.planned.request_id,
                    tenant=listening.planned.tenant,
                    model=listening.engine.model_name,
                    endpoint=listening.meter.endpoint,
                ),
            )
            async with aclosing(events) as told:
                async for item in told:
                    yield item


@contextmanager
def _own_names() -> Iterator[None]:
    """Name fields as this endpoint does where the engine refuses what a chat would call its messages."""
    try:
        yield
    except RequestError as error:
        param = "file" if error.param in ("messages", "max_tokens") else error.param
        raise RequestError(param, error.code, error.message, status=error.status) from None


def _language(asked: str | None, engine: SpeechEngine) -> str | None:
    """The code of the language that was named, by code or by name. Raises `ApiError` 400."""
    if not asked:
        return None
    wanted, known = asked.strip().lower(), engine.languages
    code = wanted if wanted in known else next((one for one, name in known.items() if name == wanted), None)
    if code is None:
        understood = "English only" if not engine.is_multilingual else "others, named as in ISO 639-1"
        raise invalid("language", f"the model `{engine.model_name}` understands {understood}")
    return code


def _written(asked: TranscriptionFields, made: Transcribed, listening: _Listening) -> Response:
    headers = timing_headers(made.timings)
    match asked.format:
        case "text":
            return Response(made.text + "\n", media_type=TEXT_TYPE, headers=headers)
        case "srt":
            return Response(subrip(made.segments), media_type=SUBRIP_TYPE, headers=headers)
        case "vtt":
            return Response(webvtt(made.segments), media_type=WEBVTT_TYPE, headers=headers)
        case "verbose_json":
            task = listening.planned.task
            spoken = listening.engine.languages.get(made.language, made.language)
            answer = verbose_answer(made, task, ENGLISH if task == "translate" else spoken)
            return Response(answer.model_dump_json(), media_type="application/json", headers=headers)
        case "json":
            text = TranscriptionAnswer(text=made.text, usage=duration_usage(made))
            return Response(text.model_dump_json(), media_type="application/json", headers=headers)


def _told(asked: TranscriptionFields, window: WindowDone, listening: _Listening) -> list[TranscriptionEvent]:
    """What a window adds: its text, so that all deltas together are the whole, and how far it is."""
    events = []
    delta = "".join(segment.text for segment in window.segments)
    if not listening.has_spoken:
        delta = delta.lstrip()
    if delta:
        listening.has_spoken = True
        events.append(TranscriptionEvent(type="transcript.text.delta", delta=delta))
    if asked.wants_progress:
        segments = [segment_field(segment) for segment in window.segments]
        events.append(
            TranscriptionEvent(
                type="transcript.progress", done_s=window.done_s, total_s=window.total_s, segments=segments
            )
        )
    return events


def _frame(event: TranscriptionEvent) -> bytes:
    return named_frame(event.type, event.model_dump(mode="json", exclude_none=True))
