"""What `status` shows of a swarm, and how it looks on the terminal."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import closing
from typing import Any

import pytest
from rich.console import Console

from cli import status as command
from cli.membership import Membership, network_id
from cli.overview import Entrance, as_json, bar, coverage, tables, ways_in
from cli.ports import bind_loopback
from cli.status import look
from cli.swarm import network_settings
from routing.errors import ErrorCode, LinkError
from routing.identity import Identity
from routing.network_status import ModelStatus, NeighbourStatus, NetworkStatus, NodeStatus
from routing.types import NodeAddress, NodeId
from tests.cli.conftest import Diffuse
from tests.cli.swarm import DIGEST, HOME, member, offer, swarm
from tests.support.swarm_status import network_status, node_status

RELAY = NodeId(b"\x99" * 32)


def node(number: int, **changes: Any) -> NodeStatus:
    node_id = NodeId(bytes([number]) * 32)
    known: dict[str, Any] = {
        "contacts": (NodeAddress(node_id, "192.168.1.7", 9000 + number),),
        "offers": (offer(0, 4),),
        "load": 2,
        "max_sessions": 256,
        "rtt_ms": 12.345,
        "age_s": 31.4,
    }
    return node_status(node_id, **known | changes)


def shown(status: NetworkStatus, *entrances: Entrance) -> str:
    console = Console(file=io.StringIO(), width=240)
    for part in tables(status, entrances):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def model(*holders: int, name: str = "tiny") -> ModelStatus:
    return ModelStatus(name, DIGEST, len(holders), holders, has_opening=False, has_closing=False)


def test_lines_are_shown_beside_round_trips() -> None:
    told = (NeighbourStatus(b"\xab\xcd" * 4, 3.0, 94.12), NeighbourStatus(b"\x01" * 8, 9.0, None))
    status = network_status(node(1, neighbours=told, mbps=12.0))
    assert "abcd 94.1" in shown(status)
    (as_told,) = status.as_json()["nodes"]
    assert as_told["mbps"] == 12.0
    assert [(it["node_id"], it["mbps"]) for it in as_told["neighbours"]] == [
        ("abcd" * 4, 94.12),
        ("01" * 8, None),
    ]


# --- pictures


def test_a_bar_has_a_digit_for_each_layer() -> None:
    assert bar([1, 2, 0, 9, 12]).plain == "12·9+"


def test_a_gap_shows_however_many_layers_share_a_cell() -> None:
    holders = [2] * 200
    holders[77] = 0
    cells = coverage(holders, width=64)
    assert len(cells) == 64
    assert cells.count(0) == 1


def test_a_gap_is_named() -> None:
    text = shown(network_status(node(1), models=(model(1, 1, 0, 0, 1),)))
    assert "misses 2:4" in text
    assert "11··1" in text
    assert "whole" in shown(network_status(node(1), models=(model(1, 2),)))


def test_a_nodes_row_tells_how_it_is_reached() -> None:
    text = shown(network_status(node(1, owner="ab" * 32)))
    for part in (
        "01010101",
        "tiny 0:4",
        "1.50",
        "2/256",
        "12.3 ms",
        "direct 192.168.1.7:9001",
        "31 s old",
        "abab",
    ):
        assert part in text
    assert "suspected" in shown(network_status(node(1, is_suspected=True)))


def test_the_first_layer_alone_is_no_gap() -> None:
    """Every gateway holds it, unless told otherwise."""
    assert "whole, with 0:1 at the gateway" in shown(network_status(node(1), models=(model(0, 1, 1),)))
    assert "misses 0:2" in shown(network_status(node(1), models=(model(0, 0, 1),)))
    assert "misses 0:1" in shown(network_status(node(1), models=(model(0),)))


def test_ways_in_are_told_by_kind() -> None:
    own = NodeId(b"\x01" * 32)
    relayed = NodeAddress(own, "192.0.2.1", 7000, RELAY)
    assert ways_in([relayed, relayed]) == "relayed 2"
    assert ways_in([NodeAddress(own, "::1", 7000), relayed]) == "direct [::1]:7000, relayed 1"
    assert ways_in([]) == "none"


def test_a_strangers_words_drive_no_terminal() -> None:
    rude = "\x1b[31m[bold]x\n"
    text = shown(network_status(node(1, offers=(offer(0, 4, rude),)), models=(model(1, name=rude),)))
    assert "\x1b" not in text
    assert "[bold]x" in text


def test_what_is_wrong_with_the_way_in_is_told_with_the_cure() -> None:
    entrance = Entrance(node(1).contacts[0], LinkError(ErrorCode.TIMEOUT, "no answer"))
    assert "is its port open from here?" in shown(network_status(), entrance)
    entrances = as_json(network_status(), [entrance])["entrances"]
    assert "is its port open from here?" in entrances[0]["error"]


# --- a real swarm


async def test_an_onlooker_sees_models_and_nodes() -> None:
    async with swarm((0, 8), (4, 12)) as sentinel:
        settings = network_settings(HOME, (sentinel,))
        async with look(Identity.generate(), settings) as (network, entrances):
            told = as_json(network.status(), entrances)
    assert told["entrances"][0]["error"] is None
    assert [found["holders"] for found in told["models"]] == [[1] * 4 + [2] * 4 + [1] * 4]
    assert sorted(found["slices"][0]["layers"] for found in told["nodes"] if found["slices"]) == [
        [0, 8],
        [4, 12],
    ]


@pytest.mark.parametrize(
    ("membership", "said"),
    [
        (Membership(network_id("work")), "--network"),
        (Membership(HOME.network_id, psk=bytes(32)), "--psk-file"),
    ],
    ids=["another swarm", "a secret it does not have"],
)
async def test_a_wrong_membership_is_explained(membership: Membership, said: str) -> None:
    async with swarm() as sentinel:
        settings = network_settings(membership, (sentinel,))
        async with look(Identity.generate(), settings) as (network, entrances):
            told = as_json(network.status(), entrances)
    assert said in told["entrances"][0]["error"]


async def test_while_secrets_change_both_are_taken() -> None:
    old, new = b"\1" * 32, b"\2" * 32
    async with member(is_sentinel=True, psk=new, accepted_psks=(old,)) as (_, sentinel):
        for secret in (old, new):
            settings = network_settings(Membership(HOME.network_id, psk=secret), (sentinel,))
            async with look(Identity.generate(), settings) as (_, entrances):
                assert [entrance.error for entrance in entrances] == [None]


@pytest.mark.parametrize("as_lines", [True, False])
async def test_watching_looks_again_and_again(
    as_lines: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "WATCH_S", 0.01)
    text = ""
    async with swarm((0, 12)) as sentinel, asyncio.timeout(10):
        watching = asyncio.create_task(
            command._watch(Identity.generate(), network_settings(HOME, (sentinel,)), as_lines=as_lines)
        )
        while text.count("tiny") < 2:
            await asyncio.sleep(0.01)
            text += capsys.readouterr().out
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert not as_lines or json.loads(text.splitlines()[0])["num_links"] >= 1


# --- the command


def test_a_swarm_that_is_not_there_is_told_and_fails(diffuse: Diffuse) -> None:
    with closing(bind_loopback(0)) as listener:
        port = listener.getsockname()[1]
    result = diffuse("status", "--bootstrap", f"{'ab' * 32}@127.0.0.1:{port}")
    assert result.exit_code == 1
    assert "is its port open from here?" in result.stdout
    assert "no member could be reached" in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "say whom to ask"),
        (("--bootstrap", "127.0.0.1:7000"), "a node is written id@host:port; copy the whole"),
        (("--bootstrap", f"{'ab' * 31}@127.0.0.1:7000"), "64 hex digits, this one has 62"),
        (("--bootstrap", f"{'ab' * 32}@127.0.0.1"), "is not host:port"),
    ],
)
def test_a_wrong_address_is_a_usage_error(flags: tuple[str, ...], said: str, diffuse: Diffuse) -> None:
    result = diffuse("status", *flags)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
