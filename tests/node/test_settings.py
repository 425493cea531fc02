"""What a node may be told, and what it refuses to be told."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from node.settings import HostPort, ModelSlice, NodeSettings
from routing.address_policy import Scope
from routing.types import SliceSpec
from tests.node.rig import NETWORK_ID, node_settings


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


def test_several_models_and_ranges_are_read_as_people_write_them() -> None:
    settings = node_settings(models=["org/name@v1=0:4", "org/name@v1=6:8", ("smollm2", None), "a=b"])
    assert [(wanted.model, wanted.layers) for wanted in settings.wanted] == [
        ("fake", None),
        ("org/name@v1", SliceSpec(0, 4)),
        ("org/name@v1", SliceSpec(6, 8)),
        ("smollm2", None),
        ("a=b", None),
    ]
    only = node_settings(model="", models=["smollm2"])
    assert only.wanted == (ModelSlice(model="smollm2"),)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": ""}, "at least one model"),
        ({"model": "", "models": ["m"], "layers": "0:1"}, "--layers needs --model"),
        ({"overhead": 0}, "overhead"),
        ({"overhead": 1.5}, "overhead"),
        ({"bootstraps": ["nowhere"]}, "id@host:port"),
        ({"models": ["m=3:3"]}, "A below B"),
        ({"drain_s": -1}, "drain_s"),
    ],
)
def test_what_a_node_of_a_network_cannot_be_told(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        node_settings(**changes)


def test_a_bootstrap_or_a_sentinel_of_its_own_lets_placement_decide() -> None:
    bootstrap = f"{'ab' * 32}@127.0.0.1:9000"
    assert not node_settings().is_placed
    assert node_settings(bootstraps=[bootstrap]).is_placed
    assert node_settings(is_sentinel=True).is_placed
    assert str(node_settings(bootstraps=[bootstrap]).bootstraps[0]) == bootstrap


def test_a_node_that_is_told_its_outside_address_may_bind_every_interface() -> None:
    bootstrap = f"{'ab' * 32}@127.0.0.1:9000"
    assert node_settings(listen="0.0.0.0:0", bootstraps=[bootstrap]).public_addr is None


def test_the_scope_is_a_name_or_found_from_the_addresses() -> None:
    assert node_settings(scope="lan").scope is Scope.LAN
    assert node_settings(scope="auto").scope is None
    with pytest.raises(ValidationError, match="scope"):
        node_settings(scope="everywhere")


def test_weights_and_runner_are_names_from_a_list() -> None:
    settings = node_settings(weights="int8", runner="fast")
    assert (settings.weights, settings.runner) == ("int8", "fast")
    default = NodeSettings(model="m", network_id=NETWORK_ID)
    assert (default.weights, default.runner) == ("auto", "auto")
    for wrong in ({"weights": "int4"}, {"runner": "quick"}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            node_settings(**wrong)
