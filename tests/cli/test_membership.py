"""Networks and their secrets, as flags give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.membership import network_id, read_membership, read_psk
from routing.errors import SettingsError


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
    assert read_psk(private(tmp_path / "raw", secret)) == secret
    assert read_psk(private(tmp_path / "hex", secret.hex().encode() + b"\n")) == secret


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 64, b"ab" * 33])
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SettingsError, match="does not hold 32 bytes") as caught:
        read_psk(private(tmp_path / "psk", content))
    assert not content or content.decode() not in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "psk", bytes(32))
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_psk(path)


def test_a_membership_does_not_show_its_secret(tmp_path: Path) -> None:
    secret = bytes(range(32))
    assert repr(secret) not in repr(read_membership("home", private(tmp_path / "psk", secret)))
