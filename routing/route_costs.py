"""What a token costs on its way through a route, in expected milliseconds: the model that the planner minimises.

    half the round trip to the first hop + one way between neighbours + half the round trip of the last hop
    + per line whose bandwidth is known: what one row takes on it
    + per hop: HOP_MS, what steps wait there, its load, penalties
    + per layer: ms of one decode row through it

Knows offers, measurements and claims; nothing of which routes there are.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routing.measurements import Measured
from routing.types import WIDTHS, NodeAddress, NodeId, NodeRecord, SliceOffer, SliceSpec, WireDtype

HOP_MS = 0.5  # one hop's frames, wake-ups and encryption beside its compute (bar of the hop cost: 1 ms)
NEAR_RTT_MS = 1.0  # two nodes of one prefix, where neither tells more
RELAYED_MS = 5.0  # a way through a sentinel beside its distance: quotas, and one more party that may go
LOAD_MS = 0.5  # per live session on a node: spreads sessions over replicas of equal speed
LOAD_SHARE = (
    0.05  # per live session: how much slower its layers get when sessions meet (batches share weights)
)
MAX_LOAD = 1000  # sessions that are believed
FULL_MS = 1e4  # a node without room for another session answers BUSY: only when nothing else is left
CLAIM_FACTOR = 1.2  # on what a node says of its own speed, until it was measured
STRANGER_FACTOR = 1.5  # and on all claims of a node that we have no link with
MAX_SPEED_UP = 16.0  # over the median claim: a faster one is not believed
FORM_PENALTY_MS = 1e7  # a replica of another form is the last resort (it changes bits)
REBUILD_MS = (
    1e4  # per layer that no survivor of a broken route keeps: the most layers kept, then the least ms
)
PREFIX = 8  # bytes of an id by which neighbours are named
MIN_ROW_MS, MAX_ROW_MS = (
    0.01,
    1000.0,
)  # of one row on a line: less is nothing, and nobody's word counts for more

Column = npt.NDArray[np.float64]
Usable = Sequence[tuple[NodeRecord, Sequence[SliceOffer]]]


class Leg(NamedTuple):
    """An offer that may become a hop: layers [start, end) of it, entered and left wherever it suits,
    unless `is_whole`: a survivor's, whose keys and values are for exactly these layers."""

    node: int  # index into RouteCosts.records
    offer: SliceOffer
    start: int
    end: int
    layer_ms: float
    hop_ms: float
    is_whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RouteCosts:
    """One snapshot: its nodes, what each could do, and how far they are from one another.

    `into_ms`, `back_ms` [num_nodes]: gateway to node, node to gateway. `between_ms` [num_nodes, num_nodes]: into the
    row's node from the column's, infinite from a node to itself.
    """

    records: Sequence[NodeRecord]
    legs: Sequence[Leg]  # grouped by node, in order
    into_ms: Column
    back_ms: Column
    between_ms: Column


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What this gateway knows beside the records: measurements, and its own live sessions per node."""

    measured: Mapping[NodeId, Measured]
    sessions: Mapping[NodeId, int]
    forms: frozenset[str] = frozenset()
    held: Mapping[NodeId, SliceSpec] | None = None
    rows_come_back: bool = True  # else the last hop draws: what comes back are a few bytes


def route_costs(usable: Usable, spec: SliceSpec, known: Knowledge) -> RouteCosts:
    """The costs of a snapshot's usable offers, cut to the layers of `spec`."""
    records = [record for record, _ in usable]
    rtts = round_trips(records)
    relayed = np.array([RELAYED_MS * record.address.is_relayed for record in records])
    way = rtts / 2 + relayed
    between = _between(records, rtts) + relayed[:, None]
    bits = _row_bits(usable)
    if (mbps := _slower_of_both(records)) is not None:
        between += _row_ms(bits[:, None], mbps)
    ours = np.array([record.mbps or np.nan for record in records], np.float64)
    back = way + _row_ms(bits, ours) if known.rows_come_back else way
    return RouteCosts(records, legs_of(usable, spec, known), way, back, between)


