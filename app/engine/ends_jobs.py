"""What the ends of an answer are asked to compute: rows of its prompt, and its turns.

Each job knows its own rows and what becomes of them; who computes them together is the queue's (`ends_queue`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from app.engine.drafts import Drafter, kept_of
from app.engine.grammar import GrammarWalk
from app.engine.places import Places, tail_of
from routing.errors import ErrorCode, WorkError
from routing.types import Answer, Buffer, WireDtype
from slicing.batch import Runner, Work
from slicing.batching import Lane
from slicing.buffers import DTYPES, all_finite, float_rows, from_buffer, to_buffer
from slicing.sampler import raw_logprobs
from slicing.token_scores import TokenScore, score_of, scores_of

MAX_FORCED = 127  # tokens that a grammar left no choice of, behind the last one in a step


@dataclass(slots=True, eq=False)
class EndsSession:
    """What the compute thread keeps of one answer."""

    opening: Any  # caches of the runner
    closing: Any
    sampler: Any  # a Sampler; a StreamSampler where a position has several tokens (`frames`)
    drafter: Drafter | None
    stop_token_ids: frozenset[int] = frozenset()
    num_stages: int = 1
    route: Hashable = None  # those of one route go out in groups
    tenant: Hashable = None
    compute_s: float = 0.0  # what its batches took
    embeds: torch.Tensor | None = None  # [prompt tokens, hidden], in place of the prompt's ids
    places: Places | None = None
    wants_logprobs: bool = False
    watched_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # likely tokens told beside each drawn one; None: no scores
    walk: GrammarWalk | None = None  # through the grammar that holds the answer
    knows_drafts: bool = (
        False  # the step under way carries tokens that are no guess: the grammar left no choice
    )

    @property
    def is_told_apart(self) -> bool:
        """Whether each token needs its row, since what is told of it is in there."""
        return self.wants_logprobs or self.num_logprobs is not None

    def work(
        self, cache: Any, inputs: torch.Tensor, position: int, keep: Sequence[int] | None = None
    ) -> Work:
        """Rows at `position` for one of its caches."""
        if self.places is None:
            return Work(cache, inputs, position, keep)
        return Work(cache, inputs, position, keep, places=self.places.of(position, len(inputs)))


@dataclass(slots=True, eq=False)
class EndsJob:
    """Some rows of one answer on their way through the queue (`slicing.batching.Job`)."""

    session: EndsSession
    lane: Lane
    rows: int = field(default=0, init=False)  # still to compute
    error: Exception | None = field(default=None, init=False)
    done: asyncio.Future[None] | None = field(default=None, init=False)

    @property
    def tenant(self) -> Hashable:
        return self.session.tenant

    @property
    def stages(self) -> int:
        return self.session.num_stages

    def fail(self, error: Exception) -> None:
        self.error = error
        self.rows = 0

    def finish(self) -> None:
        if self.done is not None and not self.done.done():  # whoever waited may have left
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class OpenRows(EndsJob):
    """Rows of a prompt: embed them, unless encoders did, and run the first layers."""

    token_ids: Sequence[int] = field(repr=False)
    position: int
    wire: WireDtype
    _opened: list[Buffer] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.rows = len(self.token_ids)

    @property
    def payload(self) -> Buffer:
        """The rows in the wire's element type, once they are computed."""
        tail = tail_of(self.session.places, self.position, len(self.token_ids))
        return self._opened[0] if len(self._opened) == 1 and not tail else b"".join([*self._opened, tail])

    def work(self, rows: int) -> Work:
        """The next rows."""
        begin = len(self.token_ids) - self.rows
        position, embeds = self.position + begin, self.session.embeds
        if embeds is not None:
            return self.session.work(self.session.opening, embeds[position : position + rows], position)
        ids = torch.tensor(list(self.token_ids[begin : begin + rows]), dtype=torch.int64)
        return self.session.work(self.session.opening, ids, position)

    def take(self, hidden_states: torch.Tensor) -> None:
        """Keep what became of them. [rows, hidden]"""
        self._opened.append(_payload(hidden_states, self.wire))
        self.rows -= len(hidden_states)


