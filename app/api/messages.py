"""The messages of a chat request: which shapes are accepted, and what is handed to the chat template.

Every refusal names the exact field. Pictures and recordings are carried as they were sent: whether the model takes
them, and what they hold, `media_parts` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_ITEMS = 10_000  # messages, parts or calls: far beyond any context, and cheap to refuse
PARTS = ("text", "refusal", "image_url", "input_audio")
UNSUPPORTED_PARTS = ("file", "video_url")
MEDIA_ROLES = ("user", "tool")
NO_MEDIA: Mapping[int, Any] = MappingProxyType({})

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Lenient(BaseModel):
    """Unknown fields are passed over; values must have the very type that is asked for."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)


def refuse(message: str, *, field: str | None = None, code: str = "invalid_value") -> PydanticCustomError:
    """Make a refusal; `field` is appended to the path where it is raised."""
    context: dict[str, Any] = {"text": message} | ({"field": field} if field else {})
    return PydanticCustomError(code, "{text}", context)


class ImageUrl(Lenient):
    """A picture: a data: URI, an http(s) URL, or base64 alone. `detail` is ignored."""

    url: Annotated[str, Field(min_length=1, repr=False)]


class InputAudio(Lenient):
    """A recording: base64. What it really is its content says."""

    data: Annotated[str, Field(min_length=1, repr=False)]
    format: Literal["wav", "mp3"] | None = None


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ContentPart(Lenient):
    """A piece of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio"]
    text: str | None = Field(default=None, repr=False)
    refusal: str | None = Field(default=None, repr=False)
    image_url: Annotated[
        ImageUrl | None, BeforeValidator(_as_image_url, json_schema_input_type=str | ImageUrl | None)
    ] = None
    input_audio: InputAudio | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in UNSUPPORTED_PARTS:
            raise refuse(f"{kind} parts are not supported", field=kind, code="unsupported_parameter")
        if isinstance(kind, str) and kind not in PARTS:
            raise refuse(f"unknown part type {kind[:40]!a}", field="type")
        return part

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if getattr(self, self.type) is None:
            what = "a string is missing" if self.type in ("text", "refusal") else "it is missing"
            raise refuse(what, field=self.type)
        return self

    @property
    def is_media(self) -> bool:
        return self.type in ("image_url", "input_audio")

    def for_template(self, media: Any) -> dict[str, Any]:
        """Return it as chat templates and processors know it; `media` is what it holds, decoded."""
        match self.type:
            case "image_url":
                return {"type": "image", "image": media}
            case "input_audio":
                return {"type": "audio", "audio": media}
            case "text":
                return {"type": "text", "text": self.text}
            case "refusal":
                return {"type": "text", "text": self.refusal}


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise refuse("content is a string or a list of parts")
    return content


Parts = Annotated[list[ContentPart], Field(max_length=MAX_ITEMS)]
Content = Annotated[
    Parts | None, BeforeValidator(_as_parts, json_schema_input_type=str | Parts | None), Field(repr=False)
]


class FunctionCall(Lenient):
    """What an assistant called; `arguments` is a JSON text."""

    name: str
    arguments: str = Field(default="", repr=False)


class ToolCall(Lenient):
    """One call of an assistant message in the history."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Lenient):
    """One message of the conversation."""

    role: Role
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_ITEMS)] = None
    function_call: FunctionCall | None = None
    refusal: str | None = Field(default=None, repr=False)
    reasoning_content: str | None = Field(default=None, repr=False)
    reasoning: str | None = Field(default=None, repr=False)
    audio: Any = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.audio is not None:
            raise refuse("spoken messages are not supported", field="audio", code="unsupported_parameter")
        if self.role == "tool" and not self.tool_call_id:
            raise refuse("a tool message names the call that it answers", field="tool_call_id")
        if self.role == "function" and not self.name:
            raise refuse("a function message names its function", field="name")
        if self.role not in MEDIA_ROLES and (place := next(self.media_places(), None)) is not None:
            kind = (self.content or [])[place].type
            raise refuse(f"a {self.role} message holds text alone", field=f"content.{place}.{kind}")
        is_call = self.role == "assistant" and (self.tool_calls or self.function_call or self.refusal)
        if self.content is None and not is_call and self.role != "function":
            raise refuse(f"a {self.role} message needs content", field="content")
        return self

    @property
    def is_call(self) -> bool:
        """True for an assistant message that asks for tools: there is no text to continue."""
        return bool(self.tool_calls or self.function_call)

    def media_places(self) -> Iterator[int]:
        """Say which parts of the content are pictures or recordings."""
        return (place for place, part in enumerate(self.content or ()) if part.is_media)

    def for_template(self, media: Mapping[int, Any] = NO_MEDIA) -> dict[str, Any]:
        """Return the message as chat templates know it; the legacy function call becomes a tool call.

        `media` are its pictures and recordings, decoded, by the number of the part.
        """
        message: dict[str, Any] = {"role": self.role, "content": self._parts(media)}
        calls = [call.model_dump() for call in self.tool_calls or ()]
        if self.function_call is not None and not calls:
            calls = [{"id": "call_0", "type": "function", "function": self.function_call.model_dump()}]
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return message | {name: value for name, value in optional.items() if value is not None}

    def _parts(self, media: Mapping[int, Any]) -> list[dict[str, Any]]:
        parts = [part.for_template(media.get(place)) for place, part in enumerate(self.content or ())]
        return [{"type": "text", "text": self.refusal}] if self.refusal and not parts else parts


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS)]


def continues_last(messages: Sequence[ChatMessage]) -> bool:
    """Whether the conversation ends in the middle of the assistant's own message."""
    return messages[-1].role == "assistant"


def refuse_order(messages: Sequence[ChatMessage]) -> None:
    """Refuse an end that nothing can follow."""
    if not continues_last(messages):
        return
    last = len(messages) - 1
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise refuse("two assistant messages in a row at the end", field=f"messages.{last}")
    if messages[-1].is_call:
        raise refuse("tool calls are followed by their answers", field=f"messages.{last}")
