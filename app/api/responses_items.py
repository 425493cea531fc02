"""The items of an answer while they are being told: each knows its events, and what it amounts to so far."""

from __future__ import annotations

import secrets
from typing import Any, Literal, Protocol

Events = list[tuple[str, dict[str, Any]]]  # names, and their fields without a number
ItemStatus = Literal["completed", "incomplete"]


class OpenItem(Protocol):
    """An item from its first event to its last."""

    item: dict[str, Any]

    def begin(self, index: int) -> Events:
        """Return the events that open it as the answer's item `index`."""
        ...

    def add(self, delta: str, logprobs: list[Any] | None = None) -> Events:
        """Return the event of what is new."""
        ...

    def close(self, status: ItemStatus) -> Events:
        """Return the events that end it, once; `item` is then whole."""
        ...


class OpenMessage:
    """Text for the user."""

    def __init__(self) -> None:
        self.item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._at: dict[str, Any] = {}

    def begin(self, index: int) -> Events:
        self._at = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        return [
            ("response.output_item.added", {"output_index": index, "item": dict(self.item)}),
            ("response.content_part.added", self._at | {"part": self._part()}),
        ]

    def add(self, delta: str, logprobs: list[Any] | None = None) -> Events:
        self._pieces.append(delta)
        self._logprobs += logprobs or []
        return [("response.output_text.delta", self._at | {"delta": delta, "logprobs": logprobs or []})]

    def close(self, status: ItemStatus) -> Events:
        part = self._part()
        self.item |= {"status": status, "content": [part]}
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", self._at | text),
            ("response.content_part.done", self._at | {"part": part}),
            ("response.output_item.done", {"output_index": self._at["output_index"], "item": self.item}),
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class OpenReasoning:
    """What the model thought, as it is."""

    def __init__(self) -> None:
        self.item: dict[str, Any] = {
            "id": f"rs_{secrets.token_hex(12)}",
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        self._pieces: list[str] = []
        self._at: dict[str, Any] = {}

    def begin(self, index: int) -> Events:
        self._at = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        return [
            ("response.output_item.added", {"output_index": index, "item": dict(self.item)}),
            ("response.content_part.added", self._at | {"part": self._part()}),
        ]

    def add(self, delta: str, logprobs: list[Any] | None = None) -> Events:
        self._pieces.append(delta)
        return [("response.reasoning_text.delta", self._at | {"delta": delta})]

    def close(self, status: ItemStatus) -> Events:
        part = self._part()
        self.item |= {"status": status, "content": [part]}
        return [
            ("response.reasoning_text.done", self._at | {"text": part["text"]}),
            ("response.content_part.done", self._at | {"part": part}),
            ("response.output_item.done", {"output_index": self._at["output_index"], "item": self.item}),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}


class OpenCall:
    """A call of one of the client's functions; `call_id` is what its answer will name."""

    def __init__(self, call_id: str, name: str) -> None:
        self.item: dict[str, Any] = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        self._pieces: list[str] = []
        self._at: dict[str, Any] = {}

    def begin(self, index: int) -> Events:
        self._at = {"item_id": self.item["id"], "output_index": index}
        return [("response.output_item.added", {"output_index": index, "item": dict(self.item)})]

    def add(self, delta: str, logprobs: list[Any] | None = None) -> Events:
        self._pieces.append(delta)
        return [("response.function_call_arguments.delta", self._at | {"delta": delta})]

    def close(self, status: ItemStatus) -> Events:
        arguments = "".join(self._pieces)
        self.item |= {"status": status, "arguments": arguments}
        done = {"name": self.item["name"], "arguments": arguments}
        return [
            ("response.function_call_arguments.done", self._at | done),
            ("response.output_item.done", {"output_index": self._at["output_index"], "item": self.item}),
        ]
