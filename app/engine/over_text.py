"""What engines share that put something before a text engine: whatever is asked of them, they ask of it."""

from __future__ import annotations

from app.engine.request import ModelStatus
from app.engine.text import ChainTextEngine
from app.engine.tokenizer import ChatTokenizer


class OverText:
    """An engine over a text engine, for all that it does not do otherwise."""

    def __init__(self, text: ChainTextEngine) -> None:
        self._text = text

    @property
    def model_name(self) -> str:
        return self._text.model_name

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._text.tokenizer

    @property
    def is_thin(self) -> bool:
        return self._text.is_thin

    @property
    def max_positions(self) -> int:
        return self._text.max_positions

    @property
    def vocab_size(self) -> int:
        return self._text.vocab_size

    def coverage(self) -> ModelStatus:
        return self._text.coverage()
