"""A swarm that exists in records only: what a library and an engine need of a network, told by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from app.engine.network import JoinedNetwork
from routing.switchboard import Switchboard
from routing.types import NodeAddress, NodeId, NodeRecord, SliceOffer, SliceSpec, WireDtype

HIDDEN_SIZE = 32


@dataclass
class FakeDirectory:
    """Holds the records it is given, and tells when they change."""

    on_change: list[Callable[[], None]] = field(default_factory=list)
    interests: frozenset[bytes] | None = None
    held: tuple[NodeRecord, ...] = ()

    def records(self) -> tuple[NodeRecord, ...]:
        return self.held

    def announced(self) -> tuple[Any, ...]:
        return ()

    def now_holds(self, *records: NodeRecord) -> None:
        self.held = records
        for tell in self.on_change:
            tell()


@dataclass
class FakeNetwork:
    """What stands in for `Network`."""

    directory: FakeDirectory = field(default_factory=FakeDirectory)
    num_looks: int = 0

    def status(self) -> None:
        """Nobody scrapes this one."""

    async def first_look(self, timeout_s: float) -> None:
        self.num_looks += 1


def joined(network: FakeNetwork | None = None) -> tuple[JoinedNetwork, FakeDirectory]:
    """A joined network without a link, and its directory."""
    network = network or FakeNetwork()
    switchboard = Switchboard()
    switchboard.connect(cast(Any, None), cast(Any, network.directory))
    return JoinedNetwork(cast(Any, network), switchboard), network.directory


def node(number: int, *offers: SliceOffer, host: str = "127.0.0.1") -> NodeRecord:
    """A node with an id that begins with its number."""
    node_id = NodeId(number.to_bytes(4, "big") + bytes(28))
    return NodeRecord(NodeAddress(node_id, host, 9000 + number), bytes(32), (WireDtype.FLOAT32,), offers)


def offer(
    digest: bytes, start: int, end: int, *, name: str = "tiny", num_layers: int = 4, holds_ends: bool = False
) -> SliceOffer:
    """Layers of a model, as a node announces them."""
    return SliceOffer(
        name,
        digest,
        num_layers,
        HIDDEN_SIZE,
        SliceSpec(start, end),
        WireDtype.FLOAT32,
        "plain",
        has_opening=holds_ends,
        has_closing=holds_ends,
        layer_ms=1.0,
    )


def names_of(models: Iterable[Any]) -> list[str]:
    """Those that clients are shown."""
    return [model.name for model in models if model.is_listed]
