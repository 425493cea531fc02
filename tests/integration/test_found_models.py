"""A gateway in a swarm of real links: models come and go with the nodes that announce them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.library import LibrarySettings, NetworkLibrary, opened_library
from app.engine.model import EndsSettings, look_up
from app.engine.network import JoinedNetwork, MemberSettings, open_network
from routing.identity import Identity
from routing.network import Network, NetworkSettings, Offering
from routing.sealing import SealKey
from routing.types import NodeAddress, SliceOffer
from tests.app.fake_network import names_of, offer
from tests.support.tiny_models import small_llama
from tests.support.tiny_tokenizer import write_tiny_tokenizer

NETWORK_ID = bytes([3]) * 32


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.chdir(tmp_path)
    with small_llama(64, vocab_size=300) as llama:
        llama.save_pretrained(write_tiny_tokenizer(tmp_path / "tiny"))
    return look_up("tiny", EndsSettings()).facts.digest


@contextlib.asynccontextmanager
async def member(bootstraps: tuple[NodeAddress, ...] = (), **fields: Any) -> AsyncIterator[Network]:
    """A sentinel, or a node that announces what `offering` says and never computes."""
    told = NetworkSettings(
        NETWORK_ID,
        bootstraps=bootstraps,
        listen=("127.0.0.1", 0),
        is_sentinel=not bootstraps,
    )
    network = Network(Identity.generate(), told, **fields)
    async with network.running():
        yield network


def address_of(network: Network) -> NodeAddress:
    assert network.bound is not None
    return NodeAddress(network.node_id, *network.bound)


def holding(*offers: SliceOffer) -> dict[str, Any]:
    return {"seal_key": SealKey.generate().public, "offering": lambda: Offering(offers)}


@contextlib.asynccontextmanager
async def gateway(*bootstraps: Network) -> AsyncIterator[tuple[JoinedNetwork, NetworkLibrary]]:
    told = MemberSettings(NETWORK_ID, bootstraps=tuple(map(address_of, bootstraps)))
    async with open_network(told) as joined, opened_library(LibrarySettings(), joined) as library:
        running = asyncio.create_task(library.run())
        try:
            yield joined, library
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def becomes(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_model_is_listed_while_nodes_of_the_swarm_cover_it(digest: bytes) -> None:
    async with member() as sentinel, gateway(sentinel) as (joined, library):
        here = (address_of(sentinel),)
        await joined.network.first_look(5.0)
        async with member(here, **holding(offer(digest, 1, 3))):
            await becomes(lambda: library.find("tiny") is not None)
            assert names_of(library.models()) == []
            known = library.find("tiny")
            assert known is not None
            assert known.status.missing == ((3, 4),)
            async with member(here, **holding(offer(digest, 3, 4))) as second:
                await becomes(lambda: names_of(library.models()) == ["tiny"])
                assert (await library.engine("tiny")).coverage().is_ready
                await second.leave()
                await becomes(lambda: names_of(library.models()) == [])


async def test_a_gateway_tells_nobody_that_it_is_there(digest: bytes) -> None:
    async with (
        member() as sentinel,
        gateway(sentinel) as (joined, library),
        member((address_of(sentinel),), **holding(offer(digest, 0, 4))) as node,
    ):
        await becomes(lambda: names_of(library.models()) == ["tiny"])
        seen = {announced.node_id for announced in sentinel.directory.announced()}
        seen |= {announced.node_id for announced in node.directory.announced()}
        assert joined.network.node_id not in seen
