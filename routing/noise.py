"""Noise_XX_25519_ChaChaPoly and its XXpsk3 form (Noise Protocol Framework, revision 34).

Sans I/O: bytes in, bytes out. Knows nothing of identities, certificates or websockets.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from routing.errors import ErrorCode, SecurityError
from routing.types import Buffer

HashName = Literal["SHA256", "BLAKE2s"]

KEY_SIZE = 32
TAG_SIZE = 16
MAX_MESSAGE_SIZE = 65_535
_MAX_NONCE = 2**64 - 1  # reserved for REKEY (section 4.2)
_HASHES: dict[HashName, Callable[..., Any]] = {"SHA256": hashlib.sha256, "BLAKE2s": hashlib.blake2s}
_XX: tuple[tuple[str, ...], ...] = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_XXPSK3: tuple[tuple[str, ...], ...] = (("e",), ("e", "ee", "s", "es"), ("s", "se", "psk"))
_Snapshot = tuple[bytes, bytes, bytes, int, bytes, bytes]
_pack_nonce = struct.Struct("<4xQ").pack


class CipherState:
    """A key and its counter; each call uses up one nonce (section 5.1)."""

    __slots__ = ("_aead", "_key", "nonce")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = ChaCha20Poly1305(key)
        self.nonce = 0

    def encrypt(self, plaintext: Buffer, associated: bytes = b"") -> bytes:
        """Return ciphertext and tag."""
        return self._aead.encrypt(self._next_nonce(), plaintext, associated)

    def decrypt(self, ciphertext: Buffer, associated: bytes = b"") -> bytes:
        """Return the plaintext; raise `SecurityError` DECRYPT when it does not authenticate."""
        nonce = _pack_nonce(self.nonce)
        try:
            plaintext = self._aead.decrypt(nonce, ciphertext, associated)
        except InvalidTag as error:
            raise _decrypt_error() from error
        self._next_nonce()
        return plaintext

    def encrypt_into(self, plaintext: Buffer, out: Buffer) -> None:
        """Write ciphertext and tag to `out`, which is `TAG_SIZE` longer than `plaintext`."""
        self._aead.encrypt_into(self._next_nonce(), plaintext, None, out)

    def decrypt_into(self, ciphertext: Buffer, out: Buffer) -> None:
        """Write the plaintext to `out`; raise `SecurityError` DECRYPT when it does not authenticate."""
        assert self.nonce < _MAX_NONCE, "a cipher state is used up"
        try:
            self._aead.decrypt_into(_pack_nonce(self.nonce), ciphertext, None, out)
        except InvalidTag as error:
            raise _decrypt_error() from error
        self.nonce += 1

    def rekey(self) -> None:
        """Replace the key by REKEY(k) = ENCRYPT(k, 2^64 - 1, "", zeros)[:32]; the counter goes on."""
        self._key = self._aead.encrypt(_pack_nonce(_MAX_NONCE), bytes(KEY_SIZE), None)[:KEY_SIZE]
        self._aead = ChaCha20Poly1305(self._key)

    def _next_nonce(self) -> bytes:
        assert self.nonce < _MAX_NONCE, "a cipher state is used up"
        nonce = _pack_nonce(self.nonce)
        self.nonce += 1
        return nonce


class HandshakeState:
    """One side of an XX or XXpsk3 handshake (section 5.3): write and read three messages in turn.

    With `psk` (32 B) the pattern is XXpsk3. `ephemeral` is made fresh when it is not given.
    """

    def __init__(
        self,
        *,
        is_initiator: bool,
        prologue: bytes,
        static: X25519PrivateKey,
        psk: bytes | None = None,
        hash_name: HashName = "SHA256",
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._is_initiator = is_initiator
        self._static = static
        self._psk = psk
        self._ephemeral = ephemeral
        self._hash_function = _HASHES[hash_name]
        name = f"Noise_{'XX' if psk is None else 'XXpsk3'}_25519_ChaChaPoly_{hash_name}".encode()
        self._pattern = _XX if psk is None else _XXPSK3
        self._h = name.ljust(32, b"\0") if len(name) <= 32 else self._hash(name)
        self._ck = self._h
        self._cipher: CipherState | None = None
        self._cipher_key = b""
        self._mix_hash(prologue)
        self._turn = 0
        self.remote_ephemeral: bytes = b""
        self.remote_static: bytes = b""

    @property
    def is_finished(self) -> bool:
        """Whether all three messages went through."""
        return self._turn == len(self._pattern)

    @property
    def handshake_hash(self) -> bytes:
        """The hash of the whole transcript, for channel binding."""
        return self._h

    def write_message(self, payload: bytes = b"") -> bytes:
        """Return the next message of ours, with `payload` inside (encrypted from message 2 on)."""
        assert self._is_my_turn(writing=True), "not our turn to write"
        parts = [self._write_token(token) for token in self._pattern[self._turn]]
        parts.append(self._encrypt_and_hash(payload))
        self._turn += 1
        return b"".join(parts)

    def read_message(self, message: bytes) -> bytes:
        """Take the peer's next message and return its payload.

        Raises `SecurityError` HANDSHAKE when it is cut short, and DECRYPT when it does not authenticate:
        another prologue, another pre-shared key, or somebody in between. A failed read changes nothing.
        """
        assert self._is_my_turn(writing=False), "not our turn to read"
        before = self._snapshot()
        try:
            for token in self._pattern[self._turn]:
                message = self._read_token(token, message)
            payload = self._decrypt_and_hash(message)
        except SecurityError:
            self._restore(before)
            raise
        self._turn += 1
        return payload

    def replace_psk(self, psk: bytes) -> None:
        """Take another pre-shared key for what is still to come: XXpsk3 first mixes it in message 3."""
        assert self._psk is not None, "the pattern has no pre-shared key"
        self._psk = psk

    def split(self) -> tuple[CipherState, CipherState]:
        """Return the cipher states (ours to send with, ours to receive with)."""
        assert self.is_finished, "the handshake is not finished"
        first, second = (CipherState(key) for key in self._hkdf(b"", 2))
        return (first, second) if self._is_initiator else (second, first)

    def peek(self, message: bytes) -> bytes:
        """Return what message 2 seems to hold, *without authenticating it*.

        Only for telling the user why a handshake failed: when the peer mixed in another prologue the keys
        still agree but no tag does. (With a psk message 1 fails already.) State is left as it was.
        """
        assert self._is_initiator, "only message 2 can be peeked at"
        before = self._snapshot()
        try:
            self.remote_ephemeral, rest = _cut(message, KEY_SIZE)
            self._mix_key(self._exchange(self._own_ephemeral(), self.remote_ephemeral))
            static, rest = _cut(rest, KEY_SIZE + TAG_SIZE)
            remote_static = _unauthenticated(self._cipher_key, static)
            self._mix_key(self._exchange(self._own_ephemeral(), remote_static))
            return _unauthenticated(self._cipher_key, rest)
        finally:
            self._restore(before)

    def _snapshot(self) -> _Snapshot:
        nonce = 0 if self._cipher is None else self._cipher.nonce
        return self._h, self._ck, self._cipher_key, nonce, self.remote_ephemeral, self.remote_static

    def _restore(self, snapshot: _Snapshot) -> None:
        self._h, self._ck, key, nonce, self.remote_ephemeral, self.remote_static = snapshot
        self._set_cipher(key)
        if self._cipher is not None:
            self._cipher.nonce = nonce

    def _is_my_turn(self, *, writing: bool) -> bool:
        return not self.is_finished and ((self._turn % 2 == 0) == self._is_initiator) == writing

    def _write_token(self, token: str) -> bytes:
        match token:
            case "e":
                if self._ephemeral is None:
                    self._ephemeral = X25519PrivateKey.generate()
                public = self._ephemeral.public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                return public
            case "s":
                return self._encrypt_and_hash(self._static.public_key().public_bytes_raw())
            case "psk":
                self._mix_psk()
            case _:
                self._mix_secret(token)
        return b""

    def _read_token(self, token: str, message: bytes) -> bytes:
        match token:
            case "e":
                self.remote_ephemeral, message = _cut(message, KEY_SIZE)
                self._mix_ephemeral(self.remote_ephemeral)
            case "s":
                sealed, message = _cut(message, KEY_SIZE + TAG_SIZE)
                self.remote_static = self._decrypt_and_hash(sealed)
            case "psk":
                self._mix_psk()
            case _:
                self._mix_secret(token)
        return message

    def _mix_ephemeral(self, public: bytes) -> None:
        self._mix_hash(public)
        if self._psk is not None:  # section 9.2: psk handshakes mix every ephemeral key into the chain
            self._mix_key(public)

    def _mix_secret(self, token: str) -> None:
        mine, theirs = tuple(token) if self._is_initiator else tuple(reversed(token))
        private = self._own_ephemeral() if mine == "e" else self._static
        public = self.remote_ephemeral if theirs == "e" else self.remote_static
        self._mix_key(self._exchange(private, public))

    def _mix_psk(self) -> None:
        assert self._psk is not None
        self._ck, temp_h, key = self._hkdf(self._psk, 3)
        self._mix_hash(temp_h)
        self._set_cipher(key)

    def _own_ephemeral(self) -> X25519PrivateKey:
        assert self._ephemeral is not None, "no ephemeral key was written yet"
        return self._ephemeral

    def _exchange(self, private: X25519PrivateKey, public: bytes) -> bytes:
        try:
            return private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a low-order point: cryptography refuses the all-zero secret
            raise SecurityError(ErrorCode.HANDSHAKE, "the peer sent a key that is no key") from error

    def _mix_key(self, secret: bytes) -> None:
        self._ck, key = self._hkdf(secret, 2)
        self._set_cipher(key)

    def _set_cipher(self, key: bytes) -> None:
        self._cipher_key = key
        self._cipher = CipherState(key) if key else None

    def _mix_hash(self, content: bytes) -> None:
        self._h = self._hash(self._h + content)

    def _encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = plaintext if self._cipher is None else self._cipher.encrypt(plaintext, self._h)
        self._mix_hash(ciphertext)
        return ciphertext

    def _decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plaintext = ciphertext if self._cipher is None else self._cipher.decrypt(ciphertext, self._h)
        self._mix_hash(ciphertext)
        return plaintext

    def _hash(self, content: bytes) -> bytes:
        digest: bytes = self._hash_function(content).digest()
        return digest

    def _hkdf(self, secret: bytes, num_outputs: int) -> list[bytes]:
        """HKDF of section 4.3: HMAC-based, chained from the chaining key."""
        key = hmac.new(self._ck, secret, self._hash_function).digest()
        outputs: list[bytes] = []
        for number in range(1, num_outputs + 1):
            previous = outputs[-1] if outputs else b""
            outputs.append(hmac.new(key, previous + bytes([number]), self._hash_function).digest())
        return outputs


def _cut(message: bytes, size: int) -> tuple[bytes, bytes]:
    if len(message) < size:
        raise SecurityError(ErrorCode.HANDSHAKE, "a handshake message was cut short")
    return message[:size], message[size:]


def _unauthenticated(key: bytes, sealed: bytes) -> bytes:
    """Undo ChaCha20 (RFC 8439, block counter 1, nonce 0) and drop the tag unchecked."""
    _, body = sealed[-TAG_SIZE:], sealed[:-TAG_SIZE]
    stream = Cipher(algorithms.ChaCha20(key, struct.pack("<IIQ", 1, 0, 0)), mode=None).decryptor()
    return stream.update(body)


def _decrypt_error() -> SecurityError:
    return SecurityError(ErrorCode.DECRYPT, "a sealed message does not authenticate")
