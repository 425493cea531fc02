"""Limits of keys, the same over every form of state."""

from __future__ import annotations

import asyncio
import math
import time
from unittest.mock import AsyncMock

import pytest

from app.state import limits as module
from app.state import memory
from app.state.limits import Limits
from app.state.memory import MemoryState
from app.state.redis_state import RedisState
from app.state.state import State, StateError


async def test_a_minute_holds_so_many_requests_of_a_key(state: State) -> None:
    told = [await state.take("key", 3) for _ in range(4)]
    assert [one.is_granted for one in told] == [True, True, True, False]
    assert [one.remaining for one in told] == [2, 1, 0, 0]
    assert 55 < told[-1].wait_s <= 60
    assert 55 < told[0].reset_s <= 60
    assert (await state.take("another", 3)).is_granted


async def test_requests_at_the_same_time_share_the_places(state: State) -> None:
    told = await asyncio.gather(*(state.take("key", 5) for _ in range(20)))
    assert sum(one.is_granted for one in told) == 5


async def test_a_cost_is_taken_whole_or_not_at_all(state: State) -> None:
    assert (await state.take("key", 3, cost=2)).remaining == 1
    assert not (await state.take("key", 3, cost=2)).is_granted
    assert (await state.take("key", 3)).is_granted
    assert not (await state.take("other", 3, cost=4)).is_granted


async def test_places_come_free_after_the_minute(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await state.take("key", 1)).is_granted
    refused = await state.take("key", 1)
    later_s = refused.wait_s + 0.01
    if isinstance(state, RedisState):  # whose clock is the server's
        client = state._server.client
        seconds, micros = await client.time()
        monkeypatch.setattr(client, "time", AsyncMock(return_value=(seconds + math.ceil(later_s), micros)))
    else:
        clock = "monotonic" if type(state) is MemoryState else "time"  # the event loop's is the former
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda: real() + later_s)
    assert (await state.take("key", 1)).is_granted


async def test_a_key_holds_so_many_places_at_once(state: State) -> None:
    first = await state.hold("key", 3, 2)
    assert first is not None
    assert await state.hold("key", 3, 2) is None
    second = await state.hold("key", 3)
    assert second is not None
    assert await state.hold("key", 3) is None
    assert await state.hold("other", 3, 3) is not None
    await state.release(first)
    await state.release(first)
    assert await state.hold("key", 3, 2) is not None
    assert await state.hold("key", 3) is None


async def test_a_lease_that_nobody_knows_is_no_error(state: State) -> None:
    await state.release("nonsense key")


async def test_a_gateway_sees_itself_live(state: State) -> None:
    assert await state.living([state.gateway_id, "another"]) == {state.gateway_id}


class Broken(MemoryState):
    """A store that is away."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    async def take(self, key: str, per_minute: int, cost: int = 1) -> memory.Allowance:
        self.num_asked += 1
        raise StateError

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        self.num_asked += 1
        raise StateError


async def test_a_store_that_fails_limits_nobody_and_is_left_alone_for_a_while() -> None:
    store = Broken()
    limits = Limits(store)
    for _ in range(5):
        assert (await limits.take("key", 1)).is_granted
        lease = await limits.hold("key", 1)
        assert lease is not None
        await limits.release(lease)
    assert store.num_asked == 1


class Silent(MemoryState):
    """A store that does not answer, until it does."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.num_asked = 0
        self.told: list[str] = []
        self.on_error = lambda part, reason: self.told.append(reason)

    async def take(self, key: str, per_minute: int, cost: int = 1) -> memory.Allowance:
        self.num_asked += 1
        await self.answers.wait()
        return await super().take(key, per_minute, cost)


async def test_a_store_that_does_not_answer_holds_up_no_more_than_one_request_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    store = Silent()
    limits = Limits(store)
    assert (await limits.take("key", 1)).is_granted
    assert store.told == ["TimeoutError"]
    await asyncio.sleep(0.11)
    told = await asyncio.gather(*(limits.take("key", 1) for _ in range(10)))
    assert all(one.is_granted for one in told)
    assert store.num_asked == 2
    store.answers.set()
    await asyncio.sleep(0.11)
    assert [(await limits.take("key", 1)).is_granted for _ in range(3)] == [True, False, False]


async def test_names_of_keys_are_not_in_the_store(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = state.take

    async def take(key: str, per_minute: int, cost: int = 1) -> memory.Allowance:
        asked.append(key)
        return await real(key, per_minute, cost)

    monkeypatch.setattr(state, "take", take)
    await Limits(state).take("the digest of a key", 1)
    assert "digest" not in asked[0]
