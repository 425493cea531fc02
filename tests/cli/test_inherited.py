"""What the children of `diffuse up` see of the environment."""

from __future__ import annotations

from typing import Any

import pytest

from cli.inherited import child_environment
from cli.settings_command import known_settings
from cli.up import _environment
from tests.cli.settings import parse


def seen(child: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a child would be told where its parent has these variables."""
    hidden = child_environment(child, known_settings(parse("up")))
    for name, value in (variables | hidden).items():
        monkeypatch.setenv(name, value)
    return parse(child).params


def test_a_swarm_of_this_machine_joins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = {
        "DIFFUSE_BOOTSTRAP": f"{'ab' * 32}@198.51.100.7:9000",
        "DIFFUSE_NETWORK": "theirs",
        "DIFFUSE_LISTEN": "0.0.0.0:9000",
        "DIFFUSE_TLS_CA": "/ca.pem",
        "DIFFUSE_METRICS": "127.0.0.1:9464",
    }
    for child in ("serve", "host"):
        params = seen(child, outside, monkeypatch)
        assert params["bootstrap"] in (None, (), [])
        assert (params["network"], params["tls_ca"]) == ("diffuse", None)
        assert params["listen"] != "0.0.0.0:9000"
        assert params.get("metrics") is None


def test_its_gateway_keeps_the_keys_and_limits_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = {
        "DIFFUSE_API_KEYS": "k1",
        "DIFFUSE_MAX_REQUESTS": "5",
        "DIFFUSE_MODEL_ALIASES": "gpt-4=smollm2",
        "DIFFUSE_CACHE_DIR": "/big",
    }
    params = seen("serve", outside, monkeypatch)
    assert (params["api_keys"], params["max_requests"], params["model_aliases"]) == (
        ["k1"],
        5,
        ["gpt-4=smollm2"],
    )
    assert str(seen("host", outside, monkeypatch)["cache_dir"]) == "/big"


def test_what_is_said_to_it_counts_for_all_of_them() -> None:
    told = _environment(parse("up", "--cache-dir", "/big", "--log-format", "json"), "host")
    assert (told["DIFFUSE_CACHE_DIR"], told["DIFFUSE_LOG_FORMAT"]) == ("/big", "json")
    assert told["DIFFUSE_CONFIG"] == "none"
    assert "DIFFUSE_STATE_DIR" not in told or told["DIFFUSE_STATE_DIR"]
