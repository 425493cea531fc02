"""The node's side: blocks [start, end) of a pipeline's transformers with their weights, ready to run passes.

It holds nothing of a session and opens no file but through its source; one thread at a time may use it.
"""

from __future__ import annotations

import copy
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from slicing.block_slice import Cancelled
from slicing.diffusion.calls import Pass, snapshot, tensor_leaves
from slicing.diffusion.index_guard import IndexGuard, needs_guard
from slicing.diffusion.stacks import Stack
from slicing.errors import ModelError
from slicing.progress import Progress, no_progress

__all__ = ["BlockRange", "BlockSource", "Cancelled", "Keeper", "fill_block", "load_block_range"]

ALIGNMENT_BYTES = 64  # torch's own; kernels take another path (other bits) for numbers at odd addresses
LAYER_HASH_BYTES = 8
MEASURED_ROWS = 256
MEASURED_RUNS = 3
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

IsCancelled = Callable[[], bool]


class BlockSource(Protocol):
    """Where blocks come from: a pipeline's folder, or a model in memory."""

    @property
    def remote(self) -> Sequence[Stack]:
        """The remote stacks, numbered through, their blocks weightless."""

    def read_block(self, stack: Stack, number: int) -> Mapping[str, torch.Tensor]:
        """Return the stored tensors of block `number` of a stack, by their names in the block."""


