from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from routing.errors import ErrorCode, SecurityError
from routing.noise import CipherState, HandshakeState

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "noise_xx.json").read_text()
)
PSK = b"p" * 32


def _vector_side(vector: dict[str, Any], side: str) -> HandshakeState:
    psks = vector.get(f"{side}_psks")
    return HandshakeState(
        is_initiator=side == "init",
        prologue=bytes.fromhex(vector[f"{side}_prologue"]),
        static=X25519PrivateKey.from_private_bytes(bytes.fromhex(vector[f"{side}_static"])),
        ephemeral=X25519PrivateKey.from_private_bytes(bytes.fromhex(vector[f"{side}_ephemeral"])),
        psk=bytes.fromhex(psks[0]) if psks else None,
        hash_name="SHA256" if vector["protocol_name"].endswith("SHA256") else "BLAKE2s",
    )


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["protocol_name"] for vector in VECTORS])
def test_public_vector(vector: dict[str, Any]) -> None:
    writer, reader = _vector_side(vector, "init"), _vector_side(vector, "resp")
    initiator = writer
    for message in vector["messages"][:3]:
        sealed = writer.write_message(bytes.fromhex(message["payload"]))
        assert sealed.hex() == message["ciphertext"]
        assert reader.read_message(sealed).hex() == message["payload"]
        writer, reader = reader, writer
    assert initiator.handshake_hash.hex() == vector["handshake_hash"]
    sender, receiver = writer.split(), reader.split()
    for message in vector["messages"][3:]:
        sealed = sender[0].encrypt(bytes.fromhex(message["payload"]))
        assert sealed.hex() == message["ciphertext"]
        assert receiver[1].decrypt(sealed).hex() == message["payload"]
        sender, receiver = receiver, sender


def test_vectors_cover_both_patterns_and_both_hashes() -> None:
    assert {vector["protocol_name"] for vector in VECTORS} == {
        f"Noise_{pattern}_25519_ChaChaPoly_{name}"
        for pattern in ("XX", "XXpsk3")
        for name in ("SHA256", "BLAKE2s")
    }


def _partner(*, is_initiator: bool, prologue: bytes, psk: bytes | None) -> NoiseConnection:
    pattern = b"XXpsk3" if psk else b"XX"
    partner = NoiseConnection.from_name(b"Noise_" + pattern + b"_25519_ChaChaPoly_SHA256")
    if is_initiator:
        partner.set_as_initiator()
    else:
        partner.set_as_responder()
    if psk:
        partner.set_psks(psk)
    partner.set_prologue(prologue)
    partner.set_keypair_from_private_bytes(Keypair.STATIC, X25519PrivateKey.generate().private_bytes_raw())
    partner.start_handshake()
    return partner


def _ours(*, is_initiator: bool, prologue: bytes = b"", psk: bytes | None = None) -> HandshakeState:
    return HandshakeState(
        is_initiator=is_initiator, prologue=prologue, static=X25519PrivateKey.generate(), psk=psk
    )


@pytest.mark.parametrize("psk", [None, PSK])
@given(prologue=st.binary(max_size=100), payloads=st.lists(st.binary(max_size=300), min_size=7, max_size=7))
def test_agrees_with_another_implementation_as_initiator(
    psk: bytes | None, prologue: bytes, payloads: list[bytes]
) -> None:
    ours = _ours(is_initiator=True, prologue=prologue, psk=psk)
    theirs = _partner(is_initiator=False, prologue=prologue, psk=psk)
    assert theirs.read_message(ours.write_message(payloads[0])) == payloads[0]
    assert ours.read_message(bytes(theirs.write_message(payloads[1]))) == payloads[1]
    assert theirs.read_message(ours.write_message(payloads[2])) == payloads[2]
    sending, receiving = ours.split()
    for payload in payloads[3:5]:
        assert theirs.decrypt(sending.encrypt(payload)) == payload
    for payload in payloads[5:]:
        assert receiving.decrypt(theirs.encrypt(payload)) == payload


@pytest.mark.parametrize("psk", [None, PSK])
def test_agrees_with_another_implementation_as_responder(psk: bytes | None) -> None:
    ours = _ours(is_initiator=False, prologue=b"both", psk=psk)
    theirs = _partner(is_initiator=True, prologue=b"both", psk=psk)
    assert ours.read_message(bytes(theirs.write_message(b"one"))) == b"one"
    assert theirs.read_message(ours.write_message(b"two")) == b"two"
    assert ours.read_message(bytes(theirs.write_message(b"three"))) == b"three"
    sending, receiving = ours.split()
    assert receiving.decrypt(theirs.encrypt(b"four")) == b"four"
    assert theirs.decrypt(sending.encrypt(b"five")) == b"five"


