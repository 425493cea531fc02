"""Sentinels and nodes in this process, on real links of loopback, for commands that ask a swarm."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cli.membership import Membership, network_id
from routing.errors import RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.network import Network, NetworkSettings, Offering
from routing.types import Describe, Description, Message, NodeAddress, SliceOffer, SliceSpec, WireDtype

HOME = Membership(network_id("home"))
DIGEST = b"d" * 32
LOOPBACK = ("127.0.0.1", 0)


class Describer:
    """The part of a node that says what it serves."""

    def __init__(self, description: Description) -> None:
        self._description = description

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Describe):
            link.post(self._description)

    def on_link_up(self, link: Link) -> None:
        """Nothing to do."""

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        """Nothing to do."""


def offer(start: int, end: int, model: str = "tiny", num_layers: int = 12) -> SliceOffer:
    spec = SliceSpec(start, end)
    return SliceOffer(model, DIGEST, num_layers, 64, spec, WireDtype.FLOAT32, "plain/fp32/cpu", layer_ms=1.5)


@asynccontextmanager
async def member(
    *offers: SliceOffer, bootstraps: tuple[NodeAddress, ...] = (), **settings: Any
) -> AsyncIterator[tuple[Network, NodeAddress]]:
    """A member of HOME: a node with these slices, or (is_sentinel) a sentinel; with where it is."""
    identity = Identity.generate()
    chosen = {"psk": HOME.psk, "listen": LOOPBACK, "bootstraps": bootstraps} | settings
    offering = (lambda: Offering(offers, load=1, max_sessions=8)) if offers else None
    network = Network(
        identity, NetworkSettings(HOME.network_id, **chosen), seal_key=bytes(32), offering=offering
    )
    network.dispatcher.add(Describer(Description(offers)), (Describe,))
    async with network.running():
        assert network.bound is not None
        yield network, NodeAddress(identity.node_id, *network.bound)


@asynccontextmanager
async def swarm(*slices: tuple[int, int]) -> AsyncIterator[NodeAddress]:
    """A sentinel that knows a node for each slice; its address."""
    async with contextlib.AsyncExitStack() as stack:
        sentinel, address = await stack.enter_async_context(member(is_sentinel=True))
        for start, end in slices:
            await stack.enter_async_context(member(offer(start, end), bootstraps=(address,)))
        async with asyncio.timeout(10):
            while len(sentinel.gossip.announcements) < len(slices):
                await asyncio.sleep(0.02)
        yield address
