"""What a runner is: rows of several sessions in, rows out, in one call.

The messages between whoever schedules and whoever computes. Knows nothing of how layers are run (see `runner`,
`invariant` and `fast.runner`) nor of who asks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slicing.ends import Parts

IsCancelled = Callable[[], bool]
MEASURED_STEPS = 9  # a median of fewer moves by more than a tenth on a busy machine


class Cache(Protocol):
    """Keys and values of one session, as the runner that made it keeps them."""

    @property
    def length(self) -> int:
        """Positions held."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, the room to grow included; what is shared with others counts here too."""

    @property
    def memory_rows(self) -> int:
        """Encoder states that came."""

    def add_memory(self, states: torch.Tensor) -> None:
        """Take encoder states [rows, width], all before the first step. Raises ValueError later, or for no use."""

    def truncate(self, position: int) -> None:
        """Forget positions at and after `position`. Raises `CannotRollBack` where a state cannot follow."""

    def can_fork(self, length: int) -> bool:
        """Whether `fork(length)` would succeed."""

    def fork(self, length: int) -> Cache:
        """Return another session's cache that holds the first `length` positions of this one, which is not changed.

        Raises `CannotRollBack` where they are not held any more, or a running state is elsewhere.
        """

    def close(self) -> None:
        """Free the storage."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One session's rows in a batch. A session stands in a batch at most once."""

    cache: Any  # a Cache that this runner made
    inputs: torch.Tensor = field(
        repr=False
    )  # hidden states [rows, hidden]; at the opening token ids [rows] or [rows, streams] (int64), or embeddings
    position: int  # of the first row; at most the cache's length, what follows is overwritten
    keep: Sequence[int] | None = (
        None  # closing end: the rows whose logits are wanted; None: the last (frame's)
    )
    places: torch.Tensor | None = field(
        default=None, repr=False
    )  # [axes, rows]; None: counted from `position`

    @property
    def rows(self) -> int:
        """Rows of this session."""
        return self.inputs.shape[0]


class Runner(Protocol):
    """Some parts of one model, ready to run steps of sessions. One thread at a time."""

    parts: Parts
    layer_hashes: Mapping[int, bytes]
    size_bytes: int  # of the weights
    dtype: torch.dtype  # of the hidden states
    form: str  # what the bits of an answer depend on, e.g. "fast/bf16"
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    num_streams: int  # tokens of a position
    takes_memory: bool  # its layers attend to an encoder's states (`Cache.add_memory`)
    is_headless: bool  # the closing end gives the last hidden states, not logits
    is_causal: bool  # otherwise a text is one step at position 0, and nothing is kept of it
    max_axes: int  # that `Work.places` may have; 0: positions are counted
    max_branches: int  # of a session, see `branches`
    max_works: int  # more than so many works in a call gain nothing; 1: call it for each session
    is_invariant: (
        bool  # a session's bits depend neither on the others in a call nor on how its rows were split
    )

    def new_cache(self) -> Any:
        """Return the empty storage of a new session."""

    def cache_bytes(self, num_positions: int) -> int:
        """Return what a session of so many positions takes in the held layers at most."""

    def memory_bytes(self, num_rows: int) -> int:
        """Return what so many rows of encoder states take: they themselves, and what the held layers make of them."""

    def run_opening_batch(
        self, works: Sequence[Work], *, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Embed token ids and run layers [0, end): hidden states [rows, hidden] of each work."""

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end): hidden states [rows, hidden] of each work.

        Raises `Cancelled` between two layers once `is_cancelled` turns true; every session can then be taken up again
        at the same position. Raises ValueError, before anything is computed, for a position above a cache's length.
        """

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head: logits [len(keep), vocab] (float32) of each work.

        With several streams [len(keep), streams, vocab]; of a headless model hidden states [len(keep), hidden].
        """


class SingleCalls:
    """The calls for one session, made of the calls for several. For classes that are a `Runner`.

    They run a text model unless they say otherwise.
    """

    num_streams = 1
    takes_memory = False
    is_headless = False
    is_causal = True
    max_axes = 0
    max_branches = 1

    def memory_bytes(self, num_rows: int) -> int:
        """Return what so many rows of encoder states take: there are none."""
        return 0

    def run_opening(
        self: Any,
        cache: Any,
        token_ids: torch.Tensor,
        position: int,
        *,
        end: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Embed token ids [rows] and run layers [0, end): hidden states [rows, hidden]."""
        return self.run_opening_batch([Work(cache, token_ids, position)], end=end, is_cancelled=is_cancelled)[
            0
        ]

    def run_layers(
        self: Any,
        cache: Any,
        hidden_states: torch.Tensor,
        position: int,
        *,
        start: int,
        end: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run layers [start, end) on hidden states [rows, hidden]."""
        work = Work(cache, hidden_states, position)
        return self.run_layers_batch([work], start=start, end=end, is_cancelled=is_cancelled)[0]

    def run_closing(
        self: Any,
        cache: Any,
        hidden_states: torch.Tensor,
        position: int,
        *,
        start: int,
        keep: int | Sequence[int] | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run layers [start, N), norm and head: logits [n, vocab] (float32) of rows `keep` (default: the last)."""
        kept = [keep] if isinstance(keep, int) else keep
        work = Work(cache, hidden_states, position, kept)
        return self.run_closing_batch([work], start=start, is_cancelled=is_cancelled)[0]

    def measure_layer_ms(self: Any, rows: int = 1) -> float:
        """Measure what one step of `rows` rows takes in one of the held layers: median, in milliseconds."""
        start, end = max(self.parts.layers, key=lambda held: held[1] - held[0], default=(0, 0))
        if start == end:
            return 0.0
        cache = self.new_cache()
        hidden_states = torch.randn(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        if self.takes_memory:
            cache.add_memory(hidden_states)
        times = []
        for step in range(MEASURED_STEPS + 1):  # the first allocates, and is not counted
            began = time.perf_counter()
            self.run_layers(cache, hidden_states, step * rows if self.is_causal else 0, start=start, end=end)
            times.append(time.perf_counter() - began)
        cache.close()
        return statistics.median(times[1:]) * 1000 / (end - start)
