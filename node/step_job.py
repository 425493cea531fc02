"""One step of one session on the compute thread: bytes in, layers, bytes out.

The only place of the node where bytes and tensors meet. Knows nothing of links; who gets the output is decided by
whoever made the job.
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

from node.held_slice import Cache, Runner
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
from slicing.buffers import DTYPES, from_buffer, to_buffer
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
    output: Step | Answer | None = field(default=None, repr=False)
    error: RemoteError | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        self.attempt, self.entry, self.state = self.session.attempt, self.session.entry, self.session.state

    @property
    def rows(self) -> int:
        """Rows of the step, for the scheduler."""
        return self.step.rows

    @property
    def size_bytes(self) -> int:
        """Bytes that arrived for it."""
        return len(self.step.payload)

    @property
    def left_ms(self) -> int:
        """What is left of the step's deadline, at least 1; 0 where it has none."""
        if not self.step.deadline_ms:
            return 0
        return max(1, self.step.deadline_ms - int((time.perf_counter() - self.arrived) * 1000))

    def run(self) -> None:
        """Compute; afterwards `output` or `error` is set, or the attempt was over."""
        started = time.perf_counter()
        self.queue_s = started - self.arrived
        if self.attempt.is_over:
            self.error = WorkError(ErrorCode.STEP, "an earlier step failed")
            return
        try:
            self._check_deadline()
            with torch.inference_mode():
                self._compute(started)
            self.compute_s = time.perf_counter() - started
        except RemoteError as error:
            self._fail(error)
        except Cancelled:
            self._fail(WorkError(ErrorCode.CANCELLED, "cancelled between layers"))
        except CannotRollBack:
            self._fail(
                WorkError(ErrorCode.STEP, "this model's state goes only forward, or back to position 0")
            )
        except Exception as error:  # the model's own code: whatever it raises is this session's trouble alone
            logger.warning(
                "session %s: %s in the model, %s", self.session.name, type(error).__name__, _place_of(error)
            )
            self._fail(WorkError(ErrorCode.COMPUTE, type(error).__name__))

    def finish(self) -> None:
        """Hand the job back on the event loop."""
        self.on_finish(self)

    def _check_deadline(self) -> None:
        if self.step.deadline_ms and self.queue_s * 1000 >= self.step.deadline_ms:
            raise WorkError(ErrorCode.DEADLINE, "the deadline ran out in the queue")

    def _fail(self, error: RemoteError) -> None:
        self.error = error
        self.attempt.is_over = True  # those queued behind build on this one

    def _compute(self, started: float) -> None:
        step, entry = self.step, self.entry
        self.state.rewind(step.position)
        rows = wanted_rows(step)
        if entry.run_closing and rows:
            payload, kind = self._choose(self._logits(rows), rows)
            self.output = self._answer(payload, kind, rows, started)
            return
        hidden_states = self._hidden_states()
        if entry.next_hop is not None:
            self.output = self._step_onward(hidden_states, started)
        elif step.want is not Want.NONE:
            if len(rows) < step.rows:  # a copy: a kept answer must not hold a whole prefill
                hidden_states = hidden_states[list(rows)]
            payload = to_buffer(hidden_states, TORCH_DTYPES[entry.wire_out])
            self.output = self._answer(payload, AnswerKind.HIDDEN_STATES, rows, started)

    def _hidden_states(self) -> torch.Tensor:
        """Run this hop's layers. [rows, hidden]"""
        step, entry, cache, runner = self.step, self.entry, self.state.cache, self.runner
        arrived = decode_payload(step, entry, runner)
        if entry.run_opening:
            return runner.run_opening(
                cache, arrived, step.position, end=entry.end, is_cancelled=self._is_over
            )
        return runner.run_layers(
            cache, arrived, step.position, start=entry.start, end=entry.end, is_cancelled=self._is_over
        )

    def _logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Run this hop's layers and the closing end, in one pass unless it embeds too. [len(rows), vocab]"""
        step, entry, cache, runner = self.step, self.entry, self.state.cache, self.runner
        if entry.run_opening:
            arrived, start = self._hidden_states(), entry.end
        else:
            arrived, start = decode_payload(step, entry, runner), entry.start
        return runner.run_closing(
            cache, arrived, step.position, start=start, keep=rows, is_cancelled=self._is_over
        )

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

    def _step_onward(self, hidden_states: torch.Tensor, started: float) -> Step:
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
            self._traces(started),
        )

    def _answer(self, payload: Buffer, kind: AnswerKind, rows: Sequence[int], started: float) -> Answer:
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
            self._traces(started),
        )

    def _traces(self, started: float) -> tuple[HopTrace, ...]:
        if StepFlag.TRACE not in self.step.flags:
            return ()
        compute_us = int((time.perf_counter() - started) * 1e6)
        return (*self.step.traces, HopTrace(compute_us, int(self.queue_s * 1e6), self.crypto_us))

    def _is_over(self) -> bool:
        return self.attempt.is_over


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


def decode_payload(step: Step, entry: HopEntry, runner: Runner) -> torch.Tensor:
    """[rows, hidden] in the compute dtype, or [rows] int64 ids. Raises ProtocolError for ids past the vocabulary."""
    if entry.wire_in is not WireDtype.INT32:
        wire = TORCH_DTYPES[entry.wire_in]
        return from_buffer(step.payload, wire, runner.hidden_size, dtype=runner.dtype)
    ids = from_buffer(step.payload, torch.int32, 1, dtype=torch.int64).reshape(-1)
    if int(ids.min()) < 0 or int(ids.max()) >= runner.vocab_size:
        # Checked here since an embedding on a GPU would take the whole process down.
        raise ProtocolError(ErrorCode.MALFORMED, f"a token id outside the vocabulary of {runner.vocab_size}")
    return ids


def in_wire(payload: Buffer, wire: WireDtype, wanted: WireDtype) -> Buffer:
    """The same rows in another element type, rounded where that is narrower."""
    numbers = from_buffer(payload, TORCH_DTYPES[wire], 1, dtype=TORCH_DTYPES[wanted])
    return to_buffer(numbers, TORCH_DTYPES[wanted])


def pack_candidates(token_ids: torch.Tensor, logits: torch.Tensor) -> bytes:
    """Bytes of [n] ids and [n] logits as n x (u32 id, f32 logit)."""
    packed = np.empty(len(token_ids), CANDIDATE)
    packed["id"], packed["logit"] = token_ids.numpy(), logits.numpy()
    return packed.tobytes()
