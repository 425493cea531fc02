"""What a node may be told, and what it refuses to be told."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from node.settings import HostPort
from routing.types import SliceSpec
from tests.node.rig import node_settings


def test_layers_and_addresses_are_read_as_people_write_them() -> None:
    settings = node_settings(layers="3:10", listen="[::1]:0", public_addr="node.example:8001")
    assert settings.layers == SliceSpec(3, 10)
    assert settings.listen == HostPort(host="::1", port=0)
    assert str(settings.listen) == "[::1]:0"
    assert str(settings.public_addr) == "node.example:8001"


@pytest.mark.parametrize("layers", ["3", "4:4", "5:3", "a:b", "-1:3", "1:2:3", ""])
def test_layers_that_are_no_range_are_refused(layers: str) -> None:
    with pytest.raises(ValidationError, match="layers"):
        node_settings(layers=layers)


@pytest.mark.parametrize("address", ["host", "host:", "host:http", "::1:80", "host:70000"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="listen"):
        node_settings(listen=address)


def test_a_network_id_of_another_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="network_id"):
        node_settings(network_id=b"short")


def test_secrets_are_not_shown() -> None:
    assert "psk" not in repr(node_settings(psk=b"p" * 32))


def test_a_wildcard_is_never_told_to_others() -> None:
    with pytest.raises(ValidationError, match="--public-addr"):
        node_settings(listen="0.0.0.0:0")
    with pytest.raises(ValidationError, match="no address"):
        node_settings(public_addr="0.0.0.0:1")
    assert str(node_settings(listen="0.0.0.0:0", public_addr="192.168.1.5:0").public_addr) == "192.168.1.5:0"


def test_a_refusal_shows_no_secret() -> None:
    with pytest.raises(ValidationError) as refusal:
        node_settings(listen="0.0.0.0:0", psk=b"p" * 32)
    assert "ppp" not in str(refusal.value)
