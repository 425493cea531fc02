from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from routing.errors import ErrorCode, SecurityError, SettingsError
from routing.identity import (
    CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    Identity,
    StaticKey,
    StaticKeyring,
    check_certificate,
    node_id,
)

NETWORK_ID = b"n" * 32
NOW_S = 1_700_000_000.0


def test_node_id_is_the_hash_of_the_public_key() -> None:
    identity = Identity.generate()
    assert identity.node_id == hashlib.sha256(b"nid1" + identity.public_key).digest()
    assert node_id(identity.public_key) == identity.node_id


def test_saved_key_is_private_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.key"
    identity = Identity.generate()
    identity.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).node_id == identity.node_id


def test_saving_never_overwrites_a_key(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    Identity.generate().save(path)
    before = path.read_bytes()
    with pytest.raises(SettingsError, match="not overwritten"):
        Identity.generate().save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_key_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    Identity.generate().save(path)
    path.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        Identity.load(path)


@pytest.mark.parametrize("content", [b"", b"k" * 31, b"k" * 33])
def test_key_file_of_the_wrong_size_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="32-byte key"):
        Identity.load(path)


def test_missing_key_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        Identity.load(tmp_path / "none.key")


def test_repr_shows_the_id_and_no_key() -> None:
    identity = Identity.generate()
    static = StaticKey.issue(identity, NETWORK_ID, NOW_S)
    assert repr(identity) == f"Identity({identity.node_id.hex()})"
    assert static.certificate.hex() not in repr(static)
    assert "private_key" not in repr(static)


def _check(identity: Identity, static: StaticKey, **changes: object) -> None:
    arguments = {
        "identity_key": identity.public_key,
        "static_key": static.private_key.public_key().public_bytes_raw(),
        "network_id": NETWORK_ID,
        "now_s": NOW_S,
    }
    check_certificate(static.certificate, **(arguments | changes))  # type: ignore[arg-type]


def test_certificate_holds_for_its_key_in_its_network() -> None:
    identity = Identity.generate()
    _check(identity, StaticKey.issue(identity, NETWORK_ID, NOW_S))


@pytest.mark.parametrize(
    "changes",
    [
        {"network_id": b"m" * 32},
        {"static_key": b"k" * 32},
        {"identity_key": Identity.generate().public_key},
        {"identity_key": b"short"},
    ],
)
def test_certificate_of_something_else_is_refused(changes: dict[str, object]) -> None:
    identity = Identity.generate()
    with pytest.raises(SecurityError) as caught:
        _check(identity, StaticKey.issue(identity, NETWORK_ID, NOW_S), **changes)
    assert caught.value.code is ErrorCode.HANDSHAKE


@pytest.mark.parametrize("age_s", [-3 * CLOCK_SKEW_S, MAX_LIFETIME_S])
def test_certificate_outside_its_time_is_expired(age_s: float) -> None:
    identity = Identity.generate()
    static = StaticKey.issue(identity, NETWORK_ID, NOW_S)
    with pytest.raises(SecurityError) as caught:
        _check(identity, static, now_s=NOW_S + age_s)
    assert caught.value.code is ErrorCode.CERTIFICATE_EXPIRED


def test_certificate_that_lives_too_long_is_refused() -> None:
    identity = Identity.generate()
    static = StaticKey.issue(identity, NETWORK_ID, NOW_S)
    public = static.private_key.public_key().public_bytes_raw()
    validity = int(NOW_S).to_bytes(8, "big") + int(NOW_S + MAX_LIFETIME_S + 1).to_bytes(8, "big")
    signature = identity.sign(b"diffuse/static-key/1" + NETWORK_ID + public + validity)
    with pytest.raises(SecurityError, match="longer than 24 h"):
        check_certificate(
            validity + signature,
            identity_key=identity.public_key,
            static_key=public,
            network_id=NETWORK_ID,
            now_s=NOW_S,
        )


def test_every_changed_bit_of_a_certificate_is_noticed() -> None:
    identity = Identity.generate()
    static = StaticKey.issue(identity, NETWORK_ID, NOW_S)
    public = static.private_key.public_key().public_bytes_raw()
    for position in range(len(static.certificate)):
        changed = bytearray(static.certificate)
        changed[position] ^= 1
        with pytest.raises(SecurityError):
            check_certificate(
                bytes(changed),
                identity_key=identity.public_key,
                static_key=public,
                network_id=NETWORK_ID,
                now_s=NOW_S,
            )


def test_static_key_is_renewed_at_half_of_its_life() -> None:
    clock = [NOW_S]
    keyring = StaticKeyring(Identity.generate(), NETWORK_ID, now=lambda: clock[0])
    first = keyring.current()
    clock[0] += MAX_LIFETIME_S / 3
    assert keyring.current() is first
    clock[0] += MAX_LIFETIME_S / 3
    assert keyring.current() is not first


def test_identities_differ() -> None:
    assert len({Identity.generate().node_id for _ in range(8)}) == 8
