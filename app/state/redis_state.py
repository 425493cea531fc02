"""State in a Redis that several gateways share.

A gateway says every few seconds that it lives. What it held counts as long as it does: places of keys by the scripts
here, jobs and running requests by whoever reads them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage

from app.state.memory import WINDOW_S, allowance
from app.state.redis_files import RedisFiles
from app.state.redis_jobs import RedisJobs
from app.state.redis_server import PREFIX, RedisServer
from app.state.redis_shelf import RedisShelf
from app.state.state import Allowance, Bound, Shelf, ShelfName, StateError
from app.state.trouble import Part

LEASE_S = 30.0  # how long a gateway that says nothing is thought to live
ALIVE = f"{PREFIX}gateway:"  # names begin so; each is there while its gateway lives
HELD_S = 24 * 3600  # a name of a key's places goes when nobody took one for so long
RETRY_S = 1.0  # a server that comes back must hear of us before others take us for dead

# KEYS: the key's places. ARGV: "GATEWAY LEASE", cost, most, time to live, what names of gateways begin with, how long
# ours is thought to live. Returns 1 or 0. Places of gateways that died are let go; who asks lives, also where a server
# that began anew has not heard of it yet.
_HOLD = """
local alive = ARGV[5] .. string.match(ARGV[1], '^%S+')
if redis.call('PEXPIRE', alive, ARGV[6]) == 0 then redis.call('SET', alive, 1, 'PX', ARGV[6]) end
local held, total = redis.call('HGETALL', KEYS[1]), 0
for at = 1, #held, 2 do
    local gateway = string.match(held[at], '^%S+')
    if redis.call('EXISTS', ARGV[5] .. gateway) == 1 then
        total = total + held[at + 1]
    else
        redis.call('HDEL', KEYS[1], held[at])
    end
end
if total + ARGV[2] > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
"""


class RedisState:
    """The state of a fleet. Open it with `redis_state`."""

    is_shared = True

    def __init__(self, server: RedisServer, lease_s: float) -> None:
        self.gateway_id = secrets.token_hex(8)
        self.jobs = RedisJobs(server)
        self.files = RedisFiles(server)
        self._server = server
        self._lease_s = lease_s
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=f"{PREFIX}taken",
            connection_pool=server.pool,  # type: ignore[arg-type]
        )
        self._minutes: Any = (
            storage.bridge
        )  # the library's scripts, which are told a time: the server's, not ours
        self._hold = server.script(_HOLD)
        self._owed: set[str] = set()  # leases that are to be released once the server answers

    @property
    def on_error(self) -> Callable[[Part, str], None]:
        return self._server.on_error

    @on_error.setter
    def on_error(self, tell: Callable[[Part, str], None]) -> None:
        self._server.on_error = tell

    def shelf(self, name: ShelfName, bound: Bound) -> Shelf:
        return RedisShelf(self._server, name, bound)

    async def living(self, gateway_ids: Collection[str]) -> frozenset[str]:
        with self._server.asked("presence"):
            async with self._server.client.pipeline(transaction=False) as all_of_them:
                for one in gateway_ids:
                    all_of_them.exists(ALIVE + one)
                found = await all_of_them.execute()
        return frozenset(one for one, lives in zip(gateway_ids, found, strict=True) if lives)

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        item = RateLimitItemPerMinute(per_minute, namespace="minute")
        with self._server.asked("limits"):
            seconds, micros = await self._server.client.time()
            now, names = seconds + micros / 1e6, [self._minutes.prefixed_key(item.key_for(key))]
            asked = [now, per_minute, int(WINDOW_S), cost]
            is_granted = bool(await self._minutes.lua_acquire_moving_window(names, asked))
            window = await self._minutes.lua_moving_window(names, [now - WINDOW_S, per_minute])
        oldest, num_taken = (float(window[0]), int(window[1])) if window else (None, 0)
        return allowance(is_granted, num_taken, oldest, now, per_minute)

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        lease = f"{secrets.token_hex(8)} {key}"
        self._owed.add(lease)  # until it is known what came of it
        lease_ms = int(self._lease_s * 1000)
        asked = [f"{self.gateway_id} {lease}", cost, most, HELD_S, ALIVE, lease_ms]
        with self._server.asked("limits"):
            is_held = await self._hold(keys=[_held(key)], args=asked)
        self._owed.discard(lease)
        return lease if is_held else None

    async def release(self, lease: str) -> None:
        self._owed.add(lease)  # should we be cut off here, the next beat does it
        with self._server.asked("limits"):
            await self._let_go(lease)

    async def beat(self) -> None:
        """Say that this gateway lives, and make up for what could not be released."""
        name, lease_ms = ALIVE + self.gateway_id, int(self._lease_s * 1000)
        with self._server.asked("presence"):
            if not await self._server.client.pexpire(
                name, lease_ms
            ):  # which a server that is full still does
                await self._server.client.set(name, 1, px=lease_ms)
            for lease in tuple(self._owed):
                await self._let_go(lease)

    async def leave(self) -> None:
        """Say that this gateway is gone: what it held is free at once."""
        with self._server.asked("presence"):
            await self._server.client.unlink(ALIVE + self.gateway_id)

    async def _let_go(self, lease: str) -> None:
        await self._server.client.hdel(_held(lease.partition(" ")[2]), f"{self.gateway_id} {lease}")
        self._owed.discard(lease)


def _held(key: str) -> str:
    return f"{PREFIX}held:{key}"


@asynccontextmanager
async def redis_state(url: str, *, lease_s: float | None = None) -> AsyncIterator[RedisState]:
    """Be one of the gateways of a Redis. A server that is away is waited for. Raises `StateError` as `check` does."""
    lease_s = LEASE_S if lease_s is None else lease_s
    server = RedisServer(url)
    try:
        await server.check()
        state = RedisState(server, lease_s)
        with suppress(StateError):
            await state.beat()
        beating = asyncio.create_task(_beat(state, lease_s / 3))
        try:
            yield state
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with suppress(StateError):
                await state.leave()
    finally:
        await server.close()


async def _beat(state: RedisState, every_s: float) -> None:
    wait_s = every_s
    while True:
        await asyncio.sleep(wait_s)
        try:
            await state.beat()
            wait_s = every_s
        except StateError:
            wait_s = min(every_s, RETRY_S)
