"""Hundreds of gossiping peers on one heap of events, with made-up time, latency, loss and partitions.

The real `Gossip` and `Suspicion`; links, pings and dials are events. Records are signed and verified for real,
each content once for the whole world.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from routing.address_policy import AddressPolicy, Scope
from routing.announcement import (
    Announcement,
    Contact,
    RecordRefused,
    Refusal,
    next_sequence,
    read_announcement,
    sign_announcement,
)
from routing.gossip import Gossip, GossipLimits, Send
from routing.identity import Identity
from routing.suspicion import PING_TIMEOUT_S, AskOthers, Ping, Refuted, Suspected, Suspicion
from routing.types import Digest, Message, NodeAddress, NodeId, Pull, Records, SliceOffer

NETWORK_ID = b"n" * 32
POLICY = AddressPolicy(Scope.LOOPBACK)
EPOCH_S = 1_700_000_000.0
# Records live as long as they may and are renewed rarely: renewals cost most of the time and show nothing new.
LIFETIME_S, REFRESH_S = 600.0, 400.0
Place = tuple[str, int]


@dataclass
class Weather:
    """What the network does to each message."""

    latency_s: tuple[float, float] = (0.005, 0.1)
    loss: float = 0.0
    duplicates: float = 0.0


class CachedReader:
    """`read_announcement`, with each content's signature verified once for all peers."""

    def __init__(self) -> None:
        self._known: dict[bytes, Announcement] = {}

    def __call__(
        self,
        content: bytes,
        network_id: bytes,
        policy: AddressPolicy,
        *,
        now_ms: int,
        known_sequence: int = -1,
    ) -> Announcement:
        announcement = self._known.get(content)
        if announcement is None:
            announcement = read_announcement(content, network_id, policy, now_ms=now_ms)
            self._known[content] = announcement
        if announcement.sequence <= known_sequence:
            raise RecordRefused(Refusal.REPLAYED)
        if announcement.expires_ms <= now_ms:
            raise RecordRefused(Refusal.EXPIRED)
        return announcement


class World:
    """Peers, their links and the time."""

    def __init__(
        self, seed: int, weather: Weather | None = None, *, degree: int = 8, refresh_s: float = REFRESH_S
    ) -> None:
        self.rng = random.Random(seed)
        self.weather = weather or Weather()
        self.degree = degree
        self.refresh_s = refresh_s
        self.now = EPOCH_S
        self.read = CachedReader()
        self.peers: dict[NodeId, SimPeer] = {}  # those that run
        self.places: dict[Place, SimPeer] = {}
        self.sequences: dict[NodeId, int] = {}  # what each node keeps on disk
        self.group_of: Callable[[NodeId], object] = lambda _: None  # peers of different groups are cut off
        self.num_sent: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ports = itertools.count(10_000)

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def run(self, duration_s: float) -> None:
        """Let time pass."""
        end = self.now + duration_s
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def run_until(self, is_so: Callable[[], bool], limit_s: float, *, step_s: float = 0.25) -> float:
        """Let time pass until something is so; return how long that took, infinity when it was not."""
        began = self.now
        while not is_so():
            if self.now - began >= limit_s:
                return float("inf")
            self.run(step_s)
        return self.now - began

    def start(
        self, identity: Identity | None = None, place: Place | None = None, *, announces: bool = True
    ) -> SimPeer:
        """Start a peer that knows two running ones."""
        peer = SimPeer(self, identity or Identity.generate(), place or ("127.0.0.1", next(self._ports)))
        bootstraps = self.rng.sample(sorted(self.peers), min(2, len(self.peers)))
        self.peers[peer.node_id] = peer
        self.places[peer.place] = peer
        if announces:
            peer.announce()
        peer.bootstraps = bootstraps
        for bootstrap in bootstraps:
            peer.dial(bootstrap)
        peer.wake()
        return peer

    def populate(self, count: int) -> list[SimPeer]:
        """Start many peers that know each other's records and have their links already."""
        peers = [SimPeer(self, Identity.generate(), ("127.0.0.1", next(self._ports))) for _ in range(count)]
        for peer in peers:
            self.peers[peer.node_id] = peer
            self.places[peer.place] = peer
            peer.announce(age_s=self.rng.uniform(0, self.refresh_s))
        records = [peer.gossip.record_of(peer.node_id) for peer in peers]
        entries = [
            (record, self.read(record, NETWORK_ID, POLICY, now_ms=self.now_ms))
            for record in records
            if record
        ]
        for peer in peers:
            for record, announcement in entries:
                if announcement.node_id != peer.node_id:
                    peer.gossip._put(record, announcement)
            while len(peer.links) < min(self.degree, count - 1):
                self.link(peer, self.rng.choice(peers))
        for peer in peers:
            peer.wake()
        return peers

    def link(self, one: SimPeer, other: SimPeer) -> None:
        """Join two peers by a link that is up at once."""
        if one is not other and one.links.get(other.node_id) is not other:
            one.link_up(other)
            other.link_up(one)

    def kill(self, peer: SimPeer) -> None:
        """End a process: its links close, its port refuses."""
        peer.is_running = False
        if self.peers.get(peer.node_id) is peer:
            del self.peers[peer.node_id]
        if self.places.get(peer.place) is peer:
            del self.places[peer.place]
        for other_id, other in peer.links.items():
            if self.are_joined(peer.node_id, other_id):
                self.at(self.latency(), lambda other=other: other.link_lost(peer))

    def leave(self, peer: SimPeer) -> None:
        """End a process that says so first."""
        peer.announce(has_left=True)
        self.at(0.2, lambda: self.kill(peer))

    def cut(self, group_of: Callable[[NodeId], object]) -> None:
        """Part the world; links across break (after a heartbeat's time)."""
        self.group_of = group_of
        for peer in list(self.peers.values()):
            for other_id, other in peer.links.items():
                if not self.are_joined(peer.node_id, other_id):
                    self.at(self.rng.uniform(5, 10), lambda peer=peer, other=other: peer.link_lost(other))

    def are_joined(self, one: NodeId, other: NodeId) -> bool:
        return self.group_of(one) == self.group_of(other)

    @property
    def is_agreed(self) -> bool:
        """Whether every running peer would route to exactly the other running ones."""
        running = set(self.peers)
        return all(peer.routable == running - {peer.node_id} for peer in self.peers.values())

    def latency(self) -> float:
        return self.rng.uniform(*self.weather.latency_s)

    def send(self, sender: SimPeer, target_id: NodeId, message: Message) -> None:
        """Carry a message over a link, as the weather is."""
        self.num_sent[type(message).__name__] += 1
        for _ in range(1 + (self.rng.random() < self.weather.duplicates)):
            if self.rng.random() >= self.weather.loss:
                self.at(self.latency(), lambda: self._deliver(sender, target_id, message))

    def probe(self, prober: SimPeer, place: Place, expected: NodeId, done: Callable[[str], None]) -> None:
        """Dial a place and see who is there: "alive", "other", "refused", or nothing at all."""
        delay_s = 2 * self.latency()

        def look() -> None:
            there = self.places.get(place)
            if there is not None and not self.are_joined(prober.node_id, there.node_id):
                return
            if there is None:
                outcome = "refused" if self.are_joined(prober.node_id, expected) else ""
            elif there.is_frozen:
                outcome = ""
            else:
                outcome = "alive" if there.node_id == expected else "other"
            if outcome and prober.is_running:
                done(outcome)

        self.at(delay_s, look)

    @property
    def now_ms(self) -> int:
        return int(self.now * 1000)

    def clock(self) -> float:
        return self.now

    def _deliver(self, sender: SimPeer, target_id: NodeId, message: Message) -> None:
        target = self.peers.get(target_id)
        if target is None or target.is_frozen or not self.are_joined(sender.node_id, target_id):
            return
        if target.links.get(sender.node_id) is sender:
            target.receive(sender.node_id, message)


