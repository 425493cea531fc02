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
    ModelStatus,
    PrefillProgress,
    RouteHop,
    TextDelta,
    Timings,
)
from app.engine.tokenizer import ChatTokenizer
from slicing.sampler import Sampler

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
            sampler = Sampler(request.sampling, self.vocab_size, request.prompt_ids)
            async for event in answer_with(self.tokenizer, request, self._tokens(request, sampler)):
                yield event
        finally:
            self.num_open -= 1

    async def _tokens(self, request: GenerationRequest, sampler: Sampler) -> AsyncGenerator[int, None]:
        ids = list(request.prompt_ids)
        while True:
            await asyncio.sleep(0)
            with torch.inference_mode():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            token_id = sampler.sample(logits, len(ids))
            sampler.observe(token_id)
            ids.append(token_id)
            yield token_id


Pause = Callable[[int], "asyncio.Future[None] | None"]


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
    replays: int = 0
    route: tuple[RouteHop, ...] = ()
    drafts: tuple[int, int] = (0, 0)  # drafted, accepted
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
                yield PrefillProgress(step + 1, self.prefill_steps)
            tokens = self._tokens(request)
            async for event in answer_with(self.tokenizer, request, tokens, replays=self.replays):
                is_end = isinstance(event, Finished)
                drafted, accepted = self.drafts
                told = {"route": self.route, "drafted": drafted, "accepted": accepted}
                yield replace(event, **told) if is_end else event
        finally:
            self.num_open -= 1

    async def _tokens(self, request: GenerationRequest) -> AsyncGenerator[int, None]:
        for number, token_id in enumerate(self.script(request)):
            await self._wait(number)
            yield token_id

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


async def answer_with(
    tokenizer: ChatTokenizer,
    request: GenerationRequest,
    tokens: AsyncGenerator[int, None],
    *,
    replays: int = 0,
) -> AsyncGenerator[GenerationEvent, None]:
    """Turn generated ids into events, as the production engine does."""
    began = time.perf_counter()
    text = tokenizer.answer_text(
        request.stop, continued_ids=request.prompt_ids if request.continues_text else ()
    )
    reason: FinishReason = "length"
    count = 0
    async for token_id in tokens:
        count += 1
        if token_id in request.stop_token_ids:
            reason = "stop"
            break
        delta = text.push(token_id)
        yield TextDelta(delta, timings=_timings(began, count))
        if text.is_stopped:
            reason = "stop"
            break
        if count == request.max_tokens:
            break
    await tokens.aclose()
    if not text.is_stopped and (rest := text.finish()):
        yield TextDelta(rest, num_tokens=0)
    yield Finished(
        reason,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=count,
        timings=_timings(began, count),
        replays=replays,
        fingerprint=FINGERPRINT,
    )


def _timings(began: float, tokens: int) -> Timings:
    total_s = time.perf_counter() - began
    return Timings(
        total_s=total_s, decode_s=total_s, tokens=tokens, compute_s=0.002, network_s=0.001, crypto_s=0.0005
    )


def ids_of(values: Iterable[int]) -> Callable[[GenerationRequest], list[int]]:
    """A script: these ids as they are."""
    fixed = list(values)
    return lambda request: fixed
