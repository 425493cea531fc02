"""What waits to be fetched, the same over every form of state."""

from __future__ import annotations

import asyncio

import pytest

from app.state.state import Bound, ShelfName, State

FEW = Bound(3, 60.0)
BYTES = Bound(100, 60.0, counts_bytes=True)


@pytest.mark.parametrize("name", ["records", "pictures"])
async def test_what_is_put_there_is_found_for_a_while(state: State, name: ShelfName) -> None:
    shelf = state.shelf(name, FEW)
    await shelf.put("one", b"\x00\xff value")
    kept = await shelf.get("one")
    assert kept is not None
    assert kept.value == b"\x00\xff value"
    assert 50 < kept.seconds_left <= 60
    assert await shelf.get("another") is None
    assert "value" not in repr(kept)


@pytest.mark.parametrize("name", ["records", "pictures"])
async def test_the_oldest_make_room_by_number(state: State, name: ShelfName) -> None:
    shelf = state.shelf(name, FEW)
    for number in range(5):
        await shelf.put(f"n{number}", b"x")
        await asyncio.sleep(0.002)  # the server's clock counts milliseconds
    assert [await shelf.get(f"n{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("name", ["records", "pictures"])
async def test_the_oldest_make_room_by_bytes_and_what_never_fits_is_not_kept(
    state: State, name: ShelfName
) -> None:
    shelf = state.shelf(name, BYTES)
    await shelf.put("first", bytes(60))
    await asyncio.sleep(0.002)
    await shelf.put("second", bytes(60))
    assert await shelf.get("first") is None
    await shelf.put("third", bytes(101))
    assert await shelf.get("third") is None
    assert await shelf.get("second") is not None


@pytest.mark.parametrize("name", ["records", "pictures"])
async def test_a_name_has_its_last_value_and_only_its_weight(state: State, name: ShelfName) -> None:
    shelf = state.shelf(name, BYTES)
    for size in (90, 10, 20):
        await shelf.put("same", bytes(size))
    await shelf.put("other", bytes(80))
    kept = await shelf.get("same")
    assert kept is not None
    assert len(kept.value) == 20
    await shelf.remove("same")
    assert await shelf.get("same") is None
    await shelf.put("more", bytes(20))
    assert await shelf.get("other") is not None


@pytest.mark.parametrize("name", ["records", "pictures"])
async def test_values_end_with_their_time_and_free_their_room(state: State, name: ShelfName) -> None:
    shelf = state.shelf(name, Bound(100, 0.05, counts_bytes=True))
    await shelf.put("one", bytes(90))
    await asyncio.sleep(0.06)
    assert await shelf.get("one") is None
    await shelf.put("two", bytes(90))
    assert await shelf.get("two") is not None
