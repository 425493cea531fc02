"""Runs a range of a stock model's blocks inside the model's own forward.

Every block's `forward` is replaced by a stand-in. In a call over blocks [start, end) the stand-ins outside the range
pass hidden states on, what arrived is injected in front of block `start`, and the forward is left after block
`end - 1`, or runs on through the model's own norm and head. Which parameters are real is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.call_plan import BlockForm
from slicing.forward_form import ForwardForm
from slicing.stacks import BlockStack, CannotCut, embedding_weight

IsCancelled = Callable[[], bool]


class StepCache(Protocol):
    """What stands in for transformers' cache, told where a call begins and what became of it."""

    def begin(self, position: int, start: int, end: int) -> None:
        """Get layers [start, end) ready for a step at `position`."""

    def finish(self, length: int, start: int, end: int) -> None:
        """Note that layers [start, end) hold `length` positions now."""

    def position_ids(self, position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the positions of the rows [1, rows]."""

    def for_model(self) -> Any:
        """Return what the stock forward takes for its cache."""

    def memory_states(self, device: torch.device) -> torch.Tensor | None:
        """Return the encoder states [1, rows, width] that blocks attend to, on `device`, or None."""


class Cancelled(Exception):
    """The call was told to stop, and stopped between two blocks."""


class _LeaveForward(Exception):
    """Carries nothing: the hidden states are kept by the slice, so that no traceback holds them."""


@dataclass(slots=True)
class _Call:
    """What one call asks of the stand-ins."""

    start: int
    end: int
    leaves: bool  # leave the forward after block end - 1 (or before block 0, when there is none)
    hidden_states: torch.Tensor | None = field(repr=False)  # to inject; None: what the model itself brings
    is_cancelled: IsCancelled | None
    memory: torch.Tensor | None = field(default=None, repr=False)  # to inject beside them, into every block
    result: torch.Tensor | None = field(default=None, repr=False)


class _PlainSlices(nn.ModuleList):
    """A list of blocks whose slices are plain lists: `layers[:n]` would build a module anew in every step."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else super().__getitem__(index)


class BlockSlice:
    """A stock model whose blocks can be run in part. One call at a time."""

    def __init__(self, model: PreTrainedModel, stack: BlockStack, form: BlockForm) -> None:
        self.model = model
        self.stack = stack
        self.form = form
        self._call = _Call(0, 0, True, None, None)
        self.forward_form = ForwardForm.of(model)
        self.takes_positions = self.forward_form.position_argument is not None
        if self.forward_form.is_causal and self.forward_form.cache_argument is None:
            raise CannotCut(f"the forward of {type(model).__name__} takes no key/value cache")
        embedding = embedding_weight(model)
        self._device = embedding.device
        self._embedding_size = embedding.shape[-1]
        blocks = model.get_submodule(stack.name)
        if type(blocks) is nn.ModuleList:
            blocks.__class__ = _PlainSlices
        for number, block in enumerate(stack.blocks):
            block.forward = self._stand_in(number, block)

    def embed_and_run(
        self,
        cache: StepCache,
        inputs: torch.Tensor,
        position: int,
        end: int,
        is_cancelled: IsCancelled | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run what comes before the blocks, and blocks [0, end).

        Token ids [1, rows] (or [1, rows, streams]), or input embeddings [1, rows, width], to hidden states
        [1, rows, hidden]. `places` [axes, rows] are given to the model for its positions, where it has several axes.
        """
        call = _Call(0, end, True, None, is_cancelled, self._memory_of(cache, 0, end))
        self._forward(call, cache, position, inputs.shape[1], self._fed(inputs), places)
        assert call.result is not None
        return call.result

    def run_whole(
        self,
        cache: StepCache,
        inputs: torch.Tensor,
        position: int,
        is_cancelled: IsCancelled | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run everything in one forward: what `embed_and_run` takes to what `run_to_logits` makes."""
        num_layers = len(self.stack)
        call = _Call(0, num_layers, False, None, is_cancelled, self._memory_of(cache, 0, num_layers))
        output = self._forward(call, cache, position, inputs.shape[1], self._fed(inputs), places)
        return self.forward_form.made(output)

    def run_blocks(
        self,
        cache: StepCache,
        hidden_states: torch.Tensor,
        position: int,
        start: int,
        end: int,
        is_cancelled: IsCancelled | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run blocks [start, end), at least one, on hidden states [1, rows, hidden]."""
        rows = hidden_states.shape[1]
        call = _Call(start, end, True, hidden_states, is_cancelled, self._memory_of(cache, start, end))
        self._forward(call, cache, position, rows, self._dummy(rows), places)
        assert call.result is not None
        return call.result

    def run_to_logits(
        self,
        cache: StepCache,
        hidden_states: torch.Tensor,
        position: int,
        start: int,
        is_cancelled: IsCancelled | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run blocks [start, N) and what comes after them.

        Hidden states [1, rows, hidden] to logits [1, rows, vocab] (or [1, rows, streams, vocab]), of a headless model
        to its last hidden states [1, rows, hidden].
        """
        rows, num_layers = hidden_states.shape[1], len(self.stack)
        call = _Call(
            start, num_layers, False, hidden_states, is_cancelled, self._memory_of(cache, start, num_layers)
        )
        return self.forward_form.made(self._forward(call, cache, position, rows, self._dummy(rows), places))

    def _forward(
        self,
        call: _Call,
        cache: StepCache,
        position: int,
        rows: int,
        inputs: dict[str, Any],
        places: torch.Tensor | None,
    ) -> Any:
        form = self.forward_form
        if form.cache_argument is not None and form.is_causal:
            inputs |= {form.cache_argument: cache.for_model(), "use_cache": True}
        if form.position_argument is not None:
            inputs[form.position_argument] = (
                cache.position_ids(position, rows, self._device)
                if places is None
                else as_position_ids(places.to(self._device))
            )
        self._call = call
        cache.begin(position, call.start, call.end)
        try:
            with torch.inference_mode():
                output = self.model(**inputs)
        except _LeaveForward:
            output = None
        finally:
            self._call = _IDLE
        if call.start < call.end:
            cache.finish(position + rows, call.start, call.end)
        return output

    def _fed(self, inputs: torch.Tensor) -> dict[str, Any]:
        if inputs.is_floating_point():
            return self.forward_form.with_embeds(inputs)
        return self.forward_form.with_ids(inputs)

    def _dummy(self, rows: int) -> dict[str, Any]:
        """Return inputs that only give the model's own prelude its shapes; fresh ones, as it may write into them."""
        if not self.form.takes_embeds:
            return self.forward_form.dummy_ids(rows, self._device)
        shape = (1, rows, self._embedding_size)
        zeros = torch.zeros(shape, dtype=self.model.dtype, device=self._device)
        return self.forward_form.with_embeds(zeros)

    def _memory_of(self, cache: StepCache, start: int, end: int) -> torch.Tensor | None:
        """What the blocks of a call attend to. Raises ValueError where they need what did not come."""
        if self.form.memory is None or start >= end:
            return None
        memory = cache.memory_states(self._device)
        if memory is None:
            raise ValueError("the session's encoder states did not come")
        return memory

    def _stand_in(self, number: int, block: nn.Module) -> Callable[..., Any]:
        run_block = block.forward
        form = self.form
        is_last = number == len(self.stack) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call.start <= number < call.end:
                if call.is_cancelled is not None and call.is_cancelled():
                    raise Cancelled
                if number == call.start and call.hidden_states is not None:
                    args, kwargs = form.replace_hidden(args, kwargs, call.hidden_states)
                if call.memory is not None:
                    args, kwargs = form.replace_memory(args, kwargs, call.memory)
                output = run_block(*args, **kwargs)
                if call.leaves and number == call.end - 1:
                    call.result = form.unwrap(output)
                    raise _LeaveForward
                return output
            if call.leaves and call.end == 0:
                call.result = form.hidden_of(args, kwargs)
                raise _LeaveForward
            if is_last and call.start == len(self.stack) and call.hidden_states is not None:
                return form.wrap(call.hidden_states)
            return form.wrap(form.hidden_of(args, kwargs))

        return forward


def as_position_ids(places: torch.Tensor) -> torch.Tensor:
    """Return places [axes, rows] as a stock forward takes them: [1, rows] of one axis, else [axes, 1, rows]."""
    return places if len(places) == 1 else places.unsqueeze(1)


_IDLE = _Call(0, 0, True, None, None)
