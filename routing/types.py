"""The messages that gateway and nodes exchange, as small frozen values.

Knows nothing of bytes (`wire.py` encodes), sockets, or torch: hidden states are buffers here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NewType

Buffer = bytes | bytearray | memoryview
NodeId = NewType("NodeId", bytes)  # 32 B, see identity.node_id
SessionId = NewType("SessionId", bytes)  # 16 random bytes
MAX_BRANCHES = 8
MAX_STREAMS = 16
MAX_AXES = 4
MAX_MEMORY_ROWS = 1 << 16


class WireDtype(IntEnum):
    """Element types that travel; the width in bytes is `WIDTHS[dtype]`."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT32 = 4  # token ids


WIDTHS: Mapping[WireDtype, int] = {
    WireDtype.FLOAT32: 4,
    WireDtype.BFLOAT16: 2,
    WireDtype.FLOAT16: 2,
    WireDtype.INT32: 4,
}


class Want(IntEnum):
    """Which rows of a step the gateway wants back from the last hop."""

    NONE = 0
    LAST = 1
    ALL = 2
    LIST = 3  # an empty list asks for an acknowledgement: an answer without rows


class StepFlag(IntFlag):
    """Bits of a step or answer header."""

    NONE = 0
    TRACE = 1  # a trailer per hop follows the payload
    TOKEN_IDS = 2  # the payload is int32 token ids, not hidden states (thin mode)
    SEALED = 4  # the answer payload is sealed for the gateway (it comes back down the chain)
    REPLAY = 8  # a step of before a re-route once more: numbers that a roll-back undid are left out
    CALL = 16  # the payload is (a part of) a call of blocks; `rows` counts the parts still to come, this one included
    MEMORY = 32  # rows of encoder states that belong to the session: no positions, before its first token, never undone


_MEMORY = int(StepFlag.MEMORY)  # a plain number: to ask an IntFlag is slow, and each step is asked often

NO_TOKEN = 0xFFFF_FFFF  # where an id is due and none is meant: no vocabulary is so large


class AnswerKind(IntEnum):
    """What the payload of an answer holds."""

    HIDDEN_STATES = 1
    CANDIDATES = 2  # rows x streams x num_candidates x (u32 id, f32 logit), best first
    TOKEN_IDS = 3  # rows x streams x u32 (u16 where that does): drawn where the whole distribution is
    CALL = (
        4  # (a part of) what a call of blocks made; `rows` counts the parts still to come, this one included
    )


@dataclass(frozen=True, slots=True)
class HopTrace:
    """Where one hop spent its time on one step, in microseconds."""

    compute_us: int
    queue_us: int
    crypto_us: int


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of one session through the chain: `rows` rows starting at `position`.

    A session of several branches has one row of each for every position, side by side; what is wanted is counted in
    positions then. Where positions have axes, those of all rows follow the rows in the payload (see `frames`).
    """

    session_id: SessionId
    epoch: int
    step: int
    position: int
    rows: int
    payload: Buffer = field(repr=False)  # rows x hidden_size of the hop's wire dtype, or int32 token ids
    want: Want = Want.LAST
    want_rows: tuple[int, ...] = ()  # for Want.LIST, ascending numbers of positions within this step
    flags: StepFlag = StepFlag.NONE
    deadline_ms: int = 0  # time left for the whole step; 0 = none
    traces: tuple[HopTrace, ...] = ()

    @property
    def is_memory(self) -> bool:
        """Whether its rows are encoder states, which take no positions."""
        return bool(int(self.flags) & _MEMORY)

    def end(self, branches: int) -> int:
        """The position after its last row, where each position has a row of so many branches."""
        return self.position if int(self.flags) & _MEMORY else self.position + self.rows // branches


@dataclass(frozen=True, slots=True)
class Answer:
    """What the last hop returns for one step: `rows` rows, the first of them at `position`."""

    session_id: SessionId
    epoch: int
    step: int
    position: int
    rows: int
    payload: Buffer = field(repr=False)
    kind: AnswerKind = AnswerKind.HIDDEN_STATES
    flags: StepFlag = StepFlag.NONE
    traces: tuple[HopTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class Open:
    """Open (or, with a higher epoch, re-route) a session along a chain.

    `entries[i]` is the HopEntry of hop i, sealed to that node; `hop` says whose turn it is.
    """

    session_id: SessionId
    epoch: int
    hop: int
    entries: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` positions of a session, by the end of the hash chain over them (see `prefix`)."""

    length: int
    hash: bytes  # 16 B


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of a gateway that a session belongs to, as W3C's traceparent names it. Ids only."""

    trace_id: bytes  # 16 B
    span_id: bytes  # 8 B


