"""The sentinel's side of relaying: who holds a reservation, and circuits from diallers to them.

A reservation lives as long as its link. Nobody is kicked: an identity may hold several, the newest is used and
the older ones stand in. Passes bytes on; cannot read them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from routing.admission import TokenBucket
from routing.announcement import sign_voucher
from routing.endpoint import STALE_AFTER_S, Endpoint
from routing.errors import ErrorCode, RelayError, RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.metered_port import MeteredPort
from routing.splice import Half, Splice
from routing.types import (
    Buffer,
    GoAway,
    Incoming,
    Message,
    NodeAddress,
    NodeId,
    Refused,
    RelayOpen,
    Reserve,
    Reserved,
)

logger = logging.getLogger(__name__)

MIN_TTL_S = 10
_RETRY_MS = 250  # transport.md 5.7: a node that lost its link is back within the second
_MAX_WAITING = 256 << 10  # B of answers that a link does not take: then it floods us


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a sentinel gives (transport.md 5.6)."""

    rate: float = float(4 << 20)  # B a second that one link may have passed on
    burst: float = float(8 << 20)
    max_bytes: int = 8 << 30  # of one circuit, both directions
    max_s: int = 3600
    max_circuits_per_identity: int = 128
    max_circuits: int = 1024
    max_queued_bytes: int = 256 << 20  # of all circuits; no new ones above
    max_reservations: int = 4096
    max_ttl_s: int = 600
    answer_s: float = 5.0  # a node must answer a new circuit
    asks_per_s: float = 20.0  # circuits and reservations that one link may ask for
    asks_burst: float = 128.0


@dataclass(slots=True)
class _Reservation:
    link: Link
    expires_s: float


