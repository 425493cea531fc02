"""Bytes of every message in `types.py`: one `encode` / `decode` pair over the codecs beside it.

Steps and answers are fixed headers with the payload inline (`steps.py`); the rest are small msgpack maps,
here. Knows nothing of records, links or who may send what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routing import network_wire
from routing.addresses import format_address, parse_address, parse_host_port
from routing.errors import LocalError
from routing.maps import MAX_LAYERS, U16, U32, U64, MapReader, malformed, pack_map, unpack_map
from routing.sealing import (
    MAX_HOPS,
    PREFIX_HASH_SIZE,
    PROOF_SIZE,
    SealKey,
    entry_aad,
    is_proof,
    open_answer,
    open_entry,
    proof,
    seal_answer,
    seal_entry,
)
from routing.steps import decode_answer, decode_step, encode_answer, encode_step
from routing.types import (
    WIDTHS,
    Answer,
    Attach,
    Buffer,
    Cancel,
    Capabilities,
    Describe,
    Description,
    Failure,
    Inquire,
    Keep,
    Message,
    Open,
    Opened,
    Resumed,
    SliceOffer,
    SliceSpec,
    Standing,
    Step,
    WireDtype,
)

__all__ = [
    "SealKey",
    "decode",
    "decode_capabilities",
    "encode",
    "encode_capabilities",
    "entry_aad",
    "format_address",
    "is_proof",
    "lane",
    "open_answer",
    "open_entry",
    "parse_address",
    "parse_host_port",
    "proof",
    "seal_answer",
    "seal_entry",
]

MAX_MAP_SIZE = 16 << 10  # transport.md 5.2
MAX_OPEN_SIZE = 60 << 10  # carries one sealed entry per hop, and still fits one record
MAX_KEEP_SIZE = 60 << 10  # a hash for each block of sixteen positions
MAX_HASHES = 3584  # of one Keep: 57,344 positions; what a longer session has beyond them is not kept
MAX_CAPABILITIES_SIZE = 600  # keeps a handshake message below 1,024 B
MAX_TEXT = 1000  # characters of an error text
MAX_OFFERS = 64
HASH_SIZE = 8
_CRITICAL = 128  # an unknown kind from here on may not be ignored

STEP, ANSWER, OPEN, ATTACH, CANCEL, FAILURE, DESCRIBE, DESCRIPTION, RESUMED, INQUIRE, STANDING = range(1, 12)
OPENED, KEEP = 12, 13


def encode(message: Message) -> tuple[int, list[Buffer]]:
    """Return a message's kind number and the buffers that, joined, are its bytes. Payloads are not copied."""
    match message:
        case Step():
            return STEP, encode_step(message)
        case Answer():
            return ANSWER, encode_answer(message)
    kind, fields_of = _WRITERS[type(message)]
    return kind, [pack_map(fields_of(message), _LIMITS.get(kind, MAX_MAP_SIZE))]


def decode(kind: int, content: memoryview) -> Message | None:
    """Return the message that `content` holds; payloads are views into it.

    Returns None for an unknown kind below 128, which a newer peer may send. Raises `ProtocolError`
    MALFORMED or TOO_BIG when the content breaks a rule.
    """
    match kind:
        case 1:
            return decode_step(content)
        case 2:
            return decode_answer(content)
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(MapReader(unpack_map(content, _LIMITS.get(kind, MAX_MAP_SIZE))))
    if kind >= _CRITICAL:
        raise malformed(f"unknown message kind {kind}")
    return None


def lane(message: Message) -> bytes:
    """Return the ordering key of a message: one lane stays in order, lanes overtake each other.

    A session's Open, steps, answers and failures share a lane. A Cancel never waits behind the prefill that
    it cancels; a Keep, as large as a long session, never holds up another one's Cancel.
    """
    if isinstance(message, (Step, Answer)):  # nearly all of them
        return message.session_id
    if isinstance(message, (Cancel, Describe, Description, Inquire, Standing)):
        return b""
    of_network = network_wire.lane_of(message)
    if of_network is not None:
        return of_network
    return message.session_id  # type: ignore[union-attr]  # every other message is of a session


def encode_capabilities(capabilities: Capabilities) -> bytes:
    """Return at most 600 B; slices that do not fit are left out, since `Description` names them all."""
    slices = [list(item) for item in capabilities.slices]
    while True:
        fields = _capability_fields(capabilities, slices)
        try:
            return pack_map(fields, MAX_CAPABILITIES_SIZE)
        except LocalError:
            if not slices:
                raise
            slices.pop()


