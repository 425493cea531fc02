"""Vectors of texts from a model whose middle layers live elsewhere: steps through the chain, then pooling at home.

A request has a few sessions, so that all stages work; each takes one text after the other. An encoder's text is one
step; a decoder's goes in chunks, as prompts do. Leaves routes and replays to the chain, tensors to the ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import torch

from app.engine.coverage import route_request
from app.engine.embedding_check import check_request
from app.engine.embedding_ends import LocalTextEnds, RemoteTextEnds, TextEnds
from app.engine.embedding_request import (
    Embedded,
    EmbeddingAdmitted,
    EmbeddingEvent,
    EmbeddingFinished,
    EmbeddingRequest,
    Vector,
)
from app.engine.fingerprint import fingerprint
from app.engine.merge import merge
from app.engine.opened import Opened
from app.engine.request import ModelStatus, RequestError, RouteHop, Timings
from app.engine.routes import Routes
from app.engine.text import PREFILL_WINDOW
from app.engine.tokenizer import ChatTokenizer
from routing.chain import Chain
from routing.errors import ErrorCode, NoRouteError, RemoteError, WorkError
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.recorded import RecordedStep
from routing.types import Route
from slicing.model_kind import ModelKind
from slicing.pooling import VectorRecipe
from slicing.sentence_files import SentenceFiles

MAX_SESSIONS = 8  # of one request: as many stages as usual routes have, and what is on the way between them
MAX_WHOLE_ROWS = 4096  # of a text that must be one step: nodes take no longer one unless they are told to


def new_engine(opened: Opened) -> ChainEmbeddingEngine:
    """The engine of a model that makes vectors."""
    return ChainEmbeddingEngine(opened)


class ChainEmbeddingEngine:
    """An `EmbeddingEngine` over a chain of nodes."""

    def __init__(self, opened: Opened) -> None:
        assert opened.tokenizer is not None
        self._opened = opened
        self._tokenizer = opened.tokenizer
        self._files: SentenceFiles = opened.home
        self._is_causal = opened.found.kind is not ModelKind.ENCODER
        limits = [opened.found.facts.max_positions, self._files.max_tokens]
        self._max_tokens: int = min(limits if self._is_causal else [*limits, MAX_WHOLE_ROWS])
        request = route_request(
            opened.found.facts, opened.found.middle, is_thin=opened.ends is None, excluded=opened.excluded
        )
        self._routes = Routes(opened.switchboard, request)
        self.num_running = 0  # requests

    @property
    def model_name(self) -> str:
        return self._opened.found.facts.name

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    @property
    def max_positions(self) -> int:
        return self._max_tokens

    @property
    def vocab_size(self) -> int:
        return self._opened.found.facts.vocab_size

    @property
    def recipe(self) -> VectorRecipe:
        """What becomes of hidden states."""
        return self._files.recipe

    def coverage(self) -> ModelStatus:
        return self._routes.coverage()

    def encode(self, text: str) -> tuple[int, ...]:
        text = self._files.prompt + text
        return tuple(self._tokenizer.encode_whole(text.lower() if self._files.lower_case else text))

    def check(self, request: EmbeddingRequest) -> None:
        check_request(request, self.recipe, max_tokens=self._max_tokens, vocab_size=self.vocab_size)

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingEvent, None]:
        started = time.perf_counter()
        self.check(request)
        work = _Work(request, deque(range(len(request.texts))), self._routes.asked(request.route), started)
        self.num_running += 1
        try:
            first = await self._open(work)
            try:
                yield EmbeddingAdmitted(request.num_tokens)
                async with aclosing(self._side_by_side(work, first)) as vectors:
                    async for made in vectors:
                        yield made
                yield self._finished(work, first.chain.route)
            finally:
                await first.close()
        except NoRouteError as error:
            raise self._routes.blamed(error, request.route) from None
        except WorkError as error:
            raise _no_room(error) from None
        finally:
            self.num_running -= 1

    # Sessions -------------------------------------------------------------------------------------------------

    async def _side_by_side(self, work: _Work, first: _Session) -> AsyncGenerator[Embedded, None]:
        """The vectors of all texts, over the session that is open and some more; none is waited for without a text."""
        streams = [self._vectors(work, first)]
        streams += [self._more_vectors(work) for _ in range(self._num_sessions(work, first) - 1)]
        num_due = len(work.request.texts)
        async with aclosing(merge(streams, silence_s=float("inf"), stop=asyncio.Event())) as events:
            async for item in events:
                if item is not None:
                    yield item[1]
                    num_due -= 1
                if not num_due:
                    return

    async def _more_vectors(self, work: _Work) -> AsyncGenerator[Embedded, None]:
        """The same over a session of its own, unless there is no place for it: the first one takes all texts then."""
        try:
            session = await self._open(work, confirms=True)
        except (NoRouteError, RemoteError):
            return
        async with aclosing(self._vectors(work, session)) as vectors:
            async for made in vectors:
                yield made

    async def _vectors(self, work: _Work, session: _Session) -> AsyncGenerator[Embedded, None]:
        """Take texts that are left, one after the other, through one session."""
        try:
            while work.left:
                number = work.left.popleft()
                states = await self._states(work, session, work.request.texts[number])
                yield Embedded(number, await self._vector(states, work.request.dimensions))
        finally:
            await session.close()

    async def _open(self, work: _Work, *, confirms: bool = False) -> _Session:
        """Open a session; with `confirms`, once every node has a place for it."""
        opened, options = self._opened, self._chain_options(work.request)
        chain = await opened.switchboard.open_chain(
            work.route,
            replace(options, confirms=options.confirms or confirms),
            deadline_s=work.time_left_s,
        )
        ends: TextEnds
        if opened.ends is None:
            ends = RemoteTextEnds(opened.found.facts.hidden_size)
        else:
            num_stages = _num_hops(chain) + 1
            ends = LocalTextEnds(opened.ends, work.request.tenant, num_stages)
        work.sessions.append(session := _Session(chain, ends))
        return session

    async def _states(self, work: _Work, session: _Session, text: tuple[int, ...]) -> torch.Tensor:
        """The last hidden states [n, hidden] (float32) of the rows that pooling looks at."""
        size = self._opened.settings.prefill_chunk if self._is_causal else len(text)
        needed = self.recipe.pooling.rows_of(len(text))
        in_flight: deque[tuple[RecordedStep, range]] = deque()
        states: list[torch.Tensor] = []
        for start in range(0, len(text), size):
            in_flight.append(await self._send(work, session, text[start : start + size], start, needed))
            if len(in_flight) == PREFILL_WINDOW:
                states.append(await self._take(work, session, *in_flight.popleft()))
        while in_flight:
            states.append(await self._take(work, session, *in_flight.popleft()))
        return torch.cat(states)

    async def _send(
        self, work: _Work, session: _Session, chunk: tuple[int, ...], start: int, needed: range
    ) -> tuple[RecordedStep, range]:
        """Send rows of a text; returns also which of them pooling looks at."""
        chain, ends = session.chain, session.ends
        first, end = max(needed.start - start, 0), min(needed.stop - start, len(chunk))
        rows = range(first, max(first, end))
        payload = await ends.open_rows(chunk, start, chain.first_wire)
        want, want_rows = ends.wanted(rows, len(chunk))
        sent = await chain.send(
            payload,
            position=start,
            rows=len(chunk),
            want=want,
            want_rows=want_rows,
            deadline_s=work.time_left_s,
        )
        return sent, rows

    async def _take(self, work: _Work, session: _Session, sent: RecordedStep, rows: range) -> torch.Tensor:
        answer = await session.chain.answer(sent, deadline_s=work.time_left_s)
        return await session.ends.close_rows(answer, rows, sent.wire_back)

    async def _vector(self, states: torch.Tensor, dimensions: int | None) -> Vector:
        def make() -> Vector:
            with torch.inference_mode():
                vector: Vector = self.recipe.vector(states, dimensions).numpy()
            return vector

        return await asyncio.get_running_loop().run_in_executor(self._encoding, make)

    @property
    def _encoding(self) -> Executor:
        return self._opened.encoding

    # Pieces ---------------------------------------------------------------------------------------------------

    def _num_sessions(self, work: _Work, first: _Session) -> int:
        """One for each stage, this one included, and one that is on its way."""
        return min(len(work.request.texts), _num_hops(first.chain) + 2, MAX_SESSIONS)

    def _chain_options(self, request: EmbeddingRequest) -> ChainOptions:
        is_thin, longest = self._opened.ends is None, max(map(len, request.texts))
        prefixes = self._opened.prefixes
        return ChainOptions(
            max_positions=longest,
            wire=self._opened.settings.wire_dtype,
            hidden_size=self._opened.found.facts.hidden_size,
            takes_token_ids=is_thin,
            runs_closing=is_thin,
            headless=True,
            tenant=prefixes.beginnings.tag(request.tenant) if prefixes else b"",
            room=longest,
            confirms=longest > self._opened.settings.prefill_chunk,
        )

    def _finished(self, work: _Work, route: Route | None) -> EmbeddingFinished:
        return EmbeddingFinished(
            _timings(work),
            replays=sum(session.chain.replays for session in work.sessions),
            fingerprint=self._fingerprint(route),
            route=self._taken(route),
        )

    def _taken(self, route: Route | None) -> tuple[RouteHop, ...]:
        return self._routes.taken(route)

    def _fingerprint(self, route: Route | None) -> str:
        opened = self._opened
        runner = None if opened.ends is None else opened.ends.runner
        wire = opened.settings.wire_dtype
        return fingerprint(opened.found.facts.digest, runner, wire, route, self.recipe.pooling)


@dataclass(slots=True)
class _Session:
    """One session that texts go through."""

    chain: Chain
    ends: TextEnds
    is_closed: bool = False

    async def close(self) -> None:
        """Free it everywhere; again does nothing."""
        if not self.is_closed:
            self.is_closed = True
            await self.chain.close()
            await self.ends.close()


@dataclass(slots=True)
class _Work:
    """One request under way: the numbers of the texts that nobody has taken yet, and who takes them."""

    request: EmbeddingRequest
    left: deque[int]
    route: RouteRequest
    started: float
    sessions: list[_Session] = field(default_factory=list, repr=False)

    @property
    def time_left_s(self) -> float | None:
        """Of the request's deadline."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - (time.perf_counter() - self.started))


def _num_hops(chain: Chain) -> int:
    return len(chain.route.hops) if chain.route else 0


def _no_room(error: WorkError) -> Exception:
    """Say it of the texts where nodes can never hold so much."""
    if error.code is not ErrorCode.NO_ROOM:
        return error
    text = (
        f"This model's maximum context length is {error.room} tokens here, which is what its nodes have room for. "
        "Please reduce the length of the input."
    )
    return RequestError("input", "context_length_exceeded", text)


def _timings(work: _Work) -> Timings:
    """Sums over the sessions, but for what passed on the clock."""
    total_s = time.perf_counter() - work.started
    times = [session.chain.times for session in work.sessions]
    return Timings(
        total_s=total_s,
        prefill_s=total_s,
        compute_s=sum(one.compute_s for one in times),
        network_s=sum(one.network_s for one in times),
        crypto_s=sum(one.crypto_s for one in times),
        queue_s=sum(one.queue_s for one in times),
        local_s=sum(session.ends.local_s for session in work.sessions),
    )
