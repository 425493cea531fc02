"""`host` and `serve`: what their flags become, and how they stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli.key_files import load_or_make, rotate
from cli.membership import network_id
from cli.ports import bind_loopback
from cli.runtime import run_until_signal
from cli.state import running_services
from routing.announcement import check_owner
from routing.guest_token import format_guest_token, sign_guest_token
from routing.identity import Identity
from routing.moved import read_moved
from routing.types import Capabilities
from tests.cli.conftest import Diffuse

NODE = f"{'ab' * 32}@127.0.0.1:7001"
KEPT = ("DIFFUSE_STATE_DIR", "DIFFUSE_CONFIG")


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that `host` starts a node with."""
    seen: list[Any] = []

    async def run_node(settings: Any, *, on_event: Callable[[dict[str, Any]], None]) -> None:
        seen.append(settings)
        on_event({"event": "ready", "address": NODE, "layers": "0:10"})

    module = types.ModuleType("node.main")
    module.run_node = run_node  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "node.main", module)
    return seen


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that `serve` starts a gateway with."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "cli.serve._serve",
        lambda gateway, member, library, teller, listener, tls: seen.extend((gateway, member, library)),
    )
    monkeypatch.setattr("cli.serve._listener", lambda gateway, listen_fd: None)
    for name in [name for name in os.environ if name.startswith("DIFFUSE_") and name not in KEPT]:
        monkeypatch.delenv(name)
    return seen


def test_a_node_gets_what_its_flags_say(diffuse: Diffuse, hosted: list[Any], tmp_path: Path) -> None:
    psk = tmp_path / "psk"
    psk.write_bytes(bytes(range(32)))
    psk.chmod(0o600)
    result = diffuse(
        *["host", "--model", "tiny", "--layers", "0:10", "--listen", "0.0.0.0:7000", "--hold-ends", "--pad"],
        *["--public-addr", "[2001:db8::1]:7443", "--network", "home", "--psk-file", str(psk)],
        *["--kv-budget", "500MB", "--max-sessions", "7", "--dtype", "bfloat16"],
    )
    assert result.exit_code == 0, result.stderr
    (settings,) = hosted
    assert (settings.model, str(settings.layers), str(settings.listen)) == ("tiny", "0:10", "0.0.0.0:7000")
    assert str(settings.public_addr) == "[2001:db8::1]:7443"
    assert (settings.network_id, settings.psk) == (network_id("home"), bytes(range(32)))
    assert (settings.kv_budget_bytes, settings.max_sessions, settings.dtype) == (500_000_000, 7, "bfloat16")
    assert settings.hold_ends
    assert settings.pad
    assert f"--node {NODE}\n" in result.stdout


def test_a_member_of_a_swarm_gets_what_its_flags_say(
    diffuse: Diffuse, hosted: list[Any], tmp_path: Path
) -> None:
    key, owner, token, allow = (tmp_path / name for name in ("node.key", "owner.key", "token", "allow"))
    owned = load_or_make(owner)
    guest = sign_guest_token(owned, network_id("home"), client_id=None, now_s=1.8e9, lifetime_s=60, quota=1)
    token.write_text(format_guest_token(guest))
    token.chmod(0o600)
    allow.write_text("ab" * 32)
    result = diffuse(
        *["host", "--bootstrap", NODE, "--bootstrap", NODE.replace("7001", "7002"), "--scope", "lan"],
        *[
            "--model",
            "one=0:4",
            "--model",
            "two",
            "--listen",
            "0.0.0.0:0",
            "--overhead",
            "0.3",
            "--drain",
            "7",
            "--memory",
            "1GB",
        ],
        *["--sentinel", "--key", str(key), "--owner-key", str(owner), "--token-file", str(token)],
        *["--allow-file", str(allow), "--state-dir", str(tmp_path / "state"), "--network", "home"],
    )
    assert result.exit_code == 0, result.stderr
    (settings,) = hosted
    assert [address.port for address in settings.bootstraps] == [7001, 7002]
    assert [(wanted.model, wanted.layers and str(wanted.layers)) for wanted in settings.wanted] == [
        ("one", "0:4"),
        ("two", None),
    ]
    assert (settings.scope, settings.overhead, settings.drain_s) == ("lan", 0.3, 7.0)
    assert settings.memory_bytes == 10**9
    assert (settings.token, settings.state_dir, settings.is_sentinel) == (guest, tmp_path / "state", True)
    assert check_owner(settings.owner, Identity.load(key).node_id)
    assert settings.owner.key == owned.public_key
    assert settings.allow(settings.bootstraps[0].node_id, Capabilities())


