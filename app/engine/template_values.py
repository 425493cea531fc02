"""Values of messages and tools as chat templates want them. Pure: dictionaries and texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def text_parts(text: str) -> list[dict[str, str]]:
    """A text as content in parts."""
    return [{"type": "text", "text": text}]


def thinking_parts(thought: str, said: str) -> list[dict[str, str]]:
    """A thought and what is said as content in parts."""
    return [{"type": "thinking", "thinking": thought}, *(text_parts(said) if said else ())]


def only(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One field of a message, where it has it."""
    return {name: message[name]} if name in message else {}


def as_text(arguments: Any) -> str:
    """Arguments of a call as a JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def keys(value: Any) -> Iterator[str]:
    """Yield all keys in a value, wherever they stand."""
    if isinstance(value, Mapping):
        yield from map(str, value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from keys(one)


def with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want the arguments as an object; OpenAI sends them as a JSON string."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # the model wrote it; the template gets it as it is
            function["arguments"] = arguments
    return {**call, "function": function}
