"""Finds stop strings in a text that arrives in pieces, and holds back what might become one. Pure text."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on up to the first stop string.

    Looks at one character after the other (Knuth, Morris, Pratt 1977), so where tokens are cut makes no
    difference. The stop string that is complete first wins; of two that end together, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Return what is now certain not to be part of a stop string; "" for ever once one was found."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            num_stop_chars = self._advance(character)
            if num_stop_chars:
                self.is_stopped, self._held = True, ""
                return seen[: end - num_stop_chars]
        num_certain = len(seen) - max(self._matched)
        self._held = seen[num_certain:]
        return seen[:num_certain]

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Move on by one character; return the length of the longest stop string that ends here, or 0."""
        found = 0
        for which, (stop, failures) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != character:
                matched = failures[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                found = max(found, matched)
            self._matched[which] = matched
        return found


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper border."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return table
