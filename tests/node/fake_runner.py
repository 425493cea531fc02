"""A runner with the production interface and arithmetic one can follow: layers that add, and remember what they saw.

Tests can hold it between layers, see how far it is, and make it fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slicing.batch import Work
from slicing.branches import unfold
from slicing.kv_cache import MIN_CAPACITY
from slicing.runner import Cancelled

NUM_LAYERS = 6
HIDDEN_SIZE = 8
VOCAB_SIZE = 32
MAX_POSITIONS = 256
CACHE_BYTES_PER_POSITION = NUM_LAYERS * HIDDEN_SIZE * 8
MEMORY_BYTES_PER_ROW = HIDDEN_SIZE * 4 * 3
POLL_S = 0.001


class FakeCache:
    """Rows by layer, and rows of memory."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.memory = torch.empty(0, HIDDEN_SIZE)
        self.length = 0
        self.is_open = True

    @property
    def memory_rows(self) -> int:
        return len(self.memory)

    def add_memory(self, states: torch.Tensor) -> None:
        if self.rows:
            raise ValueError("memory after it was used")
        self.memory = torch.cat([self.memory, states])

    def truncate(self, position: int) -> None:
        self.rows = {layer: rows[:position] for layer, rows in self.rows.items()}
        self.length = min(self.length, position)

    def add(self, layer: int, rows: torch.Tensor, position: int) -> torch.Tensor:
        """Returns all rows of the layer, the new ones last."""
        held = self.rows.get(layer, torch.empty(0, HIDDEN_SIZE))[:position]
        self.rows[layer] = torch.cat([held, rows])
        return self.rows[layer]

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes + sum(rows.nbytes for rows in self.rows.values())

    def can_fork(self, length: int) -> bool:
        return self.is_open and length <= self.length

    def fork(self, length: int) -> FakeCache:
        assert self.can_fork(length)
        other = FakeCache()
        other.rows = {layer: rows[:length].clone() for layer, rows in self.rows.items()}
        other.length = length
        return other

    def close(self) -> None:
        assert self.is_open, "a cache is closed once"
        self.is_open = False
        self.rows = {}
        self.length = 0


