"""Reads the arguments of a call that is written as tagged text, as it comes, and tells them as pieces of JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.engine.reasoning import certain_end
from app.engine.tagged_values import json_of, property_of, types_of
from app.engine.tool_style import Tags

ONLY_STRING = frozenset({"string"})


class TaggedArguments:
    """The arguments of one call; `parameters` is the schema that says of which types they are."""

    def __init__(self, tags: Tags, end: str, parameters: Mapping[str, Any]) -> None:
        """`end` is what closes the call."""
        self._has_lines = tags.has_lines
        self._key_begin = tags.key[0]
        self._key_end, self._value_begin = _halves(tags.key[1])
        self._value_end = tags.value_end.strip()
        self._end = end.strip()
        self._parameters = parameters
        self._step: Callable[[], bool] = self._read_between
        self._buffer = ""
        self._made: list[str] = []
        self._types: frozenset[str] = ONLY_STRING
        self._num_told = 0  # arguments
        self._has_begun = False  # the value under way
        self._is_over = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what it tells of the arguments, and what follows the call once it is over."""
        self._buffer += text
        while not self._is_over and self._buffer and self._step():
            pass
        told, self._made = "".join(self._made), []
        return told, self._buffer if self._is_over else None

    def finish(self) -> str:
        """Close what came whole, for a model that ends without closing it; a value that is cut stays so."""
        if self._is_over or self._step != self._read_between:
            return ""
        return "}" if self._num_told else "{}"

    def _read_between(self) -> bool:
        start = self._buffer.lstrip()
        if start.startswith(self._key_begin):
            self._buffer = start[len(self._key_begin) :]
            self._step = self._read_key
            return True
        marks = (self._key_begin, self._end)
        if not start.startswith(self._end) and any(mark.startswith(start) for mark in marks):
            return False
        self._buffer = start.removeprefix(self._end)
        self._made.append("}" if self._num_told else "{}")
        self._is_over = True
        return False

    def _read_key(self) -> bool:
        key, found, rest = self._buffer.partition(self._key_end)
        if self._value_begin and found:
            rest = rest.lstrip()
            if not rest.startswith(self._value_begin):
                return not self._value_begin.startswith(rest) and self._give_up()
            rest = rest[len(self._value_begin) :]
        if not found:
            return False
        if self._has_lines and not rest:
            return False  # whether a line ends here is not known yet
        self._buffer = rest.removeprefix("\n") if self._has_lines else rest
        name = key.strip()
        schema = property_of(self._parameters, name)
        self._types = ONLY_STRING if schema is None else types_of(schema, self._parameters)
        self._made.append(f"{', ' if self._num_told else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_told += 1
        self._has_begun = False
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        end = self._buffer.find(self._value_end)
        is_text = self._types == ONLY_STRING
        if end < 0 and not is_text:
            return False
        certain = end if end >= 0 else certain_end(self._buffer, (self._value_end,), strips=False)
        value = self._buffer[:certain]
        if self._has_lines and value.endswith("\n"):
            value = value[:-1]  # of the line that the mark stands on, or it is not certain yet
        if is_text:
            self._tell_text(value, is_last=end >= 0)
        else:
            self._made.append(json_of(value, self._types))
        self._buffer = self._buffer[end + len(self._value_end) if end >= 0 else len(value) :]
        self._step = self._read_between if end >= 0 else self._read_value
        return end >= 0

    def _tell_text(self, text: str, *, is_last: bool) -> None:
        opening = "" if self._has_begun else '"'
        self._has_begun = True
        inner = json.dumps(text, ensure_ascii=False)[1:-1]
        self._made.append(opening + inner + ('"' if is_last else ""))

    def _give_up(self) -> bool:
        self._made.append("}" if self._num_told else "{}")
        self._is_over = True
        return False


def _halves(mark: str) -> tuple[str, str]:
    """A mark behind an argument's name as two: what ends the name, and what begins the value where that has a mark."""
    first, second, rest = mark.partition("><") if "><" in mark else mark.partition(">\n<")
    return (f"{first}>", f"<{rest}") if second else (mark.strip(), "")
