"""From a valid chat request to what the engine is asked: prompt ids, sampling, limits, one request per choice.

Precedence for sampling: the request, then the model's `generation_config.json`, then neutral values.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.api.errors import ApiError, invalid
from app.api.protocol import ChatRequest
from app.engine.drafts import DraftMode
from app.engine.request import GenerationRequest, TextEngine
from app.engine.route_options import ANY_ROUTE, RouteOptions
from slicing.sampler import SamplingParams


async def plan_generation(
    asked: ChatRequest,
    engine: TextEngine,
    request_id: str,
    *,
    deadline_s: float | None = None,
    route: RouteOptions = ANY_ROUTE,
    draft: DraftMode = "auto",
    tenant: bytes = b"",
) -> tuple[GenerationRequest, ...]:
    """Return one engine request per choice. Raises `ApiError` or `RequestError` for what does not fit the model."""
    sampling = sampling_params(asked, engine)
    prompt_ids = await _render(asked, engine)
    room = engine.max_positions - len(prompt_ids)
    if room < 1:
        raise context_exceeded(engine, len(prompt_ids))
    tokenizer = engine.tokenizer
    first = GenerationRequest(
        request_id=f"{request_id}-0",
        model=engine.model_name,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=min(asked.token_limit or room, room),
        stop=asked.stops,
        stop_token_ids=frozenset() if asked.ignore_eos else tokenizer.stop_token_ids,
        deadline_s=deadline_s,
        continues_text=asked.continues_text,
        route=route,
        draft=draft,
        tenant=tenant,
        is_open_ended=not asked.token_limit,
    )
    return tuple(
        replace(first, request_id=f"{request_id}-{index}", sampling=replace(sampling, stream=index))
        for index in range(asked.num_choices)
    )


def sampling_params(asked: ChatRequest, engine: TextEngine) -> SamplingParams:
    """Choose every sampling value; without a seed, a random one."""
    defaults = engine.tokenizer.defaults
    top_k = _first(asked.top_k, defaults.top_k)
    return SamplingParams(
        temperature=float(_first(asked.temperature, defaults.temperature)),
        top_k=max(0, int(top_k)),  # -1 and 0 both mean off
        top_p=float(_first(asked.top_p, defaults.top_p)),
        min_p=float(_first(asked.min_p, defaults.min_p)),
        repetition_penalty=float(_first(asked.repetition_penalty, defaults.repetition_penalty)),
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=_logit_bias(asked, engine.vocab_size),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
    )


def context_exceeded(engine: TextEngine, num_tokens: int | None = None) -> ApiError:
    """The prompt leaves no room for an answer; clients recognise the wording."""
    counted = "more" if num_tokens is None else f"{num_tokens} tokens"
    message = (
        f"This model's maximum context length is {engine.max_positions} tokens, "
        f"but the messages have {counted}. Please reduce the length of the messages."
    )
    return ApiError(400, "context_length_exceeded", message, param="messages")


async def _render(asked: ChatRequest, engine: TextEngine) -> tuple[int, ...]:
    messages = [message.for_template() for message in asked.messages]
    if (
        _num_chars([messages, asked.template_variables])
        > engine.max_positions * engine.tokenizer.max_token_chars
    ):
        raise context_exceeded(engine)  # cannot fit, whatever its tokens: not worth minutes of encoding
    return await asyncio.to_thread(
        engine.tokenizer.render,
        messages,
        continue_final=asked.continues_text,
        variables=asked.template_variables,
    )


def _num_chars(value: Any) -> int:
    """Count the characters of all texts in messages; what a template leaves out is counted too."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(_num_chars, value.values()))
        case list():
            return sum(map(_num_chars, value))
        case _:
            return 0


def _logit_bias(asked: ChatRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = sorted((int(token_id), value) for token_id, value in (asked.logit_bias or {}).items())
    if bias and bias[-1][0] >= vocab_size:
        raise invalid("logit_bias", f"token {bias[-1][0]} is outside the vocabulary of {vocab_size}")
    return tuple(bias)


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked
