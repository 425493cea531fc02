"""Which tokens the text that is out by now is made of: text waits for whole characters and stop strings, tokens do not.

Pure; knows no HTTP. Joined, the bytes of the tokens told are the UTF-8 of the text told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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

    def __init__(self, pieces: TokenPieces, stop_token_ids: frozenset[int]) -> None:
        self._pieces = pieces
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
            piece = self._pieces.push(score.token_id)
            self._waiting.append(_Waiting(score, piece, self._num_decoded))
            self._num_decoded += len(piece.text)
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
        waiting, self._waiting = self._waiting, deque()
        if self._num_told == self._num_decoded:
            return [_whole(one) for one in waiting]
        return [_cut(one, self._num_told) for one in waiting if one.begin < self._num_told]


def _whole(one: _Waiting) -> ToldToken:
    return ToldToken(one.score, one.piece.data, one.begin)


def _cut(one: _Waiting, end: int) -> ToldToken:
    """What is left of a token before character `end`."""
    gone = one.piece.text[max(0, end - one.begin) :]
    num_gone = len(gone.encode("utf-8", "replace")) + one.piece.num_open
    data = one.piece.data
    return ToldToken(one.score, data[: max(0, len(data) - num_gone)], one.begin)