def decode_capabilities(content: Buffer) -> Capabilities:
    """Return what a peer can do; names and dtypes we do not know are dropped, since absent means no.

    Raises `ProtocolError` MALFORMED or TOO_BIG.
    """
    fields = MapReader(unpack_map(content, MAX_CAPABILITIES_SIZE))
    dtypes = fields.integers("t", 0, 255, max_count=32)
    seal_key = fields.blob("k", None, default=b"")
    if len(seal_key) not in (0, 32):
        raise malformed("a sealing key is not 32 bytes")
    return Capabilities(
        proto=fields.integers("p", 0, U16, max_count=16),
        dtypes=tuple(WireDtype(number) for number in dtypes if number in WIDTHS),
        ops=fields.texts("o", max_count=32),
        max_message=fields.integer("m", 1 << 16, U32),
        seal_key=seal_key,
        slices=tuple(_read_slice(item) for item in fields.rows("s", max_count=64)),
        token=fields.blob("g", None, default=b""),
        moved=fields.blob("v", None, default=b""),
    )


def _capability_fields(capabilities: Capabilities, slices: list[list[Any]]) -> dict[str, object]:
    return {
        "p": list(capabilities.proto),
        "t": [int(dtype) for dtype in capabilities.dtypes],
        "o": list(capabilities.ops),
        "m": capabilities.max_message,
        "k": capabilities.seal_key,
        "s": slices,
        **({"g": capabilities.token} if capabilities.token else {}),
        **({"v": capabilities.moved} if capabilities.moved else {}),
    }


def _read_slice(item: list[Any]) -> tuple[bytes, int, int]:
    match item:
        case [bytes(digest), int(start), int(end)] if len(digest) == 8 and 0 <= start <= end <= MAX_LAYERS:
            return digest, start, end
    raise malformed("a slice in the capabilities is no slice")


def _open_fields(message: Open) -> dict[str, object]:
    return {"s": message.session_id, "e": message.epoch, "h": message.hop, "r": list(message.entries)}


def _read_open(fields: MapReader) -> Open:
    entries = fields.blobs("r", max_count=MAX_HOPS)
    hop = fields.integer("h", 0, MAX_HOPS)
    if hop >= len(entries):
        raise malformed("an open names a hop that has no entry")
    return Open(fields.session("s"), fields.integer("e", 0, U16), hop, entries)


def _proved_fields(message: Attach | Cancel | Keep) -> dict[str, object]:
    return {"s": message.session_id, "e": message.epoch, "p": message.proof}


def _read_attach(fields: MapReader) -> Attach:
    return Attach(fields.session("s"), fields.integer("e", 0, U16), fields.blob("p", PROOF_SIZE))


def _read_cancel(fields: MapReader) -> Cancel:
    return Cancel(fields.session("s"), fields.integer("e", 0, U16), fields.blob("p", PROOF_SIZE))


def _failure_fields(message: Failure) -> dict[str, object]:
    return {
        "s": message.session_id,
        "e": message.epoch,
        "n": message.step,
        "c": message.code,
        "h": message.hop,
        "r": message.retry_ms,
        "t": message.text[:MAX_TEXT],
        **({"a": message.room} if message.room else {}),
    }


def _read_failure(fields: MapReader) -> Failure:
    return Failure(
        session_id=fields.session("s"),
        epoch=fields.integer("e", 0, U16),
        step=fields.integer("n", 0, U32),
        code=fields.integer("c", 0, U16),
        hop=fields.integer("h", 0, MAX_HOPS),
        retry_ms=fields.integer("r", 0, U32, default=0),
        text=fields.text("t", MAX_TEXT, default=""),
        room=fields.integer("a", 0, U32, default=0),
    )


def _opened_fields(message: Opened) -> dict[str, object]:
    return {"s": message.session_id, "e": message.epoch, "n": message.held}


def _read_opened(fields: MapReader) -> Opened:
    return Opened(fields.session("s"), fields.integer("e", 0, U16), fields.integer("n", 0, U32, default=0))


def _keep_fields(message: Keep) -> dict[str, object]:
    return {**_proved_fields(message), "b": b"".join(message.hashes)}


def _read_keep(fields: MapReader) -> Keep:
    packed, size = fields.blob("b", None), PREFIX_HASH_SIZE
    if len(packed) % size or not 0 < len(packed) <= size * MAX_HASHES:
        raise malformed(f"a keep holds {len(packed)} bytes of hashes")
    hashes = tuple(packed[at : at + size] for at in range(0, len(packed), size))
    return Keep(fields.session("s"), fields.integer("e", 0, U16), fields.blob("p", PROOF_SIZE), hashes)


def _resumed_fields(message: Resumed) -> dict[str, object]:
    return {"s": message.session_id, "e": message.epoch, "n": message.next_step}


def _read_resumed(fields: MapReader) -> Resumed:
    return Resumed(fields.session("s"), fields.integer("e", 0, U16), fields.integer("n", 0, U32))


def _inquire_fields(message: Inquire) -> dict[str, object]:
    return {"s": message.session_id, "e": message.epoch}


