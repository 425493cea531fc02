"""One pass over a block stack as data: which block is called with what, as JSON with the tensors beside it.

A plan says how the calls are made, a pass adds the tensors. Knows nothing of models, of who runs a pass, or of how it
travels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from slicing.diffusion.packing import (
    DTYPES,
    MAX_SLOTS,
    Path,
    UnsupportedArgument,
    count_slots,
    is_count,
    is_list,
    map_tensors,
    memory_order,
    pack_call,
    path_name,
    restore_order,
    snapshot,
    tensor_leaves,
    unpack_call,
    version_of,
)
from slicing.errors import ModelError

__all__ = [
    "DIGEST_BYTES",
    "DTYPES",
    "MAX_BLOCKS",
    "MAX_PLAN_BYTES",
    "MAX_SLOTS",
    "MAX_STREAMS",
    "BlockCall",
    "Pass",
    "Path",
    "Plan",
    "UnsupportedArgument",
    "map_tensors",
    "memory_order",
    "pack_call",
    "path_name",
    "restore_order",
    "snapshot",
    "tensor_leaves",
    "unpack_call",
    "version_of",
]

DIGEST_BYTES = 16
MAX_PLAN_BYTES = 128 << 10  # the largest seen is 2 KiB
MAX_BLOCKS = 4096
MAX_STREAMS = 16


@dataclass(frozen=True)
class BlockCall:
    """One block's call without its tensors."""

    shape: int  # index into Plan.shapes
    slots: tuple[int, ...]  # the slot of the pass that fills each tensor leaf of that shape, in order


@dataclass(frozen=True)
class Plan:
    """What one pass over a stack is made of, without tensors."""

    stack: str  # "transformer.transformer_blocks": the component, then the path of the stack in it
    blocks: tuple[BlockCall, ...]  # one for each block of the stack, in order
    shapes: tuple[
        Any, ...
    ]  # distinct calls: {"args": [...], "kwargs": {...}}, leaves as `pack_call` makes them
    outputs: (
        tuple[int | None, ...] | None
    )  # output k of a block is stream j (None: dropped); None: it is the stream
    num_streams: int
    first: int = (
        0  # the number in the stack of the first of `blocks`; only where blocks are sent one by one not 0
    )

    @property
    def end(self) -> int:
        """The number in the stack after the last of `blocks`."""
        return self.first + len(self.blocks)

    def to_json(self) -> bytes:
        """Return the plan as UTF-8 JSON, in one way only: equal plans give equal bytes."""
        return self._encoded

    @classmethod
    def from_json(cls, encoded: bytes) -> Plan:
        """Read a plan that came from elsewhere. Raises `ModelError` for anything that `to_json` does not make."""
        if len(encoded) > MAX_PLAN_BYTES:
            raise ModelError(f"a plan of {len(encoded)} bytes is too long: at most {MAX_PLAN_BYTES}")
        try:
            plan = _read_plan(cls, json.loads(bytes(encoded).decode(), parse_constant=_refuse_constant))
            _check_plan(plan)
            is_plain = plan.to_json() == encoded
        except (ValueError, RecursionError) as error:
            raise ModelError("a plan is not JSON") from error
        if not is_plain:
            raise ModelError("a plan is written in another way than plans are")
        return plan

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over the JSON."""
        return hashlib.blake2b(self._encoded, digest_size=DIGEST_BYTES).digest()

    @cached_property
    def num_slots(self) -> int:
        """How many slots a pass of this plan must bring."""
        return 1 + max((slot for call in self.blocks for slot in call.slots), default=-1)

    @cached_property
    def _encoded(self) -> bytes:
        fields = {
            "stack": self.stack,
            "blocks": [[call.shape, *call.slots] for call in self.blocks],
            "shapes": list(self.shapes),
            "outputs": None if self.outputs is None else list(self.outputs),
            "streams": self.num_streams,
            "first": self.first,
        }
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


@dataclass
class Pass:
    """A pass, ready to run."""

    plan: Plan
    streams: list[torch.Tensor]  # what is threaded through the blocks, as the first of them takes it
    slots: list[torch.Tensor]  # every other tensor, once each however many blocks use it

    def call(self, number: int, streams: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of block `number` of the stack, with these streams in their places.

        Raises `ModelError` when the pass lacks a tensor that its plan names.
        """
        plan = self.plan
        if len(streams) != plan.num_streams or plan.num_slots > len(self.slots):
            raise ModelError(
                f"a pass over {plan.stack} brings {len(streams)} streams and {len(self.slots)} slots, but its plan "
                f"names {plan.num_streams} and {plan.num_slots}"
            )
        call = plan.blocks[number - plan.first]
        return unpack_call(plan.shapes[call.shape], [self.slots[slot] for slot in call.slots], streams)

    def slots_between(self, first: int, last: int) -> set[int]:
        """Return the numbers of the slots that blocks [first, last) of the stack use."""
        plan = self.plan
        calls = plan.blocks[max(first - plan.first, 0) : max(last - plan.first, 0)]
        return {slot for call in calls for slot in call.slots}


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _read_plan(cls: type[Plan], fields: Any) -> Plan:
    if not isinstance(fields, dict) or list(fields) != [
        "stack",
        "blocks",
        "shapes",
        "outputs",
        "streams",
        "first",
    ]:
        raise ModelError("a plan has other fields than a plan")
    stack, blocks, shapes, outputs, streams, first = fields.values()
    if type(stack) is not str or not 0 < len(stack) <= 200:
        raise ModelError("a plan names no stack")
    if not is_list(blocks, MAX_BLOCKS) or not all(is_list(call, MAX_SLOTS) and call for call in blocks):
        raise ModelError("a plan holds no list of block calls")
    if not is_list(shapes, MAX_BLOCKS) or not (outputs is None or is_list(outputs, MAX_STREAMS)):
        raise ModelError("a plan holds no list of calls or outputs")
    if not is_count(streams, MAX_STREAMS + 1) or not is_count(first, MAX_BLOCKS):
        raise ModelError("a plan names no number of streams or no first block")
    calls = tuple(BlockCall(call[0], tuple(call[1:])) for call in blocks)
    return cls(stack, calls, tuple(shapes), None if outputs is None else tuple(outputs), streams, first)


def _check_plan(plan: Plan) -> None:
    if plan.outputs is None and plan.num_streams != 1:
        raise ModelError("a plan of blocks that return one stream names another number of streams")
    for stream in plan.outputs or ():
        if stream is not None and not is_count(stream, plan.num_streams):
            raise ModelError("a plan names a stream that it does not have")
    sizes = [count_slots(shape, plan.num_streams) for shape in plan.shapes]
    for call in plan.blocks:
        if not is_count(call.shape, len(sizes)) or len(call.slots) != sizes[call.shape]:
            raise ModelError("a plan's block call does not fit its shape")
        if not all(is_count(slot, MAX_SLOTS) for slot in call.slots):
            raise ModelError("a plan's block call names an impossible slot")
