"""The video request as a typed model, and the shapes of jobs and lists. Knows nothing of engines and disks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from app.api.diffusion_protocol import Sized, parse_fields
from app.api.messages import Lenient, refuse
from app.api.multipart import FieldTypes
from app.engine.diffusion.request import DiffusionDefaults, DiffusionRequest
from app.jobs.job import Job, JobStatus, length_text
from app.jobs.progress import Progress

MAX_FRAMES = 100_000
MAX_SECONDS = 3600
SECONDS_DIGITS = 12

NUMBERS: Final = (
    "seed",
    "steps",
    "num_inference_steps",
    "guidance_scale",
    "patches",
    "warmup",
    "num_frames",
    "max_hops",
)
FORM_TYPES: Final = FieldTypes(
    numbers=NUMBERS, flags=("extrapolate", "two_streams", "distinct_owners"), objects=("diffuse", "scheduler")
)


def _as_seconds(value: Any) -> Any:
    """OpenAI sends digits as a text; a number is as good."""
    if isinstance(value, str) and len(value) <= SECONDS_DIGITS:
        try:
            return float(value)
        except ValueError:
            raise refuse("seconds is a number, or one written as a text") from None
    return value


Seconds = Annotated[
    float,
    BeforeValidator(_as_seconds, json_schema_input_type=str | float),
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
]


class VideoRequest(Sized):
    """A request for a video; None means the default everywhere."""

    NOT_HERE: ClassVar = {
        "n": "a job makes one video, ask for each by itself",
        "duration": "the field is called seconds",
    }

    seconds: Seconds | None = None
    num_frames: Annotated[int | None, Field(ge=1, le=MAX_FRAMES)] = None

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.seconds is not None and self.num_frames is not None:
            raise refuse("give seconds or num_frames, not both", field="num_frames")
        return self


def parse_video(body: Mapping[str, Any]) -> VideoRequest:
    """Validate a request body. Raises `ApiError` 400 that names the first wrong field."""
    return parse_fields(VideoRequest, body)


class JobErrorField(Lenient):
    """Why a job failed."""

    code: str
    message: str


class VideoJob(Lenient):
    """One job. OpenAI's thirteen fields are always there; then what else there is to say."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: JobStatus
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str | None = Field(repr=False)
    size: str
    seconds: str
    remixed_from_video_id: None = None
    error: JobErrorField | None
    seed: int
    steps: int
    step: int | None = None
    seconds_per_step: float | None = None
    patches: str | None = None


class VideoList(Lenient):
    """A page of jobs."""

    object: Literal["list"] = "list"
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(Lenient):
    """The job is cancelled, if it ran, and its files are gone."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


def describe_job(job: Job, progress: Progress | None = None) -> VideoJob:
    """Return a job as clients see it; `progress` is that of one that runs now."""
    return VideoJob(
        id=job.id,
        model=job.model,
        status=job.status,
        progress=progress.percent if progress else job.progress,
        created_at=int(job.created),
        completed_at=_whole(job.completed),
        expires_at=_whole(job.expires),
        prompt=job.prompt,
        size=job.size,
        seconds=job.seconds,
        error=JobErrorField(code=job.error.code, message=job.error.message) if job.error else None,
        seed=job.seed,
        steps=job.steps,
        step=progress.step if progress else None,
        seconds_per_step=progress.seconds_per_step if progress else None,
        patches=(progress.patches or None) if progress else None,
    )


def list_of(jobs: list[VideoJob], *, has_more: bool) -> VideoList:
    first, last = (jobs[0].id, jobs[-1].id) if jobs else (None, None)
    return VideoList(data=jobs, first_id=first, last_id=last, has_more=has_more)


def seconds_text(request: DiffusionRequest, defaults: DiffusionDefaults) -> str:
    """How long the video will be."""
    frames = request.num_frames or defaults.num_frames or 0
    asked = request.seconds if request.seconds is not None else frames / (defaults.fps or 1)
    return length_text(asked)


def _whole(when: float | None) -> int | None:
    return None if when is None else int(when)
