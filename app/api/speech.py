"""`POST /v1/audio/speech`: a sound of a prompt, as a file in the asked format or as events.

The models behind it make music and noises, by diffusion (Stable Audio and its like) or of the tokens of a sound codec
(MusicGen); none of them reads a text aloud.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.api.answering import Pulse
from app.api.body import BodyLimits, read_json_object
from app.api.diffusion_protocol import MAX_PROMPT, DiffusionFields, parse_fields
from app.api.errors import unsupported
from app.api.making import Making, timing_headers
from app.api.messages import Lenient, refuse
from app.api.protocol import Number
from app.api.scope import caller_of, request_id_of
from app.api.sse import KEEPALIVE, EventStream, named_frame, until_disconnect
from app.diffusion_metrics import DiffusionMeter, SongMeter
from app.engine.diffusion.request import DiffusionRequest, Made, PatchVerdict, Started, StepDone
from app.engine.request import RequestError
from app.gateway import Gateway
from app.keys import Caller
from app.media.sound import SOUND_TYPES, SoundFormat, encode_sound
from slicing.diffusion.kinds import Kind

PATH = "/v1/audio/speech"
MIN_SECONDS = 0.01  # some samples at any rate
MAX_SECONDS = 3600
PIECE_BYTES = 64 << 10
MAX_TEMPERATURE = 2
MAX_TOP_K = 1 << 20
# Clients must name one of these; what is made has none of them. Another name means that somebody expects a voice.
PASSED_OVER_VOICES = frozenset(
    [
        "alloy",
        "ash",
        "ballad",
        "cedar",
        "coral",
        "default",
        "echo",
        "fable",
        "marin",
        "nova",
        "onyx",
        "sage",
        "shimmer",
        "verse",
    ]
)


class SpeechStreamOptions(Lenient):
    """What a stream carries besides sound."""

    include_progress: bool | None = None  # an event for each step


class SpeechRequest(DiffusionFields):
    """A request for a sound; None means the default everywhere."""

    NOT_HERE: ClassVar = {
        "n": "an answer is one sound, ask for each by itself",
        "size": "a sound has none, its length is called duration",
        "num_frames": "a sound has none, its length is called duration",
    }

    input: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT, repr=False)]
    voice: str | None = None
    response_format: SoundFormat | None = None
    speed: Annotated[Number | None, Field(ge=0.25, le=4)] = None
    stream_format: Literal["audio", "sse"] | None = None
    stream_options: SpeechStreamOptions | None = None
    duration: Annotated[Number | None, Field(ge=MIN_SECONDS, le=MAX_SECONDS)] = None
    seconds: Annotated[Number | None, Field(ge=MIN_SECONDS, le=MAX_SECONDS)] = None
    temperature: Annotated[Number | None, Field(ge=0, le=MAX_TEMPERATURE)] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_TOP_K)] = None
    top_p: Annotated[Number | None, Field(gt=0, le=1)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.input.strip():
            raise refuse("the input is empty", field="input")
        if self.voice and self.voice not in PASSED_OVER_VOICES:
            raise refuse(
                "a sound has no voice: leave it out, or give one of OpenAI's, which is passed over",
                field="voice",
            )
        if self.speed not in (None, 1):
            raise refuse(
                "a sound has no speed: ask for a duration", field="speed", code="unsupported_parameter"
            )
        if self.duration is not None and self.seconds is not None:
            raise refuse("duration and seconds are the same: give one", field="seconds")
        if self.stream_options is not None and self.stream_format != "sse":
            raise refuse("stream_options needs stream_format sse", field="stream_options")
        return self

    @property
    def format(self) -> SoundFormat:
        return self.response_format or "mp3"

    @property
    def own_names(self) -> dict[str, str]:
        """What fields are called here that the engine calls otherwise."""
        return {"prompt": "input"} | ({} if self.seconds is not None else {"seconds": "duration"})

    @property
    def length_s(self) -> float | None:
        return self.duration if self.seconds is None else self.seconds


class SpeechUsage(Lenient):
    """Tokens that the text encoder read, and rows of the transformer's stream, or codes of a song."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechEvent(Lenient):
    """One event of a stream; which fields it has `type` says."""

    type: Literal["speech.audio.delta", "speech.audio.done", "speech.audio.progress"]
    audio: str | None = Field(default=None, repr=False)  # base64
    usage: SpeechUsage | None = None
    seed: int | None = None
    step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    busy: tuple[float, ...] | None = None
    patches: str | None = None


def parse_speech(body: Mapping[str, Any]) -> SpeechRequest:
    """Validate a request body. Raises `ApiError` 400 that names the first wrong field."""
    if body.get("instructions"):
        raise unsupported("instructions", "a sound follows its input alone")
    return parse_fields(SpeechRequest, body)


