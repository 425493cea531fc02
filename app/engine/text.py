"""Text from a model whose middle layers live elsewhere: prefill, then one step per token.

The main loop of the gateway. Knows tokens and text; leaves routes and replays to the chain, tensors to the ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from app.engine.coverage import ModelFacts, route_request
from app.engine.ends import Ends, LocalEnds, NextToken, RemoteEnds, remote_sampling
from app.engine.request import (
    Admitted,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    ModelStatus,
    PrefillProgress,
    RequestError,
    TextDelta,
    Timings,
)
from app.engine.routes import Routes
from app.engine.tokenizer import AnswerText, ChatTokenizer
from routing.chain import Chain
from routing.errors import ErrorCode, NoRouteError, WorkError
from routing.opening import ChainOptions
from routing.recorded import RecordedStep
from routing.switchboard import Switchboard
from routing.types import Answer, NodeId, Route, SliceSpec, Want, WireDtype
from slicing.runner import PlainRunner

PREFILL_CHUNK = (
    512  # rows per step: chunks of 128 and more cost at most 6 % over whole (performance.md, section 7)
)
PREFILL_WINDOW = 4  # chunks that travel at once, so that every stage of a usual route has one


Result = TypeVar("Result")


@dataclass(slots=True)
class _Progress:
    """One answer under way: where it stands and where its time went."""

    request: GenerationRequest
    ends: Ends = field(repr=False)
    chain: Chain = field(repr=False)
    text: AnswerText = field(repr=False)
    started: float
    first_token_at: float = 0.0
    num_generated: int = 0
    local_s: float = 0.0

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.request.prompt_ids) + self.num_generated

    @property
    def time_left_s(self) -> float | None:
        """Of the request's deadline."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - (time.perf_counter() - self.started))


@dataclass(frozen=True, slots=True)
class _Returned:
    """A step and what came back for it."""

    sent: RecordedStep
    answer: Answer = field(repr=False)


