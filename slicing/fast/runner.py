"""The fast runner: rows of any number of sessions through one compiled program, on a CPU.

A row's bits depend on its session alone: not on its neighbours, on how its rows were split, or on threads. It knows no
sockets and no scheduler; one thread at a time may use it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.batch import IsCancelled, SingleCalls, Work
from slicing.block_slice import Cancelled
from slicing.ends import Parts
from slicing.fast.composition import HIDDEN_BUFFER, Composition
from slicing.fast.embedding import look_up
from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import Form, PackedWeight
from slicing.fast.pages import MAX_STEP_ROWS, PagedCache, PagePool
from slicing.runner import kept_rows

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

    def embed(self, token_ids: torch.Tensor, position: int) -> torch.Tensor:
        """Return hidden states [rows, hidden] of token ids [rows]."""
        if self.prelude is not None:
            return self.prelude(token_ids, position).float()
        assert self.table is not None, "this runner does not hold the opening end"
        return torch.from_numpy(look_up(self.table, token_ids.numpy(), self.factor))


@dataclass(frozen=True)
class ModelSizes:
    """What others ask about a model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [first, last) of a call's work in one step."""

    index: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first


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
        self._check(works, 0, end)
        embedded = [
            _floats(work.inputs)
            if work.inputs.is_floating_point()
            else self._opening.embed(work.inputs, work.position)
            for work in works
        ]
        if end == 0:
            return embedded
        return self._run(works, embedded, 0, end, is_cancelled)

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end): hidden states [rows, hidden] of each work.

        Raises `Cancelled` between layers once `is_cancelled` turns true (looked at in steps of many rows); every
        session can then be taken up again at the same position. Raises ValueError, before anything is computed, for a
        position above a cache's length, `CannotRollBack` for one whose window is not held any more.
        """
        self._check(works, start, end)
        inputs = [_floats(work.inputs) for work in works]
        if start == end:
            return inputs
        return self._run(works, inputs, start, end, is_cancelled)

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head: logits [len(keep), vocab] (float32) of each work.

        With no layers to run (start == N) a session is neither read nor changed.
        """
        assert self.parts.closing, "this runner does not hold the closing end"
        self._check(works, start, self.num_layers)
        kept = [kept_rows(work.rows, work.keep) for work in works]
        inputs = [_floats(work.inputs) for work in works]
        if start < self.num_layers:
            return self._run(works, inputs, start, self.num_layers, is_cancelled, kept)
        chosen = [rows[numbers] for rows, numbers in zip(inputs, kept, strict=True)]
        alone = [Work(None, rows, 0) for rows in chosen]
        every = [list(range(len(rows))) for rows in chosen]
        return self._run(alone, chosen, start, start, is_cancelled, every)

    @property
    def cache_bytes_per_position(self) -> int:
        """What one position of one session takes in the held layers, in the long run."""
        many = MAX_STEP_ROWS * 2
        return (self.cache_bytes(2 * many) - self.cache_bytes(many)) // many

    def _run(
        self,
        works: Sequence[Work],
        inputs: Sequence[torch.Tensor],
        start: int,
        end: int,
        is_cancelled: IsCancelled | None,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> list[torch.Tensor]:
        """Run layers [start, end) on every row, and norm and head on the kept ones where `kept` is given.

        The rows of all works follow each other; a step takes the next ones of them.
        """
        rows = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs))
        counts = [work.rows for work in works]
        wanted = None
        if kept is not None:
            firsts = itertools.accumulate(counts, initial=0)
            wanted = np.array(
                [first + row for first, own in zip(firsts, kept, strict=False) for row in own], int
            )
            counts = [len(own) for own in kept]
        width = self.hidden_size if wanted is None else self.vocab_size
        made = np.empty((sum(counts), width), np.float32)
        first = 0
        for pieces in _steps(works):
            last = first + sum(piece.rows for piece in pieces)
            here = (
                slice(first, last) if wanted is None else np.flatnonzero((wanted >= first) & (wanted < last))
            )
            numbers = None if wanted is None else wanted[here] - first
            self._begin(works, pieces, rows[first:last].numpy(), numbers, start, end)
            if start < end:
                self._run_layers(works, pieces, start, end, is_cancelled)
            if numbers is None:
                made[here] = self._workspace.buffer(HIDDEN_BUFFER)[: last - first, :width]
            elif len(numbers):
                self._execute(self._composition.closing_start, self._composition.program.num_ops)
                made[here] = self._workspace.buffer(self._composition.logits_buffer)[: len(numbers), :width]
            first = last
        return list(torch.from_numpy(made).split(counts))

    def _begin(
        self,
        works: Sequence[Work],
        pieces: Sequence[_Piece],
        rows: FloatArray,
        kept: NDArray[np.int64] | None,
        start: int,
        end: int,
    ) -> None:
        """Make room in every cache, and write a step's rows [n, hidden] into the hidden buffer."""
        steps = []
        for piece in pieces:
            work = works[piece.index]
            position, tables = work.position + piece.first, 0
            if start < end:
                work.cache.reserve(position, piece.rows, *self._composition.slot_range(start, end))
                tables = work.cache.tables_address
            steps.append(StepWork(position, piece.rows, tables))
        self._workspace.begin(steps, kept)  # type: ignore[arg-type]  # an array is a sequence of numbers
        self._workspace.buffer(HIDDEN_BUFFER)[: len(rows), : self.hidden_size] = rows

    def _run_layers(
        self,
        works: Sequence[Work],
        pieces: Sequence[_Piece],
        start: int,
        end: int,
        is_cancelled: IsCancelled | None,
    ) -> None:
        """Run layers in one go, or a few at a time where a step is long enough to be stopped."""
        watches = is_cancelled is not None and sum(piece.rows for piece in pieces) >= CANCELLABLE_ROWS
        stride = LAYERS_AT_ONCE if watches else end - start
        for first in range(start, end, stride):
            if watches and is_cancelled is not None and is_cancelled():
                raise Cancelled
            self._execute(*self._composition.operations(first, min(first + stride, end)))
        slots = self._composition.slot_range(start, end)
        for piece in pieces:
            work = works[piece.index]
            work.cache.advance(work.position + piece.last, *slots)

    def _execute(self, first: int, last: int) -> None:
        threads = self._threads or torch.get_num_threads()
        self._executor.run(self._workspace, start=first, end=last, threads=threads)

    def _check(self, works: Sequence[Work], start: int, end: int) -> None:
        assert self.parts.holds(start, end), f"this runner holds {self.parts}, not layers {start}:{end}"
        if any(work.places is not None for work in works):
            raise ValueError("positions are counted: rows bring none of their own")
        if start == end:
            return
        slots = self._composition.slot_range(start, end)
        furthest = max((work.position + work.rows for work in works), default=0)
        if furthest > self.max_positions:
            raise ValueError(f"a step to position {furthest}: the model has {self.max_positions}")
        if sum(work.rows for work in works) > MAX_STEP_ROWS:  # in one step, taking the pages checks it
            for work in works:
                work.cache.reserve(work.position, 0, *slots)
        self._composition.plans.skeleton.tables.fill(furthest)


def _steps(works: Sequence[Work]) -> Iterator[list[_Piece]]:
    """Cut a call into steps of at most MAX_STEP_ROWS rows, one work after the other."""
    step: list[_Piece] = []
    room = MAX_STEP_ROWS
    for index, work in enumerate(works):
        first, rows = 0, work.rows
        while first < rows:
            last = min(rows, first + room)
            step.append(_Piece(index, first, last))
            room -= last - first
            first = last
            if not room:
                yield step
                step, room = [], MAX_STEP_ROWS
    if step:
        yield step


def _floats(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().to(device="cpu", dtype=torch.float32)
