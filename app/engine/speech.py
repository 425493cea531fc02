"""What the API asks of an engine that writes down what is said in a recording, and what comes back: frozen values."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from app.engine.request import AnyEngine, RouteHop, Timings
from app.engine.route_options import ANY_ROUTE, RouteOptions

if TYPE_CHECKING:
    import numpy as np

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, eq=False)
class TranscriptionRequest:
    """One recording to write down: float32 `samples` [length] of one channel at the engine's rate.

    `language` is a code of the engine's languages; None: as the recording begins. A `temperature` of 0 rises by itself
    where an answer is no good (see `speech_windows`). `deadline_s` is the time left from now; None = no limit.
    """

    request_id: str
    model: str
    samples: np.ndarray = field(repr=False)
    language: str | None = None
    task: Task = "transcribe"
    prompt: str = field(default="", repr=False)  # what may have been said before: spelling, names
    temperature: float = 0.0
    seed: int = 0
    wants_times: bool = True  # of segments
    deadline_s: float | None = None
    route: RouteOptions = ANY_ROUTE
    tenant: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """Some words, and when they were said, in seconds from the beginning.

    `seek` is the frame where its window began. `avg_logprob` and `no_speech_prob` are None where the ends are on nodes:
    then nobody here knows them.
    """

    number: int
    seek: int
    start_s: float
    end_s: float
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None


@dataclass(frozen=True, slots=True)
class WindowDone:
    """A window was written down: its segments are final, and the recording is done up to `done_s`."""

    segments: tuple[Segment, ...]
    language: str
    done_s: float
    total_s: float
    num_tokens: int  # drawn for it, in all attempts


@dataclass(frozen=True, slots=True)
class Transcribed:
    """Always the last event of a recording that was written down."""

    segments: tuple[Segment, ...]
    language: str
    duration_s: float
    timings: Timings
    prompt_tokens: int = 0
    replays: int = 0
    fingerprint: str = ""
    route: tuple[RouteHop, ...] = ()

    @property
    def text(self) -> str:
        return text_of(self.segments)


TranscriptionEvent = WindowDone | Transcribed


def text_of(segments: tuple[Segment, ...]) -> str:
    """What was said, in one line."""
    return "".join(segment.text for segment in segments).strip()


class SpeechEngine(AnyEngine, Protocol):
    """Writes recordings down with one model."""

    @property
    def rate(self) -> int:
        """Of the samples that it takes, in Hz."""
        ...

    @property
    def languages(self) -> Mapping[str, str]:
        """What it understands: names by code, "en" -> "english"."""
        ...

    @property
    def is_multilingual(self) -> bool:
        """Whether it translates, too."""
        ...

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        """Yield a `WindowDone` for each window, then `Transcribed`.

        Closing the generator, or cancelling the task that waits for its next event, frees the session on every node.
        Raises `RequestError`, `routing.errors.NoRouteError` or `routing.errors.RemoteError`.
        """
        ...
