"""What the API asks of a diffusion engine and what comes back: frozen values and the protocol between them.

Knows no HTTP, no tensors and no network. Errors travel as exceptions: `RequestError` for what the caller did wrong
(its `param` is a field of `DiffusionRequest`, "size" for width and height), `routing.errors` for what the network did.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from app.engine.request import ModelStatus, RouteHop
from app.engine.route_options import ANY_ROUTE, RouteOptions

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from slicing.diffusion.kinds import Kind

# How hidden states travel: as they are computed (or as the gateway was started with), in 16 bits, or as 8-bit
# differences to the step before.
WireName = Literal["compute", "bf16", "int8-delta"]
SchedulerOption = bool | int | float | str

WARMUP_STEPS = 4  # whole ones before patches: every flip of a picture that was measured vanishes there


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    """One picture, video or sound to make; several of one question are several of these, with seed + i.

    None leaves a choice to the model's own defaults. `seconds` is the length of a sound, or of a video instead of
    `num_frames`. `scheduler` holds options of the noise scheduler, by their name in its configuration. Songs that are
    made of tokens (`app.engine.music`) are asked for with it too.
    """

    request_id: str
    model: str
    prompt: str = field(repr=False)
    negative_prompt: str | None = field(default=None, repr=False)
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    seconds: float | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    scheduler: Mapping[str, SchedulerOption] = field(default_factory=dict)
    patches: int = (
        1  # parts of a pass that go through the stages one behind another; more than 1 is not exact
    )
    warmup: int = WARMUP_STEPS  # whole steps before the first patches
    extrapolate: bool = False  # carry kept keys and values half a step on
    two_streams: bool = (
        False  # patches also where text goes through the blocks beside the picture: experimental
    )
    previews: int = 0  # pictures of what there is so far, evenly spread over the steps
    temperature: float | None = None  # of models that draw tokens, as the next two
    top_k: int | None = None
    top_p: float | None = None
    wire: WireName = "compute"
    deadline_s: float | None = None  # the time left from now; None = no limit
    route: RouteOptions = ANY_ROUTE
    tenant: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class DiffusionDefaults:
    """What a model makes when it is not told otherwise, and what it can be told."""

    width: int | None  # None: a sound
    height: int | None
    steps: int
    guidance_scale: float | None  # None: the model takes none
    size_step: int  # width and height are multiples of it
    max_text: int | None  # tokens that the text encoder takes, ends included; None: not known
    num_frames: int | None = None  # None: no video
    frame_step: int = 1  # num_frames is a multiple of it, plus 1
    fps: float = 0.0
    seconds: float | None = None  # of a sound
    max_seconds: float | None = None
    rate: int = 0  # samples of a sound per second
    max_pixels: int | None = None  # of a picture or frame; None: no limit is known
    takes_negative: bool = True  # a negative prompt
    draws_tokens: bool = (
        False  # it is no pipeline: a step is a token, and their number follows from the length
    )


@dataclass(frozen=True, slots=True)
class StackUse:
    """Blocks [start, end), in the model's own numbers, of one stack, and who runs them; one row per branch's route."""

    name: str  # "transformer.transformer_blocks"
    start: int
    end: int
    routes: tuple[tuple[RouteHop, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DiffusionTimings:
    """Where the time of one answer went, in seconds, and what crossed the links of this gateway.

    `compute_s`, `network_s`, `crypto_s` and `queue_s` are sums over the hops of all passes. `hits` of `prefetched`
    passes were what was asked for next; `busy` is the share of the steps' time that each stage computed, as told.
    """

    total_s: float = 0.0
    encode_s: float = 0.0  # until the first step
    steps_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    compute_s: float = 0.0
    network_s: float = 0.0
    crypto_s: float = 0.0
    queue_s: float = 0.0
    passes: int = 0  # whole ones; patches count by the pass they make up
    patched: int = 0  # of them made of patches
    prefetched: int = 0
    hits: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    busy: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """The request was taken; it may wait for its turn and for routes. Always the first event."""


@dataclass(frozen=True, slots=True)
class Started:
    """The steps begin; routes of stacks that were not used yet are empty.

    `text_tokens` were read by the text encoder, `picture_tokens` are the rows of the transformer's stream (0 where no
    pass was seen yet); `notes` says what else there is to say, as that one of several encoders read only a part.
    """

    stacks: tuple[StackUse, ...]
    steps: int
    text_tokens: int = 0
    picture_tokens: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step `number` of `of` (from 1) is done; `busy` is the share of its time that each stage computed."""

    number: int
    of: int
    seconds: float
    busy: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchVerdict:
    """Whether steps run as patches from now on, and in plain words why not. Only where patches were asked for."""

    allowed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """What there is after step `step`: from the VAE at the asked points (`index` from 0), else a rough small one."""

    index: int
    step: int
    image: Image = field(repr=False)
    is_rough: bool = False


@dataclass(frozen=True, slots=True)
class Decoding:
    """The steps are done, the VAE works."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Always the last event of an answer that succeeded. Which fields are filled `kind` says."""

    kind: Kind
    timings: DiffusionTimings
    seed: int
    image: Image | None = field(default=None, repr=False)
    frames: tuple[Image, ...] = field(default=(), repr=False)
    fps: float = 0.0
    samples: np.ndarray | None = field(
        default=None, repr=False
    )  # float32 [channels, samples], within -1 and 1
    rate: int = 0  # samples per second
    stacks: tuple[StackUse, ...] = ()
    route: tuple[RouteHop, ...] = ()  # of the first stack and branch
    replays: int = 0
    fingerprint: str = ""


DiffusionEvent = Loading | Started | StepDone | PatchVerdict | Preview | Decoding | Made


class DiffusionEngine(Protocol):
    """Makes pictures, videos or sounds with one model."""

    @property
    def model_name(self) -> str: ...

    @property
    def created(self) -> int:
        """When the model was made or fetched, in Unix seconds; the same after a restart."""
        ...

    @property
    def kind(self) -> Kind: ...

    @property
    def defaults(self) -> DiffusionDefaults: ...

    def coverage(self) -> ModelStatus:
        """Say what can be served at this moment; cheap, called on every request and scrape."""
        ...

    def check(self, request: DiffusionRequest) -> None:
        """Raise `RequestError` for what this model cannot make; cheap, no step is run."""
        ...

    def generate(self, request: DiffusionRequest) -> AsyncGenerator[DiffusionEvent, None]:
        """Yield `Loading`, `Started`, then steps and previews, `Decoding`, then `Made`.

        Closing the generator, or cancelling the task that waits for its next event, frees everything on every
        node. Raises `RequestError`, `routing.errors.NoRouteError` or `routing.errors.RemoteError`.
        """
        ...
