"""The fast runner: rows of any number of sessions through one compiled program, on a CPU.

A row's bits depend on its session alone: not on its neighbours, on how its rows were split, or on threads. It knows no
sockets and no scheduler; one thread at a time may use it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.batch import IsCancelled, SingleCalls, Work
from slicing.block_slice import Cancelled
from slicing.buffers import float_array
from slicing.ends import Parts
from slicing.fast.composition import HIDDEN_BUFFER, Composition
from slicing.fast.embedding import look_up
from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import Form, PackedWeight
from slicing.fast.pages import PagedCache, PagePool
from slicing.runner import kept_rows
from slicing.slab import MAX_STEP_ROWS

MAX_WORKS = 256  # a call's rows are what costs; more works than that never fit one step's rows
CANCELLABLE_ROWS = 16  # a step of fewer is over before anyone could wish to stop it
LAYERS_AT_ONCE = 2  # run between two looks at whether to stop
MAX_THREADS = 64

FloatArray = NDArray[np.float32]
Prelude = Callable[[torch.Tensor, int], torch.Tensor]  # token ids [rows] and the first one's position


@dataclass(frozen=True)
class Opening:
    """What precedes the layers: a look-up in a packed table, or a model's own code where it is more than that."""

    table: PackedWeight | None = field(default=None, repr=False)
    factor: float = 1.0
    prelude: Prelude | None = field(default=None, repr=False)

    def embed(self, works: Sequence[Work]) -> list[FloatArray]:
        """Return the hidden states [rows, hidden] of each work's token ids [rows] (int64)."""
        if self.prelude is not None:
            return [float_array(self.prelude(work.inputs, work.position)) for work in works]
        assert self.table is not None, "this runner does not hold the opening end"
        token_ids = [work.inputs.numpy() for work in works]
        rows = look_up(self.table, np.concatenate(token_ids), self.factor)
        ends = itertools.accumulate(map(len, token_ids))
        return [rows[end - len(own) : end] for own, end in zip(token_ids, ends, strict=True)]


@dataclass(frozen=True)
class ModelSizes:
    """What others ask about a model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int


class _Piece(NamedTuple):
    """Rows [first, last) of a call's work in one step."""

    work: int  # its number in the call
    first: int
    last: int


class _Place(NamedTuple):
    """A kept row: its work, its number among what is kept of that, and its row in the step."""

    work: int  # its number in the call
    number: int
    row: int


class _Range(NamedTuple):
    """Held layers [start, end), and where their keys and values lie; no layers: no slots."""

    start: int
    end: int
    slots: tuple[int, int]