def test_a_rotated_key_says_so_in_its_handshakes(diffuse: Diffuse, hosted: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "node.key"
    old = load_or_make(key)
    rotate(key)
    assert diffuse("host", "--key", str(key)).exit_code == 0
    assert read_moved(hosted[0].moved).old_id == old.node_id


def test_a_node_for_once_leaves_no_state(diffuse: Diffuse, hosted: list[Any], tmp_path: Path) -> None:
    assert diffuse("host").exit_code == 0
    assert hosted[0].state_dir is None
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]


def test_a_node_can_be_found_by_leave_while_it_runs(
    diffuse: Diffuse, hosted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Any] = []

    async def run_node(settings: Any, *, on_event: Callable[[dict[str, Any]], None]) -> None:
        on_event({"event": "ready", "address": NODE, "layers": "0:10"})
        running.extend(running_services(tmp_path / "state"))

    monkeypatch.setattr(sys.modules["node.main"], "run_node", run_node)
    assert diffuse("host").exit_code == 0
    assert [(service.role, service.address) for service in running] == [("host", NODE)]
    assert running_services(tmp_path / "state") == []


def test_a_node_that_is_told_nothing_keeps_its_own_defaults(diffuse: Diffuse, hosted: list[Any]) -> None:
    assert diffuse("host").exit_code == 0
    (settings,) = hosted
    assert (settings.model, settings.layers, settings.threads) == ("smollm2", None, None)
    assert str(settings.listen) == "127.0.0.1:0"
    assert settings.max_sessions > 1


def test_a_wrong_flag_of_a_node_is_named(diffuse: Diffuse, hosted: list[Any]) -> None:
    for flags, said in (
        (("--layers", "9:2"), "--layers"),
        (("--listen", "nowhere"), "--listen"),
        (("--public-addr", "x:99999"), "--public-addr"),
    ):
        result = diffuse("host", *flags)
        assert result.exit_code == 2
        assert said in result.stderr
    assert hosted == []


