"""The Responses request as a typed model, and the chat request that asks the same.

Stateless: nothing is kept between requests, so whatever needs a memory is refused by name. Fields that are not of this
endpoint go on to the chat request, which accepts, refuses and ignores them by its own rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from app.api.errors import ApiError, from_exception, from_validation, is_client_gone, unsupported
from app.api.messages import MAX_ITEMS, Lenient, refuse
from app.api.protocol import MAX_NAME, ChatRequest, Effort, Number, parse_chat
from app.api.responses_input import Conversation, Input, conversation_of

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
# What needs a store, or work behind the client's back, with the values that ask for nothing.
NOT_KEPT: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
# Fields of a chat, by what they are called here.
CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "functions": "tools",
    "function_call": "tool_choice",
}
ONE_ANSWER = "there is one answer to a request here"


class FunctionTool(Lenient):
    """A function of the client's that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = f"{kind[:40]!a} tools are not supported: only functions of the client's own are"
            raise refuse(message, field="type", code="unsupported_parameter")
        return tool

    def for_chat(self) -> dict[str, Any]:
        told = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": told}


class AllowedTool(Lenient):
    """A tool by its name."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


class ToolChoice(Lenient):
    """A choice that names functions."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool] | None, Field(max_length=MAX_ITEMS)] = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, choice: Any) -> Any:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
            raise refuse(f"{kind[:40]!a} is not supported", field="type", code="unsupported_parameter")
        return choice

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name in ("name",) if self.type == "function" else ("mode", "tools"):
            if getattr(self, name) is None:
                raise refuse("it is missing", field=name)
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.type == "function":
            return {"type": "function", "function": {"name": self.name}}
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


Word = Literal["none", "auto", "required"]
AnyChoice = Annotated[
    Annotated[Word, Tag("word")] | Annotated[ToolChoice, Tag("object")],
    Discriminator(lambda choice: "word" if isinstance(choice, str) else "object"),
]


class TextFormat(Lenient):
    """What the text of the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type == "json_schema":
            for name, value in (("name", self.name), ("schema", self.json_schema)):
                if value is None:
                    raise refuse("it is missing", field=name)
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        told = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": told}

    def told(self) -> dict[str, Any]:
        """Return it as the answer repeats it."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}


