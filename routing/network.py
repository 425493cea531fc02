"""One identity's place in a swarm: endpoint, gossip, reachability, relay and directory, built and run as one.

Used alike by nodes, sentinels and gateways; whoever has work for its links adds itself to the dispatcher. Knows
nothing of sessions, models' weights or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping

from routing.address_policy import AddressPolicy, Scope, scope_of
from routing.allow_list import AllowList
from routing.announcement import Announcement
from routing.announcer import Announcer
from routing.background import Background
from routing.bandwidth_check import BandwidthCheck
from routing.directory import LiveDirectory
from routing.dispatcher import Dispatcher
from routing.endpoint import Endpoint
from routing.errors import RemoteError, SettingsError
from routing.gossip import Gossip, GossipFault
from routing.identity import Identity
from routing.known_peers import KnownPeers
from routing.link import Link
from routing.liveness import Liveness
from routing.neighbourhood import Neighbourhood
from routing.network_settings import NetworkSettings, Offering, resolved, resolved_place
from routing.network_status import NetworkStatus, status_of
from routing.presence import Presence, neighbours
from routing.reach import Prober, Reachability, Verdict
from routing.reach_check import ReachCheck
from routing.relay import RelayServer
from routing.reservations import Reservations
from routing.sentinels import Sentinels
from routing.suspicion import Suspicion
from routing.types import (
    Description,
    Digest,
    Message,
    NodeAddress,
    NodeId,
    PingReport,
    PingRequest,
    Probe,
    Probed,
    Pull,
    Records,
    WireDtype,
)

logger = logging.getLogger(__name__)

RELAY_AFTER_S = 3.0  # a node that nobody has dialled back by then asks for a relay too
NUM_RESERVATIONS = 2
FLUSH_S = 0.5
SAVE_EVERY_S = 60.0

__all__ = ["Network", "NetworkSettings", "Offering"]


class Network:
    """A member of a swarm, or a guest that only looks (`offering` None, no sentinel): gateways are such.

    `offering` is asked on the event loop whenever something is announced. `clock` is unix time in seconds. Parts that
    depend on resolved addresses (`gossip`, `reachability`, `relay`, ...) are there after `start`.
    """

    def __init__(
        self,
        identity: Identity,
        settings: NetworkSettings,
        *,
        seal_key: bytes = b"",
        dtypes: tuple[WireDtype, ...] = (WireDtype.FLOAT32,),
        offering: Callable[[], Offering] | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads load and timing, no secret
        self._background = Background()
        self._started_at: float | None = None
        self._told: tuple[NodeAddress, ...] = ()
        self._present: set[NodeId] = set()  # members, as the log has them
        self._presence = Presence(
            identity, settings, seal_key=seal_key, dtypes=dtypes, offering=offering, clock=clock
        )
        self.node_id = identity.node_id
        self.bound: tuple[str, int] | None = None
        self.on_contacts: list[
            Callable[[tuple[NodeAddress, ...]], None]
        ] = []  # others are told other addresses
        self.dispatcher = Dispatcher()
        self.endpoint = Endpoint(
            identity,
            settings.network_id,
            self._presence.capabilities,
            self.dispatcher,
            psk=settings.psk,
            accepted_psks=settings.accepted_psks,
            pad=settings.pad,
            allow=settings.allow,
            tls=settings.tls,
        )
        interests: frozenset[bytes] | None = frozenset() if self._presence.is_member else None
        self.directory = LiveDirectory(self.endpoint, settings.nodes, interests=interests)
        self.dispatcher.add(self.directory, (Description,))
        state_dir = settings.state_dir if self._presence.is_member else None  # guests have a new id each time
        self.known = KnownPeers(state_dir, identity.node_id)
        self.relay: RelayServer | None = None
        self.reservations: Reservations | None = None

    # --- from start to end

    async def start(self) -> tuple[str, int] | None:
        """Bind and build; return what was bound. Waits for no peer.

        Raises `SettingsError` for a public address that does not resolve or that nobody in this swarm would take,
        `LinkError` where the address cannot be bound.
        """
        settings = self._settings
        self._bootstraps = [await resolved(address) for address in settings.bootstraps]
        self._public = await resolved_place(settings.public_addr)
        self.endpoint.trusted |= {address.node_id for address in (*self._bootstraps, *settings.nodes)}
        if settings.listen is not None:
            self.bound = await self.endpoint.listen(*settings.listen)
        self.policy = AddressPolicy(settings.scope or self._guess_scope(), settings.is_private_swarm)
        self._check_public()
        self._build_membership()
        self._build_reach()
        self._build_relay()
        self.directory.connect(self.neighbourhood)
        self._started_at = time.monotonic()
        return self.bound

    async def run(self) -> None:
        """Take part until cancelled; `start` first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.neighbourhood.run())
                tasks.create_task(self.liveness.run())
                tasks.create_task(self.reach_check.run())
                tasks.create_task(self.directory.run())
                tasks.create_task(self._save_now_and_then())
                if self._presence.is_member:
                    tasks.create_task(self.announcer.run())
                    tasks.create_task(self.bandwidth_check.run())
                if self.reservations is not None:
                    tasks.create_task(self._wait_for_dial_back())
                    tasks.create_task(self.reservations.run())
                if self._settings.tls is not None:
                    tasks.create_task(self._settings.tls.watch())
                if isinstance(self._settings.allow, AllowList):
                    tasks.create_task(self._settings.allow.watch(self.endpoint))
        finally:
            await self._background.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Network]:
        """Start, run beside the caller's block, and close. Does not leave: see `leave`."""
        try:
            await self.start()
            running = asyncio.create_task(self.run())
            running.add_done_callback(_tell_bug)
            try:
                yield self
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            await self.close()

    async def first_look(self, timeout_s: float) -> None:
        """Wait until a peer told what it knows and every node followed was tried, or until that will not happen."""
        ends_at = time.monotonic() + timeout_s
        if self._bootstraps:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.neighbourhood.first_word()
        await self.directory.first_look(max(0.0, ends_at - time.monotonic()))

    @property
    def contacts(self) -> tuple[NodeAddress, ...]:
        """The addresses of ours that others are told now."""
        return self._told

    @property
    def lines(self) -> Mapping[bytes, float]:
        """What lines from our neighbours bring us, Mbit/s by id prefix, as others are told now."""
        told = self.announcer.announced if self._started_at is not None else None
        return {} if told is None else dict(told.neighbour_mbps)

    def announce(self) -> None:
        """The offering changed: say so soon; for figures alone within five seconds."""
        if self._started_at is not None:
            self.announcer.wake()

    async def leave(self) -> None:
        """Tell everybody that we are gone on purpose; announce and dial nothing afterwards."""
        if self._started_at is None:
            return
        self.neighbourhood.leave()
        tombstone = self.announcer.leave()
        if tombstone is not None:
            last_word = Records((tombstone,))
            await asyncio.gather(*(_send_last(link, last_word) for link in self.endpoint.links))

    async def close(self) -> None:
        """Close every link; remember peers."""
        await self._background.close()
        if self.relay is not None:
            await self.relay.close()
        await self.endpoint.close()
        self.known.save()

    # --- building

    def _guess_scope(self) -> Scope:
        places = [self._settings.listen, self._public, self.bound]
        hosts = [address.host for address in (*self._bootstraps, *self._settings.nodes)]
        return scope_of([*hosts, *(place[0] for place in places if place is not None)])

    def _check_public(self) -> None:
        if self._public is None:
            return
        host, port = self._public
        fault = self.policy.check(host, port or (self.bound[1] if self.bound else 0))
        if fault is not None:
            raise SettingsError(
                f"the public address {host} {fault} (scope {self.policy.scope}): give the one that others dial, or none"
            )

    def _build_membership(self) -> None:
        network_id = self._settings.network_id
        self.suspicion = Suspicion(self.node_id, rng=self._rng, now=time.monotonic)
        self.gossip = Gossip(
            self.node_id,
            network_id,
            self.policy,
            rng=self._rng,
            now=self._clock,
            pinned=frozenset(address.node_id for address in self._bootstraps),
            on_doubt=self.suspicion.doubt,
            on_change=self._note_record,
            on_rival=self._note_rival,
        )
        self.neighbourhood = Neighbourhood(
            self.endpoint,
            self.gossip,
            self.suspicion,
            self._background,
            self.known,
            bootstraps=self._bootstraps,
            is_reachable=lambda: self.reachability.verdict is Verdict.PUBLIC,
            on_change=self._on_members,
            clock=self._clock,
            rng=self._rng,
        )
        self.liveness = Liveness(
            self.endpoint,
            self.suspicion,
            self._background,
            ways=self.neighbourhood.ways,
            sequence=self.neighbourhood.sequence_of,
            end_doubt=self.gossip.end_doubt,
            tell=lambda node_id: self.neighbourhood.send(self.gossip.tell_doubt(node_id)),
            on_change=self.directory.refresh,
        )
        self.neighbourhood.liveness = self.liveness
        self.dispatcher.add(self.neighbourhood, (Digest, Pull, Records))
        self.dispatcher.add(self.liveness, (PingRequest, PingReport))
        self.bandwidth_check = BandwidthCheck(self.endpoint, lambda: self.gossip.announcements, rng=self._rng)
        if self._presence.is_member:
            self.dispatcher.add(self.bandwidth_check, BandwidthCheck.KINDS)
        self.announcer = Announcer(
            self._identity,
            network_id,
            self.policy,
            self.known,
            compose=self._compose,
            publish=self._publish,
            clock=self._clock,
        )

    def _build_reach(self) -> None:
        public = self._public
        self.reachability = Reachability(
            is_strict=self.policy.has_prefix_caps,
            accepts=lambda host, port: self.policy.check(host, port) is None,
            public_host=public[0] if public is not None else None,
        )
        self._sentinels = Sentinels(self.endpoint, self.neighbourhood, self._bootstraps)
        self.reach_check = ReachCheck(
            self.reachability,
            lambda: self._sentinels.probers(self.reachability),
            lambda: self._port_to_prove,
            self._on_reach,
            clock=self._clock,
        )
        self.prober = Prober(self.endpoint, self._background, clock=self._clock)
        self.dispatcher.add(self.reach_check, (Probed,))
        self.dispatcher.add(self.prober, (Probe,))  # guests too: see `Sentinels.probers`
        if self._settings.is_sentinel and public is not None and not self._bootstraps:
            self.reachability.granted = (public[0], self._port_to_prove)

    def _build_relay(self) -> None:
        settings = self._settings
        if settings.is_sentinel:
            self.relay = RelayServer(
                self._identity,
                settings.network_id,
                self.endpoint,
                limits=settings.relay_limits,
                alternatives=self._sentinels.announced,
            )
            self.dispatcher.add(self.relay, RelayServer.KINDS)
        elif self.bound is not None or self._presence.serves:
            self.reservations = Reservations(
                self.endpoint,
                lambda: self._sentinels.for_relay() if self._wants_relay else [],
                count=NUM_RESERVATIONS,
                may_dial=lambda address: self.policy.check(address.host, address.port) is None,
                on_change=self.announcer.wake,
            )
            self.dispatcher.add(self.reservations, Reservations.KINDS)

    # --- what the parts tell each other

    def _note_record(self, node_id: NodeId, told: Announcement | None) -> None:
        """Before doubts of the same record are told: whoever comes anew is known to the suspicions then."""
        if told is None:
            self.suspicion.forget(node_id)
        else:
            self.suspicion.note_record(node_id, told.sequence)
        if (told is not None) is not (node_id in self._present):
            (self._present.discard if told is None else self._present.add)(node_id)
            verb = "has left" if told is None else "has joined"
            logger.info("node %s %s", node_id.hex()[:8], verb, extra={"node": node_id.hex()[:8]})

    def _compose(self) -> Announcement:
        contacts = self._presence.contacts(self.reachability, self.reservations, self.policy)
        return self._presence.compose(contacts, neighbours(self.endpoint, self.gossip))

    def _publish(self, record: bytes) -> None:
        self.neighbourhood.send(self.gossip.publish(record))
        own = self.gossip.announcements.get(self.node_id)  # None: a tombstone
        told = tuple(it.address for it in own.contacts) if own is not None else ()
        if told != self._told:
            self._told = told
            for tell in self.on_contacts:
                tell(told)

    def _note_rival(self, sequence: int) -> None:
        if self.has_rival:
            logger.error("another process announces itself with our key: give each node a key of its own")
        self.announcer.note_rival(sequence)

    @property
    def has_rival(self) -> bool:
        return self.gossip.faults[GossipFault.TWO_NODES_ONE_KEY] > 0

    def _on_members(self) -> None:
        self.reach_check.wake()
        self.directory.refresh()

    def _on_reach(self) -> None:
        self.announcer.wake()
        if self.reservations is not None:
            self.reservations.wake()

    @property
    def _port_to_prove(self) -> int:
        public_port = self._public[1] if self._public is not None else 0
        return 0 if self.bound is None else public_port or self.bound[1]

    @property
    def _wants_relay(self) -> bool:
        verdict = self.reachability.verdict
        age_s = time.monotonic() - (self._started_at or time.monotonic())
        is_late = age_s >= RELAY_AFTER_S or self.bound is None
        return verdict is Verdict.PRIVATE or (verdict is Verdict.UNKNOWN and is_late)

    async def _wait_for_dial_back(self) -> None:
        await asyncio.sleep(RELAY_AFTER_S)
        self._on_reach()

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self.known.save()

    # --- looking

    def status(self) -> NetworkStatus:
        """What we see now."""
        return status_of(self, now_ms=self._clock() * 1000)


def _tell_bug(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.critical("the network has stopped", exc_info=error)


async def _send_last(link: Link, message: Message) -> None:
    with contextlib.suppress(RemoteError, TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await link.send(message)