class ChainTextEngine:
    """A TextEngine over a chain of nodes. `runner` is None in the thin mode; `excluded` nodes are never used."""

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: ChatTokenizer,
        switchboard: Switchboard,
        compute: Executor,
        runner: PlainRunner | None,
        middle: SliceSpec,
        *,
        wire: WireDtype | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        excluded: frozenset[NodeId] = frozenset(),
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._switchboard = switchboard
        self._compute = compute
        self._runner = runner
        self._middle = middle
        self._wire = wire
        self._prefill_chunk = prefill_chunk
        self._routes = Routes(
            switchboard, route_request(facts, middle, is_thin=runner is None, excluded=excluded)
        )
        self.num_running = 0  # answers

    @property
    def model_name(self) -> str:
        return self._facts.name

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    @property
    def max_positions(self) -> int:
        return self._facts.max_positions

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    def coverage(self) -> ModelStatus:
        return self._routes.coverage()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        started = time.perf_counter()
        self._check(request)
        asked = self._routes.asked(request.route)
        continued_ids = request.prompt_ids if request.continues_text else ()
        text = self._tokenizer.answer_text(request.stop, continued_ids=continued_ids)
        ends = self._new_ends(request)
        chain: Chain | None = None
        self.num_running += 1
        try:
            chain = await self._switchboard.open_chain(
                asked, self._chain_options(request), deadline_s=request.deadline_s
            )
            progress = _Progress(request, ends, chain, text, started)
            yield Admitted(len(request.prompt_ids), self._fingerprint(chain.route))
            returned: _Returned | None = None
            async with aclosing(self._prefill(progress)) as chunks:
                async for returned in chunks:
                    yield PrefillProgress(returned.sent.end, len(request.prompt_ids))
            assert returned is not None
            async with aclosing(self._decode(progress, returned)) as events:
                async for event in events:
                    yield event
        except NoRouteError as error:
            raise self._routes.blamed(error, request.route) from None
        finally:
            self.num_running -= 1
            if chain is not None:
                await chain.close()
            closing = asyncio.get_running_loop().run_in_executor(self._compute, ends.close)
            await asyncio.shield(closing)  # behind what still computes, however often we are cancelled

    # Prefill --------------------------------------------------------------------------------------------------

    async def _prefill(self, progress: _Progress) -> AsyncGenerator[_Returned, None]:
        """Send the prompt in chunks, several at once; yield each with its answer."""
        prompt, size = progress.request.prompt_ids, self._prefill_chunk
        in_flight: deque[RecordedStep] = deque()
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            in_flight.append(await self._send_chunk(progress, chunk, start))
            if len(in_flight) == PREFILL_WINDOW:
                yield await self._take_chunk(progress, in_flight.popleft())
        while in_flight:
            yield await self._take_chunk(progress, in_flight.popleft())

    async def _send_chunk(self, progress: _Progress, chunk: Sequence[int], start: int) -> RecordedStep:
        chain, ends, wire = progress.chain, progress.ends, progress.chain.first_wire
        payload = await self._timed(progress, lambda: ends.open_rows(chunk, start, wire))
        is_last = start + len(chunk) == len(progress.request.prompt_ids)
        want, rows = ends.wanted(is_last_chunk=is_last)
        return await chain.send(
            payload,
            position=start,
            rows=len(chunk),
            want=want,
            want_rows=rows,
            deadline_s=progress.time_left_s,
        )

    async def _take_chunk(self, progress: _Progress, sent: RecordedStep) -> _Returned:
        answer = await progress.chain.answer(sent, deadline_s=progress.time_left_s)
        is_last = sent.end == len(progress.request.prompt_ids)
        if not is_last and sent.want is Want.ALL:
            await self._timed(progress, lambda: progress.ends.take_chunk(answer, sent.wire_back))
        return _Returned(sent, answer)

    # Decode ---------------------------------------------------------------------------------------------------

    async def _decode(
        self, progress: _Progress, returned: _Returned
    ) -> AsyncGenerator[GenerationEvent, None]:
        """One token per turn: draw it, send its step, hand out its text, wait for the answer."""
        chain = progress.chain
        while True:
            drawn = await self._draw(progress, returned)
            reason, text = self._judge(progress, drawn)
            if reason is not None:
                yield TextDelta(text)
                yield self._finished(progress, reason)
                return
            sent = await chain.send(
                drawn.payload, position=progress.position - 1, rows=1, deadline_s=progress.time_left_s
            )
            yield TextDelta(text, timings=_timings(progress))
            returned = _Returned(sent, await chain.answer(sent, deadline_s=progress.time_left_s))

    async def _draw(self, progress: _Progress, returned: _Returned) -> NextToken:
        ends, position, wire_out = progress.ends, progress.position, progress.chain.first_wire
        answer, wire_back = returned.answer, returned.sent.wire_back
        drawn = await self._timed(progress, lambda: ends.next_token(answer, position, wire_back, wire_out))
        progress.num_generated += 1
        if progress.num_generated == 1:
            progress.first_token_at = time.perf_counter()
        if progress.time_left_s == 0.0:
            raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline")
        return drawn

    def _judge(self, progress: _Progress, drawn: NextToken) -> tuple[FinishReason | None, str]:
        """Whether the answer ends with this token, and the text that is final because of it."""
        request, text = progress.request, progress.text
        if drawn.token_id in request.stop_token_ids:
            return "stop", text.finish()
        final = text.push(drawn.token_id)
        if text.is_stopped:
            return "stop", final
        if progress.num_generated >= request.max_tokens or progress.position >= self._facts.max_positions:
            return "length", final + text.finish()
        return None, final

    # Pieces ---------------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what would end in a failure far from its cause. Raises RequestError."""
        room = self._facts.max_positions - len(request.prompt_ids)
        if not request.prompt_ids:
            raise RequestError("messages", "invalid_value", "the prompt holds no tokens")
        if room < 0:
            text = f"the prompt has {len(request.prompt_ids)} tokens, the model takes {self._facts.max_positions}"
            raise RequestError("messages", "context_length_exceeded", text)
        if request.max_tokens < 1:
            raise RequestError("max_tokens", "invalid_value", "an answer has at least one token")
        if max(request.prompt_ids) >= self._facts.vocab_size or min(request.prompt_ids) < 0:
            raise RequestError(
                "messages", "invalid_value", "the prompt holds a token that the model does not know"
            )

    def _new_ends(self, request: GenerationRequest) -> Ends:
        if self._runner is None:
            return RemoteEnds(self._facts.vocab_size)
        return LocalEnds(self._runner, self._middle, request.sampling, request.prompt_ids)

    def _chain_options(self, request: GenerationRequest) -> ChainOptions:
        is_thin = self._runner is None
        return ChainOptions(
            max_positions=min(len(request.prompt_ids) + request.max_tokens, self._facts.max_positions),
            wire=self._wire,
            hidden_size=self._facts.hidden_size,
            takes_token_ids=is_thin,
            runs_closing=is_thin,
            sampling=remote_sampling(request.sampling, request.prompt_ids) if is_thin else None,
        )

    def _finished(self, progress: _Progress, reason: FinishReason) -> Finished:
        return Finished(
            reason,
            prompt_tokens=len(progress.request.prompt_ids),
            completion_tokens=progress.num_generated,
            timings=_timings(progress),
            replays=progress.chain.replays,
            fingerprint=self._fingerprint(progress.chain.route),
            route=self._routes.taken(progress.chain.route),
        )

    def _fingerprint(self, route: Route | None) -> str:
        """Names weights and forms: equal fingerprint and seed, equal text."""
        forms = sorted({f"{hop.offer.form}/{hop.offer.dtype.name}" for hop in route.hops}) if route else []
        ends = "thin" if self._runner is None else self._runner.form
        wire = self._wire.name if self._wire else "compute"
        text = "|".join([self._facts.digest.hex(), ends, wire, *forms])
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    async def _timed(self, progress: _Progress, work: Callable[[], Result]) -> Result:
        def timed() -> Result:  # in the thread: waiting behind other answers is not this one's work
            begun = time.perf_counter()
            try:
                return work()
            finally:
                progress.local_s += time.perf_counter() - begun

        return await self._run(timed)

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Compute off the loop; the ends of the thin mode pack a few ids, which two wake-ups would not be worth."""
        if self._runner is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


def _timings(progress: _Progress) -> Timings:
    now = time.perf_counter()
    times = progress.chain.times
    first = progress.first_token_at or now
    return Timings(
        total_s=now - progress.started,
        prefill_s=first - progress.started,
        decode_s=now - first,
        tokens=progress.num_generated,
        compute_s=times.compute_s,
        network_s=times.network_s,
        crypto_s=times.crypto_s,
        queue_s=times.queue_s,
        local_s=progress.local_s,
    )
