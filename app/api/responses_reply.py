"""The answer to a Responses request in OpenAI's shapes: the whole object, or event by event. Pure; knows no HTTP.

It is a translation of what a chat would answer: chunks go in, so there is one way of making answers. A whole answer
goes through as one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from app.api.chat_reply import AnswerTimings, ChatCompletion, DraftsField, RouteHopField
from app.api.errors import ApiError
from app.api.messages import Lenient
from app.api.responses_items import ItemStatus, OpenCall, OpenItem, OpenMessage, OpenReasoning
from app.api.responses_protocol import ResponsesRequest, ToolChoice
from slicing.sampler import SamplingParams

Status = Literal["in_progress", "completed", "incomplete", "failed"]
CUT: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


class FailureText(Lenient):
    """What went wrong."""

    code: str
    message: str


class IncompleteDetails(Lenient):
    """Why an answer is cut."""

    reason: str


class InputTokensDetails(Lenient):
    """Where input tokens came from; what was kept of them for later is not counted."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Lenient):
    """What output tokens were for."""

    reasoning_tokens: int = 0


class ResponseUsage(Lenient):
    """Tokens of an answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningEcho(Lenient):
    """The reasoning that was asked for."""

    effort: str | None = None
    summary: str | None = None


class ResponseObject(Lenient):
    """An answer, whole or as it stands at an event; from `system_fingerprint` on it is ours, and there at the end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: Literal[False] = False
    error: FailureText | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]

    system_fingerprint: str | None = None
    timings: AnswerTimings | None = None
    replays: int | None = None
    drafts: DraftsField | None = None
    route: list[RouteHopField] | None = None


class ResponseEvent(Lenient):
    """One event of a stream; its name is its `type`. Which fields there are depends on that."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    prefill: dict[str, int] | None = None


class ResponseReply:
    """Turns the chunks of a chat's answer into events, and keeps the object that they amount to."""

    def __init__(
        self, answer_id: str, created: int, asked: ResponsesRequest, sampling: SamplingParams
    ) -> None:
        self._object = _begun(answer_id, created, asked, sampling)
        self._items: list[OpenItem] = []
        self._reason: str | None = None
        self._told: dict[str, Any] = {}  # fields that the last chunks bring
        self._num_events = 0

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that open a stream."""
        return [self._state("response.created"), self._state("response.in_progress")]

    def take(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of one chunk; one that says nothing is told as `response.in_progress`."""
        self._told |= {name: chunk[name] for name in EXTRAS if chunk.get(name) is not None}
        if not chunk["choices"]:
            return []
        choice = chunk["choices"][0]
        delta = choice["delta"]
        self._reason = choice["finish_reason"] or self._reason
        events = self._deltas(delta, (choice.get("logprobs") or {}).get("content") or [])
        if not events and not self._reason and "role" not in delta:
            progress = {"prefill": chunk["prefill"]} if "prefill" in chunk else {}
            events = [("response.in_progress", {"response": self._dump()} | progress)]
        return [self._event(name, **fields) for name, fields in events]

    def finish(self) -> list[dict[str, Any]]:
        """Return the events that end an answer; what was said last of one that was cut is incomplete."""
        status: ItemStatus = "incomplete" if self._reason in CUT else "completed"
        events = [] if self._items else self._open(OpenMessage())
        events += self._items[-1].close(status)
        cut = CUT.get(self._reason or "")
        self._settle(
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason=cut) if cut else None,
        )
        told = [self._event(name, **fields) for name, fields in events]
        return [*told, self._state(f"response.{status}")]

    def fail(self, failure: ApiError) -> dict[str, Any]:
        """Return the event that ends an answer which broke off."""
        if self._items:
            self._items[-1].close("incomplete")
        error = FailureText(code=failure.code or "server_error", message=failure.message)
        self._settle(status="failed", error=error)
        return self._state("response.failed")

    def whole(self, completion: ChatCompletion) -> ResponseObject:
        """Return the object of an answer that is there."""
        told = completion.model_dump(mode="json")
        choice = told["choices"][0]
        message = choice["message"]
        calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        self.take(told | {"choices": [choice | {"delta": message | {"tool_calls": calls}}]})
        self.finish()
        return self._object

    def _deltas(self, delta: Mapping[str, Any], logprobs: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        events: list[tuple[str, dict[str, Any]]] = []
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._current(OpenReasoning) + self._items[-1].add(thought)
        text = delta.get("content")
        if text or (text is not None and logprobs):
            events += self._current(OpenMessage) + self._items[-1].add(text, logprobs)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                events += self._open(OpenCall(call["id"], function["name"]))
            if arguments := function.get("arguments"):
                events += self._items[-1].add(arguments)
        return events

    def _current(self, kind: type[OpenMessage] | type[OpenReasoning]) -> list[tuple[str, dict[str, Any]]]:
        is_open = bool(self._items) and isinstance(self._items[-1], kind)
        return [] if is_open else self._open(kind())

    def _open(self, item: OpenItem) -> list[tuple[str, dict[str, Any]]]:
        """End the item that was being told, and begin another."""
        events = self._items[-1].close("completed") if self._items else []
        self._items.append(item)
        return events + item.begin(len(self._items) - 1)

    def _settle(self, **fields: Any) -> None:
        told = dict(self._told)
        usage = told.pop("usage", None)
        update = fields | {"output": [item.item for item in self._items], "usage": usage and _usage(usage)}
        self._object = ResponseObject.model_validate(
            self._object.model_dump() | _plain(update) | told, strict=False
        )

    def _dump(self) -> dict[str, Any]:
        return self._object.model_dump(mode="json", exclude_none=False)

    def _state(self, name: str) -> dict[str, Any]:
        return self._event(name, response=self._dump())

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1} | fields


EXTRAS = ("usage", "system_fingerprint", "timings", "replays", "drafts", "route")


def _begun(answer_id: str, created: int, asked: ResponsesRequest, sampling: SamplingParams) -> ResponseObject:
    choice = asked.tool_choice or "auto"
    text: dict[str, Any] = {"format": asked.text_format.told()}
    if asked.text is not None and asked.text.verbosity is not None:
        text["verbosity"] = asked.text.verbosity
    return ResponseObject(
        id=answer_id,
        created_at=created,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        model=asked.model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=ReasoningEcho(**(asked.reasoning.model_dump() if asked.reasoning else {})),
        safety_identifier=asked.safety_identifier,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        text=text,
        tool_choice=choice.model_dump(exclude_none=True) if isinstance(choice, ToolChoice) else choice,
        tools=[tool.model_dump() for tool in asked.tools or ()],
        top_logprobs=asked.top_logprobs or 0,
        metadata=asked.metadata or {},
    )


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump() if isinstance(value, Lenient) else value for name, value in fields.items()
    }


def _usage(chat: Mapping[str, Any]) -> ResponseUsage:
    """Count as this endpoint does, from a chat's usage."""
    prompt = chat.get("prompt_tokens_details") or {}
    completion = chat.get("completion_tokens_details") or {}
    return ResponseUsage(
        input_tokens=chat["prompt_tokens"],
        input_tokens_details=InputTokensDetails(cached_tokens=prompt.get("cached_tokens") or 0),
        output_tokens=chat["completion_tokens"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=completion.get("reasoning_tokens") or 0),
        total_tokens=chat["total_tokens"],
    )
