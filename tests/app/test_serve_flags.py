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
    monkeypatch.setattr(runtime, "start_logging", lambda *level, **form: None)
    monkeypatch.setattr(serve.opt, "use_threads", lambda number: None)


def start(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Started:
    started: list[Started] = []

    def note(gateway: Any, member: Any, library: Any, teller: Any, listener: Any, tls: Any) -> None:
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


def a_port() -> str:
    """An address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_state_and_videos_are_kept_by_port_unless_a_setting_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DIFFUSE_STATE_DIR", str(tmp_path))
    anywhere = start(monkeypatch, "--node", NODE).gateway  # any free port: none to come back to
    assert (anywhere.videos_dir, anywhere.state.get_secret_value()) == (None, "memory:")
    place = a_port()
    port = place.rpartition(":")[2]
    started = start(monkeypatch, "--node", NODE, "--listen", place).gateway
    assert started.videos_dir == tmp_path / "videos" / port
    assert started.state.get_secret_value() == f"sqlite://{tmp_path}/gateway-{port}.sqlite"
    assert start(monkeypatch, "--node", NODE, "--videos-dir", "v").gateway.videos_dir == Path("v")
    asked = start(monkeypatch, "--node", NODE, "--listen", place, "--state", "redis://r").gateway
    assert asked.state.get_secret_value() == "redis://r"


def test_a_state_folder_that_cannot_be_made_is_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIFFUSE_STATE_DIR", str(tmp_path / "file" / "state"))
    assert (
        start(monkeypatch, "--node", NODE, "--listen", a_port()).gateway.state.get_secret_value() == "memory:"
    )


def test_every_setting_reaches_the_gateway_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NODE": NODE,
        "QUEUE_TIMEOUT": "90s",
        "MAX_BODY_BYTES": "1MiB",
        "ALLOWED_HOSTS": "a.lan, b.lan",
        "MODEL_ALIASES": "gpt-4=smollm2",
        "REQUESTS_PER_MINUTE": "6",
        "VLLM_METRICS": "yes",
    }.items():
        monkeypatch.setenv(f"DIFFUSE_{name}", value)
    gateway = start(monkeypatch).gateway
    assert (gateway.queue_timeout_s, gateway.max_body_bytes, gateway.requests_per_minute) == (
        90.0,
        1 << 20,
        6,
    )
    assert (gateway.allowed_hosts, gateway.model_aliases) == (("a.lan", "b.lan"), {"gpt-4": "smollm2"})
    assert gateway.vllm_metrics
    assert not start(monkeypatch, "--no-vllm-metrics").gateway.vllm_metrics
