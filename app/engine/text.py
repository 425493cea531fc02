"""Text from a model whose middle layers live elsewhere: prefill, then one step per token.

The main loop of the gateway. Knows tokens and text; leaves routes and replays to the chain, tensors to the ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from app.engine.answer_progress import AnswerProgress, Returned, nodes_s
from app.engine.coverage import ModelFacts, route_request
from app.engine.drafts import Drafter, TripCosts
from app.engine.ends import Drawn, Due, Ends, LocalEnds, RemoteEnds, remote_sampling
from app.engine.ends_queue import EndsQueue
from app.engine.fingerprint import fingerprint
from app.engine.invariance import grouping_matters
from app.engine.memory_steps import send_memory
from app.engine.no_room import no_room
from app.engine.prefix import AnswerBeginning, PrefixCache
from app.engine.request import (
    Admitted,
    EncodedPrompt,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    ModelStatus,
    PrefillProgress,
    RequestError,
    TextDelta,
)
from app.engine.routes import Routes
from app.engine.tokenizer import ChatTokenizer
from routing.chain import Chain
from routing.errors import ErrorCode, NoRouteError, WorkError
from routing.opening import ChainOptions
from routing.recorded import RecordedStep
from routing.switchboard import Switchboard
from routing.types import NodeId, Route, SliceSpec, Want, WireDtype

PREFILL_CHUNK = (
    512  # rows per step: chunks of 128 and more cost at most 6 % over whole (performance.md, section 7)
)
PREFILL_WINDOW = 4  # chunks that travel at once, so that every stage of a usual route has one
# Memory is set aside for the whole of an answer whose length the caller bounded; else for a usual one, and more as it
# grows: most answers end by themselves long before the model's last position.
USUAL_TOKENS = 512
SCORED_LOGITS = 1 << 24  # of one chunk: 64 MiB, and as much again for their logarithms
MIN_SCORED_ROWS = 16


class ChainTextEngine:
    """A TextEngine over a chain of nodes. `ends` is None in the thin mode; `excluded` nodes are never used."""

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: ChatTokenizer,
        switchboard: Switchboard,
        ends: EndsQueue | None,
        middle: SliceSpec,
        *,
        wire: WireDtype | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        excluded: frozenset[NodeId] = frozenset(),
        prefixes: PrefixCache | None = None,
    ) -> None:
        """`prefixes`: what is held of earlier answers; used where own layers compute the same in any row group."""
        self._prefixes = prefixes if ends is None or ends.runner.is_invariant else None
        self._tenants = prefixes.beginnings if prefixes is not None else None
        self._facts = facts
        self._tokenizer = tokenizer
        self._switchboard = switchboard
        self._ends = ends
        self._middle = middle
        self._wire = wire
        self._prefill_chunk = prefill_chunk
        self._routes = Routes(
            switchboard, route_request(facts, middle, is_thin=ends is None, excluded=excluded)
        )
        self._costs = TripCosts()
        self.num_running = 0  # answers

    @property
    def model_name(self) -> str:
        return self._facts.name

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    @property
    def is_thin(self) -> bool:
        """Whether nobody at home sees the distribution that tokens are drawn from."""
        return self._ends is None

    @property
    def max_positions(self) -> int:
        return self._facts.max_positions

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    def answer_room(self, prompt_tokens: int) -> int:
        return self._facts.max_positions - prompt_tokens

    def coverage(self) -> ModelStatus:
        return self._routes.coverage()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        started = time.perf_counter()
        self._check(request)
        asked = self._routes.asked(request.route)
        continued_ids = request.prompt_ids if request.continues_text else ()
        text = self._tokenizer.answer_text(
            request.stop,
            continued_ids=continued_ids,
            shown_ids=request.shown_ids,
            thoughts=request.thoughts,
        )
        ends = self._new_ends(request)
        beginning = self._beginning(request)
        chain: Chain | None = None
        is_finished = False
        self.num_running += 1
        try:
            chain = await self._switchboard.open_chain(
                asked, self._chain_options(request), deadline_s=request.deadline_s, beginning=beginning
            )
            progress = AnswerProgress(request, ends, chain, text, started, first_position=chain.num_held)
            if beginning is not None:
                await beginning.take(ends, chain.num_held)
            yield Admitted(len(request.prompt_ids), self._fingerprint(chain.route))
            await self._send_memory(progress)
            returned: Returned | None = None
            async with aclosing(self._prefill(progress)) as chunks:
                async for returned in chunks:
                    yield PrefillProgress(returned.sent.end, len(request.prompt_ids), returned.scores)
            assert returned is not None
            if not request.max_tokens:
                is_finished = True
                yield self._finished(progress, "length")
                return
            async with aclosing(self._decode(progress, returned)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        is_finished = True
                        if beginning is not None:
                            beginning.note_answer(progress.generated)
                    yield event
        except NoRouteError as error:
            raise self._routes.blamed(error, request.route) from None
        except WorkError as error:
            raise self._no_room(error, request) from None
        finally:
            self.num_running -= 1
            is_kept = chain is not None and await chain.close(keeps=is_finished)
            try:
                if beginning is not None:
                    await beginning.close(ends, chain.route if chain else None, is_kept=is_kept)
            finally:
                await ends.close()

    async def _send_memory(self, progress: AnswerProgress) -> None:
        encoded = progress.request.encoded
        if encoded is not None and encoded.memory is not None:
            await progress.ends.add_memory(encoded.memory)
            await send_memory(progress.chain, encoded.memory, deadline_s=progress.time_left_s)

    # Prefill --------------------------------------------------------------------------------------------------

    async def _prefill(self, progress: AnswerProgress) -> AsyncGenerator[Returned, None]:
        """Send the prompt in chunks, several at once; yield each with its answer."""
        prompt, size = progress.request.prompt_ids, self._chunk_rows(progress.request)
        in_flight: deque[RecordedStep] = deque()
        for start in range(progress.first_position, len(prompt), size):
            chunk = prompt[start : start + size]
            in_flight.append(await self._send_chunk(progress, chunk, start))
            if len(in_flight) == PREFILL_WINDOW:
                yield await self._take_chunk(progress, in_flight.popleft())
        while in_flight:
            yield await self._take_chunk(progress, in_flight.popleft())

    async def _send_chunk(self, progress: AnswerProgress, chunk: Sequence[int], start: int) -> RecordedStep:
        chain, ends, wire = progress.chain, progress.ends, progress.chain.first_wire
        payload = await ends.open_rows(chunk, start, wire)
        is_last = start + len(chunk) == len(progress.request.prompt_ids)
        want, rows = ends.wanted(is_last_chunk=is_last)
        if progress.request.scores_prompt:
            want, rows = Want.ALL, ()
        return await chain.send(
            payload,
            position=start,
            rows=len(chunk),
            want=want,
            want_rows=rows,
            deadline_s=progress.time_left_s,
        )

    async def _take_chunk(self, progress: AnswerProgress, sent: RecordedStep) -> Returned:
        answer = await progress.chain.answer(sent, deadline_s=progress.time_left_s)
        self._costs.note_chunk(sent.rows, nodes_s(answer))
        prompt = progress.request.prompt_ids
        is_last = sent.end == len(prompt)
        if progress.request.scores_prompt:
            assert isinstance(progress.ends, LocalEnds)
            next_ids, rows = prompt[sent.position + 1 : sent.end + 1], sent.rows - is_last
            scores, answer = await progress.ends.score(answer, sent.wire_back, next_ids, rows)
            return Returned(sent, answer, scores=scores)
        if not is_last and sent.want is Want.ALL:
            await progress.ends.take_chunk(answer, sent.wire_back)
        return Returned(sent, answer)

    def _chunk_rows(self, request: GenerationRequest) -> int:
        """Rows of a prefill step. Where each gets logits, no more of them than fit into memory beside the rest."""
        if not request.scores_prompt:
            return self._prefill_chunk
        return min(self._prefill_chunk, max(MIN_SCORED_ROWS, SCORED_LOGITS // self._facts.vocab_size))

    # Decode ---------------------------------------------------------------------------------------------------

    async def _decode(
        self, progress: AnswerProgress, returned: Returned
    ) -> AsyncGenerator[GenerationEvent, None]:
        """A turn: draw, send the next step, hand out the text, wait. One token, and one more for each right draft."""
        chain = progress.chain
        while True:
            drawn = await self._draw(progress, returned)
            num_before = progress.num_generated
            reason, text = self._judge(progress, drawn)
            sent = None if reason is not None else await self._send_drawn(progress, drawn)
            num_tokens = progress.num_generated - num_before
            yield TextDelta(
                text,
                num_tokens,
                timings=None if sent is None else progress.timings,
                token_ids=tuple(progress.generated[num_before:]),
                logprobs=drawn.logprobs[:num_tokens],
                watched=drawn.watched,
                scores=drawn.scores[:num_tokens],
                thought=progress.text.take_thought(),
            )
            if reason is not None:
                yield self._finished(progress, reason)
                return
            assert sent is not None
            answer = await chain.answer(sent, deadline_s=progress.time_left_s)
            returned = Returned(sent, answer, drawn.drafts)

    async def _draw(self, progress: AnswerProgress, returned: Returned) -> Drawn:
        chain, path = progress.chain, progress.chain.path
        if progress.drafts_epoch != chain.epoch:
            progress.drafts_epoch = chain.epoch
            progress.may_draft = not grouping_matters(chain.route, self._ends.runner if self._ends else None)
        due = Due(
            progress.position,
            returned.drafts,
            may_draft=progress.may_draft,
            sharing=self.num_running,
            num_stages=max(2, len(path) if path else 0),
            route=path,
        )
        drawn = await progress.ends.draw(returned.answer, due, returned.sent.wire_back, chain.first_wire)
        if progress.num_generated == 0:
            progress.first_token_at = time.perf_counter()
        elif chain.replays == progress.replays_before:  # else the trip tells nothing of what a row costs
            self._costs.note(returned.sent.rows, *progress.trip(returned.answer))
        if progress.time_left_s == 0.0:
            raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline")
        return drawn

    async def _send_drawn(self, progress: AnswerProgress, drawn: Drawn) -> RecordedStep:
        """Send the step that follows; where it lies below rows that were drafted wrongly, it overwrites them."""
        chain = progress.chain
        progress.drafted += 0 if drawn.knows_drafts else len(drawn.drafts)
        progress.trip_from = time.perf_counter()
        progress.local_before_s, progress.replays_before = progress.ends.local_s, chain.replays
        return await chain.send(
            drawn.payload,
            position=progress.position - 1,
            rows=drawn.rows,
            want=Want.ALL if drawn.drafts else Want.LAST,
            deadline_s=progress.time_left_s,
        )

    def _judge(self, progress: AnswerProgress, drawn: Drawn) -> tuple[FinishReason | None, str]:
        """Take tokens until one ends the answer; why it ends, if it does, and the text that is final by now."""
        pieces: list[str] = []
        for number, token_id in enumerate(drawn.token_ids):
            progress.num_generated += 1
            progress.generated.append(token_id)
            progress.accepted += number < drawn.num_right
            progress.forced += number < len(drawn.forced) and drawn.forced[number]
            reason, text = self._judge_token(progress, token_id)
            pieces.append(text)
            if reason is not None:
                return reason, "".join(pieces)
        return None, "".join(pieces)

    def _judge_token(self, progress: AnswerProgress, token_id: int) -> tuple[FinishReason | None, str]:
        request, text = progress.request, progress.text
        if token_id in request.stop_token_ids:
            return "stop", text.finish()
        final = text.push(token_id)
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
        if request.max_tokens < (0 if request.scores_prompt else 1):
            raise RequestError("max_tokens", "invalid_value", "an answer has at least one token")
        if max(request.prompt_ids) >= self._facts.vocab_size or min(request.prompt_ids) < 0:
            raise RequestError(
                "messages", "invalid_value", "the prompt holds a token that the model does not know"
            )
        for rows in _rows_of(request.encoded):
            assert rows == len(request.prompt_ids), "a row for each token of the prompt"
        if self._ends is None:
            self._check_thin(request)

    def _check_thin(self, request: GenerationRequest) -> None:
        """Refuse what only ends at home can do. Raises RequestError."""
        encoded = request.encoded
        if encoded is not None and (encoded.embeds is not None or encoded.places is not None):
            raise _unsupported("messages", "pictures and recordings in a prompt")
        if request.wants_logprobs or request.watched_ids:
            raise _unsupported("logprobs", "probabilities of tokens")
        if request.grammar is not None:
            raise _unsupported(request.grammar.param, "answers that are held to a form")
        if request.scores_prompt:
            raise _unsupported("echo", "probabilities of a prompt's tokens")

    def _new_ends(self, request: GenerationRequest) -> Ends:
        draft = "off" if request.encoded is not None else request.draft
        drafter = Drafter(draft, self._costs, request.prompt_ids, self._end_position(request))
        if self._ends is None:
            return RemoteEnds(
                self._facts.vocab_size, drafter, request.stop_token_ids, num_logprobs=request.num_logprobs
            )
        return LocalEnds(
            self._ends,
            request.sampling,
            request.prompt_ids,
            drafter,
            request.stop_token_ids,
            tenant=request.tenant,
            encoded=request.encoded,
            wants_logprobs=request.wants_logprobs,
            watched_ids=request.watched_ids,
            num_logprobs=request.num_logprobs,
            grammar=request.grammar,
        )

    def _beginning(self, request: GenerationRequest) -> AnswerBeginning | None:
        if self._prefixes is None or request.scores_prompt or not _has_names(request.encoded):
            return None
        digests = () if request.encoded is None else request.encoded.digests
        return self._prefixes.begin(
            request.prompt_ids, request.tenant, lambda: self._new_ends(request), digests=digests
        )

    def _no_room(self, error: WorkError, request: GenerationRequest) -> Exception:
        """Name the numbers where nodes can never hold so much."""
        if error.code is not ErrorCode.NO_ROOM:
            return error
        return no_room(error.room, request, self._room(request))

    def _room(self, request: GenerationRequest) -> int:
        """Positions that nodes set memory aside for before anything is computed."""
        usual = len(request.prompt_ids) + USUAL_TOKENS
        end = self._end_position(request)
        return min(usual, end) if request.is_open_ended else end

    def _end_position(self, request: GenerationRequest) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self._facts.max_positions)

    def _chain_options(self, request: GenerationRequest) -> ChainOptions:
        is_thin = self._ends is None
        encoded = request.encoded
        return ChainOptions(
            max_positions=self._end_position(request),
            wire=self._wire,
            hidden_size=self._facts.hidden_size,
            takes_token_ids=is_thin,
            runs_closing=is_thin,
            sampling=remote_sampling(request.sampling, request.prompt_ids, request.num_logprobs)
            if is_thin
            else None,
            tenant=self._tenants.tag(request.tenant) if self._tenants else b"",
            room=self._room(request),
            confirms=len(request.prompt_ids) > self._chunk_rows(request),
            axes=0 if encoded is None else encoded.num_axes,
            memory_rows=0 if encoded is None else encoded.memory_rows,
        )

    def _finished(self, progress: AnswerProgress, reason: FinishReason) -> Finished:
        return Finished(
            reason,
            prompt_tokens=len(progress.request.prompt_ids),
            completion_tokens=progress.num_generated,
            timings=progress.timings,
            replays=progress.chain.replays,
            fingerprint=self._fingerprint(progress.chain.route),
            route=self._routes.taken(progress.chain.route),
            drafted=progress.drafted,
            accepted=progress.accepted,
            cached_tokens=progress.first_position,
            forced=progress.forced,
            thinking_tokens=progress.text.num_thinking,
            draft_off=self._why_no_drafts(progress),
            hops=self._routes.used(progress.chain),
        )

    def _why_no_drafts(self, progress: AnswerProgress) -> str:
        """Why an answer that could have had drafts had none; empty where there may have been some."""
        if progress.request.draft == "off" or progress.request.encoded is not None:
            return ""
        return grouping_matters(progress.chain.route, self._ends.runner if self._ends else None)

    def _fingerprint(self, route: Route | None) -> str:
        runner = None if self._ends is None else self._ends.runner
        return fingerprint(self._facts.digest, runner, self._wire, route)


def _rows_of(encoded: EncodedPrompt | None) -> Iterator[int]:
    """How many rows there are of what goes with each token of the prompt."""
    if encoded is not None and encoded.embeds is not None:
        yield encoded.embeds.shape[0]
    if encoded is not None and encoded.places is not None:
        yield encoded.places.shape[1]


def _has_names(encoded: EncodedPrompt | None) -> bool:
    """Whether a prompt's beginnings can be named: by its tokens, and digests of all else that was put in."""
    if encoded is None:
        return True
    return encoded.memory is None and (encoded.embeds is None or bool(encoded.digests))


def _unsupported(param: str, what: str) -> RequestError:
    message = f"{what} need the gateway's own ends: it was started with --ends remote"
    return RequestError(param, "unsupported_by_route", message)