@dataclass(eq=False)
class SimPeer:
    """One process: its gossip, its suspicion and its links."""

    world: World
    identity: Identity
    place: Place
    limits: GossipLimits = field(default_factory=GossipLimits)

    def __post_init__(self) -> None:
        world = self.world
        self.node_id = self.identity.node_id
        self.rng = random.Random(world.rng.random())
        self.suspicion = Suspicion(self.node_id, rng=self.rng, now=world.clock)
        self.gossip = Gossip(
            self.node_id,
            NETWORK_ID,
            POLICY,
            rng=self.rng,
            now=world.clock,
            limits=self.limits,
            on_rival=self._outsign,
            on_doubt=self.suspicion.doubt,
            on_change=self._note_change,
            read=world.read,
        )
        self.links: dict[NodeId, SimPeer] = {}  # to which process of a node
        self.bootstraps: list[NodeId] = []
        self.offers: tuple[SliceOffer, ...] = ()
        self.is_running = True
        self.is_frozen = False
        self._announced_at = world.now
        self._is_announcing = False
        self._wakes_at = float("inf")

    @property
    def routable(self) -> set[NodeId]:
        """Whom this peer would route to: announced, and not suspected."""
        return set(self.gossip.announcements) - self.suspicion.suspected - {self.node_id}

    def announce(self, *, age_s: float = 0.0, has_left: bool = False) -> None:
        """Sign and spread a record of this peer."""
        now_ms = self.world.now_ms - int(age_s * 1000)
        sequence = next_sequence(self.world.sequences.get(self.node_id, 0), now_ms)
        self.world.sequences[self.node_id] = sequence
        contacts = () if has_left else (Contact(NodeAddress(self.node_id, *self.place)),)
        announcement = Announcement(
            self.identity.public_key,
            sequence,
            now_ms,
            now_ms + int(LIFETIME_S * 1000),
            contacts,
            offers=self.offers,
            has_left=has_left,
        )
        self._announced_at = self.world.now - age_s
        self._is_announcing = not has_left
        self._send(self.gossip.publish(sign_announcement(self.identity, NETWORK_ID, announcement, POLICY)))

    def dial(self, target_id: NodeId) -> None:
        """Dial a peer; the link is up one round trip later, if it lives."""
        target = self.world.peers.get(target_id)
        if target is None:
            return

        def arrive() -> None:
            is_there = self.world.peers.get(target_id) is target and not target.is_frozen
            if is_there and self.is_running and self.world.are_joined(self.node_id, target_id):
                self.world.link(self, target)

        self.world.at(2 * self.world.latency(), arrive)

    def link_up(self, peer: SimPeer) -> None:
        self.links[peer.node_id] = peer
        self.suspicion.note_link(peer.node_id)
        self._send(self.gossip.peer_up(peer.node_id))
        self.wake()

    def link_lost(self, peer: SimPeer) -> None:
        """A link broke: forget it, and dial once more at once."""
        if self.links.get(peer.node_id) is not peer or not self.is_running:
            return
        del self.links[peer.node_id]
        self.suspicion.note_unlink(peer.node_id)
        self.gossip.peer_down(peer.node_id)
        known = self.gossip.announcements.get(peer.node_id)
        if known is not None:
            address = known.contacts[0].address

            def seen(outcome: str) -> None:
                if outcome == "alive":
                    self.suspicion.note_alive(peer.node_id)
                else:
                    self.suspicion.note_failed(peer.node_id, known.sequence)
                self.wake()

            self.world.probe(self, (address.host, address.port), peer.node_id, seen)
        self.wake()

    def receive(self, peer_id: NodeId, message: Message) -> None:
        assert isinstance(message, (Digest, Pull, Records))
        self._send(self.gossip.receive(peer_id, message))
        self.wake()

    def wake(self) -> None:
        """Make sure that the next tick comes when it is due."""
        if not self.is_running:
            return
        due = min(self.gossip.next_tick, self.suspicion.next_tick, self._announced_at + self.world.refresh_s)
        if due < self._wakes_at:
            self._wakes_at = due
            self.world.at(max(0.0, due - self.world.now), lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if due != self._wakes_at or not self.is_running:
            return
        self._wakes_at = float("inf")
        if not self.is_frozen:
            if self.world.now >= self._announced_at + self.world.refresh_s:
                self._announced_at = self.world.now
                if self._is_announcing:
                    self.announce()
            self._send(self.gossip.tick())
            self._act()
            self._seek_links()
            self.wake()
        else:
            self._wakes_at = self.world.now + 1.0
            self.world.at(1.0, lambda: self._tick(self._wakes_at))

    def _act(self) -> None:
        for action in self.suspicion.tick():
            match action:
                case Ping(node_id):
                    self._probe(node_id)
                case AskOthers(node_id, via):
                    for helper_id in via:
                        self._ask(helper_id, node_id)
                case Suspected(node_id):
                    self._send(self.gossip.tell_doubt(node_id))
                case Refuted(node_id):
                    self.gossip.end_doubt(node_id)

    def _seek_links(self) -> None:
        if len(self.links) < self.world.degree:
            strangers = sorted(self.routable - self.links.keys()) or self.bootstraps
            if strangers:
                self.dial(self.rng.choice(strangers))

    def _probe(self, node_id: NodeId) -> None:
        known = self.gossip.announcements.get(node_id)
        if known is None:
            return

        def seen(outcome: str) -> None:
            if outcome == "alive":
                self.suspicion.note_alive(node_id)
            elif outcome == "other":
                self.suspicion.note_failed(node_id, known.sequence)
            else:
                self.suspicion.note_unanswered(node_id)
            self.wake()

        address = known.contacts[0].address
        self.world.probe(self, (address.host, address.port), node_id, seen)

    def _ask(self, helper_id: NodeId, target_id: NodeId) -> None:
        self.world.num_sent["PingRequest"] += 1
        helper = self.world.peers.get(helper_id)
        known = self.gossip.announcements.get(target_id)
        if helper is None or known is None or helper.is_frozen:
            return
        address = known.contacts[0].address

        answered: list[bool] = []

        def back(is_alive: bool) -> None:
            def told() -> None:
                if self.is_running:
                    self.suspicion.note_report(target_id, is_alive=is_alive)
                    self.wake()

            if not answered and helper.is_running and self.world.are_joined(self.node_id, helper_id):
                answered.append(is_alive)
                self.world.at(self.world.latency(), told)

        def look() -> None:
            place = address.host, address.port
            self.world.probe(helper, place, target_id, lambda outcome: back(outcome == "alive"))
            self.world.at(PING_TIMEOUT_S, lambda: back(is_alive=False))

        self.world.at(self.world.latency(), look)

    def _note_change(self, node_id: NodeId, announcement: Announcement | None) -> None:
        if announcement is None:
            self.suspicion.forget(node_id)
        else:
            self.suspicion.note_record(node_id, announcement.sequence)

    def _outsign(self, sequence: int) -> None:
        self.world.sequences[self.node_id] = max(sequence, self.world.sequences.get(self.node_id, 0))
        self.announce()

    def _send(self, sends: list[Send]) -> None:
        for peer_id, message in sends:
            self.world.send(self, peer_id, message)
