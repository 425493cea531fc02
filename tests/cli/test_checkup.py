"""What `doctor --bootstrap` asks sentinels, and what it makes of their answers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cli.checkup import check_up, judge
from cli.diagnosis import Finding
from cli.membership import Membership, network_id
from cli.outlook import Outlook
from cli.ports import bind_loopback
from routing.allow_list import AllowList
from routing.errors import ErrorCode, LinkError, RelayError
from routing.identity import Identity
from routing.types import NodeAddress, NodeId
from tests.cli.conftest import Diffuse
from tests.cli.swarm import HOME, member, offer, swarm
from tests.cli.test_doctor import findings

SENTINEL = NodeAddress(NodeId(b"\x01" * 32), "192.0.2.1", 7000)
BOUND = ("0.0.0.0", 9000)
WELL = Outlook(SENTINEL, rtt_ms=12.0, skew_ms=80.0, observed=("198.51.100.4", 9000), echo_ms=25.0)


def judged(*outlooks: Outlook) -> dict[str, Finding]:
    """Findings by what they are about, without the sentinel's name."""
    return {found.subject.rpartition(", ")[2]: found for found in judge(BOUND, outlooks)}


def problems(found: list[Finding]) -> list[str]:
    return [f"{finding.subject}: {finding.text}" for finding in found if finding.level == "problem"]


# --- judging


def test_a_machine_that_can_be_dialled_has_nothing_to_do() -> None:
    found = judged(WELL)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["way in"].text == "direct at 198.51.100.4:9000, and through 1 relay"


def test_a_machine_behind_a_router_is_told_what_to_forward_and_is_well_with_a_relay() -> None:
    behind = replace(WELL, dial_back=LinkError(ErrorCode.TIMEOUT))
    found = judged(behind)
    assert found["dial-back"].level == "warning"
    assert (
        "198.51.100.4:9000 (E101 TIMEOUT): forward that TCP port to this machine" in found["dial-back"].text
    )
    assert found["way in"].level == "ok"
    assert found["way in"].text.startswith("through 1 relay only; with a second sentinel")


def test_a_machine_without_any_way_in_is_a_problem() -> None:
    alone = replace(
        WELL, dial_back=LinkError(ErrorCode.TIMEOUT), reservation=LinkError(ErrorCode.TIMEOUT), echo_ms=None
    )
    found = judged(alone)
    assert found["relay"].level == "warning"
    assert "it may be a plain node, or full" in found["relay"].text
    assert found["way in"].level == "problem"


def test_an_echo_that_does_not_come_back_is_a_problem() -> None:
    found = judged(replace(WELL, echo_ms=None, echo=RelayError(ErrorCode.PEER_GONE)))
    assert found["echo"].level == "problem"
    assert "we do not reach ourselves through it: E302 PEER_GONE" in found["echo"].text


def test_clocks_that_differ_are_told_with_the_side() -> None:
    for skew_ms, level, side in ((-6_000.0, "warning", "behind"), (31_000.0, "problem", "ahead of")):
        clock = judged(replace(WELL, skew_ms=skew_ms))["clock"]
        assert (clock.level, side in clock.text) == (level, True)


def test_one_sentinel_that_is_down_hides_nothing_of_the_other() -> None:
    down = Outlook(replace(SENTINEL, port=7001), LinkError(ErrorCode.LINK_LOST, "refused"))
    found = list(judge(BOUND, [down, WELL]))
    assert [finding.level for finding in found].count("problem") == 1
    assert found[-1].text.startswith("direct at")


# --- asking


async def test_a_sentinel_is_asked_everything() -> None:
    async with swarm() as sentinel:
        found = await check_up(Identity.generate(), HOME, [sentinel])
    assert problems(found) == []
    told = [finding.subject.rpartition(", ")[2] for finding in found]
    assert told[2:] == ["clock", "address", "dial-back", "relay", "echo", "way in"]


async def test_sentinels_that_were_not_named_are_asked_too() -> None:
    async with swarm() as first, member(is_sentinel=True, bootstraps=(first,)) as (other, second):
        while not other.announcer.announced:
            await other.first_look(0.1)
        found = await check_up(Identity.generate(), HOME, [first])
    assert any(second.node_id.hex()[:8] in finding.subject for finding in found)
    assert found[-1].text.endswith("through 2 relays")


async def test_a_plain_node_dials_back_and_relays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.outlook.RESERVE_TIMEOUT_S", 0.2)
    async with member(offer(0, 12)) as (_, address):
        found = await check_up(Identity.generate(), HOME, [address])
    levels = {finding.subject.rpartition(", ")[2]: finding.level for finding in found}
    assert (levels["dial-back"], levels["relay"], levels["way in"]) == ("ok", "warning", "ok")


async def test_a_sentinel_that_is_down_is_said_to_be() -> None:
    with closing(bind_loopback(0)) as listener:
        port = listener.getsockname()[1]
    found = await check_up(Identity.generate(), HOME, [NodeAddress(NodeId(bytes(32)), "127.0.0.1", port)])
    told = problems(found)
    assert "is its port open from here?" in told[0]
    assert "no sentinel answers" in told[1]


async def test_another_swarm_is_named_as_the_cause() -> None:
    async with swarm() as sentinel:
        found = await check_up(Identity.generate(), Membership(network_id("work")), [sentinel])
    assert "--network" in problems(found)[0]


async def test_whoever_is_not_listed_is_told_what_to_send(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    listed = Identity.generate()
    path.write_text(listed.node_id.hex())
    allow = AllowList(path, HOME.network_id)
    async with member(is_sentinel=True, allow=allow) as (_, sentinel):
        strangers = await check_up(Identity.generate(), HOME, [sentinel])
        members = await check_up(listed, HOME, [sentinel])
    assert "E207 NOT_ALLOWED" in problems(strangers)[0]
    assert "give its operator the id of your --key file" in problems(strangers)[0]
    assert problems(members) == []


async def test_a_port_in_use_is_named() -> None:
    with closing(bind_loopback(0)) as listener:
        taken = ("127.0.0.1", listener.getsockname()[1])
        (found,) = await check_up(Identity.generate(), HOME, [SENTINEL], listen=taken)
    assert (found.level, found.subject) == ("problem", "--listen")


def test_doctor_fails_when_the_swarm_cannot_be_joined(diffuse: Diffuse) -> None:
    with closing(bind_loopback(0)) as listener:
        port = listener.getsockname()[1]
    result = diffuse("doctor", "--bootstrap", f"{'ab' * 32}@127.0.0.1:{port}", "--json")
    assert result.exit_code == 1
    told = findings(result.stdout)
    assert told["way in"][0] == "problem"
    assert not any(subject.startswith("port ") for subject in told)
