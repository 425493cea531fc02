"""What a chain needs of whoever holds the gateway's links (see `switchboard`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from routing.link import Link
from routing.types import Cancel, Hop, NodeId

if TYPE_CHECKING:
    from routing.chain import Chain


class Switch(Protocol):
    """What a chain needs of the gateway's links: to reach nodes, and to hear of answers and losses."""

    @property
    def gateway_id(self) -> NodeId:
        """The identity that nodes see behind the gateway's links."""

    def register(self, chain: Chain) -> None:
        """Give this chain the answers, failures and losses that concern it."""

    def forget(self, chain: Chain) -> None:
        """Stop doing so."""

    async def reach(self, hop: Hop) -> Link:
        """A live link to the node of `hop`; raises RemoteError."""

    def live_link(self, node_id: NodeId) -> Link | None:
        """A link that is up now, without dialling."""

    def deliver(self, node_id: NodeId, cancel: Cancel) -> None:
        """Send a cancel now, or as soon as a link to the node is up. Never waits."""

    def note_loss(self, node_id: NodeId) -> None:
        """A node was found gone or silent."""
