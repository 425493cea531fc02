"""Who is answered now and who waits: a bounded number of places, and a bounded queue for them.

The key with the fewest places gets the next one, keys with as many take turns; within a key, who came first goes first.
Nobody passes whose turn it is, so that a request for many places gets them. Knows neither HTTP nor engines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

RECENT: Final = 0.1  # weight of the latest answer in how long places are held
FIRST_HOLD_S: Final = 2.0  # what that is taken for until an answer has ended
RETRY_S: Final = (1, 30)  # clients that are told to wait for minutes do not ask again: openai.md, section 1.1

Refusal = Literal["overloaded", "shutting_down"]


class NoPlaceError(Exception):
    """There is neither a place nor room to wait for one."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal: Refusal = refusal


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that has its places, or waits for them."""

    tenant: bytes = field(repr=False)
    num_places: int
    since: float  # when it came, or got its places
    is_in: bool = False
    # Done when it is in (None), or will never be. Who never had to wait has none.
    turn: asyncio.Future[Refusal | None] | None = field(default=None, repr=False)


class Places:
    """The places of one gateway. Used from one event loop."""

    def __init__(
        self, num_places: int, max_queued: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_taken = 0
        self.num_queued = 0  # requests
        self.idle = asyncio.Event()  # set while no place is taken
        self.idle.set()
        self.num_places = num_places
        self._max_queued = max_queued
        self._is_closed = False
        self._clock = clock
        self._taken: Counter[bytes] = Counter()  # by tenant
        self._queues: OrderedDict[bytes, deque[Ticket]] = OrderedDict()  # whose turn is next comes first
        self._places_wanted = 0  # by those who wait
        self._hold_s = FIRST_HOLD_S
        self._since = 0.0  # sum over the places taken

    def enter(self, tenant: bytes, num_places: int) -> Ticket:
        """Take places, or a place in the queue. Raises `NoPlaceError` at once where there is neither."""
        assert num_places <= self.num_places
        if self._is_closed:
            raise NoPlaceError("shutting_down")
        ticket = Ticket(tenant, num_places, self._clock())
        if not self.num_queued and self._fits(ticket):
            self._let_in(ticket)
            return ticket
        if self.num_queued >= self._max_queued and not self._make_room(tenant):
            raise NoPlaceError("overloaded")
        ticket.turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(ticket)
        self.num_queued += 1
        self._places_wanted += num_places
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back what a request has: its places, or its place in the queue."""
        if ticket.is_in:
            self._free(ticket)
        elif ticket.turn is not None and not ticket.turn.done():
            self._drop(ticket)
            ticket.turn.cancel()
        self._call_next()

    def close(self) -> None:
        """Send everybody who waits away, and let nobody in from now on: the gateway is shutting down."""
        self._is_closed = True
        for queue in list(self._queues.values()):
            for ticket in list(queue):
                self._send_away(ticket, "shutting_down")

    @property
    def hold_s(self) -> int:
        """How long places are held of late, in whole seconds within what clients may be told to wait."""
        return _bounded(self._hold_s)

    def retry_s(self, num_places: int = 1) -> int:
        """When so many places more may be free, in whole seconds: from how long they are held."""
        missing = self.num_taken + self._places_wanted + num_places - self.num_places
        if missing <= 0 or not self.num_taken:
            return RETRY_S[0]
        age_s = (
            self._clock() - self._since / self.num_taken
        )  # long ones that run tell more than short ones that ended
        return _bounded(missing * max(self._hold_s, age_s) / self.num_taken)

    # Who is next ----------------------------------------------------------------------------------------------

    def _call_next(self) -> None:
        while self._queues:
            tenant = min(self._queues, key=self._taken.__getitem__)  # of equals, the first: whose turn it is
            ticket = self._queues[tenant][0]
            if not self._fits(ticket):
                return
            self._drop(ticket)
            if tenant in self._queues:
                self._queues.move_to_end(tenant)
            self._let_in(ticket)
            assert ticket.turn is not None
            ticket.turn.set_result(None)

    def _make_room(self, tenant: bytes) -> bool:
        """Send the latest of the key away that waits with the most, unless this key has as many waiting."""
        if not self._queues:
            return False
        crowd = max(self._queues.values(), key=len)
        if len(crowd) <= len(self._queues.get(tenant, ())) + 1:
            return False
        self._send_away(crowd[-1], "overloaded")
        return True

    def _send_away(self, ticket: Ticket, refusal: Refusal) -> None:
        self._drop(ticket)
        assert ticket.turn is not None
        ticket.turn.set_result(refusal)

    def _drop(self, ticket: Ticket) -> None:
        """Take a ticket out of its queue."""
        queue = self._queues[ticket.tenant]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.tenant]
        self.num_queued -= 1
        self._places_wanted -= ticket.num_places

    # Places ---------------------------------------------------------------------------------------------------

    def _fits(self, ticket: Ticket) -> bool:
        return self.num_taken + ticket.num_places <= self.num_places

    def _let_in(self, ticket: Ticket) -> None:
        ticket.is_in = True
        ticket.since = self._clock()
        self.num_taken += ticket.num_places
        self.idle.clear()
        self._taken[ticket.tenant] += ticket.num_places
        self._since += ticket.since * ticket.num_places

    def _free(self, ticket: Ticket) -> None:
        ticket.is_in = False
        self.num_taken -= ticket.num_places
        self._taken[ticket.tenant] -= ticket.num_places
        if not self._taken[ticket.tenant]:
            del self._taken[ticket.tenant]
        self._since -= ticket.since * ticket.num_places
        self._hold_s += RECENT * (self._clock() - ticket.since - self._hold_s)
        if not self.num_taken:
            self._since = 0.0  # no rounding gathers
            self.idle.set()


def _bounded(seconds: float) -> int:
    low, high = RETRY_S
    return min(max(math.ceil(seconds), low), high)
