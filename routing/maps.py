"""Small msgpack maps, read strictly: bounded size and depth, plain types only, every field checked.

Knows msgpack and the few field shapes that several messages share. Knows no message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack

from routing.errors import ErrorCode, LocalError, ProtocolError
from routing.types import WIDTHS, Buffer, NodeAddress, NodeId, SessionId, WireDtype

MAX_DEPTH = 4  # transport.md 5.2
MAX_LAYERS = 4096
U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
_SCALARS = (int, float, str, bytes, bool, type(None))
_MISSING: Any = object()


def pack_map(fields: Mapping[str, object], limit: int) -> bytes:
    """Return the msgpack bytes of a map; raise `LocalError` when they exceed `limit`."""
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(packed) > limit:
        raise LocalError(f"a message of {len(packed)} B is over its limit of {limit} B")
    return packed


def unpack_map(content: Buffer, limit: int) -> dict[str, Any]:
    """Return the map that `content` holds; raise `ProtocolError` MALFORMED or TOO_BIG."""
    if len(content) > limit:
        raise ProtocolError(ErrorCode.TOO_BIG, f"a map of {len(content)} B is over the limit of {limit} B")
    try:
        fields = msgpack.unpackb(content, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise malformed("a map is not valid msgpack") from error
    if not isinstance(fields, dict):
        raise malformed("a map was expected")
    _check_plain(fields, MAX_DEPTH)
    return fields


def _check_plain(value: object, depth: int) -> None:
    if isinstance(value, _SCALARS):
        return
    if depth == 0 or not isinstance(value, (dict, list)):
        raise malformed("a map is nested too deeply or holds an extension type")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise malformed("a map has a key that is no text")
    for item in value.values() if isinstance(value, dict) else value:
        _check_plain(item, depth - 1)


class MapReader:
    """Typed access to the fields of an unpacked map; unknown fields are ignored.

    Every method raises `ProtocolError` MALFORMED for a missing field, a wrong type or a value out of range.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return self._fields.get(key) is not None

    def integer(self, key: str, low: int, high: int, *, default: int = _MISSING) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise malformed(f"field {key!r} is not a number from {low} to {high}")
        return value

    def number(self, key: str, *, default: float = _MISSING) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise malformed(f"field {key!r} is not a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if type(value) is not bool:
            raise malformed(f"field {key!r} is neither true nor false")
        return value

    def text(self, key: str, max_size: int, *, default: str = _MISSING) -> str:
        value = self._get(key, default)
        if type(value) is not str or len(value) > max_size:
            raise malformed(f"field {key!r} is not a text of up to {max_size} characters")
        return value

    def blob(self, key: str, size: int | None, *, default: bytes = _MISSING) -> bytes:
        """Return a byte string of exactly `size` bytes (any size when None)."""
        value = self._get(key, default)
        if type(value) is not bytes or (size is not None and value is not default and len(value) != size):
            raise malformed(f"field {key!r} is not a byte string of the right size")
        return value

    def blobs(self, key: str, *, max_count: int) -> tuple[bytes, ...]:
        return tuple(self._list(key, bytes, max_count))

    def integers(self, key: str, low: int, high: int, *, max_count: int) -> tuple[int, ...]:
        values = self._list(key, int, max_count)
        if not all(low <= value <= high for value in values):
            raise malformed(f"field {key!r} holds a number that is out of range")
        return tuple(values)

    def texts(self, key: str, *, max_count: int) -> tuple[str, ...]:
        return tuple(self._list(key, str, max_count))

    def rows(self, key: str, *, max_count: int) -> list[list[Any]]:
        """Return a list of lists whose items the caller checks."""
        return self._list(key, list, max_count)

    def maps(self, key: str, *, max_count: int) -> list[MapReader]:
        return [MapReader(fields) for fields in self._list(key, dict, max_count)]

    def plain(self, key: str) -> dict[str, Any]:
        """Return a nested map whose meaning belongs to somebody else."""
        value = self._get(key)
        if type(value) is not dict:
            raise malformed(f"field {key!r} is not a map")
        return value

    def session(self, key: str) -> SessionId:
        return SessionId(self.blob(key, 16))

    def dtype(self, key: str) -> WireDtype:
        number = self.integer(key, 0, 255)
        if number not in WIDTHS:
            raise malformed(f"unknown wire dtype {number}")
        return WireDtype(number)

    def layer_range(self, start_key: str, end_key: str) -> tuple[int, int]:
        start, end = self.integer(start_key, 0, MAX_LAYERS), self.integer(end_key, 0, MAX_LAYERS)
        if end < start:
            raise malformed("a layer range ends before it starts")
        return start, end

    def node_id(self, key: str) -> NodeId:
        return NodeId(self.blob(key, 32))

    def addresses(self, key: str, *, max_count: int) -> tuple[NodeAddress, ...]:
        """Return addresses that `address_item` made; none where the field is missing."""
        items = self._list(key, list, max_count) if key in self else []
        return tuple(read_address(item) for item in items)

    def _list(self, key: str, kind: type, max_count: int) -> list[Any]:
        values = self._get(key)
        if type(values) is not list or len(values) > max_count:
            raise malformed(f"field {key!r} is not a list of up to {max_count} items")
        if not all(type(value) is kind for value in values):
            raise malformed(f"field {key!r} holds an item of the wrong type")
        return values

    def _get(self, key: str, default: Any = _MISSING) -> Any:
        value = self._fields.get(key, default)
        if value is _MISSING:
            raise malformed(f"field {key!r} is missing")
        return value


def address_item(address: NodeAddress) -> list[object]:
    """Return an address as a plain list; `read_address` is the inverse."""
    item: list[object] = [address.node_id, address.host, address.port]
    return item if address.relay_id is None else [*item, address.relay_id]


def read_address(item: list[Any]) -> NodeAddress:
    """Return the address that a plain list holds. Raises `ProtocolError` MALFORMED."""
    match item:
        case [bytes(peer), str(host), int(port), *rest] if (
            len(peer) == 32 and 0 < len(host) <= 255 and type(port) is int and 0 < port < 65536
        ):
            match rest:
                case []:
                    return NodeAddress(NodeId(peer), host, port)
                case [bytes(relay)] if len(relay) == 32:
                    return NodeAddress(NodeId(peer), host, port, NodeId(relay))
    raise malformed("an address is no address")


def malformed(text: str) -> ProtocolError:
    """Return the error for bytes that break a rule of the wire; `text` names no content."""
    return ProtocolError(ErrorCode.MALFORMED, text)
