"""What only one party may read: route entries (HPKE to one node) and answers (to the gateway), and proofs.

RFC 9180 HPKE, base mode, DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305.
Knows nothing of links: what is sealed here stays sealed for whoever passes it on.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import replace
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from routing.errors import ErrorCode, SecurityError
from routing.maps import U32, MapReader, address_item, malformed, pack_map, unpack_map
from routing.steps import answer_header
from routing.types import (
    MAX_AXES,
    MAX_BRANCHES,
    MAX_MEMORY_ROWS,
    MAX_STREAMS,
    Answer,
    AnswerKind,
    HopEntry,
    NodeId,
    Prefix,
    SessionId,
    StepFlag,
    TraceContext,
)

KEY_SIZE = 32
PROOF_SIZE = 32
MAX_ENTRY_SIZE = 16 << 10  # room for 300 biases in `sampling`
MAX_HOPS = 128
# Purposes of a proof.
ATTACH = b"attach"
CANCEL = b"cancel"  # the session ends, here and down the chain
LEAVE = b"leave"  # a later route does without this node: it frees the session, those after it do not
KEEP = b"keep"  # the session ends here and down the chain; what it computed is kept for others that begin like it
MAX_PREFIXES = 8  # that one entry may name
PREFIX_HASH_SIZE = 16
TRACE_ID_SIZE = 16
TRACE_SIZE = TRACE_ID_SIZE + 8
MAX_NEXT = 4  # ways to the next hop: direct, and through the sentinels that it has reservations at
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_ENTRY_DOMAIN = b"diffuse/hop-entry/1"
_PROOF_DOMAIN = b"diffuse/proof/1"
_ANSWER_NONCE = struct.Struct(">III")  # epoch, part, step
_PLACE = struct.Struct(">16sHH")  # sid, epoch, hop


class SealKey:
    """A node's X25519 key that route entries are sealed to; it lives as long as the process."""

    def __init__(self, private_key: X25519PrivateKey) -> None:
        self._private_key = private_key
        self.public: bytes = private_key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> SealKey:
        """Make a fresh key."""
        return cls(X25519PrivateKey.generate())

    def open(self, sealed: bytes, aad: bytes) -> bytes:
        """Return what was sealed to this key; raise `SecurityError` DECRYPT when it was not, or not so."""
        try:
            return _SUITE.decrypt(sealed, self._private_key, info=_ENTRY_DOMAIN + aad)
        except (InvalidTag, ValueError) as error:
            raise SecurityError(ErrorCode.DECRYPT, "a route entry was not sealed to this node") from error


def entry_aad(session_id: SessionId, epoch: int, hop: int) -> bytes:
    """Return what an entry is bound to: its session, its epoch and its place in the chain."""
    return _PLACE.pack(session_id, epoch, hop)


def seal_entry(entry: HopEntry, seal_public_key: bytes, aad: bytes = b"") -> bytes:
    """Seal one node's part of a route, so that it alone learns it. `aad`: see `entry_aad`."""
    try:
        public_key = X25519PublicKey.from_public_bytes(seal_public_key)
        return _SUITE.encrypt(encode_entry(entry), public_key, info=_ENTRY_DOMAIN + aad)
    except ValueError as error:
        raise SecurityError(ErrorCode.HANDSHAKE, "a node's sealing key is no X25519 key") from error


def open_entry(sealed: bytes, seal_key: SealKey, aad: bytes = b"") -> HopEntry:
    """Open our part of a route; raise `SecurityError` DECRYPT or `ProtocolError` MALFORMED."""
    return decode_entry(seal_key.open(sealed, aad))


def seal_answer(answer_key: bytes, answer: Answer) -> Answer:
    """Seal an answer's payload for the gateway, bound to its header. Traces stay readable.

    The nonce is (epoch, part, step): one answer per step and route key, which a repeated step sends again as it is.
    """
    marked = replace(answer, flags=answer.flags | StepFlag.SEALED)
    payload = ChaCha20Poly1305(answer_key).encrypt(_nonce(answer), answer.payload, answer_header(marked))
    return replace(marked, payload=payload)


def open_answer(answer_key: bytes, answer: Answer) -> Answer:
    """Open a sealed answer (any other is refused); raise `SecurityError` DECRYPT. The payload is writable."""
    if not answer.flags & StepFlag.SEALED or len(answer.payload) < 16:
        raise SecurityError(ErrorCode.DECRYPT, "an answer that came down the chain is not sealed")
    payload = bytearray(len(answer.payload) - 16)
    try:
        ChaCha20Poly1305(answer_key).decrypt_into(
            _nonce(answer), answer.payload, answer_header(answer), payload
        )
    except InvalidTag as error:
        raise SecurityError(ErrorCode.DECRYPT, "a sealed answer does not authenticate") from error
    return replace(answer, payload=memoryview(payload), flags=answer.flags & ~StepFlag.SEALED)


def _nonce(answer: Answer) -> bytes:
    """Parts of one answer have nonces of their own; an answer in one piece is the last part of itself."""
    part = answer.rows - 1 if answer.kind is AnswerKind.CALL else 0
    return _ANSWER_NONCE.pack(answer.epoch, part, answer.step)


def proof(route_key: bytes, purpose: bytes, session_id: SessionId, epoch: int) -> bytes:
    """Return the 32-byte proof that its maker holds the route key (HMAC-SHA256, RFC 2104)."""
    text = _PROOF_DOMAIN + struct.pack(">B", len(purpose)) + purpose + session_id + struct.pack(">H", epoch)
    return hmac.digest(route_key, text, "sha256")


