"""One call of diffusion blocks on the compute thread: a pass, or a patch of one, in as bytes and out as bytes.

Calls go one at a time, in a lane of their own. What a session remembers between them (constants, streams that
differences are to, kept keys and values) is `CallState`. Knows nothing of links; who gets the output is decided by
whoever made the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from node.session import Attempt, Session
from node.step_job import left_ms, tenant_of, told
from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.parts import call_rows
from routing.types import Answer, AnswerKind, Buffer, HopEntry, HopTrace, Step, StepFlag
from slicing.batching import Lane
from slicing.block_slice import Cancelled
from slicing.diffusion.block_range import Keeper
from slicing.diffusion.calls import Pass, Plan
from slicing.diffusion.kept import KeysDiffer, StaleKeys
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Mode, PatchesRefused
from slicing.diffusion.replay import Verdict
from slicing.diffusion.stacks import Stack
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender, HopVerdict
from slicing.diffusion.wire_tensors import is_finite
from slicing.errors import CallError, CallTooLarge, CallUnknown, ModelError

BUSY_RETRY_MS = 1000  # about the length of a short answer, after which memory comes back


class CallRunner(Protocol):
    """What runs calls: a `BlockRange`."""

    layer_hashes: Mapping[int, bytes]
    size_bytes: int  # of the weights
    dtype: torch.dtype
    device: torch.device
    form: str
    num_layers: int  # of all remote stacks
    hidden_size: int  # 0: not known

    @property
    def stacks(self) -> Mapping[str, Stack]:
        """All remote stacks by name."""

    def run(
        self,
        made: Pass,
        *,
        start: int,
        end: int,
        keeper: Keeper | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[torch.Tensor]:
        """Run blocks [start, end), in global numbers, and return the streams behind them."""


@dataclass(slots=True)
class CallState:
    """What the compute thread keeps of a session of calls."""

    receiver: CallReceiver
    sender: CallSender  # to the next hop, or of answers
    patches: PatchState
    size_bytes: int = 0  # of what sender and receiver hold; kept keys and values have their room set aside
    fork: None = None  # no call goes on from another session's

    @classmethod
    def of(cls, runner: CallRunner, *, limit_bytes: int) -> CallState:
        """With nothing in it; `limit_bytes` are set aside for kept keys and values."""
        return cls(CallReceiver(runner.device), CallSender(), PatchState(limit_bytes=limit_bytes))

    def note_size(self) -> None:
        """Count what is held, where the event loop can see it."""
        self.size_bytes = self.receiver.size_bytes + self.sender.size_bytes

    def give_up(self) -> None:
        """Nothing is promised to it."""

    def close(self) -> None:
        """Free what is kept."""
        self.receiver.reset()
        self.sender.reset()
        self.patches.close()
        self.size_bytes = 0


@dataclass(slots=True, eq=False)
class CallJob:
    """A call on its way through the compute thread."""

    session: Session
    step: Step = field(repr=False)  # its last part
    payloads: Sequence[Buffer] = field(repr=False)
    runner: CallRunner
    on_finish: Callable[[CallJob], None]
    arrived: float  # time.perf_counter()
    crypto_us: int = 0
    spare_bytes: Callable[[], int] = lambda: 0  # free beside what is set aside for it; asked on the thread
    attempt: Attempt = field(init=False, repr=False)
    entry: HopEntry = field(init=False, repr=False)
    state: CallState = field(init=False, repr=False)
    lane: Lane = field(init=False, repr=False)
    size_bytes: int = field(init=False)  # that arrived for it
    rows: int = field(init=False)  # what it is taken to cost; 0 once it is done or has failed
    output: Step | Answer | None = field(default=None, repr=False)
    error: RemoteError | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        self.attempt, self.entry = self.session.attempt, self.session.entry
        assert isinstance(self.session.state, CallState), "a session of steps has no calls"
        self.state = self.session.state
        self.lane = Lane(("call", id(self.runner)))
        self.size_bytes = sum(map(len, self.payloads))
        self.rows = call_rows(self.size_bytes, self.runner.hidden_size * self.runner.dtype.itemsize)

    @property
    def tenant(self) -> bytes:
        """Whose turn it is."""
        return tenant_of(self.entry)

    @property
    def stages(self) -> int:
        """Hops of the route; the gateway's own part counts where there is one hop only."""
        return max(self.entry.num_hops, 2)

    @property
    def left_ms(self) -> int:
        """What is left of the call's deadline, at least 1; 0 where it has none."""
        return left_ms(self.step, self.arrived)

    @torch.no_grad()
    def run(self) -> None:
        """Compute it. What is wrong with it is kept in `error`."""
        began = time.perf_counter()
        self.queue_s = began - self.arrived
        try:
            self._check_begin()
            header, made = self.state.receiver.unpack(
                self.payloads, blocks_of=self._blocks_of, spare_bytes=self.spare_bytes()
            )
            self.payloads = ()
            streams, verdict = self.state.patches.run(
                self.runner,
                made,
                self.entry.start,
                self.entry.end,
                mode=Mode(header.mode),
                cut=header.cut,
                extrapolate=header.extrapolate,
                is_cancelled=self._is_over,
            )
            if not all(map(is_finite, streams)):
                raise WorkError(ErrorCode.COMPUTE, "streams that are infinite or no numbers")
            payload = self._packed(header, made, streams, verdict)
            self.compute_s = time.perf_counter() - began
            self.output = self._output(payload)
        except Exception as error:
            self.fail(error)
        self.state.note_size()
        self.rows = 0

    def fail(self, error: Exception) -> None:
        """End the job, and with it what later calls of the session build on."""
        self.error = self._told(error)
        self.attempt.is_over = True
        self.payloads, self.rows = (), 0

    def finish(self) -> None:
        """Hand the job back on the event loop."""
        self.on_finish(self)

    def _is_over(self) -> bool:
        return self.attempt.is_over

    def _check_begin(self) -> None:
        if self.attempt.is_over:
            raise Cancelled
        if self.step.deadline_ms and self.queue_s * 1000 >= self.step.deadline_ms:
            raise WorkError(ErrorCode.DEADLINE, "the deadline ran out in the queue")

    def _blocks_of(self, plan: Plan) -> tuple[int, int]:
        """Which blocks of the plan's stack are run here. Raises `CallError` for a stack that has not got them."""
        stack = self.runner.stacks.get(plan.stack)
        if stack is None or plan.end > len(stack):
            raise CallError("a plan is of a stack that this model does not have")
        first, last = self.entry.start - stack.offset, self.entry.end - stack.offset
        if not 0 <= first <= last <= len(stack):
            raise CallError("a plan is of another stack than the session")
        return first, last

    def _packed(
        self, header: CallHeader, made: Pass, streams: list[torch.Tensor], verdict: Verdict | None
    ) -> Buffer:
        if verdict is not None:
            mode = verdict.mode.value if verdict.mode else ""
            header.verdicts.append(HopVerdict(self.entry.hop, verdict.allowed, verdict.reason, mode))
        sender, receiver = self.state.sender, self.state.receiver
        sender.form = header.form
        if self.entry.next_hop is None:
            return sender.pack_streams(header, streams)
        _, next_block = self._blocks_of(made.plan)
        onward = Pass(made.plan, streams, made.slots)
        return sender.pack(header, onward, first_block=next_block, digests=receiver.digests)

    def _output(self, payload: Buffer) -> Step | Answer:
        step = self.step
        name = step.session_id, step.epoch, step.step, step.position
        if self.entry.next_hop is None:
            flags = step.flags & StepFlag.TRACE
            return Answer(*name, 1, payload, AnswerKind.CALL, flags, self._traces())
        return Step(*name, 1, payload, step.want, (), step.flags, 0, self._traces())

    def _traces(self) -> tuple[HopTrace, ...]:
        if StepFlag.TRACE not in self.step.flags:
            return ()
        trace = HopTrace(int(self.compute_s * 1e6), int(self.queue_s * 1e6), self.crypto_us)
        return (*self.step.traces, trace)

    def _told(self, error: Exception) -> RemoteError:
        """What others are told: of errors about numbers and names their text, of the rest the type alone."""
        match error:
            case StaleKeys() | KeysDiffer() | CallUnknown():
                return WorkError(ErrorCode.STEP, str(error))  # a route that begins with nothing mends it
            case CallTooLarge():
                return WorkError(ErrorCode.BUSY, str(error), retry_ms=BUSY_RETRY_MS)
            case PatchesRefused():
                return ProtocolError(ErrorCode.MALFORMED, str(error))
            case CallError() if not self.entry.hop:  # the gateway's own fault
                return ProtocolError(ErrorCode.MALFORMED, str(error))
            case CallError():  # of the hop before, or of what lies between: another route may do without it
                return WorkError(ErrorCode.HOP_LOST, str(error), hop=self.entry.hop)
            case ModelError():
                return WorkError(ErrorCode.COMPUTE, str(error))
        return told(error, self.session.name)
