"""Keys and values of sessions in pages of 64 positions, which sessions that began alike share.

A page holds every layer of its group (the layers that see everything; those of each window), so that a step touches
few Python objects whatever the depth. Knows where rows lie, not what is computed with them: a kernel finds a page by
the address in its session's page table.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.fast.records import LANES
from slicing.slab import MAX_STEP_ROWS, ROLLBACK_ROWS, CannotRollBack

PAGE = 64  # positions; four panels of keys. Smaller ones cost more of them, larger ones more waste for short sessions
MAX_IDLE_BYTES = 128 << 20  # freed pages kept for the next session; more goes back to the system
ALIGNMENT_BYTES = 64
FLOAT_BYTES = 4
MIN_TABLE = 16  # pages


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a position: `kv_heads` keys of `k_dim` and values of `v_dim` float32."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None  # positions that a row sees, itself included; None: all

    @property
    def key_floats(self) -> int:
        """Floats of a page's keys: per head, panels of 16 positions [PAGE/16][k_dim][16]."""
        return self.kv_heads * PAGE * self.k_dim

    @property
    def value_floats(self) -> int:
        """Floats of a page's values: per head, panels of 16 dimensions [v_dim/16][PAGE][16]."""
        return self.kv_heads * PAGE * -(-self.v_dim // LANES) * LANES


class KVLayout:
    """Where the keys and values of each layer slot lie. A slot is a held layer, counted from 0."""

    def __init__(self, slots: Sequence[LayerKV]) -> None:
        self.slots = tuple(slots)
        self.windows = tuple(dict.fromkeys(slot.window for slot in slots))  # of each group of pages
        self.groups = tuple(self.windows.index(slot.window) for slot in slots)
        sizes = [0] * len(self.windows)
        self._places: list[tuple[int, int, int]] = []
        for slot, group in zip(self.slots, self.groups, strict=True):
            values_at = sizes[group] + slot.key_floats
            self._places.append((group, sizes[group], values_at))
            sizes[group] = values_at + slot.value_floats
        self.page_floats = tuple(sizes)  # of each group
        self._groups_of: dict[tuple[int, int], tuple[int, ...]] = {}

    def place(self, layer_slot: int) -> tuple[int, int, int]:
        """Return a slot's page group, and the first float of its keys and of its values inside a page."""
        return self._places[layer_slot]

    def groups_of(self, first: int, last: int) -> tuple[int, ...]:
        """Return the page groups of slots [first, last)."""
        found = self._groups_of.get((first, last))
        if found is None:
            found = self._groups_of[first, last] = tuple(sorted(set(self.groups[first:last])))
        return found

    def cache_bytes(self, positions: int) -> int:
        """Return what a session of so many positions takes at most, in steps of up to MAX_STEP_ROWS rows."""
        total = 0
        for window, floats in zip(self.windows, self.page_floats, strict=True):
            pages = num_pages(positions)
            if window is not None:
                pages = min(pages, num_pages(window + ROLLBACK_ROWS + MAX_STEP_ROWS) + 2)
            total += pages * floats * FLOAT_BYTES
        return total


def num_pages(positions: int) -> int:
    """Return how many pages hold positions [0, positions)."""
    return -(-positions // PAGE)


class Page:
    """Memory for 64 positions of a group's layers. `owners` counts the sessions that hold it."""

    __slots__ = ("address", "memory", "owners")

    def __init__(self, floats: int) -> None:
        raw = np.empty(floats * FLOAT_BYTES + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        self.memory: NDArray[np.float32] = raw[start : start + floats * FLOAT_BYTES].view(np.float32)
        self.address = int(self.memory.ctypes.data)
        self.owners = 1


class PagePool:
    """Hands out pages and takes them back. Safe to use from several threads."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self.max_idle_bytes = max_idle_bytes
        self.used_bytes = 0  # a shared page counts once
        self.idle_bytes = 0
        self._idle: dict[int, list[Page]] = {}  # by floats
        self._lock = threading.Lock()

    def take(self, floats: int) -> Page:
        """Return a page that has one owner. What it holds is left over from anyone: rows are written before read."""
        with self._lock:
            self.used_bytes += floats * FLOAT_BYTES
            idle = self._idle.get(floats)
            if idle:
                self.idle_bytes -= floats * FLOAT_BYTES
                page = idle.pop()
                page.owners = 1
                return page
        return Page(floats)

    def share(self, page: Page) -> None:
        """Add an owner."""
        with self._lock:
            page.owners += 1

    def release(self, page: Page) -> None:
        """Take an owner away; the last one frees the page."""
        with self._lock:
            assert page.owners > 0
            page.owners -= 1
            if page.owners:
                return
            size = page.memory.nbytes
            self.used_bytes -= size
            if self.idle_bytes + size <= self.max_idle_bytes:
                self.idle_bytes += size
                self._idle.setdefault(page.memory.size, []).append(page)

    def trim(self) -> None:
        """Give the idle pages back to the system."""
        with self._lock:
            self._idle.clear()
            self.idle_bytes = 0


class PageTable:
    """One session's pages of one group, by number (position // PAGE); some may be missing."""

    def __init__(self, pool: PagePool, floats: int) -> None:
        self.pool = pool
        self.floats = floats
        self.pages: dict[int, Page] = {}
        self._set_addresses(np.zeros(MIN_TABLE, np.int64))
        self._first = self._last = 0  # every page's number lies in [first, last)

    @property
    def size_bytes(self) -> int:
        """Memory of its pages, shared ones included."""
        return len(self.pages) * self.floats * FLOAT_BYTES

    def make_writable(self, first: int, last: int) -> None:
        """Own the pages [first, last) alone: those that are missing are added, those that are shared are copied."""
        for number in range(first, last):
            page = self.pages.get(number)
            if page is None:
                self._put(number, self.pool.take(self.floats))
            elif page.owners > 1:
                own = self.pool.take(self.floats)
                own.memory[:] = page.memory
                self._put(number, own)
                self.pool.release(page)

    def keep(self, first: int, last: int) -> None:
        """Free the pages outside [first, last)."""
        if first <= self._first and last >= self._last:
            return
        for number in [number for number in self.pages if not first <= number < last]:
            self.addresses[number] = 0
            self.pool.release(self.pages.pop(number))
        self._first = min(self.pages, default=0)
        self._last = max(self.pages, default=-1) + 1

    def shared(self, last: int) -> PageTable:
        """Return a table of the same pages below `last`."""
        other = PageTable(self.pool, self.floats)
        for number, page in self.pages.items():
            if number < last:
                self.pool.share(page)
                other._put(number, page)
        return other

    def _put(self, number: int, page: Page) -> None:
        if number >= len(self.addresses):
            grown = np.zeros(max(2 * len(self.addresses), number + 1), np.int64)
            grown[: len(self.addresses)] = self.addresses
            self._set_addresses(grown)
        self._first = min(self._first, number) if self.pages else number
        self._last = max(self._last, number + 1) if self.pages else number + 1
        self.pages[number] = page
        self.addresses[number] = page.address

    def _set_addresses(self, addresses: NDArray[np.int64]) -> None:
        self.addresses = addresses  # what kernels read; 0: no page
        self.address = int(addresses.ctypes.data)


class PagedCache:
    """The keys and values of one session.

    Slots are counted apart, as the layers of a model's two ends do not run in one call: a step is `reserve`, the
    kernels, `advance`, each for the slots [first, last) that it runs.
    """

    def __init__(self, layout: KVLayout, pool: PagePool) -> None:
        self.layout = layout
        self._tables = [PageTable(pool, floats) for floats in layout.page_floats]
        self._addresses = np.zeros(max(len(self._tables), 1), np.int64)
        # Where kernels find the address of each group's page table (int64 each); what is there changes in `reserve`.
        self.tables_address = int(self._addresses.ctypes.data)
        self._lengths = [0] * len(layout.slots)  # positions written in each slot
        self._floors = np.zeros(len(layout.slots), np.int64)  # the first position that each slot still holds
        self._groups = np.array(layout.groups, np.int64)
        # A window's reach is the number of positions before its row; 0 stands for no window.
        self._reaches = np.array([(slot.window or 1) - 1 for slot in layout.slots], np.int64)
        self._has_window = np.array([slot.window is not None for slot in layout.slots], np.bool_)
        self._any_window = bool(self._has_window.any())
        self._note_tables()

    @property
    def length(self) -> int:
        """Positions held."""
        return max(self._lengths, default=0)

    @property
    def size_bytes(self) -> int:
        """Memory that the pages take; those shared with other sessions count here too."""
        return sum(table.size_bytes for table in self._tables)

    def reserve(self, position: int, rows: int, first: int = 0, last: int | None = None) -> None:
        """Make positions [position, position + rows) of slots [first, last) writable; what follows them is forgotten.

        Raises ValueError where the position leaves a gap, `CannotRollBack` where a window's rows before it are freed.
        """
        last = len(self._lengths) if last is None else last
        lengths = self._lengths[first:last]
        held = min(lengths, default=position)
        if not 0 <= position <= held:
            raise ValueError(f"a step at position {position} leaves a gap: the session holds {held}")
        if self._any_window:
            self._check_windows(position, slice(first, last))
        self._lengths[first:last] = [position] * len(lengths)
        if position == 0:
            self._floors[first:last] = 0
        first_page, last_page = position // PAGE, num_pages(position + rows)
        for group in self.layout.groups_of(first, last):
            table = self._tables[group]
            table.make_writable(first_page, last_page)
            self._addresses[group] = table.address

    def advance(self, length: int, first: int = 0, last: int | None = None) -> None:
        """Note that slots [first, last) hold `length` positions now; free what no window can see any more."""
        last = len(self._lengths) if last is None else last
        self._lengths[first:last] = [length] * len(self._lengths[first:last])
        if self._any_window:
            floors = self._floors[first:last]
            lowest = length - self._reaches[first:last] - 1 - ROLLBACK_ROWS
            np.maximum(floors, lowest // PAGE * PAGE, out=floors, where=self._has_window[first:last])
        self._free()

    @property
    def memory_rows(self) -> int:
        """There is no encoder before these layers."""
        return 0

    def add_memory(self, states: torch.Tensor) -> None:
        """Raise ValueError: nothing here looks at an encoder's states."""
        raise ValueError("this runner takes no encoder states")

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on. Raises `CannotRollBack` where a window's rows before it are freed."""
        if not 0 <= position <= self.length:
            raise ValueError(f"cannot truncate to position {position}: the session holds {self.length}")
        if self._any_window:
            self._check_windows(position, np.array(self._lengths) > position)
        self._lengths = [min(length, position) for length in self._lengths]
        if position == 0:
            self._floors[:] = 0
        self._free()

    def can_fork(self, length: int) -> bool:
        """Whether `fork(length)` would succeed."""
        if length == 0:
            return True
        used = [held for held in self._lengths if held]
        return 0 < length <= min(used, default=0) and self._holds(length, np.array(self._lengths) > 0)

    def fork(self, length: int) -> PagedCache:
        """Return another session's cache that shares the pages of the first `length` positions.

        Raises `CannotRollBack` where they are not held in every slot that was used.
        """
        if not self.can_fork(length):
            raise CannotRollBack(f"the first {length} positions of this session are not all held any more")
        other = PagedCache(self.layout, self._pool_of_fork())
        if length == 0:
            return other
        other._tables = [table.shared(num_pages(length)) for table in self._tables]
        other._lengths = [min(held, length) for held in self._lengths]
        other._floors[:] = self._floors
        other._note_tables()
        return other

    def close(self) -> None:
        """Free the pages; the cache is empty afterwards."""
        self._lengths = [0] * len(self._lengths)
        self._floors[:] = 0
        self._free()

    def __repr__(self) -> str:
        return f"PagedCache(length={self.length}, size_bytes={self.size_bytes})"

    def _holds(self, position: int, slots: NDArray[np.bool_] | slice) -> bool:
        """Tell whether all that a row at `position` sees before itself is still there in the slots with a window."""
        if position == 0 or not self._any_window:
            return True
        missing = self._floors[slots] > np.maximum(position - self._reaches[slots], 0)
        return not bool((missing & self._has_window[slots]).any())

    def _check_windows(self, position: int, slots: NDArray[np.bool_] | slice) -> None:
        if not self._holds(position, slots):
            raise CannotRollBack(
                f"a layer with a window no longer holds what precedes position {position}: start again at 0"
            )

    def _free(self) -> None:
        """Free the pages that hold nothing of any slot, and those below every slot's floor."""
        last = num_pages(self.length)
        for group, table in enumerate(self._tables):
            first = 0
            if self.layout.windows[group] is not None:
                used = (np.array(self._lengths) > 0) & (self._groups == group)
                first = int(self._floors.min(initial=last * PAGE, where=used)) // PAGE
            table.keep(first, last)

    def _note_tables(self) -> None:
        for group, table in enumerate(self._tables):
            self._addresses[group] = table.address

    def _pool_of_fork(self) -> PagePool:
        return self._tables[0].pool if self._tables else PagePool()
