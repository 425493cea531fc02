"""What a process sees of its swarm at one moment, for people, tests and metrics.

Values only, with a JSON form; nothing here asks anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from routing.announcement import Announcement, Contact
from routing.link import Link
from routing.reach import Verdict
from routing.types import NodeAddress, NodeId, SliceOffer

if TYPE_CHECKING:
    from routing.network import Network

BLOCKS_FORM = "stock/"  # how the form of a diffusion model's blocks begins
LinkPath = Literal["direct", "relayed", "none"]


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """What one prober said last. `code` 0: it dialled us back at host:port."""

    prober: NodeId
    host: str
    port: int
    code: int
    age_s: float


@dataclass(frozen=True, slots=True)
class NeighbourStatus:
    """A member that another one has a direct link to; `mbps` is what the line from it brings, where that is known."""

    prefix: bytes  # of its id
    rtt_ms: float
    mbps: float | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One announced member. `path` is that of our own live link to it."""

    node_id: NodeId
    roles: tuple[str, ...]
    contacts: tuple[NodeAddress, ...]
    offers: tuple[SliceOffer, ...]
    load: int
    max_sessions: int
    rtt_ms: float | None
    path: LinkPath
    is_suspected: bool
    owner: str
    age_s: float  # of its record
    mbps: float | None = None  # what our line from it brings, where traffic has told
    neighbours: tuple[NeighbourStatus, ...] = ()  # as it tells


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One announced model: how many live members hold each layer."""

    name: str
    digest: bytes
    num_layers: int
    holders: tuple[int, ...]
    has_opening: bool
    has_closing: bool
    is_diffusion: bool = (
        False  # its layers are blocks of a diffusion model, and none of them stays at a gateway
    )

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of layers that nobody holds."""
        ranges: list[tuple[int, int]] = []
        for layer, count in enumerate(self.holders):
            if count:
                continue
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return tuple(ranges)

    @property
    def is_whole(self) -> bool:
        """Whether somebody holds every layer."""
        return all(self.holders)


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """One process' view of its swarm."""

    node_id: NodeId
    bound: tuple[str, int] | None
    observed: tuple[str, ...]  # our host, as probers see it
    reachability: Verdict
    contacts: tuple[NodeAddress, ...]  # announced now
    probes: tuple[ProbeStatus, ...]
    reservations: tuple[Contact, ...]
    clock_skew_ms: float | None  # ours less theirs, median of the probers
    nodes: tuple[NodeStatus, ...]
    models: tuple[ModelStatus, ...]
    num_links: int
    num_suspected: int
    table_size: int
    faults: dict[str, int] = field(default_factory=dict)  # of gossip, by reason
    rival: bool = False  # somebody else announces with our key
    bootstrap_errors: dict[NodeAddress, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The same in what JSON knows: ids and digests in hex, addresses as people write them."""
        return {
            "node_id": self.node_id.hex(),
            "bound": _place(self.bound),
            "observed": list(self.observed),
            "reachability": str(self.reachability),
            "contacts": [str(address) for address in self.contacts],
            "probes": [
                {
                    "prober": it.prober.hex(),
                    "host": it.host,
                    "port": it.port,
                    "code": it.code,
                    "age_s": it.age_s,
                }
                for it in self.probes
            ],
            "reservations": [_reservation(contact) for contact in self.reservations],
            "clock_skew_ms": self.clock_skew_ms,
            "nodes": [_node(node) for node in self.nodes],
            "models": [_model(model) for model in self.models],
            "num_links": self.num_links,
            "num_suspected": self.num_suspected,
            "table_size": self.table_size,
            "faults": dict(self.faults),
            "rival": self.rival,
            "bootstrap_errors": {str(address): text for address, text in self.bootstrap_errors.items()},
        }


def status_of(network: Network, *, now_ms: float) -> NetworkStatus:
    """Sum up what a started network sees. `now_ms` is unix time by its own clock."""
    now = time.monotonic()
    suspected = network.suspicion.suspected
    findings, reservations = network.reachability.findings, network.reservations
    nodes = (
        node_status(
            told, network.endpoint.links_to(node_id), is_suspected=node_id in suspected, now_ms=now_ms
        )
        for node_id, told in network.neighbourhood.announcements.items()
    )
    return NetworkStatus(
        node_id=network.node_id,
        bound=network.bound,
        observed=tuple(dict.fromkeys(network.reach_check.observed.values())),
        reachability=network.reachability.verdict,
        contacts=network.contacts,
        probes=tuple(ProbeStatus(it.prober, it.host, it.port, it.code, now - it.at) for it in findings),
        reservations=tuple(reservations.contacts) if reservations is not None else (),
        clock_skew_ms=network.reachability.clock_skew_ms,
        nodes=tuple(nodes),
        models=models_of(network.directory.announced()),
        num_links=len(network.endpoint.links),
        num_suspected=len(suspected),
        table_size=network.gossip.num_records,
        faults=dict(network.gossip.faults),
        rival=network.has_rival,
        bootstrap_errors=dict(network.neighbourhood.bootstrap_errors),
    )


def node_status(
    told: Announcement, links: Sequence[Link], *, is_suspected: bool, now_ms: float
) -> NodeStatus:
    """Sum up a member, and our links to it (the best first)."""
    path: LinkPath = "none" if not links else "relayed" if links[0].is_relayed else "direct"
    return NodeStatus(
        node_id=told.node_id,
        roles=told.roles,
        contacts=tuple(contact.address for contact in told.contacts),
        offers=told.offers,
        load=told.load,
        max_sessions=told.max_sessions,
        rtt_ms=links[0].rtt_ms if links else None,
        path=path,
        is_suspected=is_suspected,
        owner=told.owner.label if told.owner is not None else "",
        age_s=max(0.0, (now_ms - told.issued_ms) / 1000),
        mbps=links[0].mbps if links else None,
        neighbours=_neighbours(told),
    )


def _neighbours(told: Announcement) -> tuple[NeighbourStatus, ...]:
    mbps = dict(told.neighbour_mbps)
    return tuple(NeighbourStatus(prefix, ms, mbps.get(prefix)) for prefix, ms in told.neighbour_ms)


def models_of(announcements: Iterable[Announcement]) -> tuple[ModelStatus, ...]:
    """Sum up what these members announce, model by model, sorted by name."""
    offers: dict[tuple[bytes, int], list[SliceOffer]] = {}
    for told in announcements:
        for offer in told.offers:
            offers.setdefault((offer.model_digest, offer.num_layers), []).append(offer)
    found = []
    for (digest, num_layers), held in offers.items():
        holders = [0] * num_layers
        for offer in held:
            for layer in range(offer.spec.start, min(offer.spec.end, num_layers)):
                holders[layer] += 1
        found.append(
            ModelStatus(
                held[0].model_name,
                digest,
                num_layers,
                tuple(holders),
                has_opening=any(offer.has_opening for offer in held),
                has_closing=any(offer.has_closing for offer in held),
                is_diffusion=all(offer.form.startswith(BLOCKS_FORM) for offer in held),
            )
        )
    return tuple(sorted(found, key=lambda it: (it.name, it.digest)))


def _place(bound: tuple[str, int] | None) -> str | None:
    if bound is None:
        return None
    host, port = bound
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reservation(contact: Contact) -> dict[str, Any]:
    expires_ms = None if contact.voucher is None else contact.voucher.expires_ms
    return {"address": str(contact.address), "expires_ms": expires_ms}


def _node(node: NodeStatus) -> dict[str, Any]:
    return {
        "node_id": node.node_id.hex(),
        "roles": list(node.roles),
        "contacts": [str(address) for address in node.contacts],
        "slices": [
            {
                "model": offer.model_name,
                "digest": offer.model_digest.hex(),
                "layers": [offer.spec.start, offer.spec.end],
                "num_layers": offer.num_layers,
                "dtype": offer.dtype.name.lower(),
                "layer_ms": offer.layer_ms,
            }
            for offer in node.offers
        ],
        "load": node.load,
        "max_sessions": node.max_sessions,
        "rtt_ms": node.rtt_ms,
        "mbps": node.mbps,
        "neighbours": [
            {"node_id": it.prefix.hex(), "rtt_ms": it.rtt_ms, "mbps": it.mbps} for it in node.neighbours
        ],
        "path": node.path,
        "is_suspected": node.is_suspected,
        "owner": node.owner,
        "age_s": node.age_s,
    }


def _model(model: ModelStatus) -> dict[str, Any]:
    return {
        "name": model.name,
        "digest": model.digest.hex(),
        "num_layers": model.num_layers,
        "holders": list(model.holders),
        "missing": [list(part) for part in model.missing],
        "has_opening": model.has_opening,
        "has_closing": model.has_closing,
        "is_diffusion": model.is_diffusion,
    }