@dataclass(frozen=True, slots=True)
class HopEntry:
    """What one node learns of a route: its own work and its neighbours, nothing else."""

    route_key: bytes = field(repr=False)  # 32 B, shared by the route; proves the right to cancel or to attach
    hop: int
    num_hops: int
    gateway_id: NodeId  # the identity behind the link that the answer goes to
    model_digest: bytes  # 32 B
    start: int
    end: int
    wire_in: WireDtype  # INT32 when this hop embeds token ids itself
    wire_out: WireDtype
    max_positions: int
    idle_timeout_s: int
    next_hop: NodeAddress | None = None  # None on the last hop
    next_alternatives: tuple[NodeAddress, ...] = ()  # other ways to the same next node, tried in order
    resumes: bool = False  # after a re-route: keep what is held, and tell the hop before from where to repeat
    answered: int = 0  # last hop: the gateway has the answers of all steps up to this one
    answer_key: bytes = field(default=b"", repr=False)  # 32 B, last hop only
    run_opening: bool = False
    run_closing: bool = False
    sampling: Mapping[str, Any] | None = field(
        default=None, repr=False
    )  # closing hop only, see slicing.sampler
    tenant: bytes = b""  # 8 B keyed tag, for fairness
    room: int = (
        0  # to set memory aside for at the Open: positions, or KiB a block for calls; 0: as steps come
    )
    confirms: bool = False  # say `Opened` to the hop before, once this hop and those after it have opened
    prefixes: tuple[Prefix, ...] = ()  # what this hop may hold of the session already, the longest first
    calls: bool = False  # its steps are calls of blocks, a position is the number of a call
    branches: int = 1  # rows of each position, side by side
    streams: int = 1  # token ids of a row, and of an answer's row
    axes: int = 0  # rotary positions that come with each row; 0: they follow from the step's position
    memory_rows: int = 0  # most rows of memory that will come, of all branches: room is set aside for them
    trace: TraceContext | None = None  # the gateway traces this session, and would have the node trace it too


@dataclass(frozen=True, slots=True)
class Opened:
    """A node tells whoever is before it that a session is open from here on down the chain.

    `held` positions of it need no step: every node from here on holds them from an earlier session.
    """

    session_id: SessionId
    epoch: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Keep:
    """End a session as a Cancel does, but keep its keys and values for later ones that begin in the same way.

    `hashes` are those of its full blocks, from the first on. Valid on any link, because of `proof`.
    """

    session_id: SessionId
    epoch: int
    proof: bytes = field(repr=False)
    hashes: tuple[bytes, ...] = field(repr=False)  # 16 B each


@dataclass(frozen=True, slots=True)
class Attach:
    """Bind a session to the link this arrives on; `proof` shows knowledge of the route key."""

    session_id: SessionId
    epoch: int
    proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Free a session, on every node down the chain. Valid on any link, because of `proof`."""

    session_id: SessionId
    epoch: int
    proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """A step or session failed; goes to the gateway directly, or up the chain."""

    session_id: SessionId
    epoch: int
    step: int
    code: int
    hop: int
    retry_ms: int = 0
    text: str = ""
    room: int = 0  # NO_ROOM: what a session can have there at most, in the unit of `HopEntry.room`


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask a node for its `Description`."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a node serves now. `load` counts live sessions."""

    slices: tuple[SliceOffer, ...]
    load: int = 0
    max_sessions: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """A node tells whoever is before it, after a re-route, from which step on it needs the session's steps.

    Steps below `next_step` are in its keys and values (or further down), see docs/protocol.md.
    """

    session_id: SessionId
    epoch: int
    next_step: int


