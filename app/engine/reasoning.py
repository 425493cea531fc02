"""How models think aloud before they answer: the marks around thoughts, and a text taken apart by them as it comes.

Pure text. Which marks a model uses its chat template and its tokenizer's own tokens say. Nothing is lost: joined, the
parts are the text as it came.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

PartKind = Literal["thought", "answer", "mark"]
Part = tuple[PartKind, str]


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """What stands before and behind a thought. Of harmony: what stands before and behind a channel's name."""

    opener: str
    closer: str
    marks: tuple[str, ...]
    is_harmony: bool = False


def _block(opener: str, closer: str) -> ReasoningStyle:
    return ReasoningStyle(opener, closer, (opener, closer))


START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HARMONY = ReasoningStyle(CHANNEL, MESSAGE, HARMONY_MARKS, is_harmony=True)
BLOCKS = (
    _block("<think>", "</think>"),
    _block("[THINK]", "[/THINK]"),
    _block("<seed:think>", "</seed:think>"),
    _block("<|START_THINKING|>", "<|END_THINKING|>"),
)
RECIPIENT = "to=functions."  # behind it is the function that a harmony message calls


def reasoning_style_of(source: str, tokens: Collection[str]) -> ReasoningStyle | None:
    """Find the marks in a chat template's source, or among a tokenizer's added tokens."""
    if CHANNEL in tokens and MESSAGE in tokens:
        return HARMONY
    for style in BLOCKS:
        if all(mark in source for mark in style.marks) or all(mark in tokens for mark in style.marks):
            return style
    return None


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How the thoughts of one answer are told apart.

    `is_open`: the prompt ends inside a thought. `shown_ids` are special tokens that are marks. `is_raw`: thoughts and
    marks stay in the text; what is said of stop strings and forms holds all the same.
    """

    style: ReasoningStyle
    is_open: bool = False
    shown_ids: frozenset[int] = frozenset()
    is_raw: bool = False

    def splitter(self) -> ThoughtSplitter:
        return HarmonySplitter() if self.style.is_harmony else BlockSplitter(self.style, is_open=self.is_open)


class ThoughtSplitter(Protocol):
    """Takes an answer's text apart."""

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought, as far as is known."""
        ...

    @property
    def is_undecided(self) -> bool:
        """Whether what came last may yet turn out to open a thought."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return what is certain of the text so far, and was not before."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back."""
        ...


class BlockSplitter:
    """One thought at the beginning, between two marks; whitespace around it is neither thought nor answer."""

    def __init__(self, style: ReasoningStyle, *, is_open: bool = False) -> None:
        self._style = style
        self._state: Literal["begin", "inside", "behind", "answer"] = "inside" if is_open else "begin"
        self._buffer = ""
        self._has_thought = False  # anything of it
        self._made: list[Part] = []

    @property
    def is_thinking(self) -> bool:
        return self._state == "inside"

    @property
    def is_undecided(self) -> bool:
        return self._state == "begin"

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        match self._state:
            case "inside":
                self._tell("thought", kept := rest.rstrip())
                self._tell("mark", rest[len(kept) :])
            case "behind":
                self._tell("mark", rest)
            case _:
                self._tell("answer", rest)
        return self._taken()

    def _step(self) -> bool:
        """Take from the buffer; return whether there may be more to take."""
        match self._state:
            case "begin":
                return self._begin()
            case "inside":
                return self._think()
            case "behind":
                return self._skip_space("answer")
            case "answer":
                self._tell("answer", self._buffer)
                self._buffer = ""
        return False

    def _begin(self) -> bool:
        start, opener = self._buffer.lstrip(), self._style.opener
        if start.startswith(opener):
            self._cut("mark", len(self._buffer) - len(start) + len(opener))
            self._state = "inside"
            return True
        if not opener.startswith(start):
            self._state = "answer"
        return self._state == "answer"

    def _think(self) -> bool:
        if not self._has_thought and not self._open():
            return False
        end = self._buffer.find(self._style.closer)
        if end >= 0:
            thought = self._buffer[:end].rstrip()
            self._cut("thought", len(thought))
            self._cut("mark", end - len(thought) + len(self._style.closer))
            self._state = "behind"
            return True
        self._cut("thought", certain_end(self._buffer, (self._style.closer,)))
        return False

    def _open(self) -> bool:
        """Pass over whitespace, and over a mark that the prompt had already; return whether there is a thought."""
        opener = self._style.opener
        while (start := self._buffer.lstrip()).startswith(opener):
            self._cut("mark", len(self._buffer) - len(start) + len(opener))
        self._cut("mark", len(self._buffer) - len(start))
        self._has_thought = bool(start) and not opener.startswith(start)
        return self._has_thought

    def _skip_space(self, then: Literal["answer"]) -> bool:
        start = self._buffer.lstrip()
        self._cut("mark", len(self._buffer) - len(start))
        if start:
            self._state = then
        return bool(start)

    def _cut(self, kind: PartKind, length: int) -> None:
        self._tell(kind, self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _tell(self, kind: PartKind, text: str) -> None:
        if text:
            self._made.append((kind, text))

    def _taken(self) -> list[Part]:
        made, self._made = self._made, []
        return made


class HarmonySplitter:
    """Messages, each with a header that names its channel: what is on `analysis` are thoughts.

    The header of a message that calls a function is part of the answer from its recipient on, for calls are read there.
    """

    STARTS = (CHANNEL, START, MESSAGE, "assistant", "to=")
    MAX_HEADER = 300  # characters; what is longer is none
    ENDS = (END, RETURN, CALL, START)

    def __init__(self) -> None:
        self._buffer = ""
        self._kind: PartKind | None = None  # of the message under way; None: in its header

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thought"

    @property
    def is_undecided(self) -> bool:
        return self._kind is None

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        made: list[Part] = []
        while self._buffer and (self._read_header(made) if self._kind is None else self._read_body(made)):
            pass
        return [part for part in made if part[1]]

    def finish(self) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        is_header = self._kind is None and self._may_be_header(rest)
        return [("mark" if is_header else self._kind or "answer", rest)] if rest else []

    def _read_header(self, made: list[Part]) -> bool:
        end = self._buffer.find(MESSAGE, 0, self.MAX_HEADER)
        if not self._may_be_header(self._buffer) or (end < 0 and len(self._buffer) > self.MAX_HEADER):
            self._kind = "answer"
            return True
        if end < 0:
            return False
        text = self._buffer[: end + len(MESSAGE)]
        recipient = text.find(RECIPIENT)
        if recipient >= 0:
            made += [("mark", text[:recipient]), ("answer", text[recipient:])]
        else:
            made.append(("mark", text))
        is_thought = f"{CHANNEL}analysis" in text and recipient < 0
        self._kind = "thought" if is_thought else "answer"
        self._buffer = self._buffer[len(text) :]
        return True

    def _may_be_header(self, text: str) -> bool:
        start = text.lstrip()
        return any(start.startswith(mark) or mark.startswith(start) for mark in self.STARTS)

    def _read_body(self, made: list[Part]) -> bool:
        assert self._kind is not None
        found = min(
            ((place, mark) for mark in self.ENDS if (place := self._buffer.find(mark)) >= 0), default=None
        )
        if found is None:
            end = certain_end(self._buffer, self.ENDS, strips=False)
            made.append((self._kind, self._buffer[:end]))
            self._buffer = self._buffer[end:]
            return False
        place, mark = found
        made.append((self._kind, self._buffer[:place]))
        length = 0 if mark == START else len(mark)
        made.append(("mark", mark[:length]))
        self._buffer = self._buffer[place + length :]
        self._kind = None
        return True


def certain_end(text: str, marks: Collection[str], *, strips: bool = True) -> int:
    """Where what may be the beginning of a mark begins, or the whitespace before it."""
    end = len(text)
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:length]):
                end = min(end, len(text) - length)
                break
    return len(text[:end].rstrip()) if strips else end
