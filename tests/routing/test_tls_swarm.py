"""Whole members under TLS: they find each other, dial each other back, and take in renewed files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from routing.reach import Verdict
from routing.tls import Tls, guest_tls, member_tls
from tests.routing.swarms import knows, open_swarm, until
from tests.support.certificates import Authority


async def test_a_swarm_under_tls_finds_itself(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with open_swarm() as swarm:
        sentinel = await swarm.sentinel(tls=member_tls(ca.files("sentinel")))
        nodes = [await swarm.node(sentinel, tls=member_tls(ca.files(name))) for name in ("one", "two")]
        guest = await swarm.guest(sentinel, tls=guest_tls(ca.files("gateway")))
        await until(lambda: knows(guest, sentinel, *nodes))
        await until(lambda: all(node.reachability.verdict is Verdict.PUBLIC for node in nodes))
        assert all(node.contacts and not node.contacts[0].is_relayed for node in nodes)


async def test_a_plain_node_is_not_taken_into_a_swarm_under_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "routing")
    ca = Authority(tmp_path)
    async with open_swarm() as swarm:
        sentinel = await swarm.sentinel(tls=member_tls(ca.files("sentinel")))
        await swarm.node(sentinel)
        await until(lambda: "it speaks TLS only: give --tls-ca" in caplog.text)
        await until(lambda: "it dials without TLS" in caplog.text)
        assert not sentinel.endpoint.links


async def test_a_member_watches_its_files_as_long_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = asyncio.Event()

    async def watch(self: Tls) -> None:
        watched.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Tls, "watch", watch)
    async with open_swarm() as swarm, asyncio.timeout(5):
        await swarm.sentinel(tls=member_tls(Authority(tmp_path).files("sentinel")))
        await watched.wait()
