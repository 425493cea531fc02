"""The answer to a chat request in OpenAI's shapes: the whole of it, or chunk by chunk. Pure; knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from app.api.call_parser import CallArguments, CallStart, Piece, call_json
from app.api.choice_parts import ChoiceParts
from app.api.logprobs import ChoiceLogprobs, TokenLogprob
from app.api.messages import Lenient
from app.engine.request import Finished, PrefillProgress, Timings

ChatReason = Literal["stop", "length", "tool_calls", "function_call"]


class ErrorText(Lenient):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Lenient):
    """The body of every failed request."""

    error: ErrorText


class PromptTokensDetails(Lenient):
    """Where prompt tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(Lenient):
    """What completion tokens were for; of the tokens guessed ahead, which the answer holds and which it does not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    forced_tokens: int = 0  # that a grammar left no choice of


class Usage(Lenient):
    """Tokens of a request: the prompt counts once, completions are summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class AnswerTimings(Lenient):
    """Where an answer's time went, in seconds, as `app.engine.request.Timings` has it."""

    total_s: float
    prefill_s: float
    decode_s: float
    tokens: int
    compute_s: float
    network_s: float
    crypto_s: float
    queue_s: float
    local_s: float


class DraftsField(Lenient):
    """Tokens guessed ahead over all choices, how many were right, and why there were none where there could not be."""

    drafted: int
    accepted: int
    off: str | None = None


class CalledFunction(Lenient):
    """What is called; `arguments` is a JSON text."""

    name: str
    arguments: str


class CalledTool(Lenient):
    """A call that the assistant asks for."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Lenient):
    """What the assistant says. There is no `tool_calls` where it calls nothing, and no reasoning where it has none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: tuple[Any, ...] = ()
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under the name that other clients read
    tool_calls: list[CalledTool] | None = None
    function_call: CalledFunction | None = None  # in its place, for a request that said `functions`

    @model_serializer(mode="wrap")
    def _without_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = serialize(self)
        for name in ("tool_calls", "function_call", "reasoning_content", "reasoning"):
            if told.get(name) is None:
                told.pop(name, None)
        return told


class Choice(Lenient):
    """One of the answers asked for."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatReason


class RouteHopField(Lenient):
    """One hop of the route: the first digits of the node's id, its layers (half-open), and how it is reached."""

    node: str
    layers: tuple[int, int]
    path: Literal["direct", "relayed"]


