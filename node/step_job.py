"""One step of one session on the compute thread: bytes in, whole or in pieces, and bytes out.

Knows nothing of links; who gets the output is decided by whoever made the job, and what is computed together by the
scheduler (see `step_batch`). How bytes become tensors is `step_rows`, how tokens are chosen `drawing`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from node.drawing import AnySampler, draw, kind_of_answer
from node.memory_steps import check_rows
from node.session import Attempt, Session
from node.step_rows import (
    checked,
    decode_memory,
    decode_places,
    decode_rows,
    encode_rows,
    in_wire,
    rows_of_frames,
    wanted_frames,
)
from routing.errors import ErrorCode, RemoteError, WorkError
from routing.frames import join_payload, memory_wire, split_payload
from routing.types import Answer, AnswerKind, Buffer, HopEntry, HopTrace, Step, StepFlag, Want
from slicing.batch import Cache, Runner, Work
from slicing.batching import MAX_DECODE_ROWS, Dropped, Lane
from slicing.runner import Cancelled, CannotRollBack

logger = logging.getLogger(__name__)

MEMORY_ROWS = (
    MAX_DECODE_ROWS + 1
)  # that memory is queued as: nothing is computed of it yet, but it is no decode step


@dataclass(slots=True)
class ComputeState:
    """What the compute thread keeps of a session."""

    cache: Cache
    sampler: AnySampler | None = None
    drawn_for: list[int] = field(
        default_factory=list
    )  # the position of each choice that the sampler observed
    memory_step: int = 0  # the last step whose memory is in the cache

    def close(self) -> None:
        """Free what is kept."""
        self.cache.close()

    def rewind(self, position: int) -> None:
        """Forget rows at and after `position`, and the ids that those rows drew. Raises WorkError STEP past the end."""
        length = self.cache.length
        if position > length:
            raise WorkError(ErrorCode.STEP, f"position {position} where {length} is next")
        if position < length:
            self.cache.truncate(position)
            while self.drawn_for and self.drawn_for[-1] > position:
                self.drawn_for.pop()
            if self.sampler is not None:
                self.sampler.truncate(len(self.drawn_for))


@dataclass(slots=True, eq=False)
class StepJob:
    """A step on its way through the compute thread. `output` is None where nothing is wanted back."""

    session: Session
    step: Step = field(repr=False)
    runner: Runner
    on_finish: Callable[[StepJob], None]
    arrived: float  # time.perf_counter()
    crypto_us: int = 0
    attempt: Attempt = field(init=False, repr=False)
    entry: HopEntry = field(init=False, repr=False)
    state: ComputeState = field(init=False, repr=False)
    lane: Lane = field(init=False, repr=False)
    is_memory: bool = field(init=False)  # as the step says
    rows: int = field(init=False)  # still to compute; 0 once it is done or has failed
    output: Step | Answer | None = field(default=None, repr=False)
    error: RemoteError | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0  # its share of the batches that it was in
    batches_s: float = 0.0  # what those took
    was_alone: bool = False  # computed in one batch without others
    _made: list[torch.Tensor] = field(default_factory=list, repr=False)  # by the pieces so far

    def __post_init__(self) -> None:
        self.attempt, self.entry = self.session.attempt, self.session.entry
        assert isinstance(self.session.state, ComputeState), "a session of calls has no steps"
        self.state = self.session.state
        entry, runner, is_memory = self.entry, self.runner, self.step.is_memory
        work = id(runner), entry.start, entry.end, entry.run_opening, entry.run_closing, is_memory
        self.lane = Lane(work, runner.max_works, runner.is_invariant and runner.is_causal and not is_memory)
        self.is_memory = is_memory
        self.rows = MEMORY_ROWS if is_memory else self.step.rows

    @property
    def tenant(self) -> bytes:
        """Whose turn it is."""
        return tenant_of(self.entry)

    @property
    def stages(self) -> int:
        """Hops of the route. Ends at home, which take a part of a hop's time, count where there is one hop only."""
        entry = self.entry
        return max(entry.num_hops, 1 if entry.run_opening or entry.run_closing else 2)

    @property
    def position(self) -> int:
        """Where the rows still to compute begin."""
        return self.step.position + self.first_row // self.entry.branches

    @property
    def first_row(self) -> int:
        """The first of the step's rows still to compute; memory comes whole."""
        return 0 if self.is_memory else self.step.rows - self.rows

    @property
    def size_bytes(self) -> int:
        """Bytes that arrived for it."""
        return len(self.step.payload)

    @property
    def left_ms(self) -> int:
        """What is left of the step's deadline, at least 1; 0 where it has none."""
        return left_ms(self.step, self.arrived)

    def begin(self, rows: int) -> int:
        """Get ready to compute the next rows, and what completes their last position. Returns how many those are.

        0 where there is nothing to compute: memory is taken in, the job fails, or its attempt is over.
        """
        if self.attempt.is_over:
            self.fail(WorkError(ErrorCode.STEP, "an earlier step failed"))
            return 0
        try:
            self._check_deadline()
            if self.is_memory:
                self._take_memory()
                return 0
            self.state.rewind(self.position)
            return min(self.rows, rows + -rows % self.entry.branches)
        except (RemoteError, CannotRollBack) as error:
            self.fail(error)
            return 0

    def work(self, rows: int, inputs: torch.Tensor | None) -> Work | None:
        """The next rows as they are computed; `inputs` where they are decoded already. None where the job fails."""
        step, entry, first = self.step, self.entry, self.first_row
        try:
            if inputs is None:
                inputs = decode_rows(step, entry, self.runner, first, rows)
            places = decode_places(step, entry, self.runner, first, rows)
        except RemoteError as error:
            self.fail(error)
            return None
        keep = self._kept(rows) if entry.run_closing else None
        return Work(self.state.cache, inputs, self.position, keep, places)

    def _take_memory(self) -> None:
        """Keep rows of memory and pass them on; those that come again are passed on only.

        Raises ProtocolError for more than was to come: what was undone may come again under other numbers.
        """
        step, entry, cache = self.step, self.entry, self.state.cache
        states = decode_memory(step, entry, self.runner)
        is_new = step.step > self.state.memory_step
        if is_new:
            check_rows(cache.memory_rows + step.rows, entry)
        if entry.next_hop is not None:
            payload = in_wire(step.payload, step.rows, 0, memory_wire(entry.wire_in), entry.wire_out)
            self.output = self._step_onward(payload)
        elif step.want is not Want.NONE:
            self.output = self._answer(b"", AnswerKind.HIDDEN_STATES, (), 0)
        if is_new:
            cache.add_memory(states)
            self.state.memory_step = step.step
        self.rows = 0

    def take(self, made: torch.Tensor, rows: int, batch_s: float, batch_rows: int) -> None:
        """The next rows were computed: [rows, hidden], or at the closing hop what it makes of those that are kept."""
        self.was_alone = rows == batch_rows == self.step.rows
        self.batches_s += batch_s
        self.compute_s += batch_s * rows / batch_rows
        if not self.entry.run_closing or self._kept(rows):
            self._made.append(made)
        if rows < self.rows:
            self.rows -= rows
            return
        try:
            self._deliver()
        except Exception as error:
            self.fail(error)
        self.rows = 0

    def fail(self, error: Exception) -> None:
        """End the job: the session goes back to where the step began, and those queued behind it fail too."""
        self.error = self._told(error)
        if not self.attempt.is_over:
            self._roll_back()
        self.attempt.is_over = True
        self.rows = 0
        self._made.clear()

    def finish(self) -> None:
        """Hand the job back on the event loop."""
        self.on_finish(self)

    def _kept(self, rows: int) -> list[int]:
        """The wanted rows among the next ones, counted from the first of those."""
        first, branches = self.first_row, self.entry.branches
        wanted = rows_of_frames(wanted_frames(self.step, branches), branches)
        return [row - first for row in wanted if first <= row < first + rows]

    def _check_deadline(self) -> None:
        waited_s = time.perf_counter() - self.arrived
        self.queue_s = waited_s - self.batches_s
        if self.step.deadline_ms and waited_s * 1000 >= self.step.deadline_ms:
            raise WorkError(ErrorCode.DEADLINE, "the deadline ran out in the queue")

    def _told(self, error: Exception) -> RemoteError:
        if isinstance(error, CannotRollBack):
            return WorkError(ErrorCode.STEP, "this model's state goes only forward, or back to position 0")
        return told(error, self.session.name)

    def _roll_back(self) -> None:
        if not self.first_row:
            return
        try:
            self.state.rewind(self.step.position)
        except CannotRollBack:  # the session ends here, and is built again by replay
            self.error = WorkError(ErrorCode.COMPUTE, "a step that was half done cannot be taken back")

    def _deliver(self) -> None:
        """Make the output of what all pieces made."""
        step, entry = self.step, self.entry
        if entry.next_hop is not None:
            payload = encode_rows(checked(self._take_made(), entry.hop + 1), entry.wire_out)
            if entry.axes:
                payload = join_payload(payload, split_payload(step.payload, step.rows, entry.axes)[1])
            self.output = self._step_onward(payload)
            return
        frames = wanted_frames(step, entry.branches)
        rows = rows_of_frames(frames, entry.branches)
        if entry.run_closing and not rows:
            if step.want is not Want.NONE:  # an acknowledgement
                self.output = self._answer(b"", AnswerKind.HIDDEN_STATES, frames, 0)
            return
        made = self._take_made()
        if self.state.sampler is not None:
            payload, kind = self._choose(made, frames)
            self.output = self._answer(payload, kind, frames, len(frames))
        elif step.want is not Want.NONE:
            if len(rows) < len(made):  # a copy: a kept answer must not hold a whole prefill
                made = made[list(rows)]
            payload = encode_rows(checked(made, entry.hop + 1), entry.wire_out)
            self.output = self._answer(payload, AnswerKind.HIDDEN_STATES, frames, len(rows))

    def _take_made(self) -> torch.Tensor:
        """What all pieces made, which is not kept any longer."""
        made = self._made[0] if len(self._made) == 1 else torch.cat(self._made)
        self._made.clear()
        return made

    def _choose(self, logits: torch.Tensor, frames: Sequence[int]) -> tuple[Buffer, AnswerKind]:
        """Draw what comes after each of `frames` from its logits [frames * branches, (streams,) vocab]."""
        sampler, branches = self.state.sampler, self.entry.branches
        assert sampler is not None
        assert len(logits) == len(frames) * branches
        chosen: list[bytes] = []
        for number, frame in enumerate(frames):
            position = self.step.position + frame + 1
            chosen.append(draw(sampler, logits[number * branches : (number + 1) * branches], position))
            self.state.drawn_for.append(position)
        return b"".join(chosen), kind_of_answer(sampler)

    def _step_onward(self, payload: Buffer) -> Step:
        step = self.step
        return Step(
            step.session_id,
            step.epoch,
            step.step,
            step.position,
            step.rows,
            payload,
            step.want,
            step.want_rows,
            step.flags and step.flags & ~StepFlag.TOKEN_IDS,
            0,  # set when it is sent
            self._traces(),
        )

    def _answer(self, payload: Buffer, kind: AnswerKind, frames: Sequence[int], rows: int) -> Answer:
        """The position is that of the first row answered."""
        step = self.step
        return Answer(
            step.session_id,
            step.epoch,
            step.step,
            step.position + (frames[0] if frames else 0),
            rows,
            payload,
            kind,
            step.flags & StepFlag.TRACE,
            self._traces(),
        )

    def _traces(self) -> tuple[HopTrace, ...]:
        if not self.step.flags or StepFlag.TRACE not in self.step.flags:
            return ()
        trace = HopTrace(int(self.batches_s * 1e6), int(self.queue_s * 1e6), self.crypto_us)
        return (*self.step.traces, trace)


def told(error: Exception, session_name: str) -> RemoteError:
    """What others are told of an error: nothing that was computed."""
    match error:
        case RemoteError():
            return error
        case Cancelled() | Dropped():
            return WorkError(ErrorCode.CANCELLED, "cancelled between layers")
    # The model's own code: whatever it raises is this session's trouble alone.
    name, place = type(error).__name__, _place_of(error)
    told = {"session": session_name}
    logger.warning("session %s: %s in the model, %s", session_name, name, place, extra=told)
    return WorkError(ErrorCode.COMPUTE, name)


def tenant_of(entry: HopEntry) -> bytes:
    """Whose turn it is; gateways that name no tenants count as one each."""
    return entry.tenant or entry.gateway_id


def left_ms(step: Step, arrived: float) -> int:
    """What is left of a step's deadline, at least 1; 0 where it has none."""
    if not step.deadline_ms:
        return 0
    return max(1, step.deadline_ms - int((time.perf_counter() - arrived) * 1000))


def _place_of(error: Exception) -> str:
    """File and line, without the error's text: that may quote values."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
