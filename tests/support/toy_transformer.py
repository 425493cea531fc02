"""A transformer of a few lines whose loop can be told to do what breaks a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slicing.diffusion.stacks import Stack

WIDTH = 8
Loop = Callable[["ToyTransformer", torch.Tensor, torch.Tensor], torch.Tensor]


class ToyBlock(nn.Module):
    """Two streams in, two streams out in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.size = WIDTH

    def forward(self, hidden: torch.Tensor, text: torch.Tensor, temb: Any = None, **others: Any) -> Any:
        """Return (text, hidden)."""
        shift = 0 if temb is None else temb
        for value in others.values():
            if isinstance(value, list):
                value.append(1)  # what caches do
        return text + hidden.mean(), torch.tanh(self.attn(hidden) + shift)


class ToyTransformer(nn.Module):
    """Runs a loop over its blocks."""

    def __init__(self, loop: Loop, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(num_blocks))
        self.loop = loop

    def forward(self, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Run the loop."""
        return self.loop(self, hidden, text)

    def stack(self) -> Stack:
        """Return its stack; the blocks have their weights."""
        return Stack(
            "transformer", "blocks", tuple(self.blocks), 4 * (WIDTH + 1) * WIDTH * len(self.blocks), WIDTH
        )
