"""Encoder states on their way to the nodes: once for each session, before its first step, in pieces.

Knows bytes and row counts; what made the states is the engine's.
"""

from __future__ import annotations

import torch

from routing.chain import Chain
from routing.frames import memory_pieces
from slicing.buffers import DTYPES, to_buffer


async def send_memory(
    chain: Chain, states: torch.Tensor, *, branches: int = 1, deadline_s: float | None = None
) -> None:
    """Send encoder states [rows, hidden], a row of each branch for every place. Raises WorkError DEADLINE."""
    wire = DTYPES[chain.memory_wire.name.lower()]
    for first, rows in memory_pieces(len(states), states.shape[1] * wire.itemsize, branches):
        payload = bytes(to_buffer(states[first : first + rows], wire))  # a copy: it is kept for replays
        await chain.send_memory(payload, rows, deadline_s=deadline_s)
