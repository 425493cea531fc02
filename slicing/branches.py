"""Branches of one session that run side by side, as classifier-free guidance has them: conditional and not.

Rows are frame-major: row = frame * branches + branch. A session of branches is one work for whoever schedules, and one
work for each branch inside a runner. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slicing.batch import Cache, Runner, Work


def new_cache(runner: Runner, branches: int) -> Cache:
    """Return the empty storage of a session of so many branches."""
    caches: list[Cache] = [runner.new_cache() for _ in range(branches)]
    return caches[0] if branches == 1 else BranchedCache(caches)


class BranchedCache:
    """The caches of all branches of a session; positions are frames. A `Cache` for those who keep sessions."""

    def __init__(self, branches: Sequence[Any]) -> None:
        """`branches`: empty caches of one runner."""
        self.branches: tuple[Any, ...] = tuple(branches)

    @property
    def length(self) -> int:
        """Frames held."""
        return min(branch.length for branch in self.branches)

    @property
    def size_bytes(self) -> int:
        """Memory of all branches."""
        return sum(branch.size_bytes for branch in self.branches)

    @property
    def memory_rows(self) -> int:
        """Encoder states that came, of all branches."""
        return sum(branch.memory_rows for branch in self.branches)

    def add_memory(self, states: torch.Tensor) -> None:
        """Take encoder states [places * branches, width]. Raises ValueError for rows of some branches only."""
        if len(states) % len(self.branches):
            raise ValueError(f"{len(states)} rows of encoder states for {len(self.branches)} branches")
        for number, branch in enumerate(self.branches):
            branch.add_memory(states[number :: len(self.branches)])

    def truncate(self, position: int) -> None:
        """Forget frames at and after `position`. Raises `CannotRollBack` as its branches do."""
        for branch in self.branches:
            branch.truncate(min(position, branch.length))

    def can_fork(self, length: int) -> bool:
        """Whether `fork(length)` would succeed."""
        return all(branch.can_fork(length) for branch in self.branches)

    def fork(self, length: int) -> Cache:
        """Return another session's caches with the first `length` frames. Raises as `Cache.fork`."""
        return BranchedCache([branch.fork(length) for branch in self.branches])

    def close(self) -> None:
        """Free the storage."""
        for branch in self.branches:
            branch.close()


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Works with one for each branch, and how they come together again."""

    works: list[Work]
    counts: list[int]  # branches of each of the works before

    def fold(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Bring together what was made of each branch [rows, ...]: one tensor a work, frame-major."""
        parts = iter(made)
        return [_interleaved([next(parts) for _ in range(count)]) for count in self.counts]


def unfold(works: Sequence[Work]) -> Unfolded:
    """Take sessions of branches apart; others stay as they are.

    A work's `keep` are rows of all branches; each branch keeps its own of them, None the last frame's.
    """
    unfolded: list[Work] = []
    counts = []
    for work in works:
        branches = getattr(work.cache, "branches", None)
        counts.append(1 if branches is None else len(branches))
        if branches is None:
            unfolded.append(work)
        else:
            unfolded.extend(_of_branch(work, number, len(branches)) for number in range(len(branches)))
    return Unfolded(unfolded, counts)


def _of_branch(work: Work, number: int, count: int) -> Work:
    keep = None
    if work.keep is not None:
        rows = [range(work.rows)[row] for row in work.keep]
        keep = [row // count for row in rows if row % count == number]
    places = None if work.places is None else work.places[:, number::count]
    return Work(work.cache.branches[number], work.inputs[number::count], work.position, keep, places)


def _interleaved(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).flatten(0, 1)
