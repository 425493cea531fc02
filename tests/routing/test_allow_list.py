"""Who may connect: listed ids, those whom a list's issuers let in, and members whose key has moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from routing import allow_list
from routing.allow_list import AllowList, parse_members
from routing.dispatcher import Dispatcher
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, SecurityError, SettingsError
from routing.guest_token import GuestScope, sign_guest_token
from routing.identity import Identity
from routing.moved import LIFETIME_S, sign_moved
from routing.types import Capabilities, NodeAddress, NodeId

NETWORK = b"n" * 32
NOW_S = 1_800_000_000
MEMBER, ISSUER, GUEST = Identity.generate(), Identity.generate(), Identity.generate()
PLAIN = Capabilities()


@dataclass
class Links:
    """An endpoint that only counts what it is asked."""

    linked: set[NodeId] = field(default_factory=set)
    num_rechecks: int = 0
    rechecked: asyncio.Event = field(default_factory=asyncio.Event)

    def recheck_allowed(self) -> None:
        self.num_rechecks += 1
        self.rechecked.set()

    def links_to(self, node_id: NodeId) -> list[object]:
        return [object()] if node_id in self.linked else []


@dataclass
class Listed:
    """A list on disk, with a clock of the test's own."""

    path: Path
    now_s: float = NOW_S

    def __post_init__(self) -> None:
        self.write(
            MEMBER.node_id.hex() + "  the box under the stairs", f"issuer {ISSUER.public_key.hex()}  anna"
        )
        self.list = AllowList(self.path, NETWORK, now=lambda: self.now_s)

    def write(self, *lines: str) -> None:
        self.path.write_text("# members\n" + "\n".join(lines) + "\n")


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listed:
    monkeypatch.setattr(allow_list, "POLL_S", 0.01)
    monkeypatch.setattr(allow_list, "SETTLE_S", 0.01)
    return Listed(tmp_path / "allow")


@asynccontextmanager
async def watching(listed: Listed) -> AsyncIterator[Links]:
    links = Links()
    task = asyncio.create_task(listed.list.watch(links))
    await asyncio.sleep(0)
    try:
        yield links
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def guest(client_id: NodeId | None = None, issuer: Identity = ISSUER, **changes: Any) -> Capabilities:
    terms: dict[str, Any] = {"client_id": client_id, "now_s": NOW_S, "lifetime_s": 60, "quota": 2}
    return Capabilities(token=sign_guest_token(issuer, NETWORK, **terms | changes))


# --- the file


def test_a_list_holds_ids_with_names_and_issuers() -> None:
    text = f"# us\n\n{'AB' * 32} Anna's # laptop\n{'cd' * 32}@10.0.0.1:7000\nissuer {'ef' * 32} anna\n"
    members = parse_members(text, "list")
    assert members.ids == {NodeId(b"\xab" * 32), NodeId(b"\xcd" * 32)}
    assert members.issuers == {b"\xef" * 32}


@pytest.mark.parametrize("line", ["ab", "zz" * 32, "issuer", "issuer ab", "ab" * 33])
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(SettingsError, match="allow, line 2: give a node id"):
        parse_members(f"# us\n{line}\n", "allow")


def test_a_list_of_nobody_is_refused() -> None:
    with pytest.raises(SettingsError, match="names nobody"):
        parse_members("# us\n", "allow")


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the allow list"):
        AllowList(tmp_path / "none", NETWORK)


async def test_a_removed_id_is_known_at_once(listed: Listed) -> None:
    assert listed.list(MEMBER.node_id, PLAIN)
    async with watching(listed) as links:
        listed.write(GUEST.node_id.hex())
        await asyncio.wait_for(links.rechecked.wait(), 5)
    assert not listed.list(MEMBER.node_id, PLAIN)
    assert listed.list(GUEST.node_id, PLAIN)


async def test_a_broken_edit_changes_nothing_and_is_told(
    listed: Listed, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(listed) as links, asyncio.timeout(5):
        listed.write("garbage")
        while not listed.list.trouble:
            await asyncio.sleep(0.01)
        listed.path.unlink()
        while "cannot read" not in listed.list.trouble:
            await asyncio.sleep(0.01)
    assert listed.list(MEMBER.node_id, PLAIN)
    assert links.num_rechecks == 0
    assert "the list from before stays in use" in caplog.text


async def test_a_mended_edit_is_taken(listed: Listed) -> None:
    async with watching(listed) as links, asyncio.timeout(5):
        listed.write("garbage")
        while not listed.list.trouble:
            await asyncio.sleep(0.01)
        listed.write(GUEST.node_id.hex())
        await links.rechecked.wait()
    assert not listed.list.trouble


async def test_a_touched_file_disturbs_nobody(listed: Listed) -> None:
    async with watching(listed) as links:
        listed.write(MEMBER.node_id.hex(), f"issuer {ISSUER.public_key.hex()}", "# the same, longer")
        stamp = listed.list._stamp
        async with asyncio.timeout(5):
            while listed.list._stamp == stamp:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.03)
    assert links.num_rechecks == 0