@dataclass(slots=True, eq=False)
class CloseRows(EndsJob):
    """The first `num_rows` rows that came back of a prompt: run the last layers for their keys and values.

    What norm and head make of the rows `keep` is kept in `made`: where nothing is drawn, that is what was asked for.
    """

    answer: Answer = field(repr=False)
    wire: WireDtype
    num_rows: int
    keep: range = range(0)  # ascending numbers of the answer's rows
    _made: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.rows = self.num_rows

    @property
    def made(self) -> torch.Tensor:
        """Of a headless model the last hidden states of the rows `keep`, once all are computed. [kept, hidden]"""
        return torch.cat(self._made)

    def work(self, runner: Runner, rows: int) -> Work:
        """The next rows. Raises WorkError where they are not finite."""
        begin = self.num_rows - self.rows
        states = _arrived(self.answer, self.wire, runner, begin, begin + rows)
        keep = [row - begin for row in self.keep if begin <= row < begin + rows]
        return self.session.work(self.session.closing, states, self.answer.position + begin, keep=keep)

    def take(self, rows: int, made: torch.Tensor) -> None:
        """Note that so many rows more are computed, and keep what was made of those to keep. [kept, ...]"""
        self.rows -= rows
        if self.keep:
            self._made.append(made)


@dataclass(slots=True, eq=False)
class ScoreRows(CloseRows):
    """Rows that came back of a prompt, each with the token that stands behind it: how likely the model held that.

    Logits of a piece are dropped once it is scored: those of a whole prompt would be gigabytes.
    """

    next_ids: Sequence[int] = field(default=(), repr=False)
    has_layers: bool = True
    scores: list[TokenScore] = field(default_factory=list, init=False, repr=False)

    def work(self, runner: Runner, rows: int) -> Work:
        """The next rows, all of them kept. Raises WorkError where they are not finite."""
        begin = self.num_rows - self.rows
        states = _arrived(self.answer, self.wire, runner, begin, begin + rows)
        if not self.has_layers:  # nothing is kept of a session: a row's place does not matter
            return Work(self.session.closing, states, 0, keep=range(rows))
        return self.session.work(self.session.closing, states, self.answer.position + begin, keep=range(rows))

    def take(self, rows: int, made: torch.Tensor) -> None:
        """Score the rows by their logits. [rows, vocab]"""
        begin = self.num_rows - self.rows
        due = self.next_ids[begin : begin + rows]
        self.scores += scores_of(made[: len(due)], due, self.session.num_logprobs or 0)
        self.rows -= rows


