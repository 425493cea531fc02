"""The request for a transcription as a typed model, and the shapes of its answers. Knows nothing of engines.

Rule as in `protocol`: what cannot change the answer is ignored, what would change it and is not built is refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, RootModel, ValidationError, model_validator

from app.api.errors import from_validation, invalid, unsupported
from app.api.messages import Lenient, refuse
from app.api.multipart import FieldTypes, Upload
from app.api.protocol import MAX_NAME, Number
from app.api.routing_field import RoutingField
from app.engine.speech import Segment, Task, Transcribed, text_of

MAX_PROMPT: Final = 32_000  # characters; the model itself takes some hundred tokens of it
MAX_SEED: Final = 2**63 - 1
MAX_ITEMS: Final = 8
ANSWER_FORMATS = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORM_TYPES: Final = FieldTypes(
    numbers=("temperature", "seed", "max_hops"),
    flags=("stream", "distinct_owners", "include_progress"),
    objects=("diffuse", "stream_options"),
    files=("file",),
)
# Fields of OpenAI's other models that would change the answer.
NOT_BUILT: Final = {
    "known_speaker_names": "nobody here tells speakers apart",
    "known_speaker_references": "nobody here tells speakers apart",
    "keywords": "give spellings in the prompt",
    "languages": "give one language",
}
AUDIO_TOKENS_PER_S: Final = 50  # positions of Whisper's encoder, for usage in tokens


class TranscriptionStreamOptions(Lenient):
    """What a stream carries besides text."""

    include_progress: bool | None = None  # an event for each window, with its segments


class TranscriptionFields(Lenient):
    """What is asked of a recording; None means the default everywhere."""

    model: Annotated[str | None, Field(min_length=1, max_length=MAX_NAME)] = None
    language: Annotated[str | None, Field(max_length=64)] = None
    prompt: Annotated[str | None, Field(max_length=MAX_PROMPT, repr=False)] = None
    response_format: ANSWER_FORMATS | None = None
    temperature: Annotated[Number | None, Field(ge=0, le=1)] = None
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None, Field(max_length=MAX_ITEMS)
    ] = None
    include: Annotated[list[str] | None, Field(max_length=MAX_ITEMS)] = None
    chunking_strategy: Any = None
    stream: bool | None = None
    stream_options: TranscriptionStreamOptions | None = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    diffuse: RoutingField | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.timestamp_granularities:
            if "word" in self.timestamp_granularities:
                raise refuse(
                    "times of words are not told, only of segments",
                    field="timestamp_granularities",
                    code="unsupported_parameter",
                )
            if self.format != "verbose_json":
                raise refuse("it needs response_format verbose_json", field="timestamp_granularities")
        if self.stream and self.format not in ("json", "text"):
            raise refuse("a stream carries text: ask for response_format json or text", field="stream")
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream", field="stream_options")
        if self.chunking_strategy not in (None, "auto"):
            raise refuse(
                "a recording is cut where the model hears a pause: auto",
                field="chunking_strategy",
                code="unsupported_parameter",
            )
        if self.diffuse is not None and self.diffuse.draft is not None:
            raise refuse("only chats have drafts", field="diffuse.draft", code="unsupported_parameter")
        return self

    @property
    def format(self) -> ANSWER_FORMATS:
        return self.response_format or "json"

    @property
    def wants_times(self) -> bool:
        """Whether the answer says when something was said."""
        return self.format not in ("json", "text") or self.wants_progress

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)


class TranscriptionRequest(TranscriptionFields):
    """The form as documents have it."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]


class DurationUsage(Lenient):
    """How long the recording was, in whole seconds."""

    type: Literal["duration"] = "duration"
    seconds: int


class InputTokens(Lenient):
    """Where the tokens came from."""

    audio_tokens: int
    text_tokens: int


class TokenUsage(Lenient):
    """The same as tokens: places that the encoder made of the recording, and tokens of text."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokens


class TranscriptionAnswer(Lenient):
    """`response_format` json."""

    text: str
    usage: DurationUsage


class SegmentField(Lenient):
    """One segment. `avg_logprob` and `no_speech_prob` are 0 where the ends of the model are on nodes."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseAnswer(Lenient):
    """`response_format` verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SegmentField]
    usage: DurationUsage


class TranscriptionJson(RootModel[TranscriptionAnswer | VerboseAnswer]):
    """An answer that is JSON."""


class TranscriptionEvent(Lenient):
    """One event of a stream; which fields it has `type` says."""

    type: Literal["transcript.text.delta", "transcript.text.done", "transcript.progress"]
    delta: str | None = Field(default=None, repr=False)
    text: str | None = Field(default=None, repr=False)
    usage: TokenUsage | None = None
    done_s: float | None = None
    total_s: float | None = None
    segments: list[SegmentField] | None = Field(default=None, repr=False)


def parse_transcription(fields: Mapping[str, Any], task: Task) -> tuple[TranscriptionFields, bytes]:
    """Validate a form; return what is asked, and the file. Raises `ApiError` 400 that names the first wrong field."""
    upload = fields.get("file")
    if upload is None:
        raise invalid("file", "missing required parameter: 'file'", code="missing_required_parameter")
    if not isinstance(upload, Upload):
        raise invalid("file", "send the recording as a file of a multipart form", code="invalid_file")
    for name, why in NOT_BUILT.items():
        if fields.get(name) not in (None, "", []):
            raise unsupported(name, f"'{name}' is not supported: {why}")
    if fields.get("include"):
        raise unsupported("include", "'include' is not supported: probabilities are not told")
    if task == "translate" and fields.get("language"):
        raise unsupported("language", "'language' is not supported: a translation is in English")
    try:
        return TranscriptionFields.model_validate(dict(fields)), upload.content
    except ValidationError as error:
        raise from_validation(error) from None


def segment_field(segment: Segment) -> SegmentField:
    return SegmentField(
        id=segment.number,
        seek=segment.seek,
        start=segment.start_s,
        end=segment.end_s,
        text=segment.text,
        tokens=list(segment.token_ids),
        temperature=float(segment.temperature),
        avg_logprob=segment.avg_logprob or 0.0,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob or 0.0,
    )


def duration_usage(made: Transcribed) -> DurationUsage:
    return DurationUsage(seconds=ceil(made.duration_s))


def token_usage(made: Transcribed) -> TokenUsage:
    audio, prompt, drawn = ceil(made.duration_s * AUDIO_TOKENS_PER_S), made.prompt_tokens, made.timings.tokens
    return TokenUsage(
        input_tokens=audio + prompt,
        output_tokens=drawn,
        total_tokens=audio + prompt + drawn,
        input_token_details=InputTokens(audio_tokens=audio, text_tokens=prompt),
    )


def verbose_answer(made: Transcribed, task: Task, language: str) -> VerboseAnswer:
    return VerboseAnswer(
        task=task,
        language=language,
        duration=made.duration_s,
        text=text_of(made.segments),
        segments=[segment_field(segment) for segment in made.segments],
        usage=duration_usage(made),
    )