def _finished() -> tuple[HandshakeState, HandshakeState]:
    initiator, responder = _ours(is_initiator=True), _ours(is_initiator=False)
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    responder.read_message(initiator.write_message())
    return initiator, responder


def test_rekey_is_what_the_standard_defines() -> None:
    key = bytes(range(32))
    cipher = CipherState(key)
    cipher.encrypt(b"one")
    cipher.rekey()
    new_key = ChaCha20Poly1305(key).encrypt(struct.pack("<4xQ", 2**64 - 1), bytes(32), None)[:32]
    expected = ChaCha20Poly1305(new_key).encrypt(struct.pack("<4xQ", 1), b"two", b"")
    assert cipher.encrypt(b"two") == expected


def test_both_ends_agree_after_a_rekey_and_the_old_key_is_gone() -> None:
    initiator, responder = _finished()
    sending, receiving = initiator.split()[0], responder.split()[1]
    sending.rekey()
    sealed = sending.encrypt(b"later")
    with pytest.raises(SecurityError):
        receiving.decrypt(sealed)
    receiving.rekey()
    assert receiving.decrypt(sealed) == b"later"


def test_each_side_learns_the_others_static_key() -> None:
    initiator, responder = _finished()
    assert len(initiator.remote_static) == len(responder.remote_static) == 32
    assert initiator.handshake_hash == responder.handshake_hash


def test_another_prologue_fails_at_the_second_message() -> None:
    initiator, responder = _ours(is_initiator=True, prologue=b"a"), _ours(is_initiator=False, prologue=b"b")
    responder.read_message(initiator.write_message())
    with pytest.raises(SecurityError) as caught:
        initiator.read_message(responder.write_message())
    assert caught.value.code is ErrorCode.DECRYPT


def test_another_psk_fails_at_the_third_message() -> None:
    initiator, responder = _ours(is_initiator=True, psk=b"a" * 32), _ours(is_initiator=False, psk=b"b" * 32)
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    with pytest.raises(SecurityError):
        responder.read_message(initiator.write_message())


@given(st.data())
def test_any_changed_byte_of_the_second_message_is_noticed(data: st.DataObject) -> None:
    initiator, responder = _ours(is_initiator=True), _ours(is_initiator=False)
    responder.read_message(initiator.write_message())
    message = bytearray(responder.write_message(b"payload"))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= data.draw(st.integers(1, 127 if position == 31 else 255))  # X25519 ignores bit 255
    with pytest.raises(SecurityError):
        initiator.read_message(bytes(message))


def test_any_cut_of_the_second_message_is_noticed_and_changes_nothing() -> None:
    initiator, responder = _ours(is_initiator=True), _ours(is_initiator=False)
    responder.read_message(initiator.write_message())
    message = responder.write_message(b"payload")
    for size in range(len(message)):
        with pytest.raises(SecurityError):
            initiator.read_message(message[:size])
    assert initiator.read_message(message) == b"payload"


def test_low_order_key_is_refused() -> None:
    responder = _ours(is_initiator=False)
    responder.read_message(bytes(32))
    with pytest.raises(SecurityError) as caught:
        responder.write_message()
    assert caught.value.code is ErrorCode.HANDSHAKE


def test_with_a_psk_another_prologue_fails_at_the_first_message() -> None:
    initiator = _ours(is_initiator=True, prologue=b"a", psk=PSK)
    responder = _ours(is_initiator=False, prologue=b"b", psk=PSK)
    with pytest.raises(SecurityError):
        responder.read_message(initiator.write_message())


def test_peek_shows_what_another_prologue_hid_and_leaves_the_state() -> None:
    initiator = _ours(is_initiator=True, prologue=b"a")
    responder = _ours(is_initiator=False, prologue=b"b")
    responder.read_message(initiator.write_message())
    message = responder.write_message(b"who I am")
    before = initiator.handshake_hash
    assert initiator.peek(message) == b"who I am"
    assert initiator.handshake_hash == before


def test_in_place_calls_equal_the_plain_ones() -> None:
    first, second, third = (CipherState(bytes(32)) for _ in range(3))
    sealed = bytearray(16 + 5)
    first.encrypt_into(b"hello", sealed)
    assert sealed == second.encrypt(b"hello")
    opened = bytearray(5)
    third.decrypt_into(sealed, opened)
    assert opened == b"hello"
    assert first.nonce == second.nonce == third.nonce == 1


def test_failed_decryption_uses_up_no_nonce() -> None:
    sending, receiving = CipherState(bytes(32)), CipherState(bytes(32))
    sealed = sending.encrypt(b"hello")
    with pytest.raises(SecurityError):
        receiving.decrypt(bytes(len(sealed)))
    assert receiving.decrypt(sealed) == b"hello"