class RelayServer:
    """A `LinkReceiver` for `RelayServer.KINDS`. `alternatives` names other sentinels to who is sent away."""

    KINDS: tuple[type[Message], ...] = (Reserve, RelayOpen)

    def __init__(
        self,
        identity: Identity,
        network_id: bytes,
        endpoint: Endpoint,
        *,
        limits: RelayLimits | None = None,
        now: Callable[[], float] = time.time,
        alternatives: Callable[[], Sequence[NodeAddress]] = tuple,
    ) -> None:
        self._identity = identity
        self._network_id = network_id
        self._endpoint = endpoint
        self._limits = limits or RelayLimits()
        self._now = now
        self._alternatives = alternatives
        self._held: dict[NodeId, list[_Reservation]] = {}  # newest link first
        self._ports: dict[Link, MeteredPort] = {}
        self._buckets: dict[Link, TokenBucket] = {}
        self._circuits: dict[Splice, asyncio.TimerHandle] = {}
        self._per_identity: Counter[NodeId] = Counter()
        self._parties: dict[Splice, tuple[NodeId, NodeId]] = {}
        self._past_bytes = 0
        self._is_closing = False
        self.tap: Callable[[Buffer], None] | None = None  # shown every body, for tests
        self.circuits_opened = 0
        self.superseded = 0
        self.refused: Counter[str] = Counter()  # by error code name

    @property
    def limits(self) -> RelayLimits:
        """What it gives at most."""
        return self._limits

    @property
    def num_circuits(self) -> int:
        """Circuits that live now."""
        return len(self._circuits)

    @property
    def num_reservations(self) -> int:
        """Links that hold a reservation."""
        return sum(len(held) for held in self._held.values())

    @property
    def bytes_passed(self) -> int:
        """Bodies' bytes taken from circuits since the start."""
        return self._past_bytes + sum(splice.num_bytes for splice in self._circuits)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be passed on."""
        halves = [half for splice in self._circuits for half in (splice.near, splice.far) if half]
        return sum(half.queued_bytes for half in halves)

    def holds(self, node_id: NodeId) -> bool:
        """Whether a circuit to the node would be tried now."""
        return self._way_to(node_id) is not None

    async def close(self) -> None:
        """Send everybody away, naming other sentinels. Circuits live on until the endpoint is closed."""
        self._is_closing = True
        alternatives = tuple(self._alternatives())
        for link in self._endpoint.links:
            self._post(link, GoAway(int(ErrorCode.GOING_AWAY), 0, alternatives))

    # link.LinkReceiver

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case Reserve():
                self._reserve(link, message)
            case RelayOpen():
                self._open(link, message)

    def on_link_up(self, link: Link) -> None:
        pass

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        self._buckets.pop(link, None)
        if (port := self._ports.pop(link, None)) is not None:
            port.close()
        held = [kept for kept in self._held.get(link.peer_id, ()) if kept.link is not link]
        if held:
            self._held[link.peer_id] = held
        else:
            self._held.pop(link.peer_id, None)

    # --- reservations

    def _reserve(self, link: Link, message: Reserve) -> None:
        code = self._no_reservation_because(link)
        if code is not None:
            self.refused[code.name] += 1
            self._post(link, Reserved(int(code)))
            return
        ttl_s = min(max(message.ttl_s, MIN_TTL_S), self._limits.max_ttl_s)
        expires_s = self._now() + ttl_s
        self._keep(link, expires_s)
        expires_ms = int(expires_s * 1000)
        voucher = sign_voucher(self._identity, self._network_id, link.peer_id, expires_ms)
        self._post(link, Reserved(0, expires_ms, self._limits.max_bytes, self._limits.max_s, voucher))

    def _no_reservation_because(self, link: Link) -> ErrorCode | None:
        if self._is_closing:
            return ErrorCode.GOING_AWAY
        if not self._may_ask(link):
            return ErrorCode.QUOTA
        if link.is_relayed:
            return ErrorCode.NOT_ALLOWED
        is_new = all(kept.link is not link for kept in self._held.get(link.peer_id, ()))
        if is_new and self.num_reservations >= self._limits.max_reservations:
            return ErrorCode.RELAY_FULL
        return None

    def _keep(self, link: Link, expires_s: float) -> None:
        held = self._held.setdefault(link.peer_id, [])
        for kept in held:
            if kept.link is link:  # a refresh: an older link does not push itself forward
                kept.expires_s = expires_s
                return
        for older in held:
            self.superseded += 1
            logger.warning(
                "node %s holds a second reservation: it lost a link, or two nodes use one key",
                link.peer_id.hex()[:8],
            )
            self._post(older.link, GoAway(int(ErrorCode.SUPERSEDED)))
        held.insert(0, _Reservation(link, expires_s))

    def _way_to(self, node_id: NodeId) -> Link | None:
        """The newest link with a reservation, but one that fell silent only when there is no other."""
        links = [link for link in self._live_links(node_id) if link.side.has_room]
        return min(links, key=lambda link: link.silent_for_s >= STALE_AFTER_S, default=None)

    def _live_links(self, node_id: NodeId) -> list[Link]:
        held, now = self._held.get(node_id, ()), self._now()
        return [kept.link for kept in held if kept.expires_s > now and not kept.link.is_closed]

    # --- circuits

    def _open(self, link: Link, message: RelayOpen) -> None:
        way = self._way_to(message.target)
        code = self._no_circuit_because(link, message.target, way)
        if code is None and way is not None:
            self._join(link, way, message)
            return
        code = code or ErrorCode.NO_RESERVATION
        self.refused[code.name] += 1
        link.side.settle()
        retry_ms = 0 if code is ErrorCode.NO_RESERVATION else _RETRY_MS
        self._post(link, Refused(message.channel, int(code), retry_ms))

    def _no_circuit_because(self, link: Link, target: NodeId, way: Link | None) -> ErrorCode | None:
        if self._is_closing:
            return ErrorCode.GOING_AWAY
        if not self._may_ask(link):
            return ErrorCode.QUOTA
        if link.is_relayed:
            return ErrorCode.NOT_ALLOWED
        if way is None:
            return ErrorCode.RELAY_FULL if self._live_links(target) else ErrorCode.NO_RESERVATION
        most = max(self._per_identity[link.peer_id], self._per_identity[target])
        is_full = (
            not link.side.has_room
            or most >= self._limits.max_circuits_per_identity
            or len(self._circuits) >= self._limits.max_circuits
            or self.queued_bytes > self._limits.max_queued_bytes
        )
        return ErrorCode.RELAY_FULL if is_full else None

    def _may_ask(self, link: Link) -> bool:
        now = asyncio.get_running_loop().time()
        bucket = self._buckets.get(link)
        if bucket is None:
            bucket = TokenBucket(self._limits.asks_per_s, self._limits.asks_burst, now)
            self._buckets[link] = bucket
        return bucket.take(now)

    def _join(self, link: Link, way: Link, message: RelayOpen) -> None:
        splice = Splice(self._over, max_bytes=self._limits.max_bytes, tap=self.tap)
        near, far = Half(splice, self._port(link)), Half(splice, self._port(way))
        splice.join(near, far)
        if self.tap is not None:
            self.tap(message.first)
        near.attach(link.side.claim(message.channel, near))
        first = message.first
        try:
            far.attach(way.side.open(lambda number: Incoming(number, link.peer_id, first), far))
        except RelayError as error:  # a node that dials itself had room for one of the two
            splice.fail(int(error.code))
            return
        self._parties[splice] = (link.peer_id, message.target)
        self._per_identity.update(self._parties[splice])
        self.circuits_opened += 1
        loop = asyncio.get_running_loop()
        self._circuits[splice] = loop.call_later(self._limits.answer_s, partial(self._check_answer, splice))
        way.pump()

    def _check_answer(self, splice: Splice) -> None:
        if not splice.is_answered:
            self.refused[ErrorCode.TIMEOUT.name] += 1
            splice.fail(int(ErrorCode.PEER_GONE))
            return
        left_s = max(0.0, self._limits.max_s - self._limits.answer_s)
        loop = asyncio.get_running_loop()
        self._circuits[splice] = loop.call_later(left_s, splice.fail, int(ErrorCode.QUOTA))

    def _over(self, splice: Splice) -> None:
        timer = self._circuits.pop(splice, None)
        if timer is None:
            return
        timer.cancel()
        self._past_bytes += splice.num_bytes
        for party in self._parties.pop(splice):
            self._per_identity[party] -= 1
            if not self._per_identity[party]:
                del self._per_identity[party]

    def _port(self, link: Link) -> MeteredPort:
        port = self._ports.get(link)
        if port is None:
            port = self._ports[link] = MeteredPort(link, self._limits.rate, self._limits.burst)
        return port

    def _post(self, link: Link, message: Message) -> None:
        if link.waiting_bytes > _MAX_WAITING:
            link.refuse(int(ErrorCode.FLOW))
        elif not link.is_closed:
            link.post(message)