@dataclass(slots=True, eq=False)
class Turn(EndsJob):
    """One token of one answer, or several where drafts were right: what came back for it, and what goes out next."""

    answer: Answer | None = field(repr=False)  # None: nothing went out yet
    position: int  # of the first token to draw
    drafts: tuple[int, ...] = field(repr=False)
    wire_back: WireDtype
    wire_out: WireDtype
    may_draft: bool
    sharing: int
    drawn: list[int] = field(default_factory=list, init=False, repr=False)
    num_right: int = field(default=0, init=False)
    next_drafts: tuple[int, ...] = field(default=(), init=False, repr=False)
    onward: Work | None = field(default=None, init=False, repr=False)  # None: the answer can only end here
    payload: Buffer = field(default=b"", init=False, repr=False)
    logprobs: list[float] = field(default_factory=list, init=False, repr=False)
    watched: tuple[float, ...] = field(default=(), init=False, repr=False)
    forced: list[bool] = field(default_factory=list, init=False, repr=False)  # of `drawn`, by a grammar
    scores: list[TokenScore] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.rows = self.came.rows

    @property
    def came(self) -> Answer:
        """What came back."""
        assert self.answer is not None
        return self.answer

    def closing_work(self, runner: Runner, states: torch.Tensor | None, *, has_layers: bool) -> Work:
        """The rows that came back, of which the last are drawn for; `states` where they are decoded already.

        Without layers here nothing is kept of a session, and a row's place does not matter. Raises WorkError where
        the rows are not finite.
        """
        rows = self.came.rows
        if states is None:
            states = _arrived(self.came, self.wire_back, runner, 0, rows)
        keep = range(rows - 1 - len(self.drafts), rows)
        if not has_layers:
            return Work(self.session.closing, states, 0, keep=keep)
        return self.session.work(self.session.closing, states, self.came.position, keep=keep)

    def draw(self, logits: torch.Tensor, max_positions: int) -> None:
        """Draw row by row, each as if it came alone, while what is drawn equals the drafts. [1 + drafts, vocab]"""
        session = self.session
        self.drawn, self.num_right = kept_of(self._sampled(logits), self.drafts, session.stop_token_ids)
        if session.knows_drafts:
            self.num_right, session.knows_drafts = 0, False
        if session.walk is not None and not session.is_told_apart:
            rest = session.walk.rest()  # what is known to the end needs no further step
            self.drawn += rest
            self.forced += [True] * len(rest)
        position = self.position + len(self.drawn) - 1
        if self.drawn[-1] not in session.stop_token_ids and position < max_positions:
            self._go_on(position)

    def _sampled(self, logits: torch.Tensor) -> Iterator[int]:
        session, sampler, walk = self.session, self.session.sampler, self.session.walk
        if session.watched_ids:
            self.watched, session.watched_ids = raw_logprobs(logits[0], session.watched_ids), ()
        for number in range(len(logits)):
            row = logits[number]
            self.forced.append(walk is not None and walk.is_forced)
            token_id = sampler.sample(row if walk is None else walk.masked(row), self.position + number)
            if walk is not None:
                walk.take(token_id)
            if session.wants_logprobs:
                self.logprobs.append(sampler.logprob(row, token_id))
            if session.num_logprobs is not None:
                self.scores.append(score_of(row, token_id, session.num_logprobs))
            sampler.observe(token_id)
            yield token_id

    def _go_on(self, position: int) -> None:
        """The next step feeds the last token drawn, and the drafts behind it."""
        session, drafter = self.session, self.session.drafter
        assert drafter is not None
        is_allowed = self.may_draft and not (session.walk is not None and session.walk.is_forced)
        guessed = drafter.next(self.drawn, self.num_right, is_allowed=is_allowed, sharing=self.sharing)
        known = () if session.walk is None else session.walk.ahead(min(drafter.room, MAX_FORCED))
        self.next_drafts, session.knows_drafts = known or guessed, bool(known)
        ids = torch.from_numpy(np.array((self.drawn[-1], *self.next_drafts), np.int64))
        self.onward = self.session.work(self.session.opening, ids, position)

    def take(self, hidden_states: torch.Tensor) -> None:
        """Keep the rows of the step that goes out. [1 + next drafts, hidden]"""
        assert self.onward is not None
        tail = tail_of(self.session.places, self.onward.position, len(hidden_states))
        self.payload = _payload(hidden_states, self.wire_out) + tail


def arrived_together(turns: Sequence[Turn], runner: Runner) -> list[torch.Tensor] | None:
    """The rows that came back for several turns [rows, hidden], looked at in one go.

    None where they have to be looked at one by one: some are not finite, or not what is computed with.
    """
    if runner.dtype is not torch.float32 or any(turn.wire_back is not WireDtype.FLOAT32 for turn in turns):
        return None
    return float_rows([turn.came.payload for turn in turns], runner.hidden_size)


def _payload(hidden_states: torch.Tensor, wire: WireDtype) -> bytes:
    """A copy: it is kept for replays, and rows of a batch would hold the whole of it."""
    return bytes(to_buffer(hidden_states, DTYPES[wire.name.lower()]))


def _arrived(answer: Answer, wire: WireDtype, runner: Runner, begin: int, end: int) -> torch.Tensor:
    """Rows [begin, end) of an answer. [rows, hidden] Raises WorkError where they are not finite."""
    row_bytes = len(answer.payload) // answer.rows
    payload = memoryview(answer.payload)[begin * row_bytes : end * row_bytes]
    rows = from_buffer(payload, DTYPES[wire.name.lower()], runner.hidden_size, dtype=runner.dtype)
    if not all_finite(rows):
        raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
    return rows
