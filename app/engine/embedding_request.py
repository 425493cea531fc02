"""What the API asks of an engine that makes vectors of texts, and what comes back.

Knows no HTTP and no network. A text is token ids by the time it gets here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from app.engine.request import AnyEngine, RouteHop, Timings
from app.engine.route_options import ANY_ROUTE, RouteOptions

if TYPE_CHECKING:
    from app.engine.tokenizer import ChatTokenizer

Vector = npt.NDArray[np.float32]  # [dimensions]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to make vectors of, each at least one token. `deadline_s` is the time left from now; None = no limit."""

    request_id: str
    model: str
    texts: tuple[tuple[int, ...], ...] = field(repr=False)
    dimensions: int | None = None  # None: as many as the model makes
    deadline_s: float | None = None
    route: RouteOptions = ANY_ROUTE
    tenant: bytes = field(default=b"", repr=False)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class EmbeddingAdmitted:
    """A route is open and the work has begun: always the first event."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of the text number `index`; texts are done in any order."""

    index: int
    vector: Vector = field(repr=False)


@dataclass(frozen=True, slots=True)
class EmbeddingFinished:
    """Always the last event of a request that succeeded: every text has its vector."""

    timings: Timings
    replays: int = 0
    fingerprint: str = ""
    route: tuple[RouteHop, ...] = ()


EmbeddingEvent = EmbeddingAdmitted | Embedded | EmbeddingFinished


class EmbeddingEngine(AnyEngine, Protocol):
    """Makes vectors of texts with one model."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def max_positions(self) -> int:
        """The most tokens of one text."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids as the model was trained on them, special ones included."""
        ...

    def check(self, request: EmbeddingRequest) -> None:
        """Refuse what cannot be done, before anything is. Raises `RequestError`; texts are `input.0`, `input.1` ..."""
        ...

    def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingEvent, None]:
        """Yield `EmbeddingAdmitted`, an `Embedded` for each text, then `EmbeddingFinished`.

        Closing the generator, or cancelling the task that waits for its next event, frees the sessions on every node.
        Raises `RequestError`, `routing.errors.NoRouteError` or `routing.errors.RemoteError`.
        """
        ...
