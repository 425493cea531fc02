"""Text models that see or hear: pictures and recordings are encoded at home, then it is text like any other.

What goes to nodes are hidden states behind the first layers, as always; no pixel, no sample and nothing that an
encoder took. The encoding is `prompt_reader`'s, the answer `text`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from app.engine.opened import Opened
from app.engine.prompt_reader import PromptReader
from app.engine.request import GenerationEvent, GenerationRequest, ModelStatus
from app.engine.text import ChainTextEngine
from app.engine.tokenizer import ChatTokenizer


def new_engine(opened: Opened) -> MultimodalEngine:
    """The engine of an opened model."""
    reader = PromptReader(opened.home, opened.encoding, is_thin=opened.settings.is_thin)
    return MultimodalEngine(opened.new_text_engine(), reader)


class MultimodalEngine:
    """A TextEngine whose prompts `prompt_reader` makes."""

    def __init__(self, text: ChainTextEngine, prompt_reader: PromptReader) -> None:
        self._text = text
        self.prompt_reader = prompt_reader

    @property
    def num_running(self) -> int:
        return self._text.num_running

    @property
    def model_name(self) -> str:
        return self._text.model_name

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._text.tokenizer

    @property
    def max_positions(self) -> int:
        return self._text.max_positions

    @property
    def vocab_size(self) -> int:
        return self._text.vocab_size

    def answer_room(self, prompt_tokens: int) -> int:
        return self._text.answer_room(prompt_tokens)

    def coverage(self) -> ModelStatus:
        return self._text.coverage()

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        return self._text.generate(request)
