"""Video jobs in Redis: asked for at one gateway, found at any.

One hash says what every job takes and whose it is; one hash for each owner has the jobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from app.jobs.job import Job
from app.state.redis_server import PREFIX, RedisServer
from app.state.state import JobBounds, JobRow

SIZES = f"{PREFIX}jobs"
UNFINISHED_S = 7 * 24 * 3600  # how long a job may wait and run; beyond it nobody asks any more
OPEN = "open"  # the owner's name where no key is needed

# KEYS: sizes, the owner's jobs. ARGV: id, owner, size, row, most jobs, most bytes, time to live in ms. Returns 1 or 0.
_ADD = """
local total, sizes = tonumber(ARGV[3]), redis.call('HVALS', KEYS[1])
for _, told in ipairs(sizes) do total = total + string.match(told, '^%d+') end
if #sizes >= tonumber(ARGV[5]) or total > tonumber(ARGV[6]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3] .. ' ' .. ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[7]) end
return 1
"""
# KEYS: as above. ARGV: id, is over (1 or 0), job, time to live in ms. A row is "OVER GATEWAY JOB". Returns 1 or 0.
_CHANGE = """
local row = redis.call('HGET', KEYS[2], ARGV[1])
if not row or string.sub(row, 1, 1) == '1' then return 0 end
local gateway = string.match(row, '^%d (%S+) ')
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. ' ' .. gateway .. ' ' .. ARGV[3])
for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < tonumber(ARGV[4]) then redis.call('PEXPIRE', key, ARGV[4]) end
end
return 1
"""
# KEYS: sizes. ARGV: id, owner, size, most bytes. Returns 1 or 0.
_RESERVE = """
local known, total = redis.call('HGETALL', KEYS[1]), tonumber(ARGV[3])
local found = false
for at = 1, #known, 2 do
    if known[at] == ARGV[1] then found = true
    else total = total + string.match(known[at + 1], '^%d+') end
end
if not found or total > tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3] .. ' ' .. ARGV[2])
return 1
"""


class RedisJobs:
    """The jobs of a fleet."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._add, self._change, self._reserve = map(server.script, (_ADD, _CHANGE, _RESERVE))

    async def add(self, row: JobRow, bounds: JobBounds) -> bool:
        job = row.job
        told = f"{int(job.is_over)} {row.gateway_id} {_told(job)}"
        lifetime_ms = int(max(UNFINISHED_S, bounds.lifetime_s) * 1000)
        asked = [job.id, job.owner, row.size_bytes, told, bounds.max_jobs, bounds.max_bytes, lifetime_ms]
        with self._server.asked("jobs"):
            return bool(await self._add(keys=[SIZES, _of(job.owner)], args=asked))

    async def get(self, job_id: str, owner: str) -> JobRow | None:
        with self._server.asked("jobs"):
            async with self._server.client.pipeline(transaction=True) as both:
                told, size = await both.hget(_of(owner), job_id).hget(SIZES, job_id).execute()
        return _row(told, size) if told and size else None

    async def rows(self, owner: str | None = None) -> list[JobRow]:
        with self._server.asked("jobs"):
            sizes: dict[bytes, bytes] = await self._server.client.hgetall(SIZES)
            owners = {_owner(size) for size in sizes.values()} if owner is None else {owner}
            found: dict[bytes, bytes] = {}
            for one in owners:
                found |= await self._server.client.hgetall(_of(one))
        return await asyncio.to_thread(_rows, found, sizes)  # there may be a thousand

    async def change(self, job: Job, bounds: JobBounds) -> bool:
        lifetime_s = bounds.lifetime_s if job.is_over else max(UNFINISHED_S, bounds.lifetime_s)
        asked = [job.id, int(job.is_over), _told(job), int(lifetime_s * 1000)]
        with self._server.asked("jobs"):
            return bool(await self._change(keys=[SIZES, _of(job.owner)], args=asked))

    async def reserve(self, job_id: str, owner: str, size_bytes: int, bounds: JobBounds) -> bool:
        with self._server.asked("jobs"):
            return bool(await self._reserve(keys=[SIZES], args=[job_id, owner, size_bytes, bounds.max_bytes]))

    async def remove(self, job_id: str, owner: str) -> None:
        with self._server.asked("jobs"):
            async with self._server.client.pipeline(transaction=True) as all_of_it:
                all_of_it.hdel(_of(owner), job_id).hdel(SIZES, job_id).unlink(_note(job_id))
                await all_of_it.execute()

    async def note(self, job_id: str, told: bytes, lifetime_s: float) -> None:
        with self._server.asked("jobs"):
            await self._server.client.set(_note(job_id), told, px=int(lifetime_s * 1000))

    async def noted(self, job_id: str) -> bytes | None:
        with self._server.asked("jobs"):
            told: bytes | None = await self._server.client.get(_note(job_id))
        return told


def _of(owner: str) -> str:
    return f"{PREFIX}jobs:{owner or OPEN}"


def _note(job_id: str) -> str:
    return f"{PREFIX}job:{job_id}:note"


def _told(job: Job) -> str:
    return json.dumps(job.to_json())


def _rows(found: Mapping[bytes, bytes], sizes: Mapping[bytes, bytes]) -> list[JobRow]:
    rows = [_row(told, sizes[job_id]) for job_id, told in found.items() if job_id in sizes]
    return sorted(rows, key=lambda row: row.job.created)


def _row(told: bytes, size: bytes) -> JobRow:
    _, gateway_id, job = told.decode().split(" ", 2)
    return JobRow(Job.from_json(json.loads(job)), gateway_id, int(size.partition(b" ")[0]))


def _owner(size: bytes) -> str:
    return size.partition(b" ")[2].decode()