@dataclass(frozen=True, slots=True)
class Inquire:
    """Ask a hop how far a session is there: for a step that takes longer than its nodes' speed explains."""

    session_id: SessionId
    epoch: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a session is at one hop: the last step computed, and the next one expected to arrive.

    `busy_ms` is for how long its compute thread has been at what it does now, whoever's step that is.
    """

    session_id: SessionId
    epoch: int
    hop: int
    last_done: int
    next_step: int
    busy_ms: int = 0  # 0: it does nothing
    busy_rows: int = 0  # 0: not a step; it loads or measures


@dataclass(frozen=True, slots=True)
class Digest:
    """What one peer knows: (first 8 B of a node id, sequence) of each record. `is_reply` ends the exchange.

    It speaks of the ids from `first` to `last` (8 B each, both included), so that a large table is compared a
    part at a time. `doubts` are prefixes of nodes that the sender itself found dead: a reason to look, no more.
    """

    entries: tuple[tuple[bytes, int], ...]
    is_reply: bool = False
    first: bytes = b"\x00" * 8
    last: bytes = b"\xff" * 8
    doubts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for the records of these id prefixes (8 B each)."""

    prefixes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Records:
    """Signed announcements, each as its author signed it."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Ask a peer to see whether a third node lives (SWIM's indirect ping)."""

    nonce: int
    target: NodeId


@dataclass(frozen=True, slots=True)
class PingReport:
    """What came of a `PingRequest`."""

    nonce: int
    is_alive: bool


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Ask a peer for a `Burst` of so many bytes, to see how fast they come."""

    size: int


@dataclass(frozen=True, slots=True)
class Burst:
    """Bytes that mean nothing: how long they take tells what the line brings. Everything else goes first."""

    content: Buffer = field(repr=False)


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a sentinel to dial back to the address it sees us at, at this port (transport.md 5.6)."""

    nonce: bytes  # 16 B
    port: int  # 0: only tell the observed address


@dataclass(frozen=True, slots=True)
class Probed:
    """What a sentinel saw: our address as it sees it, and whether a dial back proved our identity there.

    `code` is 0 when it did, an `ErrorCode` number otherwise.
    """

    nonce: bytes
    host: str
    port: int
    code: int
    now_ms: int = 0  # the sentinel's clock, unix ms: shows skew


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask a sentinel to pass on circuits to us, for so long."""

    ttl_s: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation: valid while this link lives, until `expires_ms` (unix). `voucher` proves it to others.

    `code` is 0, or says why there is none (RELAY_FULL, NOT_ALLOWED).
    """

    code: int
    expires_ms: int = 0
    max_bytes: int = 0  # of one circuit
    max_s: int = 0  # of one circuit
    voucher: bytes = b""  # Ed25519 signature of the sentinel, see `announcement.Voucher`


@dataclass(frozen=True, slots=True)
class RelayOpen:
    """Dialler to sentinel: join `channel` of this link to a circuit to `target`; `first` opens the session inside."""

    channel: int
    target: NodeId
    first: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Incoming:
    """Sentinel to node: `channel` of this link is a circuit from `source`; `first` opens the session inside."""

    channel: int
    source: NodeId
    first: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """Sentinel to dialler: there is no circuit on `channel`, or none any more."""

    channel: int
    code: int
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class GoAway:
    """The sender will end this link (or wants no new work on it). Others that serve the same are named."""

    code: int
    retry_ms: int = 0
    alternatives: tuple[NodeAddress, ...] = ()


