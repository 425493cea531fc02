"""One request on its way in: the limit of its key first, then a place of the gateway's or the queue for one.

An async context that gives everything back, however it is left. Knows codes and texts of what is refused.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Final, Self

from app.admission_metrics import AdmissionMetrics
from app.api.errors import ApiError, invalid, unavailable
from app.keys import Caller
from app.places import NoPlaceError, Places, Refusal, Ticket
from app.state.limits import Limits

PATIENCE: Final = 0.8  # of what a client waits for: it must still hear that there was no place
DRAIN_RETRY_S: Final = 2


class Entrance:
    """A request for some places at once."""

    def __init__(
        self,
        places: Places,
        limits: Limits,
        metrics: AdmissionMetrics,
        caller: Caller,
        num_places: int,
        *,
        queue_timeout_s: float,
    ) -> None:
        self._places = places
        self._limits = limits
        self._metrics = metrics
        self._key = caller.key
        self._num_places = num_places
        self._lease: str | None = None
        self._ticket: Ticket | None = None
        self._came_at = time.monotonic()
        self._until = self._came_at + min(queue_timeout_s, PATIENCE * caller.patience_s)

    async def __aenter__(self) -> Self:
        """Take a place, or a place in the queue. Raises `ApiError` 400, 429 or 503."""
        if self._key.max_concurrent is not None:
            await self._hold(self._key.max_concurrent)
        try:
            self._ticket = self._places.enter(self._key.digest, self._num_places)
        except NoPlaceError as error:
            await self._release()
            raise self._refused(error.refusal) from None
        if self._ticket.is_in:
            self._metrics.queue_seconds.observe(0.0)
        return self

    async def is_in(self, within_s: float) -> bool:
        """Wait for the places, but no longer than `within_s`. Raises `ApiError` 503 when there will be none."""
        assert self._ticket is not None
        turn = self._ticket.turn
        if turn is None:
            return True
        left_s = self._until - time.monotonic()
        await asyncio.wait({turn}, timeout=max(0.0, min(within_s, left_s)))
        if turn.done():
            if (refusal := turn.result()) is not None:
                raise self._refused(refusal)
            self._metrics.queue_seconds.observe(time.monotonic() - self._came_at)
            return True
        if time.monotonic() >= self._until:
            raise self._timed_out()
        return False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ticket is not None:
            self._places.leave(self._ticket)
        await self._release()

    # The key's own limit --------------------------------------------------------------------------------------

    async def _hold(self, most: int) -> None:
        if self._num_places > most:
            raise invalid("n", f"n is at most {most} for this key")
        self._lease = await self._limits.hold(self._key.digest.hex(), most, self._num_places)
        if self._lease is None:
            code, retry_s = "concurrency_limit_exceeded", self._places.hold_s
            self._metrics.count_limited(code)
            message = f"this key may have {most} answers at once, those that wait for a place too"
            raise ApiError(429, code, message, headers={"retry-after": str(retry_s)})

    async def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._limits.release(lease)

    # Refusals -------------------------------------------------------------------------------------------------

    def _refused(self, refusal: Refusal) -> ApiError:
        if refusal == "shutting_down":
            return shutting_down()
        self._metrics.count_limited(refusal)
        retry_s, num_queued = self._places.retry_s(self._num_places), self._places.num_queued
        message = f"no place is free: this gateway gives {self._places.num_places} answers at once"
        if num_queued:
            message += f", and its queue is full: this request would be number {num_queued + 1}"
        return unavailable("overloaded", f"{message}; a place is expected in about {retry_s} s", retry_s)

    def _timed_out(self) -> ApiError:
        self._metrics.count_limited("queue_timeout")
        retry_s = self._places.retry_s()
        waited_s, num_others = time.monotonic() - self._came_at, self._places.num_queued - 1
        message = (
            f"no place was free within {waited_s:.1f} s (others that wait: {num_others}); "
            f"the next one is expected in about {retry_s} s"
        )
        return unavailable("queue_timeout", message, retry_s)


def shutting_down() -> ApiError:
    """No request is taken any more."""
    return unavailable("shutting_down", "the gateway is shutting down", DRAIN_RETRY_S)
