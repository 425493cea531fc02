"""`diffuse sentinel`: what it prints, what it refuses, and how it goes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli import sentinel as command
from cli.membership import network_id
from cli.ports import bind_loopback
from cli.sentinel import run_sentinel, told_place
from node.settings import HostPort
from routing.identity import Identity
from routing.network import NetworkSettings
from tests.cli.conftest import Diffuse
from tests.cli.swarm import HOME, LOOPBACK, member, offer
from tests.support.processes import Processes


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The identity and settings that a sentinel starts with."""
    seen: list[Any] = []

    async def run(
        identity: Identity, settings: NetworkSettings, on_event: Any, *, metrics: HostPort | None
    ) -> None:
        seen.extend((identity, settings) if metrics is None else (identity, settings, metrics))
        on_event(
            {"event": "ready", "role": "sentinel", "address": f"{identity.node_id.hex()}@192.0.2.1:7000"}
        )

    monkeypatch.setattr(command, "run_sentinel", run)
    return seen


def test_a_sentinel_prints_one_line_to_pass_on(diffuse: Diffuse, started: list[Any]) -> None:
    result = diffuse("sentinel")
    identity, settings = started
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{identity.node_id.hex()}@192.0.2.1:7000\n"
    assert settings.is_sentinel
    assert settings.listen == LOOPBACK


def test_metrics_are_served_where_the_flag_says(diffuse: Diffuse, started: list[Any]) -> None:
    assert diffuse("sentinel", "--metrics", "[::1]:0").exit_code == 0
    assert started[2] == HostPort(host="::1", port=0)


def test_metrics_that_others_could_read_want_a_word(diffuse: Diffuse, started: list[Any]) -> None:
    result = diffuse("sentinel", "--metrics", "0.0.0.0:0")
    assert result.exit_code == 2
    assert "--metrics-open" in result.stderr
    assert diffuse("sentinel", "--metrics", "0.0.0.0:0", "--metrics-open").exit_code == 0


def test_a_sentinel_is_the_same_one_after_a_restart(
    diffuse: Diffuse, started: list[Any], tmp_path: Path
) -> None:
    diffuse("sentinel")
    diffuse("sentinel")
    assert started[0].node_id == started[2].node_id
    assert (tmp_path / "state" / "sentinel.key").exists()


def test_flags_become_settings(diffuse: Diffuse, started: list[Any], tmp_path: Path) -> None:
    allow = tmp_path / "allow"
    allow.write_text("ab" * 32)
    secrets = tmp_path / "psk"
    secrets.write_text(f"{'11' * 32}\n{'22' * 32}\n")
    secrets.chmod(0o600)
    other = f"{'cd' * 32}@sentinel.example:7000"
    result = diffuse(
        *["sentinel", "--listen", "0.0.0.0:0", "--public-addr", "192.0.2.7:443", "--network", "home"],
        *["--bootstrap", other, "--scope", "lan", "--psk-file", str(secrets), "--allow-file", str(allow)],
    )
    assert result.exit_code == 0, result.stderr
    settings = started[1]
    assert (settings.network_id, settings.scope, settings.public_addr) == (
        network_id("home"),
        "lan",
        ("192.0.2.7", 443),
    )
    assert (settings.psk, settings.accepted_psks) == (b"\x11" * 32, (b"\x22" * 32,))
    assert [str(address) for address in settings.bootstraps] == [other]
    assert settings.allow.members.ids == {bytes.fromhex("ab" * 32)}


def test_what_a_sentinel_could_not_use_is_told_in_one_line(
    diffuse: Diffuse, started: list[Any], tmp_path: Path
) -> None:
    with closing(bind_loopback(0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        for flags, said in (
            (("--listen", taken), f"{taken} is in use"),
            (("--listen", "nowhere"), "'--listen'"),
            (("--bootstrap", "192.0.2.1:7000"), "'--bootstrap'"),
            (("--scope", "world"), "'--scope'"),
            (("--allow-file", str(tmp_path / "none")), "cannot read the allow list"),
            (("--psk-file", str(tmp_path / "none")), "cannot read the secret"),
        ):
            result = diffuse("sentinel", *flags)
            assert result.exit_code != 0
            assert said in " ".join(result.stderr.split())
    assert started == []


def test_a_wildcard_is_no_place_to_tell() -> None:
    assert told_place(None, ("127.0.0.1", 7000)) == ("127.0.0.1", 7000)
    assert told_place(("sentinel.example", 0), ("0.0.0.0", 7000)) == ("sentinel.example", 7000)
    host, port = told_place(None, ("0.0.0.0", 7000))
    assert (host != "0.0.0.0", port) == (True, 7000)


async def test_a_sentinel_brings_nodes_together_and_says_goodbye() -> None:
    events: list[Mapping[str, Any]] = []
    identity = Identity.generate()
    settings = NetworkSettings(HOME.network_id, listen=LOOPBACK, is_sentinel=True)
    task = asyncio.create_task(run_sentinel(identity, settings, events.append))
    while not events:
        await asyncio.sleep(0.01)
    from routing.addresses import parse_address

    address = parse_address(str(events[0]["address"]))
    async with (
        member(offer(0, 6), bootstraps=(address,)) as (one, _),
        member(offer(6, 12), bootstraps=(address,)) as (other, _),
        asyncio.timeout(10),
    ):
        while other.node_id not in one.gossip.announcements:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [event["event"] for event in events] == ["ready", "stopped"]


def test_a_sentinel_imports_no_torch() -> None:
    code = (
        "import sys, cli.main, cli.sentinel, cli.swarm, cli.leave, cli.status, routing.network, routing.relay; "
        "print([name for name in ('torch', 'transformers', 'fastapi', 'node', 'slicing') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
def test_a_sentinel_is_found_by_status_and_doctor_and_leaves_when_asked() -> None:
    with Processes() as processes:
        sentinel = processes.sentinel()
        assert processes.status([sentinel])["entrances"][0]["error"] is None
        assert processes.run("doctor", "--bootstrap", sentinel.address).returncode == 0
        assert (processes.state_dir / "run" / f"{sentinel.popen.pid}.json").exists()
        left = processes.leave(sentinel)
        assert (left.returncode, sentinel.popen.wait(10)) == (0, 0)
        assert f"(pid {sentinel.popen.pid}) has left" in left.stdout
        assert not list((processes.state_dir / "run").iterdir())


@pytest.mark.processes
def test_a_killed_sentinel_leaves_a_run_file_that_nobody_believes() -> None:
    with Processes() as processes:
        sentinel = processes.sentinel()
        sentinel.kill(signal.SIGKILL)
        left = processes.leave(sentinel)
        assert left.returncode == 1
        assert "no host or sentinel runs here" in left.stderr
        assert not list((processes.state_dir / "run").iterdir())
