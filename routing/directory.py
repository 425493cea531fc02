"""Who serves what, as far as this gateway knows now.

`StaticDirectory` keeps a link to every node on a list and asks each what it serves. Gossip will fill the same
interface later. Knows nothing of planning or sessions.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from itertools import cycle
from typing import Any, Protocol

from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError
from routing.link import Link, log_receiver_failure
from routing.types import Describe, Description, NodeAddress, NodeId, NodeRecord, SliceOffer

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
REFRESH_S = 15.0  # how old a node's load may be; the planner spreads by it
FIRST_REDIAL_S = 0.25  # a node that was restarted is back within the second (transport.md, section 4)
LAST_REDIAL_S = 5.0  # a list is short and its nodes are wanted: no longer pause
SEAL_KEY_SIZE = 32
MAX_OFFERS = 16  # per node; one holds a slice of a few models. It bounds what a plan looks at


class Directory(Protocol):
    """What planning needs of whoever knows the nodes."""

    def records(self) -> tuple[NodeRecord, ...]:
        """Every node that may be asked for work now."""

    def note_description(self, link: Link, description: Description) -> None:
        """A node said what it serves."""

    def note_loss(self, node_id: NodeId) -> None:
        """A node was found gone or silent; do not offer it until it has answered again."""

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every known node was tried once, or the time is over."""


class StaticDirectory:
    """A directory over a fixed list of `id@host:port`, each dialled again whenever its link is lost.

    A node that is listed with several addresses is tried at one after the other.
    """

    def __init__(self, endpoint: Endpoint, addresses: Iterable[NodeAddress]) -> None:
        self._endpoint = endpoint
        self._addresses = tuple(dict.fromkeys(addresses))
        self._nodes = {address.node_id: _Node() for address in self._addresses}
        self.last_errors: dict[NodeAddress, str] = {}

    async def run(self) -> None:
        """Keep a described link to every node until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for node_id, node in self._nodes.items():
                addresses = [address for address in self._addresses if address.node_id == node_id]
                tasks.create_task(self._keep(node, addresses))

    def records(self) -> tuple[NodeRecord, ...]:
        return tuple(node.record for node in self._nodes.values() if node.record is not None)

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """The list this directory was given, each address once."""
        return self._addresses

    def note_description(self, link: Link, description: Description) -> None:
        """Take what we asked for; a node that tells by itself is not listened to."""
        node = self._nodes.get(link.peer_id)
        if node is None or node.asked is not link or node.address is None:
            return
        node.asked = None
        node.record = _record(node.address, link, description)
        node.described.set()

    def note_loss(self, node_id: NodeId) -> None:
        """Forget what the node serves, and ask it again at once if its link is up: it may have been a false alarm."""
        if node := self._nodes.get(node_id):
            node.record = None
            node.is_doubted.set()

    async def first_look(self, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(node.tried.wait()) for node in self._nodes.values()]
        if not waits:
            return
        try:
            await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()

    async def _keep(self, node: _Node, addresses: list[NodeAddress]) -> None:
        pause = FIRST_REDIAL_S
        for address in cycle(addresses):
            began = time.monotonic()
            try:
                await self._follow(node, address)
            except RemoteError as error:
                self._note_error(address, str(error))
            except Exception as error:  # a bug, or an address that no resolver takes: the other nodes stay
                log_receiver_failure(f"node {_name(address)}", error)
                self._note_error(address, f"cannot be used, {type(error).__name__}")
            finally:
                node.record = None
            if address == addresses[-1] or time.monotonic() - began > LAST_REDIAL_S:
                node.tried.set()
            if time.monotonic() - began > LAST_REDIAL_S:
                pause = FIRST_REDIAL_S  # it was up for a while; one that goes at once is not worth four dials a second
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads redials, no secret
            pause = min(pause * 2, LAST_REDIAL_S)

    async def _follow(self, node: _Node, address: NodeAddress) -> None:
        """Dial and describe a node, and again now and then, until its link closes. Raises RemoteError then."""
        link = await self._endpoint.dial(address)
        node.address = address
        closed = asyncio.ensure_future(link.wait_closed())
        try:
            if not await self._describe(node, link, closed) and not closed.done():
                await link.close()
                raise LinkError(ErrorCode.TIMEOUT, "the node does not say what it serves")
            while not closed.done():
                self.last_errors.pop(address, None)
                node.tried.set()
                await _first_of(closed, node.is_doubted, REFRESH_S)
                if not closed.done() and not await self._describe(node, link, closed):
                    node.record = None  # it answers late, or not at all; its sessions still use the link
            raise closed.result() or LinkError(ErrorCode.LINK_LOST, "the node closed the link")
        finally:
            closed.cancel()

    async def _describe(self, node: _Node, link: Link, closed: asyncio.Future[RemoteError | None]) -> bool:
        """Ask a node what it serves; whether it said so in time."""
        node.is_doubted.clear()
        node.described.clear()
        node.asked = link
        link.post(Describe())
        await _first_of(closed, node.described, DESCRIBE_TIMEOUT_S)
        return node.described.is_set()

    def _note_error(self, address: NodeAddress, text: str) -> None:
        if self.last_errors.get(address) != text:
            logger.warning("node %s: %s", _name(address), text)
        self.last_errors[address] = text


class _Node:
    """What is known of one node on the list."""

    def __init__(self) -> None:
        self.address: NodeAddress | None = None  # where its link leads
        self.record: NodeRecord | None = None
        self.asked: Link | None = None  # on which a description is due
        self.described = asyncio.Event()
        self.is_doubted = asyncio.Event()  # somebody found it gone
        self.tried = asyncio.Event()


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


def _record(address: NodeAddress, link: Link, description: Description) -> NodeRecord | None:
    """None for a node that cannot be used: nothing can be sealed for it."""
    capabilities = link.capabilities
    if len(capabilities.seal_key) != SEAL_KEY_SIZE:
        return None
    offers = tuple(offer for offer in description.slices if _makes_sense(offer))[:MAX_OFFERS]
    if len(offers) < len(description.slices):
        num_left = len(description.slices) - len(offers)
        logger.warning("node %s: %d of its slices are not taken", _name(address), num_left)
    return NodeRecord(
        address, capabilities.seal_key, capabilities.dtypes, offers, description.load, link.rtt_ms
    )


def _makes_sense(offer: SliceOffer) -> bool:
    return 0 <= offer.spec.start < offer.spec.end <= offer.num_layers and offer.layer_ms >= 0


def _name(address: NodeAddress) -> str:
    return f"{address.node_id.hex()[:8]} at {address.host}:{address.port}"
