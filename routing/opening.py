"""The Open of a route: which element types travel between its hops, and what each node learns, sealed to it.

Pure but for the sealing. Knows nothing of links, or of what came before on the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from routing import sealing
from routing.errors import RemoteError
from routing.types import HopEntry, NodeId, Open, Prefix, Route, SessionId, TraceContext, WireDtype

IDLE_TIMEOUT_S = 120
CALL_IDLE_TIMEOUT_S = 1800  # a pass over a video's blocks takes minutes at each of the other hops


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """What a session needs of its route, the same for every hop and every replay."""

    max_positions: int
    wire: WireDtype | None = None  # None: the dtype each slice computes in
    hidden_size: int = 0  # of the model; 0: believe the last hop
    takes_token_ids: bool = False  # thin mode: the first hop embeds
    runs_closing: bool = False  # thin mode: the last hop keeps the head
    sampling: dict[str, Any] | None = field(default=None, repr=False)
    trace: bool = True
    tenant: bytes = b""
    room: int = (
        0  # to set memory aside for on every hop before anything is computed: positions, or KiB a block
    )
    confirms: bool = False  # wait until every hop has opened, where all of them can say so
    calls: bool = False  # its steps are calls of blocks, at most `max_positions` of them; nothing is resumed
    branches: int = 1  # rows of each position, side by side: what guidance compares
    streams: int = 1  # token ids of a row: what is fed and drawn at a time
    axes: int = 0  # rotary positions that go with each row; 0: the session's own
    memory_rows: int = 0  # most rows of memory that will be sent, of all branches
    headless: bool = (
        False  # where a node runs the closing end: final hidden states come back, nothing is drawn
    )

    @property
    def draws(self) -> bool:
        """Whether the last hop chooses tokens."""
        return self.runs_closing and not self.headless

    @property
    def may_share(self) -> bool:
        """Whether a session may go on from what another left, or leave something to others."""
        return self.branches == 1 and not self.memory_rows


@dataclass(frozen=True, slots=True)
class RouteKeys:
    """What names and protects a session's present route."""

    session_id: SessionId
    epoch: int
    gateway_id: NodeId
    route_key: bytes = field(repr=False)
    answer_key: bytes = field(repr=False)
    resumes: bool = False  # nodes of the route before go on with what they hold
    answered: int = 0  # the gateway has the answers of all steps up to this one
    room: int = 0
    confirms: bool = False
    prefixes: tuple[Prefix, ...] = ()  # what the nodes may hold of it
    trace: TraceContext | None = None


def wires_of(route: Route, options: ChainOptions, first: WireDtype | None) -> tuple[WireDtype, ...]:
    """What travels into each hop, and, last, what comes back.

    `first` is what the first hop of an earlier route took: recorded steps go in again, bit for bit, where the new
    one speaks it. Every node speaks float32.
    """
    if not route.hops:
        return (first or WireDtype.FLOAT32,)
    wanted = [options.wire or hop.offer.dtype for hop in route.hops]
    into = [
        dtype if dtype in hop.dtypes else WireDtype.FLOAT32
        for dtype, hop in zip(wanted, route.hops, strict=True)
    ]
    back = into[-1]
    if options.takes_token_ids:
        into[0] = WireDtype.INT32
    elif first is not None:
        into[0] = first if first in route.hops[0].dtypes else WireDtype.FLOAT32
    return (*into, back)


def opening_of(route: Route, wires: tuple[WireDtype, ...], options: ChainOptions, keys: RouteKeys) -> Open:
    """The message that opens a route. Raises SecurityError, with the hop, for a sealing key that is none."""
    entries = tuple(_sealed_entry(route, index, wires, options, keys) for index in range(len(route.hops)))
    return Open(keys.session_id, keys.epoch, 0, entries)


def _sealed_entry(
    route: Route, index: int, wires: tuple[WireDtype, ...], options: ChainOptions, keys: RouteKeys
) -> bytes:
    hops = route.hops
    is_last = index == len(hops) - 1
    after = None if is_last else hops[index + 1]
    runs_closing = options.runs_closing and is_last
    entry = HopEntry(
        route_key=keys.route_key,
        hop=index,
        num_hops=len(hops),
        gateway_id=keys.gateway_id,
        model_digest=hops[index].offer.model_digest,
        start=hops[index].spec.start,
        end=hops[index].spec.end,
        wire_in=wires[index],
        wire_out=wires[index + 1],
        max_positions=options.max_positions,
        idle_timeout_s=CALL_IDLE_TIMEOUT_S if options.calls else IDLE_TIMEOUT_S,
        next_hop=after.address if after else None,
        next_alternatives=after.alternatives[: sealing.MAX_NEXT - 1] if after else (),
        resumes=keys.resumes,
        answered=keys.answered if is_last else 0,
        answer_key=keys.answer_key if is_last else b"",
        run_opening=options.takes_token_ids and index == 0,
        run_closing=runs_closing,
        sampling=options.sampling if runs_closing and options.draws else None,
        tenant=options.tenant,
        room=keys.room if options.calls else min(keys.room, options.max_positions),
        confirms=keys.confirms,
        prefixes=keys.prefixes,
        calls=options.calls,
        branches=options.branches,
        streams=options.streams,
        axes=options.axes,
        memory_rows=options.memory_rows,
        trace=keys.trace,
    )
    aad = sealing.entry_aad(keys.session_id, keys.epoch, index)
    try:
        return sealing.seal_entry(entry, hops[index].seal_key, aad)
    except RemoteError as error:
        error.hop = index
        raise