class TextField(Lenient):
    """The text of the answer. `verbosity` is ignored."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningField(Lenient):
    """How much to think. There are no summaries: reasoning is told as it is."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ObfuscationOptions(Lenient):
    """Ignored: deltas are not padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Lenient):
    """A Responses request; None means the default everywhere. A chat's sampling fields and `diffuse` work here, too."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: Input
    instructions: str | None = Field(default=None, repr=False)

    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[Number | None, Field(ge=0, le=2)] = None
    top_p: Annotated[Number | None, Field(gt=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[str] | None, Field(max_length=64)] = None

    tools: Annotated[list[FunctionTool] | None, Field(max_length=MAX_ITEMS)] = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None

    text: TextField | None = None
    reasoning: ReasoningField | None = None
    truncation: Literal["disabled"] | None = None

    stream: bool | None = None
    stream_options: ObfuscationOptions | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA, repr=False)] = None
    safety_identifier: Annotated[str | None, Field(max_length=512)] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=512)] = None

    @model_validator(mode="before")
    @classmethod
    def _keeps_nothing(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("truncation") == "auto":
            message = "input is never cut: 'disabled' is all there is"
            raise refuse(message, field="truncation", code="unsupported_parameter")
        return body

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream", field="stream_options")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def text_format(self) -> TextFormat:
        chosen = self.text.format if self.text else None
        return chosen or TextFormat(type="text")


class AskedResponse:
    """A valid request, with the chat that it comes to and the way back from its field names to ours."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Raises `ApiError` 400 that names the first wrong field."""
        _refuse_foreign(body)
        try:
            self.request = ResponsesRequest.model_validate(body)
        except ValidationError as error:
            raise _named(error) from None
        self._is_text = isinstance(body.get("input"), str)
        self._told = conversation_of(self.request.instructions, self.request.input)
        with self.renaming():
            self.chat: ChatRequest = parse_chat(chat_body(body, self.request, self._told))

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Turn refusals of a chat's field into those of the field here that it came from."""
        try:
            yield
        except Exception as error:
            if is_client_gone(error):
                raise
            failure = from_exception(error)
            if failure.param is None:
                raise
            raise self._renamed(failure) from None

    def _renamed(self, failure: ApiError) -> ApiError:
        old = failure.param or ""
        new = self._name(old)
        message = failure.message.replace(f"'{old}'", f"'{new}'")
        return ApiError(failure.status, failure.code, message, param=new, headers=failure.headers)

    def _name(self, param: str) -> str:
        if (found := re.fullmatch(r"messages\.(\d+)(?:\.content)?(.*)", param)) is not None:
            number = int(found[1])
            place, content = self._told.places[number] if number < len(self._told.places) else ("input", "")
            if self._is_text and place.startswith("input"):
                return "input"
            return f"{place}.{content}{found[2]}" if content and ".content" in param else place
        for pattern, name in RENAMES:
            if re.match(pattern, param):
                return re.sub(pattern, name, param, count=1)
        return param


RENAMES = (
    (r"messages\b", "input"),
    (r"(tools\.\d+)\.function\b", r"\1"),
    (r"tool_choice\.(?:function|allowed_tools)\b", "tool_choice"),
    (r"response_format\.json_schema\b", "text.format"),
    (r"response_format\b", "text.format"),
    (r"max_(?:completion_)?tokens\b", "max_output_tokens"),
    (r"reasoning_effort\b", "reasoning.effort"),
    (r"logprobs\b", "include"),
)


def chat_body(body: Mapping[str, Any], asked: ResponsesRequest, told: Conversation) -> dict[str, Any]:
    """Return the body of the chat request that asks the same."""
    extras = {name: value for name, value in body.items() if name not in ResponsesRequest.model_fields}
    choice = asked.tool_choice
    own = {
        "max_completion_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "logprobs": True if asked.wants_logprobs else None,
        "top_logprobs": asked.top_logprobs if asked.wants_logprobs else None,
        "tools": [tool.for_chat() for tool in asked.tools or ()] or None,
        "tool_choice": choice.for_chat() if isinstance(choice, ToolChoice) else choice,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "response_format": None if asked.text_format.type == "text" else asked.text_format.for_chat(),
        "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
        "stream_options": {"include_usage": True} if asked.stream else None,
    }
    return (
        extras
        | {name: value for name, value in own.items() if value is not None}
        | {
            "model": asked.model,
            "messages": told.messages,
            "n": 1,
            "stream": bool(asked.stream),
            "continue_final_message": False,  # an item of the answer is always a new one
        }
    )


def _refuse_foreign(body: Mapping[str, Any]) -> None:
    """Refuse what needs a memory, and a chat's fields under a chat's names."""
    for name, neutral in NOT_KEPT.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise unsupported(name, f"'{name}' is not supported: nothing is kept between requests here")
    for name, ours in CHAT_NAMES.items():
        if body.get(name) not in (None, False, []):
            raise unsupported(name, f"'{name}' is called '{ours}' here")
    if body.get("n") not in (None, 1):
        raise unsupported("n", ONE_ANSWER)


def _named(error: ValidationError) -> ApiError:
    """Name the field, without our tags of a union's members."""
    failure = from_validation(error)
    old = failure.param or ""
    new = re.sub(r"^tool_choice\.(?:word|object)\b", "tool_choice", old)
    message = failure.message.replace(f"'{old}'", f"'{new}'")
    return ApiError(failure.status, failure.code, message, param=new or None, headers=failure.headers)