Message = (
    Step
    | Answer
    | Open
    | Attach
    | Cancel
    | Keep
    | Opened
    | Failure
    | Describe
    | Description
    | Resumed
    | Inquire
    | Standing
    | Digest
    | Pull
    | Records
    | PingRequest
    | PingReport
    | BurstRequest
    | Burst
    | Probe
    | Probed
    | Reserve
    | Reserved
    | RelayOpen
    | Incoming
    | Refused
    | GoAway
)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is reached and who must answer there.

    With `relay_id`, host and port are that sentinel's, and the node is reached through it.
    """

    node_id: NodeId
    host: str
    port: int
    relay_id: NodeId | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        through = f"/{self.relay_id.hex()}" if self.relay_id is not None else ""
        return f"{self.node_id.hex()}{through}@{host}:{self.port}"

    @property
    def is_relayed(self) -> bool:
        """Whether a sentinel stands between."""
        return self.relay_id is not None

    @property
    def relay(self) -> NodeAddress:
        """The sentinel's own address."""
        assert self.relay_id is not None
        return NodeAddress(self.relay_id, self.host, self.port)


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Layers [start, end) of a model, in its own global numbers."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"


@dataclass(frozen=True, slots=True)
class SliceOffer:
    """One slice that a node serves, and the form it computes in."""

    model_name: str
    model_digest: bytes  # 32 B
    num_layers: int
    hidden_size: int
    spec: SliceSpec
    dtype: WireDtype  # the compute dtype
    form: str  # runner, weight form and kernel class, e.g. "plain/fp32/cpu-avx512"
    has_opening: bool = False
    has_closing: bool = False
    layer_ms: float = 0.0  # measured at start: one decode row through one layer
    layer_hashes: tuple[bytes, ...] = ()  # 8 B per layer of the slice: replicas must agree
    confirms: bool = False  # says `Opened` where it is asked to
    keeps: bool = False  # takes `Keep`: what it computes does not depend on how rows were split


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What both ends tell inside the encrypted handshake (<= 600 B encoded)."""

    proto: tuple[int, ...] = (1,)
    dtypes: tuple[WireDtype, ...] = (WireDtype.FLOAT32,)
    ops: tuple[str, ...] = ("text",)
    max_message: int = 64 << 20
    seal_key: bytes = b""  # X25519 public key for HopEntry, nodes only
    slices: tuple[tuple[bytes, int, int], ...] = ()  # (first 8 B of the model digest, start, end)
    token: bytes = field(default=b"", repr=False)  # a guest's permission, see `guest_token`
    moved: bytes = b""  # a signed statement that this identity was another before, see `moved`


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node that is reachable now, and what it serves."""

    address: NodeAddress
    seal_key: bytes
    dtypes: tuple[WireDtype, ...]
    offers: tuple[SliceOffer, ...]
    load: int = 0
    rtt_ms: float | None = None  # from here; None: no link of ours
    owner: str = (
        ""  # a proven label (hex of the owner's key); "": unknown, then the address' /24 (/48) counts
    )
    max_sessions: int = 0  # 0: not known
    neighbour_ms: Mapping[bytes, float] = field(default_factory=dict)  # RTTs it tells, by 8 B id prefix
    neighbour_mbps: Mapping[bytes, float] = field(
        default_factory=dict
    )  # what lines from them bring it, Mbit/s, alike
    mbps: float | None = None  # what our own line from it brings; None: not known
    alternatives: tuple[NodeAddress, ...] = ()  # other ways to it, the better first
    is_verified: bool = True  # it described itself on a link of ours; else these are a stranger's claims


@dataclass(frozen=True, slots=True)
class Hop:
    """One leg of a route: which node runs which layers, for this answer."""

    address: NodeAddress
    offer: SliceOffer
    spec: SliceSpec
    seal_key: bytes
    dtypes: tuple[WireDtype, ...] = (WireDtype.FLOAT32,)
    alternatives: tuple[NodeAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in order, covering `spec` without a gap."""

    spec: SliceSpec
    hops: tuple[Hop, ...] = field(default_factory=tuple)

    @property
    def path(self) -> tuple[NodeId, ...]:
        """Its nodes, in order."""
        return tuple([hop.address.node_id for hop in self.hops])
