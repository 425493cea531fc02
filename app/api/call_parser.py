"""Finds tool calls in an answer's text as it comes, in the form that its model writes them. Pure text.

Nothing is lost: what looked like a call and is none is text. What is certain is handed out at once, so an answer's
calls are the same whether it is streamed or not.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.call_marks import CLOSERS, HEADS, MAX_HEAD, OPENERS
from app.api.json_scanner import JsonScanner
from app.api.tagged_arguments import TaggedArguments
from app.engine.tool_style import ARGS, END_TOOL_CALL, ToolUse

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAMED = re.compile(rf"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{{]*)?{re.escape(ARGS)}\s*(?=\{{)")
IS_BARE = ("llama", "plain")  # a call may stand there without any opener, at the answer's beginning
BETWEEN = ",;"


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a piece of a JSON text."""

    index: int
    text: str = field(repr=False)


Piece = str | CallStart | CallArguments


class CallParser:
    """The text and the calls of one answer."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._openers = OPENERS[use.style.kind]
        self._buffer = ""  # not understood yet
        self._held = ""  # what led to the buffer, and is text if no call comes of it
        self._step: Callable[[], bool] = (
            self._read_beginning if use.style.kind in IS_BARE else self._read_text
        )
        self._json = JsonScanner()
        self._whole: tuple[JsonScanner, int] | None = (
            None  # how far a call that is read as a whole was looked at
        )
        self._tagged: TaggedArguments | None = None
        self._made: list[Piece] = []
        self._is_silent = False  # a call beyond the most that there may be
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take the text that follows; return what is certain by now."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        if self._step in (self._read_text, self._read_beginning, self._read_call):
            rest = self._held + self._buffer
            self._tell("" if self.num_calls and self._is_cut_opener(rest.strip()) else rest)
        elif self._step == self._read_between and self._buffer.strip():
            self._tell(self._buffer)
        elif self._step == self._read_tagged and self._tagged is not None:
            self._add(self._tagged.finish())
        self._buffer = self._held = ""
        return self._taken()

    def _is_cut_opener(self, rest: str) -> bool:
        """Whether no more is left than what could begin another call: an answer that was cut there has no such text."""
        return not rest or any(opener != rest and opener.startswith(rest) for opener in self._openers)

    # Steps: each takes from the buffer, and returns whether the next one may have something to do -----------------

    def _read_beginning(self) -> bool:
        """The answer's first character decides whether it may be a bare call."""
        start = self._buffer.lstrip()
        if not start:
            return False
        self._step = self._read_call if start[0] == "{" else self._read_text
        return True

    def _read_text(self) -> bool:
        """Text, up to what opens a call; whitespace before that is none of it."""
        found = min(
            ((place, opener) for opener in self._openers if (place := self._buffer.find(opener)) >= 0),
            default=None,
        )
        if found is None:
            certain = self._certain_end()
            self._tell(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        place, opener = found
        text = self._buffer[:place].rstrip()
        self._tell(text)
        self._held = self._buffer[len(text) : place + len(opener)]
        self._buffer = self._buffer[place + len(opener) :]
        self._step = self._read_call
        return True

    def _certain_end(self) -> int:
        """Where what may be the beginning of an opener begins, or the whitespace before it."""
        end = len(self._buffer)
        for opener in self._openers:
            for length in range(min(len(opener) - 1, len(self._buffer)), 0, -1):
                if self._buffer.endswith(opener[:length]):
                    end = min(end, len(self._buffer) - length)
                    break
        return len(self._buffer[:end].rstrip())

    def _read_call(self) -> bool:
        """The head of a call, or the whole of one that is written in another order."""
        start = self._buffer.lstrip()
        if not start:
            return False
        if self._use.style.kind in HEADS:
            return self._read_head(*HEADS[self._use.style.kind])
        if self._use.style.kind.startswith("mistral"):
            if start[0] == "[" and not self._held.endswith("["):
                self._held += self._buffer[: len(self._buffer) - len(start) + 1]
                self._buffer = start[1:]
                return True
            if start[0] != "{":
                return self._read_named(start)
        if start[0] != "{":
            return self._give_up()
        if self._whole is None and (head := HEAD.match(self._buffer, 0, MAX_HEAD)) is not None:
            if head[1] not in self._use.names:
                return self._give_up()
            return self._begin_call(head[1], head.end(), is_nested=True)
        scanner, num_scanned = self._whole or (JsonScanner(), 0)
        end = scanner.feed(start, num_scanned)
        if end is None:
            # The head of a call that is told as it comes may yet be complete.
            self._whole = (scanner, len(start)) if self._whole or len(self._buffer) >= MAX_HEAD else None
            return False
        self._whole = None
        return self._read_whole(start[:end], start[end:])

    def _read_head(self, mark: str, head: re.Pattern[str]) -> bool:
        """A call whose name stands before a mark."""
        end = self._buffer.find(mark, 0, MAX_HEAD)
        if end < 0:
            return len(self._buffer) >= MAX_HEAD and self._give_up()
        found = head.fullmatch(self._buffer, 0, end)
        if found is None or found[1] not in self._use.names:
            return self._give_up()
        tags = self._use.style.tags
        if tags is None:
            return self._begin_call(found[1], end, is_nested=False)
        if mark == "<":
            rest = self._buffer[end:]
            follows = (tags.key[0], END_TOOL_CALL)
            if not rest.startswith(follows):
                return not any(one.startswith(rest) for one in follows) and self._give_up()
        self._start(found[1])
        self._buffer, self._held = self._buffer[end if mark == "<" else end + 1 :], ""
        closer = tags.end or self._use.style.closer
        self._tagged = TaggedArguments(tags, closer, self._use.parameters.get(found[1], {}))
        self._step = self._read_tagged
        return True

    def _read_tagged(self) -> bool:
        """Arguments as tagged text."""
        assert self._tagged is not None
        told, rest = self._tagged.feed(self._buffer)
        self._add(told)
        self._buffer = rest or ""
        if rest is not None:
            self._step = self._read_between
        return rest is not None

    def _read_named(self, start: str) -> bool:
        """A call with its name before its arguments."""
        if (head := NAMED.match(self._buffer, 0, MAX_HEAD)) is not None:
            if head[1] not in self._use.names:
                return self._give_up()
            return self._begin_call(head[1], head.end(), is_nested=False)
        if len(self._buffer) >= MAX_HEAD:
            return self._give_up()
        name, _, behind = start.partition("[")
        could_follow = re.fullmatch(r"[\w.-]*\s*", name) is not None and (not behind or len(behind) < 200)
        return False if could_follow and (name.strip() or not behind) else self._give_up()

    def _read_whole(self, text: str, rest: str) -> bool:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return self._give_up()
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            told = arguments
        elif isinstance(arguments, dict):
            told = json.dumps(arguments, ensure_ascii=False)
        else:
            return self._give_up()
        if not isinstance(name, str) or name not in self._use.names:
            return self._give_up()
        self._start(name)
        self._add(told)
        self._buffer, self._held, self._step = rest, "", self._read_between
        return True

    def _begin_call(self, name: str, end: int, *, is_nested: bool) -> bool:
        self._start(name)
        self._buffer, self._held = self._buffer[end:], ""
        self._json, self._is_nested = JsonScanner(), is_nested
        self._step = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._json.feed(self._buffer)
        self._add(self._buffer if end is None else self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._json = JsonScanner(depth=1)
            self._step = self._read_call_end if self._is_nested else self._read_between
        return end is not None

    def _read_call_end(self) -> bool:
        """What follows the arguments, to the brace that closes the call."""
        end = self._json.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._step = self._read_between
        return end is not None

    def _read_between(self) -> bool:
        """What closes a call, and what may stand before the next."""
        start = self._buffer.lstrip()
        if not start:
            return False
        kind = self._use.style.kind
        if (closers := CLOSERS.get(kind)) is not None:
            return self._read_closers(start, closers)
        if END_TOOL_CALL.startswith(start) and start != END_TOOL_CALL:
            return False
        if start.startswith(END_TOOL_CALL):
            self._buffer, self._step = start[len(END_TOOL_CALL) :], self._read_text
            return True
        if kind == "mistral" and start[0] == "]":
            self._buffer, self._step = start[1:], self._read_text
            return True
        if start[0] in BETWEEN and (kind in IS_BARE or kind == "mistral"):
            inner = start[1:].lstrip()
            if not inner:
                return False
            if inner[0] == "{":
                self._held, self._buffer, self._step = (
                    start[: len(start) - len(inner)],
                    inner,
                    self._read_call,
                )
                return True
        if kind in IS_BARE and start[0] == "{":
            self._held, self._buffer, self._step = "", start, self._read_call
            return True
        self._buffer, self._step = start, self._read_text
        return True

    def _read_closers(self, start: str, closers: tuple[str, ...]) -> bool:
        """One mark behind a call after the other; behind them there is text, or another call."""
        for closer in closers:
            if start.startswith(closer):
                self._buffer = start[len(closer) :]
                return True
        if any(closer.startswith(start) for closer in closers):
            return False
        self._buffer, self._step = start, self._read_text
        return True

    # Pieces -----------------------------------------------------------------------------------------------------

    def _give_up(self) -> bool:
        """No call came of it: it is text, and what opened it opens nothing."""
        self._tell(self._held)
        first = len(self._buffer) - len(self._buffer.lstrip()) + 1
        self._tell(self._buffer[:first])
        self._held, self._buffer = "", self._buffer[first:]
        self._step = self._read_text
        return True

    def _tell(self, text: str) -> None:
        if text:
            self._made.append(text)

    def _start(self, name: str) -> None:
        most = self._use.most
        self._is_silent = most is not None and self.num_calls >= most
        if self._is_silent:
            return
        length = self._use.style.id_length
        call_id = f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
        self._made.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def _add(self, text: str) -> None:
        if text and not self._is_silent:
            self._made.append(CallArguments(self.num_calls - 1, text))

    def _taken(self) -> list[Piece]:
        made, self._made = self._made, []
        return made


def call_json(start: CallStart, arguments: str) -> dict[str, Any]:
    """A call as the API tells it."""
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
