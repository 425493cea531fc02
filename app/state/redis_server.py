"""The Redis that several gateways share: one pool of connections, scripts, and the one place where its errors end.

All names begin with `diffuse:` and every one has a time to live. Times come from the server's clock, so that
gateways whose clocks differ agree.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from app.state.state import StateError, StateFullError
from app.state.trouble import Part

PREFIX = "diffuse:"
MAX_CONNECTIONS = 32  # of one gateway; the others wait for one
CONNECT_S = 1.0  # a store beside the gateway answers within milliseconds
ANSWER_S = 3.0  # a piece of a video is a MiB
UNREACHABLE = "the store cannot be reached"
FULL = "the store is full"

# What scripts begin with: the server's time in whole milliseconds.
NOW = "local time = redis.call('TIME'); local now = time[1] * 1000 + math.floor(time[2] / 1000)\n"


class RedisServer:
    """A client of one server. Nothing that it raises or logs holds the address or the password."""

    def __init__(self, url: str) -> None:
        """Take the URL apart; nothing is connected yet. Raises `StateError` for one that cannot be."""
        self.on_error: Callable[[Part, str], None] = lambda part, reason: None
        self.pool = _pool(url)
        self.client: Any = Redis(
            connection_pool=self.pool
        )  # its annotations leave open whether answers are bytes

    @contextmanager
    def asked(self, part: Part) -> Iterator[None]:
        """Use the client inside. Raises `StateError` for whatever goes wrong with the server.

        A cancellation counts, also one that `asyncio.wait_for` of Python 3.11 lost below us (CPython issue 86296).
        """
        task = asyncio.current_task()
        asked = task.cancelling() if task else 0
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            self.on_error(part, type(error).__name__)
            is_full = isinstance(error, OutOfMemoryError)
            raise (StateFullError(FULL) if is_full else StateError(UNREACHABLE)) from None
        finally:
            if task and task.cancelling() > asked:
                raise asyncio.CancelledError

    def script(self, text: str) -> Any:
        """A script that the server runs as one step, after `NOW`."""
        return self.client.register_script(NOW + text)

    async def check(self) -> None:
        """Look whether the server takes us. Raises `StateError` where waiting would not help.

        A server that is away may come: that is no error.
        """
        try:
            await self.client.ping()
        except (RedisError, OSError, TimeoutError) as error:
            causes = list(_causes(error))
            if any(isinstance(one, AuthenticationError | NoPermissionError) for one in causes):
                raise StateError("the state's Redis refuses this user or password") from None
            if any(isinstance(one, ssl.SSLCertVerificationError) for one in causes):
                raise StateError("the certificate of the state's Redis is not one that we trust") from None
            if isinstance(error, ResponseError):
                raise StateError(
                    "the state's Redis refuses: it may have no database of that number"
                ) from None
            self.on_error("presence", type(error).__name__)

    async def close(self) -> None:
        await self.pool.aclose()


def _pool(url: str) -> BlockingConnectionPool:
    """Raises `StateError`; the texts of those below quote the URL."""
    try:
        path = urlsplit(url).path.strip("/")
        if not url.startswith("unix://") and path and not path.isdecimal():
            raise ValueError
        return BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=CONNECT_S,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            retry=Retry(
                NoBackoff(), 1, (exceptions.ConnectionError,)
            ),  # a connection that the server closed meanwhile
        )
    except (ValueError, TypeError, RedisError):
        raise StateError("write redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER], or rediss:// for TLS") from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from: the client wraps what went wrong while it connected."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
