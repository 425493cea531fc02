"""A statement that one identity was another before: signed by both keys, believed for a week.

Whoever is known by an old key shows it with the new one, until those who list ids have changed their lists. Knows
bytes and signatures; nothing of key files or of who is listed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from routing.errors import ErrorCode, SecurityError
from routing.identity import CLOCK_SKEW_S, Identity, node_id
from routing.types import NodeId

LIFETIME_S = 7 * 24 * 3600  # transport.md 9: the old key is kept so long
_DOMAIN = b"diffuse/moved/1"
_LAYOUT = struct.Struct(">32s32sQ64s64s")  # old key, new key, issued (unix s), signature of each
MOVED_SIZE = _LAYOUT.size  # 200 B


@dataclass(frozen=True, slots=True)
class Moved:
    """The holder of `old_key` goes by `new_key` since `issued_s` (unix)."""

    old_key: bytes
    new_key: bytes
    issued_s: int

    @property
    def old_id(self) -> NodeId:
        """The id that lists may still hold."""
        return node_id(self.old_key)

    @property
    def new_id(self) -> NodeId:
        """The id that peers see now."""
        return node_id(self.new_key)

    @property
    def expires_s(self) -> int:
        """When nobody believes it any more (unix)."""
        return self.issued_s + LIFETIME_S

    def is_live(self, now_s: float) -> bool:
        """Whether it holds now; one from the future, beyond what clocks differ by, does not."""
        return self.issued_s - CLOCK_SKEW_S <= now_s < self.expires_s


def sign_moved(old: Identity, new: Identity, now_s: float) -> bytes:
    """Return the statement that `old` is `new` from now on, signed by both."""
    issued_s = int(now_s)
    text = _signed_text(old.public_key, new.public_key, issued_s)
    return _LAYOUT.pack(old.public_key, new.public_key, issued_s, old.sign(text), new.sign(text))


def read_moved(content: bytes) -> Moved:
    """Return what a statement says. Raises `SecurityError` NOT_ALLOWED unless both keys signed it."""
    if len(content) != MOVED_SIZE:
        raise SecurityError(ErrorCode.NOT_ALLOWED, "a statement that a key has moved has the wrong size")
    old_key, new_key, issued_s, old_signature, new_signature = _LAYOUT.unpack(content)
    text = _signed_text(old_key, new_key, issued_s)
    try:
        Ed25519PublicKey.from_public_bytes(old_key).verify(old_signature, text)
        Ed25519PublicKey.from_public_bytes(new_key).verify(new_signature, text)
    except (InvalidSignature, ValueError) as error:
        text_of_error = "a statement that a key has moved is not signed by both keys"
        raise SecurityError(ErrorCode.NOT_ALLOWED, text_of_error) from error
    return Moved(old_key, new_key, issued_s)


def _signed_text(old_key: bytes, new_key: bytes, issued_s: int) -> bytes:
    return _DOMAIN + old_key + new_key + issued_s.to_bytes(8, "big")
