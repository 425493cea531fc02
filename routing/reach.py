"""Whether others can dial us: what probers found, what that proves, and answering the probes of others.

`Reachability` is pure bookkeeping. `Prober` dials back, only to where a peer is seen and only so often. Who is asked,
and when, is `reach_check`'s part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from routing.address_policy import canonical_host, prefixes_of
from routing.admission import TokenBucket, is_this_machine, party_of
from routing.background import Background
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, RemoteError
from routing.link import Link
from routing.types import Message, NodeAddress, NodeId, Probe, Probed

PROBE_TIMEOUT_S = 3.0  # transport.md 5.6, as are the next two
PROBE_EVERY_S = 30.0
PROBE_BURST = 3.0
HOST_RATE, HOST_BURST = 1.0, 32.0  # of all identities at one address: they are free
MAX_PROBES = 16  # dials back at once, for everybody together
MAX_BUCKETS = 1024  # peers whose rate is remembered; full buckets are dropped first
RECHECK_S = 900.0  # transport.md 5.3
FORGET_S = 3 * RECHECK_S
FAILURES_THAT_COUNT = 2  # in a row, of a prober that had reached us: one may be a lost packet
MAX_SKEWS = 9  # probers whose clocks are compared with ours
STRICT_PROOFS = 2  # in an open public network: one prober alone may lie


class Verdict(StrEnum):
    """What probes say of our direct address."""

    UNKNOWN = "unknown"
    PRIVATE = "private"
    PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class Finding:
    """The last word of one prober. `code` 0: it reached us at host:port; else an `ErrorCode` number."""

    prober: NodeId
    prober_host: str
    host: str
    port: int
    code: int
    at: float  # on the caller's monotonic clock, seconds
    num_failures: int = 0  # in a row


class Reachability:
    """Whether our direct address is proved, from findings.

    `is_strict` (an open public network): two probers in different /16s must agree, where so many are known.
    `accepts` says whether a host and port may be announced at all. `public_host` is the operator's own word for our
    host: where `is_strict`, it must be what probers see; elsewhere it stands for what they see, once they reached us
    (they may be nearer to us than others are). `now` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        is_strict: bool,
        accepts: Callable[[str, int], bool],
        public_host: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_strict = is_strict
        self._accepts = accepts
        self._public_host = public_host
        self._now = now
        self._findings: dict[NodeId, Finding] = {}
        self._skews: dict[NodeId, float] = {}
        self._num_places = 1
        self.granted: tuple[str, int] | None = None  # taken on the operator's word

    def set_probers(self, hosts: Mapping[NodeId, str]) -> None:
        """Say which probers could be asked, by host: as many different places can be demanded."""
        self._num_places = len({place_of(host) for host in hosts.values()})

    def note(self, prober: NodeId, prober_host: str, probed: Probed, *, skew_ms: float | None = None) -> None:
        """Take an answer to a probe of ours. `skew_ms` is our clock less the prober's."""
        if skew_ms is not None:
            self.note_skew(prober, skew_ms)
        if probed.code == ErrorCode.QUOTA:
            return  # it was not tried
        host = plain_host(probed.host)
        if self._public_host is not None and not self._is_strict and probed.code == 0:
            host = self._public_host
        last = self._findings.get(prober)
        num_failures = 0 if probed.code == 0 else (last.num_failures if last else 0) + 1
        new = Finding(prober, prober_host, host, probed.port, probed.code, self._now(), num_failures)
        if (
            last is not None
            and last.code == 0
            and 0 < num_failures < FAILURES_THAT_COUNT
            and last.host == host
        ):
            new = Finding(prober, prober_host, last.host, last.port, 0, last.at, num_failures)
        self._findings[prober] = new

    def note_skew(self, prober: NodeId, skew_ms: float) -> None:
        """Take what our clock shows more than a prober's; the latest few count."""
        self._skews.pop(prober, None)
        self._skews[prober] = skew_ms
        while len(self._skews) > MAX_SKEWS:
            del self._skews[next(iter(self._skews))]

    @property
    def trusts_guests(self) -> bool:
        """Whether the word of one that is no member will do: in an open public network, only on a host given to us."""
        return not self._is_strict or self._public_host is not None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The last word of each prober that is not too old."""
        oldest = self._now() - FORGET_S
        self._findings = {prober: it for prober, it in self._findings.items() if it.at >= oldest}
        return tuple(self._findings.values())

    @property
    def num_needed(self) -> int:
        """How many probers of different places must have reached us."""
        return max(1, min(STRICT_PROOFS, self._num_places)) if self._is_strict else 1

    @property
    def proved(self) -> tuple[str, int] | None:
        """The host and port that enough probers reached us at."""
        places: dict[tuple[str, int], set[bytes]] = {}
        for found in sorted(self.findings, key=lambda it: it.at, reverse=True):
            if found.code == 0 and self._may_stand(found.host, found.port):
                places.setdefault((found.host, found.port), set()).add(place_of(found.prober_host))
        best = max(places, key=lambda at: len(places[at]), default=None)  # of equals, the one found last
        if best is None or len(places[best]) < self.num_needed:
            return self.granted
        return best

    def _may_stand(self, host: str, port: int) -> bool:
        return self._accepts(host, port) and self._public_host in (None, host)

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN until somebody has tried."""
        if self.proved is not None:
            return Verdict.PUBLIC
        return Verdict.PRIVATE if self.findings else Verdict.UNKNOWN

    @property
    def is_doubted(self) -> bool:
        """Whether a prober that had reached us could not the last time."""
        return any(found.code == 0 and found.num_failures for found in self.findings)

    @property
    def clock_skew_ms(self) -> float | None:
        """Our clock less that of the median prober; positive: ours is ahead."""
        return statistics.median(self._skews.values()) if self._skews else None