def test_what_a_node_could_not_use_is_said_before_it_starts(
    diffuse: Diffuse, hosted: list[Any], tmp_path: Path
) -> None:
    key = tmp_path / "node.key"
    key.write_bytes(b"garbage")
    key.chmod(0o600)
    with closing(bind_loopback(0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        for flags, said in (
            (("--key", str(key)), "does not hold a raw 32-byte key"),
            (("--listen", taken), f"{taken} is in use: stop what listens there, or choose another port"),
            (("--listen", "0.0.0.0:0"), "--public-addr HOST:PORT"),
            (("--kv-budget", "much"), "'--kv-budget'"),
            (("--bootstrap", "127.0.0.1:7001"), "a node is written id@host:port; copy the whole"),
            (("--owner-key", str(key)), "give --key FILE too"),
            (("--model", "a", "--model", "b", "--layers", "0:4"), "--model MODEL=START:END"),
            (("--overhead", "1.5"), "--overhead: "),
            (("--allow-file", str(key.with_name("none"))), "cannot read the allow list"),
            (("--token-file", str(key)), "this is no guest token"),
        ):
            result = diffuse("host", *flags)
            assert result.exit_code != 0
            assert said in " ".join(result.stderr.replace("│", " ").split())
    assert hosted == []


def test_a_gateways_port_in_use_is_said_before_the_long_imports(diffuse: Diffuse) -> None:
    with closing(bind_loopback(0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        result = diffuse("serve", "--node", NODE, "--listen", taken, "--model", "nosuchmodel")
    assert result.exit_code == 1
    assert (
        f"{taken} is in use: stop what listens there, or choose another port with --listen" in result.stderr
    )


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (("--model-aliases", "x"), {}, "diffuse: --model-aliases: write aliases as"),
        (("--listen", "nowhere"), {}, "'--listen'"),
        (("--public-addr", "nowhere"), {}, "'--public-addr'"),
        (("--local-layers", "x"), {}, "'--local-layers'"),
        ((), {"DIFFUSE_KEEPALIVE": "soon"}, "diffuse: DIFFUSE_KEEPALIVE: 'soon': give a time like 30s"),
        ((), {"DIFFUSE_MAX_REQUESTS": "0"}, "diffuse: DIFFUSE_MAX_REQUESTS: "),
        ((), {"DIFFUSE_LISTEN": "many"}, "diffuse: DIFFUSE_LISTEN: 'many': give it as HOST:PORT"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_set(
    flags: tuple[str, ...],
    variables: dict[str, str],
    said: str,
    diffuse: Diffuse,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = diffuse("serve", "--node", NODE, *flags)
    assert result.exit_code == 2
    assert said in result.stderr
    assert served == []


def test_a_gateway_gets_what_its_flags_say(diffuse: Diffuse, served: list[Any]) -> None:
    result = diffuse(
        *["serve", "--node", NODE, "--node", NODE, "--model", "tiny", "--name", "T", "--ends", "remote"],
        *[
            "--local-layers",
            "2:1",
            "--wire",
            "bf16",
            "--per-block",
            "--listen",
            "0.0.0.0:8443",
            "--public-addr",
            "ai.home:443",
        ],
        *[
            "--api-keys",
            "k1",
            "--api-keys",
            "k2",
            "--model-aliases",
            "gpt-4o-mini=T",
            "--request-timeout",
            "30",
        ],
    )
    assert result.exit_code == 0, result.stderr
    gateway, member, library = served
    assert (gateway.host, gateway.port, gateway.allowed_hosts) == ("0.0.0.0", 8443, ("ai.home",))
    assert [key.get_secret_value() for key in gateway.api_keys] == ["k1", "k2"]
    assert (gateway.model_aliases, gateway.request_timeout_s) == ({"gpt-4o-mini": "T"}, 30.0)
    ((model, name),) = [(named.model, named.name) for named in library.models]
    assert (model, name, library.ends.ends) == ("tiny", "T", "remote")
    assert (library.ends.local_layers, library.ends.wire, library.ends.threads) == ((2, 1), "bf16", 1)
    assert library.ends.per_block
    assert [str(address) for address in member.nodes] == [NODE, NODE]
    assert member.bootstraps == ()


def test_a_gateway_of_a_swarm_needs_no_model(diffuse: Diffuse, served: list[Any]) -> None:
    node_id = NODE.partition("@")[0]
    result = diffuse(
        *["serve", "--bootstrap", NODE, "--scope", "lan", "--pin", node_id, "--max-hops", "2"],
        "--distinct-owners",
    )
    assert result.exit_code == 0, result.stderr
    gateway, member, library = served
    assert [str(address) for address in member.bootstraps] == [NODE]
    assert (member.scope, library.models) == ("lan", ())
    assert (gateway.max_hops, gateway.distinct_owners) == (2, True)


def test_a_gateway_without_nodes_is_asked_for_them(diffuse: Diffuse, served: list[Any]) -> None:
    result = diffuse("serve", "--model", "tiny")
    assert result.exit_code == 2
    assert "say where the nodes are" in result.stderr


def test_what_no_flag_says_may_come_from_the_environment(
    diffuse: Diffuse, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSE_API_KEYS", "from-env")
    monkeypatch.setenv("DIFFUSE_LISTEN", "127.0.0.1:8123")
    assert diffuse("serve", "--node", NODE).exit_code == 0
    assert [key.get_secret_value() for key in served[0].api_keys] == ["from-env"]
    assert served[0].port == 8123


def test_a_failure_calls_a_setting_as_it_was_set(diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bind_loopback(0)) as listener:
        monkeypatch.setenv("DIFFUSE_LISTEN", f"127.0.0.1:{listener.getsockname()[1]}")
        result = diffuse("serve", "--node", NODE)
    assert result.exit_code == 1
    assert "is in use: stop what listens there, or choose another port with DIFFUSE_LISTEN" in result.stderr
    monkeypatch.delenv("DIFFUSE_LISTEN")
    monkeypatch.setenv("DIFFUSE_TLS_CERT", "/nowhere.pem")
    assert "DIFFUSE_TLS_CERT" in diffuse("serve", "--node", NODE).stderr


def test_an_open_address_without_a_key_is_refused(diffuse: Diffuse, served: list[Any]) -> None:
    result = diffuse("serve", "--node", NODE, "--listen", "0.0.0.0:8000")
    assert result.exit_code == 2
    assert "--api-keys" in result.stderr


def test_a_key_is_never_shown(diffuse: Diffuse, served: list[Any]) -> None:
    result = diffuse("serve", "--node", NODE, "--api-keys", "not ascii é")
    assert result.exit_code == 2
    assert "not ascii" not in result.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
async def test_a_signal_ends_a_service_cleanly(number: signal.Signals) -> None:
    was_cleaned = False

    async def service() -> None:
        nonlocal was_cleaned
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            was_cleaned = True

    await asyncio.wait_for(run_until_signal(service()), 5)
    assert was_cleaned


async def test_asking_twice_is_heard() -> None:
    asked: list[str] = []

    async def slow_to_stop() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGTERM)
            while not asked:
                await asyncio.sleep(0.01)

    await asyncio.wait_for(run_until_signal(slow_to_stop(), on_second=lambda: asked.append("again")), 5)
    assert asked == ["again"]


async def test_a_failure_of_a_service_is_no_stop() -> None:
    async def broken() -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await run_until_signal(broken())
