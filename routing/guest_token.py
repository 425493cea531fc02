"""Guest tokens: a short-lived permission that a member signs for somebody who is on no list.

Bound to one network, and to one client unless it is for anybody who holds it. `quota` is how many sessions the guest
may have open at once through one node, counted where its routes begin. Knows bytes and signatures; nothing of lists
and links.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from routing.errors import ErrorCode, SecurityError, SettingsError
from routing.identity import CLOCK_SKEW_S, Identity
from routing.types import NodeId

MAX_LIFETIME_S = 7 * 24 * 3600  # a token cannot be called back, but for dropping its issuer
MAX_QUOTA = (1 << 16) - 1
TEXT_PREFIX = "diffuse-guest-"
_DOMAIN = b"diffuse/guest/1"
_BODY = struct.Struct(
    ">BHQQ32s32s"
)  # scope, quota, issued, expires (unix s), issuer's key, client id or zeros
_SIGNATURE_SIZE = 64
TOKEN_SIZE = _BODY.size + _SIGNATURE_SIZE  # 147 B
_ANYBODY = NodeId(bytes(32))


class GuestScope(IntEnum):
    """What a guest may do."""

    USE = 1  # ask nodes for work
    SERVE = 2  # be a node as well


@dataclass(frozen=True, slots=True)
class GuestToken:
    """What a token permits. `client_id` None: whoever holds it, one client at a time."""

    issuer_key: bytes
    client_id: NodeId | None
    scope: GuestScope
    issued_s: int
    expires_s: int
    quota: int  # sessions at once through one node


def sign_guest_token(
    issuer: Identity,
    network_id: bytes,
    *,
    client_id: NodeId | None,
    scope: GuestScope = GuestScope.USE,
    now_s: float,
    lifetime_s: float,
    quota: int,
) -> bytes:
    """Return a signed token of `TOKEN_SIZE` bytes. Raises `SettingsError` for a lifetime or quota out of range."""
    if not 1 <= lifetime_s <= MAX_LIFETIME_S:
        raise SettingsError("a guest token lives for a second at least and 7 days at most")
    if not 1 <= quota <= MAX_QUOTA:
        raise SettingsError(f"a guest's quota is 1 to {MAX_QUOTA} sessions at once")
    issued_s, client = int(now_s), client_id or _ANYBODY
    body = _BODY.pack(scope, quota, issued_s, issued_s + int(lifetime_s), issuer.public_key, client)
    return body + issuer.sign(_DOMAIN + network_id + body)


def read_guest_token(content: bytes, network_id: bytes, *, now_s: float) -> GuestToken:
    """Return what a token permits now. Raises `SecurityError` NOT_ALLOWED saying what is wrong with it.

    That its issuer may issue, and that the peer is its client, is for the caller to check.
    """
    if len(content) != TOKEN_SIZE:
        raise _refused("has the wrong size")
    body, signature = content[: _BODY.size], content[_BODY.size :]
    scope, quota, issued_s, expires_s, issuer_key, client_id = _BODY.unpack(body)
    if scope not in tuple(GuestScope) or not quota or not 0 < expires_s - issued_s <= MAX_LIFETIME_S:
        raise _refused("names an unknown scope, no quota or a lifetime over 7 days")
    if now_s < issued_s - CLOCK_SKEW_S:
        raise _refused("was issued in the future: compare clocks")
    if now_s >= expires_s:
        raise _refused("has expired")
    try:
        Ed25519PublicKey.from_public_bytes(issuer_key).verify(signature, _DOMAIN + network_id + body)
    except (InvalidSignature, ValueError) as error:
        raise _refused("is not signed by its issuer for this network") from error
    client = None if client_id == _ANYBODY else NodeId(client_id)
    return GuestToken(issuer_key, client, GuestScope(scope), issued_s, expires_s, quota)


def is_for_anybody(content: bytes) -> bool:
    """Whether whoever sees this token, checked or not, can use it."""
    return len(content) == TOKEN_SIZE and content[: _BODY.size].endswith(_ANYBODY)


def format_guest_token(content: bytes) -> str:
    """Return a token as a text to send by mail; `parse_guest_token` is the inverse."""
    return TEXT_PREFIX + base64.urlsafe_b64encode(content).decode("ascii").rstrip("=")


def parse_guest_token(text: str) -> bytes:
    """Return the bytes of a token's text, unchecked but for their number. Raises `SettingsError`."""
    digits = text.strip().removeprefix(TEXT_PREFIX)
    try:
        content = base64.b64decode(digits + "=" * (-len(digits) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if len(content) != TOKEN_SIZE:
        raise SettingsError("this is no guest token: take the whole line that `diffuse keys guest` printed")
    return content


def _refused(what: str) -> SecurityError:
    return SecurityError(ErrorCode.NOT_ALLOWED, f"the guest token {what}")
