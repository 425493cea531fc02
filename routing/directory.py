"""Who serves what, as far as this gateway knows now.

`StaticDirectory` keeps a link to every node on a list and asks each what it serves. Gossip will fill the same
interface later. Knows nothing of planning or sessions.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Protocol

from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError
from routing.link import Link
from routing.types import Describe, Description, NodeAddress, NodeId, NodeRecord

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
REFRESH_S = 15.0  # how old a node's load may be; the planner spreads by it
FIRST_REDIAL_S = 0.25  # a node that was restarted is back within the second (transport.md, section 4)
LAST_REDIAL_S = 5.0  # a list is short and its nodes are wanted: no longer pause


class Directory(Protocol):
    """What planning needs of whoever knows the nodes."""

    def records(self) -> tuple[NodeRecord, ...]:
        """Every node that may be asked for work now."""

    def note_description(self, link: Link, description: Description) -> None:
        """A node said what it serves."""

    def note_loss(self, node_id: NodeId) -> None:
        """A chain found this node gone or silent; do not offer it until it has answered again."""

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every known address was tried once, or the time is over."""


class StaticDirectory:
    """A directory over a fixed list of `id@host:port`, each dialled again whenever its link is lost."""

    def __init__(self, endpoint: Endpoint, addresses: Iterable[NodeAddress]) -> None:
        self._endpoint = endpoint
        self._addresses = tuple(addresses)
        self._records: dict[NodeId, NodeRecord] = {}
        self._described: dict[NodeId, asyncio.Event] = {a.node_id: asyncio.Event() for a in self._addresses}
        self._tried: dict[NodeAddress, asyncio.Event] = {a: asyncio.Event() for a in self._addresses}
        self.last_errors: dict[NodeAddress, str] = {}

    async def run(self) -> None:
        """Keep a described link to every address until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses:
                tasks.create_task(self._keep(address))

    def records(self) -> tuple[NodeRecord, ...]:
        return tuple(self._records.values())

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """The list this directory was given."""
        return self._addresses

    def note_description(self, link: Link, description: Description) -> None:
        address = next((a for a in self._addresses if a.node_id == link.peer_id), None)
        if address is None:
            return
        capabilities = link.capabilities
        self._records[address.node_id] = NodeRecord(
            address,
            capabilities.seal_key,
            capabilities.dtypes,
            description.slices,
            description.load,
            link.rtt_ms,
        )
        self._described[address.node_id].set()

    def note_loss(self, node_id: NodeId) -> None:
        self._records.pop(node_id, None)
        if event := self._described.get(node_id):
            event.clear()

    async def first_look(self, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in self._tried.values()]
        if not waits:
            return
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in pending:
            wait.cancel()

    async def _keep(self, address: NodeAddress) -> None:
        pause = FIRST_REDIAL_S
        while True:
            try:
                link = await self._endpoint.dial(address)
                await self._describe(link, address)
                self.last_errors.pop(address, None)
                pause = FIRST_REDIAL_S
                await self._refresh_until_closed(link, address)
            except RemoteError as error:
                if self.last_errors.get(address) != str(error):
                    logger.warning(
                        "node %s at %s:%d: %s", address.node_id.hex()[:8], address.host, address.port, error
                    )
                self.last_errors[address] = str(error)
            finally:
                self.note_loss(address.node_id)
                self._tried[address].set()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads redials, no secret
            pause = min(pause * 2, LAST_REDIAL_S)

    async def _describe(self, link: Link, address: NodeAddress) -> None:
        event = self._described[address.node_id]
        event.clear()
        await link.send(Describe())
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                await event.wait()
        except TimeoutError:
            await link.close()
            raise LinkError(ErrorCode.TIMEOUT, "the node does not say what it serves") from None
        self._tried[address].set()

    async def _refresh_until_closed(self, link: Link, address: NodeAddress) -> None:
        closed = asyncio.ensure_future(link.wait_closed())
        try:
            while True:
                done, _ = await asyncio.wait({closed}, timeout=REFRESH_S)
                if done:
                    error = closed.result()
                    raise error if error else LinkError(ErrorCode.LINK_LOST, "the node closed the link")
                await self._describe(link, address)
        finally:
            closed.cancel()
