"""A shelf in Redis: what one gateway puts there, any of them fetches."""

from __future__ import annotations

from app.state.redis_server import PREFIX, RedisServer
from app.state.state import Bound, Kept, ShelfName

SPARE_MS = 60_000  # an index outlives what it lists

# KEYS: the value, until when each is kept, what each weighs ('' is the sum).
# ARGV: name, value, weight, lifetime in ms, the bound, what names of values begin with, the index's time to live in ms.
_PUT = """
local function drop(name)
    local weight = redis.call('HGET', KEYS[3], name)
    if weight then
        redis.call('HDEL', KEYS[3], name)
        redis.call('HINCRBY', KEYS[3], '', -weight)
    end
    redis.call('ZREM', KEYS[2], name)
    redis.call('UNLINK', ARGV[6] .. name)
end
drop(ARGV[1])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)) do drop(name) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[4])
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
local total = redis.call('HINCRBY', KEYS[3], '', ARGV[3])
while total > tonumber(ARGV[5]) do
    local first = redis.call('ZRANGE', KEYS[2], 0, 1)
    local oldest = first[1] == ARGV[1] and first[2] or first[1] -- of one millisecond, not what was put just now
    if oldest == ARGV[1] then -- a server that is full has evicted the index: what the others weighed is unknown
        redis.call('DEL', KEYS[3])
        redis.call('HSET', KEYS[3], ARGV[1], ARGV[3], '', ARGV[3])
        break
    end
    drop(oldest)
    total = tonumber(redis.call('HGET', KEYS[3], ''))
end
redis.call('PEXPIRE', KEYS[2], ARGV[7])
redis.call('PEXPIRE', KEYS[3], ARGV[7])
"""
# KEYS: as above. ARGV: name.
_REMOVE = """
local weight = redis.call('HGET', KEYS[3], ARGV[1])
if weight then
    redis.call('HDEL', KEYS[3], ARGV[1])
    redis.call('HINCRBY', KEYS[3], '', -weight)
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('UNLINK', KEYS[1])
"""


class RedisShelf:
    """Values by name; those that end first make room. The bound is the fleet's."""

    def __init__(self, server: RedisServer, name: ShelfName, bound: Bound) -> None:
        self._server = server
        self._name = name
        self._bound = bound
        self._put, self._remove = map(server.script, (_PUT, _REMOVE))

    async def put(self, name: str, value: bytes) -> None:
        weight = len(value) if self._bound.counts_bytes else 1
        if weight > self._bound.total:
            return
        lifetime_ms = int(self._bound.lifetime_s * 1000)
        asked = [name, value, weight, lifetime_ms, self._bound.total, self._value(""), lifetime_ms + SPARE_MS]
        with self._server.asked(self._name):
            await self._put(keys=self._keys(name), args=asked)

    async def get(self, name: str) -> Kept | None:
        with self._server.asked(self._name):
            async with self._server.client.pipeline(transaction=True) as both:
                value, left_ms = await both.get(self._value(name)).pttl(self._value(name)).execute()
        return Kept(value, left_ms / 1000) if value is not None else None

    async def remove(self, name: str) -> None:
        with self._server.asked(self._name):
            await self._remove(keys=self._keys(name), args=[name])

    def _keys(self, name: str) -> list[str]:
        return [self._value(name), f"{PREFIX}{self._name}:until", f"{PREFIX}{self._name}:weights"]

    def _value(self, name: str) -> str:
        return f"{PREFIX}{self._name}:value:{name}"
