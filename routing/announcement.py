"""What a node tells everybody about itself: a signed record, with its relay vouchers and its owner's label.

A record is a fixed head, a msgpack body and a signature over both; it is kept and passed on as its author
signed it. Knows the rules for one record. Knows no table, no peers and no sockets.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from routing.address_policy import AddressPolicy
from routing.errors import DiffuseError, LocalError, ProtocolError, SettingsError
from routing.identity import KEY_SIZE, SIGNATURE_SIZE, Identity, node_id
from routing.maps import U32, U64, MapReader, malformed, pack_map, unpack_map
from routing.network_wire import MAX_RECORD_SIZE
from routing.types import WIDTHS, NodeAddress, NodeId, SliceOffer, WireDtype
from routing.wire import offer_fields, read_offer

RECORD_LIFETIME_S = 180.0  # a node that dies without a word is forgotten after this
REFRESH_S = 60.0  # two refreshes may be lost
LOAD_REFRESH_S = 5.0  # how often a changed load alone is worth a new record
MAX_LIFETIME_MS = 600_000  # transport.md 5.5
MAX_AHEAD_MS = 60_000  # transport.md 5.5: how far an honest clock may be ahead of ours
MAX_SEQUENCE = (1 << 63) - 1  # leaves room to sign above any record that is accepted
MAX_CONTACTS = 8
MAX_RELAYED = 4  # contacts with a voucher: each one is a signature to check, and nodes keep two
MAX_ROLES = 8
MAX_OFFERS = 16
MAX_NEIGHBOURS = 8
MAX_MOVED_SIZE = 256  # B: two keys, a time, two signatures
MIN_LAYER_MS, MAX_LAYER_MS = 1e-3, 60e3  # no layer of any size is faster; none slower is of use
MAX_RTT_MS = 60e3
MIN_MBPS, MAX_MBPS = (
    1e-3,
    1e5,
)  # what slower lines bring is of no use; 100 Gbit/s is more than any link here takes
PREFIX_SIZE = 8  # bytes of a node id that stand for it in digests

_VERSION = 1
_HEAD = struct.Struct(">B8s32sQQQ")  # version, network tag, public key, sequence, issued ms, expires ms
_RECORD_DOMAIN = b"diffuse/record/1"
_VOUCHER_DOMAIN = b"diffuse/voucher/1"
_OWNER_DOMAIN = b"diffuse/owner/1"
_MAX_BODY_SIZE = MAX_RECORD_SIZE - _HEAD.size - SIGNATURE_SIZE


class Refusal(StrEnum):
    """Why a record is not taken; the names are those that metrics count."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    OTHER_NETWORK = "other_network"
    REPLAYED = "replayed"  # a sequence that is not above the one known
    FUTURE_DATED = "future_dated"
    EXPIRED = "expired"
    TOO_LONG_LIVED = "too_long_lived"
    FORGED = "forged"
    BAD_ADDRESS = "bad_address"
    BAD_VOUCHER = "bad_voucher"
    BAD_OWNER = "bad_owner"
    ABSURD = "absurd"  # layers that cannot be, or a speed that cannot be


