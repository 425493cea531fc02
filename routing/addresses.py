"""Node addresses as people write them: `hexid@host:port`, IPv6 hosts in brackets.

`hexid/hexrelay@host:port` is a node that is reached through the sentinel `hexrelay` at that place.

`str(NodeAddress)` is the inverse. Resolves nothing.
"""

from __future__ import annotations

from routing.errors import SettingsError
from routing.types import NodeAddress, NodeId

_ID_DIGITS = 64


def parse_address(text: str) -> NodeAddress:
    """Return the address that `text` names; raise `SettingsError` with the part that is wrong."""
    digits, at, place = text.strip().partition("@")
    if not at:
        raise SettingsError(f"{text!r} has no '@': a node is written id@host:port")
    own, slash, relay = digits.partition("/")
    relay_id = _parse_id(relay, text) if slash else None
    return NodeAddress(_parse_id(own, text), *parse_host_port(place), relay_id)


def format_address(address: NodeAddress) -> str:
    """Return `hexid@host:port`, which `parse_address` reads back."""
    return str(address)


def parse_host_port(place: str) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[ipv6]:port`; raise `SettingsError`."""
    host, colon, port = place.rpartition(":")
    if not colon or not host:
        raise SettingsError(f"{place!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise SettingsError(f"{place!r}: write an IPv6 address in brackets, as in [::1]:9000")
    if not host or any(character.isspace() or character in "@/[]" for character in host):
        raise SettingsError(f"{place!r} has no usable host name")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise SettingsError(f"{place!r}: the port is not a number from 1 to 65535")
    return host, int(port)


def _parse_id(digits: str, text: str) -> NodeId:
    if len(digits) != _ID_DIGITS:
        raise SettingsError(f"{text!r}: a node id has {_ID_DIGITS} hex digits, this one has {len(digits)}")
    try:
        return NodeId(bytes.fromhex(digits))
    except ValueError as error:
        raise SettingsError(f"{text!r}: the node id holds a character that is no hex digit") from error