class Keeper(Protocol):
    """Looks on while blocks run: keeps keys and values, cuts rows out of arguments."""

    def block(self, number: int) -> AbstractContextManager[object]:
        """Return the context in which the block with this global number runs."""

    def arguments(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the block with this global number runs."""


class BlockRange:
    """Blocks [start, end), in global numbers over all remote stacks."""

    takes_calls = True  # passes, not rows of hidden states

    def __init__(
        self,
        stacks: Sequence[Stack],
        blocks: Mapping[int, nn.Module],
        *,
        dtype: torch.dtype = torch.float32,
        layer_hashes: Mapping[int, bytes] | None = None,
    ) -> None:
        """Take over blocks with their weights, by global number; `stacks` are all remote stacks."""
        self.stacks = {stack.name: stack for stack in stacks}
        self.start, self.end = (min(blocks), max(blocks) + 1) if blocks else (0, 0)
        self.num_layers = max((stack.end for stack in stacks), default=0)
        self.hidden_size = max((stack.width for stack in stacks), default=0)
        self.dtype = dtype
        self.form = f"stock/{DTYPE_NAMES.get(dtype, str(dtype).removeprefix('torch.'))}"
        self.layer_hashes: Mapping[int, bytes] = dict(layer_hashes or {})
        self._blocks = dict(blocks)
        tensors = [tensor for block in blocks.values() for tensor in _tensors(block)]
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.looks_at_indices = self.device.type != "cpu"

    def stack_of(self, made: Pass) -> Stack:
        """Return the stack that a pass is over. Raises `ModelError` for one that this model does not have."""
        self.offset_of(made.plan.stack)
        stack = self.stacks[made.plan.stack]
        if not made.plan.blocks or made.plan.end > len(stack):
            raise ModelError(f"a plan is for blocks up to {made.plan.end}, {stack.name} has {len(stack)}")
        return stack

    def offset_of(self, stack_name: str) -> int:
        """Return the global number of a stack's first block. Raises `ModelError` for one that is not here."""
        if stack_name not in self.stacks:
            raise ModelError(f"this model has no stack {stack_name!r}")
        return self.stacks[stack_name].offset

    @torch.no_grad()
    def run(
        self,
        made: Pass,
        *,
        start: int,
        end: int,
        keeper: Keeper | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> list[torch.Tensor]:
        """Run blocks [start, end) (global numbers, held here, all of the stack of `made`) and return the streams.

        `made.streams` are the streams before block `start`; blocks that the plan leaves out are passed by. Raises
        `ModelError` when the pass does not fit the blocks, and `Cancelled` between two blocks.
        """
        stack = self.stack_of(made)
        if not max(self.start, stack.offset) <= start <= end <= min(self.end, stack.end):
            raise ModelError(
                f"blocks {start}:{end} of {stack.name} are not held here ({self.start}:{self.end} are)"
            )
        here = Pass(
            made.plan,
            [self._settled(stream) for stream in made.streams],
            self._settled_slots(made, start - stack.offset, end - stack.offset),
        )
        streams = here.streams
        planned = range(stack.offset + made.plan.first, stack.offset + made.plan.end)
        for number in range(max(start, planned.start), min(end, planned.stop)):
            if is_cancelled is not None and is_cancelled():
                raise Cancelled
            streams = self._run_block(here, streams, stack, number, keeper)
        return streams

    def measure_layer_ms(self, rows: int = MEASURED_ROWS) -> float:
        """Measure what the matrices of one held block take for `rows` rows: median, in milliseconds.

        What a block is called with is known with the first pass only, so attention is not in it.
        """
        if not self._blocks:
            return 0.0
        block = self._blocks[self.start]
        weights = [parameter for parameter in block.parameters() if parameter.dim() == 2]
        inputs = [
            torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device) for weight in weights
        ]
        times = []
        for _ in range(MEASURED_RUNS + 1):  # the first allocates, and is not counted
            began = time.perf_counter()
            for weight, rows_in in zip(weights, inputs, strict=True):
                nn.functional.linear(rows_in, weight)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:]) * 1000

    def _run_block(
        self, made: Pass, streams: list[torch.Tensor], stack: Stack, number: int, keeper: Keeper | None
    ) -> list[torch.Tensor]:
        name = f"block {number - stack.offset} of {stack.name}"
        args, kwargs = made.call(number - stack.offset, streams)
        if keeper is not None:
            args, kwargs = keeper.arguments(number, args, kwargs)
        before = snapshot(args, kwargs)
        block = self._blocks[number]
        try:
            watch = nullcontext() if keeper is None else keeper.block(number)
            with self._guard(block, args, kwargs), watch:
                answer = block(*args, **kwargs)
        except (ModelError, Cancelled, MemoryError):
            raise
        except Exception as error:  # blocks raise all sorts for arguments that do not fit them
            raise ModelError(f"{name} cannot run this call ({type(error).__name__})") from error
        if snapshot(args, kwargs) != before:
            raise ModelError(f"{name} writes into its arguments, which no other block would see")
        return self._streams_after(made, streams, answer, name, keeper)

    def _guard(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """What looks at indices where one out of range would end the process; elsewhere torch itself refuses it."""
        if not self.looks_at_indices:
            return nullcontext()
        tensors = (tensor for _, tensor in tensor_leaves(args, kwargs))
        return IndexGuard() if needs_guard(block, tensors) else nullcontext()

    def _streams_after(
        self, made: Pass, streams: list[torch.Tensor], answer: Any, name: str, keeper: Keeper | None
    ) -> list[torch.Tensor]:
        outputs = made.plan.outputs
        items = (answer,) if outputs is None else answer
        places: tuple[int | None, ...] = (0,) if outputs is None else outputs
        if not isinstance(items, tuple | list) or len(items) != len(places):
            raise ModelError(f"{name} returns another number of outputs than its plan says")
        after = list(streams)
        for item, stream in zip(items, places, strict=True):
            if stream is None or item is None:  # the last block of some models gives no text any more
                continue
            before = streams[stream]
            fits = (
                isinstance(item, torch.Tensor) and item.dtype == before.dtype and item.dim() == before.dim()
            )
            if not fits or (keeper is None and item.shape != before.shape):
                raise ModelError(f"{name} changes the shape or type of a stream")
            after[stream] = item
        return after

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as kernels need it for the same bits everywhere: on this device, at an aligned address."""
        moved = tensor.to(self.device)
        return moved.clone() if moved.data_ptr() % ALIGNMENT_BYTES else moved

    def _settled_slots(self, made: Pass, first: int, last: int) -> list[torch.Tensor]:
        used = made.slots_between(first, last)
        return [self._settled(slot) if number in used else slot for number, slot in enumerate(made.slots)]


def load_block_range(
    source: BlockSource,
    start: int,
    end: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> BlockRange:
    """Read the weights of blocks [start, end) (global numbers), and no others, into copies of the source's blocks.

    Floating-point tensors become `dtype`, but for those that the class keeps in float32, as in stock loading. Raises
    `ModelError` when a tensor is missing, left over or misshapen.
    """
    tell = progress or no_progress
    places = [(stack, number) for stack in source.remote for number in range(len(stack))]
    if not 0 <= start < end <= len(places):
        raise ModelError(f"blocks {start}:{end} cannot be held: the model has {len(places)}")
    wanted = places[start:end]
    total = sum(stack.size_bytes // len(stack) for stack, _ in wanted)
    blocks, hashes, done = {}, {}, 0
    for place, (stack, number) in enumerate(wanted, start):
        tensors = source.read_block(stack, number)
        hashes[place] = _hash(tensors)
        blocks[place] = fill_block(stack, number, tensors, dtype=dtype, device=device)
        done += stack.size_bytes // len(stack)
        tell("load", done, total)
    return BlockRange(source.remote, blocks, dtype=dtype, layer_hashes=hashes)


def fill_block(
    stack: Stack,
    number: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return a copy of a weightless block with these tensors in it; see `load_block_range` for types and errors."""
    block = copy.deepcopy(stack.blocks[number])
    name = f"block {number} of {stack.name}"
    typed = {
        key: tensor.to(device, _dtype_of(stack, key, tensor, dtype)).contiguous()
        for key, tensor in tensors.items()
    }
    try:
        missing, left_over = block.load_state_dict(typed, strict=False, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"the stored tensors of {name} have other shapes than its configuration means"
        ) from error
    if missing or left_over:
        what = (
            f"holds no tensor {missing[0]}"
            if missing
            else f"holds {left_over[0]}, which the block does not have"
        )
        raise ModelError(f"the checkpoint of {name} {what}; its files do not belong together")
    for module in block.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    if any(tensor.is_meta for tensor in _tensors(block)):
        raise ModelError(f"{name} has tensors that no checkpoint holds")
    return block.eval().requires_grad_(False)


def _dtype_of(stack: Stack, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return stack.dtype_of(key, dtype) if tensor.is_floating_point() else tensor.dtype


def _tensors(block: nn.Module) -> list[torch.Tensor]:
    return [*block.parameters(), *block.buffers()]


def _hash(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return 8 bytes of SHA-256 over the stored tensors, so that replicas agree whatever they compute in."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            if tensor.numel()
            else b""
        )
    return hasher.digest()[:LAYER_HASH_BYTES]
