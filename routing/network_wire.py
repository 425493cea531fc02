"""Bytes of the messages by which peers find and reach each other: gossip, dial-back, relay.

Small msgpack maps; lists of fixed-size items travel as one byte string. Knows nothing of who may send what.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from routing.maps import U16, U32, U64, MapReader, address_item, malformed
from routing.outbox import YIELDING_LANE
from routing.types import (
    Burst,
    BurstRequest,
    Digest,
    GoAway,
    Incoming,
    Message,
    PingReport,
    PingRequest,
    Probe,
    Probed,
    Pull,
    Records,
    Refused,
    RelayOpen,
    Reserve,
    Reserved,
)

MAX_DIGEST = 10_000  # entries: the table's size (transport.md 5.6)
MAX_RECORDS = 24  # of one message: 48 KiB, so that gossip never holds up a token for long
MAX_RECORD_SIZE = (
    2048  # B; transport.md says 1 KiB, which one slice fills: nodes hold several, of several models
)
MAX_PULL = 256
MAX_DOUBTS = 256  # of one digest: 2 KiB
MAX_FIRST = 2048  # B: a handshake's first message with its frame
MAX_ALTERNATIVES = 8
MAX_BURST = 512 << 10  # B: room for a longer one than is asked for now (bandwidth.py)
_ENTRY = struct.Struct(">8sQ")
_PREFIX = 8
_WHOLE_SPAN = b"\x00" * _PREFIX + b"\xff" * _PREFIX
_HOST = 255

DIGEST, PULL, RECORDS, PING_REQUEST, PING_REPORT, BURST_REQUEST, BURST = range(16, 23)
PROBE, PROBED, RESERVE, RESERVED, RELAY_OPEN, INCOMING, REFUSED, GO_AWAY = range(24, 32)
LIMITS = {
    DIGEST: (_ENTRY.size + 1) * MAX_DIGEST,
    RECORDS: (MAX_RECORD_SIZE + 16) * MAX_RECORDS,
    BURST: MAX_BURST + 16,
}

Fields = dict[str, object]


def _digest_fields(message: Digest) -> Fields:
    packed = b"".join(_ENTRY.pack(prefix, sequence) for prefix, sequence in message.entries)
    span, doubts = message.first + message.last, b"".join(message.doubts)
    return {
        "e": packed,
        "r": message.is_reply,
        **({"s": span} if span != _WHOLE_SPAN else {}),
        **({"d": doubts} if doubts else {}),
    }


def _read_digest(fields: MapReader) -> Digest:
    packed = fields.blob("e", None)
    if len(packed) % _ENTRY.size or len(packed) > MAX_DIGEST * _ENTRY.size:
        raise malformed("a digest does not hold whole entries, or too many")
    span = fields.blob("s", 2 * _PREFIX, default=_WHOLE_SPAN)
    return Digest(
        tuple(_ENTRY.iter_unpack(packed)),
        fields.flag("r"),
        span[:_PREFIX],
        span[_PREFIX:],
        _split(fields.blob("d", None, default=b""), MAX_DOUBTS),
    )


def _split(packed: bytes, max_count: int) -> tuple[bytes, ...]:
    if len(packed) % _PREFIX or len(packed) > max_count * _PREFIX:
        raise malformed("a list of prefixes does not hold whole ones, or too many")
    return tuple(packed[at : at + _PREFIX] for at in range(0, len(packed), _PREFIX))


def _pull_fields(message: Pull) -> Fields:
    return {"p": b"".join(message.prefixes)}


def _read_pull(fields: MapReader) -> Pull:
    return Pull(_split(fields.blob("p", None), MAX_PULL))


def _records_fields(message: Records) -> Fields:
    return {"r": list(message.records)}


def _read_records(fields: MapReader) -> Records:
    return Records(fields.blobs("r", max_count=MAX_RECORDS))


def _ping_request_fields(message: PingRequest) -> Fields:
    return {"n": message.nonce, "t": message.target}


def _read_ping_request(fields: MapReader) -> PingRequest:
    return PingRequest(fields.integer("n", 0, U64), fields.node_id("t"))


def _ping_report_fields(message: PingReport) -> Fields:
    return {"n": message.nonce, "a": message.is_alive}


def _read_ping_report(fields: MapReader) -> PingReport:
    return PingReport(fields.integer("n", 0, U64), fields.flag("a"))


def _burst_request_fields(message: BurstRequest) -> Fields:
    return {"n": message.size}


def _read_burst_request(fields: MapReader) -> BurstRequest:
    return BurstRequest(fields.integer("n", 1, MAX_BURST))


def _burst_fields(message: Burst) -> Fields:
    return {"b": message.content}


def _read_burst(fields: MapReader) -> Burst:
    return Burst(fields.blob("b", None))


def _probe_fields(message: Probe) -> Fields:
    return {"n": message.nonce, "p": message.port}


def _read_probe(fields: MapReader) -> Probe:
    return Probe(fields.blob("n", 16), fields.integer("p", 0, U16))


def _probed_fields(message: Probed) -> Fields:
    return {
        "n": message.nonce,
        "h": message.host,
        "p": message.port,
        "c": message.code,
        "t": message.now_ms,
    }


def _read_probed(fields: MapReader) -> Probed:
    return Probed(
        nonce=fields.blob("n", 16),
        host=fields.text("h", _HOST),
        port=fields.integer("p", 0, U16),
        code=fields.integer("c", 0, U16),
        now_ms=fields.integer("t", 0, U64, default=0),
    )


def _reserve_fields(message: Reserve) -> Fields:
    return {"t": message.ttl_s}


def _read_reserve(fields: MapReader) -> Reserve:
    return Reserve(fields.integer("t", 0, U32))


def _reserved_fields(message: Reserved) -> Fields:
    return {
        "c": message.code,
        "x": message.expires_ms,
        "b": message.max_bytes,
        "s": message.max_s,
        "v": message.voucher,
    }


def _read_reserved(fields: MapReader) -> Reserved:
    voucher = fields.blob("v", None, default=b"")
    if len(voucher) not in (0, 64):
        raise malformed("a voucher is no signature")
    return Reserved(
        code=fields.integer("c", 0, U16),
        expires_ms=fields.integer("x", 0, U64, default=0),
        max_bytes=fields.integer("b", 0, U64, default=0),
        max_s=fields.integer("s", 0, U32, default=0),
        voucher=voucher,
    )


def _relay_open_fields(message: RelayOpen) -> Fields:
    return {"c": message.channel, "t": message.target, "f": message.first}


def _read_relay_open(fields: MapReader) -> RelayOpen:
    return RelayOpen(fields.integer("c", 1, U32), fields.node_id("t"), _read_first(fields))


def _incoming_fields(message: Incoming) -> Fields:
    return {"c": message.channel, "s": message.source, "f": message.first}


def _read_incoming(fields: MapReader) -> Incoming:
    return Incoming(fields.integer("c", 1, U32), fields.node_id("s"), _read_first(fields))


def _read_first(fields: MapReader) -> bytes:
    first = fields.blob("f", None)
    if len(first) > MAX_FIRST:
        raise malformed("a circuit's first message is too long")
    return first


def _refused_fields(message: Refused) -> Fields:
    return {"c": message.channel, "e": message.code, "r": message.retry_ms}


def _read_refused(fields: MapReader) -> Refused:
    return Refused(
        fields.integer("c", 1, U32), fields.integer("e", 0, U16), fields.integer("r", 0, U32, default=0)
    )


def _go_away_fields(message: GoAway) -> Fields:
    alternatives = [address_item(address) for address in message.alternatives[:MAX_ALTERNATIVES]]
    return {"e": message.code, "r": message.retry_ms, "a": alternatives}


def _read_go_away(fields: MapReader) -> GoAway:
    return GoAway(
        fields.integer("e", 0, U16),
        fields.integer("r", 0, U32, default=0),
        fields.addresses("a", max_count=MAX_ALTERNATIVES),
    )


WRITERS: Mapping[type[Any], tuple[int, Callable[[Any], Fields]]] = {
    Digest: (DIGEST, _digest_fields),
    Pull: (PULL, _pull_fields),
    Records: (RECORDS, _records_fields),
    PingRequest: (PING_REQUEST, _ping_request_fields),
    PingReport: (PING_REPORT, _ping_report_fields),
    BurstRequest: (BURST_REQUEST, _burst_request_fields),
    Burst: (BURST, _burst_fields),
    Probe: (PROBE, _probe_fields),
    Probed: (PROBED, _probed_fields),
    Reserve: (RESERVE, _reserve_fields),
    Reserved: (RESERVED, _reserved_fields),
    RelayOpen: (RELAY_OPEN, _relay_open_fields),
    Incoming: (INCOMING, _incoming_fields),
    Refused: (REFUSED, _refused_fields),
    GoAway: (GO_AWAY, _go_away_fields),
}
READERS: Mapping[int, Callable[[MapReader], Message]] = {
    DIGEST: _read_digest,
    PULL: _read_pull,
    RECORDS: _read_records,
    PING_REQUEST: _read_ping_request,
    PING_REPORT: _read_ping_report,
    BURST_REQUEST: _read_burst_request,
    BURST: _read_burst,
    PROBE: _read_probe,
    PROBED: _read_probed,
    RESERVE: _read_reserve,
    RESERVED: _read_reserved,
    RELAY_OPEN: _read_relay_open,
    INCOMING: _read_incoming,
    REFUSED: _read_refused,
    GO_AWAY: _read_go_away,
}
GOSSIP_LANE = b"\0gossip"  # its messages take turns with everything else's


def lane_of(message: Message) -> bytes | None:
    """Return the ordering key of one of these messages; None for others."""
    if isinstance(message, (Digest, Pull, Records)):
        return GOSSIP_LANE
    if isinstance(message, Burst):
        return YIELDING_LANE
    return b"" if type(message) in WRITERS else None


__all__ = ["LIMITS", "MAX_RECORD_SIZE", "READERS", "WRITERS", "lane_of"]