class Speech:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Make a sound. Sends events when the body says `"stream_format": "sse"`."""
        arrived = time.perf_counter()
        asked = parse_speech(await read_json_object(request, self._limits))
        beginning = self._begin(asked, request_id_of(request.scope), arrived, caller_of(request.scope))
        making = await until_disconnect(request.receive, beginning)
        if asked.stream_format == "sse":
            return EventStream(self._frames(asked, making), partial(self._gateway.failure, request.scope))
        return await until_disconnect(request.receive, self._whole(asked, making))

    async def _begin(self, asked: SpeechRequest, request_id: str, arrived: float, caller: Caller) -> Making:
        settings, wishes = self._gateway.settings, asked.diffuse
        engine = await self._gateway.ready_diffusion(asked.model, Kind.AUDIO, caller.key)
        planned = DiffusionRequest(
            request_id=f"sound_{secrets.token_hex(12)}",
            model=engine.model_name,
            prompt=asked.input,
            seconds=asked.length_s,
            deadline_s=settings.request_timeout_s or None,
            route=settings.route if wishes is None else wishes.over(settings.route),
            tenant=caller.tenant,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            **asked.common(engine.defaults),
        )
        with _named(asked):
            await asyncio.to_thread(engine.check, planned)
        new_meter = SongMeter if engine.defaults.draws_tokens else DiffusionMeter
        meter = new_meter(self._gateway.metrics, model=engine.model_name, endpoint=PATH, arrived=arrived)
        return Making(self._gateway, engine, (planned,), meter, request_id, caller)

    async def _whole(self, asked: SpeechRequest, making: Making) -> Response:
        """Wait for the sound, then send its file in pieces."""
        with _named(asked):
            async with aclosing(making.made()) as answers:
                async for _, made in answers:
                    content = await _encoded(made, asked.format)
                    headers = timing_headers(made.timings) | {"x-seed": str(made.seed)}
        media_type = SOUND_TYPES[asked.format]
        return StreamingResponse(_pieces(content), headers=headers, media_type=media_type)

    async def _frames(self, asked: SpeechRequest, making: Making) -> AsyncGenerator[bytes, None]:
        """Yield the sound in pieces once it is there, then how much it took; comments before."""
        pulse = Pulse(self._gateway.settings.keepalive_s, float("inf"))
        started = Started((), 0)
        async with aclosing(making.events(silence_s=pulse.tick_s)) as events:
            async for item in events:
                match item:
                    case (_, Started() as started):
                        pass
                    case (_, StepDone() | PatchVerdict() as told) if _wants_progress(asked):
                        yield _frame(_progress(told))
                        pulse.note_chunk()
                    case (_, Made() as made):
                        for piece in _pieces(await _encoded(made, asked.format)):
                            audio = base64.b64encode(piece).decode()
                            yield _frame(SpeechEvent(type="speech.audio.delta", audio=audio))
                        end = SpeechEvent(type="speech.audio.done", usage=_usage(started), seed=made.seed)
                        yield _frame(end)
                    case None if pulse.is_due:
                        yield KEEPALIVE
                        pulse.note_comment()


@contextmanager
def _named(asked: SpeechRequest) -> Iterator[None]:
    """Name fields as this endpoint does where the engine refuses them."""
    try:
        yield
    except RequestError as error:
        param = asked.own_names.get(error.param or "", error.param)
        raise RequestError(param, error.code, error.message, status=error.status) from None


async def _encoded(made: Made, form: SoundFormat) -> bytes:
    assert made.samples is not None
    return await asyncio.to_thread(encode_sound, made.samples, made.rate, form)


def _pieces(content: bytes) -> Iterator[bytes]:
    for begin in range(0, len(content), PIECE_BYTES):
        yield content[begin : begin + PIECE_BYTES]


def _frame(event: SpeechEvent) -> bytes:
    return named_frame(event.type, event.model_dump(mode="json", exclude_none=True))


def _progress(told: StepDone | PatchVerdict) -> SpeechEvent:
    if isinstance(told, PatchVerdict):
        said = told.reason or ("steps run as patches" if told.allowed else "steps run whole")
        return SpeechEvent(type="speech.audio.progress", patches=said)
    return SpeechEvent(
        type="speech.audio.progress",
        step=told.number,
        steps=told.of,
        seconds=told.seconds,
        busy=told.busy,
    )


def _usage(started: Started) -> SpeechUsage:
    text, rows = started.text_tokens, started.picture_tokens
    return SpeechUsage(input_tokens=text, output_tokens=rows, total_tokens=text + rows)


def _wants_progress(asked: SpeechRequest) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_progress)