def legs_of(usable: Usable, spec: SliceSpec, known: Knowledge) -> list[Leg]:
    """What each node could do, by node."""
    layer_ms = _LayerTimes(usable, known.measured)
    legs: list[Leg] = []
    for node, (record, offers) in enumerate(usable):
        load = _load(record, known)
        for offer in offers:
            per_layer = layer_ms.of(record, offer) * (1 + LOAD_SHARE * load)
            per_hop = _hop_ms(record, offer, load, known)
            legs += _legs(node, record.address.node_id, offer, spec, per_layer, per_hop, known.held)
    return legs


def lines_ms(path: Usable) -> float:
    """What one row takes on the lines between a route's nodes, in order, where that is known."""
    mbps = _slower_of_both([record for record, _ in path])
    if mbps is None:
        return 0.0
    return float(_row_ms(_row_bits(path)[1:], np.diagonal(mbps, -1)).sum())


def site(address: NodeAddress) -> str:
    """The /24 or /48 that an address lies in; a relayed node counts to its sentinel's."""
    return _site_of(address.host)


@functools.lru_cache(maxsize=4096)
def _site_of(host: str) -> str:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def _legs(
    node: int,
    node_id: NodeId,
    offer: SliceOffer,
    spec: SliceSpec,
    layer_ms: float,
    hop_ms: float,
    held: Mapping[NodeId, SliceSpec] | None,
) -> list[Leg]:
    start, end = max(offer.spec.start, spec.start), min(offer.spec.end, spec.end)
    if start >= end:
        return []
    if not held:
        return [Leg(node, offer, start, end, layer_ms, hop_ms)]
    legs = [Leg(node, offer, start, end, layer_ms + REBUILD_MS, hop_ms)]
    kept = held.get(node_id)
    if kept is not None and start <= kept.start < kept.end <= end:
        legs.append(Leg(node, offer, kept.start, kept.end, layer_ms, hop_ms, is_whole=True))
    return legs


def _load(record: NodeRecord, known: Knowledge) -> int:
    """Sessions on a node: what it says, which may be some seconds old, or what we know of our own."""
    own = known.sessions.get(record.address.node_id, 0)
    return min(max(record.load, own, 0), MAX_LOAD)


def _hop_ms(record: NodeRecord, offer: SliceOffer, load: int, known: Knowledge) -> float:
    cost = HOP_MS + LOAD_MS * load
    if measured := known.measured.get(record.address.node_id):
        cost += measured.queue_ms
    if 0 < record.max_sessions <= load:
        cost += FULL_MS
    if known.forms and offer.form not in known.forms:
        cost += FORM_PENALTY_MS
    return cost


class _LayerTimes:
    """ms per layer: measured where we did; claims cost more than they say, and absurd ones are cut."""

    def __init__(self, usable: Usable, measured: Mapping[NodeId, Measured]) -> None:
        self._measured = measured
        claims = [_claim(offers) for _, offers in usable]
        claims = [claim for claim in claims if claim > 0]
        self._median = statistics.median(claims) if claims else 0.0
        ours = [self._measured_ms(record) for record, _ in usable]
        best = min((ms for ms in ours if ms is not None), default=0.0)
        self._least = max(best, self._median / MAX_SPEED_UP)

    def of(self, record: NodeRecord, offer: SliceOffer) -> float:
        measured = self._measured_ms(record)
        if measured is not None:
            return measured
        claim = (offer.layer_ms or self._median) * (CLAIM_FACTOR if record.is_verified else STRANGER_FACTOR)
        return max(claim, self._least)

    def _measured_ms(self, record: NodeRecord) -> float | None:
        measured = self._measured.get(record.address.node_id)
        return None if measured is None else measured.layer_ms


def _claim(offers: Sequence[SliceOffer]) -> float:
    """The best a node says of itself; 0 where it says nothing."""
    return min((offer.layer_ms for offer in offers if offer.layer_ms > 0), default=0.0)


