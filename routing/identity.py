"""Who a peer is: Ed25519 identities, node ids, and certificates for the static keys of a handshake.

Knows key files and signatures. Knows nothing of Noise, sockets or what a peer is allowed to do.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from routing.errors import ErrorCode, SecurityError, SettingsError
from routing.private_file import read_private
from routing.types import NodeId

KEY_SIZE = 32
SIGNATURE_SIZE = 64
MAX_LIFETIME_S = 24 * 3600  # transport.md 2.1
CLOCK_SKEW_S = 300  # what two honest clocks may differ by
_DOMAIN = b"diffuse/static-key/1"
_VALIDITY = struct.Struct(">QQ")  # not_before, not_after: unix seconds
CERTIFICATE_SIZE = _VALIDITY.size + SIGNATURE_SIZE


def node_id(public_key: bytes) -> NodeId:
    """Return the 32-byte id of an Ed25519 public key; the only place where ids come from."""
    return NodeId(hashlib.sha256(b"nid1" + public_key).digest())


class Identity:
    """A node's long-lived Ed25519 key pair."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.node_id: NodeId = node_id(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.node_id.hex()})"

    @classmethod
    def generate(cls) -> Identity:
        """Make a fresh identity, as clients do at each start."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read an identity that `save` wrote; raise `SettingsError` when it is missing or not private."""
        secret = read_private(path, "key file", KEY_SIZE + 1)
        if len(secret) != KEY_SIZE:
            raise SettingsError(
                f"the key file {path} does not hold a raw {KEY_SIZE}-byte key: make a new one"
            )
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    def save(self, path: Path) -> None:
        """Write the key to a new file with mode 0600; raise `SettingsError` rather than overwrite one."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise SettingsError(f"the key file {path} exists already and is not overwritten") from error
        except OSError as error:
            raise SettingsError(f"cannot write the key file {path}: {error.strerror}") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._private_key.private_bytes_raw())

    def sign(self, text: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature (RFC 8032) of `text`."""
        return self._private_key.sign(text)


@dataclass(frozen=True, slots=True)
class StaticKey:
    """An X25519 key for handshakes, with the certificate that ties it to an identity."""

    private_key: X25519PrivateKey = field(repr=False)
    certificate: bytes = field(repr=False)  # not_before u64 | not_after u64 | signature
    not_after: int

    @classmethod
    def issue(cls, identity: Identity, network_id: bytes, now_s: float) -> StaticKey:
        """Make a fresh key and sign it for `MAX_LIFETIME_S`, less the allowed clock skew."""
        private_key = X25519PrivateKey.generate()
        not_before = max(0, int(now_s) - CLOCK_SKEW_S)
        not_after = not_before + MAX_LIFETIME_S
        validity = _VALIDITY.pack(not_before, not_after)
        signed = _signed_text(network_id, private_key.public_key().public_bytes_raw(), validity)
        return cls(private_key, validity + identity.sign(signed), not_after)


def check_certificate(
    certificate: bytes, *, identity_key: bytes, static_key: bytes, network_id: bytes, now_s: float
) -> None:
    """Raise `SecurityError` unless `identity_key` vouches for `static_key` in this network, now."""
    if len(certificate) != CERTIFICATE_SIZE or len(identity_key) != KEY_SIZE:
        raise SecurityError(ErrorCode.HANDSHAKE, "the peer's certificate has the wrong size")
    validity, signature = certificate[: _VALIDITY.size], certificate[_VALIDITY.size :]
    try:
        signed = _signed_text(network_id, static_key, validity)
        Ed25519PublicKey.from_public_bytes(identity_key).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise SecurityError(
            ErrorCode.HANDSHAKE, "the peer's certificate is not signed by its identity"
        ) from error
    not_before, not_after = _VALIDITY.unpack(validity)
    if not_after - not_before > MAX_LIFETIME_S:
        raise SecurityError(ErrorCode.HANDSHAKE, "the peer's certificate lives longer than 24 h")
    if not not_before - CLOCK_SKEW_S <= now_s <= not_after:
        raise SecurityError(
            ErrorCode.CERTIFICATE_EXPIRED, "the peer's certificate is not valid now: compare clocks"
        )


class StaticKeyring:
    """Hands out a static key that is fresh at process start and renewed at half of its life."""

    def __init__(
        self, identity: Identity, network_id: bytes, *, now: Callable[[], float] = time.time
    ) -> None:
        self._identity = identity
        self._network_id = network_id
        self._now = now
        self._current = StaticKey.issue(identity, network_id, now())

    def current(self) -> StaticKey:
        """Return a key with at least half of its life ahead."""
        if self._current.not_after - self._now() < MAX_LIFETIME_S / 2:
            self._current = StaticKey.issue(self._identity, self._network_id, self._now())
        return self._current


def _signed_text(network_id: bytes, static_key: bytes, validity: bytes) -> bytes:
    return _DOMAIN + network_id + static_key + validity
