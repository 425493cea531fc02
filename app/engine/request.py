"""What the API asks of a text engine and what comes back: frozen values and the protocol between them.

Knows no HTTP, no tokenizer internals and no network. Errors travel as exceptions: `RequestError` for what the
caller did wrong, `routing.errors` for what the network did.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from app.engine.drafts import DraftMode
from app.engine.route_options import ANY_ROUTE, RouteOptions

if TYPE_CHECKING:
    import torch

    from app.engine.grammar import Grammar
    from app.engine.planned import RoutePlan
    from app.engine.prefix import PrefixCounts
    from app.engine.reasoning import Thoughts
    from app.engine.tokenizer import ChatTokenizer
    from app.engine.tool_style import ToolUse
    from slicing.batching import BatchCounts
    from slicing.sampler import SamplingParams
    from slicing.token_scores import TokenScore

Modality = Literal["text", "image", "video", "audio", "embeddings"]
MADE_BY: Mapping[str, Modality] = {  # by kind; the others make text
    "music": "audio",
    "encoder": "embeddings",
    "embedding": "embeddings",
    "picture": "image",
    "video": "video",
    "audio": "audio",
}
FinishReason = Literal["stop", "length"]
# "available": a whole route exists, the ends are loaded by the first request. "failed": they could not be.
ModelState = Literal["ready", "available", "partial", "loading", "failed"]


class RequestError(Exception):
    """The caller asked for something that cannot be done: an HTTP 400 (or `status`) that names the field.

    `param` is the dotted path of the field; the text never quotes the prompt.
    """

    def __init__(self, param: str | None, code: str | None, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.message = message
        self.status = status


class ModelUnavailableError(Exception):
    """A model that is known here cannot answer now: an HTTP 503 with this code, worth a retry after `retry_s`.

    The text names no path of this machine.
    """

    def __init__(self, code: str, message: str, retry_s: int, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_s = retry_s
        self.param = param


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """What encoders at home made of a prompt: goes with its token ids, or is fed in their place.

    `memory` [rows, hidden] are encoder states as the decoder's blocks take them. `embeds` [prompt tokens, hidden] stand
    in place of the token ids, `places` [axes, prompt tokens] (int64) say where each stands on the axes of rotary
    positions; the first token drawn stands at `next_place` on all of them, each further one a place behind. `digests`
    are 32 bytes of what was put in (a picture, a recording), by the position where it begins.
    """

    memory: torch.Tensor | None = field(default=None, repr=False)
    embeds: torch.Tensor | None = field(default=None, repr=False)
    places: torch.Tensor | None = field(default=None, repr=False)
    next_place: int | None = None
    digests: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)

    @property
    def num_axes(self) -> int:
        """Of the rotary positions that travel; 0: they follow from the position in the session."""
        return 0 if self.places is None else self.places.shape[0]

    @property
    def memory_rows(self) -> int:
        return 0 if self.memory is None else self.memory.shape[0]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to make: `max_tokens` is at most the engine's `answer_room`.

    `continues_text` says that the answer carries on the last words of the prompt (a trailing assistant
    message), so that a leading space belongs to it. `deadline_s` is the time left from now; None = no limit.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams = field(repr=False)
    max_tokens: int
    stop: tuple[str, ...] = field(default=(), repr=False)
    stop_token_ids: frozenset[int] = frozenset()
    deadline_s: float | None = None
    continues_text: bool = False
    route: RouteOptions = ANY_ROUTE
    tenant: bytes = field(
        default=b"", repr=False
    )  # whose prompts may share what was computed: a digest of the key
    is_open_ended: bool = (
        False  # the caller did not say how long the answer may become: `max_tokens` is all there is
    )
    draft: DraftMode = "auto"
    encoded: EncodedPrompt | None = None
    wants_logprobs: bool = False  # of each drawn token; with the ends at home only
    watched_ids: tuple[int, ...] = field(
        default=(), repr=False
    )  # alike, of these ids where the first is drawn
    num_logprobs: int | None = None  # score each drawn token, and so many of the likeliest in its place
    grammar: Grammar | None = field(default=None, repr=False)  # holds the answer; with the ends at home only
    tools: ToolUse | None = field(default=None, repr=False)  # what it may call
    thoughts: Thoughts | None = None  # how they are told apart from the answer
    scores_prompt: bool = False  # and each of the prompt's but the first; then `max_tokens` may be 0

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens whose names are part of the text, before thoughts and calls are taken out of it."""
        called = frozenset() if self.tools is None else self.tools.shown_ids
        return called if self.thoughts is None else called | self.thoughts.shown_ids


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one answer went, in seconds. `tokens` counts generated ones.

    `compute_s`, `network_s`, `crypto_s` and `queue_s` are sums over the hops, `local_s` is the ends and the
    sampler in the gateway.
    """

    total_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    compute_s: float = 0.0
    network_s: float = 0.0
    crypto_s: float = 0.0
    queue_s: float = 0.0
    local_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The route is open and the work has begun: always the first event."""

    prompt_tokens: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens have gone through the chain."""

    done: int
    total: int
    scores: tuple[TokenScore, ...] = field(
        default=(), repr=False
    )  # where asked for: of the prompt's tokens behind those scored before, from its second on


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is final: whole characters, nothing of a stop string. Empty while some are held back.

    `thought` is what the model thinks before it answers, where that is told apart.
    `token_ids` were drawn since the delta before. Where they were asked for, `logprobs` are the natural logarithms of
    their probabilities at temperature 1, under the request's bias, rule and penalties; `watched`, in the first delta,
    are those of the `watched_ids` by the model alone. `scores`, where asked for, are one for each of `token_ids`.
    """

    text: str = field(repr=False)
    num_tokens: int = 1
    timings: Timings | None = None  # of the answer so far, where the engine tells
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)
    watched: tuple[float, ...] = field(default=(), repr=False)
    scores: tuple[TokenScore, ...] = field(default=(), repr=False)
    thought: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One hop of the route that an answer ended on: who ran layers [start, end), and whether through a sentinel."""

    node: str  # the first 8 hex digits of its id
    start: int
    end: int
    is_relayed: bool = False


@dataclass(frozen=True, slots=True)
class HopUse:
    """What one node did for an answer, in seconds, as it tells, with the layers that it ran at the last.

    `network_s` is its part of the answer's time on the network: the leg into it, and for the last hop also the way
    back; the parts are as the round trips known here are.
    """

    hop: RouteHop
    steps: int
    compute_s: float
    queue_s: float
    crypto_s: float
    network_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of an answer that succeeded."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    replays: int = 0
    fingerprint: str = ""
    route: tuple[RouteHop, ...] = ()
    drafted: int = 0  # tokens that were guessed ahead, see `app.engine.drafts`
    accepted: int = 0  # of them are part of the answer
    cached_tokens: int = 0  # of the prompt: held from an earlier answer, not computed again
    forced: int = 0  # tokens of the answer that its grammar left no choice of
    thinking_tokens: int = 0  # of the answer: thoughts with their marks
    draft_off: str = ""  # why there could be no drafts, where they were asked for
    hops: tuple[HopUse, ...] = ()  # of all routes it had, where the engine tells


GenerationEvent = Admitted | PrefillProgress | TextDelta | Finished


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Whether a whole route exists now; `missing` holds half-open layer ranges that no live node serves."""

    state: ModelState
    num_layers: int
    missing: tuple[tuple[int, int], ...] = ()
    missing_ends: tuple[str, ...] = ()  # thin mode: "opening", "closing"
    reason: str = ""  # what else there is to say of a model that cannot answer
    may_return: bool = False  # "partial" since a moment ago: who only lost a link is back within seconds

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def can_answer(self) -> bool:
        """A request would be answered, if perhaps only after the ends are loaded."""
        return self.state in ("ready", "available")

    @property
    def layers_covered(self) -> int:
        return self.num_layers - sum(end - start for start, end in self.missing)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that this gateway can open, as it stands at this moment. One that is not listed has no whole route."""

    name: str
    status: ModelStatus
    created: int  # Unix seconds
    max_positions: int
    is_listed: bool = True
    ends: BatchCounts | None = None  # what its ends computed, while they are here
    prefixes: PrefixCounts | None = None  # what is kept of its answers, while it is open
    kind: str = "text"  # a `slicing.model_kind.ModelKind` or, of a diffusion model, a `Kind`
    takes: tuple[Modality, ...] = ("text",)

    @property
    def makes(self) -> Modality:
        """What comes out."""
        return MADE_BY.get(self.kind, "text")


class Library(Protocol):
    """The models of one gateway, by name."""

    def models(self) -> tuple[KnownModel, ...]:
        """Every model that can be opened here, listed or not."""
        ...

    def find(self, name: str) -> KnownModel | None:
        """Return the model of this name, or None."""
        ...

    def unserved(self) -> dict[str, str]:
        """Return names that nodes announce and that are not served here, each with the reason."""
        ...

    def plan(self, name: str, options: RouteOptions) -> RoutePlan:
        """Return the route that a request for a known model would take now.

        Raises `routing.errors.NoRouteError`, `RequestError` or `ModelUnavailableError`.
        """
        ...

    async def engine(self, name: str) -> AnyEngine:
        """Return a known model's engine, of the kind that `KnownModel.kind` says, loading its ends if need be.

        May take long, and may be cancelled. Raises `ModelUnavailableError`.
        """
        ...


class AnyEngine(Protocol):
    """An engine of whatever kind."""

    @property
    def model_name(self) -> str: ...

    def coverage(self) -> ModelStatus:
        """Say what can be served at this moment; cheap, called on every request and scrape."""
        ...


class TextEngine(AnyEngine, Protocol):
    """Makes text answers for one model."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def answer_room(self, prompt_tokens: int) -> int:
        """How many tokens an answer may have behind a prompt of so many; below 1: the prompt is too long."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield `Admitted`, then progress and text, then `Finished`.

        Closing the generator, or cancelling the task that waits for its next event, frees the session on
        every node. Raises `RequestError`, `routing.errors.NoRouteError` or `routing.errors.RemoteError`.
        """
        ...
