"""Where the tokens of one answer stand on the axes of multi-dimensional rotary positions (Qwen2-VL's way).

A picture's tokens stand in a plane, so these are not the positions in the session; text behind it goes on from one
place on all axes. Knows no pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slicing.buffers import to_buffer


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Those of a prompt [axes, rows] (int64), and `next_place`, where the first token behind it stands on all axes."""

    prompt: torch.Tensor = field(repr=False)
    next_place: int

    def of(self, position: int, rows: int) -> torch.Tensor:
        """The places of session positions [position, position + rows): [axes, rows] (int64)."""
        axes, length = self.prompt.shape
        behind = torch.arange(max(position, length), max(position + rows, length)) - length + self.next_place
        return torch.cat([self.prompt[:, position : position + rows], behind.expand(axes, -1)], dim=1)

    def tail(self, position: int, rows: int) -> bytes:
        """The same as it travels behind a step's rows: [axes, rows] int32, little endian."""
        return bytes(to_buffer(self.of(position, rows), torch.int32))


def tail_of(places: Places | None, position: int, rows: int) -> bytes:
    """What travels behind the rows of a step; nothing where there are no such places."""
    return b"" if places is None else places.tail(position, rows)
