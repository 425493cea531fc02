"""Where an identity stands in which swarm, and what it has for others. Values only."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from routing.address_policy import Scope, canonical_host
from routing.announcement import Owner
from routing.errors import SettingsError
from routing.relay import RelayLimits
from routing.tls import Tls
from routing.types import Capabilities, NodeAddress, NodeId, SliceOffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offering:
    """What a node has for others now."""

    offers: tuple[SliceOffer, ...] = ()
    load: int = 0
    max_sessions: int = 0
    free_bytes: int = 0
    intends: tuple[tuple[bytes, int, int], ...] = ()  # slices it is about to hold, see `Announcement`


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Ports and addresses are checked by whoever reads them from people."""

    network_id: bytes
    psk: bytes | None = field(default=None, repr=False)
    accepted_psks: tuple[bytes, ...] = field(default=(), repr=False)  # of others, while a secret is changed
    bootstraps: tuple[NodeAddress, ...] = ()
    nodes: tuple[NodeAddress, ...] = ()  # followed whatever gossip says
    scope: Scope | None = None  # None: from the addresses
    listen: tuple[str, int] | None = None
    public_addr: tuple[str, int] | None = None  # port 0: the bound one
    state_dir: Path | None = None
    is_sentinel: bool = False
    is_private: bool | None = None  # None: with a secret or an allow list
    owner: Owner | None = None
    pad: bool = False
    allow: Callable[[NodeId, Capabilities], bool] | None = None
    token: bytes = field(default=b"", repr=False)
    moved: bytes = b""
    relay_limits: RelayLimits | None = None
    tls: Tls | None = field(default=None, repr=False)  # None: plain websockets

    @property
    def is_private_swarm(self) -> bool:
        """Whether a secret or a list says who may join."""
        return (
            (self.psk is not None or self.allow is not None) if self.is_private is None else self.is_private
        )


async def resolved(address: NodeAddress) -> NodeAddress:
    """The address with an IP literal; as it is where the name does not resolve now, which may change."""
    try:
        place = await resolved_place((address.host, address.port))
    except SettingsError as error:
        logger.warning("bootstrap %s: %s", address.node_id.hex()[:8], error)
        return address
    return address if place is None else replace(address, host=place[0])


async def resolved_place(place: tuple[str, int] | None) -> tuple[str, int] | None:
    """The place with an IP literal for its host. Raises `SettingsError`."""
    if place is None:
        return None
    host, port = place
    if (literal := canonical_host(host)) is not None:
        return literal, port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"the host name {host!r} cannot be resolved: {error.strerror}") from error
    return str(found[0][4][0]), port
