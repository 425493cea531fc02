"""What pictures, videos and sounds are asked with alike: the fields, and what the engine is asked in the end.

Rule as in `protocol`: what cannot change the answer is ignored, what would change it and is not built is refused by
name. Knows nothing of engines but their defaults.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, field_validator, model_validator

from app.api.errors import from_validation, invalid, unsupported
from app.api.messages import Lenient, refuse
from app.api.protocol import MAX_NAME, Number
from app.api.routing_field import RoutingField
from app.engine.diffusion.request import WARMUP_STEPS, DiffusionDefaults, DiffusionRequest

MAX_PROMPT = 32_000  # characters: OpenAI's bound; the text encoder's own is far below
MAX_STEPS = 1000
MAX_GUIDANCE = 100
MAX_PATCHES = 64
MAX_SEED = 2**63 - 1
DRAWN_SEED_BITS = 32  # a seed of our own is read by clients whose numbers are doubles
MAX_OPTIONS = 32  # of the noise scheduler
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
AUTO = "auto"

# Fields of other servers that would change the answer: nothing here begins from a picture, or holds adapters.
NOT_BUILT = (
    "image",
    "image_url",
    "init_image",
    "input_image",
    "input_reference",
    "mask",
    "strength",
    "control_image",
    "lora",
    "loras",
    "lora_path",
    "clip_skip",
    "sampler",
    "sampler_name",
    "true_cfg_scale",
    "guidance_scale_2",
    "guidance_rescale",
    "enhance_prompt",
    "flow_shift",
    "fps",
    "frame_rate",
)

# What other servers call fields that we have: passed over, they would be lost in silence.
OUR_NAMES = {
    "width": "size",
    "height": "size",
    "resolution": "size",
    "aspect_ratio": "size",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "num_steps": "steps",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "num_outputs": "n",
    "num_outputs_per_prompt": "n",
}


def _is_option(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise refuse("an option of the noise scheduler is a number, a flag or a word")
    return value


Option = Annotated[Any, BeforeValidator(_is_option, json_schema_input_type=bool | int | float | str)]
Asked = TypeVar("Asked", bound="DiffusionFields")


class DiffusionFields(Lenient):
    """What one answer is asked with; None means the model's own default everywhere."""

    NOT_HERE: ClassVar[dict[str, str]] = {}  # fields that other kinds have, and why this one has none

    model: Annotated[str | None, Field(min_length=1, max_length=MAX_NAME)] = None
    negative_prompt: Annotated[str | None, Field(max_length=MAX_PROMPT, repr=False)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    steps: Annotated[
        int | None,
        Field(ge=1, le=MAX_STEPS, validation_alias=AliasChoices("steps", "num_inference_steps")),
    ] = None
    guidance_scale: Annotated[Number | None, Field(ge=0, le=MAX_GUIDANCE)] = None
    scheduler: Annotated[dict[str, Option] | None, Field(max_length=MAX_OPTIONS)] = None
    patches: Annotated[int | None, Field(ge=1, le=MAX_PATCHES)] = None
    warmup: Annotated[int | None, Field(ge=0, le=MAX_STEPS)] = None
    extrapolate: bool | None = None
    two_streams: bool | None = None
    wire: Literal["compute", "bf16", "int8-delta"] | None = None
    diffuse: RoutingField | None = None

    @model_validator(mode="after")
    def _has_no_drafts(self) -> Self:
        if self.diffuse is not None and self.diffuse.draft is not None:
            raise refuse("only text has drafts", field="diffuse.draft", code="unsupported_parameter")
        return self

    def common(self, defaults: DiffusionDefaults) -> dict[str, Any]:
        """Return the fields of a `DiffusionRequest` that all kinds have; the seed is the first answer's."""
        return {
            "negative_prompt": self.negative_prompt or None,
            "steps": self.steps or defaults.steps or None,  # none: their number follows from a song's length
            "guidance_scale": self.guidance_scale,
            "seed": secrets.randbits(DRAWN_SEED_BITS) if self.seed is None else self.seed,
            "scheduler": self.scheduler or {},
            "patches": self.patches or 1,
            "warmup": WARMUP_STEPS if self.warmup is None else self.warmup,
            "extrapolate": bool(self.extrapolate),
            "two_streams": bool(self.two_streams),
            "wire": self.wire or "compute",
        }


class Sized(DiffusionFields):
    """A picture or a video."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT, repr=False)]
    size: str | None = None

    @field_validator("size")
    @classmethod
    def _is_size(cls, size: str | None) -> str | None:
        if size is not None and size != AUTO and not SIZE.fullmatch(size):
            raise refuse("write a size as WIDTHxHEIGHT in pixels, or auto")
        return size

    @model_validator(mode="after")
    def _has_words(self) -> Self:
        if not self.prompt.strip():
            raise refuse("the prompt is empty", field="prompt")
        return self

    def pixels(self, defaults: DiffusionDefaults, most: int) -> dict[str, Any]:
        """Return width and height. Raises `ApiError` 400 for more pixels than this gateway makes."""
        match = SIZE.fullmatch(self.size or "")
        if match is None:
            return {"width": defaults.width, "height": defaults.height}
        width, height = int(match[1]), int(match[2])
        if width * height > most:
            raise invalid("size", f"a size of at most {most} pixels in all is made here")
        return {"width": width, "height": height}


def parse_fields(kind: type[Asked], body: Mapping[str, Any]) -> Asked:
    """Validate a request. Raises `ApiError` 400 that names the first wrong field."""
    for name in NOT_BUILT:
        if body.get(name) not in (None, "", []):
            raise unsupported(
                name, f"'{name}' is not supported: nothing here begins from a picture or changes a model"
            )
    misplaced = {name: f"the field is called {ours}" for name, ours in OUR_NAMES.items()} | kind.NOT_HERE
    for name, why in misplaced.items():
        is_count = OUR_NAMES.get(name, name) == "n"  # one answer is what there is anyway
        if body.get(name) not in (None, "", *((1, "1") if is_count else ())):
            raise unsupported(name, f"'{name}' is not supported here: {why}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def size_text(request: DiffusionRequest, defaults: DiffusionDefaults) -> str:
    """The size as clients write it."""
    return f"{request.width or defaults.width}x{request.height or defaults.height}"
