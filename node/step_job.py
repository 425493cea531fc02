"""One step of one session on the compute thread: bytes in, whole or in pieces, and bytes out.

The only place of the node where bytes and tensors meet. Knows nothing of links; who gets the output is decided by
whoever made the job, and what is computed together by the scheduler (see `step_batch`).
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from node.session import Attempt, Session
from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.types import (
    WIDTHS,
    Answer,
    AnswerKind,
    Buffer,
    HopEntry,
    HopTrace,
    Step,
    StepFlag,
    Want,
    WireDtype,
)
from slicing.batch import Cache, Runner, Work
from slicing.batching import Dropped, Lane
from slicing.buffers import DTYPES, all_finite, from_buffer, to_buffer
from slicing.runner import Cancelled, CannotRollBack
from slicing.sampler import Sampler, SamplingParams

logger = logging.getLogger(__name__)

NUM_CANDIDATES = 8  # DESIGN decision 1
TORCH_DTYPES = {dtype: DTYPES[dtype.name.lower()] for dtype in WIDTHS}
CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])  # payloads are little endian, like the hidden states
GREEDY = {"params": {"temperature": 0.0}}


@dataclass(slots=True)
class ComputeState:
    """What the compute thread keeps of a session."""

    cache: Cache
    sampler: Sampler | None = None
    drawn_for: list[int] = field(default_factory=list)  # the position of each id that the sampler observed

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


def new_state(runner: Runner, entry: HopEntry) -> ComputeState:
    """Empty keys and values and, for the closing hop, its sampler. Raises ProtocolError for impossible sampling."""
    return ComputeState(runner.new_cache(), new_sampler(runner, entry))


def new_sampler(runner: Runner, entry: HopEntry) -> Sampler | None:
    """The sampler that a closing hop draws with; greedy where the entry does not say."""
    if not entry.run_closing:
        return None
    try:
        asked: Mapping[str, Any] = entry.sampling or GREEDY
        params = SamplingParams.from_map(asked["params"])
        return Sampler(params, runner.vocab_size, tuple(asked.get("prompt_ids", ())))
    except (KeyError, ValueError, TypeError):
        raise ProtocolError(ErrorCode.MALFORMED, "the sampling parameters are impossible") from None


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
        entry, runner = self.entry, self.runner
        work = id(runner), entry.start, entry.end, entry.run_opening, entry.run_closing
        self.lane = Lane(work, runner.max_works, runner.is_invariant)
        self.rows = self.step.rows

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
        return self.step.position + self.step.rows - self.rows

    @property
    def size_bytes(self) -> int:
        """Bytes that arrived for it."""
        return len(self.step.payload)

    @property
    def left_ms(self) -> int:
        """What is left of the step's deadline, at least 1; 0 where it has none."""
        return left_ms(self.step, self.arrived)

    def begin(self, rows: int) -> Work | None:
        """Get the next rows ready to be computed; None where the job fails, or its attempt is over."""
        if self.attempt.is_over:
            self.fail(WorkError(ErrorCode.STEP, "an earlier step failed"))
            return None
        try:
            self._check_deadline()
            self.state.rewind(self.position)
            inputs = decode_rows(self.step, self.entry, self.runner, self._first_row, rows)
        except (RemoteError, CannotRollBack) as error:
            self.fail(error)
            return None
        keep = self._kept(rows) if self.entry.run_closing else None
        return Work(self.state.cache, inputs, self.position, keep)

    def take(self, made: torch.Tensor, rows: int, batch_s: float, batch_rows: int) -> None:
        """The next rows were computed: [rows, hidden], or logits [kept, vocab] at the closing hop."""
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

    @property
    def _first_row(self) -> int:
        return self.step.rows - self.rows

    def _kept(self, rows: int) -> list[int]:
        """The wanted rows among the next ones, counted from the first of those."""
        first = self._first_row
        return [row - first for row in wanted_rows(self.step) if first <= row < first + rows]

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
        if not self._first_row:
            return
        try:
            self.state.rewind(self.step.position)
        except CannotRollBack:  # the session ends here, and is built again by replay
            self.error = WorkError(ErrorCode.COMPUTE, "a step that was half done cannot be taken back")

    def _deliver(self) -> None:
        """Make the output of what all pieces made."""
        step, entry, rows = self.step, self.entry, wanted_rows(self.step)
        if entry.run_closing and not rows:
            if step.want is not Want.NONE:  # an acknowledgement
                self.output = self._answer(b"", AnswerKind.HIDDEN_STATES, rows)
            return
        made = self._made[0] if len(self._made) == 1 else torch.cat(self._made)
        self._made.clear()
        if entry.run_closing:
            payload, kind = self._choose(made, rows)
            self.output = self._answer(payload, kind, rows)
        elif entry.next_hop is not None:
            self.output = self._step_onward(checked(made, entry.hop + 1))
        elif step.want is not Want.NONE:
            if len(rows) < step.rows:  # a copy: a kept answer must not hold a whole prefill
                made = made[list(rows)]
            payload = to_buffer(checked(made, entry.hop + 1), TORCH_DTYPES[entry.wire_out])
            self.output = self._answer(payload, AnswerKind.HIDDEN_STATES, rows)

    def _choose(self, logits: torch.Tensor, rows: Sequence[int]) -> tuple[Buffer, AnswerKind]:
        """Draw the token after each of `rows`; greedy sends the best few with their logits instead."""
        sampler, drawn_for = self.state.sampler, self.state.drawn_for
        assert sampler is not None
        chosen: list[bytes] = []
        for row, of_row in zip(rows, logits, strict=True):
            position = self.step.position + row + 1
            if sampler.params.is_greedy:
                ids, values = sampler.shortlist(of_row, NUM_CANDIDATES)
                token_id = int(ids[0])
                chosen.append(pack_candidates(ids, values))
            else:
                token_id = sampler.sample(of_row, position)
                chosen.append(token_id.to_bytes(4, "little"))
            sampler.observe(token_id)
            drawn_for.append(position)
        kind = AnswerKind.CANDIDATES if sampler.params.is_greedy else AnswerKind.TOKEN_IDS
        return b"".join(chosen), kind

    def _step_onward(self, hidden_states: torch.Tensor) -> Step:
        step = self.step
        return Step(
            step.session_id,
            step.epoch,
            step.step,
            step.position,
            step.rows,
            to_buffer(hidden_states, TORCH_DTYPES[self.entry.wire_out]),
            step.want,
            step.want_rows,
            step.flags & ~StepFlag.TOKEN_IDS,
            0,  # set when it is sent
            self._traces(),
        )

    def _answer(self, payload: Buffer, kind: AnswerKind, rows: Sequence[int]) -> Answer:
        """The position is that of the first row answered."""
        step = self.step
        return Answer(
            step.session_id,
            step.epoch,
            step.step,
            step.position + (rows[0] if rows else 0),
            len(rows),
            payload,
            kind,
            step.flags & StepFlag.TRACE,
            self._traces(),
        )

    def _traces(self) -> tuple[HopTrace, ...]:
        if StepFlag.TRACE not in self.step.flags:
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
    logger.warning("session %s: %s in the model, %s", session_name, name, place)
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


