"""The gateway's place in a swarm: one identity, one set of links and one directory, under every model it serves.

Joins through bootstraps, keeps links to nodes on a list, or both. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from routing.address_policy import Scope
from routing.directory import LiveDirectory
from routing.identity import Identity
from routing.network import Network, NetworkSettings
from routing.switchboard import Switchboard
from routing.tls import Tls
from routing.types import Answer, Capabilities, Failure, NodeAddress, NodeId, Opened, Resumed, Standing

FIRST_LOOK_S = 6.0  # how long a start waits for nodes that do not answer before it says what is missing


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How a gateway joins a swarm. Without `identity` it makes one that lives as long as it does."""

    network_id: bytes
    nodes: tuple[NodeAddress, ...] = ()  # always followed
    bootstraps: tuple[NodeAddress, ...] = ()  # members that know the others
    psk: bytes | None = field(default=None, repr=False)
    accepted_psks: tuple[bytes, ...] = field(default=(), repr=False)
    scope: Scope | None = None  # None: as far as the addresses say
    identity: Identity | None = field(default=None, repr=False)
    allow: Callable[[NodeId, Capabilities], bool] | None = None
    token: bytes = field(default=b"", repr=False)
    moved: bytes = b""  # a statement that the identity was another before
    tls: Tls | None = field(default=None, repr=False)  # around links; None: plain websockets
    pad: bool = False
    state_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class JoinedNetwork:
    """An open network with the switchboard that dispatches for chains."""

    network: Network
    switchboard: Switchboard

    @property
    def directory(self) -> LiveDirectory:
        return self.network.directory


@contextlib.asynccontextmanager
async def open_network(settings: MemberSettings) -> AsyncIterator[JoinedNetwork]:
    """Join, and leave the links closed on the way out. Does not wait for anybody: see `Network.first_look`.

    Raises SettingsError for addresses that cannot be used.
    """
    network = Network(
        settings.identity or Identity.generate(),
        NetworkSettings(
            settings.network_id,
            psk=settings.psk,
            accepted_psks=settings.accepted_psks,
            bootstraps=settings.bootstraps,
            nodes=settings.nodes,
            scope=settings.scope,
            allow=settings.allow,
            token=settings.token,
            moved=settings.moved,
            tls=settings.tls,
            pad=settings.pad,
            state_dir=settings.state_dir,
        ),
    )
    switchboard = Switchboard()
    switchboard.connect(network.endpoint, network.directory)
    network.dispatcher.add(switchboard, (Answer, Failure, Opened, Resumed, Standing))
    network.directory.in_use = switchboard.is_in_use
    async with network.running():
        try:
            yield JoinedNetwork(network, switchboard)
        finally:
            await switchboard.close()
