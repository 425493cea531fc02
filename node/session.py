"""One chain's place on this node: which step comes next, the keys and values, the neighbours, what was sent on.

The rules of admission are here, without I/O: a step runs, repeats a kept output, is dropped, or is refused with a
typed error. Knows nothing of torch, threads or how messages travel.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from node.memory_steps import MemorySteps
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.frames import axes_bytes, memory_wire
from routing.maps import malformed
from routing.parts import Assembly
from routing.types import (
    WIDTHS,
    Buffer,
    HopEntry,
    NodeId,
    SessionId,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

if TYPE_CHECKING:
    from node.call_job import CallJob, CallState
    from node.held_slice import HeldSlice
    from node.history import History, Output
    from node.prefix_store import ForkedState
    from node.step_job import StepJob
    from node.tracing import SessionSpans
    from routing.link import Link


_CALL, _TOKEN_IDS = int(StepFlag.CALL), int(StepFlag.TOKEN_IDS)  # plain numbers: to ask an IntFlag is slow


class Admission(Enum):
    """What to do with a step that breaks no rule."""

    RUN = auto()
    REPEAT = auto()  # its output is held: send that again
    DROP = auto()  # of an older route, or already on its way


class Attempt:
    """The steps that may still be computed in sequence; over once one failed or was undone, or the session ended.

    `is_over` is the only thing that loop and compute thread share about it; it is looked at between layers.
    """

    __slots__ = ("is_over", "is_undone")

    def __init__(self) -> None:
        self.is_over = False
        self.is_undone = False  # nobody waits for its steps any more, not even for their failures


@dataclass(slots=True)
class Pending:
    """Accepted steps whose output has not left yet."""

    steps: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """One more step, with a payload of this size."""
        self.steps += 1
        self.size_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        """One step's output left, or never will."""
        self.steps -= 1
        self.size_bytes -= size_bytes


