"""A picture, video or sound to make, and what is told while it is made: the same for a gateway and our own engine.

Light on purpose: `query --url` must not import torch to fetch a picture.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

# What each kind of model makes is kept as, the usual one first; a file's end chooses.
SUFFIXES: Final[dict[str, tuple[str, ...]]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp"),
    "video": (".mp4",),
    "audio": (".wav", ".flac", ".mp3", ".opus", ".aac"),
}
EMBEDDINGS: Final = "embeddings"  # what models of vectors make: no file
TRANSCRIPTS: Final = "transcripts"  # what models make that take recordings and nothing else


@dataclass(frozen=True, slots=True)
class Order:
    """What to make. None leaves a choice to the model's own defaults."""

    prompt: str = field(repr=False)
    seed: int = 0
    steps: int | None = None
    size: str | None = None  # "512x512"
    guidance: float | None = None
    negative: str | None = field(default=None, repr=False)
    patches: int | None = None
    warmup: int | None = None
    extrapolate: bool = False
    two_streams: bool = False
    frames: int | None = None
    seconds: float | None = None
    wire: str | None = None  # None: as the gateway was started
    temperature: float | None = None  # of sounds that are made of tokens

    def fields(self) -> dict[str, Any]:
        """Return what the API calls these, but for the prompt and the length, without what is left open."""
        asked = {
            "seed": self.seed,
            "steps": self.steps,
            "guidance_scale": self.guidance,
            "negative_prompt": self.negative,
            "patches": self.patches,
            "warmup": self.warmup,
            "extrapolate": self.extrapolate or None,
            "two_streams": self.two_streams or None,
            "wire": self.wire,
            "temperature": self.temperature,
        }
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StepTold:
    """Step `number` of `of` is done; `seconds` is what it took."""

    number: int
    of: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Said:
    """Something that a person should know, as why patches are not used."""

    text: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was made, as a file. Always the last thing that is told."""

    content: bytes = field(repr=False)
    seed: int
    replays: int = 0
    fingerprint: str = ""
    timings: dict[str, Any] = field(default_factory=dict)  # as the API tells them; {} where it does not


Told = StepTold | Said | Drawn


class Drawer(Protocol):
    """Whoever makes it: a gateway over HTTP, or the engine in this process."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def output(self) -> str:
        """What it makes: image, video or audio."""

    def draw(self, order: Order, suffix: str) -> AsyncGenerator[Told, None]:
        """Yield what there is to tell, then exactly one `Drawn`, a file of this suffix; raise otherwise.

        Closing the generator ends the work on every node.
        """