def wanted_rows(step: Step) -> Sequence[int]:
    """Row numbers within the step that the gateway wants back."""
    match step.want:
        case Want.NONE:
            return ()
        case Want.LAST:
            return (step.rows - 1,)
        case Want.ALL:
            return range(step.rows)
        case Want.LIST:
            return step.want_rows


def decode_rows(step: Step, entry: HopEntry, runner: Runner, first: int, rows: int) -> torch.Tensor:
    """Rows of a step from `first` on: [rows, hidden] in the compute dtype, or [rows] int64 ids.

    Raises ProtocolError for ids past the vocabulary, and what `checked` raises.
    """
    wire = TORCH_DTYPES[entry.wire_in]
    width = 1 if entry.wire_in is WireDtype.INT32 else runner.hidden_size
    row_bytes = width * wire.itemsize
    payload = memoryview(step.payload).cast("B")[first * row_bytes : (first + rows) * row_bytes]
    if entry.wire_in is not WireDtype.INT32:
        return checked(from_buffer(payload, wire, width, dtype=runner.dtype), entry.hop)
    ids = from_buffer(payload, wire, width, dtype=torch.int64).reshape(-1)
    if int(ids.min()) < 0 or int(ids.max()) >= runner.vocab_size:
        # Checked here since an embedding on a GPU would take the whole process down.
        raise ProtocolError(ErrorCode.MALFORMED, f"a token id outside the vocabulary of {runner.vocab_size}")
    return ids


def checked(hidden_states: torch.Tensor, hop: int) -> torch.Tensor:
    """Hidden states for this hop, if all of them are numbers. Raises ProtocolError or WorkError.

    What a gateway sends is its own fault; what a node sent may be better on another route.
    """
    if all_finite(hidden_states):
        return hidden_states
    text = "hidden states that are infinite or no numbers"
    raise WorkError(ErrorCode.COMPUTE, text) if hop else ProtocolError(ErrorCode.MALFORMED, text)


def in_wire(payload: Buffer, wire: WireDtype, wanted: WireDtype) -> Buffer:
    """The same rows in another element type, rounded where that is narrower."""
    numbers = from_buffer(payload, TORCH_DTYPES[wire], 1, dtype=TORCH_DTYPES[wanted])
    return to_buffer(numbers, TORCH_DTYPES[wanted])


def pack_candidates(token_ids: torch.Tensor, logits: torch.Tensor) -> bytes:
    """Bytes of [n] ids and [n] logits as n x (u32 id, f32 logit)."""
    packed = np.empty(len(token_ids), CANDIDATE)
    packed["id"], packed["logit"] = token_ids.numpy(), logits.numpy()
    return packed.tobytes()
