"""The invariant runner: stock layers over the packed rows of several sessions, with bits that no neighbour changes.

A session's bits are the same alone and in any mix, however its rows are split, and when they are computed again; of a
session with branches or an encoder's states, too (each branch is a session here).
Whether that holds for a model is tried at load (`invariant_check`), with the number of threads that torch has then;
where it does not, `NotInvariant` says why. On CPUs it holds in float32 and bfloat16 for every family that
`tests/slicing/test_invariant.py` names; on a GPU the same trials decide, and nothing is promised beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from slicing.attention import PackedCache, use_invariant_attention
from slicing.batch import IsCancelled, Work
from slicing.branches import unfold
from slicing.crossing import ROWS, filled_rows
from slicing.ends import Parts
from slicing.invariant_check import OWN_ATTENTION, ROW_MULTIPLES, check_class, keeps_rows_apart
from slicing.kv_cache import KVCache
from slicing.miniature import CutReport
from slicing.model_kind import ModelKind, kind_of
from slicing.progress import Progress
from slicing.row_linear import FullVectors, NotInvariant, RowKernels
from slicing.row_products import use_row_products
from slicing.runner import DTYPE_NAMES, PlainRunner, kept_rows, kernel_class
from slicing.slab import SlabLayer
from slicing.weights import Checkpoint

__all__ = ["InvariantRunner", "NotInvariant"]

MAX_WORKS = 32  # products gain nothing from more rows than that (performance.md, section 4)
MOVING_ROPES = ("dynamic", "longrope")  # their frequencies follow the longest position in a call


class InvariantRunner(PlainRunner):
    """Some parts of one model, ready to run steps of several sessions in one call."""

    max_works = MAX_WORKS
    is_invariant = True

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Parts,
        report: CutReport,
        *,
        layer_hashes: Mapping[int, bytes] | None = None,
    ) -> None:
        """Take over a model from `build_weightless` that has been given the tensors of `parts`.

        Raises `NotInvariant` where its bits depend on how rows come together.
        """
        super().__init__(model, parts, report, layer_hashes=layer_hashes)
        self.form = f"invariant/{DTYPE_NAMES.get(self.dtype, str(self.dtype))}/{kernel_class(self.device)}"
        _check_state(model, self.new_cache(), self._slice.takes_positions)
        blank = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        self._packed = PackedCache(len(self._slice.stack), blank if self.takes_memory else None)
        use_invariant_attention(model, self._packed)
        self.size_bytes += use_row_products(model, RowKernels())
        self._find_multiple()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        parts: Parts,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        weightless: PreTrainedModel | None = None,
    ) -> InvariantRunner:
        """As `PlainRunner.load`. Raises `NotInvariant` too, for most models before anything is read."""
        axes = check_class(checkpoint.config, cls)
        runner: Any = super().load(  # it builds `cls`
            checkpoint, parts, dtype=dtype, device=device, progress=progress, weightless=weightless
        )
        runner.max_axes = axes
        return runner

    @classmethod
    def from_model(cls, model: PreTrainedModel, parts: Parts) -> InvariantRunner:
        """Share the tensors of `parts` with a whole stock model in memory. Raises `NotInvariant`."""
        axes = check_class(model.config, cls)
        runner: Any = super().from_model(model, parts)  # it builds `cls`
        runner.max_axes = axes
        return runner

    @property
    def num_attention_calls(self) -> int:
        """Calls of our attention since the start: a layer that does not call it computes its own."""
        return self._packed.num_calls

    def widen_head(self, num_threads: int | None = None) -> bool:
        """Leave the head as it is: its rows are tried with the threads of this process."""
        return False

    def memory_bytes(self, num_rows: int) -> int:
        """Return what so many rows of encoder states take at most: each branch fills up its keys."""
        branches = self.max_branches
        return branches * filled_rows(-(-num_rows // branches)) * self._memory_bytes_per_row

    def run_opening_batch(
        self, works: Sequence[Work], *, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Embed token ids [rows] or [rows, streams] (int64) and run layers [0, end): hidden states [rows, hidden].

        Input embeddings [rows, width] are taken as they are.
        """
        assert self.parts.opening, "this runner does not hold the opening end"
        self._check_works(works, 0, end)
        unfolded = unfold(works)
        if self._slice.takes_positions and not any(map(_is_embedded, unfolded.works)):
            return unfolded.fold(self._open(unfolded.works, end, is_cancelled))
        states = self._run_prelude(unfolded.works)
        return unfolded.fold(self._run_packed(unfolded.works, states, 0, end, is_cancelled))

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end) on hidden states [rows, hidden] of each work, in one call.

        Raises `Cancelled` between two layers once `is_cancelled` turns true; every session can then be taken up again
        at the same position. Raises ValueError, before anything is computed, for a position above a cache's length,
        `CannotRollBack` for one whose window is not held any more.
        """
        self._check_works(works, start, end)
        unfolded = unfold(works)
        inputs = [self._moved(work.inputs) for work in unfolded.works]
        return unfolded.fold(self._run_packed(unfolded.works, inputs, start, end, is_cancelled))

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head: logits [len(keep), vocab] (float32) of each work.

        With several streams [len(keep), streams, vocab]; of a headless model hidden states [len(keep), hidden].
        """
        assert self.parts.closing, "this runner does not hold the closing end"
        self._check_works(works, start, self.num_layers)
        unfolded = unfold(works)
        inputs = [self._moved(work.inputs) for work in unfolded.works]
        states = self._run_packed(unfolded.works, inputs, start, self.num_layers, is_cancelled)
        kept = [
            rows[kept_rows(work.rows, work.keep)] for rows, work in zip(states, unfolded.works, strict=True)
        ]
        closed: list[torch.Tensor] = []
        for places in self._calls(kept):
            batch = self._filled(kept[places])
            self._packed.take([], batch.shape[1])
            with FullVectors():
                made = self._slice.run_to_logits(self._packed, batch, 0, self.num_layers, is_cancelled)[0]
            closed += _unpacked(made.float(), kept[places])
        return unfolded.fold(closed)

    def run_whole(
        self,
        cache: Any,
        token_ids: torch.Tensor,
        position: int,
        *,
        keep: int | Sequence[int] | None = None,
        is_cancelled: IsCancelled | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the uncut model on what an opening takes: what a closing makes."""
        assert self.parts == Parts.whole(self.num_layers), "this runner holds a part of the model only"
        work = Work(cache, token_ids, position, [keep] if isinstance(keep, int) else keep, places)
        states = self.run_opening_batch([work], end=self.num_layers, is_cancelled=is_cancelled)[0]
        return self.run_closing_batch([replace(work, inputs=states)], start=self.num_layers)[0]

    def _find_multiple(self) -> None:
        """Find the number of rows to whose multiples calls are filled up, as small as may be."""
        for self.row_multiple in ROW_MULTIPLES:
            if keeps_rows_apart(self, self._slice.stack):
                return
        if self.num_attention_calls == 0:
            raise NotInvariant(OWN_ATTENTION)
        raise NotInvariant("its layers give other bits for other numbers of rows, whatever is filled up")

    def _run_prelude(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Run what comes before the layers: hidden states [rows, hidden] of each work."""
        if not self._slice.takes_positions:
            return self._run_preludes_apart(works)
        made: dict[int, torch.Tensor] = {}
        for is_embedded in (False, True):
            taken = [place for place, work in enumerate(works) if _is_embedded(work) is is_embedded]
            if taken:
                made.update(zip(taken, self._open([works[place] for place in taken], 0, None), strict=True))
        return [made[place] for place in range(len(works))]

    def _open(self, works: Sequence[Work], end: int, is_cancelled: IsCancelled | None) -> list[torch.Tensor]:
        """Run what comes before the layers, and layers [0, end), on ids of all works, or on embeddings of all."""
        inputs = [
            self._moved(work.inputs) if _is_embedded(work) else work.inputs.to(self.device) for work in works
        ]
        batch = self._filled(inputs)
        self._packed.take(works, batch.shape[1], 0, end)
        with FullVectors():
            states = self._slice.embed_and_run(self._packed, batch, 0, end, is_cancelled)[0]
        return _unpacked(states, inputs)

    def _run_preludes_apart(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """The same, where the model counts positions on from what the cache holds; of branches once."""
        made: list[torch.Tensor] = []
        for number, work in enumerate(works):
            before = works[number - 1] if number else None
            if before is not None and _opens_alike(work, before):
                made.append(made[-1])
                continue
            with FullVectors():
                made.append(
                    self._slice.embed_and_run(work.cache, self._fed(work.inputs), work.position, 0)[0]
                )
        return made

    def _run_packed(
        self,
        works: Sequence[Work],
        inputs: Sequence[torch.Tensor],
        start: int,
        end: int,
        is_cancelled: IsCancelled | None,
    ) -> list[torch.Tensor]:
        """Run layers [start, end) on hidden states [rows, hidden] of each work, one for each branch."""
        if start == end:
            return list(inputs)
        made: list[torch.Tensor] = []
        for places in self._calls(inputs):
            batch = self._filled(inputs[places])
            self._packed.take(works[places], batch.shape[1], start, end)
            with FullVectors():
                states = self._slice.run_blocks(self._packed, batch, 0, start, end, is_cancelled)[0]
            made += _unpacked(states, inputs[places])
        return made

    def _calls(self, inputs: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Say which works go together: all, unless the model counts rows, and has no more positions than so many."""
        first = rows = 0
        for place, states in enumerate(inputs):
            rows += len(states)
            is_too_many = rows + self.row_multiple > self.max_positions
            if place > first and is_too_many and not self._slice.takes_positions:
                yield slice(first, place)
                first, rows = place, len(states)
        if first < len(inputs):
            yield slice(first, len(inputs))

    @cached_property
    def _memory_bytes_per_row(self) -> int:
        """Found by running a row over what fills up its keys once, and twice."""
        sizes = []
        for num_rows in (ROWS, 2 * ROWS) if self.takes_memory else ():
            cache = self.new_cache()
            cache.add_memory(torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device))
            row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
            for start, end in self.parts.layers:
                self.run_layers(cache, row, 0, start=start, end=end)
            sizes.append(cache.size_bytes)
        return (sizes[1] - sizes[0]) // ROWS if sizes else 0

    def _check_works(self, works: Sequence[Work], start: int, end: int) -> None:
        super()._check_works(works, start, end)
        if self.takes_memory and start < end and not all(work.cache.memory_rows for work in works):
            raise ValueError("the session's encoder states did not come")
        if any(work.places is not None and len(work.places) > self.max_axes for work in works):
            raise ValueError(f"positions of more axes than {self.max_axes}")

    def _moved(self, states: torch.Tensor) -> torch.Tensor:
        return states.to(device=self.device, dtype=self.dtype)

    def _filled(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of all works and some zeros [1, rows, ...], in fresh memory."""
        missing = -sum(map(len, inputs)) % self.row_multiple
        return torch.cat([*inputs, inputs[0].new_zeros(missing, *inputs[0].shape[1:])]).unsqueeze(0)


def _unpacked(states: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut [rows, ...] into the rows that each work gave, without the filling."""
    counts = [len(rows) for rows in inputs]
    return list(states[: sum(counts)].split(counts))


def _is_embedded(work: Work) -> bool:
    return work.inputs.is_floating_point()


def _opens_alike(work: Work, other: Work) -> bool:
    return work.position == other.position and torch.equal(work.inputs, other.inputs)


def _check_state(model: PreTrainedModel, cache: KVCache, takes_positions: bool) -> None:
    kind = kind_of(model.config)
    if kind is ModelKind.ENCODER:
        raise NotInvariant("every row of a text sees all others, so that texts are run one by one")
    if not takes_positions and not kind.has_memory:
        raise NotInvariant(f"the forward of {type(model).__name__} takes no positions")
    if not all(isinstance(layer, SlabLayer) for layer in cache.layers):
        raise NotInvariant("some of its layers keep a running state, which has to go through rows in turn")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) or ()
        for rope in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if rope in MOVING_ROPES:
                raise NotInvariant(f"its rotary frequencies ({rope}) follow the longest position in a call")
