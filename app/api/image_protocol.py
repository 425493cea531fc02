"""The image request as a typed model, and the shapes of its answer, whole or as events. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.api.diffusion_protocol import MAX_SEED, Sized, parse_fields
from app.api.making import HopField, MadeTimings
from app.api.messages import Lenient, refuse
from app.engine.diffusion.request import DiffusionDefaults, Made, Started
from app.media.pictures import BEST_QUALITY, PictureFormat

MAX_PICTURES = 10
MAX_PARTIAL = 3

Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
# Shares of the model's own number of steps: half shows what it will be, twice is where most models stop to change.
EFFORTS: Mapping[str, float] = {"low": 0.5, "high": 2, "hd": 2, "xhigh": 2, "max": 2}


class ImageStreamOptions(Lenient):
    """What a stream carries besides pictures."""

    include_progress: bool | None = (
        None  # an event for each step, with a rough small picture where there is one
    )


class ImageRequest(Sized):
    """A request for pictures; None means the default everywhere."""

    NOT_HERE: ClassVar = {
        "seconds": "a picture has no length",
        "duration": "a picture has no length",
        "num_frames": "a picture has no frames",
    }

    n: Annotated[int | None, Field(ge=1, le=MAX_PICTURES)] = None
    quality: Quality | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    output_format: PictureFormat | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=BEST_QUALITY)] = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    stream_options: ImageStreamOptions | None = None
    partial_images: Annotated[int | None, Field(ge=0, le=MAX_PARTIAL)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.background == "transparent":
            raise refuse("pictures are opaque here", field="background", code="unsupported_parameter")
        if self.output_compression not in (None, BEST_QUALITY) and self.format == "png":
            raise refuse("png keeps every bit: ask for jpeg or webp", field="output_compression")
        if self.partial_images and not self.stream:
            raise refuse("partial_images needs stream", field="partial_images")
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream", field="stream_options")
        if self.stream and self.response_format == "url":
            raise refuse("a stream carries its pictures itself", field="response_format")
        if self.seed is not None and self.seed > MAX_SEED - self.num_pictures:
            raise refuse("seed + n is too large", field="seed")
        return self

    @property
    def num_pictures(self) -> int:
        return self.n or 1

    @property
    def format(self) -> PictureFormat:
        return self.output_format or "png"

    @property
    def compression(self) -> int:
        return BEST_QUALITY if self.output_compression is None else self.output_compression

    def num_steps(self, defaults: DiffusionDefaults) -> int:
        """The steps that are asked for, or what `quality` makes of the model's own number."""
        return self.steps or max(1, round(defaults.steps * EFFORTS.get(self.quality or "auto", 1)))


def parse_image(body: Mapping[str, Any]) -> ImageRequest:
    """Validate a request body. Raises `ApiError` 400 that names the first wrong field."""
    return parse_fields(ImageRequest, body)


class TokenDetails(Lenient):
    """What tokens were for."""

    text_tokens: int
    image_tokens: int


class ImageUsage(Lenient):
    """Tokens that the text encoder read, and rows of the transformer's stream, over all pictures."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: TokenDetails
    output_tokens_details: TokenDetails


class ImageItem(Lenient):
    """One picture: itself, or where it can be fetched for a while. The seed alone makes it again."""

    b64_json: str | None = Field(default=None, repr=False)
    url: str | None = None
    seed: int


class ImageAnswer(Lenient):
    """The answer: OpenAI's fields, then what else there is to say."""

    created: int
    data: list[ImageItem]
    background: Literal["opaque"] = "opaque"
    output_format: PictureFormat
    quality: str
    size: str
    usage: ImageUsage
    model: str
    seed: int
    steps: int
    timings: MadeTimings
    replays: int
    route: list[HopField]
    system_fingerprint: str
    notes: tuple[str, ...] = ()


EventType = Literal[
    "image_generation.partial_image", "image_generation.completed", "image_generation.progress"
]


class ImageEvent(Lenient):
    """One event of a stream; which fields it has `type` says."""

    type: EventType
    index: int  # of the picture, when several are made
    created_at: int | None = None
    b64_json: str | None = Field(default=None, repr=False)
    partial_image_index: int | None = None
    size: str | None = None
    quality: str | None = None
    background: Literal["opaque"] | None = None
    output_format: PictureFormat | None = None
    usage: ImageUsage | None = None
    seed: int | None = None
    step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    busy: tuple[float, ...] | None = None
    patches: str | None = None  # why steps run as patches or do not, where they were asked for
    timings: MadeTimings | None = None
    replays: int | None = None
    route: list[HopField] | None = None
    system_fingerprint: str | None = None


def usage_of(started: list[Started]) -> ImageUsage:
    """Count one request's tokens; the prompt counts once."""
    text = max((one.text_tokens for one in started), default=0)
    pictures = sum(one.picture_tokens for one in started)
    return ImageUsage(
        input_tokens=text,
        output_tokens=pictures,
        total_tokens=text + pictures,
        input_tokens_details=TokenDetails(text_tokens=text, image_tokens=0),
        output_tokens_details=TokenDetails(text_tokens=0, image_tokens=pictures),
    )


def shown_quality(asked: ImageRequest) -> str:
    """The quality as OpenAI's answers name it; steps of one's own are the middle one."""
    named = {"hd": "high", "xhigh": "high", "max": "high", "low": "low", "high": "high"}
    return "medium" if asked.steps else named.get(asked.quality or "auto", "medium")


def size_of(made: Made) -> str:
    """The size of the picture that came, in pixels."""
    assert made.image is not None
    return f"{made.image.width}x{made.image.height}"
