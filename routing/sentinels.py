"""Whom to ask to dial us back, and whom for a relay, among bootstraps and members.

Picks; asks nobody. Knows nothing of what the answers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from routing.endpoint import Endpoint
from routing.link import Link
from routing.neighbourhood import Neighbourhood
from routing.reach import Reachability
from routing.types import NodeAddress, NodeId


class Sentinels:
    """Those that the operator named, and those that announce themselves as such."""

    def __init__(
        self, endpoint: Endpoint, neighbourhood: Neighbourhood, bootstraps: Sequence[NodeAddress]
    ) -> None:
        self._endpoint = endpoint
        self._neighbourhood = neighbourhood
        self._bootstraps = {it.node_id: it for it in bootstraps if it.node_id != endpoint.node_id}

    def announced(self) -> list[NodeAddress]:
        """Members that relay, and that live."""
        return [
            address
            for node_id, address in self._direct_members(without=self._neighbourhood.suspected)
            if "sentinel" in self._neighbourhood.announcements[node_id].roles
        ]

    def for_relay(self) -> list[NodeAddress]:
        """Where to ask for a reservation. Of a bootstrap that announced nothing yet we do not know that it is none."""
        found = {address.node_id: address for address in self.announced()}
        for node_id, address in self._bootstraps.items():
            if node_id not in self._neighbourhood.announcements:
                found.setdefault(node_id, address)
        return list(found.values())

    def probers(self, reachability: Reachability) -> list[Link]:
        """Direct links to whoever may dial us back: bootstraps and sentinels, else other members, else guests.

        The first node of a swarm knows nobody but the gateway that came to it: its word is better than none.
        """
        pinned = {node_id: it.host for node_id, it in self._bootstraps.items()}
        pinned |= {address.node_id: address.host for address in self.announced()}
        links = self._links_to(pinned)
        reachability.set_probers({link.peer_id: pinned[link.peer_id] for link in links})
        others = (node_id for node_id, _ in self._direct_members(without=self._neighbourhood.suspected))
        links = links or self._links_to(others)
        guests = (link.peer_id for link in self._endpoint.links) if reachability.trusts_guests else ()
        return links or self._links_to(guests)

    def _direct_members(self, without: frozenset[NodeId]) -> list[tuple[NodeId, NodeAddress]]:
        members = self._neighbourhood.announcements
        found = [
            (node_id, it.address)
            for node_id, told in members.items()
            for it in told.contacts[:1]
            if node_id not in without
        ]
        return [(node_id, address) for node_id, address in found if not address.is_relayed]

    def _links_to(self, node_ids: Iterable[NodeId]) -> list[Link]:
        found = [self._endpoint.links_to(node_id)[:1] for node_id in node_ids]
        return [link for links in found for link in links if not link.is_relayed]