class Prober:
    """Answers probes, as a link's receiver: tells a peer how it is seen, and dials it back there."""

    def __init__(
        self,
        endpoint: Endpoint,
        background: Background,
        *,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._background = background
        self._clock = clock
        self._now = now
        self._buckets: dict[NodeId, TokenBucket] = {}
        self._hosts: dict[str, TokenBucket] = {}
        self._probing: set[NodeId] = set()
        self.num_refused = 0

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Probe):
            self.take(link, message)

    def on_link_up(self, link: Link) -> None: ...

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...

    def take(self, link: Link, probe: Probe) -> None:
        """Answer now, or after a dial back."""
        if probe.port == 0:
            self._answer(link, probe, 0)
        elif link.is_relayed:  # its host is the sentinel's, and that is not to be dialled for it
            self._answer(link, probe, ErrorCode.STATE)
        elif not (self._may_ask(link.peer_id) and self._may_look_at(link.peer_host)):
            self.num_refused += 1
            self._answer(link, probe, ErrorCode.QUOTA)
        else:
            self._background.spawn(self._probe(link, probe), "a dial back")

    async def _probe(self, link: Link, probe: Probe) -> None:
        self._probing.add(link.peer_id)
        code = 0
        try:
            address = NodeAddress(link.peer_id, plain_host(link.peer_host), probe.port)
            await self._endpoint.probe(address, PROBE_TIMEOUT_S)
            self._buckets.pop(
                link.peer_id, None
            )  # it was its own address: no need to slow down a restarted node
        except RemoteError as error:
            code = int(error.code)
        finally:
            self._probing.discard(link.peer_id)
        self._answer(link, probe, code)

    def _answer(self, link: Link, probe: Probe, code: int) -> None:
        if not link.is_closed:
            now_ms = int(self._clock() * 1000)
            link.post(Probed(probe.nonce, plain_host(link.peer_host), probe.port, code, now_ms))

    def _may_ask(self, peer_id: NodeId) -> bool:
        if len(self._probing) >= MAX_PROBES or peer_id in self._probing:
            return False
        now = self._now()
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets = {peer: it for peer, it in self._buckets.items() if not it.is_full(now)}
            if len(self._buckets) >= MAX_BUCKETS and peer_id not in self._buckets:
                return False
        return self._buckets.setdefault(peer_id, TokenBucket(1 / PROBE_EVERY_S, PROBE_BURST, now)).take(now)

    def _may_look_at(self, host: str) -> bool:
        """Whether an address is not dialled too often: new identities, and probes that succeed, are no way around."""
        if is_this_machine(host):
            return True
        now, place = self._now(), party_of(host)
        if len(self._hosts) >= MAX_BUCKETS:
            self._hosts = {key: it for key, it in self._hosts.items() if not it.is_full(now)}
            if len(self._hosts) >= MAX_BUCKETS and place not in self._hosts:
                return False
        return self._hosts.setdefault(place, TokenBucket(HOST_RATE, HOST_BURST, now)).take(now)


def plain_host(host: str) -> str:
    """Return an IP literal in its usual form, without a zone; other texts as they are."""
    return canonical_host(host.partition("%")[0]) or host


def place_of(host: str) -> bytes:
    """Return the /16 (IPv6: /32) of an address: what one party is likely to hold; a name stands for itself."""
    literal = canonical_host(host)
    return host.encode() if literal is None else prefixes_of(literal)[1]
