"""A transformer whose blocks run in block ranges of this process, with what a wire does to tensors in between.

What the gateway and nodes are to a pass, without networks; knows no families.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from slicing.diffusion.block_range import fill_block, load_block_range
from slicing.diffusion.calls import Pass, Plan, memory_order, restore_order
from slicing.diffusion.stacks import Stack, build_weightless, find_stacks, remote_stacks
from slicing.diffusion.thread import PassSink, replace_blocks


class ModelSource:
    """Blocks of a model in memory."""

    def __init__(self, model: Any, component: str = "transformer") -> None:
        self.weightless = build_weightless(type(model), model.config)
        self.remote: Sequence[Stack] = remote_stacks(find_stacks(self.weightless, component))
        self.num_read = 0
        self._state = model.state_dict()

    def read_block(self, stack: Stack, number: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of one block."""
        self.num_read += 1
        prefix = stack.parameter_name(number, "")
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self._state.items()
            if name.startswith(prefix)
        }


class CutTransformer:
    """A copy of a model without its blocks, and block ranges that have them."""

    def __init__(
        self,
        model: Any,
        cuts: Sequence[int] | None = None,
        *,
        per_block: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Cut at these global block numbers (None: every stack in the middle)."""
        self.source = ModelSource(model)
        self.stacks = self.source.remote
        ends = [stack.end for stack in self.stacks]
        middles = [stack.offset + len(stack) // 2 for stack in self.stacks]
        places = sorted({0, *ends, *(middles if cuts is None else cuts)})
        self.ranges = [
            load_block_range(self.source, start, end, dtype=dtype) for start, end in pairwise(places)
        ]
        self.loaded: list[tuple[str, int]] = []  # blocks that the model itself asked for
        self.passes: list[Pass] = []
        self.model: Any = copy.deepcopy(model)
        replace_blocks(self.model, self.stacks, SINK, self._load_block, per_block=per_block)

    def run(self, stack: Stack, made: Pass) -> list[torch.Tensor]:
        """Run a pass through all ranges that have blocks of its stack; this is the sink."""
        self.passes.append(made)
        plan = Plan.from_json(made.plan.to_json())
        streams = wired(made.streams)
        for held in self.ranges:
            start, end = max(stack.offset, held.start), min(stack.end, held.end)
            if start < end:
                streams = wired(held.run(Pass(plan, streams, wired(made.slots)), start=start, end=end))
        return streams

    def _load_block(self, stack: Stack, number: int) -> nn.Module:
        self.loaded.append((stack.path, number))
        return fill_block(stack, number, self.source.read_block(stack, number))


SINK: ContextVar[PassSink] = ContextVar("sink")


def wired(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as they come off a wire: memory of their own, no gaps, the order of dimensions kept."""
    orders = [memory_order(tensor) for tensor in tensors]
    return [
        restore_order(tensor.permute(order).contiguous().clone(), order)
        for tensor, order in zip(tensors, orders, strict=True)
    ]
