"""The input of a Responses request: its items, and the chat messages that say the same.

Every refusal names the item. An assistant's turn comes as several items (reasoning, message, calls) and becomes one
message, as chat templates want it. What pictures and recordings hold `media_parts` finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from app.api.messages import MAX_ITEMS, ImageUrl, InputAudio, Lenient, refuse

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
PARTS = (*TEXT_PARTS, "refusal", "input_image", "input_audio")
UNSUPPORTED_PARTS = ("input_file", "input_video", "computer_screenshot")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
STORED_ITEMS = ("item_reference", "compaction")  # they point at what a server with a memory holds


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class InputPart(Lenient):
    """A piece of an item's content."""

    type: Literal[
        "input_text",
        "output_text",
        "text",
        "summary_text",
        "reasoning_text",
        "refusal",
        "input_image",
        "input_audio",
    ]
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
            raise refuse(f"{kind} parts are not supported", field="type", code="unsupported_parameter")
        if isinstance(kind, str) and kind not in PARTS:
            raise refuse(f"unknown part type {kind[:40]!a}", field="type")
        if isinstance(part, dict) and part.get("file_id") is not None:
            raise refuse("no files are kept here", field="file_id", code="unsupported_parameter")
        return part

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        name = {"input_image": "image_url", "input_audio": "input_audio", "refusal": "refusal"}.get(
            self.type, "text"
        )
        if getattr(self, name) is None:
            raise refuse("it is missing", field=name)
        return self

    def for_chat(self) -> dict[str, Any]:
        """Return it as a part of a chat message."""
        match self.type:
            case "input_image" if self.image_url is not None:
                return {"type": "image_url", "image_url": {"url": self.image_url.url}}
            case "input_audio" if self.input_audio is not None:
                return {"type": "input_audio", "input_audio": self.input_audio.model_dump()}
            case "refusal":
                return {"type": "refusal", "refusal": self.refusal}
            case _:
                return {"type": "text", "text": self.text}


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise refuse("it is a string or a list of parts")
    return content


Parts = Annotated[list[InputPart], Field(max_length=MAX_ITEMS)]
Content = Annotated[
    Parts | None, BeforeValidator(_as_parts, json_schema_input_type=str | Parts | None), Field(repr=False)
]


class InputItem(Lenient):
    """One item: a message, a call, its answer, or reasoning. Without a `type` it is a message."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: Annotated[str | None, Field(min_length=1)] = None
    name: Annotated[str | None, Field(min_length=1)] = None
    arguments: str | None = Field(default=None, repr=False)
    output: Content = None
    summary: Content = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in STORED_ITEMS:
            message = f"nothing is stored here: send the items themselves, not {kind} (clients: store=False)"
            raise refuse(message, field="type", code="unsupported_parameter")
        if isinstance(kind, str) and kind not in ITEMS:
            raise refuse(f"{kind[:40]!a} items are not supported", field="type", code="unsupported_parameter")
        return item

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise refuse(f"a {self.type} item needs it", field=name)
        return self

    @property
    def reasoning_text(self) -> str:
        """What a reasoning item says in the clear: the reasoning itself, else its summary."""
        parts = self.content or self.summary or []
        return "\n".join(part.text for part in parts if part.text)


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise refuse("it is a string or a list of items")
    return value


Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items), Field(repr=False)]


@dataclass(slots=True)
class Conversation:
    """Chat messages, and for each the field of the request that it came from, with the name of its content."""

    messages: list[dict[str, Any]] = field(default_factory=list, repr=False)
    places: list[tuple[str, str]] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: tuple[str, str]) -> None:
        self.messages.append(message)
        self.places.append(place)


def conversation_of(instructions: str | None, items: Sequence[InputItem]) -> Conversation:
    """Put items together to messages. The instructions and the system messages that follow them are one message."""
    told = Conversation()
    if instructions is not None:
        told.add(
            {"role": "system", "content": [{"type": "text", "text": instructions}]}, ("instructions", "")
        )
    thought = ""  # of the assistant's turn that is being put together
    for number, item in enumerate(items):
        place = f"input.{number}"
        last = told.messages[-1] if told.messages else {}
        match item.type:
            case "reasoning":
                thought = item.reasoning_text
                continue
            case "function_call":
                call = {"name": item.name, "arguments": item.arguments}
                if last.get("role") != "assistant" or thought:
                    last = {"role": "assistant", "content": None} | _reasoning(thought)
                    told.add(last, (place, ""))
                last.setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "function", "function": call}
                )
            case "function_call_output":
                content = [part.for_chat() for part in item.output or ()]
                told.add(
                    {"role": "tool", "tool_call_id": item.call_id, "content": content}, (place, "output")
                )
            case "message":
                content = [part.for_chat() for part in item.content or ()]
                is_system = item.role in ("system", "developer")
                if is_system and instructions is not None and len(told.messages) == 1:
                    last["content"] += content
                    continue
                message = {"role": item.role, "content": content}
                message |= _reasoning(thought) if item.role == "assistant" else {}
                told.add(message, (place, "content"))
        thought = ""
    return told


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}