class ChatCompletion(Lenient):
    """The whole answer of a request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    service_tier: Literal["default"] = "default"
    timings: AnswerTimings
    replays: int = 0
    drafts: DraftsField
    route: list[RouteHopField]


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Count a request's tokens."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def total_timings(timings: Sequence[Timings]) -> Timings:
    """Sum the parts over choices that ran side by side; the wall clock is that of the longest."""
    names = [field.name for field in fields(Timings)]
    together = {"total_s", "prefill_s", "decode_s"}
    merged = {
        name: max(getattr(one, name) for one in timings)
        if name in together
        else sum(getattr(one, name) for one in timings)
        for name in names
    }
    return Timings(**merged)


def route_of(end: Finished) -> list[RouteHopField]:
    """The route that an answer ended on."""
    return [
        RouteHopField(
            node=hop.node, layers=(hop.start, hop.end), path="relayed" if hop.is_relayed else "direct"
        )
        for hop in end.route
    ]


def drafts_of(ends: Sequence[Finished]) -> DraftsField:
    """What drafts did for these choices."""
    off = next((end.draft_off for end in ends if end.draft_off), None)
    return DraftsField(
        drafted=sum(end.drafted for end in ends), accepted=sum(end.accepted for end in ends), off=off
    )


def _as_json(route: Sequence[RouteHopField]) -> list[dict[str, Any]]:
    return [hop.model_dump(mode="json") for hop in route]


class ChatReply:
    """Builds the parts of one answer; `id`, `created` and `model` are the same in all of them."""

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        *,
        counts_usage: bool = False,
        tells_reasoning: bool = True,
        says_functions: bool = False,
    ) -> None:
        """`says_functions`: calls are told as `function_call`."""
        self.id = completion_id
        self.created = created
        self.model = model
        self.fingerprint = ""
        self._counts_usage = counts_usage  # then chunks before the usage chunk carry `usage: null`
        self._tells_reasoning = tells_reasoning
        self._says_functions = says_functions

    def completion(
        self,
        parts: Sequence[ChoiceParts],
        ends: Sequence[Finished],
        logprobs: Sequence[ChoiceLogprobs | None] = (),
    ) -> ChatCompletion:
        """Return the whole answer; `parts[i]`, `ends[i]` and `logprobs[i]`, if any, belong to choice i."""
        choices = [
            Choice(
                index=index,
                message=self._message(part),
                logprobs=logprobs[index] if logprobs else None,
                finish_reason=self.reason_of(end, part),
            )
            for index, (part, end) in enumerate(zip(parts, ends, strict=True))
        ]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._usage_of(ends),
            system_fingerprint=ends[0].fingerprint,
            timings=AnswerTimings(**asdict(total_timings([end.timings for end in ends]))),
            replays=sum(end.replays for end in ends),
            drafts=drafts_of(ends),
            route=route_of(ends[0]),
        )

    def reason_of(self, end: Finished, parts: ChoiceParts) -> ChatReason:
        """Why a choice ended."""
        if not parts.has_calls or end.reason != "stop":
            return end.reason
        return "function_call" if self._says_functions else "tool_calls"

    def _message(self, part: ChoiceParts) -> AnswerMessage:
        told: dict[str, Any] = {"content": part.text, "tool_calls": part.calls}
        if self._says_functions and part.calls:
            told |= {"tool_calls": None, "function_call": part.calls[0]["function"]}
        return AnswerMessage.model_validate(told | self._reasoning(part.thought))

    def _reasoning(self, thought: str | None) -> dict[str, str]:
        return (
            {"reasoning_content": thought, "reasoning": thought} if thought and self._tells_reasoning else {}
        )

    def role_chunk(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def text_chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None = None
    ) -> dict[str, Any]:
        chunk = self._chunk(index, {"content": text})
        if logprobs is not None:
            chunk["choices"][0]["logprobs"] = ChoiceLogprobs(content=list(logprobs)).model_dump()
        return chunk

    def thought_chunk(self, index: int, thought: str) -> dict[str, Any] | None:
        """More of what is thought; None where that is not told."""
        delta = self._reasoning(thought)
        return self._chunk(index, delta) if delta else None

    def piece_chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of text, the beginning of a call, or more of its arguments."""
        match piece:
            case str():
                return self.text_chunk(index, piece)
            case CallStart():
                call = {"index": piece.index} | call_json(piece, "")
            case CallArguments():
                call = {"index": piece.index, "function": {"arguments": piece.text}}
        return self._chunk(
            index, {"function_call": call["function"]} if self._says_functions else {"tool_calls": [call]}
        )

    def heartbeat_chunk(self, progress: PrefillProgress | None) -> dict[str, Any]:
        """An empty delta: clients that count only parsed chunks see that the answer is alive."""
        chunk = self._chunk(0, {})
        if progress is None:
            return chunk
        return chunk | {"prefill": {"done": progress.done, "total": progress.total}}

    def finish_chunk(self, index: int, end: Finished, reason: ChatReason) -> dict[str, Any]:
        self.fingerprint = end.fingerprint or self.fingerprint
        chunk = self._chunk(index, {}, reason)
        told = {"timings": asdict(end.timings) | {"replays": end.replays}, "replays": end.replays}
        told |= {"drafts": drafts_of([end]).model_dump()}
        return chunk | told | {"route": _as_json(route_of(end))}

    def usage_chunk(self, ends: Sequence[Finished]) -> dict[str, Any]:
        timings = asdict(total_timings([end.timings for end in ends]))
        replays = sum(end.replays for end in ends)
        counted = {"choices": [], "usage": self._usage_of(ends).model_dump()}
        told = {"timings": timings | {"replays": replays}, "replays": replays}
        told |= {"drafts": drafts_of(ends).model_dump()}
        return self._envelope() | counted | told | {"route": _as_json(route_of(ends[0]))}

    def _usage_of(self, ends: Sequence[Finished]) -> Usage:
        counted = usage(ends[0].prompt_tokens, sum(end.completion_tokens for end in ends))
        drafts = drafts_of(ends)
        details = CompletionTokensDetails(
            accepted_prediction_tokens=drafts.accepted,
            rejected_prediction_tokens=drafts.drafted - drafts.accepted,
            forced_tokens=sum(end.forced for end in ends),
            reasoning_tokens=sum(end.thinking_tokens for end in ends),
        )
        cached = PromptTokensDetails(cached_tokens=min(end.cached_tokens for end in ends))
        return counted.model_copy(
            update={"completion_tokens_details": details, "prompt_tokens_details": cached}
        )

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = self._envelope() | {"choices": [choice]}
        return chunk | {"usage": None} if self._counts_usage else chunk

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "service_tier": "default",
        }
