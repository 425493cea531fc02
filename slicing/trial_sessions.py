"""Sessions of random numbers on which a runner is tried: what they are fed, in branches where the model may have some.

Knows nothing of what is expected of the runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slicing.batch import Runner, Work
from slicing.branches import new_cache

MAX_POSITIONS = 75  # of a session: more than two blocks of attention
NUM_SESSIONS = 3
MEMORY_ROWS = (5, 33, 70)  # of each branch of a session
BRANCHES = (1, 2, 1)  # of sessions with an encoder's states


@dataclass(frozen=True)
class TrialSession:
    """One session; positions are those of a branch."""

    number: int
    branches: int
    inputs: torch.Tensor = field(repr=False)  # of all branches
    memory: torch.Tensor | None = field(default=None, repr=False)
    places: torch.Tensor | None = field(default=None, repr=False)  # [axes, rows]

    @classmethod
    def of(cls, runner: Runner, number: int) -> TrialSession:
        """Make the session of this number for a runner: token ids, and an encoder's states where it takes some."""
        length = min(MAX_POSITIONS, runner.max_positions)
        generator = torch.Generator().manual_seed(number)
        streams = (runner.num_streams,) if runner.num_streams > 1 else ()
        token_ids = torch.randint(4, runner.vocab_size, (length, *streams), generator=generator)
        if not runner.takes_memory:
            return cls(number, 1, token_ids)
        branches = BRANCHES[number]
        memory = torch.randn(MEMORY_ROWS[number] * branches, runner.hidden_size, generator=generator)
        return cls(number, branches, token_ids.repeat_interleave(branches, dim=0), memory)

    def with_places(self, axes: int) -> TrialSession:
        """The same at positions of several axes: as they count, then a picture's, then others beyond it."""
        counted = torch.arange(self.length).expand(axes, -1).clone()
        begin, end = self.length // 4, self.length // 2
        for axis in range(1, axes):
            counted[axis, begin:end] = begin + (torch.arange(end - begin) // (2 * axis + self.number))
        counted[0, begin:end] = begin
        counted[:, end:] -= (end - begin) // 2
        return replace(self, places=counted)

    def with_embeds(self, width: int) -> TrialSession:
        """The same with embeddings of no token for its inputs."""
        generator = torch.Generator().manual_seed(self.number)
        return replace(self, inputs=torch.randn(len(self.inputs), width, generator=generator))

    @property
    def length(self) -> int:
        """Positions."""
        return len(self.inputs) // self.branches

    def new_cache(self, runner: Any) -> Any:
        """Return its storage in a runner, with the encoder's states."""
        cache = new_cache(runner, self.branches)
        if self.memory is not None:
            cache.add_memory(self.memory.to(device=runner.device, dtype=runner.dtype))
        return cache

    def work(self, cache: Any, begin: int = 0, end: int | None = None) -> Work:
        """Return its positions [begin, end), all of its rows kept."""
        end = self.length if end is None else end
        inputs = self.inputs[begin * self.branches : end * self.branches]
        places = None if self.places is None else self.places[:, begin:end]
        return Work(cache, inputs, begin, range(len(inputs)), places)

    def rows(self, made: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the rows of positions [begin, end) of what was made of all."""
        return made[begin * self.branches : end * self.branches]
