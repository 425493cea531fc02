"""A swarm on the terminal: its models with how well each layer is covered, and its nodes.

Pure functions from what a network knows to tables. Asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from cli import failures, show

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from routing.errors import RemoteError
    from routing.network_status import ModelStatus, NetworkStatus, NodeStatus
    from routing.types import NodeAddress

BAR_WIDTH: Final = 64  # cells; a model with more layers shares them
_GAP: Final = "·"
_STYLES: Final = ("red", "yellow", "green")  # nobody, one holder, replicas


@dataclass(frozen=True, slots=True)
class Entrance:
    """One of the members we were told to join by: how far away it is, or why it let us down."""

    address: NodeAddress
    error: RemoteError | None = None
    rtt_ms: float | None = None

    @property
    def name(self) -> str:
        """How it is called in a sentence."""
        return f"{self.address.node_id.hex()[:8]} at {show.host_port(self.address.host, self.address.port)}"


def as_json(status: NetworkStatus, entrances: Sequence[Entrance]) -> dict[str, Any]:
    """Everything known, for scripts."""
    return {"entrances": [_entrance(one) for one in entrances], **status.as_json()}


def _entrance(one: Entrance) -> dict[str, Any]:
    error = failures.explain(one.error) if one.error else None
    return {"address": str(one.address), "rtt_ms": one.rtt_ms, "error": error}


def tables(status: NetworkStatus, entrances: Sequence[Entrance]) -> list[RenderableType]:
    """What people look at: the way in and what is wrong with it, then models, then nodes."""
    from rich.text import Text

    lines: list[RenderableType] = [_way_in(one) for one in entrances]
    if not status.nodes:
        if any(one.error is None for one in entrances):
            lines.append(Text("no member has announced itself yet"))
        return lines
    return [
        *lines,
        Text(""),
        _models(status.models),
        Text(""),
        _nodes(status.nodes),
        Text(""),
        Text(_summary(status)),
    ]


def coverage(holders: Sequence[int], width: int = BAR_WIDTH) -> list[int]:
    """Holders of each cell of a bar: of its layer, or the fewest among the layers that share it."""
    if len(holders) <= width:
        return list(holders)
    edges = [cell * len(holders) // width for cell in range(width + 1)]
    return [min(holders[start:end]) for start, end in pairwise(edges)]


def bar(holders: Sequence[int], width: int = BAR_WIDTH) -> Text:
    """A digit a layer, how many nodes hold it: `112222···1`."""
    from rich.text import Text

    line = Text()
    for count in coverage(holders, width):
        digit = _GAP if count == 0 else str(count) if count < 10 else "+"
        line.append(digit, style=_STYLES[min(count, 2)])
    return line


def _way_in(one: Entrance) -> Text:
    from rich.text import Text

    if one.error is not None:
        return Text(f"{one.name}: {failures.explain(one.error)}", style="red")
    return Text(f"{one.name} answers, {one.rtt_ms or 0:.1f} ms away")


def _models(models: Sequence[ModelStatus]) -> Table:
    grid = show.table("model", "digest", "layers", "route", "nodes per layer")
    for model in models:
        whole = "whole" if model.is_whole else _missing(model)
        digest = model.digest.hex()[:12]
        grid.add_row(_plain(model.name), digest, str(model.num_layers), whole, bar(model.holders))
    return grid


def _missing(model: ModelStatus) -> str:
    """Layers without a holder; the first one alone is held by every gateway that does not say otherwise."""
    if model.missing == ((0, 1),) and model.num_layers > 1 and not model.is_diffusion:
        return "whole, with 0:1 at the gateway"
    return f"misses {show.ranges(model.missing)}"


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    grid = show.table(
        "node", "role", "layers", "ms/layer", "load", "rtt", "Mbit/s", "reached", "tells", "record", "owner"
    )
    for node in sorted(nodes, key=_by_layers):
        grid.add_row(*map(_plain, _node_row(node)))
    return grid


def _plain(text: str) -> Text:
    """Words of strangers, without what a terminal or its markup would obey."""
    from rich.text import Text

    return Text(show.printable(text).replace("\n", " "))


def _by_layers(node: NodeStatus) -> tuple[str, int, bytes]:
    first = min(((offer.model_name, offer.spec.start) for offer in node.offers), default=("", -1))
    return (*first, node.node_id)


def _node_row(node: NodeStatus) -> list[str]:
    return [
        node.node_id.hex()[:8],
        "+".join(node.roles),
        ", ".join(f"{offer.model_name} {offer.spec}" for offer in node.offers),
        ", ".join(f"{offer.layer_ms:.2f}" for offer in node.offers),
        _load(node),
        f"{node.rtt_ms:.1f} ms" if node.rtt_ms is not None else "",
        _lines(node),
        "suspected" if node.is_suspected else node.path,
        ways_in(node.contacts),
        f"{node.age_s:.0f} s old",
        node.owner[:8],
    ]


def _lines(node: NodeStatus) -> str:
    """What lines from its neighbours bring a node, by its own word; the nearest first."""
    told = (f"{it.prefix.hex()[:4]} {it.mbps:.3g}" for it in node.neighbours if it.mbps is not None)
    return ", ".join(told)


def _load(node: NodeStatus) -> str:
    if "node" not in node.roles:
        return ""
    return f"{node.load}/{node.max_sessions}" if node.max_sessions else str(node.load)


def ways_in(contacts: Sequence[NodeAddress]) -> str:
    """How a node says that it can be reached: `direct 192.0.2.7:9000, relayed 2`."""
    direct = [show.host_port(address.host, address.port) for address in contacts if not address.is_relayed]
    num_relayed = len(contacts) - len(direct)
    parts = [f"direct {' '.join(direct)}"] if direct else []
    return ", ".join([*parts, *([f"relayed {num_relayed}"] if num_relayed else [])]) or "none"


def _summary(status: NetworkStatus) -> str:
    faults = ", ".join(f"{count} {name}" for name, count in sorted(status.faults.items()) if count)
    text = f"{len(status.nodes)} nodes known, {status.num_links} linked, {status.num_suspected} suspected"
    return f"{text}; records refused: {faults}" if faults else text
