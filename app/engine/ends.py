"""The two ends of a model for one session, at home or on the first and last node.

`LocalEnds` runs embedding, first and last layers, norm, head and sampler in the gateway, together with those of the
other answers (`ends_queue`); `RemoteEnds` sends token ids and takes shortlists or drawn ids. Both turn tokens into a
step's payload and an answer into the next tokens. Knows nothing of links or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from app.engine.drafts import Drafter, kept_of
from app.engine.ends_jobs import CloseRows, EndsSession, OpenRows, ScoreRows, Turn
from app.engine.ends_queue import EndsQueue
from app.engine.grammar import Grammar
from app.engine.places import Places
from app.engine.remote_scores import read_scores
from app.engine.request import EncodedPrompt
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Buffer, Want, WireDtype
from slicing.batch import Cache
from slicing.kept_caches import Fork
from slicing.sampler import Sampler, SamplingParams
from slicing.token_scores import TokenScore

CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])


@dataclass(frozen=True, slots=True)
class Due:
    """What an answered step was for: its drafts were `drafts`, and the first token to draw stands at `position`.

    `may_draft`: the next step may carry drafts. `sharing`: answers that wait for each other's rows, this one included.
    `num_stages`: the places that compute a step one after the other: nodes, or this one and a single node; `route`
    names the nodes.
    """

    position: int
    drafts: tuple[int, ...] = ()
    may_draft: bool = False
    sharing: int = 1
    num_stages: int = 1
    route: Hashable = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens in their order, and the step that would follow them: it feeds the last one and `drafts` behind it."""

    token_ids: tuple[int, ...] = field(repr=False)
    num_right: int  # of them were drafts
    payload: Buffer = field(repr=False)  # empty where nothing can follow
    drafts: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)  # see `app.engine.request.TextDelta`
    watched: tuple[float, ...] = field(default=(), repr=False)
    forced: tuple[bool, ...] = field(default=(), repr=False)  # of `token_ids`: a grammar left no choice
    knows_drafts: bool = False  # `drafts` are such tokens, and no guess
    scores: tuple[TokenScore, ...] = field(
        default=(), repr=False
    )  # one for each of `token_ids`, where asked for

    @property
    def rows(self) -> int:
        """Rows of the step that follows."""
        return 1 + len(self.drafts)


class Ends(Protocol):
    """One session's ends."""

    @property
    def local_s(self) -> float:
        """What this answer's work took here, in seconds."""

    async def add_memory(self, states: torch.Tensor) -> None:
        """Give the layers that are here encoder states [rows, hidden], before any step."""

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        """The payload of a step that feeds `token_ids` of the prompt at `position`."""

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        """Which rows of a prefill chunk this end needs back."""

    async def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        """Rows of a prefill chunk that is not the last: feed the last layers that are here."""

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Drawn:
        """The tokens that the answer to a step yields: one, and one more for each of its drafts that was right."""

    async def begin(self, fork: Fork, num_positions: int) -> None:
        """Go on from what an earlier answer left here. Raises CannotRollBack."""

    def release(self) -> tuple[Cache, ...]:
        """Hand over the keys and values that are here, once nothing is computed any more; `close` all the same."""

    async def close(self) -> None:
        """Free keys and values. Never cancelled half way."""


