"""What each of a list of nodes says of itself, asked over links of our own.

Asks and reports; judging what the answers mean together is `diagnosis`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cli.membership import Membership
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.types import Capabilities, Describe, Description, Message, NodeAddress, NodeId

ASK_TIMEOUT_S: Final = 8.0  # dial, handshake and one question; generous for another continent


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node's answer, or why there is none."""

    address: NodeAddress
    description: Description | None = None
    rtt_ms: float | None = None
    error: RemoteError | None = None


def name_of(address: NodeAddress) -> str:
    """How a node is called in a sentence."""
    return f"node {address.node_id.hex()[:8]} at {address.host}:{address.port}"


async def survey(addresses: Sequence[NodeAddress], membership: Membership) -> list[NodeReport]:
    """Ask every node at once what it serves; in the order given."""
    inbox = _Inbox()
    endpoint = Endpoint(
        Identity.generate(),
        membership.network_id,
        Capabilities,
        inbox,
        psk=membership.psk,
        tls=membership.tls,
    )
    try:
        return await asyncio.gather(*(_ask(endpoint, inbox, address) for address in addresses))
    finally:
        await endpoint.close()


async def _ask(endpoint: Endpoint, inbox: _Inbox, address: NodeAddress) -> NodeReport:
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            link = await endpoint.dial(address)
            answer = inbox.expect(link.peer_id)
            await link.send(Describe())
            description = await answer
            rtt_ms = await link.ping()
    except TimeoutError:
        return NodeReport(address, error=LinkError(ErrorCode.TIMEOUT, "no answer"))
    except RemoteError as error:
        return NodeReport(address, error=error)
    return NodeReport(address, description, rtt_ms)


class _Inbox:
    """A `LinkReceiver` that waits for descriptions and drops everything else."""

    def __init__(self) -> None:
        self._expected: dict[NodeId, asyncio.Future[Description]] = {}

    def expect(self, node_id: NodeId) -> asyncio.Future[Description]:
        """The description that this node will send."""
        if node_id not in self._expected:
            self._expected[node_id] = asyncio.get_running_loop().create_future()
        return self._expected[node_id]

    def on_message(self, link: Link, message: Message) -> None:
        answer = self._expected.get(link.peer_id)
        if isinstance(message, Description) and answer is not None and not answer.done():
            answer.set_result(message)

    def on_link_up(self, link: Link) -> None:
        """Nothing to do."""

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        answer = self._expected.get(link.peer_id)
        if answer is not None and not answer.done():
            answer.set_exception(error or LinkError(ErrorCode.LINK_LOST, "the node closed the link"))
