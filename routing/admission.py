"""How many may knock, and how often: limits that hold before a peer is known (transport.md 5.6).

Pure bookkeeping with the clock passed in; addresses of this machine are exempt from limits per address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

MAX_REMEMBERED = 4096  # addresses whose buckets are kept; full buckets are dropped first


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one endpoint."""

    handshake_timeout_s: float = 5.0
    handshakes_per_s: float = 200.0
    handshakes_per_ip_per_s: float = 10.0
    handshakes_per_ip_burst: float = 20.0
    max_half_open: int = 64
    max_half_open_per_ip: int = 16  # as many as it may have links: one address never holds all places
    max_links: int = 512
    max_links_per_identity: int = 4
    max_links_per_ip: int = 16
    max_in_flight_per_peer: int = 128 << 20
    max_in_flight: int = 1 << 30


class TokenBucket:
    """`rate` tokens a second, `burst` at most."""

    __slots__ = ("_burst", "_rate", "_then", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._then = now

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
        self._then = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def is_full(self, now: float) -> bool:
        return self._tokens + (now - self._then) * self._rate >= self._burst


class Admission:
    """Decides who may begin a handshake, and who may keep a link."""

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._everyone = TokenBucket(limits.handshakes_per_s, limits.handshakes_per_s, now())
        self._buckets: dict[str, TokenBucket] = {}
        self._links: dict[str, int] = {}
        self.num_refused = 0

    def admit(self, host: str, num_half_open: int, num_from_host: int = 0) -> bool:
        """Say whether a connection from `host` may begin a handshake, `num_half_open` others being at it.

        `num_from_host` of them are of the same party.
        """
        is_welcome = (
            num_half_open < self._limits.max_half_open
            and (num_from_host < self._limits.max_half_open_per_ip or is_this_machine(host))
            and self._everyone.take(self._now())
            and (is_this_machine(host) or self._admit_address(host))
        )
        self.num_refused += not is_welcome
        return is_welcome

    def link_up(self, host: str) -> bool:
        """Count a link from `host`; say False (and count nothing) when it has too many."""
        network = party_of(host)
        count = self._links.get(network, 0)
        if count >= self._limits.max_links_per_ip and not is_this_machine(host):
            return False
        self._links[network] = count + 1
        return True

    def link_down(self, host: str) -> None:
        """Forget one link from `host`."""
        network = party_of(host)
        self._links[network] -= 1
        if not self._links[network]:
            del self._links[network]

    def _admit_address(self, host: str) -> bool:
        now = self._now()
        host = party_of(host)
        if host not in self._buckets and len(self._buckets) >= MAX_REMEMBERED:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full(now)}
            if len(self._buckets) >= MAX_REMEMBERED:
                return False
        rate, burst = self._limits.handshakes_per_ip_per_s, self._limits.handshakes_per_ip_burst
        return self._buckets.setdefault(host, TokenBucket(rate, burst, now)).take(now)


def party_of(host: str) -> str:
    """Return what one party may hold: an IPv4 address, or an IPv6 /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def is_this_machine(host: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
