"""Thoughts, text and tool calls of one choice, as its text comes. Pure; knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.call_parser import CallArguments, CallParser, CallStart, Piece, call_json
from app.engine.request import GenerationRequest


class ChoiceParts:
    """Takes a choice's text apart, and gathers what came."""

    def __init__(self, request: GenerationRequest) -> None:
        self._parser = None if request.tools is None else CallParser(request.tools)
        self._texts: list[str] = []
        self._starts: list[CallStart] = []
        self._arguments: list[list[str]] = []
        self._thoughts: list[str] = []

    def think(self, thought: str) -> None:
        """Take what is thought before the text."""
        self._thoughts.append(thought)

    def push(self, text: str) -> Sequence[Piece]:
        """Return what is certain of the text so far, and was not before."""
        pieces: Sequence[Piece] = [text] if self._parser is None else self._parser.push(text)
        return self._gathered(pieces)

    def finish(self) -> Sequence[Piece]:
        """Return what was held back."""
        return [] if self._parser is None else self._gathered(self._parser.finish())

    @property
    def text(self) -> str | None:
        """The text; None where there are calls and nothing else."""
        return "".join(self._texts) or (None if self._starts else "")

    @property
    def thought(self) -> str | None:
        """What was thought, or None where nothing was."""
        return "".join(self._thoughts) or None

    @property
    def calls(self) -> list[dict[str, Any]] | None:
        """The calls, or None where there are none."""
        pairs = zip(self._starts, self._arguments, strict=True)
        return [call_json(start, "".join(pieces)) for start, pieces in pairs] or None

    @property
    def has_calls(self) -> bool:
        return bool(self._starts)

    def _gathered(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            match piece:
                case str():
                    self._texts.append(piece)
                case CallStart():
                    self._starts.append(piece)
                    self._arguments.append([])
                case CallArguments():
                    self._arguments[piece.index].append(piece.text)
        return pieces