class FastRunner(SingleCalls):
    """Some parts of one model, ready to run steps of several sessions in one call."""

    max_works = MAX_WORKS
    is_invariant = True
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        composition: Composition,
        parts: Parts,
        sizes: ModelSizes,
        opening: Opening,
        *,
        form: Form,
        size_bytes: int,
        layer_hashes: Mapping[int, bytes] | None = None,
        threads: int | None = 1,
    ) -> None:
        """Take over a composed program. `threads` None: as many as torch uses in the calling thread."""
        self.parts = parts
        self.layer_hashes: Mapping[int, bytes] = dict(layer_hashes or {})
        self.size_bytes = size_bytes
        self.form = f"fast/{form}"
        self.num_layers = sizes.num_layers
        self.hidden_size = sizes.hidden_size
        self.vocab_size = sizes.vocab_size
        self.max_positions = sizes.max_positions
        self._composition = composition
        self._opening = opening
        self._pool = PagePool()
        self._workspace = Workspace(composition.program, min(os.cpu_count() or 1, MAX_THREADS))
        self._executor = Executor()
        self._threads = threads
        self._ranges: dict[tuple[int, int], _Range] = {}

    def set_threads(self, threads: int | None) -> None:
        """Compute with so many threads from now on; None: as many as torch uses in the calling thread."""
        self._threads = threads

    def widen_head(self, num_threads: int | None = None) -> bool:
        """Leave the head as it is: it is shared among the runner's threads like every product."""
        return False

    def new_cache(self) -> PagedCache:
        """Return the empty storage of a new session."""
        return PagedCache(self._composition.layout, self._pool)

    def cache_bytes(self, num_positions: int) -> int:
        """Return what a session of so many positions takes in the held layers at most."""
        return self._composition.layout.cache_bytes(num_positions)

    def run_opening_batch(
        self, works: Sequence[Work], *, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Embed token ids [rows] (int64) and run layers [0, end): hidden states [rows, hidden] of each work.

        Input embeddings [rows, width] are taken as they are.
        """
        assert self.parts.opening, "this runner does not hold the opening end"
        layers = self._check(works, 0, end)
        inputs = self._embedded(works)
        if end == 0:
            return [torch.from_numpy(rows) for rows in inputs]
        return self._run(works, inputs, layers, is_cancelled)

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end): hidden states [rows, hidden] of each work.

        Raises `Cancelled` between layers once `is_cancelled` turns true (looked at in steps of many rows); every
        session can then be taken up again at the same position. Raises ValueError, before anything is computed, for a
        position above a cache's length, `CannotRollBack` for one whose window is not held any more.
        """
        layers = self._check(works, start, end)
        if start == end:
            return [torch.from_numpy(float_array(work.inputs)) for work in works]
        return self._run(works, [float_array(work.inputs) for work in works], layers, is_cancelled)

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head: logits [len(keep), vocab] (float32) of each work.

        With no layers to run (start == N) a session is neither read nor changed.
        """
        assert self.parts.closing, "this runner does not hold the closing end"
        layers = self._check(works, start, self.num_layers)
        kept = [kept_rows(work.rows, work.keep) for work in works]
        inputs = [float_array(work.inputs) for work in works]
        if start < self.num_layers:
            return self._run(works, inputs, layers, is_cancelled, kept)
        chosen = [rows[own] for rows, own in zip(inputs, kept, strict=True)]
        return self._run(works, chosen, layers, is_cancelled, [range(len(rows)) for rows in chosen])

    @property
    def cache_bytes_per_position(self) -> int:
        """What one position of one session takes in the held layers, in the long run."""
        many = MAX_STEP_ROWS * 2
        return (self.cache_bytes(2 * many) - self.cache_bytes(many)) // many

    def _embedded(self, works: Sequence[Work]) -> list[FloatArray]:
        """What goes into the first layer: token ids are looked up, embeddings are taken as they are."""
        if not any(work.inputs.is_floating_point() for work in works):
            return self._opening.embed(works)
        return [
            float_array(work.inputs) if work.inputs.is_floating_point() else self._opening.embed([work])[0]
            for work in works
        ]

    def _run(
        self,
        works: Sequence[Work],
        inputs: Sequence[FloatArray],
        layers: _Range,
        is_cancelled: IsCancelled | None,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> list[torch.Tensor]:
        """Run layers on the rows `inputs` of each work, and norm and head on the kept ones where `kept` is given.

        The rows of all works follow each other; a step takes the next ones of them. Each work is given memory of its
        own: what is kept of one must not hold all.
        """
        if kept is None:
            made = [np.empty((len(rows), self.hidden_size), np.float32) for rows in inputs]
        else:
            made = [np.empty((len(own), self.vocab_size), np.float32) for own in kept]
        for pieces in _steps(inputs):
            places = [] if kept is None else _places(pieces, kept)
            self._begin(works, inputs, pieces, layers, [place.row for place in places])
            self._run_layers(works, pieces, layers, is_cancelled)
            if kept is None:
                self._take_states(pieces, made)
            elif places:
                self._execute(self._composition.closing_start, self._composition.program.num_ops)
                self._take_logits(places, made)
        return [torch.from_numpy(rows) for rows in made]

    def _begin(
        self,
        works: Sequence[Work],
        inputs: Sequence[FloatArray],
        pieces: Sequence[_Piece],
        layers: _Range,
        kept: Sequence[int],
    ) -> None:
        """Make room in every cache, and write a step's rows into the hidden buffer."""
        steps = []
        for index, first, last in pieces:
            position = tables = 0  # norm and head alone look at neither
            if layers.start < layers.end:
                cache, position = works[index].cache, works[index].position + first
                cache.reserve(position, last - first, *layers.slots)
                tables = cache.tables_address
            steps.append(StepWork(position, last - first, tables))
        self._workspace.begin(steps, kept)
        hidden, row = self._workspace.buffer(HIDDEN_BUFFER), 0
        for index, first, last in pieces:
            hidden[row : row + last - first, : self.hidden_size] = inputs[index][first:last]
            row += last - first

    def _run_layers(
        self,
        works: Sequence[Work],
        pieces: Sequence[_Piece],
        layers: _Range,
        is_cancelled: IsCancelled | None,
    ) -> None:
        """Run layers in one go, or a few at a time where a step is long enough to be stopped."""
        start, end, slots = layers
        if start == end:
            return
        if sum(last - first for _, first, last in pieces) < CANCELLABLE_ROWS:
            is_cancelled = None
        stride = end - start if is_cancelled is None else LAYERS_AT_ONCE
        for first in range(start, end, stride):
            if is_cancelled is not None and is_cancelled():
                raise Cancelled
            self._execute(*self._composition.operations(first, min(first + stride, end)))
        for index, _, last in pieces:
            work = works[index]
            work.cache.advance(work.position + last, *slots)

    def _take_states(self, pieces: Sequence[_Piece], made: Sequence[FloatArray]) -> None:
        """Copy what the layers made of a step's rows to where it is wanted."""
        hidden, row = self._workspace.buffer(HIDDEN_BUFFER), 0
        for index, first, last in pieces:
            made[index][first:last] = hidden[row : row + last - first, : self.hidden_size]
            row += last - first

    def _take_logits(self, places: Sequence[_Place], made: Sequence[FloatArray]) -> None:
        """Copy what norm and head made of a step's kept rows to where it is wanted."""
        logits = self._workspace.buffer(self._composition.logits_buffer)
        for at, (index, number, _) in enumerate(places):
            made[index][number] = logits[at, : self.vocab_size]

    def _execute(self, first: int, last: int) -> None:
        threads = self._threads or torch.get_num_threads()
        self._executor.run(self._workspace, start=first, end=last, threads=threads)

    def _check(self, works: Sequence[Work], start: int, end: int) -> _Range:
        layers = self._range(start, end)
        furthest = rows = 0
        for work in works:
            if work.places is not None:
                raise ValueError("positions are counted: rows bring none of their own")
            furthest = max(furthest, work.position + work.rows)
            rows += work.rows
        if start == end:
            return layers
        if furthest > self.max_positions:
            raise ValueError(f"a step to position {furthest}: the model has {self.max_positions}")
        if rows > MAX_STEP_ROWS:  # in one step, taking the pages checks it
            for work in works:
                work.cache.reserve(work.position, 0, *layers.slots)
        self._composition.plans.skeleton.tables.fill(furthest)
        return layers

    def _range(self, start: int, end: int) -> _Range:
        """Find layers, which are looked for the first time only."""
        found = self._ranges.get((start, end))
        if found is None:
            assert self.parts.holds(start, end), f"this runner holds {self.parts}, not layers {start}:{end}"
            slots = self._composition.slot_range(start, end) if start < end else (0, 0)
            found = self._ranges[start, end] = _Range(start, end, slots)
        return found


def _steps(inputs: Sequence[FloatArray]) -> Iterator[list[_Piece]]:
    """Cut a call into steps of at most MAX_STEP_ROWS rows, one work after the other."""
    step: list[_Piece] = []
    room = MAX_STEP_ROWS
    for index, rows in enumerate(inputs):
        first, end = 0, len(rows)
        while first < end:
            last = min(end, first + room)
            step.append(_Piece(index, first, last))
            room -= last - first
            first = last
            if not room:
                yield step
                step, room = [], MAX_STEP_ROWS
    if step:
        yield step


def _places(pieces: Sequence[_Piece], kept: Sequence[Sequence[int]]) -> list[_Place]:
    """Find the kept rows that are in a step."""
    places, begin = [], 0
    for index, first, last in pieces:
        for number, row in enumerate(kept[index]):
            if first <= row < last:
                places.append(_Place(index, number, begin + row - first))
        begin += last - first
    return places
