"""The plain runner: the stock classes with only their block stacks intercepted.

It holds some parts of one model and runs steps of sessions through them: tensors and positions in, tensors out. It
knows no sockets and no scheduler; one thread at a time may use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.batch import IsCancelled, SingleCalls, Work
from slicing.block_slice import BlockSlice, Cancelled
from slicing.branches import unfold
from slicing.ends import Parts, needed_parameters
from slicing.kv_cache import CacheLayout, CannotRollBack, KVCache
from slicing.miniature import CutReport, check_cut
from slicing.model_kind import ModelKind, max_positions, shape_of
from slicing.progress import Progress, no_progress
from slicing.slab import capacity_for
from slicing.stacks import (
    build_weightless,
    find_stack,
    make_hollow,
    persistent_names,
    set_tensor,
    share_tensors,
)
from slicing.weights import Checkpoint, load_parameters
from slicing.whole_text import WholeTextCache
from slicing.wide_head import widen

__all__ = ["Cancelled", "CannotRollBack", "KVCache", "Parts", "PlainRunner", "max_positions"]

ALIGNMENT_BYTES = 64  # torch's own; kernels take another path (other bits) for rows at odd addresses
MAX_AXES = 4  # of rotary positions: text, time, height and width
MAX_HEAD_THREADS = 4  # a few cores take all that memory gives
LONG_SESSION = 4096  # positions; a session of so many says what one takes, and is full
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class PlainRunner(SingleCalls):
    """Some parts of one model, ready to run steps of sessions: one session a call, bit-equal to transformers."""

    max_works = 1
    max_branches = 2  # guidance has two
    is_invariant = False

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Parts,
        report: CutReport,
        *,
        layer_hashes: Mapping[int, bytes] | None = None,
    ) -> None:
        """Take over a model from `build_weightless` that has been given the tensors of `parts`."""
        shape = shape_of(model.config)
        self.parts = parts
        self.layer_hashes: Mapping[int, bytes] = dict(layer_hashes or {})
        self.size_bytes, self.device = _held(model)
        self.dtype = model.dtype
        self.form = f"plain/{DTYPE_NAMES.get(self.dtype, str(self.dtype))}/{kernel_class(self.device)}"
        self.num_layers = shape.num_layers
        self.hidden_size = shape.hidden_size
        self.vocab_size = shape.vocab_size
        self.max_positions = shape.max_positions
        self.num_streams = shape.num_streams
        self.takes_memory = shape.kind.has_memory
        self.is_headless = shape.kind.is_headless
        self.is_causal = shape.kind is not ModelKind.ENCODER
        self.max_axes = MAX_AXES if shape.kind is ModelKind.MULTIMODAL else 0
        make_hollow(model, self.device)
        self._slice = BlockSlice(model, find_stack(model), report.form)
        self._layout = CacheLayout.of(model.config)

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
    ) -> PlainRunner:
        """Check that the model can be cut, then read the tensors of `parts`, and no others.

        `weightless` is the model from `build_weightless`, where it was built elsewhere (see there). Raises `CannotCut`
        with the reason, or `ModelError` when the checkpoint lacks something.
        """
        report = check_cut(checkpoint.config)
        model = weightless if weightless is not None else build_weightless(checkpoint.config, dtype)
        stack = find_stack(model)
        wanted = needed_parameters(stack, report.ends, parts)
        weights = load_parameters(
            checkpoint,
            model,
            wanted,
            dtype=dtype,
            device=device,
            progress=progress or no_progress,
            layer_of=stack.layer_of,
        )
        return cls(_on_device(model, device), parts, report, layer_hashes=weights.layer_hashes)

    @classmethod
    def from_model(cls, model: PreTrainedModel, parts: Parts) -> PlainRunner:
        """Share the tensors of `parts` with a whole stock model in memory, which stays as it is."""
        report = check_cut(model.config)
        part = build_weightless(model.config, model.dtype)
        share_tensors(part, model, needed_parameters(find_stack(part), report.ends, parts))
        return cls(_on_device(part, model.device), parts, report)

    def widen_head(self, num_threads: int | None = None) -> bool:
        """Share single rows of the head among threads (None: one a core, up to 4), where that keeps the bits.

        Tells whether it was done.
        """
        head = self._slice.model.get_output_embeddings()
        number = num_threads or min(os.cpu_count() or 1, MAX_HEAD_THREADS)
        return self.parts.closing and type(head) is nn.Linear and widen(head, number)

    def new_cache(self) -> Any:
        """Return the empty storage of a new session: a `KVCache`, or what stands for one where nothing is kept."""
        return KVCache(self._layout) if self.is_causal else WholeTextCache()

    def cache_bytes(self, num_positions: int) -> int:
        """Return what a session of so many positions takes in the held layers, the room to grow included.

        Layers with a window take no more from some length on. A step of more than `slab.MAX_STEP_ROWS` rows takes more
        in them while it is computed, as its other tensors do.
        """
        sizes, fixed, growing = self._session_sizes
        slabs = sum(each * capacity_for(num_positions, window) for window, each in sizes.items())
        return slabs + fixed + growing * num_positions

    def memory_bytes(self, num_rows: int) -> int:
        """Return what so many rows of encoder states take: they themselves, and what the held layers make of them."""
        return num_rows * self._memory_bytes_per_row if num_rows else 0

    def run_opening_batch(
        self, works: Sequence[Work], *, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Embed token ids [rows] or [rows, streams] (int64) and run layers [0, end), one session after the other.

        Input embeddings [rows, width] are taken as they are. Hidden states [rows, hidden] of each work.
        """
        assert self.parts.opening, "this runner does not hold the opening end"
        self._check_works(works, 0, end)
        unfolded = unfold(works)
        return unfolded.fold(
            [
                self._slice.embed_and_run(
                    work.cache, self._fed(work.inputs), work.position, end, is_cancelled, work.places
                )[0]
                for work in unfolded.works
            ]
        )

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end) on hidden states [rows, hidden], one session after the other.

        Raises `Cancelled` between two layers once `is_cancelled` turns true; a session can then be taken up again
        at the same position. A position below a session's length overwrites what follows it, or raises
        `CannotRollBack` where a window or a running state is not there any more; one above it raises ValueError. Both
        before anything is computed.
        """
        self._check_works(works, start, end)
        unfolded = unfold(works)
        return unfolded.fold([self._run_one(work, start, end, is_cancelled) for work in unfolded.works])

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head on hidden states [rows, hidden], one session after the other.

        Logits [len(keep), vocab] (float32) of each work. With no layers to run (start == N) a session is neither
        read nor changed.
        """
        assert self.parts.closing, "this runner does not hold the closing end"
        self._check_works(works, start, self.num_layers)
        unfolded = unfold(works)
        return unfolded.fold([self._close(work, start, is_cancelled) for work in unfolded.works])

    def _run_one(self, work: Work, start: int, end: int, is_cancelled: IsCancelled | None) -> torch.Tensor:
        batch = self._batch(work.inputs)
        if start == end:
            return batch[0]
        return self._slice.run_blocks(
            work.cache, batch, work.position, start, end, is_cancelled, work.places
        )[0]

    def _close(self, work: Work, start: int, is_cancelled: IsCancelled | None) -> torch.Tensor:
        batch, cache, places = self._batch(work.inputs), work.cache, work.places
        kept = kept_rows(work.rows, work.keep)
        if kept != list(range(work.rows)):
            if start < self.num_layers:
                batch = self._slice.run_blocks(
                    cache, batch, work.position, start, self.num_layers, is_cancelled, places
                )
            start, batch = self.num_layers, batch[:, kept]
            places = None if places is None else places[:, kept]
        return self._slice.run_to_logits(cache, batch, work.position, start, is_cancelled, places)[0].float()

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
        """Run the uncut model on what an opening takes: what a closing makes. What slices are compared with.

        Norm and head see the kept rows only, as in `run_closing`: a head that multiplies another number of rows may
        give other bits.
        """
        assert self.parts == Parts.whole(self.num_layers), "this runner holds a part of the model only"
        work = Work(cache, token_ids, position, [keep] if isinstance(keep, int) else keep, places)
        self._check_works([work], 0, self.num_layers)
        if kept_rows(len(token_ids), work.keep) != list(range(len(token_ids))) or hasattr(cache, "branches"):
            states = self.run_opening_batch([work], end=self.num_layers, is_cancelled=is_cancelled)[0]
            closing = replace(work, inputs=states)
            return self.run_closing_batch([closing], start=self.num_layers, is_cancelled=is_cancelled)[0]
        return self._slice.run_whole(cache, self._fed(token_ids), position, is_cancelled, places)[0].float()

    @property
    def cache_bytes_per_position(self) -> int:
        """What one position of one session of `LONG_SESSION` takes in the held layers."""
        sizes, _, growing = self._session_sizes
        slabs = sum(each * capacity_for(LONG_SESSION, window) for window, each in sizes.items())
        return slabs // LONG_SESSION + growing

    @cached_property
    def _session_sizes(self) -> tuple[Mapping[int | None, int], int, int]:
        """Bytes per position of slabs by window, of running states, and per position of what grows by the row.

        Found by running two rows.
        """
        if not self.is_causal:
            return {}, 0, 0
        cache = self.new_cache()
        row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        if self.takes_memory:
            cache.add_memory(row)
        others = []
        for position in (0, 1):
            for start, end in self.parts.layers:
                self.run_layers(cache, row, position, start=start, end=end)
            others.append(cache.state_bytes)
        growing = others[1] - others[0]
        return cache.position_bytes, others[0] - growing, growing

    @cached_property
    def _memory_bytes_per_row(self) -> int:
        """Found by running a row over two rows of encoder states, and one."""
        sizes = []
        for num_rows in (1, 2) if self.takes_memory else ():
            cache = self.new_cache()
            cache.add_memory(torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device))
            row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
            for start, end in self.parts.layers:
                self.run_layers(cache, row, 0, start=start, end=end)
            sizes.append(cache.size_bytes)
        return sizes[1] - sizes[0] if sizes else 0

    def _check_works(self, works: Sequence[Work], start: int, end: int) -> None:
        assert self.parts.holds(start, end), f"this runner holds {self.parts}, not layers {start}:{end}"
        for work in works:
            if start < end and work.position > work.cache.length:
                raise ValueError(
                    f"a step at position {work.position} leaves a gap: the session holds {work.cache.length}"
                )

    def _fed(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the opening is given, as the model takes it: ids or embeddings [1, rows, ...]."""
        return self._batch(inputs) if inputs.is_floating_point() else inputs.to(self.device).unsqueeze(0)

    def _batch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [1, rows, hidden] as the whole model would have it: this dtype, dense, aligned."""
        batch = hidden_states.to(device=self.device, dtype=self.dtype).contiguous()
        return (batch.clone() if batch.data_ptr() % ALIGNMENT_BYTES else batch).unsqueeze(0)


def kernel_class(device: torch.device) -> str:
    """Name what decides the bits besides the code: the vector instructions, or the GPU's generation."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-sm{major}{minor}"
    if device.type == "cpu":
        return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    return device.type


def _held(model: PreTrainedModel) -> tuple[int, torch.device]:
    """Return the bytes of the stored tensors that are here, a tied one once, and where they are."""
    stored = persistent_names(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = [tensor for name, tensor in tensors if name in stored and not tensor.is_meta]
    device = held[0].device if held else torch.device("cpu")
    return sum(tensor.nbytes for tensor in held), device


def _on_device(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """Move the buffers that were computed, not loaded."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        set_tensor(model, name, buffer.to(device))
    return model


def kept_rows(rows: int, keep: int | Sequence[int] | None) -> list[int]:
    """Return the numbers of the rows that are wanted: the last where nothing is said."""
    numbers = [-1] if keep is None else [keep] if isinstance(keep, int) else list(keep)
    return [range(rows)[number] for number in numbers]
