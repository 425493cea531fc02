"""Keeping a described link to one node, by the best way to it that works now.

Dials again when the link is lost, asks again now and then, and moves from a relayed to a direct link when one works.
Knows nothing of other nodes, nor of where the ways to this one come from.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, Protocol

from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError
from routing.link import Link, log_receiver_failure
from routing.types import Describe, Description, NodeAddress, NodeId

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
REFRESH_S = 15.0  # how old a node's load may be; the planner spreads by it
FIRST_REDIAL_S = 0.25  # a node that was restarted is back within the second (transport.md, section 4)
LAST_REDIAL_S = 5.0  # a list is short and its nodes are wanted: no longer pause
DIAL_TIMEOUT_S = 5.0
REDIAL_TIMEOUT_S = 1.0  # for a route that was live a moment ago
UPGRADE_EVERY_S = 60.0  # a direct way that does not work may work later
PING_TIMEOUT_S = 2.0


class FollowerHost(Protocol):
    """Whoever follows nodes and hears how it goes."""

    dialling: asyncio.Semaphore

    def ways_to(self, node_id: NodeId) -> tuple[NodeAddress, ...]: ...

    def on_described(self, follower: Follower) -> None: ...

    def on_lost(self, follower: Follower) -> None: ...

    def on_unreachable(self, follower: Follower) -> None: ...

    def note_error(self, address: NodeAddress, error: str | None) -> None: ...

    def retire(self, link: Link) -> None: ...


class Follower:
    """One node that is wanted. `description` is None while it may not be asked for work."""

    def __init__(self, node_id: NodeId, endpoint: Endpoint, host: FollowerHost) -> None:
        self.node_id = node_id
        self._endpoint = endpoint
        self._host = host
        self.link: Link | None = None  # the one it was described on
        self.address: NodeAddress | None = None  # where that link leads
        self.description: Description | None = None
        self.has_failed = False  # it was tried, or found gone, and has not answered since
        self.tried = asyncio.Event()
        self._asked: Link | None = None  # on which a description is due
        self._described = asyncio.Event()
        self._doubted = (
            asyncio.Event()
        )  # while it is linked: somebody found it gone, or there are other ways to it
        self._woken = asyncio.Event()  # while it is not linked: there may be a way to it now
        self._was_live = False
        self._upgrade_due = 0.0

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = FIRST_REDIAL_S
        while True:
            self._woken.clear()
            if await self._try_each_way():
                pause = FIRST_REDIAL_S  # it was up for a while; one that goes at once is not worth four dials a second
                continue
            self.tried.set()
            await self._rest(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads redials, no secret
            pause = min(pause * 2, LAST_REDIAL_S)

    def wake(self) -> None:
        """Look again now: the ways to the node have changed."""
        self._upgrade_due = 0.0
        self._doubted.set()
        self._woken.set()

    def refresh(self) -> None:
        """The node serves something else now: ask it, and go on offering it meanwhile."""
        self._doubted.set()

    def doubt(self) -> None:
        """The node was found gone: it must answer before it is offered again; it is asked at once."""
        self._forget()
        self._doubted.set()

    def take(self, link: Link, description: Description) -> None:
        """Take what we asked for; a node that tells by itself is not listened to."""
        if self._asked is not link:
            return
        self._asked = None
        self.link, self.description, self.has_failed = link, description, False
        self._was_live = True
        self._described.set()
        self._host.on_described(self)

    async def _rest(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _try_each_way(self) -> bool:
        """Follow the node by one way after the other; whether it was, for a while."""
        for address in self._host.ways_to(self.node_id):
            began = time.monotonic()
            try:
                await self._follow(address)
            except RemoteError as error:
                self._host.note_error(address, str(error))
            except Exception as error:  # a bug, or an address that no resolver takes: the other nodes stay
                log_receiver_failure(f"node {name_of(address)}", error)
                self._host.note_error(address, f"cannot be used, {type(error).__name__}")
            else:
                return True  # there is a better link now
            self._forget()
            if time.monotonic() - began > LAST_REDIAL_S:
                return True
        self._host.on_unreachable(self)
        return False

    async def _follow(self, address: NodeAddress) -> None:
        """Dial and describe a node, and again now and then, until its link closes (raises RemoteError) or a better
        one is there."""
        link = await self._dial(address)
        closed = asyncio.ensure_future(link.wait_closed())
        try:
            self.address = address
            if not await self._describe(link, closed) and not closed.done():
                await link.close()
                raise LinkError(ErrorCode.TIMEOUT, "the node does not say what it serves")
            if not closed.done():
                await self._measure(link)
            while not closed.done():
                self._host.note_error(address, None)
                self.tried.set()
                await _first_of(closed, self._doubted, REFRESH_S)
                if not closed.done() and await self._has_upgrade(link):
                    self._host.retire(link)
                    return
                if not closed.done() and not await self._describe(link, closed):
                    self._forget()  # it answers late, or not at all; its sessions still use the link
            raise closed.result() or LinkError(ErrorCode.LINK_LOST, "the node closed the link")
        finally:
            closed.cancel()

    async def _dial(self, address: NodeAddress) -> Link:
        limit_s = REDIAL_TIMEOUT_S if self._was_live else DIAL_TIMEOUT_S
        self._was_live = False
        async with self._host.dialling:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._endpoint.dial(address)
            except TimeoutError as error:
                raise LinkError(ErrorCode.TIMEOUT, f"not reached within {limit_s:g} s") from error

    async def _describe(self, link: Link, closed: asyncio.Future[RemoteError | None]) -> bool:
        """Ask a node what it serves; whether it said so in time."""
        self._doubted.clear()
        self._described.clear()
        self._asked = link
        link.post(Describe())
        await _first_of(closed, self._described, DESCRIBE_TIMEOUT_S)
        return self._described.is_set()

    async def _measure(self, link: Link) -> None:
        """Know the round trip before the first route is planned, not five seconds later."""
        if link.rtt_ms is not None:
            return
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await link.ping()
        except (TimeoutError, RemoteError):
            return
        self._host.on_described(self)

    async def _has_upgrade(self, link: Link) -> bool:
        """Whether the node has just been reached directly, while we use a relayed link."""
        now = time.monotonic()
        if not link.is_relayed or now < self._upgrade_due:
            return False
        self._upgrade_due = now + UPGRADE_EVERY_S
        for address in self._host.ways_to(self.node_id):
            if address.is_relayed:
                continue
            try:
                async with self._host.dialling, asyncio.timeout(DIAL_TIMEOUT_S):
                    direct = await self._endpoint.dial(address)
            except (TimeoutError, RemoteError):
                continue
            if not direct.is_relayed:
                return True
        return False

    def _forget(self) -> None:
        self.has_failed = True
        self.link = self.description = None
        self._host.on_lost(self)


async def _first_of(
    future: asyncio.Future[RemoteError | None], event: asyncio.Event, timeout_s: float
) -> None:
    """Wait for one of both, or for the time to be over."""
    waiting = asyncio.ensure_future(event.wait())
    waits: set[asyncio.Future[Any]] = {future, waiting}
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def name_of(address: NodeAddress) -> str:
    """How logs name a node at an address."""
    through = " through a sentinel" if address.is_relayed else ""
    return f"{address.node_id.hex()[:8]} at {address.host}:{address.port}{through}"