class FakeRunner:
    """Every layer adds its number and the sum of all rows up to this one, and of memory where there is some.

    It is as good as an invariant runner: with `max_works` above 1 it takes several sessions, and steps in pieces.
    An encoder's layers add the sum of all rows of the step; axes are added to the hidden states by each layer.
    """

    def __init__(
        self,
        *,
        max_works: int = 1,
        num_streams: int = 1,
        takes_memory: bool = False,
        is_headless: bool = False,
        is_causal: bool = True,
    ) -> None:
        self.max_works = max_works
        self.num_streams = num_streams
        self.takes_memory = takes_memory
        self.is_headless = is_headless
        self.is_causal = is_causal
        self.max_axes = 3
        self.max_branches = 8
        self.is_invariant = max_works > 1
        self.num_layers = NUM_LAYERS
        self.hidden_size = HIDDEN_SIZE
        self.vocab_size = VOCAB_SIZE
        self.max_positions = MAX_POSITIONS
        self.dtype = torch.float32
        self.form = "fake/fp32"
        self.layer_hashes: Mapping[int, bytes] = {layer: bytes(8) for layer in range(NUM_LAYERS)}
        self.caches: list[FakeCache] = []
        self.layers_run: list[int] = []  # layer by layer, in the order of computing
        self.calls: list[list[int]] = []  # of `run_..._batch`: the rows of each work
        self.error: Exception | None = None  # raised by the next pass, once
        self.poison: float | None = None  # a call raises where a row begins with it
        self.entered = threading.Event()  # a pass is inside its first layer
        self._gate = threading.Event()
        self._gate.set()

    def hold(self) -> None:
        """Make the next layer wait until `release`, or until it is cancelled."""
        self.entered.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def new_cache(self) -> FakeCache:
        self.caches.append(FakeCache())
        return self.caches[-1]

    def cache_bytes(self, num_positions: int) -> int:
        capacity = MIN_CAPACITY
        while capacity < num_positions:
            capacity *= 2
        return CACHE_BYTES_PER_POSITION * capacity

    def memory_bytes(self, num_rows: int) -> int:
        return MEMORY_BYTES_PER_ROW * num_rows

    def run_opening_batch(self, works: Sequence[Work], **layers: Any) -> list[torch.Tensor]:
        return self._run_batch(self.run_opening, works, layers)

    def run_layers_batch(self, works: Sequence[Work], **layers: Any) -> list[torch.Tensor]:
        return self._run_batch(self.run_layers, works, layers)

    def run_closing_batch(self, works: Sequence[Work], **layers: Any) -> list[torch.Tensor]:
        return self._run_batch(self.run_closing, works, layers, is_closing=True)

    def _run_batch(
        self, run: Any, works: Sequence[Work], layers: dict[str, Any], *, is_closing: bool = False
    ) -> list[torch.Tensor]:
        self._note_call(works)
        unfolded = unfold(works)
        made = []
        for work in unfolded.works:
            keep = {"keep": work.keep} if is_closing else {}
            made.append(run(work.cache, work.inputs, work.position, places=work.places, **keep, **layers))
        return unfolded.fold(made)

    def _note_call(self, works: Sequence[Work]) -> None:
        assert len({id(work.cache) for work in works}) == len(works) <= self.max_works
        assert all(work.position <= work.cache.length for work in works)
        self.calls.append([work.rows for work in works])

    def run_opening(
        self,
        cache: FakeCache,
        token_ids: torch.Tensor,
        position: int,
        *,
        end: int,
        places: torch.Tensor | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        embedded = token_ids if token_ids.is_floating_point() else self.embed(token_ids)
        return self.run_layers(
            cache, embedded, position, start=0, end=end, places=places, is_cancelled=is_cancelled
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        streams = token_ids.to(torch.float32).reshape(len(token_ids), self.num_streams)
        weights = torch.arange(1, self.num_streams + 1, dtype=torch.float32)
        return (streams @ weights)[:, None] / torch.arange(1, HIDDEN_SIZE + 1)

    def run_layers(
        self,
        cache: FakeCache,
        hidden_states: torch.Tensor,
        position: int,
        *,
        start: int,
        end: int,
        places: torch.Tensor | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        assert cache.is_open
        assert self.is_causal or not position
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if self.poison is not None and bool((hidden_states[:, 0] == self.poison).any()):
            raise RuntimeError("a poisoned row")
        for layer in range(start, end):
            self.entered.set()
            self._wait_at_gate(is_cancelled)
            self.layers_run.append(layer)
            seen = cache.add(layer, hidden_states, position).cumsum(0)[position:]
            seen = seen if self.is_causal else seen[-1:].expand_as(seen)
            if len(cache.memory):
                seen = seen + cache.memory.sum(0)
            if places is not None:
                seen = seen + (places.float().T @ torch.arange(1.0, len(places) + 1))[:, None]
            hidden_states = (hidden_states + seen) / 2 + layer
        cache.length = position + len(hidden_states)
        return hidden_states

    def run_closing(
        self,
        cache: FakeCache,
        hidden_states: torch.Tensor,
        position: int,
        *,
        start: int,
        keep: Sequence[int] | None = None,
        places: torch.Tensor | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        if start < NUM_LAYERS:
            hidden_states = self.run_layers(
                cache,
                hidden_states,
                position,
                start=start,
                end=NUM_LAYERS,
                places=places,
                is_cancelled=is_cancelled,
            )
        kept = hidden_states[[-1] if keep is None else list(keep)]
        if self.is_headless:
            return kept * 2
        if self.num_streams == 1:
            return (kept.sum(-1, keepdim=True) * torch.arange(1, VOCAB_SIZE + 1)).sin() * 4
        scales = torch.arange(1, self.num_streams * VOCAB_SIZE + 1).reshape(self.num_streams, VOCAB_SIZE)
        return (kept.sum(-1)[:, None, None] * scales).sin() * 4

    def _wait_at_gate(self, is_cancelled: Callable[[], bool] | None) -> None:
        while not self._gate.wait(POLL_S):
            if is_cancelled is not None and is_cancelled():
                raise Cancelled
        if is_cancelled is not None and is_cancelled():
            raise Cancelled
