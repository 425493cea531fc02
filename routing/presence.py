"""What we say of ourselves: in handshakes, and in the record that everybody gets.

Composes only; when a record is signed and spread is `announcer`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from routing.address_policy import AddressPolicy
from routing.announcement import (
    MAX_MBPS,
    MAX_NEIGHBOURS,
    MIN_MBPS,
    PREFIX_SIZE,
    Announcement,
    Contact,
)
from routing.endpoint import Endpoint
from routing.gossip import Gossip
from routing.identity import Identity
from routing.link import Link
from routing.network_settings import NetworkSettings, Offering
from routing.reach import Reachability
from routing.reservations import Reservations
from routing.types import Capabilities, NodeAddress, WireDtype

MAX_TOLD_SLICES = 8  # in capabilities, which have to fit a handshake message
VOUCHER_MARGIN_MS = 5000  # a relayed contact that ends sooner is not announced


class Neighbour(NamedTuple):
    """A member that we have a direct link to."""

    prefix: bytes
    rtt_ms: float
    mbps: float | None  # what the line from it brings; None: not known


class Presence:
    """Our side of the story. `offering` None: a guest or a pure sentinel."""

    def __init__(
        self,
        identity: Identity,
        settings: NetworkSettings,
        *,
        seal_key: bytes,
        dtypes: tuple[WireDtype, ...],
        offering: Callable[[], Offering] | None,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._seal_key = seal_key
        self._dtypes = dtypes
        self._offering = offering
        self._clock = clock

    @property
    def serves(self) -> bool:
        """Whether we compute for others."""
        return self._offering is not None

    @property
    def is_member(self) -> bool:
        """Whether others hear of us at all."""
        return self.serves or self._settings.is_sentinel

    def capabilities(self) -> Capabilities:
        """What a handshake tells."""
        offers = self._offering().offers if self._offering is not None else ()
        slices = tuple((it.model_digest[:PREFIX_SIZE], it.spec.start, it.spec.end) for it in offers)
        return Capabilities(
            dtypes=self._dtypes,
            seal_key=self._seal_key,
            slices=slices[:MAX_TOLD_SLICES],
            token=self._settings.token,
            moved=self._settings.moved,
        )

    def compose(self, contacts: tuple[Contact, ...], neighbours: Sequence[Neighbour]) -> Announcement:
        """What a record says now; its sequence and times are left to whoever signs it."""
        offering = self._offering() if self._offering is not None else Offering()
        roles = [("node", self.serves), ("sentinel", self._settings.is_sentinel)]
        return Announcement(
            public_key=self._identity.public_key,
            sequence=0,
            issued_ms=0,
            expires_ms=0,
            contacts=contacts,
            roles=tuple(name for name, has in roles if has),
            seal_key=self._seal_key,
            dtypes=self._dtypes,
            offers=offering.offers,
            load=offering.load,
            max_sessions=offering.max_sessions,
            free_bytes=offering.free_bytes,
            intends=offering.intends,
            owner=self._settings.owner,
            neighbour_ms=tuple((it.prefix, it.rtt_ms) for it in neighbours),
            neighbour_mbps=tuple((it.prefix, it.mbps) for it in neighbours if it.mbps is not None),
            moved=self._settings.moved,
        )

    def contacts(
        self, reachability: Reachability, reservations: Reservations | None, policy: AddressPolicy
    ) -> tuple[Contact, ...]:
        """A direct contact where one is proved, else those of live reservations."""
        if (proved := reachability.proved) is not None:
            return (Contact(NodeAddress(self._identity.node_id, *proved)),)
        soon_ms = self._clock() * 1000 + VOUCHER_MARGIN_MS
        return tuple(
            contact
            for contact in (reservations.contacts if reservations is not None else ())
            if contact.voucher is not None
            and contact.voucher.expires_ms > soon_ms
            and policy.check(contact.address.host, contact.address.port) is None
        )


def neighbours(endpoint: Endpoint, gossip: Gossip) -> list[Neighbour]:
    """The nearest members that we have direct links to."""
    found = {
        link.peer_id: Neighbour(link.peer_id[:PREFIX_SIZE], round(link.rtt_ms, 3), _mbps(link))
        for link in endpoint.links
        if link.rtt_ms is not None and not link.is_relayed and link.peer_id in gossip.announcements
    }
    return sorted(found.values(), key=lambda it: it.rtt_ms)[:MAX_NEIGHBOURS]


def _mbps(link: Link) -> float | None:
    """As others take it, in three digits."""
    mbps = link.mbps
    return None if mbps is None else float(f"{min(max(mbps, MIN_MBPS), MAX_MBPS):.3g}")
