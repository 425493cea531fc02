"""Chunks of streams, which are built as dictionaries, described; tests hold them to the wire."""

from __future__ import annotations

from typing import Literal

from app.api.chat_reply import AnswerTimings, ChatReason, DraftsField, RouteHopField, Usage
from app.api.completion_reply import CompletionLogprobs
from app.api.logprobs import ChoiceLogprobs
from app.api.messages import Lenient


class FunctionDelta(Lenient):
    """What is new in a call: its name once, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Lenient):
    """What is new in one of the calls; `id` and `type` come once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Lenient):
    """What is new in a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChunkChoice(Lenient):
    """One choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatReason | None


class ChunkTimings(AnswerTimings):
    """Where the time went so far; `replays` comes with the last ones."""

    replays: int | None = None


class Prefill(Lenient):
    """How many prompt tokens have gone through the chain."""

    done: int
    total: int


class ChatChunk(Lenient):
    """One `data:` frame of a stream that is neither an error nor `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: ChunkTimings | None = None
    replays: int | None = None
    drafts: DraftsField | None = None
    route: list[RouteHopField] | None = None
    prefill: Prefill | None = None


class CompletionChunkChoice(Lenient):
    """What is new in a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Lenient):
    """One `data:` frame of a completion's stream that is neither an error nor `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    timings: ChunkTimings | None = None
    replays: int | None = None
    drafts: DraftsField | None = None
    route: list[RouteHopField] | None = None