class LocalEnds:
    """Embedding and first K layers, last J layers, norm, head and sampler, in this process."""

    def __init__(
        self,
        queue: EndsQueue,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        drafter: Drafter,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        tenant: Hashable = None,
        encoded: EncodedPrompt | None = None,
        wants_logprobs: bool = False,
        watched_ids: tuple[int, ...] = (),
        num_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self._queue = queue
        self._session = EndsSession(
            queue.runner.new_cache(),
            queue.runner.new_cache(),  # its own: the opening end runs one step ahead of the closing one
            Sampler(params, queue.runner.vocab_size, prompt_ids),
            drafter,
            stop_token_ids,
            tenant=tenant,
            embeds=None if encoded is None else encoded.embeds,
            places=_places_of(encoded),
            wants_logprobs=wants_logprobs,
            watched_ids=watched_ids,
            num_logprobs=num_logprobs,
            walk=None if grammar is None else grammar.walk(),
        )
        self._is_closed = False

    @property
    def local_s(self) -> float:
        return self._session.compute_s

    async def add_memory(self, states: torch.Tensor) -> None:
        await self._queue.add_memory(self._session, states)

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        job = OpenRows(self._session, self._queue.opening_lane, token_ids, position, wire)
        await self._queue.run(job)
        return job.payload

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        if self._queue.has_last_layers:
            return Want.ALL, ()
        return (Want.LAST, ()) if is_last_chunk else (Want.LIST, ())

    async def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        if self._queue.has_last_layers:
            await self._queue.run(self._closing(answer, wire, answer.rows))

    async def score(
        self, answer: Answer, wire: WireDtype, next_ids: Sequence[int], rows: int
    ) -> tuple[tuple[TokenScore, ...], Answer]:
        """Run the closing end on the first `rows` rows of a prompt, and score the token behind each.

        Returns the scores, and what is left of the answer to draw from.
        """
        if not rows:
            return (), answer
        job = ScoreRows(
            self._session,
            self._queue.closing_lane,
            answer,
            wire,
            rows,
            next_ids=next_ids,
            has_layers=self._queue.has_last_layers,
        )
        await self._queue.run(job)
        return tuple(job.scores), _rows_from(answer, rows, len(answer.payload) // answer.rows)

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Drawn:
        self._session.num_stages, self._session.route = due.num_stages, due.route
        answer = await self._feed_prompt(answer, due, wire_back)
        turn = Turn(
            self._session,
            self._queue.turn_lane,
            answer,
            due.position,
            due.drafts,
            wire_back,
            wire_out,
            due.may_draft,
            due.sharing,
        )
        await self._queue.run(turn)
        return Drawn(
            tuple(turn.drawn),
            turn.num_right,
            turn.payload,
            turn.next_drafts,
            tuple(turn.logprobs),
            turn.watched,
            scores=tuple(turn.scores),
            forced=tuple(turn.forced),
            knows_drafts=self._session.knows_drafts,
        )

    async def begin(self, fork: Fork, num_positions: int) -> None:
        await self._queue.begin(self._session, fork, num_positions)

    def release(self) -> tuple[Cache, ...]:
        return self._queue.release(self._session)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.shield(asyncio.ensure_future(self._queue.free(self._session)))

    async def _feed_prompt(self, answer: Answer, due: Due, wire: WireDtype) -> Answer:
        """Run the last layers on what comes before the rows that are drawn for, in pieces where that may be."""
        num_before = answer.rows - 1 - len(due.drafts)
        if not (num_before and self._queue.runner.is_invariant):
            return answer
        row_bytes = len(answer.payload) // answer.rows
        await self._queue.run(self._closing(answer, wire, num_before))
        return _rows_from(answer, num_before, row_bytes)

    def _closing(self, answer: Answer, wire: WireDtype, rows: int) -> CloseRows:
        return CloseRows(self._session, self._queue.closing_lane, answer, wire, rows)


def _places_of(encoded: EncodedPrompt | None) -> Places | None:
    if encoded is None or encoded.places is None:
        return None
    assert encoded.next_place is not None, "places without the one that follows them"
    return Places(encoded.places, encoded.next_place)


def _rows_from(answer: Answer, first: int, row_bytes: int) -> Answer:
    rest = memoryview(answer.payload)[first * row_bytes :]
    return Answer(
        answer.session_id,
        answer.epoch,
        answer.step,
        answer.position + first,
        answer.rows - first,
        rest,
        answer.kind,
        answer.flags,
        answer.traces,
    )


class RemoteEnds:
    """Thin mode: the first node embeds token ids, the last one draws; no weights here."""

    def __init__(
        self,
        vocab_size: int,
        drafter: Drafter,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        num_logprobs: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_logprobs = num_logprobs
        self._drafter = drafter
        self._stop_token_ids = stop_token_ids

    @property
    def local_s(self) -> float:
        return 0.0  # a few ids are packed

    async def add_memory(self, states: torch.Tensor) -> None:
        """No layer is here."""

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        return _packed(token_ids)

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        return (Want.LAST, ()) if is_last_chunk else (Want.LIST, ())

    async def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        """Nothing is run here."""

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Drawn:
        """Keep what was drawn while it equals the drafts: from there on the last node saw other tokens."""
        scores: tuple[TokenScore, ...] = ()
        if self._num_logprobs is not None:
            scores = read_scores(answer, self._vocab_size, self._num_logprobs)
        drawn = [score.token_id for score in scores] or self._drawn(answer)
        kept, num_right = kept_of(drawn, due.drafts, self._stop_token_ids)
        drafts = self._drafter.next(kept, num_right, is_allowed=due.may_draft, sharing=due.sharing)
        return Drawn(tuple(kept), num_right, _packed((kept[-1], *drafts)), drafts, scores=scores[: len(kept)])

    async def begin(self, fork: Fork, num_positions: int) -> None:
        """Nothing is held here."""

    def release(self) -> tuple[Cache, ...]:
        return ()

    async def close(self) -> None:
        """Nothing is held here."""

    def _drawn(self, answer: Answer) -> list[int]:
        """The token of each row. Raises WorkError or ProtocolError for what can be none."""
        if answer.kind is AnswerKind.CANDIDATES:
            best = np.frombuffer(answer.payload, dtype=CANDIDATE).reshape(answer.rows, -1)[:, 0]
            token_ids: list[int] = best["id"].tolist()
            if not np.isfinite(best["logit"]).all():
                raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
        else:
            token_ids = np.frombuffer(answer.payload, dtype="<u4").tolist()
        if max(token_ids) >= self._vocab_size:
            raise ProtocolError(ErrorCode.MALFORMED, "the last node drew a token outside the vocabulary")
        return token_ids


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def remote_sampling(
    params: SamplingParams, prompt_ids: Sequence[int], num_logprobs: int | None = None
) -> dict[str, object]:
    """What the last node needs to draw: the parameters, and which ids the prompt holds if it must know them.

    And how many likely tokens it tells beside each drawn one, where their probabilities are asked for.
    """
    seen = sorted(set(prompt_ids)) if params.repetition_penalty != 1.0 else []
    asked: dict[str, object] = {"params": params.to_map(), "prompt_ids": seen}
    return asked if num_logprobs is None else asked | {"num_logprobs": num_logprobs}
