"""Runs a range of a stock model's blocks inside the model's own forward.

Every block's `forward` is replaced by a stand-in. In a call over blocks [start, end) the stand-ins outside the range
pass hidden states on, what arrived is injected in front of block `start`, and the forward is left after block
`end - 1`, or runs on through the model's own norm and head. Which parameters are real is the caller's matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.call_plan import BlockForm
from slicing.stacks import BlockStack, CannotCut, embedding_weight

IsCancelled = Callable[[], bool]

CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 and later, and before


class StepCache(Protocol):
    """What stands in for transformers' cache, told where a call begins and what became of it."""

    def begin(self, position: int, start: int, end: int) -> None:
        """Get layers [start, end) ready for a step at `position`."""

    def finish(self, length: int, start: int, end: int) -> None:
        """Note that layers [start, end) hold `length` positions now."""

    def position_ids(self, position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the positions of the rows [1, rows]."""


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
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_argument = next((name for name in CACHE_ARGUMENTS if name in accepted), None)
        self.takes_positions = "position_ids" in accepted
        if self._cache_argument is None:
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
        token_ids: torch.Tensor,
        position: int,
        end: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run what comes before the blocks, and blocks [0, end).

        Token ids [1, rows] to hidden states [1, rows, hidden].
        """
        call = _Call(0, end, True, None, is_cancelled)
        self._forward(call, cache, position, token_ids.shape[1], input_ids=token_ids)
        assert call.result is not None
        return call.result

    def run_whole(
        self,
        cache: StepCache,
        token_ids: torch.Tensor,
        position: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run everything in one forward: token ids [1, rows] to logits [1, rows, vocab]."""
        call = _Call(0, len(self.stack), False, None, is_cancelled)
        return _logits(self._forward(call, cache, position, token_ids.shape[1], input_ids=token_ids))

    def run_blocks(
        self,
        cache: StepCache,
        hidden_states: torch.Tensor,
        position: int,
        start: int,
        end: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run blocks [start, end), at least one, on hidden states [1, rows, hidden]."""
        rows = hidden_states.shape[1]
        call = _Call(start, end, True, hidden_states, is_cancelled)
        self._forward(call, cache, position, rows, **self._dummy(rows))
        assert call.result is not None
        return call.result

    def run_to_logits(
        self,
        cache: StepCache,
        hidden_states: torch.Tensor,
        position: int,
        start: int,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run blocks [start, N) and what comes after them.

        Hidden states [1, rows, hidden] to logits [1, rows, vocab].
        """
        rows = hidden_states.shape[1]
        call = _Call(start, len(self.stack), False, hidden_states, is_cancelled)
        return _logits(self._forward(call, cache, position, rows, **self._dummy(rows)))

    def _forward(
        self, call: _Call, cache: StepCache, position: int, rows: int, **inputs: torch.Tensor
    ) -> Any:
        assert self._cache_argument is not None
        inputs[self._cache_argument] = cache  # type: ignore[assignment]
        if self.takes_positions:
            inputs["position_ids"] = cache.position_ids(position, rows, self._device)
        self._call = call
        cache.begin(position, call.start, call.end)
        try:
            with torch.inference_mode():
                output = self.model(**inputs, use_cache=True)
        except _LeaveForward:
            output = None
        finally:
            self._call = _IDLE
        if call.start < call.end:
            cache.finish(position + rows, call.start, call.end)
        return output

    def _dummy(self, rows: int) -> dict[str, torch.Tensor]:
        """Return inputs that only give the model's own prelude its shapes; fresh ones, as it may write into them."""
        if not self.form.takes_embeds:
            return {"input_ids": torch.zeros(1, rows, dtype=torch.int64, device=self._device)}
        shape = (1, rows, self._embedding_size)
        return {"inputs_embeds": torch.zeros(shape, dtype=self.model.dtype, device=self._device)}

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


def _logits(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.logits


_IDLE = _Call(0, 0, True, None, None)
