"""One pass while it is being collected: every block's call is packed, and its tensors are told apart by identity.

A tensor that the block before returned is a stream; any other is a slot. Knows nothing of who runs the pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slicing.diffusion.calls import (
    BlockCall,
    Pass,
    Path,
    Plan,
    UnsupportedArgument,
    pack_call,
    tensor_leaves,
    version_of,
)
from slicing.diffusion.placeholder import Like, Origin, Placeholder, ThreadBroken
from slicing.diffusion.stacks import Stack

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BlockOutputs:
    """What a block of a stack returns: one tensor, or a tuple whose items are tensors or None."""

    is_tuple: bool
    likes: tuple[Like | None, ...]  # as block 0 gave them when it was tried; None: a None


@dataclass(frozen=True)
class OutputPlaces:
    """Which argument of a block each output becomes in the next: so outputs of other sizes need no other try."""

    is_tuple: bool
    places: tuple[Path | None, ...]  # None: the output is a None

    def outputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockOutputs | None:
        """Return what a block gives for this call; None when it lacks one of the arguments."""
        leaves = dict(tensor_leaves(args, kwargs))
        if not leaves.keys() >= set(self.places) - {None}:
            return None
        likes = (None if path is None else leaves[path] for path in self.places)
        return BlockOutputs(
            self.is_tuple, tuple(None if like is None else (like.shape, like.dtype) for like in likes)
        )


class Tensors:
    """The slots of a pass: every tensor once, and kept, so that its memory is not used again meanwhile."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self._slots: dict[Any, int] = {}
        self._watched: list[tuple[torch.Tensor, int]] = []

    def slot(self, stack: Stack, number: int, path: Path, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor; views of the same memory in the same shape are one tensor."""
        if isinstance(tensor, Placeholder):
            raise ThreadBroken(stack, number, path, f"is an output of block {tensor.origin.number}")
        if tensor.is_meta:
            raise ThreadBroken(stack, number, path, "has no numbers (it is on the meta device)")
        slot = self._slots.setdefault(_place_of(tensor), len(self.held))
        if slot == len(self.held):
            self.held.append(tensor)
            self.watch(tensor)
        return slot

    def watch(self, tensor: torch.Tensor) -> None:
        """Note a tensor that must not be written to until the pass has run."""
        self._watched.append((tensor, version_of(tensor)))

    def check_unchanged(self, stack: Stack) -> None:
        """Raise `ThreadBroken` when the model wrote to a tensor after a block was given it."""
        if any(version_of(tensor) != version for tensor, version in self._watched):
            raise ThreadBroken(
                stack, len(stack) - 1, None, "is called after an earlier block's tensor was written to"
            )


@dataclass(eq=False)
class Collecting:
    """The calls of one pass so far, and what was learned from them."""

    stack: Stack
    outputs: BlockOutputs
    calls: list[BlockCall] = field(default_factory=list)
    shapes: dict[str, int] = field(default_factory=dict)  # packed calls, numbered
    tensors: Tensors = field(default_factory=Tensors)
    first: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # block 0's call, until its streams are known
    stream_of: dict[Path, int] = field(default_factory=dict)  # by argument
    output_of: dict[int, int] = field(default_factory=dict)  # by stream
    streams: list[torch.Tensor] = field(default_factory=list)
    device: torch.device = _CPU

    def take(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note the call of block `number` and return placeholders for what it gives. Raises `ThreadBroken`."""
        expected = len(self.calls) or int(self.first is not None)
        if number != expected:
            raise ThreadBroken(self.stack, number, None, f"is called where block {expected} should be")
        if self.first is None:
            self.first = (tuple(args), dict(kwargs))
            for _, tensor in tensor_leaves(args, kwargs):
                self.tensors.watch(tensor)
                self.device = tensor.device
        else:
            if number == 1:
                self._learn_streams(self.first, args, kwargs)
                self._pack(0, *self.first)
            self._pack(number, args, kwargs)
        return self._answer(
            lambda output, like: Placeholder.make(Origin(self.stack, number, output, self), like, self.device)
        )

    def finish(self) -> Pass:
        """Return the pass, once the last block was called. Raises `ThreadBroken`."""
        self.tensors.check_unchanged(self.stack)
        outputs = None
        if self.outputs.is_tuple:
            stream_of = {output: stream for stream, output in self.output_of.items()}
            outputs = tuple(stream_of.get(output) for output in range(len(self.outputs.likes)))
        shapes = tuple(json.loads(shape) for shape in self.shapes)
        plan = Plan(self.stack.name, tuple(self.calls), shapes, outputs, len(self.streams))
        return Pass(plan, self.streams, self.tensors.held)

    def places(self) -> OutputPlaces | None:
        """Return where the outputs went, for later passes; None when the model dropped one."""
        path_of = {self.output_of[stream]: path for path, stream in self.stream_of.items()}
        if any(like is not None and output not in path_of for output, like in enumerate(self.outputs.likes)):
            return None
        places = tuple(path_of.get(output) for output in range(len(self.outputs.likes)))
        return OutputPlaces(self.outputs.is_tuple, places)

    def answer(self, streams: Sequence[torch.Tensor]) -> Any:
        """Return what the last block gives, for these streams after it."""
        of = {output: streams[stream] for stream, output in self.output_of.items()}
        last = len(self.stack) - 1

        def filled(output: int, like: Like) -> torch.Tensor:
            if output in of:
                return of[output]
            return Placeholder.make(Origin(self.stack, last, output, self), like, self.device)

        return self._answer(filled)

    def _answer(self, fill: Callable[[int, Like], torch.Tensor]) -> Any:
        likes = list(self.outputs.likes)
        for stream, output in self.output_of.items():
            likes[output] = (self.streams[stream].shape, self.streams[stream].dtype)
        return answer_of(
            self.outputs, [None if like is None else fill(n, like) for n, like in enumerate(likes)]
        )

    def _learn_streams(
        self, first: tuple[Sequence[Any], Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Find the outputs of block 0 among the arguments of block 1, and the same arguments of block 0."""
        before = dict(tensor_leaves(*first))
        found: dict[tuple[int, int], int] = {}
        for path, tensor in tensor_leaves(args, kwargs):
            if not isinstance(tensor, Placeholder):
                continue
            start, output = before.get(path), tensor.origin.output
            if start is None:
                raise ThreadBroken(
                    self.stack, 1, path, "is an output of block 0, which itself takes no such tensor"
                )
            if (tensor.shape, tensor.dtype) != (start.shape, start.dtype):
                raise ThreadBroken(self.stack, 0, path, "changes its shape or type from block to block")
            stream = found.setdefault((output, id(start)), len(self.streams))
            if stream == len(self.streams):
                if output in self.output_of.values():
                    raise ThreadBroken(
                        self.stack, 1, path, "takes one output of block 0 for a second argument"
                    )
                self.output_of[stream] = output
                self.streams.append(start)
            self.stream_of[path] = stream
        if not self.streams:
            raise ThreadBroken(self.stack, 1, None, "takes no output of block 0")

    def _pack(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        used: list[int] = []
        seen: set[Path] = set()

        def leaf_of(path: Path, tensor: torch.Tensor) -> dict[str, int]:
            stream = self.stream_of.get(path)
            if stream is None:
                used.append(self.tensors.slot(self.stack, number, path, tensor))
                return {"slot": len(used) - 1}
            seen.add(path)
            if number > 0:
                self._check_stream(number, path, tensor, self.output_of[stream])
            return {"stream": stream}

        shape = _packed(self.stack, number, args, kwargs, leaf_of)
        if missing := self.stream_of.keys() - seen:
            raise ThreadBroken(self.stack, number, min(missing), "is missing")
        self.calls.append(BlockCall(self.shapes.setdefault(shape, len(self.shapes)), tuple(used)))

    def _check_stream(self, number: int, path: Path, tensor: torch.Tensor, output: int) -> None:
        if not isinstance(tensor, Placeholder):
            raise ThreadBroken(self.stack, number, path, f"is not what block {number - 1} returned")
        if tensor.origin != Origin(self.stack, number - 1, output, self):
            came = tensor.origin
            raise ThreadBroken(
                self.stack,
                number,
                path,
                f"is output {came.output} of block {came.number}, not of the one before",
            )


def check_packable(stack: Stack, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `ThreadBroken` when an argument is of a type that cannot be sent, or this is no place for a plain call."""
    for path, tensor in tensor_leaves(args, kwargs):
        if isinstance(tensor, Placeholder):
            came = tensor.origin
            raise ThreadBroken(
                stack,
                number,
                path,
                f"is an output of block {came.number} of {came.stack.name}, which has not run yet",
            )
        if torch.is_autocast_enabled(tensor.device.type):
            raise ThreadBroken(stack, number, path, "comes under autocast, which other nodes do not have on")
    _packed(stack, number, args, kwargs, lambda _path, _tensor: {})


def single_pass(
    stack: Stack, number: int, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: BlockOutputs
) -> Pass:
    """Return the pass of one block alone: its streams are arguments of the shapes and types of its outputs.

    Which of several such arguments is taken does not matter: no second block takes what comes back. Raises
    `ThreadBroken` where an output is like no argument.
    """
    leaves = list(tensor_leaves(args, kwargs))
    taken: dict[Path, int] = {}
    streams: list[torch.Tensor] = []
    places: list[int | None] = []
    for output, like in enumerate(outputs.likes):
        if like is None:
            places.append(None)
            continue
        path, tensor = next(
            ((path, leaf) for path, leaf in leaves if path not in taken and (leaf.shape, leaf.dtype) == like),
            (None, None),
        )
        if path is None or tensor is None:
            raise ThreadBroken(stack, number, f"output {output}", "is of the shape of no argument")
        taken[path] = len(streams)
        places.append(len(streams))
        streams.append(tensor)
    tensors, used = Tensors(), []

    def leaf_of(path: Path, tensor: torch.Tensor) -> dict[str, int]:
        if path in taken:
            return {"stream": taken[path]}
        used.append(tensors.slot(stack, number, path, tensor))
        return {"slot": len(used) - 1}

    shape = json.loads(_packed(stack, number, args, kwargs, leaf_of))
    plan = Plan(
        stack.name,
        (BlockCall(0, tuple(used)),),
        (shape,),
        tuple(places) if outputs.is_tuple else None,
        len(streams),
        number,
    )
    return Pass(plan, streams, tensors.held)


def answer_of(outputs: BlockOutputs, items: Sequence[torch.Tensor | None]) -> Any:
    """Return what a block gives, made of these outputs."""
    return tuple(items) if outputs.is_tuple else items[0]


def _packed(
    stack: Stack,
    number: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaf_of: Callable[[Path, torch.Tensor], dict[str, int]],
) -> str:
    try:
        return json.dumps(pack_call(args, kwargs, leaf_of))
    except UnsupportedArgument as error:
        raise ThreadBroken(stack, number, error.path, error.reason) from error


def _place_of(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    if not tensor.numel():
        return id(tensor)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
    return (
        tensor.device,
        place,
        tensor.shape,
        tensor.dtype,
        version_of(tensor),
        tensor.is_conj(),
        tensor.is_neg(),
    )
