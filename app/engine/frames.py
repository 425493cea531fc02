"""The two ends of one session of frames: several tokens a position, and guidance branches that come together.

`LocalFrames` embeds, runs the first and last layers, guides and draws here, in the calls of all answers (`ends_queue`);
`RemoteFrames` sends ids and takes what was drawn. What is fed for what was drawn the caller says (`Feed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from app.engine.ends import CANDIDATE, Due
from app.engine.ends_jobs import EndsSession, Turn
from app.engine.ends_queue import EndsQueue
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Buffer, WireDtype
from slicing.batch import Runner, Work
from slicing.branches import new_cache
from slicing.streams import StreamSampler

# Takes a frame's position and what was drawn for it; what is fed there, None where nothing follows. Called once for
# each frame, on the thread that draws.
Feed = Callable[[int, Sequence[int]], Sequence[int] | None]


class Frames(Protocol):
    """One session's ends."""

    @property
    def local_s(self) -> float:
        """What this answer's work took here, in seconds."""

    async def add_memory(self, states: torch.Tensor) -> None:
        """Encoder states [places * branches, hidden] for the layers that are here, before anything else."""

    async def open_first(self, ids: Sequence[int], wire: WireDtype) -> Buffer:
        """The payload of the step that feeds the frame at position 0, to all branches."""

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Buffer:
        """Draw a frame from the answer to a step; the payload of the step that feeds it, empty where none follows."""

    async def close(self) -> None:
        """Free keys and values. Never cancelled half way."""


class LocalFrames:
    """Ends in this process."""

    def __init__(
        self,
        queue: EndsQueue,
        sampler: StreamSampler,
        feed: Feed,
        *,
        branches: int,
        tenant: Hashable = None,
    ) -> None:
        self._queue = queue
        self._feed = feed
        self._branches = branches
        opening, closing = (new_cache(queue.runner, branches) for _ in range(2))
        self._session = EndsSession(opening, closing, sampler, None, tenant=tenant)
        self._is_closed = False

    @property
    def local_s(self) -> float:
        return self._session.compute_s

    async def add_memory(self, states: torch.Tensor) -> None:
        await self._queue.add_memory(self._session, states)

    async def open_first(self, ids: Sequence[int], wire: WireDtype) -> Buffer:
        turn = self._turn(None, 0, wire, wire)
        turn.go_on(ids)
        await self._queue.run(turn)
        return turn.payload

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Buffer:
        self._session.num_stages, self._session.route = due.num_stages, due.route
        turn = self._turn(answer, due.position, wire_back, wire_out)
        await self._queue.run(turn)
        return turn.payload

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.shield(asyncio.ensure_future(self._queue.free(self._session)))

    def _turn(self, answer: Answer | None, position: int, back: WireDtype, out: WireDtype) -> FrameTurn:
        lane, rows = self._queue.turn_lane, self._branches
        return FrameTurn(
            self._session, lane, answer, position, (), back, out, False, 1, branches=rows, feed=self._feed
        )


@dataclass(slots=True, eq=False)
class FrameTurn(Turn):
    """One frame of one answer: what came back for it from all branches, and what goes out next. Never has drafts."""

    branches: int = field(kw_only=True)
    feed: Feed = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self.rows = self.branches

    def closing_work(self, runner: Runner, states: torch.Tensor | None, *, has_layers: bool) -> Work:
        """All branches' rows of the frame. Raises WorkError where they are not finite."""
        work = Turn.closing_work(self, runner, states, has_layers=has_layers)
        return replace(work, keep=range(work.rows))

    def draw(self, logits: torch.Tensor, max_positions: int) -> None:
        """Guide and draw a token of each stream from [branches, streams, vocab]."""
        self.drawn = self.session.sampler.sample(logits, self.position)
        self.session.sampler.observe(self.drawn)
        fed = self.feed(self.position, self.drawn)
        if fed is not None and self.position < max_positions:
            self.go_on(fed)

    def go_on(self, ids: Sequence[int]) -> None:
        """The next step feeds these, to every branch."""
        rows = torch.tensor([list(ids)] * self.branches, dtype=torch.int64)
        self.onward = Work(self.session.opening, rows, self.position)


class RemoteFrames:
    """Thin mode: the first node embeds ids, the last one guides and draws; no weights here."""

    def __init__(self, vocab_size: int, num_streams: int, feed: Feed, *, branches: int) -> None:
        self._vocab_size = vocab_size
        self._num_streams = num_streams
        self._feed = feed
        self._branches = branches

    @property
    def local_s(self) -> float:
        return 0.0  # a few ids are packed

    async def add_memory(self, states: torch.Tensor) -> None:
        """No layers are here."""

    async def open_first(self, ids: Sequence[int], wire: WireDtype) -> Buffer:
        return self._packed(ids)

    async def draw(self, answer: Answer, due: Due, wire_back: WireDtype, wire_out: WireDtype) -> Buffer:
        fed = self._feed(due.position, self._drawn(answer))
        return b"" if fed is None else self._packed(fed)

    async def close(self) -> None:
        """Nothing is held here."""

    def _packed(self, ids: Sequence[int]) -> bytes:
        return np.asarray([ids] * self._branches, dtype="<i4").tobytes()

    def _drawn(self, answer: Answer) -> list[int]:
        """The id of each stream. Raises WorkError or ProtocolError for what can be none."""
        if answer.kind is AnswerKind.CANDIDATES:
            lists = np.frombuffer(answer.payload, dtype=CANDIDATE).reshape(self._num_streams, -1)
            if not np.isfinite(lists["logit"][:, 0]).all():
                raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
            ids: list[int] = lists["id"][:, 0].tolist()
        else:
            width = len(answer.payload) // self._num_streams
            ids = np.frombuffer(answer.payload, dtype=f"<u{width}").tolist()
        if max(ids) >= self._vocab_size:
            raise ProtocolError(ErrorCode.MALFORMED, "the last node drew a token outside the vocabulary")
        return ids
