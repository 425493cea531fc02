from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import ErrorCode, ProtocolError, RemoteError
from routing.handshake import Handshake, Membership, Secured
from routing.identity import MAX_LIFETIME_S, Identity, StaticKeyring
from routing.types import Capabilities, NodeId, WireDtype

NETWORK_ID = b"n" * 32
FULL = Capabilities(
    dtypes=tuple(WireDtype),
    seal_key=b"k" * 32,
    slices=tuple((bytes([n] * 8), n, n + 1) for n in range(60)),
)


def membership(
    *, network_id: bytes = NETWORK_ID, psk: bytes | None = None, clock_s: float = 0.0
) -> Membership:
    identity = Identity.generate()

    def now() -> float:
        return 1_700_000_000.0 + clock_s

    return Membership(identity, network_id, StaticKeyring(identity, network_id, now=now), psk, now)


def shake(dialler: Membership, acceptor: Membership, target: NodeId | None = None) -> tuple[Secured, Secured]:
    near = Handshake(dialler, FULL, acceptor.identity.node_id if target is None else target)
    far = Handshake(acceptor, FULL)
    second = far.receive(near.start())
    assert second is not None
    third = near.receive(second)
    assert third is not None
    assert far.receive(third) is None
    assert near.secured is not None
    assert far.secured is not None
    return near.secured, far.secured


def refusal(dialler: Membership, acceptor: Membership, target: NodeId | None = None) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        shake(dialler, acceptor, target)
    return caught.value


@pytest.mark.parametrize("psk", [None, b"p" * 32])
def test_both_ends_know_each_other_and_can_talk(psk: bytes | None) -> None:
    dialler, acceptor = membership(psk=psk), membership(psk=psk)
    near, far = shake(dialler, acceptor)
    assert near.peer_id == acceptor.identity.node_id
    assert far.peer_id == dialler.identity.node_id
    assert near.capabilities == far.capabilities
    assert far.receiving.decrypt(near.sending.encrypt(b"hello")) == b"hello"
    assert near.receiving.decrypt(far.sending.encrypt(b"back")) == b"back"


def test_full_messages_stay_below_1024_bytes() -> None:
    dialler, acceptor = membership(psk=b"p" * 32), membership(psk=b"p" * 32)
    near, far = Handshake(dialler, FULL, acceptor.identity.node_id), Handshake(acceptor, FULL)
    first = near.start()
    second = far.receive(first) or b""
    third = near.receive(second) or b""
    assert len(first) < 64
    assert 300 < len(second) <= 1024
    assert 300 < len(third) <= 1024


def test_another_node_is_named_as_such() -> None:
    acceptor = membership()
    error = refusal(membership(), acceptor, NodeId(b"x" * 32))
    assert error.code is ErrorCode.ID_MISMATCH
    assert acceptor.identity.node_id.hex() in error.text


def test_another_swarm_is_named_as_such() -> None:
    assert refusal(membership(), membership(network_id=b"m" * 32)).code is ErrorCode.NETWORK


def test_another_node_of_another_swarm_is_a_failed_handshake() -> None:
    error = refusal(membership(), membership(network_id=b"m" * 32), NodeId(b"x" * 32))
    assert error.code is ErrorCode.HANDSHAKE
    assert "swarm" in error.text


@pytest.mark.parametrize(
    ("near", "far"),
    [(b"p" * 32, b"q" * 32), (b"p" * 32, None), (None, b"q" * 32)],
    ids=["other", "extra", "missing"],
)
def test_another_swarm_secret_fails(near: bytes | None, far: bytes | None) -> None:
    assert refusal(membership(psk=near), membership(psk=far)).code is ErrorCode.HANDSHAKE


def test_dialler_does_not_show_itself_to_another_node() -> None:
    near, far = Handshake(membership(), FULL, NodeId(b"x" * 32)), Handshake(membership(), FULL)
    second = far.receive(near.start())
    assert second is not None
    with pytest.raises(RemoteError):
        near.receive(second)
    assert near.secured is None


@pytest.mark.parametrize("clock_s", [2.0 * MAX_LIFETIME_S, -2.0 * MAX_LIFETIME_S])
def test_certificate_of_another_time_is_expired(clock_s: float) -> None:
    assert refusal(membership(), membership(clock_s=clock_s)).code is ErrorCode.CERTIFICATE_EXPIRED


def test_no_common_version_is_refused() -> None:
    dialler, acceptor = membership(), membership()
    near = Handshake(dialler, Capabilities(proto=(2,)), acceptor.identity.node_id)
    far = Handshake(acceptor, Capabilities())
    second = far.receive(near.start())
    with pytest.raises(RemoteError) as caught:
        near.receive(second or b"")
    assert caught.value.code is ErrorCode.VERSION


def test_stolen_certificate_is_of_no_use_with_another_static_key() -> None:
    victim, thief = membership(), membership()
    stolen = victim.keyring.current()
    own = thief.keyring.current()

    class Forged:
        def current(self) -> object:
            return type(own)(own.private_key, stolen.certificate, own.not_after)

    forged = Membership(victim.identity, NETWORK_ID, Forged(), None, victim.now)  # type: ignore[arg-type]
    assert refusal(forged, membership()).code is ErrorCode.HANDSHAKE


@given(st.data())
def test_any_changed_byte_fails_the_handshake_with_a_typed_error(data: st.DataObject) -> None:
    dialler, acceptor = membership(), membership()
    near, far = Handshake(dialler, FULL, acceptor.identity.node_id), Handshake(acceptor, FULL)
    number = data.draw(st.integers(0, 2))

    def carry(message: bytes | None, at: int) -> bytes:
        changed = bytearray(message or b"")
        if at == number:
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 127))
        return bytes(changed)

    with pytest.raises(RemoteError):
        far.receive(carry(near.receive(carry(far.receive(carry(near.start(), 0)), 1)), 2))
    assert far.secured is None


@given(st.binary(max_size=1100))
def test_junk_is_a_typed_error(junk: bytes) -> None:
    far = Handshake(membership(), FULL)
    with contextlib.suppress(RemoteError):
        far.receive(junk)  # any 32 bytes are a key, so this may pass
    with pytest.raises(RemoteError):
        far.receive(junk)


def test_long_message_and_one_too_many_are_protocol_errors() -> None:
    dialler, acceptor = membership(), membership()
    near, far = Handshake(dialler, FULL, acceptor.identity.node_id), Handshake(acceptor, FULL)
    with pytest.raises(ProtocolError):
        far.receive(bytes(1025))
    far.receive(near.receive(far.receive(near.start()) or b"") or b"")
    with pytest.raises(ProtocolError):
        far.receive(b"again")


def test_repr_of_what_comes_out_holds_no_key() -> None:
    near, _ = shake(membership(psk=b"secret" + b"p" * 26), membership(psk=b"secret" + b"p" * 26))
    assert "secret" not in repr(near)
    assert "secret" not in repr(membership(psk=b"secret" + b"p" * 26))
