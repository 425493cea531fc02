"""What a chain needs of whoever holds the gateway's links (see `switchboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from routing.link import Link
from routing.measurements import Measured
from routing.types import Answer, Cancel, Hop, Keep, NodeId, Route

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

    async def reach(self, hop: Hop, timeout_s: float) -> Link:
        """A live link to the node of `hop`; raises RemoteError, LinkError TIMEOUT when it takes too long."""

    def reach_soon(self, hop: Hop) -> None:
        """Get a link to the node of `hop` in the background, if it can be had."""

    def live_link(self, node_id: NodeId) -> Link | None:
        """A link that is up now, without dialling."""

    def deliver(self, node_id: NodeId, cancel: Cancel) -> None:
        """Send a cancel now, or as soon as a link to the node is up. Never waits."""

    def keep(self, node_id: NodeId, keep: Keep, otherwise: Cancel) -> None:
        """Send a Keep if there is a link to the node, else a Cancel as soon as there is one. Never waits."""

    def note_loss(self, node_id: NodeId) -> None:
        """A node was found gone or silent."""

    @property
    def last_loss_at(self) -> float:
        """When some node was found gone or silent last, in time.monotonic(): it may be back soon."""

    def note_doubt(self, node_id: NodeId) -> None:
        """A node failed a session: others should do without it for a moment, if they can."""

    def note_pause(self, pause_s: float) -> None:
        """A session held still for so long, from noticing trouble to a route that holds again."""

    def note_answer(self, route: Route, rows: int, answer: Answer, waited_s: float) -> None:
        """A step of `rows` rows was answered over this route."""

    def measured(self, model_digest: bytes) -> Mapping[NodeId, Measured]:
        """How fast nodes were of late."""