def round_trips(records: Sequence[NodeRecord]) -> Column:
    """Ours to each node. One without a link of ours counts as half as far again as the middle of the others."""
    told = [record.rtt_ms if _is_time(record.rtt_ms) else None for record in records]
    known = [rtt_ms for rtt_ms in told if rtt_ms is not None]
    unknown = STRANGER_FACTOR * statistics.median(known) if known else NEAR_RTT_MS
    return np.array([unknown if rtt_ms is None else rtt_ms for rtt_ms in told], np.float64)


def _between(records: Sequence[NodeRecord], rtts: Column) -> Column:
    """One way into the row's node from the column's.

    Half the round trip that either tells (the longer, where both do), but never less than the difference of our
    own round trips: a shorter one would give us a shorter way, too. Where nobody tells: near within one
    prefix; else halfway between the least and the most that our own round trips allow.
    """
    longer = np.maximum(rtts[:, None], rtts[None, :])
    least = np.abs(rtts[:, None] - rtts[None, :])
    numbers: dict[str, int] = {}
    sites = np.array(
        [  # behind a sentinel nobody knows where a node is: it is near to none
            -1 - index
            if record.address.is_relayed
            else numbers.setdefault(site(record.address), len(numbers))
            for index, record in enumerate(records)
        ]
    )
    is_near = sites[:, None] == sites[None, :]
    rtt_ms = np.where(is_near, np.minimum(longer, NEAR_RTT_MS), longer)
    told = _told(records)
    rtt_ms = np.where(np.isnan(told), rtt_ms, told)
    between = np.maximum(rtt_ms, least) / 2
    np.fill_diagonal(between, np.inf)
    return between


def _told(records: Sequence[NodeRecord]) -> Column:
    """The round trips that nodes tell of one another, NaN where none does."""
    longest = _pairs(records, [record.neighbour_ms for record in records], max)
    return np.full((len(records), len(records)), np.nan) if longest is None else longest


def _slower_of_both(records: Sequence[NodeRecord]) -> Column | None:
    """Mbit/s of lines as both ends tell it, NaN where none does; None: nobody tells anything.

    The lower where both do: who praises a line alone gains no more than by silence, who runs one down loses it.
    """
    return _pairs(records, [record.neighbour_mbps for record in records], min)


def _pairs(
    records: Sequence[NodeRecord],
    told: Sequence[Mapping[bytes, float]],
    of_both: Callable[[float, float], float],
) -> Column | None:
    """What nodes tell of pairs of them, [num_nodes, num_nodes], NaN where none does; None: nobody tells anything."""
    if not any(told):
        return None
    index = {record.address.node_id[:PREFIX]: number for number, record in enumerate(records)}
    found: dict[tuple[int, int], float] = {}
    for here, of_others in enumerate(told):
        for prefix, value in of_others.items():
            there = index.get(prefix)
            if there is not None and _is_time(value):
                pair = (min(here, there), max(here, there))
                found[pair] = of_both(found.get(pair, value), value)
    table = np.full((len(records), len(records)), np.nan)
    if found:
        first, second = np.array(list(found)).T
        table[first, second] = table[second, first] = list(found.values())
    return table


def _row_bits(usable: Usable) -> Column:
    """What one row into each node has, in bits."""
    return np.array([_bits(record, offers[0]) for record, offers in usable], np.float64)


def _bits(record: NodeRecord, offer: SliceOffer) -> int:
    """What one row of hidden states has on its way to a node (see `opening.wires_of`)."""
    wire = offer.dtype if offer.dtype in record.dtypes else WireDtype.FLOAT32
    return 8 * offer.hidden_size * WIDTHS[wire]


def _row_ms(bits: Column, mbps: Column) -> Column:
    """What a row takes on a line; nothing where it is not known."""
    with np.errstate(divide="ignore"):
        row_ms = np.minimum(bits / (1000 * np.maximum(mbps, 0.0)), MAX_ROW_MS)
    return np.where(row_ms >= MIN_ROW_MS, row_ms, 0.0)  # NaN is not


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value >= 0
