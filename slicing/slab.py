"""One layer's keys and values of one session, in memory that grows: all positions, or those near a window.

Knows where positions lie, not what is computed with them; sessions of many layers are `kv_cache`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

MIN_CAPACITY = 64  # positions; below this a doubling saves no memory worth a copy
# In slabs as in the fast runner's pages: how far a layer with a window can be taken back at least (more than any draft
# or replayed piece), and the rows of one step that room is counted for. The fast runner splits longer steps.
ROLLBACK_ROWS, MAX_STEP_ROWS = 256, 512
# A window's slab begins at a multiple of so many positions. So a row's address is what it would be without the window
# (kernels take other paths for odd ones), and attention by blocks of so many positions finds the blocks it needs whole.
GRAIN = 32


class CannotRollBack(Exception):
    """What is held does not reach back so far: a running state (a recurrent or convolution layer), a window."""


@dataclass
class Cursor:
    """Where the running step begins; the layers of one cache share it."""

    position: int = 0


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values: [1, heads, capacity, dim] each; slot i holds position `base` + i.

    Without a window every position is held, in memory that doubles. With one, memory stops growing once it holds the
    window, `ROLLBACK_ROWS` to go back and a step's rows; then what was written last moves to the front. Attention is
    shown neither more nor less than by transformers' own sliding layer, in the same order.
    """

    is_croppable = True

    def __init__(self, cursor: Cursor, window: int | None = None) -> None:
        super().__init__()
        self.cursor = cursor
        self.window = window
        self.is_sliding = window is not None
        self.base = 0  # the first position that is held
        self.length = 0  # the position behind the last one
        self.capacity = 0  # slots
        self.size_bytes = 0
        self._used = 0  # slots that are not blank, those of forgotten positions included
        self._most = None if window is None else most_held(window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [1, heads, rows, dim] at the cursor; return what attention may look at, as views."""
        begin, rows = self.cursor.position, key_states.shape[-2]
        self.write(key_states, value_states, begin)
        visible, first = visible_keys(begin, rows, self.window)
        return self.held(first, first + visible)

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, begin: int) -> None:
        """Store [1, heads, rows, dim] at position `begin`, which can be gone on at; what followed is forgotten.

        Raises ValueError for a gap.
        """
        rows = key_states.shape[-2]
        if begin > self.length:
            raise ValueError(
                f"a step at position {begin} leaves a gap: this layer holds {self.length} positions"
            )
        self.truncate(begin)
        self._make_room(key_states, value_states, begin + rows)
        assert self.keys is not None
        assert self.values is not None
        self.keys.narrow(2, begin - self.base, rows).copy_(key_states)
        self.values.narrow(2, begin - self.base, rows).copy_(value_states)
        self.length = begin + rows
        self._used = max(self._used, self.length - self.base)

    def held(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values [1, heads, end - first, dim] of positions [first, end)."""
        assert self.keys is not None
        assert self.values is not None
        assert first >= self.base
        slot, count = first - self.base, end - first
        return self.keys.narrow(2, slot, count), self.values.narrow(2, slot, count)

    def blank(self, end: int) -> None:
        """Fill what was written once and is forgotten with zeros, up to position `end`."""
        first = self.length - self.base
        rows = min(self._used, end - self.base) - first
        if rows > 0 and self.keys is not None and self.values is not None:
            self.keys.narrow(2, first, rows).zero_()
            self.values.narrow(2, first, rows).zero_()

    def can_go_on_at(self, position: int) -> bool:
        """Tell whether all is held that a step at `position` looks at."""
        return not self.base or not position or self.base <= first_needed(position, self.window)

    def check(self, position: int) -> None:
        """Raise `CannotRollBack` where a step at `position` would look at what is not held any more."""
        if not self.can_go_on_at(position):
            raise CannotRollBack(
                f"a layer with a window no longer holds what precedes position {position}: start again at 0"
            )

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on, which can be gone on at."""
        self.length = min(self.length, position)
        if position == 0:
            self.base = 0

    def trim(self) -> None:
        """Give back what a step of more than `MAX_STEP_ROWS` rows took."""
        if self._most is not None and self.capacity > self._most:
            self._move(self._first_kept(), self._most)

    def get_seq_length(self) -> int:
        """Return the positions before the running step."""
        return self.cursor.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys `update` will return in this step, and the position of the first."""
        return visible_keys(self.cursor.position, query_length, self.window)

    def get_max_length(self) -> int:
        """Return -1: no limit of its own."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for the first rows."""
        self._make_room(key_states, value_states, key_states.shape[-2])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions (transformers counts them as a negative number)."""
        self.length -= abs(tokens_to_remove)

    def copy_from(self, other: SlabLayer, length: int) -> None:
        """Take over a copy of the first `length` positions of another session's layer, or what it has of them."""
        length = min(length, other.length)
        if length and other.keys is not None and other.values is not None:
            self.base = max(other.base, first_needed(length - ROLLBACK_ROWS, self.window))
            self._make_room(other.keys, other.values, length)
            assert self.keys is not None
            assert self.values is not None
            keys, values = other.held(self.base, length)
            rows = length - self.base
            self.keys.narrow(2, 0, rows).copy_(keys)
            self.values.narrow(2, 0, rows).copy_(values)
            self.length, self._used = length, rows

    def _make_room(self, key_states: torch.Tensor, value_states: torch.Tensor, end: int) -> None:
        """Have slots for the positions up to `end`, of tensors like these."""
        if end - self.base <= self.capacity:
            return
        base, capacity = self.base, capacity_for(end - self.base, self.window)
        if end - base > capacity:
            base = self._first_kept()
            capacity = max(capacity, _rounded_up(end - base, MIN_CAPACITY))
        if self.keys is None or self.values is None:
            self.keys, self.values = _blank(key_states, capacity), _blank(value_states, capacity)
            self.is_initialized = True
            self._note(base, capacity)
        else:
            self._move(base, max(self.capacity, capacity))

    def _first_kept(self) -> int:
        """Where the slab begins once it lets go of what no row that is left or computed again can see."""
        return max(self.base, first_needed(self.length - ROLLBACK_ROWS, self.window))

    def _move(self, base: int, capacity: int) -> None:
        """Let the slab begin at `base` and have so many slots."""
        assert self.keys is not None
        assert self.values is not None
        first, rows = base - self.base, self.length - base
        if capacity == self.capacity:
            _shift(self.keys, first, rows)
            _shift(self.values, first, rows)
        else:
            self.keys = _resized(self.keys, first, rows, capacity)
            self.values = _resized(self.values, first, rows, capacity)
            self._used = rows
        self._note(base, capacity)

    def _note(self, base: int, capacity: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.base, self.capacity = base, capacity
        self.size_bytes = self.keys.nbytes + self.values.nbytes


def capacity_for(num_positions: int, window: int | None = None) -> int:
    """Return how many positions a slab of so many has room for: it doubles, up to what a window needs.

    A step of more than `MAX_STEP_ROWS` rows takes more in layers with a window while it is computed.
    """
    doubled = max(MIN_CAPACITY, 1 << (num_positions - 1).bit_length())
    return doubled if window is None else min(doubled, most_held(window))


def most_held(window: int) -> int:
    """Return the slots of a slab with a window: for its reach, the rows to go back, and a step."""
    return _rounded_up(window + 2 * GRAIN + ROLLBACK_ROWS + MAX_STEP_ROWS, MIN_CAPACITY)


def first_needed(position: int, window: int | None) -> int:
    """Return where a slab may begin, at the latest, for a step at `position`.

    That is what its first row sees, and what fills up the blocks of `GRAIN` positions in which both lie.
    """
    if window is None:
        return 0
    return max((position - window + 1) // GRAIN * GRAIN - GRAIN, 0)


def visible_keys(position: int, rows: int, window: int | None) -> tuple[int, int]:
    """Return how many keys a step of `rows` rows may look at, and the position of the first."""
    first = 0 if window is None else max(position - window + 1, 0)
    return position + rows - first, first


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _blank(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_zeros((1, like.shape[1], capacity, like.shape[3]))


def _resized(old: torch.Tensor, first: int, rows: int, capacity: int) -> torch.Tensor:
    new = _blank(old, capacity)
    new.narrow(2, 0, rows).copy_(old.narrow(2, first, rows))
    return new


def _shift(slab: torch.Tensor, first: int, rows: int) -> None:
    """Move `rows` rows from slot `first` to the front, in pieces that do not overlap."""
    for slot in range(0, rows, first):
        count = min(first, rows - slot)
        slab.narrow(2, slot, count).copy_(slab.narrow(2, slot + first, count))