@dataclass(slots=True)
class Done:
    """What was computed of a session here, whether somebody still waited for it or not."""

    steps: int = 0
    rows: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Session:
    """A session on this node. Owned by the event loop; only `state` is the compute thread's."""

    session_id: SessionId
    epoch: int
    entry: HopEntry = field(repr=False)
    held: HeldSlice = field(repr=False)  # which computes it
    state: ForkedState | CallState = field(repr=False)
    history: History = field(repr=False)
    peer_id: NodeId  # who opened it, for the cap per peer
    bound: list[Link] = field(repr=False)  # links that steps may come from, the newest last
    last_seen: float
    opened_at: float = 0.0
    first_position: int = 0  # positions before it were held here when the session opened
    next_link: Link | None = field(default=None, repr=False)
    is_next_lost: bool = False
    held_onward: int | None = (
        None  # positions that the next hop holds without a step; None: it did not say yet
    )
    onward_from: int | None = None  # the next hop takes steps from this number on; None: it did not say yet
    is_fresh: bool = True  # since the present route was opened: what the next hop lacks is all in `waiting`
    waiting: list[StepJob | CallJob] = field(
        default_factory=list, repr=False
    )  # computed before the next hop took steps
    attempt: Attempt = field(default_factory=Attempt, repr=False)
    next_step: int = 1
    last_done: int = 0  # the last step whose output is known
    position: int = 0  # where the accepted steps end
    memory: MemorySteps = field(default_factory=MemorySteps, repr=False)
    is_freed: bool = False
    num_in_flight: int = 0  # jobs submitted and not finished
    pending: Pending = field(default_factory=Pending, repr=False)
    parts: Assembly | None = field(default=None, repr=False)  # of the call that arrives now
    parts_of: int = 0  # its number
    returned_on: Link | None = field(default=None, repr=False)  # the gateway's own link, at the last answer
    orphan_since: float | None = None
    done: Done = field(default_factory=Done, repr=False)
    trace: SessionSpans | None = field(default=None, repr=False)  # None: nobody traces it
    _watching: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return self.session_id[:4].hex()

    @property
    def log_fields(self) -> dict[str, object]:
        """What a line about it is about."""
        entry = self.entry
        return {
            "session": self.name,
            "hop": entry.hop,
            "layers": f"{entry.start}:{entry.end}",
            "peer": self.peer_id.hex()[:8],
        }

    @property
    def upstream(self) -> Link | None:
        """The newest live link that this session is bound to."""
        return next((link for link in reversed(self.bound) if not link.is_closed), None)

    def admit(self, step: Step, *, hidden_size: int, max_rows: int) -> Admission:
        """Judge a step of this epoch without changing anything. Raises WorkError or ProtocolError."""
        if step.epoch < self.epoch:
            return Admission.DROP
        if step.epoch > self.epoch:
            raise WorkError(ErrorCode.STEP, f"epoch {step.epoch} before its route was opened")
        is_later = step.step > self.next_step and StepFlag.REPLAY in step.flags
        if step.step == self.next_step or is_later:
            self._check_step(step, hidden_size, max_rows)
            return Admission.RUN
        if step.rows > 1 and self.entry.calls and self.history.holds(replace(step, rows=1)):
            return Admission.DROP  # it is repeated with its last part
        if self.history.holds(step):
            return Admission.REPEAT
        if self.last_done < step.step < self.next_step:
            return Admission.DROP  # a repeat that came before the first copy was computed
        raise WorkError(ErrorCode.STEP, f"step {step.step} where {self.next_step} is next")

    def add_part(self, step: Step) -> list[Buffer] | None:
        """Take a part of the call that comes next; returns all of it with the last one. Raises ProtocolError."""
        if self.parts is None:
            self.parts, self.parts_of = Assembly(), step.step
        if self.parts_of != step.step:
            raise malformed("a call begins before the one before it has ended")
        payloads = self.parts.add(step)
        if payloads is not None:
            self.parts = None
        return payloads

    @property
    def arrived_bytes(self) -> int:
        """What is held of calls that came, whole or in part."""
        return self.pending.size_bytes + (self.parts.size_bytes if self.parts else 0)

    def accept(self, step: Step) -> None:
        """Count an admitted step as coming."""
        self.next_step = step.step + 1
        self.position = step.end(self.entry.branches)
        self.memory.accept(step)
        self.num_in_flight += 1

    def note_done(self, step: Step, output: Output, wire: WireDtype) -> None:
        """A step was computed: keep its output, whose rows are of this element type."""
        self.last_done = step.step
        self.history.add(step, output, wire)

    def roll_back(self, step: Step) -> None:
        """A step failed before it changed anything: it may come again, and those behind it too."""
        self.attempt.is_over = True
        self.attempt = Attempt()
        self.next_step = step.step
        self.position = step.position
        self.memory.undo_from(step.step)

    def undo_from(self, number: int) -> None:
        """Forget the steps from this number on: they will come again. What runs of them is for nobody."""
        self.attempt.is_over = self.attempt.is_undone = True
        self.attempt = Attempt()
        self.position = self.history.roll_back(number)
        self.memory.undo_from(number)
        self.next_step = number
        self.last_done = self.history.last_number

    def begin_at(self, position: int) -> None:
        """The first positions are held here from an earlier session: no step is needed for them."""
        self.position = self.first_position = self.history.skipped = position

    def take_next(self, link: Link | None) -> None:
        """Use this link to the next hop, or none. One that falls silent meanwhile is seen to, and not used again."""
        self._watching.close()
        self.next_link = link
        if link is not None:
            self._watching.enter_context(link.watch())

    def reroute(self, epoch: int, entry: HopEntry, link: Link) -> None:
        """Take a new route: other neighbours; steps go on where they are, those that are under way included."""
        self.epoch = epoch
        self.entry = entry
        self.bound = [link]
        self.take_next(None)
        self.is_next_lost = False
        self.onward_from = None
        self.is_fresh = False
        self.orphan_since = None

    def keeps_state_for(self, entry: HopEntry) -> bool:
        """Whether the keys and values held are those that another route would make here."""
        return _work(self.entry) == _work(entry)

    def bytes_in(self, step: Step, hidden_size: int) -> int:
        """Bytes of a step's payload as it must arrive here."""
        entry, wire_in = self.entry, self.entry.wire_in
        if step.is_memory:
            return step.rows * hidden_size * WIDTHS[memory_wire(wire_in)]
        width = entry.streams if wire_in is WireDtype.INT32 else hidden_size
        return step.rows * width * WIDTHS[wire_in] + axes_bytes(step.rows, entry.axes)

    def _check_call(self, step: Step) -> None:
        if step.position + 1 > self.entry.max_positions:
            limit = self.entry.max_positions
            raise ProtocolError(ErrorCode.TOO_BIG, f"call {step.position + 1} of at most {limit}")

    def _check_step(self, step: Step, hidden_size: int, max_rows: int) -> None:
        flags = int(step.flags)
        if bool(flags & _CALL) is not self.entry.calls:
            raise ProtocolError(ErrorCode.MALFORMED, "calls and hidden states are confused")
        if self.entry.calls:
            self._check_call(step)
            return
        if bool(flags & _TOKEN_IDS) is not (self.entry.run_opening and not step.is_memory):
            raise ProtocolError(ErrorCode.MALFORMED, "token ids and hidden states are confused")
        if not 1 <= step.rows <= max_rows:
            raise ProtocolError(ErrorCode.TOO_BIG, f"{step.rows} rows; a step takes 1 to {max_rows}")
        branches = self.entry.branches
        if step.rows % branches:
            raise ProtocolError(ErrorCode.MALFORMED, f"{step.rows} rows where each position has {branches}")
        expected = self.bytes_in(step, hidden_size)
        if len(step.payload) != expected:
            raise ProtocolError(ErrorCode.MALFORMED, f"{len(step.payload)} bytes where {expected} are due")
        if (end := step.end(branches)) > self.entry.max_positions:
            limit = self.entry.max_positions
            raise ProtocolError(ErrorCode.TOO_BIG, f"position {end} of at most {limit}")
        if step.position > self.position:
            raise WorkError(ErrorCode.STEP, f"position {step.position} where {self.position} is next")
        if step.want is Want.LIST and not _is_ascending(step.want_rows, step.rows // branches):
            raise ProtocolError(ErrorCode.MALFORMED, "wanted rows must ascend and lie within the step")
        self.memory.check(step, self.entry)


def _work(entry: HopEntry) -> tuple[object, ...]:
    is_last = entry.next_hop is None
    ends = entry.run_opening, entry.run_closing, is_last, entry.sampling
    return entry.start, entry.end, ends, entry.branches, entry.streams, entry.axes, entry.memory_rows


def _is_ascending(rows: tuple[int, ...], num_rows: int) -> bool:
    return all(a < b for a, b in zip((-1, *rows), (*rows, num_rows), strict=True))
