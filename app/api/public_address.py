"""Which addresses everybody can reach: what a gateway may connect to because somebody asked for it."""

from __future__ import annotations

import ipaddress
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64: Final = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: an IPv4 address is its last 32 bits


def is_public(address: IPAddress) -> bool:
    """Whether an address is one that everybody can reach: no private, local, shared, reserved or multicast one."""
    if isinstance(address, ipaddress.IPv6Address):
        within = address.ipv4_mapped or address.sixtofour or _nat64(address)
        if within is not None:
            return is_public(within)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None
