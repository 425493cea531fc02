"""Asking the nearest members for a burst where no traffic has told yet what the line brings, and answering who asks.

Knows the messages and the rhythm; what the bytes tell is `bandwidth`'s part, and a link notes it by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection

from routing.bandwidth import BITS, BURST, FIRST_BURST, FORGET_AFTER_S, LEAST_TRAIN, BurstQuota
from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.link import Link
from routing.types import Burst, BurstRequest, Message, NodeId

logger = logging.getLogger(__name__)

MAX_NEAREST = 4  # neighbours that are asked
MAX_ASKED = 8  # in `FORGET_AFTER_S`, where neighbours come and go
ASK_AGAIN_S = FORGET_AFTER_S
FIRST_LOOK_S = 1.0  # links come up, and the others know us by then
LOOK_S = 2.0
ANSWER_S = 10.0  # a first burst takes so long at 65 kbit/s: slower lines stay unknown
QUICK_S = 0.05  # only a line that brings the first burst in less is asked for more
SLOW_START_TRIPS = 3  # that a first burst takes on any long line, however wide


class BandwidthCheck:
    """A link's receiver that asks and answers. `members()` are the nodes that may be asked."""

    KINDS: tuple[type[Message], ...] = (BurstRequest, Burst)

    def __init__(
        self,
        endpoint: Endpoint,
        members: Callable[[], Collection[NodeId]],
        *,
        quota: BurstQuota | None = None,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._members = members
        self._quota = quota or BurstQuota()
        self._now = now
        self._rng = rng or random.Random()  # noqa: S311 - spreads nodes in time, no secret
        self._asked: dict[NodeId, float] = {}  # when
        self._waits: tuple[Link, asyncio.Future[None]] | None = None
        self.counts: Counter[str] = Counter()  # asked, answered, refused, unasked

    async def run(self) -> None:
        """Ask whoever is near and unknown, one after another, until cancelled."""
        await self._pause(FIRST_LOOK_S)
        while True:
            for link in self._unknown():
                self._asked[link.peer_id] = self._now()
                await self.measure(link)
            await self._pause(LOOK_S)

    async def measure(self, link: Link) -> None:
        """Ask for a short burst and, where that came quickly, for a long one. A peer that knows no bursts is silent."""
        if await self._ask(link, FIRST_BURST) and _is_quick(link):
            await self._ask(link, BURST)

    # --- a link's receiver

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case BurstRequest(size=size):
                self._answer(link, size)
            case Burst() if self._waits is not None and self._waits[0] is link:
                if not self._waits[1].done():
                    self._waits[1].set_result(None)
            case Burst():
                self.counts["unasked"] += 1

    def on_link_up(self, link: Link) -> None:
        """Nothing: a look comes soon."""

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        if self._waits is not None and self._waits[0] is link and not self._waits[1].done():
            self._waits[1].cancel()

    # --- answering

    def _answer(self, link: Link, size: int) -> None:
        """Send a burst, within bounds: through a sentinel it would be paid for by others."""
        if link.is_relayed or size > BURST or not self._quota.take(link.peer_id, size, self._now()):
            self.counts["refused"] += 1
            return
        self.counts["answered"] += 1
        link.post(Burst(bytes(size)))

    # --- asking

    def _unknown(self) -> list[Link]:
        """The nearest members whose line nobody knows, and who were not asked of late."""
        since = self._now() - ASK_AGAIN_S
        self._asked = {node_id: at for node_id, at in self._asked.items() if at > since}
        nearest: dict[NodeId, Link] = {}
        members = self._members()
        for link in sorted(self._endpoint.links, key=_distance):
            if link.peer_id in members and not link.is_relayed:
                if link.rtt_ms is None:
                    link.ask_rtt()  # the next look will know
                else:
                    nearest.setdefault(link.peer_id, link)
        links = list(nearest.values())[:MAX_NEAREST]
        fresh = [link for link in links if link.peer_id not in self._asked and link.mbps is None]
        return fresh[: max(0, MAX_ASKED - len(self._asked))]

    async def _ask(self, link: Link, size: int) -> bool:
        """Whether a burst came in time."""
        arrived = asyncio.get_running_loop().create_future()
        self._waits = link, arrived
        try:
            link.post(BurstRequest(size))
            self.counts["asked"] += 1
            await asyncio.wait([arrived], timeout=ANSWER_S)
        except RemoteError:
            return False
        finally:
            self._waits = None
        return arrived.done() and not arrived.cancelled()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._rng.uniform(0.5, 1.5))


def _distance(link: Link) -> float:
    return -1.0 if link.rtt_ms is None else link.rtt_ms


def _is_quick(link: Link) -> bool:
    """Whether the first burst came in less time than a slow line takes."""
    if link.mbps is None:
        return False
    trips_s = SLOW_START_TRIPS * (link.rtt_ms or 0.0) / 1000
    return LEAST_TRAIN / (link.mbps / BITS) < QUICK_S + trips_s
