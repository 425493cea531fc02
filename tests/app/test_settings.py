from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.settings import GatewaySettings


def test_an_item_of_a_list_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GatewaySettings(
        api_keys="one, two",
        allowed_hosts=["a.lan,b.lan,", "c.lan"],
        model_aliases=["gpt-4=smollm2, big = org/big", "small=tiny"],
    )
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert settings.allowed_hosts == ("a.lan", "b.lan", "c.lan")
    assert settings.model_aliases == {"gpt-4": "smollm2", "big": "org/big", "small": "tiny"}


def test_the_environment_says_nothing_to_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_API_KEYS", "one")
    monkeypatch.setenv("DIFFUSE_MAX_REQUESTS", "7")
    assert GatewaySettings() == GatewaySettings(api_keys=(), max_requests=32)


def test_keys_do_not_show() -> None:
    assert "s3cret" not in repr(GatewaySettings(api_keys="s3cret"))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "gateway.lan", "::"])
def test_an_address_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ValidationError, match="can be reached by others"):
        GatewaySettings(host=host)
    assert GatewaySettings(host=host, api_keys="one").api_keys
    assert GatewaySettings(host=host, allow_open=True).allow_open


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    assert GatewaySettings(host=host).is_loopback


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"api_keys": "a b"},
        {"model_aliases": "gpt-4"},
        {"max_requests": 0},
        {"keepalive_s": -1},
        {"state": "/var/lib/diffuse"},
        {"state": "postgres://host"},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**wrong)


def test_a_state_of_another_form_is_refused_without_being_quoted() -> None:
    with pytest.raises(ValidationError, match="a state is memory:") as raised:
        GatewaySettings(state="postgres://me:hush@host")
    assert "hush" not in str(raised.value)
    assert "hush" not in repr(GatewaySettings(state="redis://me:hush@host"))
