"""Caches that are kept: found by the hash of a block, forked, taken over, and let go when nobody waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slicing.kept_caches import BLOCK, Kept, KeptCaches
from slicing.kv_cache import CannotRollBack

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


@dataclass(eq=False)
class Slots:
    """A cache of nothing but a length; one with a window can be had near its end only."""

    length: int
    window: int | None = None
    is_open: bool = True
    size_bytes: int = 8

    def can_fork(self, length: int) -> bool:
        return self.is_open and max(0, self.length - (self.window or self.length)) <= length <= self.length

    def fork(self, length: int) -> Slots:
        if not self.can_fork(length):
            raise CannotRollBack
        return Slots(length, self.window)

    def truncate(self, position: int) -> None:
        self.length = min(self.length, position)

    def close(self) -> None:
        assert self.is_open
        self.is_open = False


def kept(*hashes: bytes, group: object = "slice", at: float = 0.0, window: int | None = None) -> Kept:
    return Kept(group, (Slots(len(hashes) * BLOCK + 3, window),), hashes, 10, at)


def test_the_longest_that_is_held_is_found() -> None:
    caches = KeptCaches()
    caches.add(kept(A, B, C))
    fork = caches.find("slice", [(64, D), (32, B), (16, A)], now=1.0)
    assert fork is not None
    assert [cache.length for cache in fork.make(32)] == [32]


@pytest.mark.parametrize("asked", [(32, A), (16, B), (48, C), (31, B), (0, A), (1 << 40, B)])
def test_a_hash_stands_for_one_length_only(asked: tuple[int, bytes]) -> None:
    caches = KeptCaches()
    caches.add(kept(A, B))
    assert caches.find("slice", [asked], now=1.0) is None


def test_another_group_finds_nothing() -> None:
    caches = KeptCaches()
    caches.add(kept(A, B))
    assert caches.find("other", [(32, B)], now=1.0) is None


def test_a_longer_one_replaces_what_it_holds_too() -> None:
    caches = KeptCaches()
    short, other, long = kept(A, B), kept(A, D), kept(A, B, C)
    for each in (short, other, long):
        caches.add(each)
    assert list(caches) == [other, long]
    assert not short.caches[0].is_open


def test_one_with_a_window_does_not_replace_what_it_cannot_give() -> None:
    caches = KeptCaches()
    caches.add(kept(A))
    caches.add(kept(A, B, C, D, window=20))
    assert len(caches) == 2
    assert caches.find("slice", [(16, A)], now=1.0) is not None


def test_what_is_awaited_is_freed_when_nobody_waits_any_more() -> None:
    gone: list[Kept] = []
    caches = KeptCaches(gone.append)
    one = kept(A, B)
    caches.add(one)
    fork = caches.find("slice", [(32, B)], now=1.0)
    assert fork is not None
    caches.let_go(one)
    assert (gone, one.caches[0].is_open, len(caches)) == ([], True, 0)
    fork.make(16)
    caches.sweep(2.0, 100.0)
    assert (gone, one.caches[0].is_open) == ([one], False)


def test_a_fork_that_was_forgotten_holds_up_nothing() -> None:
    caches = KeptCaches()
    one = kept(A)
    caches.add(one)
    assert caches.find("slice", [(16, A)], now=1.0) is not None
    assert not one.is_awaited


def test_a_kept_one_is_taken_over_where_one_waits_for_it_and_not_where_two_do() -> None:
    gone: list[Kept] = []
    caches = KeptCaches(gone.append)
    one = kept(A, B)
    caches.add(one)
    first, second = (caches.find("slice", [(16, A)], now=1.0) for _ in range(2))
    assert first is not None
    assert second is not None
    assert not caches.take_over(first)
    second.give_up()
    assert caches.take_over(first)
    assert gone == [one]
    (taken,) = first.make(16)
    caches.sweep(2.0, 100.0)
    assert (taken is one.caches[0], taken.length, one.caches[0].is_open) == (True, 16, True)


def test_the_least_recently_used_come_first_and_the_old_go() -> None:
    caches = KeptCaches()
    one, other = kept(A), kept(B)
    caches.add(one)
    caches.add(other)
    caches.find("slice", [(16, A)], now=50.0)
    assert list(caches) == [other, one]
    assert caches.sweep(now=60.0, ttl_s=20.0) == 1
    assert list(caches) == [one]


def test_what_several_share_is_found_as_long_as_one_is_there() -> None:
    caches = KeptCaches()
    one, other = kept(A, B), kept(A, C)
    caches.add(one)
    caches.add(other)
    caches.let_go(other)
    fork = caches.find("slice", [(16, A)], now=1.0)
    assert fork is not None
    assert fork.kept is one


def test_a_hash_that_is_named_twice_harms_nothing() -> None:
    caches = KeptCaches()
    one, other = kept(A), kept(A, A, A)
    caches.add(one)
    caches.add(other)
    assert list(caches) == [other]
    caches.let_go(other)
    assert caches.find("slice", [(16, A)], now=1.0) is None
