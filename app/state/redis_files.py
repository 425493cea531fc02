"""Files of jobs in Redis, in pieces of a MiB, for any gateway to send.

Pieces have a short time to live until all of them are there; only then are they listed, and live as long as the job.
"""

from __future__ import annotations

from app.state.redis_server import PREFIX, RedisServer

PIECE_BYTES = 1 << 20
WRITING_S = 600  # for all pieces of one job's files


class RedisFiles:
    """Files by job and name."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    async def put(self, job_id: str, files: dict[str, bytes], lifetime_s: float) -> None:
        client, listed = self._server.client, _listed(job_id)
        pieces: list[str] = []
        with self._server.asked("jobs"):
            for name, content in files.items():
                for start in range(0, len(content), PIECE_BYTES):
                    piece = _piece(job_id, name, start)
                    await client.set(piece, content[start : start + PIECE_BYTES], ex=WRITING_S)
                    pieces.append(piece)
            async with client.pipeline(transaction=True) as at_once:
                for key in pieces:
                    at_once.pexpire(key, int(lifetime_s * 1000))
                at_once.hset(listed, mapping={name: len(content) for name, content in files.items()})
                at_once.pexpire(listed, int(lifetime_s * 1000))
                await at_once.execute()

    async def open(self, job_id: str, name: str) -> RedisFile | None:
        with self._server.asked("jobs"):
            size = await self._server.client.hget(_listed(job_id), name)
        return None if size is None else RedisFile(self._server, job_id, name, int(size))

    async def remove(self, job_id: str) -> None:
        with self._server.asked("jobs"):
            sizes = await self._server.client.hgetall(_listed(job_id))
            pieces = [
                _piece(job_id, name.decode(), start)
                for name, size in sizes.items()
                for start in range(0, int(size), PIECE_BYTES)
            ]
            if sizes:
                await self._server.client.unlink(_listed(job_id), *pieces)


class RedisFile:
    """One file; nothing is held while it is open."""

    def __init__(self, server: RedisServer, job_id: str, name: str, size: int) -> None:
        self._server = server
        self._job_id = job_id
        self._name = name
        self.size = size

    async def read(self, start: int, end: int) -> bytes:
        first = start - start % PIECE_BYTES
        last = min(end, first + PIECE_BYTES) - first - 1
        key = _piece(self._job_id, self._name, first)
        with self._server.asked("jobs"):
            piece: bytes = await self._server.client.getrange(key, start - first, last)
        return piece

    async def close(self) -> None:
        pass


def _listed(job_id: str) -> str:
    return f"{PREFIX}job:{job_id}:files"


def _piece(job_id: str, name: str, start: int) -> str:
    return f"{PREFIX}job:{job_id}:{name}:{start // PIECE_BYTES}"
