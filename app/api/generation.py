"""From a valid chat request to what the engine is asked: the prompt, sampling, limits, one request per choice.

Precedence for sampling: the request, then the model's `generation_config.json`, then neutral values.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.api.answer_form import form_of
from app.api.errors import ApiError, invalid
from app.api.media_parts import MediaIntake
from app.api.messages import ChatMessage
from app.api.protocol import AnswerFields, ChatRequest
from app.engine.drafts import DraftMode
from app.engine.request import EncodedPrompt, GenerationRequest, TextEngine
from app.engine.route_options import ANY_ROUTE, RouteOptions
from app.request_notes import traced_part
from slicing.sampler import SamplingParams

if TYPE_CHECKING:
    from app.engine.prompt_reader import PromptReader


async def plan_generation(
    asked: ChatRequest,
    engine: TextEngine,
    request_id: str,
    intake: MediaIntake,
    *,
    deadline_s: float | None = None,
    route: RouteOptions = ANY_ROUTE,
    draft: DraftMode = "auto",
    tenant: bytes = b"",
) -> tuple[GenerationRequest, ...]:
    """Return one engine request per choice. Raises `ApiError` or `RequestError` for what does not fit the model."""
    sampling = sampling_params(asked, engine)
    began = time.perf_counter()
    async with asyncio.timeout(deadline_s):
        form = await form_of(asked, engine)
        with traced_part("render prompt"):
            prompt_ids, encoded = await read_prompt(
                asked.messages,
                engine,
                intake,
                continue_final=asked.continues_text,
                variables=asked.template_variables,
            )
        tokenizer = engine.tokenizer
        thoughts = tokenizer.thoughts(
            prompt_ids, continued=asked.continued_text, is_raw=asked.reasoning_format == "none"
        )
        if thoughts is not None and form.grammar is not None:
            form = await form_of(asked, engine, thoughts)
    room = engine.answer_room(len(prompt_ids))
    first = GenerationRequest(
        request_id=f"{request_id}-0",
        model=engine.model_name,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=min(asked.token_limit or room, room),
        stop=(*asked.stops, *form.stops),
        stop_token_ids=frozenset() if asked.ignore_eos and form.grammar is None else tokenizer.stop_token_ids,
        deadline_s=None if deadline_s is None else max(0.0, deadline_s - (time.perf_counter() - began)),
        continues_text=asked.continues_text,
        route=route,
        draft=draft,
        tenant=tenant,
        is_open_ended=not asked.token_limit,
        encoded=encoded,
        num_logprobs=asked.num_logprobs,
        grammar=form.grammar,
        tools=form.tools,
        thoughts=thoughts,
    )
    return tuple(
        replace(first, request_id=f"{request_id}-{index}", sampling=replace(sampling, stream=index))
        for index in range(asked.num_choices)
    )


def sampling_params(asked: AnswerFields, engine: TextEngine) -> SamplingParams:
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


def context_exceeded(
    engine: TextEngine, num_tokens: int | None = None, *, param: str = "messages"
) -> ApiError:
    """The prompt leaves no room for an answer. Both halves of the wording are what clients look for."""
    counted = "more" if num_tokens is None else f"{num_tokens} tokens"
    what, have = ("messages", "have") if param == "messages" else (param.partition(".")[0], "has")
    message = (
        f"This model's maximum context length is {engine.max_positions} tokens, "
        f"but the prompt is too long: the {what} {have} {counted}. Please reduce the length of the {what}."
    )
    return ApiError(400, "context_length_exceeded", message, param=param)


async def read_prompt(
    messages: Sequence[ChatMessage],
    engine: TextEngine,
    intake: MediaIntake,
    *,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], EncodedPrompt | None]:
    """Return the prompt's token ids, and what encoders made of its pictures and recordings.

    Nothing is encoded of a prompt that leaves no room for an answer. Raises `ApiError` 400 or `RequestError`.
    """
    reader: PromptReader | None = getattr(engine, "prompt_reader", None)
    variables = variables or {}
    async with intake.taken(messages, engine.model_name, reader) as media:
        told = [message.for_template(media.get(number, {})) for number, message in enumerate(messages)]
        _check_length([told, variables], engine)
        if reader is None or not reader.renders:
            return _fitting(engine, await _render(engine, told, continue_final, variables)), None
        prompt = await reader.read(told, continue_final=continue_final, variables=variables)
        return _fitting(engine, prompt.prompt_ids), await reader.encode(prompt)


async def prompt_tokens(
    messages: Sequence[ChatMessage],
    engine: TextEngine,
    intake: MediaIntake,
    *,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the prompt's token ids alone, also where they leave no room for an answer; nothing is encoded.

    Raises `ApiError` 400 or `RequestError`.
    """
    reader: PromptReader | None = getattr(engine, "prompt_reader", None)
    variables = variables or {}
    async with intake.taken(messages, engine.model_name, reader) as media:
        told = [message.for_template(media.get(number, {})) for number, message in enumerate(messages)]
        _check_length([told, variables], engine)
        if reader is None or not reader.renders:
            return await _render(engine, told, continue_final, variables)
        prompt = await reader.read(told, continue_final=continue_final, variables=variables)
        return prompt.prompt_ids


def _fitting(engine: TextEngine, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return a prompt that leaves room for an answer. Raises `ApiError`."""
    if engine.answer_room(len(prompt_ids)) < 1:
        raise context_exceeded(engine, len(prompt_ids))
    return prompt_ids


def _check_length(told: list[Any], engine: TextEngine) -> None:
    """Refuse texts that cannot fit, whatever their tokens: they are not worth minutes of encoding."""
    if _num_chars(told) > engine.max_positions * engine.tokenizer.max_token_chars:
        raise context_exceeded(engine)


async def _render(
    engine: TextEngine, told: list[dict[str, Any]], continue_final: bool, variables: Mapping[str, Any]
) -> tuple[int, ...]:
    render = engine.tokenizer.render
    return await asyncio.to_thread(render, told, continue_final=continue_final, variables=variables)


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


def _logit_bias(asked: AnswerFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = sorted((int(token_id), value) for token_id, value in (asked.logit_bias or {}).items())
    if bias and bias[-1][0] >= vocab_size:
        raise invalid("logit_bias", f"token {bias[-1][0]} is outside the vocabulary of {vocab_size}")
    return tuple(bias)


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked
