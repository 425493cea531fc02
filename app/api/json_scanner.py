"""Finds the end of JSON that comes in pieces. Pure text."""

from __future__ import annotations

import re

IN_STRING = re.compile(r'["\\]')
OUTSIDE = re.compile(r'["{}\[\]]')


class JsonScanner:
    """Finds where a JSON object or list that is fed in pieces ends; `depth`: it has begun before."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0) -> int | None:
        """Take the text from `start` on; return the place behind its last character, or None where it goes on."""
        place = start
        if self._is_escaped and place < len(text):
            self._is_escaped = False
            place += 1
        while (found := (IN_STRING if self._in_string else OUTSIDE).search(text, place)) is not None:
            place, character = found.end(), found[0]
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return place
        return None
