"""The limits of keys over any state, where a store that fails takes no answer down: then there is no limit.

A store that failed is asked by one request a second until it answers again; no other request waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable
from contextvars import Context
from typing import TypeVar

from app.state.state import Allowance, State, StateError

T = TypeVar("T")

PATIENCE_S = 1.0  # how long a request waits for a store that answers within milliseconds
RETRY_S = 1.0
NAME_BYTES = 16
UNHELD = ""  # the lease of a place that nobody counted


class Limits:
    """What a gateway asks before it answers a key. Raises nothing."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._left_alone_until = 0.0
        self._has_failed = False
        self._releasing: set[asyncio.Task[None]] = set()

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        """Take from a key's requests of a minute, as `State.take`."""
        unlimited = Allowance(0.0, max(0, per_minute - cost), 0.0)
        if self._is_left_alone:
            return unlimited
        return await self._asked(self._state.take(_named(key), per_minute, cost), unlimited)

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        """Hold some of a key's places, as `State.hold`."""
        if self._is_left_alone:
            return UNHELD
        return await self._asked(self._state.hold(_named(key), most, cost), UNHELD)

    async def release(self, lease: str) -> None:
        """Let go of a lease, as `State.release`; a state that cannot does it later."""
        if lease == UNHELD:
            return
        releasing = self._asked(self._state.release(lease), None)
        if self._is_left_alone:  # no answer ends later for it
            task = asyncio.create_task(releasing, context=Context())
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)
        else:
            await releasing

    @property
    def _is_left_alone(self) -> bool:
        return time.monotonic() < self._left_alone_until

    async def _asked(self, asking: Awaitable[T], otherwise: T) -> T:
        if self._has_failed:
            self._leave_alone()  # so that nobody else waits while we look whether it is back
        try:
            async with asyncio.timeout(PATIENCE_S):
                told = await asking
        except (StateError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._state.on_error("limits", "TimeoutError")
            self._has_failed = True
            self._leave_alone()
            return otherwise
        self._has_failed, self._left_alone_until = False, 0.0
        return told

    def _leave_alone(self) -> None:
        self._left_alone_until = time.monotonic() + RETRY_S


def _named(key: str) -> str:
    """A key as the store may know it: nothing that leads back to it."""
    return hashlib.blake2b(key.encode(), digest_size=NAME_BYTES, person=b"diffuse.limits").hexdigest()
