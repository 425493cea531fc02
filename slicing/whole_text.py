"""What stands for a session's cache where every row sees every other: a text is one step, and nothing is kept of it."""

from __future__ import annotations

from typing import Any

import torch


class WholeTextCache:
    """Counts the rows of the last text, so that the next one begins anew at position 0."""

    def __init__(self) -> None:
        self.length = 0

    @property
    def size_bytes(self) -> int:
        """Nothing is held."""
        return 0

    @property
    def memory_rows(self) -> int:
        """There is no encoder before this one."""
        return 0

    state_bytes = 0

    def for_model(self) -> Any:
        """Return None: the forward takes no cache."""
        return None

    def memory_states(self, device: torch.device) -> torch.Tensor | None:
        """Return None."""
        return None

    def add_memory(self, states: torch.Tensor) -> None:
        """Raise ValueError: nothing here looks at an encoder's states."""
        raise ValueError("this model takes no encoder states")

    def begin(self, position: int, start: int, end: int) -> None:
        """Raise ValueError for a step that goes on from another: a text is one step."""
        if position:
            raise ValueError("a text is one step, at position 0")

    def finish(self, length: int, start: int, end: int) -> None:
        """Note the rows of the text."""
        self.length = length

    def position_ids(self, position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a step's rows [1, rows]."""
        return torch.arange(position, position + rows, device=device).unsqueeze(0)

    def truncate(self, position: int) -> None:
        """Forget positions at and after `position`."""
        self.length = min(self.length, position)

    def can_fork(self, length: int) -> bool:
        """Tell whether `fork(length)` would succeed: there is nothing to go on from."""
        return length == 0

    def fork(self, length: int) -> WholeTextCache:
        """Return an empty one. Raises ValueError for another length than 0."""
        if length:
            raise ValueError("nothing is kept of a text")
        return WholeTextCache()

    def close(self) -> None:
        """Free nothing."""
        self.length = 0
