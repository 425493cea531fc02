"""How flag values are read, and what a wrong one is told."""

from __future__ import annotations

import pytest
import typer

from cli import options as opt


def test_local_layers_default_their_second_number_to_none_at_the_end() -> None:
    assert opt.parse_local_layers("1:0") == (1, 0)
    assert opt.parse_local_layers("2") == (2, 0)
    assert opt.parse_local_layers("0:3") == (0, 3)


def test_host_and_port_may_be_ipv6() -> None:
    assert opt.parse_host_port("127.0.0.1:8000", "--listen") == ("127.0.0.1", 8000)
    assert opt.parse_host_port("[::1]:7000", "--listen") == ("::1", 7000)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:70000", "::1:7000", "host:x"])
def test_a_wrong_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="HOST:PORT"):
        opt.parse_host_port(text, "--listen")


def test_a_system_message_comes_first() -> None:
    assert [message["role"] for message in opt.messages_of("Hi", "Be brief")] == ["system", "user"]
    assert [message["role"] for message in opt.messages_of("Hi", None)] == ["user"]


def test_times_have_a_unit() -> None:
    assert [opt.parse_duration(text, "--expires") for text in ("90s", "30m", "24h", "7d")] == [
        90,
        1800,
        86400,
        604800,
    ]


@pytest.mark.parametrize("text", ["", "h", "24", "1.5h", "-1h", "1w"])
def test_a_wrong_time_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="24h"):
        opt.parse_duration(text, "--expires")