def is_proof(claim: bytes, route_key: bytes, purpose: bytes, session_id: SessionId, epoch: int) -> bool:
    """Compare a claimed proof in constant time."""
    return hmac.compare_digest(claim, proof(route_key, purpose, session_id, epoch))


def encode_entry(entry: HopEntry) -> bytes:
    """Return an entry's plain bytes."""
    fields: dict[str, object] = {
        "k": entry.route_key,
        "h": entry.hop,
        "n": entry.num_hops,
        "g": entry.gateway_id,
        "d": entry.model_digest,
        "a": entry.start,
        "b": entry.end,
        "i": int(entry.wire_in),
        "o": int(entry.wire_out),
        "p": entry.max_positions,
        "t": entry.idle_timeout_s,
        "ro": entry.run_opening,
        "rc": entry.run_closing,
        "ak": entry.answer_key,
        "te": entry.tenant,
    }
    if entry.resumes:
        fields["re"] = True
    if entry.answered:
        fields["an"] = entry.answered
    if entry.next_hop is not None:
        fields["nx"] = [address_item(address) for address in (entry.next_hop, *entry.next_alternatives)]
    if entry.sampling is not None:
        fields["sa"] = dict(entry.sampling)
    if entry.room:
        fields["rm"] = entry.room
    if entry.confirms:
        fields["cf"] = True
    if entry.prefixes:
        fields["pf"] = [[prefix.length, prefix.hash] for prefix in entry.prefixes]
    if entry.calls:
        fields["ca"] = True
    if entry.branches != 1:
        fields["br"] = entry.branches
    if entry.streams != 1:
        fields["st"] = entry.streams
    if entry.axes:
        fields["ax"] = entry.axes
    if entry.memory_rows:
        fields["me"] = entry.memory_rows
    if entry.trace is not None:
        fields["tc"] = entry.trace.trace_id + entry.trace.span_id
    return pack_map(fields, MAX_ENTRY_SIZE)


def decode_entry(content: bytes) -> HopEntry:
    """Return the entry that `content` holds; raise `ProtocolError` MALFORMED or TOO_BIG."""
    fields = MapReader(unpack_map(content, MAX_ENTRY_SIZE))
    num_hops = fields.integer("n", 1, MAX_HOPS)
    start, end = fields.layer_range("a", "b")
    next_hops = fields.addresses("nx", max_count=MAX_NEXT)
    if len({address.node_id for address in next_hops}) > 1:
        raise malformed("a route entry's next hop is several nodes")
    return HopEntry(
        route_key=fields.blob("k", KEY_SIZE),
        hop=fields.integer("h", 0, num_hops - 1),
        num_hops=num_hops,
        gateway_id=NodeId(fields.blob("g", 32)),
        model_digest=fields.blob("d", 32),
        start=start,
        end=end,
        wire_in=fields.dtype("i"),
        wire_out=fields.dtype("o"),
        max_positions=fields.integer("p", 1, U32),
        idle_timeout_s=fields.integer("t", 1, U32),
        next_hop=next_hops[0] if next_hops else None,
        next_alternatives=next_hops[1:],
        resumes=fields.flag("re"),
        answered=fields.integer("an", 0, U32, default=0),
        answer_key=_optional_blob(fields, "ak", KEY_SIZE),
        run_opening=fields.flag("ro"),
        run_closing=fields.flag("rc"),
        sampling=fields.plain("sa") if "sa" in fields else None,
        tenant=_optional_blob(fields, "te", 8),
        room=fields.integer("rm", 0, U32, default=0),
        confirms=fields.flag("cf"),
        prefixes=_read_prefixes(fields),
        calls=fields.flag("ca"),
        branches=fields.integer("br", 1, MAX_BRANCHES, default=1),
        streams=fields.integer("st", 1, MAX_STREAMS, default=1),
        axes=fields.integer("ax", 0, MAX_AXES, default=0),
        memory_rows=fields.integer("me", 0, MAX_MEMORY_ROWS, default=0),
        trace=_read_trace(fields),
    )


def _read_trace(fields: MapReader) -> TraceContext | None:
    """None also for ids of zeros, which W3C calls invalid: a session does not fail for its trace."""
    ids = _optional_blob(fields, "tc", TRACE_SIZE)
    trace_id, span_id = ids[:TRACE_ID_SIZE], ids[TRACE_ID_SIZE:]
    return TraceContext(trace_id, span_id) if any(trace_id) and any(span_id) else None


def _read_prefixes(fields: MapReader) -> tuple[Prefix, ...]:
    """The longest first, as the sender must have them: a node looks no further than the first that it holds."""
    if "pf" not in fields:
        return ()
    prefixes = tuple(_read_prefix(item) for item in fields.rows("pf", max_count=MAX_PREFIXES))
    lengths = [prefix.length for prefix in prefixes]
    if lengths != sorted(set(lengths), reverse=True):
        raise malformed("a route entry's prefixes are not in order")
    return prefixes


def _read_prefix(item: list[Any]) -> Prefix:
    match item:
        case [int(length), bytes(end)] if (
            type(length) is int and 0 < length <= U32 and len(end) == PREFIX_HASH_SIZE
        ):
            return Prefix(length, end)
    raise malformed("a route entry's prefix is none")


def _optional_blob(fields: MapReader, key: str, size: int) -> bytes:
    value = fields.blob(key, None, default=b"")
    if len(value) not in (0, size):
        raise malformed(f"field {key!r} is not {size} bytes")
    return value
