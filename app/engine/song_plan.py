"""What is asked of a music model, checked and filled up with the model's own defaults.

Knows no nodes. Refuses by the names that `DiffusionRequest` has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from app.engine.diffusion.request import DiffusionRequest
from app.engine.request import RequestError
from slicing.music import MusicHome
from slicing.sampler import MAX_GUIDANCE, SamplingParams

# Where the model's files say nothing: the guidance of Copet et al. 2023, and the top_k of transformers' `generate`.
GUIDANCE = 3.0
TOP_K = 50
MAX_TEMPERATURE = 2.0
MAX_SEED = (1 << 63) - 1

# Fields of pictures and videos, or of pipelines; a song has none of them.
NOT_OF_SONGS = {
    "negative_prompt": "guidance leads away from no text at all",
    "steps": "a song has a step for every frame, ask for a duration",
    "num_frames": "a song has none, its length is called duration",
    "previews": "there are no previews of a sound",
    "scheduler": "a song has no noise scheduler",
    "extrapolate": "a song has no patches",
    "two_streams": "a song has no patches",
}


@dataclass(frozen=True, slots=True)
class SongPlan:
    """One song to make. With two `branches` the second one has no text, and guidance leads away from it."""

    token_ids: tuple[int, ...] = field(repr=False)
    num_frames: int
    sampling: SamplingParams = field(repr=False)

    @property
    def branches(self) -> int:
        """Branches that run side by side; stock `generate` guides by scales above 1 only."""
        return 2 if self.sampling.guidance_scale > 1 else 1

    @property
    def memory_rows(self) -> int:
        """Rows of encoder states, of all branches."""
        return len(self.token_ids) * self.branches


def plan_song(home: MusicHome, request: DiffusionRequest, *, max_places: int) -> SongPlan:
    """Check and complete what is asked. `max_places`: of a session here. Raises RequestError."""
    _check_fields(request)
    num_frames = _num_frames(home, request, max_places)
    return SongPlan(_token_ids(home, request.prompt), num_frames, _sampling(home, request))


def max_seconds(home: MusicHome, max_places: int) -> float:
    """The longest song of this model here."""
    return home.form.max_frames_in(max_places) / home.form.frame_rate


def default_guidance(home: MusicHome) -> float:
    """The guidance of songs that ask for none."""
    own = home.defaults.guidance_scale
    return GUIDANCE if own is None else float(own)


def _check_fields(request: DiffusionRequest) -> None:
    if not request.prompt.strip():
        raise RequestError("prompt", "invalid_value", "the prompt is empty")
    for name, why in NOT_OF_SONGS.items():
        if getattr(request, name):
            raise _unsupported(name, why)
    if request.width is not None or request.height is not None:
        raise _unsupported("size", "a sound has none, its length is called duration")
    if request.patches != 1:
        raise _unsupported("patches", "a song has no patches")
    if request.wire != "compute":
        raise _unsupported("wire", "the gateway's own setting says how a song travels")


def _num_frames(home: MusicHome, request: DiffusionRequest, max_places: int) -> int:
    form = home.form
    most = form.max_frames_in(max_places)
    if request.seconds is None:
        return min(form.default_frames, most)
    if math.isfinite(request.seconds) and request.seconds > 0:
        num_frames = form.frames_in(request.seconds)
        if num_frames <= most:
            return num_frames
    longest = f"{most / form.frame_rate:g}"
    text = (
        f"a song of this model is longer than 0 and at most {longest} seconds long, not {request.seconds:g}"
    )
    raise RequestError("seconds", "invalid_value", text)


def _token_ids(home: MusicHome, prompt: str) -> tuple[int, ...]:
    token_ids = tuple(home.token_ids(prompt))
    if len(token_ids) > home.form.max_text:
        text = (
            f"the prompt has {len(token_ids)} tokens, this model's text encoder reads {home.form.max_text}: "
            "please shorten it"
        )
        raise RequestError("prompt", "context_length_exceeded", text)
    return token_ids


def _sampling(home: MusicHome, request: DiffusionRequest) -> SamplingParams:
    own = home.defaults
    guidance = default_guidance(home) if request.guidance_scale is None else request.guidance_scale
    if not 0 <= guidance <= MAX_GUIDANCE:
        raise _out_of("guidance_scale", guidance, 0, MAX_GUIDANCE)
    temperature = _first(request.temperature, own.temperature, 1.0)
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise _out_of("temperature", temperature, 0, MAX_TEMPERATURE)
    if not 0 <= request.seed <= MAX_SEED:
        raise _out_of("seed", request.seed, 0, MAX_SEED)
    params = SamplingParams(
        temperature=temperature,
        top_k=int(_first(request.top_k, own.top_k, TOP_K)),
        top_p=_first(request.top_p, own.top_p, 1.0),
        seed=request.seed,
        guidance_scale=float(guidance) if guidance > 1 else 1.0,
    )
    try:
        params.validate()
    except ValueError as error:
        raise RequestError(str(error).partition(" ")[0], "invalid_value", str(error)) from None
    return params


def _first(asked: float | None, own: float | None, otherwise: float) -> float:
    return asked if asked is not None else own if own is not None else otherwise


def _out_of(name: str, value: float, low: float, high: float) -> RequestError:
    return RequestError(
        name, "invalid_value", f"{name} is {value:g}; it must be between {low:g} and {high:g}"
    )


def _unsupported(name: str, why: str) -> RequestError:
    return RequestError(name, "unsupported_parameter", f"this model makes songs of tokens: {why}")
