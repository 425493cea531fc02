"""Passes of stock transformers at tiny sizes, and the blocks that run them: what a node is given, without a network."""

from __future__ import annotations

from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from slicing.diffusion.block_range import BlockRange
from slicing.diffusion.calls import Pass
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Cut, Mode, join_patches
from slicing.diffusion.stacks import Stack, find_stacks, remote_stacks
from slicing.diffusion.thread import PassSink, replace_blocks
from tests.support.diffusers_families import FAMILIES, Inputs, tiny_model
from tests.support.tiny_pipelines import quiet

Streams = list[torch.Tensor]


@dataclass(frozen=True)
class Caught:
    """One pass over one stack of a model, and the model's real blocks."""

    stack: Stack
    made: Pass
    blocks: BlockRange

    @property
    def num_tokens(self) -> int:
        """Tokens of the first stream."""
        return self.made.streams[0].shape[1]

    def whole(self, made: Pass | None = None) -> Streams:
        """Run a pass whole, with nothing looking on."""
        return self.blocks.run(made or self.made, start=self.stack.offset, end=self.stack.end)

    def keep(self, state: PatchState, cut: Cut, made: Pass | None = None, **options: Any) -> Any:
        """Run a pass whole and keep what patches need: streams and verdict."""
        options = {"mode": Mode.WHOLE_KEEP, "cut": cut, **options}
        return state.run(self.blocks, made or self.made, self.stack.offset, self.stack.end, **options)

    def patched(self, state: PatchState, cut: Cut, made: Pass | None = None, **options: Any) -> Streams:
        """Run a pass as patches, in order; the streams as a whole pass gives them."""
        answers = [self.patch(state, one, made, **options) for one in cut.all()]
        streams = (made or self.made).streams
        picture = _picture_of(streams, cut)
        return [
            join_patches([answer[number] for answer in answers], cut)
            if number == picture
            else answers[0][number]
            for number in range(len(streams))
        ]

    def patch(self, state: PatchState, cut: Cut, made: Pass | None = None, **options: Any) -> Streams:
        """Run one patch of a pass."""
        made = made or self.made
        picture = _picture_of(made.streams, cut)
        streams = [
            cut.take(stream) if number == picture else stream[:, : 0 if cut.index else None]
            for number, stream in enumerate(made.streams)
        ]
        part = Pass(made.plan, streams, made.slots)
        span = options.pop("span", (self.stack.offset, self.stack.end))
        return state.run(self.blocks, part, *span, mode=Mode.PATCH, cut=cut, **options)[0]

    def in_dtype(self, dtype: torch.dtype) -> Caught:
        """The same, computed in another type."""

        def cast(part: torch.Tensor) -> torch.Tensor:
            return part.to(dtype) if part.is_floating_point() else part

        span = range(self.blocks.start, self.blocks.end)
        blocks = {number: deepcopy(self.blocks._blocks[number]).to(dtype) for number in span}
        made = Pass(self.made.plan, list(map(cast, self.made.streams)), list(map(cast, self.made.slots)))
        return Caught(self.stack, made, BlockRange(list(self.blocks.stacks.values()), blocks, dtype=dtype))

    def next_step(self, seed: int = 1, share: float = 0.1) -> Pass:
        """The same call with streams that moved on a little, as from one step to the next."""
        draw = torch.Generator().manual_seed(seed)
        streams = [
            stream + share * stream.std() * torch.randn(stream.shape, generator=draw)
            for stream in self.made.streams
        ]
        return Pass(self.made.plan, streams, self.made.slots)


def _picture_of(streams: Streams, cut: Cut) -> int:
    return next(number for number, stream in enumerate(streams) if stream.shape[1] == cut.num_tokens)


def catch_family(name: str, stack: int = 0, **inputs: Any) -> Caught:
    """The pass of a family of the table, over one of its remote stacks."""
    return (_catch(name, **inputs) if inputs else _catch_once(name))[stack]


def _catch(name: str, **inputs: Any) -> list[Caught]:
    family = FAMILIES[name]
    with quiet():
        model = tiny_model(family)
    return catch_passes(model, family.inputs(Inputs()) | inputs)


_catch_once = cache(_catch)  # nobody changes a pass


def catch_passes(model: nn.Module, inputs: dict[str, Any]) -> list[Caught]:
    """Call a model whose blocks are stand-ins; what they collected, stack by stack."""
    stacks = remote_stacks(find_stacks(model, "transformer"))
    real = {stack.offset + number: block for stack in stacks for number, block in enumerate(stack.blocks)}
    blocks = BlockRange(stacks, real)
    caught: list[Caught] = []

    def sink(stack: Stack, made: Pass) -> Streams:
        kept = Pass(made.plan, [stream.clone() for stream in made.streams], list(made.slots))
        caught.append(Caught(stack, kept, blocks))
        return caught[-1].whole(made)

    sink_of: ContextVar[PassSink] = ContextVar("sink_of")
    sink_of.set(sink)
    replace_blocks(model, stacks, sink_of, lambda stack, number: stack.blocks[number])
    with torch.no_grad(), quiet():
        model(**inputs)
    return caught


def largest_share(new: torch.Tensor, old: torch.Tensor) -> float:
    """The largest difference as a share of the largest old value."""
    return float((new - old).abs().max() / old.abs().max())
