"""Text engines without a network, with the production interface: a tiny whole model, and one that follows a script.

Both count their open answers, so that a test can see that a client's leaving was noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.engine.request import (
    Admitted,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    HopUse,
    ModelStatus,
    PrefillProgress,
    RouteHop,
    TextDelta,
    Timings,
)
from app.engine.tokenizer import ChatTokenizer
from slicing.sampler import Sampler
from slicing.token_scores import TokenScore, scores_of

FINGERPRINT = "fp_test"


@dataclass
class LocalEngine:
    """A tiny random Llama run whole in this process, one full pass per token."""

    tokenizer: ChatTokenizer
    model_name: str = "tiny"
    max_positions: int = 256
    vocab_size: int = 0
    num_open: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocab_size = self.vocab_size or 400
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.max_positions,
        )
        self.model = LlamaForCausalLM(config).eval()

    def answer_room(self, prompt_tokens: int) -> int:
        return self.max_positions - prompt_tokens

    def coverage(self) -> ModelStatus:
        return ModelStatus("ready", 2)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            yield Admitted(len(request.prompt_ids), FINGERPRINT)
            if request.scores_prompt:
                yield self._scored(request)
            sampler = Sampler(request.sampling, self.vocab_size, request.prompt_ids)
            async for event in answer_with(self.tokenizer, request, self._tokens(request, sampler)):
                yield event
        finally:
            self.num_open -= 1

    @torch.inference_mode()
    def _scored(self, request: GenerationRequest) -> PrefillProgress:
        ids = request.prompt_ids
        logits = self.model(torch.tensor([ids])).logits[0].float()
        return PrefillProgress(len(ids), len(ids), scores_of(logits[:-1], ids[1:], request.num_logprobs or 0))

    async def _tokens(self, request: GenerationRequest, sampler: Sampler) -> AsyncGenerator[TokenScore, None]:
        ids = list(request.prompt_ids)
        walk = None if request.grammar is None else request.grammar.walk()
        while True:
            await asyncio.sleep(0)
            logits = torch.zeros(self.vocab_size)
            if walk is None or not walk.is_forced:
                with torch.inference_mode():
                    logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            token_id = sampler.sample(logits if walk is None else walk.masked(logits), len(ids))
            if walk is not None:
                walk.take(token_id)
            sampler.observe(token_id)
            ids.append(token_id)
            yield scores_of(logits.reshape(1, -1), (token_id,), request.num_logprobs or 0)[0]


@dataclass
class ScriptedEngine:
    """Says `script(request)`, token by token.

    `before_token(n)` may raise, or return something to wait for, before token n (-1: before admission).
    """

    tokenizer: ChatTokenizer
    script: Callable[[GenerationRequest], Sequence[int]]
    model_name: str = "scripted"
    max_positions: int = 256
    vocab_size: int = 400
    status: ModelStatus = field(default_factory=lambda: ModelStatus("ready", 30))
    before_token: Callable[[int], object] = lambda _: None
    prefill_steps: int = 0
    before_prefill: Callable[[int], object] = lambda _: None  # alike, before each step of it
    replays: int = 0
    route: tuple[RouteHop, ...] = ()
    hops: tuple[HopUse, ...] = ()
    drafts: tuple[int, int] = (0, 0)  # drafted, accepted
    forced: int = 0
    num_open: int = 0
    num_opened: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    def answer_room(self, prompt_tokens: int) -> int:
        return self.max_positions - prompt_tokens

    def coverage(self) -> ModelStatus:
        return self.status

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        self.num_opened += 1
        try:
            await self._wait(-1)
            yield Admitted(len(request.prompt_ids), FINGERPRINT)
            for step in range(self.prefill_steps):
                if asyncio.iscoroutine(waiting := self.before_prefill(step)):
                    await waiting
                yield PrefillProgress(step + 1, self.prefill_steps)
            if request.scores_prompt:
                scores = tuple(scripted_score(one, request) for one in request.prompt_ids[1:])
                yield PrefillProgress(len(request.prompt_ids), len(request.prompt_ids), scores)
            tokens = self._tokens(request)
            async for event in answer_with(self.tokenizer, request, tokens, replays=self.replays):
                is_end = isinstance(event, Finished)
                drafted, accepted = self.drafts
                told = {"route": self.route, "drafted": drafted, "accepted": accepted, "forced": self.forced}
                told |= {"hops": self.hops}
                yield replace(event, **told) if is_end else event
        finally:
            self.num_open -= 1

    async def _tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenScore, None]:
        for number, token_id in enumerate(self.script(request)):
            await self._wait(number)
            yield scripted_score(token_id, request)

    async def _wait(self, number: int) -> None:
        waiting = self.before_token(number)
        if asyncio.iscoroutine(waiting) or asyncio.isfuture(waiting):
            await waiting
        else:
            await asyncio.sleep(0)


def saying(tokenizer: ChatTokenizer, text: str) -> Callable[[GenerationRequest], list[int]]:
    """A script: `text`, one byte or known word a token, then the end token."""
    ids = tokenizer.encode(text)
    return lambda request: [*ids, min(tokenizer.stop_token_ids)]


def scripted_score(token_id: int, request: GenerationRequest) -> TokenScore:
    """Half a nat for what is said; the ids behind it are the less likely the higher."""
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(request.num_logprobs or 0))
    return TokenScore(token_id, -0.5, top)


async def answer_with(
    tokenizer: ChatTokenizer,
    request: GenerationRequest,
    tokens: AsyncGenerator[TokenScore, None],
    *,
    replays: int = 0,
) -> AsyncGenerator[GenerationEvent, None]:
    """Turn generated ids into events, as the production engine does."""
    began = time.perf_counter()
    text = tokenizer.answer_text(
        request.stop,
        continued_ids=request.prompt_ids if request.continues_text else (),
        shown_ids=request.shown_ids,
        thoughts=request.thoughts,
    )
    reason: FinishReason = "length"
    count = 0
    async for score in tokens if request.max_tokens else _no_tokens():
        count += 1
        token_id, scores = score.token_id, () if request.num_logprobs is None else (score,)
        if token_id in request.stop_token_ids:
            reason = "stop"
            yield TextDelta("", token_ids=(token_id,), scores=scores)
            break
        delta = text.push(token_id)
        yield TextDelta(
            delta,
            timings=_timings(began, count),
            token_ids=(token_id,),
            scores=scores,
            thought=text.take_thought(),
        )
        if text.is_stopped:
            reason = "stop"
            break
        if count == request.max_tokens:
            break
    await tokens.aclose()
    rest = "" if text.is_stopped else text.finish()
    thought = text.take_thought()
    if rest or thought:
        yield TextDelta(rest, num_tokens=0, thought=thought)
    yield Finished(
        reason,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=count,
        timings=_timings(began, count),
        replays=replays,
        fingerprint=FINGERPRINT,
        thinking_tokens=text.num_thinking,
    )


async def _no_tokens() -> AsyncGenerator[TokenScore, None]:
    return
    yield


def _timings(began: float, tokens: int) -> Timings:
    total_s = time.perf_counter() - began
    return Timings(
        total_s=total_s, decode_s=total_s, tokens=tokens, compute_s=0.002, network_s=0.001, crypto_s=0.0005
    )


def ids_of(values: Iterable[int]) -> Callable[[GenerationRequest], list[int]]:
    """A script: these ids as they are."""
    fixed = list(values)
    return lambda request: fixed
