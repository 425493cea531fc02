"""The three messages that turn a channel into a session between two known identities (transport.md 2.1).

Noise XX, or XXpsk3 with a swarm secret; payloads carry the identity key, its certificate for the static key, and
capabilities. Sans I/O. Knows nothing of links, limits or who may connect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from routing.errors import ErrorCode, ProtocolError, RemoteError, SecurityError
from routing.identity import CERTIFICATE_SIZE, KEY_SIZE, Identity, StaticKeyring, check_certificate, node_id
from routing.maps import MapReader, pack_map, unpack_map
from routing.mux import MAX_HANDSHAKE
from routing.noise import CipherState, HandshakeState
from routing.types import Capabilities, NodeId
from routing.wire import decode_capabilities, encode_capabilities

_PROTOCOL = b"diffuse/1"
_PATHS = (b"\0", b"\1")  # direct, through a sentinel
_MAX_PAYLOAD = 900
_MISMATCH = "the handshake does not authenticate: swarm id, swarm secret, protocol version or key differ"


@dataclass(frozen=True, slots=True)
class Membership:
    """Who we are and which swarm we speak in: the same for every handshake."""

    identity: Identity
    network_id: bytes
    keyring: StaticKeyring = field(repr=False)
    psk: bytes | None = field(default=None, repr=False)
    now: Callable[[], float] = time.time
    accepted_psks: tuple[bytes, ...] = field(default=(), repr=False)  # of diallers, besides `psk`: a rotation


@dataclass(frozen=True, slots=True)
class Secured:
    """A finished handshake: who the peer is, what it can do, and the two keys."""

    peer_id: NodeId
    capabilities: Capabilities
    sending: CipherState = field(repr=False)
    receiving: CipherState = field(repr=False)
    peer_key: bytes = b""  # the Ed25519 key that `peer_id` comes from


class Handshake:
    """One side of one handshake. `target` is the id that is dialled; None on the accepting side."""

    def __init__(
        self,
        membership: Membership,
        capabilities: Capabilities,
        target: NodeId | None = None,
        *,
        is_relayed: bool = False,
    ) -> None:
        self._membership = membership
        self._path = _PATHS[is_relayed]
        self.capabilities = capabilities
        self.is_dialler = target is not None
        self._target = target
        self._static = membership.keyring.current()
        self._ephemeral = X25519PrivateKey.generate()
        self._state = self._state_for(membership.identity.node_id if target is None else target)
        self.secured: Secured | None = None

    def start(self) -> bytes:
        """Return the dialler's first message."""
        return self._state.write_message()

    def receive(self, message: bytes) -> bytes | None:
        """Take the peer's next message; return ours, if one is due. `secured` is set when all is done.

        Raises `SecurityError` (HANDSHAKE, ID_MISMATCH, NETWORK, CERTIFICATE_EXPIRED) or `ProtocolError`.
        """
        if len(message) > MAX_HANDSHAKE:
            raise ProtocolError(ErrorCode.TOO_BIG, "a handshake message is too long")
        if self.secured is not None:
            raise ProtocolError(ErrorCode.STATE, "a handshake message came after the handshake")
        if self.is_dialler:
            return self._receive_second(message)
        if not self._state.remote_ephemeral:
            self._read(message)
            return self._state.write_message(self._payload())
        self._receive_third(message)
        return None

    def _receive_second(self, message: bytes) -> bytes:
        try:
            payload = self._state.read_message(message)
        except SecurityError as error:
            raise self._explain(message) from error
        identity_key, capabilities = self._check(payload)
        peer_id = node_id(identity_key)
        if peer_id != self._target:
            raise _id_mismatch(peer_id)
        reply = self._state.write_message(self._payload())
        self.secured = Secured(peer_id, capabilities, *self._state.split(), identity_key)
        return reply

    def _receive_third(self, message: bytes) -> None:
        identity_key, capabilities = self._check(self._read_with_any_secret(message))
        self.secured = Secured(node_id(identity_key), capabilities, *self._state.split(), identity_key)

    def _read_with_any_secret(self, message: bytes) -> bytes:
        """While a swarm secret is rotated the dialler may hold the old one or the new one."""
        for psk in self._membership.accepted_psks:
            try:
                return self._state.read_message(message)
            except SecurityError:
                self._state.replace_psk(psk)
        return self._read(message)

    def _read(self, message: bytes) -> bytes:
        try:
            return self._state.read_message(message)
        except SecurityError as error:
            raise SecurityError(ErrorCode.HANDSHAKE, _MISMATCH) from error

    def _check(self, payload: bytes) -> tuple[bytes, Capabilities]:
        fields = MapReader(unpack_map(payload, _MAX_PAYLOAD))
        identity_key = fields.blob("pub", KEY_SIZE)
        check_certificate(
            fields.blob("cert", CERTIFICATE_SIZE),
            identity_key=identity_key,
            static_key=self._state.remote_static,
            network_id=self._membership.network_id,
            now_s=self._membership.now(),
        )
        capabilities = decode_capabilities(fields.blob("caps", None))
        if not set(capabilities.proto) & set(self.capabilities.proto):
            raise SecurityError(ErrorCode.VERSION, "the peer speaks no version of the protocol that we do")
        return identity_key, capabilities

    def _payload(self) -> bytes:
        fields = {
            "pub": self._membership.identity.public_key,
            "cert": self._static.certificate,
            "caps": encode_capabilities(self.capabilities),
        }
        return pack_map(fields, _MAX_PAYLOAD)

    def _state_for(self, target: NodeId) -> HandshakeState:
        return HandshakeState(
            is_initiator=self.is_dialler,
            prologue=_PROTOCOL + self._membership.network_id + target + self._path,
            static=self._static.private_key,
            psk=self._membership.psk,
            ephemeral=self._ephemeral,
        )

    def _explain(self, message: bytes) -> SecurityError:
        """Say why message 2 failed. The prologue names the target, so another node fails like another swarm;
        looking at what the message seems to hold tells them apart, for the text of an error only."""
        try:
            claimed = node_id(
                MapReader(unpack_map(self._state.peek(message), _MAX_PAYLOAD)).blob("pub", KEY_SIZE)
            )
        except RemoteError:
            return SecurityError(ErrorCode.HANDSHAKE, _MISMATCH)
        if claimed == self._target:
            return SecurityError(
                ErrorCode.NETWORK, "the node is the one dialled, but of another swarm or version"
            )
        try:
            again = self._state_for(claimed)
            again.write_message()
            again.read_message(message)
        except RemoteError:
            return SecurityError(ErrorCode.HANDSHAKE, _MISMATCH)
        return _id_mismatch(claimed)


def _id_mismatch(found: NodeId) -> SecurityError:
    return SecurityError(
        ErrorCode.ID_MISMATCH, f"the node at this address is {found.hex()}, not the one dialled"
    )
