"""Which addresses may stand in a record: by the swarm's scope, and never those that lead nowhere or anywhere.

Knows IP literals and their ranges. Resolves no names, dials nothing, and judges no bind address: that one is
never announced.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network


class Scope(StrEnum):
    """How far a swarm reaches."""

    LOOPBACK = "loopback"
    LAN = "lan"
    PUBLIC = "public"


class AddressKind(IntEnum):
    """From where an address can be reached; wider is greater."""

    UNUSABLE = 0  # unspecified, link-local, multicast, broadcast, documentation, tunnels: refused everywhere
    LOOPBACK = 1
    PRIVATE = 2  # RFC 1918, unique local, carrier NAT
    PUBLIC = 3


class AddressFault(StrEnum):
    """Why an address may not be announced."""

    NOT_LITERAL = "is no IP address: records hold no host names"
    NOT_CANONICAL = "is not written in its one usual form"
    UNUSABLE = "is an address that nobody can be reached at"
    TOO_NARROW = "cannot be reached from everywhere in this swarm"
    PORT = "has no usable port"


_NARROWEST = {
    Scope.LOOPBACK: AddressKind.LOOPBACK,
    Scope.LAN: AddressKind.PRIVATE,
    Scope.PUBLIC: AddressKind.PUBLIC,
}


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What one swarm takes for an address, when signing a record and when reading one."""

    scope: Scope
    is_private_swarm: bool = False  # a secret or an allow list says who may join

    @property
    def has_prefix_caps(self) -> bool:
        """Whether records are counted per address prefix: where identities are free and addresses are not."""
        return self.scope is Scope.PUBLIC and not self.is_private_swarm

    def check(self, host: str, port: int) -> AddressFault | None:
        """Return why `host:port` may not stand in a record here; None when it may."""
        address = _parse(host)
        if address is None:
            return AddressFault.NOT_LITERAL
        if str(address) != host or _mapped(address) is not None:
            return AddressFault.NOT_CANONICAL
        if not 0 < port < 65536:
            return AddressFault.PORT
        kind = _kind(address)
        if kind is AddressKind.UNUSABLE:
            return AddressFault.UNUSABLE
        return AddressFault.TOO_NARROW if kind < _NARROWEST[self.scope] else None


def canonical_host(host: str) -> str | None:
    """Return the one way to write an IP literal: IPv4-mapped IPv6 as IPv4; None for a host name."""
    address = _parse(host)
    return None if address is None else str(_mapped(address) or address)


def kind_of(host: str) -> AddressKind:
    """Return how far a literal reaches; a host name is UNUSABLE."""
    address = _parse(host)
    return AddressKind.UNUSABLE if address is None else _kind(_mapped(address) or address)


def scope_of(hosts: Iterable[str]) -> Scope:
    """Return the scope that a node's own and its bootstraps' addresses suggest (`--scope auto`).

    Any public one makes it PUBLIC, else any private one LAN; names and unspecified addresses say nothing.
    """
    widest = max((kind_of(host) for host in hosts), default=AddressKind.UNUSABLE)
    return {AddressKind.PUBLIC: Scope.PUBLIC, AddressKind.PRIVATE: Scope.LAN}.get(widest, Scope.LOOPBACK)


def prefixes_of(host: str) -> tuple[bytes, bytes]:
    """Return (narrow, wide) prefixes of a literal: /24 and /16 of IPv4, /48 and /32 of IPv6.

    Their lengths differ, so that none of one kind equals one of another. Raises ValueError for a host name.
    """
    address = _parse(host)
    if address is None:
        raise ValueError("a host name has no prefix")
    packed = (_mapped(address) or address).packed
    return (packed[:3], packed[:2]) if len(packed) == 4 else (packed[:6], packed[:4])


def _parse(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _mapped(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    return address.ipv4_mapped if isinstance(address, IPv6Address) else None


def _kind(address: IPv4Address | IPv6Address) -> AddressKind:
    """Ranges are listed here and not asked of `ipaddress`, whose idea of them changes between releases."""
    if isinstance(address, IPv6Address):
        return _kind_of_six(address)
    if address in _LOOPBACK_4:
        return AddressKind.LOOPBACK
    if any(address in network for network in _PRIVATE_4):
        return AddressKind.PRIVATE
    return AddressKind.UNUSABLE if any(address in network for network in _UNUSABLE_4) else AddressKind.PUBLIC


def _kind_of_six(address: IPv6Address) -> AddressKind:
    if address.scope_id is not None:
        return AddressKind.UNUSABLE
    if address == _LOOPBACK_6:
        return AddressKind.LOOPBACK
    if address in _PRIVATE_6:
        return AddressKind.PRIVATE
    if address not in _GLOBAL_6 or any(address in network for network in _UNUSABLE_6):
        return AddressKind.UNUSABLE
    return AddressKind.PUBLIC


# The IANA special-purpose address registries (RFC 6890 and its updates).
_LOOPBACK_4 = IPv4Network("127.0.0.0/8")
_PRIVATE_4 = tuple(
    IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
_UNUSABLE_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_LOOPBACK_6 = IPv6Address("::1")
_PRIVATE_6 = IPv6Network("fc00::/7")
_GLOBAL_6 = IPv6Network("2000::/3")
_UNUSABLE_6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them: an IPv4 address in disguise
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: another disguise
        "3fff::/20",  # documentation
    )
)