def _read_inquire(fields: MapReader) -> Inquire:
    return Inquire(fields.session("s"), fields.integer("e", 0, U16))


def _standing_fields(message: Standing) -> dict[str, object]:
    return {
        "s": message.session_id,
        "e": message.epoch,
        "h": message.hop,
        "d": message.last_done,
        "n": message.next_step,
        "b": message.busy_ms,
        "r": message.busy_rows,
    }


def _read_standing(fields: MapReader) -> Standing:
    return Standing(
        session_id=fields.session("s"),
        epoch=fields.integer("e", 0, U16),
        hop=fields.integer("h", 0, MAX_HOPS),
        last_done=fields.integer("d", 0, U32),
        next_step=fields.integer("n", 0, U32),
        busy_ms=fields.integer("b", 0, U32, default=0),
        busy_rows=fields.integer("r", 0, U16, default=0),
    )


def _describe_fields(_: Describe) -> dict[str, object]:
    return {}


def _read_describe(_: MapReader) -> Describe:
    return Describe()


def _description_fields(message: Description) -> dict[str, object]:
    return {
        "o": [offer_fields(offer) for offer in message.slices],
        "l": message.load,
        "m": message.max_sessions,
        "f": message.free_bytes,
    }


def _read_description(fields: MapReader) -> Description:
    return Description(
        slices=tuple(read_offer(offer) for offer in fields.maps("o", max_count=MAX_OFFERS)),
        load=fields.integer("l", 0, U32, default=0),
        max_sessions=fields.integer("m", 0, U32, default=0),
        free_bytes=fields.integer("f", 0, U64, default=0),
    )


def offer_fields(offer: SliceOffer) -> dict[str, object]:
    """Return an offer as a plain map; `read_offer` is the inverse. Announcements use it too."""
    return {
        "n": offer.model_name,
        "d": offer.model_digest,
        "N": offer.num_layers,
        "w": offer.hidden_size,
        "a": offer.spec.start,
        "b": offer.spec.end,
        "t": int(offer.dtype),
        "f": offer.form,
        "o": offer.has_opening,
        "c": offer.has_closing,
        "ms": float(offer.layer_ms),
        "h": b"".join(offer.layer_hashes),
        **({"cf": True} if offer.confirms else {}),
        **({"kp": True} if offer.keeps else {}),
    }


def read_offer(fields: MapReader) -> SliceOffer:
    """Return the offer that a map holds. Raises `ProtocolError` MALFORMED."""
    start, end = fields.layer_range("a", "b")
    hashes = fields.blob("h", None, default=b"")
    if len(hashes) not in (0, HASH_SIZE * (end - start)):
        raise malformed("an offer does not have one hash per layer")
    return SliceOffer(
        model_name=fields.text("n", 256),
        model_digest=fields.blob("d", 32),
        num_layers=fields.integer("N", 1, MAX_LAYERS),
        hidden_size=fields.integer("w", 1, U32),
        spec=SliceSpec(start, end),
        dtype=fields.dtype("t"),
        form=fields.text("f", 256),
        has_opening=fields.flag("o"),
        has_closing=fields.flag("c"),
        layer_ms=fields.number("ms", default=0.0),
        layer_hashes=tuple(hashes[i : i + HASH_SIZE] for i in range(0, len(hashes), HASH_SIZE)),
        confirms=fields.flag("cf"),
        keeps=fields.flag("kp"),
    )


_WRITERS: dict[type[Any], tuple[int, Callable[[Any], dict[str, object]]]] = {
    Open: (OPEN, _open_fields),
    Attach: (ATTACH, _proved_fields),
    Cancel: (CANCEL, _proved_fields),
    Failure: (FAILURE, _failure_fields),
    Describe: (DESCRIBE, _describe_fields),
    Description: (DESCRIPTION, _description_fields),
    Resumed: (RESUMED, _resumed_fields),
    Inquire: (INQUIRE, _inquire_fields),
    Standing: (STANDING, _standing_fields),
    Opened: (OPENED, _opened_fields),
    Keep: (KEEP, _keep_fields),
    **network_wire.WRITERS,
}
_READERS: dict[int, Callable[[MapReader], Message]] = {
    OPEN: _read_open,
    ATTACH: _read_attach,
    CANCEL: _read_cancel,
    FAILURE: _read_failure,
    DESCRIBE: _read_describe,
    DESCRIPTION: _read_description,
    RESUMED: _read_resumed,
    INQUIRE: _read_inquire,
    STANDING: _read_standing,
    OPENED: _read_opened,
    KEEP: _read_keep,
    **network_wire.READERS,
}
_LIMITS = {OPEN: MAX_OPEN_SIZE, KEEP: MAX_KEEP_SIZE, **network_wire.LIMITS}
