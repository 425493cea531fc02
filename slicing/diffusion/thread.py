"""Stand-ins for the blocks of a stack: they collect a pass, have it run elsewhere, and refuse what is no plain thread.

The model's own loop runs over them. All but the last return placeholders, and every later block must be given exactly
those; the last one sends the pass off. Knows nothing of nodes or networks: a sink runs the pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from slicing.diffusion.calls import Pass, tensor_leaves
from slicing.diffusion.collecting import (
    BlockOutputs,
    Collecting,
    OutputPlaces,
    answer_of,
    check_packable,
    single_pass,
)
from slicing.diffusion.hooks import refuse_hooks, refuse_late_hooks
from slicing.diffusion.learning import learn_outputs
from slicing.diffusion.lent_parts import LentParts
from slicing.diffusion.placeholder import ThreadBroken
from slicing.diffusion.stacks import Stack
from slicing.errors import ModelError

__all__ = [
    "LoadBlock",
    "NoSuchAttribute",
    "PassSink",
    "StandIn",
    "ThreadBroken",
    "refuse_hooks",
    "replace_blocks",
]

MAX_LEARNED = 1024  # kinds of calls that are remembered: sizes of pictures times blocks
LoadBlock = Callable[[Stack, int], nn.Module]


class NoSuchAttribute(ThreadBroken, AttributeError):
    """The model asks a block for something that no block of its class has; `hasattr` may ask so."""


class PassSink(Protocol):
    """Runs passes: the gateway's chains, or block ranges in this process."""

    def __call__(self, stack: Stack, made: Pass) -> list[torch.Tensor]:
        """Return the streams after the last block, in the shapes and types of `made.streams`."""


# The passes that are being collected in this context, by stack: several forwards of one model run at once in threads.
_collecting: ContextVar[Mapping[Any, Collecting]] = ContextVar("collecting", default={})  # noqa: B039 - never changed


def replace_blocks(
    model: nn.Module,
    stacks: Sequence[Stack],
    sink_of: ContextVar[PassSink],
    load_block: LoadBlock,
    *,
    per_block: bool = False,
) -> None:
    """Put a stand-in in the place of every block of `stacks`, which are the stacks of this model.

    `sink_of` holds the sink in the context of whoever calls the model. `load_block` gives a block with its weights; it
    is asked only where the model itself uses a part of one. With `per_block` every block is a pass of its own, which
    also serves models that are no plain thread and costs a way through all nodes for each. Raises `ModelError` for a
    model with hooks on.
    """
    refuse_hooks(model)
    for stack in stacks:
        thread = StackThread(model, stack, sink_of, load_block, per_block)
        blocks = model.get_submodule(stack.path)
        assert isinstance(blocks, nn.ModuleList)
        for number in range(len(stack)):
            blocks[number] = StandIn(thread, number)


class StackThread:
    """What the stand-ins of one stack share: how its blocks answer, and how passes begin and end."""

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        sink_of: ContextVar[PassSink],
        load_block: LoadBlock,
        per_block: bool,
    ) -> None:
        self.stack = stack
        self.load_block: Callable[[int], nn.Module] = lambda number: load_block(stack, number)
        self._model = weakref.ref(model)
        self._sink_of = sink_of
        self._per_block = per_block
        self._outputs: dict[object, BlockOutputs] = {}  # by what a block was called with
        self._places: OutputPlaces | None = None
        self._learning = threading.Lock()

    def call(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Take one block's call; the answer is made of placeholders, for the last block of real tensors."""
        if self._per_block:
            return self._call_alone(number, args, kwargs)
        try:
            collecting = self._begin(args, kwargs) if number == 0 else self._current(number)
            placeholders = collecting.take(number, args, kwargs)
            if number + 1 < len(self.stack):
                return placeholders
            self._forget()
            made = collecting.finish()
            self._places = self._places or collecting.places()
            return collecting.answer(self._run(made))
        except BaseException:
            self._forget()
            raise

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collecting:
        self._check(0, args, kwargs)
        outputs = self._places.outputs_of(args, kwargs) if self._places is not None else None
        collecting = Collecting(self.stack, outputs or self._outputs_of(0, args, kwargs))
        _collecting.set({**_collecting.get(), self: collecting})
        return collecting

    def _current(self, number: int) -> Collecting:
        collecting = _collecting.get().get(self)
        if collecting is None:
            raise ThreadBroken(self.stack, number, None, "is called where block 0 should be")
        return collecting

    def _forget(self) -> None:
        passes = _collecting.get()
        if self in passes:
            _collecting.set({key: value for key, value in passes.items() if key is not self})

    def _call_alone(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._check(number, args, kwargs)
        outputs = self._outputs_of(number, args, kwargs)
        streams = iter(self._run(single_pass(self.stack, number, args, kwargs, outputs)))
        return answer_of(outputs, [None if like is None else next(streams) for like in outputs.likes])

    def _check(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        check_packable(self.stack, number, args, kwargs)
        if (model := self._model()) is not None:
            refuse_late_hooks(model, model.get_submodule(self.stack.path))

    def _run(self, made: Pass) -> list[torch.Tensor]:
        sink = self._sink_of.get(None)
        if sink is None:
            raise ModelError(f"nobody runs the blocks of {self.stack.name} in this context")
        streams = sink(self.stack, made)
        wanted = [(stream.shape, stream.dtype) for stream in made.streams]
        if [(stream.shape, stream.dtype) for stream in streams] != wanted:
            raise ModelError(f"a pass over {self.stack.name} came back in other shapes or types")
        return streams

    def _outputs_of(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockOutputs:
        leaves = tuple((path, leaf.shape, leaf.dtype) for path, leaf in tensor_leaves(args, kwargs))
        with self._learning:
            if (number, leaves) not in self._outputs:
                if len(self._outputs) >= MAX_LEARNED:
                    self._outputs.clear()
                learned = learn_outputs(
                    self.stack, number, args, kwargs, self.load_block, self._dtype(args, kwargs)
                )
                self._outputs[number, leaves] = learned
            return self._outputs[number, leaves]

    def _dtype(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
        """Return what the model computes in: its own word, else the type of the first argument."""
        dtype = getattr(self._model(), "dtype", None)
        floats = (tensor.dtype for _, tensor in tensor_leaves(args, kwargs) if tensor.is_floating_point())
        return dtype if isinstance(dtype, torch.dtype) else next(floats, torch.float32)


class StandIn(nn.Module):
    """Has no weights. What the model asks of the block besides calling it comes from a weightless copy."""

    def __init__(self, thread: StackThread, number: int) -> None:
        super().__init__()
        self.training = False
        self._thread = thread
        self._number = number
        self._parts = LentParts(thread.stack.blocks[number], lambda: thread.load_block(number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the call; see `StackThread.call`."""
        return self._thread.call(self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_parts" not in self.__dict__:
                raise
        try:
            return self._parts.get(name)
        except AttributeError as error:
            stack = self._thread.stack
            raise NoSuchAttribute(stack, self._number, f"attribute {name}", "does not exist") from error
