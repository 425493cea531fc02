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


class AnswerKind(IntEnum):
    """What the payload of an answer holds."""

    HIDDEN_STATES = 1
    CANDIDATES = 2  # rows x num_candidates x (u32 id, f32 logit), best first
    TOKEN_IDS = 3  # rows x u32: drawn where the whole distribution is


@dataclass(frozen=True, slots=True)
class HopTrace:
    """Where one hop spent its time on one step, in microseconds."""

    compute_us: int
    queue_us: int
    crypto_us: int


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of one session through the chain: `rows` rows starting at `position`."""

    session_id: SessionId
    epoch: int
    step: int
    position: int
    rows: int
    payload: Buffer = field(repr=False)  # rows x hidden_size of the hop's wire dtype, or int32 token ids
    want: Want = Want.LAST
    want_rows: tuple[int, ...] = ()  # for Want.LIST, ascending row numbers within this step
    flags: StepFlag = StepFlag.NONE
    deadline_ms: int = 0  # time left for the whole step; 0 = none
    traces: tuple[HopTrace, ...] = ()


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
    answer_key: bytes = field(default=b"", repr=False)  # 32 B, last hop only
    run_opening: bool = False
    run_closing: bool = False
    sampling: Mapping[str, Any] | None = field(
        default=None, repr=False
    )  # closing hop only, see slicing.sampler
    tenant: bytes = b""  # 8 B keyed tag, for fairness


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


Message = Step | Answer | Open | Attach | Cancel | Failure | Describe | Description


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens and who must answer there."""

    node_id: NodeId
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.node_id.hex()}@{host}:{self.port}"


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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What both ends tell inside the encrypted handshake (<= 600 B encoded)."""

    proto: tuple[int, ...] = (1,)
    dtypes: tuple[WireDtype, ...] = (WireDtype.FLOAT32,)
    ops: tuple[str, ...] = ("text",)
    max_message: int = 64 << 20
    seal_key: bytes = b""  # X25519 public key for HopEntry, nodes only
    slices: tuple[tuple[bytes, int, int], ...] = ()  # (first 8 B of the model digest, start, end)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node that is reachable now, and what it serves."""

    address: NodeAddress
    seal_key: bytes
    dtypes: tuple[WireDtype, ...]
    offers: tuple[SliceOffer, ...]
    load: int = 0
    rtt_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Hop:
    """One leg of a route: which node runs which layers, for this answer."""

    address: NodeAddress
    offer: SliceOffer
    spec: SliceSpec
    seal_key: bytes
    dtypes: tuple[WireDtype, ...] = (WireDtype.FLOAT32,)


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in order, covering `spec` without a gap."""

    spec: SliceSpec
    hops: tuple[Hop, ...] = field(default_factory=tuple)
