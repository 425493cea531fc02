"""Finds the end of JSON that comes in pieces. Pure text."""

from __future__ import annotations


class JsonScanner:
    """Finds where a JSON object or list that is fed in pieces ends; `depth`: it has begun before."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return the place behind its last character, or None where it goes on."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None
