"""What the flags of `diffuse serve` become: members, models and routes; nothing is bound or loaded here."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.engine.library import LibrarySettings, NamedModel
from app.engine.network import MemberSettings
from app.engine.route_options import RouteOptions
from app.settings import GatewaySettings
from cli import runtime, serve
from cli.main import app
from routing.address_policy import Scope

A, B = "ab" * 32, "cd" * 32
NODE, SENTINEL = f"{A}@127.0.0.1:9001", f"{B}@198.51.100.7:9000"


@dataclass
class Started:
    """What the gateway would have been started with."""

    gateway: GatewaySettings
    member: MemberSettings
    library: LibrarySettings


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "start_logging", lambda level: None)
    monkeypatch.setattr(serve.opt, "use_threads", lambda number: None)


def start(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Started:
    started: list[Started] = []

    def note(gateway: Any, member: Any, library: Any, teller: Any, listener: Any) -> None:
        listener.close()
        started.append(Started(gateway, member, library))

    monkeypatch.setattr(serve, "_serve", note)
    result = CliRunner().invoke(app, ["serve", "--listen", "127.0.0.1:0", *flags])
    assert result.exit_code == 0, result.output
    return started[0]


def refusal(*flags: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--listen", "127.0.0.1:0", *flags])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_a_list_of_nodes_serves_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(monkeypatch, "--node", NODE)
    assert started.library.models == (NamedModel("smollm2"),)
    assert not started.library.finds
    assert [str(address) for address in started.member.nodes] == [NODE]
    assert started.member.bootstraps == ()


def test_a_bootstrap_alone_serves_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(monkeypatch, "--bootstrap", SENTINEL, "--bootstrap", NODE, "--node", NODE)
    assert started.library == LibrarySettings(ends=started.library.ends)
    assert started.library.finds
    assert [str(address) for address in started.member.bootstraps] == [SENTINEL, NODE]
    assert [str(address) for address in started.member.nodes] == [NODE]


def test_several_models_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(monkeypatch, "--bootstrap", SENTINEL, "--model", "smollm2", "--model", "org/name")
    assert started.library.models == (NamedModel("smollm2"), NamedModel("org/name"))
    assert not started.library.finds
    assert start(monkeypatch, "--bootstrap", SENTINEL, "--model", "smollm2", "--open-any").library.finds


def test_one_model_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(monkeypatch, "--node", NODE, "--model", "org/name", "--name", "mine")
    assert started.library.models == (NamedModel("org/name", "mine"),)
    several = refusal("--node", NODE, "--model", "a", "--model", "b", "--name", "mine")
    assert "it names one --model" in several
    assert "it names one --model" in refusal("--bootstrap", SENTINEL, "--name", "mine")


def test_without_nodes_or_bootstrap_it_says_what_to_give() -> None:
    told = refusal()
    assert "--bootstrap ID@HOST:PORT joins a swarm, --node names single ones" in told


def test_wishes_for_routes_are_the_gateways_own(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--pin", A, "--avoid", B, "--max-hops", "4", "--distinct-owners"]
    started = start(monkeypatch, "--bootstrap", SENTINEL, *flags)
    assert started.gateway.route == RouteOptions((A,), (), 4, True)
    assert started.gateway.avoid == (B,)
    assert start(monkeypatch, "--bootstrap", SENTINEL).gateway.route == RouteOptions()


def test_a_beginning_of_an_id_is_no_wish_for_a_gateway() -> None:
    result = CliRunner().invoke(
        app, ["serve", "--bootstrap", SENTINEL, "--listen", "127.0.0.1:0", "--pin", A[:8]]
    )
    assert result.exit_code == 2
    assert "--pin: give the node's whole id" in result.output


def test_how_it_joins_is_said_by_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    key = tmp_path / "gateway.key"
    flags = ["--key", str(key), "--scope", "lan", "--pad", "--network", "ours"]
    member = start(monkeypatch, "--bootstrap", SENTINEL, *flags).member
    assert member.identity is not None
    assert key.exists()
    assert (member.scope, member.pad) == (Scope.LAN, True)
    again = start(monkeypatch, "--bootstrap", SENTINEL, "--key", str(key)).member
    assert again.identity is not None
    assert again.identity.node_id == member.identity.node_id
    assert again.network_id != member.network_id
    assert start(monkeypatch, "--node", NODE).member.identity is None, "one for once"


def test_drafts_and_the_form_of_the_ends_are_chosen_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = start(monkeypatch, "--node", NODE)
    assert (plain.gateway.draft, plain.library.ends.weights, plain.library.ends.runner) == ("auto",) * 3
    chosen = start(
        monkeypatch, "--node", NODE, "--draft", "off", "--weights", "int8", "--runner", "invariant"
    )
    assert chosen.gateway.draft == "off"
    assert (chosen.library.ends.weights, chosen.library.ends.runner) == ("int8", "invariant")
    monkeypatch.setenv("DIFFUSE_DRAFT", "lookup")
    assert start(monkeypatch, "--node", NODE).gateway.draft == "lookup"


def test_videos_are_kept_by_port_unless_a_flag_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DIFFUSE_STATE", str(tmp_path))
    assert (
        start(monkeypatch, "--node", NODE).gateway.videos_dir is None
    )  # any free port: none to come back to
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = start(monkeypatch, "--node", NODE, "--listen", f"127.0.0.1:{port}")
    assert started.gateway.videos_dir == tmp_path / "videos" / str(port)
    assert start(monkeypatch, "--node", NODE, "--videos-dir", "v").gateway.videos_dir == Path("v")
