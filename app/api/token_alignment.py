"""Which tokens the text that is out by now is made of: text waits for whole characters and stop strings, tokens do not.

Pure; knows no HTTP. Joined, the bytes of the tokens told are the UTF-8 of the text told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from app.engine.reasoning import Part, Thoughts
from app.engine.token_pieces import TokenPiece, TokenPieces
from slicing.token_scores import TokenScore


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token of the answer; `data` is what the text holds of it, from character `begin` on."""

    score: TokenScore = field(repr=False)
    data: bytes = field(repr=False)
    begin: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    score: TokenScore = field(repr=False)
    piece: TokenPiece = field(repr=False)
    begin: int  # characters before it

    @property
    def due(self) -> int:
        """Characters told from which on it is certain that the text holds all of it."""
        return self.begin + len(self.piece.text) + (self.piece.num_open > 0)


class TokenAligner:
    """The tokens of one answer, told when their text is."""

    def __init__(
        self,
        pieces: TokenPieces,
        stop_token_ids: frozenset[int],
        thoughts: Thoughts | None = None,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """With `thoughts` only tokens of the answer are told; `shown` are texts of special tokens that are marks."""
        self._pieces = AnswerPieces(pieces, thoughts, shown or {})
        self._stop_token_ids = stop_token_ids
        self._waiting: deque[_Waiting] = deque()
        self._num_decoded = 0  # characters
        self._num_told = 0
        self.end: TokenScore | None = None  # the token that ended the answer, which is no part of its text

    def take(self, text: str, scores: Iterable[TokenScore]) -> list[ToldToken]:
        """Take tokens, and the text that is told with them; return the tokens that can be told, too."""
        for score in scores:
            if score.token_id in self._stop_token_ids:
                self.end = score
                continue
            self._note(self._pieces.push(score))
        self._num_told += len(text)
        told = []
        while self._waiting and self._waiting[0].due <= self._num_told:
            told.append(_whole(self._waiting.popleft()))
        return told

    def finish(self) -> list[ToldToken]:
        """Return the tokens that are left once all text is told.

        A stop string takes those behind it along, and cuts the one in which it begins. Without one all are told, also
        those whose character was never completed.
        """
        self._note(self._pieces.finish())
        waiting, self._waiting = self._waiting, deque()
        if self._num_told == self._num_decoded:
            return [_whole(one) for one in waiting]
        return [_cut(one, self._num_told) for one in waiting if one.begin < self._num_told]

    def _note(self, pieces: Iterable[tuple[TokenScore, TokenPiece]]) -> None:
        for score, piece in pieces:
            self._waiting.append(_Waiting(score, piece, self._num_decoded))
            self._num_decoded += len(piece.text)


class AnswerPieces:
    """The tokens of a text that belong to the answer: those of thoughts and their marks are left out."""

    def __init__(self, pieces: TokenPieces, thoughts: Thoughts | None, shown: Mapping[int, str]) -> None:
        self._pieces = pieces
        self._splitter = None if thoughts is None else thoughts.splitter()
        self._shown = shown
        self._unknown: deque[tuple[TokenScore, TokenPiece, str]] = deque()
        self._known: deque[tuple[bool, int]] = deque()  # whether it is the answer's, and so many characters
        self._is_answer = False  # what was known last

    def push(self, score: TokenScore) -> list[tuple[TokenScore, TokenPiece]]:
        """Take the next token; return those of the answer that are known by now."""
        piece = self._pieces.push(score.token_id)
        if self._splitter is None:
            return [(score, piece)]
        text = self._shown.get(score.token_id) or piece.text
        self._unknown.append((score, piece, text))
        self._learn(self._splitter.push(text))
        return list(self._ready(is_end=False))

    def finish(self) -> list[tuple[TokenScore, TokenPiece]]:
        """Return those that were not known yet."""
        if self._splitter is None:
            return []
        self._learn(self._splitter.finish())
        return list(self._ready(is_end=True))

    def _learn(self, parts: Iterable[Part]) -> None:
        self._known += [(kind == "answer", len(text)) for kind, text in parts]

    def _ready(self, *, is_end: bool) -> Iterator[tuple[TokenScore, TokenPiece]]:
        while self._unknown:
            score, piece, text = self._unknown[0]
            if sum(length for _, length in self._known) < max(len(text), 0 if is_end else 1):
                return
            self._unknown.popleft()
            if not text:  # a part of a character, which is where the next one is
                if self._known[0][0] if self._known else self._is_answer:
                    yield score, piece
                continue
            kept = self._kept(text)
            if kept == text:
                yield score, piece
            elif kept:
                yield score, TokenPiece(kept.encode("utf-8", "replace"), kept, piece.num_open)

    def _kept(self, text: str) -> str:
        """What of a token's text is the answer's."""
        kept, place = "", 0
        while place < len(text):
            self._is_answer, length = self._known.popleft()
            taken = min(length, len(text) - place)
            kept += text[place : place + taken] if self._is_answer else ""
            place += taken
            if taken < length:
                self._known.appendleft((self._is_answer, length - taken))
        return kept


def _whole(one: _Waiting) -> ToldToken:
    return ToldToken(one.score, one.piece.data, one.begin)


def _cut(one: _Waiting, end: int) -> ToldToken:
    """What is left of a token before character `end`."""
    gone = one.piece.text[max(0, end - one.begin) :]
    num_gone = len(gone.encode("utf-8", "replace")) + one.piece.num_open
    data = one.piece.data
    return ToldToken(one.score, data[: max(0, len(data) - num_gone)], one.begin)
