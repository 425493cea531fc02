"""The limits of keys over any state, where a store that fails takes no answer down: then there is no limit.

The limits of one gateway hold all the same; a store that fails is asked again only every second.
"""

from __future__ import annotations

import hashlib
import time

from app.state.state import Allowance, State, StateError

RETRY_S = 1.0  # how long a store that failed is left alone: a request must not wait for it each time
NAME_BYTES = 16
UNHELD = ""  # the lease of a place that nobody counted


class Limits:
    """What a gateway asks before it answers a key. Raises nothing."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._failed_until = 0.0

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        """Take from a key's requests of a minute, as `State.take`."""
        if not self._is_failed:
            try:
                return await self._state.take(_named(key), per_minute, cost)
            except StateError:
                self._leave_alone()
        return Allowance(0.0, max(0, per_minute - cost), 0.0)

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        """Hold some of a key's places, as `State.hold`."""
        if not self._is_failed:
            try:
                return await self._state.hold(_named(key), most, cost)
            except StateError:
                self._leave_alone()
        return UNHELD

    async def release(self, lease: str) -> None:
        """Let go of a lease, as `State.release`; where the store fails it ends by itself, or with this gateway."""
        if lease != UNHELD:
            try:
                await self._state.release(lease)
            except StateError:
                self._leave_alone()

    @property
    def _is_failed(self) -> bool:
        return time.monotonic() < self._failed_until

    def _leave_alone(self) -> None:
        self._failed_until = time.monotonic() + RETRY_S


def _named(key: str) -> str:
    """A key as the store may know it: nothing that leads back to it."""
    return hashlib.blake2b(key.encode(), digest_size=NAME_BYTES, person=b"diffuse.limits").hexdigest()