# --- guests


def test_a_stranger_may_not(listed: Listed) -> None:
    assert not listed.list(GUEST.node_id, PLAIN)


def test_whom_the_operator_named_may(listed: Listed) -> None:
    assert AllowList(listed.path, NETWORK, always=frozenset({GUEST.node_id}))(GUEST.node_id, PLAIN)


def test_a_guest_with_a_token_of_an_issuer_may(listed: Listed) -> None:
    assert listed.list(GUEST.node_id, guest(GUEST.node_id))
    assert listed.list.session_limit(GUEST.node_id) == 2
    assert listed.list.session_limit(MEMBER.node_id) is None


@pytest.mark.parametrize(
    "shown",
    [
        guest(GUEST.node_id, issuer=GUEST),
        guest(MEMBER.node_id),
        guest(GUEST.node_id, now_s=NOW_S - 60),
        Capabilities(token=b"garbage"),
        Capabilities(moved=b"garbage"),
    ],
    ids=["own issuer", "for another", "expired", "no token", "no statement"],
)
def test_no_other_token_helps(listed: Listed, shown: Capabilities) -> None:
    assert not listed.list(GUEST.node_id, shown)


def test_a_guest_who_may_use_may_not_serve(listed: Listed) -> None:
    for scope, may in ((GuestScope.USE, False), (GuestScope.SERVE, True)):
        shown = Capabilities(token=guest(GUEST.node_id, scope=scope).token, seal_key=b"k" * 32)
        assert listed.list(GUEST.node_id, shown) is may


async def test_a_token_for_anybody_serves_one_at_a_time(listed: Listed) -> None:
    shown, other = guest(None), Identity.generate().node_id
    async with watching(listed) as links:
        assert listed.list(GUEST.node_id, shown)
        links.linked.add(GUEST.node_id)
        assert listed.list(GUEST.node_id, shown)
        assert not listed.list(other, shown)
        links.linked.clear()
        assert listed.list(other, shown)


async def test_a_guest_whose_time_is_over_has_to_go(listed: Listed) -> None:
    shown = guest(GUEST.node_id)
    assert listed.list(GUEST.node_id, shown)
    async with watching(listed) as links:
        listed.now_s += 60
        await asyncio.wait_for(links.rechecked.wait(), 5)
    assert not listed.list(GUEST.node_id, shown)


async def test_guests_go_with_their_issuer(listed: Listed) -> None:
    shown = guest(GUEST.node_id)
    assert listed.list(GUEST.node_id, shown)
    async with watching(listed) as links:
        listed.write(MEMBER.node_id.hex())
        await asyncio.wait_for(links.rechecked.wait(), 5)
    assert not listed.list(GUEST.node_id, shown)


# --- moved keys


def test_a_member_with_a_new_key_is_known_for_a_week(listed: Listed) -> None:
    new = Identity.generate()
    shown = Capabilities(moved=sign_moved(MEMBER, new, NOW_S))
    assert listed.list(new.node_id, shown)
    assert not listed.list(GUEST.node_id, shown)
    listed.now_s += LIFETIME_S
    assert not listed.list(new.node_id, shown)


def test_a_stranger_who_moves_stays_one(listed: Listed) -> None:
    new = Identity.generate()
    assert not listed.list(new.node_id, Capabilities(moved=sign_moved(GUEST, new, NOW_S)))


# --- on real links


async def test_a_removed_member_is_disconnected_and_stays_out(listed: Listed) -> None:
    host = Endpoint(ISSUER, NETWORK, Capabilities, Dispatcher(), allow=listed.list)
    member = Endpoint(MEMBER, NETWORK, Capabilities, Dispatcher())
    address = NodeAddress(ISSUER.node_id, *await host.listen("127.0.0.1", 0))
    try:
        link = await member.dial(address)
        watching = asyncio.create_task(listed.list.watch(host))
        listed.write(GUEST.node_id.hex())
        error = await asyncio.wait_for(link.wait_closed(), 5)
        assert error is not None
        assert error.code is ErrorCode.NOT_ALLOWED
        with pytest.raises(SecurityError, match="NOT_ALLOWED"):
            await member.dial(address)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    finally:
        await member.close()
        await host.close()


async def test_a_guest_shows_its_token_inside_the_handshake(listed: Listed) -> None:
    listed.now_s = time.time()
    shown = guest(GUEST.node_id, now_s=listed.now_s)
    host = Endpoint(ISSUER, NETWORK, Capabilities, Dispatcher(), allow=listed.list)
    with_token = Endpoint(GUEST, NETWORK, lambda: shown, Dispatcher())
    without = Endpoint(GUEST, NETWORK, Capabilities, Dispatcher())
    address = NodeAddress(ISSUER.node_id, *await host.listen("127.0.0.1", 0))
    try:
        assert not (await with_token.dial(address)).is_closed
        with pytest.raises(SecurityError, match="NOT_ALLOWED"):
            await without.dial(address)
    finally:
        for endpoint in (with_token, without, host):
            await endpoint.close()