class RecordRefused(DiffuseError):
    """A record breaks a rule; `reason` says which."""

    def __init__(self, reason: Refusal, text: str = "") -> None:
        super().__init__(f"record refused, {reason}: {text}" if text else f"record refused, {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Voucher:
    """A sentinel's word that it passes circuits on to a node, until then."""

    sentinel_key: bytes  # Ed25519 public key; its node id is the contact's relay id
    expires_ms: int  # unix
    signature: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Contact:
    """One way to reach a node; relayed ones carry the sentinel's voucher."""

    address: NodeAddress
    voucher: Voucher | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """A label that several nodes may share: a key that signed each one's id."""

    key: bytes  # Ed25519 public key
    signature: bytes = field(repr=False)

    @property
    def label(self) -> str:
        """What `NodeRecord.owner` holds."""
        return self.key.hex()

    @classmethod
    def sign(cls, owner: Identity, node: NodeId) -> Owner:
        """Label a node as the owner's."""
        return cls(owner.public_key, owner.sign(_OWNER_DOMAIN + node))


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a record says. With `has_left` it is a tombstone: its node went away on purpose."""

    public_key: bytes
    sequence: int
    issued_ms: int  # unix
    expires_ms: int  # unix
    contacts: tuple[Contact, ...] = ()  # the better first
    roles: tuple[str, ...] = ("node",)  # "node", "sentinel"
    seal_key: bytes = b""
    dtypes: tuple[WireDtype, ...] = ()
    offers: tuple[SliceOffer, ...] = ()  # without layer hashes: who wants to use a slice asks by Describe
    load: int = 0
    max_sessions: int = 0
    free_bytes: int = 0
    owner: Owner | None = None
    neighbour_ms: tuple[tuple[bytes, float], ...] = ()  # RTTs by 8 B id prefix
    neighbour_mbps: tuple[tuple[bytes, float], ...] = ()  # what lines from them bring, where that is known
    moved: bytes = b""
    has_left: bool = False
    intends: tuple[
        tuple[bytes, int, int], ...
    ] = ()  # (8 B digest prefix, start, end) it is about to hold, no offers

    @property
    def node_id(self) -> NodeId:
        """The author."""
        return node_id(self.public_key)

    @property
    def is_tombstone(self) -> bool:
        """Whether its node left on purpose."""
        return self.has_left


def next_sequence(stored: int, now_ms: int) -> int:
    """Return the sequence of a new record: above the last one stored, and above any lost one of the past."""
    return max(stored + 1, now_ms)


def sign_announcement(
    identity: Identity, network_id: bytes, announcement: Announcement, policy: AddressPolicy
) -> bytes:
    """Return the record's bytes; raise `SettingsError` if others would refuse them."""
    bare = replace(
        announcement,
        public_key=identity.public_key,
        offers=tuple(replace(offer, layer_hashes=()) for offer in announcement.offers),
    )
    try:
        _check_content(bare, policy)
        signed = _pack(bare, network_id)
    except RecordRefused as refused:
        raise SettingsError(f"cannot announce this: {refused}") from refused
    except LocalError as error:
        raise SettingsError(f"an announcement is over its limit of {MAX_RECORD_SIZE} B: {error}") from error
    return signed + identity.sign(_RECORD_DOMAIN + network_id + signed)


def read_announcement(
    content: bytes, network_id: bytes, policy: AddressPolicy, *, now_ms: int, known_sequence: int = -1
) -> Announcement:
    """Return what a record says, once every rule of transport.md 5.5 holds, the cheap ones asked first.

    Raises `RecordRefused`.
    """
    _, tag, public_key, sequence, issued_ms, expires_ms = _read_head(content)
    if tag != _network_tag(network_id):
        raise RecordRefused(Refusal.OTHER_NETWORK)
    if sequence <= known_sequence:
        raise RecordRefused(Refusal.REPLAYED)
    _check_times(issued_ms, expires_ms, now_ms)
    signed, signature = content[:-SIGNATURE_SIZE], content[-SIGNATURE_SIZE:]
    if not _is_signed(public_key, _RECORD_DOMAIN + network_id + signed, signature):
        raise RecordRefused(Refusal.FORGED)
    head = Announcement(public_key, sequence, issued_ms, expires_ms)
    try:
        announcement = _read_body(head, MapReader(unpack_map(signed[_HEAD.size :], _MAX_BODY_SIZE)))
    except ProtocolError as error:
        raise RecordRefused(Refusal.MALFORMED, error.text) from error
    _check_content(announcement, policy)
    _check_proofs(announcement, network_id, now_ms)
    return announcement


def author_of(content: bytes) -> tuple[NodeId, int]:
    """Return (node id, sequence) that a record claims, nothing proved. Raises `RecordRefused` by size alone."""
    head = _read_head(content)
    return node_id(head[2]), head[3]


def sign_voucher(sentinel: Identity, network_id: bytes, node: NodeId, expires_ms: int) -> bytes:
    """Return a sentinel's signature that `node` holds a reservation until then (unix ms)."""
    return sentinel.sign(_voucher_text(network_id, node, expires_ms))


def check_voucher(
    voucher: Voucher, network_id: bytes, node: NodeId, relay_id: NodeId | None, now_ms: int
) -> bool:
    """Say whether the sentinel `relay_id` vouches for `node`, now."""
    return (
        voucher.expires_ms > now_ms
        and node_id(voucher.sentinel_key) == relay_id
        and _is_signed(
            voucher.sentinel_key, _voucher_text(network_id, node, voucher.expires_ms), voucher.signature
        )
    )


def check_owner(owner: Owner, node: NodeId) -> bool:
    """Say whether the owner's key signed this node's id."""
    return _is_signed(owner.key, _OWNER_DOMAIN + node, owner.signature)


def _voucher_text(network_id: bytes, node: NodeId, expires_ms: int) -> bytes:
    return _VOUCHER_DOMAIN + network_id + node + expires_ms.to_bytes(8, "big")


def _is_signed(key: bytes, text: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def _network_tag(network_id: bytes) -> bytes:
    """Tells networks apart before any signature is checked; the signature covers the whole id."""
    return hashlib.sha256(b"tag1" + network_id).digest()[:8]


def _read_head(content: bytes) -> tuple[int, bytes, bytes, int, int, int]:
    if len(content) > MAX_RECORD_SIZE:
        raise RecordRefused(Refusal.OVERSIZED)
    if len(content) < _HEAD.size + SIGNATURE_SIZE:
        raise RecordRefused(Refusal.MALFORMED)
    head: tuple[int, bytes, bytes, int, int, int] = _HEAD.unpack_from(content)
    if head[0] != _VERSION or head[3] > MAX_SEQUENCE:
        raise RecordRefused(Refusal.MALFORMED)
    return head


def _check_times(issued_ms: int, expires_ms: int, now_ms: int) -> None:
    if issued_ms > now_ms + MAX_AHEAD_MS:
        raise RecordRefused(Refusal.FUTURE_DATED)
    if expires_ms - issued_ms > MAX_LIFETIME_MS:
        raise RecordRefused(Refusal.TOO_LONG_LIVED)
    if expires_ms <= now_ms or expires_ms <= issued_ms:
        raise RecordRefused(Refusal.EXPIRED)


def _check_content(announcement: Announcement, policy: AddressPolicy) -> None:
    """Raise `RecordRefused` for what nobody can mean; used at signing and at reading."""
    if announcement.has_left == bool(announcement.contacts):
        raise RecordRefused(Refusal.MALFORMED, "a record has contacts, or says that its node left")
    for contact in announcement.contacts:
        address = contact.address
        if fault := policy.check(address.host, address.port):
            raise RecordRefused(Refusal.BAD_ADDRESS, f"{address.host} {fault}")
        if address.node_id != announcement.node_id or (contact.voucher is None) == address.is_relayed:
            raise RecordRefused(Refusal.BAD_VOUCHER, "a relayed contact, and only that, has a voucher")
    if sum(contact.voucher is not None for contact in announcement.contacts) > MAX_RELAYED:
        raise RecordRefused(Refusal.BAD_VOUCHER, "too many")
    for offer in announcement.offers:
        _check_offer(offer)
    if not all(_is_between(0, ms, MAX_RTT_MS) for _, ms in announcement.neighbour_ms):
        raise RecordRefused(Refusal.ABSURD, "a round trip time to a neighbour")
    if not all(_is_between(MIN_MBPS, mbps, MAX_MBPS) for _, mbps in announcement.neighbour_mbps):
        raise RecordRefused(Refusal.ABSURD, "the bandwidth of a line to a neighbour")


def _check_offer(offer: SliceOffer) -> None:
    if not 0 <= offer.spec.start < offer.spec.end <= offer.num_layers:
        raise RecordRefused(Refusal.ABSURD, f"layers {offer.spec} of {offer.num_layers}")
    if not _is_between(MIN_LAYER_MS, offer.layer_ms, MAX_LAYER_MS):
        raise RecordRefused(Refusal.ABSURD, f"{offer.layer_ms} ms per layer")


def _is_between(low: float, value: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _check_proofs(announcement: Announcement, network_id: bytes, now_ms: int) -> None:
    node = announcement.node_id
    for contact in announcement.contacts:
        voucher, relay_id = contact.voucher, contact.address.relay_id
        if voucher is not None and not check_voucher(voucher, network_id, node, relay_id, now_ms):
            raise RecordRefused(Refusal.BAD_VOUCHER)
    if announcement.owner is not None and not check_owner(announcement.owner, node):
        raise RecordRefused(Refusal.BAD_OWNER)


def _pack(announcement: Announcement, network_id: bytes) -> bytes:
    times = (announcement.sequence, announcement.issued_ms, announcement.expires_ms)
    if not all(0 <= value <= MAX_SEQUENCE for value in times):
        raise RecordRefused(Refusal.MALFORMED, "a sequence or time is out of range")
    head = _HEAD.pack(_VERSION, _network_tag(network_id), announcement.public_key, *times)
    return head + pack_map(_body_fields(announcement), _MAX_BODY_SIZE)


def _body_fields(announcement: Announcement) -> dict[str, object]:
    """Only what differs from the defaults travels."""
    owner = announcement.owner
    fields: dict[str, object] = {
        "c": [_contact_item(contact) for contact in announcement.contacts],
        "r": list(announcement.roles),
        "k": announcement.seal_key,
        "t": [int(dtype) for dtype in announcement.dtypes],
        "o": [offer_fields(offer) for offer in announcement.offers],
        "l": announcement.load,
        "m": announcement.max_sessions,
        "f": announcement.free_bytes,
        "w": b"" if owner is None else owner.key + owner.signature,
        "n": [[prefix, float(ms)] for prefix, ms in announcement.neighbour_ms],
        "b": [[prefix, float(mbps)] for prefix, mbps in announcement.neighbour_mbps],
        "v": announcement.moved,
        "x": announcement.has_left,
        "i": [[prefix, start, end] for prefix, start, end in announcement.intends],
    }
    return {key: value for key, value in fields.items() if value}


def _read_body(head: Announcement, fields: MapReader) -> Announcement:
    """Raises `ProtocolError` MALFORMED."""
    node = head.node_id
    dtypes = _listed(fields, "t", lambda: fields.integers("t", 0, 255, max_count=32))
    return replace(
        head,
        contacts=tuple(
            _read_contact(node, item)
            for item in _listed(fields, "c", lambda: tuple(fields.rows("c", max_count=MAX_CONTACTS)))
        ),
        roles=_listed(fields, "r", lambda: fields.texts("r", max_count=MAX_ROLES)),
        seal_key=_sized(fields.blob("k", None, default=b""), (0, KEY_SIZE)),
        dtypes=tuple(WireDtype(number) for number in dtypes if number in WIDTHS),
        offers=tuple(
            read_offer(offer)
            for offer in _listed(fields, "o", lambda: tuple(fields.maps("o", max_count=MAX_OFFERS)))
        ),
        load=fields.integer("l", 0, U32, default=0),
        max_sessions=fields.integer("m", 0, U32, default=0),
        free_bytes=fields.integer("f", 0, U64, default=0),
        owner=_read_owner(fields.blob("w", None, default=b"")),
        neighbour_ms=tuple(
            _read_neighbour(item)
            for item in _listed(fields, "n", lambda: tuple(fields.rows("n", max_count=MAX_NEIGHBOURS)))
        ),
        neighbour_mbps=tuple(
            _read_neighbour(item)
            for item in _listed(fields, "b", lambda: tuple(fields.rows("b", max_count=MAX_NEIGHBOURS)))
        ),
        moved=_sized(fields.blob("v", None, default=b""), range(MAX_MOVED_SIZE + 1)),
        has_left=fields.flag("x"),
        intends=tuple(
            _read_intention(item)
            for item in _listed(fields, "i", lambda: tuple(fields.rows("i", max_count=MAX_OFFERS)))
        ),
    )


def _listed(fields: MapReader, key: str, read: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    return read() if key in fields else ()


def _sized(content: bytes, sizes: range | tuple[int, ...]) -> bytes:
    if len(content) not in sizes:
        raise malformed("a byte string has the wrong size")
    return content


def _contact_item(contact: Contact) -> list[object]:
    item: list[object] = [contact.address.host, contact.address.port]
    voucher = contact.voucher
    if voucher is not None:
        item += [voucher.sentinel_key, voucher.expires_ms, voucher.signature]
    return item


def _read_contact(node: NodeId, item: list[Any]) -> Contact:
    match item:
        case [str(host), int(port)] if type(port) is int:
            return Contact(NodeAddress(node, host, port))
        case [str(host), int(port), bytes(key), int(expires_ms), bytes(signature)] if (
            type(port) is int and type(expires_ms) is int and 0 <= expires_ms <= U64 and len(key) == KEY_SIZE
        ):
            voucher = Voucher(key, expires_ms, _sized(signature, (SIGNATURE_SIZE,)))
            return Contact(NodeAddress(node, host, port, node_id(key)), voucher)
    raise malformed("a contact is no contact")


def _read_owner(content: bytes) -> Owner | None:
    _sized(content, (0, KEY_SIZE + SIGNATURE_SIZE))
    return Owner(content[:KEY_SIZE], content[KEY_SIZE:]) if content else None


def _read_neighbour(item: list[Any]) -> tuple[bytes, float]:
    match item:
        case [bytes(prefix), float(ms)] if len(prefix) == PREFIX_SIZE:
            return prefix, ms
    raise malformed("a neighbour is no neighbour")


def _read_intention(item: list[Any]) -> tuple[bytes, int, int]:
    match item:
        case [bytes(prefix), int(start), int(end)] if (
            len(prefix) == PREFIX_SIZE and type(start) is int and type(end) is int and 0 <= start < end <= U32
        ):
            return prefix, start, end
    raise malformed("an intention is none")
