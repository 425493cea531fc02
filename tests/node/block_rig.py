"""Blocks of diffusion at toy size, real attention in them, on the nodes of a rig; and passes to call them with.

The runner is the real one; a test can hold it between blocks, see how far it is, and make its answers wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from routing.types import SliceSpec
from slicing.diffusion.block_range import BlockRange, Cancelled
from slicing.diffusion.calls import BlockCall, Pass, Plan
from slicing.diffusion.stacks import Stack
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS
from tests.node.rig import Node, Rig, fake_offer

STACK = "transformer.blocks"
GRID = (1, 4, 4)
NUM_TOKENS = 16
POLL_S = 0.001


class ToyBlock(nn.Module):
    """Attention over the tokens, text added, and an embedding of the step that differs from pass to pass."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, 3 * width, bias=False)
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.attn.weight.copy_(torch.randn(3 * width, width, generator=random) / width**0.5)

    def forward(
        self, hidden_states: torch.Tensor, text: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = self.attn(hidden_states)[:, None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        return torch.tanh(hidden_states + mixed + text.mean(1, keepdim=True) + embedding)


class ToyBlocks(BlockRange):
    """Blocks [start, end) of a model of six."""

    def __init__(self, start: int, end: int, width: int = HIDDEN_SIZE) -> None:
        blocks = [ToyBlock(number, width) for number in range(NUM_LAYERS)]
        stack = Stack("transformer", "blocks", tuple(blocks), 1, width)
        super().__init__([stack], {number: blocks[number] for number in range(start, end)})
        self.passes: list[tuple[int, int]] = []  # blocks of every pass that was begun
        self.spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = (
            None  # what becomes of an answer
        )
        self.error: Exception | None = None  # raised by the next pass
        self.entered = threading.Event()
        self._gate = threading.Event()
        self._gate.set()

    def hold(self) -> None:
        """Make the next pass wait until `release`, or until it is cancelled."""
        self.entered.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def run(self, made: Pass, *, start: int, end: int, **options: Any) -> list[torch.Tensor]:
        self.passes.append((start, end))
        self.entered.set()
        is_cancelled = options.get("is_cancelled")
        while not self._gate.wait(POLL_S):
            if is_cancelled is not None and is_cancelled():
                raise Cancelled
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        streams = super().run(made, start=start, end=end, **options)
        return streams if self.spoil is None else self.spoil(streams)


def toy_plan() -> Plan:
    shape = {"args": [{"stream": 0}], "kwargs": {"text": {"slot": 0}, "embedding": {"slot": 1}}}
    return Plan(STACK, tuple(BlockCall(0, (0, 1)) for _ in range(NUM_LAYERS)), (shape,), None, 1)


def toy_pass(number: int, *, branch: int = 0, tokens: int = NUM_TOKENS, width: int = HIDDEN_SIZE) -> Pass:
    """Pass `number` of a branch: its text is the same in all of them."""
    random = torch.Generator().manual_seed(1000 * branch + number + 1)
    text = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(77 + branch))
    stream = torch.randn(1, tokens, width, generator=random)
    return Pass(toy_plan(), [stream], [text, torch.randn(1, 1, width, generator=random)])


def run_whole(made: Pass, width: int = HIDDEN_SIZE) -> list[torch.Tensor]:
    """What one machine with all blocks makes of a pass."""
    copy = Pass(made.plan, [stream.clone() for stream in made.streams], made.slots)
    return ToyBlocks(0, NUM_LAYERS, width).run(copy, start=0, end=NUM_LAYERS)


async def add_block_node(
    rig: Rig,
    start: int = 0,
    end: int = NUM_LAYERS,
    *,
    width: int = HIDDEN_SIZE,
    keeps: bool = False,
    **settings: Any,
) -> Node:
    offer = fake_offer(SliceSpec(start, end), keeps=keeps)
    return await rig.add_node(ToyBlocks(start, end, width), offer, **settings)
