"""Networks and their secrets, as flags give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.membership import (
    network_id,
    read_allow_list,
    read_membership,
    read_prefix_secret,
    read_psks,
    read_token,
)
from routing.errors import SettingsError
from routing.guest_token import format_guest_token, sign_guest_token
from routing.identity import Identity
from routing.types import Capabilities, NodeAddress, NodeId


def private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_network_is_a_name_or_its_64_digits() -> None:
    assert len(network_id("home")) == 32
    assert network_id("home") != network_id("work")
    assert network_id(network_id("home").hex()) == network_id("home")


def test_a_secret_is_raw_bytes_or_hex_digits(tmp_path: Path) -> None:
    secret = bytes(range(32))
    assert read_psks(private(tmp_path / "raw", secret)) == (secret,)
    assert read_psks(private(tmp_path / "hex", secret.hex().encode() + b"\n")) == (secret,)


def test_gateways_of_a_fleet_read_one_secret(tmp_path: Path) -> None:
    secret = bytes(range(32))
    assert read_prefix_secret(None) == b""
    assert read_prefix_secret(private(tmp_path / "raw", secret)) == secret
    assert read_prefix_secret(private(tmp_path / "hex", secret.hex().encode())) == secret
    for content in (b"", b"short", b"\n".join([b"ab" * 32] * 2)):
        with pytest.raises(SettingsError, match="does not hold 32 bytes"):
            read_prefix_secret(private(tmp_path / "wrong", content))


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 64, b"ab" * 33, b"\n".join([b"ab" * 32] * 3)])
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SettingsError, match="does not hold 32 bytes") as caught:
        read_psks(private(tmp_path / "psk", content))
    assert not content or content.decode() not in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "psk", bytes(32))
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_psks(path)


def test_a_membership_does_not_show_its_secret(tmp_path: Path) -> None:
    secret = bytes(range(32))
    assert repr(secret) not in repr(read_membership("home", private(tmp_path / "psk", secret)))


def test_the_first_of_two_secrets_is_for_dialling(tmp_path: Path) -> None:
    path = private(tmp_path / "psk", b"11" * 32 + b"\n" + b"22" * 32 + b"\n")
    membership = read_membership("home", path)
    assert (membership.psk, membership.accepted_psks) == (b"\x11" * 32, (b"\x22" * 32,))


def test_a_token_file_holds_what_was_printed(tmp_path: Path) -> None:
    issuer = Identity.generate()
    token = sign_guest_token(issuer, network_id("home"), client_id=None, now_s=1.8e9, lifetime_s=60, quota=1)
    path = private(tmp_path / "token", format_guest_token(token).encode() + b"\n")
    assert read_token(path) == token
    assert read_token(None) == b""
    with pytest.raises(SettingsError, match=r"--token-file .*whole line"):
        read_token(private(path, b"half a tok"))
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_token(path)


def test_whom_the_operator_named_need_not_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    path.write_text("ab" * 32)
    sentinel, membership = NodeAddress(NodeId(b"\1" * 32), "192.0.2.1", 7000), read_membership("home", None)
    allow = read_allow_list(path, membership, [sentinel])
    assert allow is not None
    assert allow(sentinel.node_id, Capabilities())
    assert read_allow_list(None, membership) is None
