"""Pages of keys and values: against a plain list per session, and what they take."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from slicing.fast.pages import PAGE, KVLayout, LayerKV, PagedCache, PagePool
from slicing.kv_cache import CannotRollBack
from slicing.slab import MAX_STEP_ROWS, ROLLBACK_ROWS

FULL = LayerKV(kv_heads=2, k_dim=24, v_dim=20)
WINDOWED = LayerKV(kv_heads=1, k_dim=16, v_dim=16, window=40)
OTHER_WINDOW = LayerKV(kv_heads=1, k_dim=16, v_dim=16, window=1)
MIXED = KVLayout([WINDOWED, FULL, OTHER_WINDOW, FULL])


def slot_view(cache: PagedCache, slot: int, position: int) -> np.ndarray:
    """Return one float of a slot at a position, found as a kernel finds it: by addresses alone."""
    group, keys_at, _ = cache.layout.place(slot)
    table = ctypes.c_int64.from_address(cache.tables_address + 8 * group).value
    page = ctypes.c_int64.from_address(table + 8 * (position // PAGE)).value
    assert page, f"no page for position {position} of slot {slot}"
    address = page + 4 * (keys_at + position % PAGE)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (1,))


def write(
    cache: PagedCache, position: int, values: Sequence[float], first: int = 0, last: int | None = None
) -> None:
    cache.reserve(position, len(values), first, last)
    for slot in range(len(cache.layout.slots))[first:last]:
        for offset, value in enumerate(values):
            slot_view(cache, slot, position + offset)[0] = value
    cache.advance(position + len(values), first, last)


def read(cache: PagedCache, slot: int, length: int) -> list[float]:
    """Return what a row at position `length` sees before itself."""
    window = cache.layout.slots[slot].window
    start = 0 if window is None else max(length - window + 1, 0)
    return [float(slot_view(cache, slot, position)[0]) for position in range(start, length)]


def test_a_slot_lies_behind_the_one_before_it_in_its_group() -> None:
    assert [MIXED.place(slot) for slot in range(4)] == [
        (0, 0, 16 * PAGE),
        (1, 0, 2 * 24 * PAGE),
        (2, 0, 16 * PAGE),
        (1, (2 * 24 + 2 * 32) * PAGE, (2 * 24 * 2 + 2 * 32) * PAGE),
    ]
    assert MIXED.page_floats == (32 * PAGE, 2 * (2 * 24 + 2 * 32) * PAGE, 32 * PAGE)


def test_pages_start_at_a_cache_line() -> None:
    pool = PagePool()
    assert all(pool.take(96).address % 64 == 0 for _ in range(20))


def test_a_fork_shares_pages_and_copies_only_what_it_writes() -> None:
    pool = PagePool()
    cache = PagedCache(KVLayout([FULL]), pool)
    write(cache, 0, range(200))
    before = pool.used_bytes
    fork = cache.fork(150)
    assert pool.used_bytes == before
    assert fork.size_bytes == 3 * before // 4
    write(fork, 150, [-1.0])
    assert pool.used_bytes == before + before // 4
    assert read(cache, 0, 200) == [float(value) for value in range(200)]
    assert read(fork, 0, 151) == [*map(float, range(150)), -1.0]


def test_the_owner_of_a_shared_page_copies_it_too_before_it_overwrites() -> None:
    cache = PagedCache(KVLayout([FULL]), PagePool())
    write(cache, 0, range(10))
    fork = cache.fork(10)
    write(cache, 5, [50.0])
    assert read(fork, 0, 10) == [float(value) for value in range(10)]
    assert read(cache, 0, 6) == [0.0, 1.0, 2.0, 3.0, 4.0, 50.0]


def test_memory_is_back_at_the_start_once_all_sessions_are_closed() -> None:
    pool = PagePool()
    caches = [PagedCache(MIXED, pool) for _ in range(3)]
    for cache in caches:
        write(cache, 0, range(500))
    caches += [cache.fork(450) for cache in caches]
    for cache in caches:
        cache.close()
        assert cache.size_bytes == cache.length == 0
    assert pool.used_bytes == 0
    assert 0 < pool.idle_bytes <= pool.max_idle_bytes
    pool.trim()
    assert pool.idle_bytes == 0


def test_idle_memory_is_bounded_and_used_again() -> None:
    pool = PagePool(max_idle_bytes=3 * 400)
    pages = [pool.take(100) for _ in range(5)]
    for page in pages:
        pool.release(page)
    assert (pool.used_bytes, pool.idle_bytes) == (0, 1200)
    assert pool.take(100) is pages[2]
    assert pool.idle_bytes == 800


def test_a_window_frees_what_no_row_can_see_any_more() -> None:
    cache = PagedCache(KVLayout([WINDOWED]), PagePool())
    for position in range(3000):
        write(cache, position, [float(position)])
    kept = cache.size_bytes // (32 * PAGE * 4) * PAGE
    assert kept <= 40 + ROLLBACK_ROWS + 2 * PAGE
    assert cache.size_bytes <= cache.layout.cache_bytes(3000)
    assert read(cache, 0, 3000) == [float(value) for value in range(2961, 3000)]


def test_a_window_can_be_rolled_back_by_256_rows_and_no_further_than_it_holds() -> None:
    cache = PagedCache(MIXED, PagePool())
    write(cache, 0, range(500))
    write(cache, 500, range(500, 1000))
    cache.truncate(1000 - ROLLBACK_ROWS)
    assert read(cache, 0, 744) == [float(value) for value in range(705, 744)]
    with pytest.raises(CannotRollBack):
        cache.truncate(300)
    with pytest.raises(CannotRollBack):
        cache.reserve(300, 1)
    assert not cache.can_fork(300)
    assert cache.length == 744
    cache.truncate(0)
    write(cache, 0, [7.0])
    assert read(cache, 0, 1) == [7.0]


def test_a_step_may_start_again_at_0_though_a_window_has_moved_on() -> None:
    cache = PagedCache(MIXED, PagePool())
    write(cache, 0, range(800))
    write(cache, 0, range(800, 900))
    assert cache.length == 100
    assert read(cache, 0, 100) == [float(value) for value in range(861, 900)]


def test_gaps_and_truncating_forwards_are_errors() -> None:
    cache = PagedCache(MIXED, PagePool())
    write(cache, 0, range(3))
    with pytest.raises(ValueError, match="leaves a gap: the session holds 3"):
        cache.reserve(4, 1)
    with pytest.raises(ValueError, match="the session holds 3"):
        cache.truncate(4)
    assert not cache.can_fork(4)


def test_the_closing_end_may_lag_behind_the_opening_end() -> None:
    cache = PagedCache(MIXED, PagePool())
    for position in range(0, 2000, 100):
        write(cache, position, range(position, position + 100), 0, 2)
        if position >= 700:
            lagging = position - 700
            write(cache, lagging, range(5000 + lagging, 5000 + lagging + 100), 2, 4)
            assert read(cache, 3, lagging + 100) == [float(5000 + value) for value in range(lagging + 100)]
    assert read(cache, 0, 2000) == [float(value) for value in range(1961, 2000)]
    with pytest.raises(ValueError, match="leaves a gap: the session holds 1300"):
        cache.reserve(2000, 1)


def test_a_session_takes_no_more_than_cache_bytes_says() -> None:
    cache = PagedCache(MIXED, PagePool())
    for position in range(0, 4000, MAX_STEP_ROWS):
        cache.reserve(position, MAX_STEP_ROWS)
        assert cache.size_bytes <= MIXED.cache_bytes(position + MAX_STEP_ROWS)
        cache.advance(position + MAX_STEP_ROWS)


def test_a_runner_without_layers_has_empty_sessions() -> None:
    cache = PagedCache(KVLayout([]), PagePool())
    cache.reserve(0, 5)
    cache.advance(5)
    assert cache.fork(0).length == cache.length == cache.size_bytes == 0


def test_a_decode_step_costs_microseconds_however_many_layers_there_are() -> None:
    cache = PagedCache(KVLayout([FULL] * 80), PagePool())
    write(cache, 0, [1.0])
    begin = time.perf_counter()
    for position in range(1, 60):
        cache.reserve(position, 1)
        cache.advance(position + 1)
    assert (time.perf_counter() - begin) / 59 < 500e-6  # about 20 us on an idle core


class Sessions(RuleBasedStateMachine):
    """Caches against plain lists of what was written, with everything that may happen to a session."""

    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(max_idle_bytes=50_000)
        self.written: dict[int, list[float]] = {}
        self.alive: dict[int, PagedCache] = {}
        self.furthest: dict[int, int] = {}  # what a session, or the one that it was forked from, ever held
        self.count = 0

    def add(self, cache: PagedCache, written: list[float], furthest: int) -> int:
        self.count += 1
        self.alive[self.count], self.written[self.count] = cache, written
        self.furthest[self.count] = furthest
        return self.count

    def is_far_back(self, name: int, position: int) -> bool:
        return self.furthest[name] - position > ROLLBACK_ROWS - PAGE

    @rule(target=caches)
    def open(self) -> int:
        return self.add(PagedCache(MIXED, self.pool), [], 0)

    @rule(name=caches, rows=st.integers(1, 200), back=st.integers(0, 90))
    def step(self, name: int, rows: int, back: int) -> None:
        position = max(len(self.written[name]) - back, 0)
        self.count += rows
        values = [float(self.count + offset) for offset in range(rows)]
        try:
            write(self.alive[name], position, values)
        except CannotRollBack:
            assert self.is_far_back(name, position)
            return
        self.written[name] = self.written[name][:position] + values
        self.furthest[name] = max(self.furthest[name], len(self.written[name]))

    @rule(name=caches, back=st.integers(0, 600))
    def truncate(self, name: int, back: int) -> None:
        position = max(len(self.written[name]) - back, 0)
        try:
            self.alive[name].truncate(position)
        except CannotRollBack:
            assert self.is_far_back(name, position)
        else:
            self.written[name] = self.written[name][:position]

    @rule(target=caches, name=caches, back=st.integers(0, 400))
    def fork(self, name: int, back: int) -> object:
        length = max(len(self.written[name]) - back, 0)
        if not self.alive[name].can_fork(length):
            with pytest.raises(CannotRollBack):
                self.alive[name].fork(length)
            return multiple()
        return self.add(self.alive[name].fork(length), self.written[name][:length], self.furthest[name])

    @rule(name=consumes(caches))
    def close(self, name: int) -> None:
        self.alive.pop(name).close()
        del self.written[name]

    @invariant()
    def sessions_hold_what_was_written_and_pages_are_counted_once(self) -> None:
        for name, cache in self.alive.items():
            assert cache.length == len(self.written[name])
            for slot in range(4):
                seen = read(cache, slot, cache.length)
                assert seen == self.written[name][len(self.written[name]) - len(seen) :]
        tables = [table for cache in self.alive.values() for table in cache._tables]
        pages = {id(page): page for table in tables for page in table.pages.values()}
        assert self.pool.used_bytes == sum(page.memory.nbytes for page in pages.values())

    def teardown(self) -> None:
        for cache in self.alive.values():
            cache.close()
        assert self.pool.used_bytes == 0


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
