"""Text models that see or hear: pictures and recordings are encoded at home, then it is text like any other.

What goes to nodes are hidden states behind the first layers, as always; no pixel, no sample and nothing that an
encoder took. The encoding is `prompt_reader`'s, the answer `text`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from app.engine.opened import Opened
from app.engine.over_text import OverText
from app.engine.prompt_reader import PromptReader
from app.engine.request import GenerationEvent, GenerationRequest
from app.engine.text import ChainTextEngine


def new_engine(opened: Opened) -> MultimodalEngine:
    """The engine of an opened model."""
    reader = PromptReader(opened.home, opened.encoding, is_thin=opened.settings.is_thin)
    return MultimodalEngine(opened.new_text_engine(), reader)


class MultimodalEngine(OverText):
    """A TextEngine whose prompts `prompt_reader` makes."""

    def __init__(self, text: ChainTextEngine, prompt_reader: PromptReader) -> None:
        super().__init__(text)
        self.prompt_reader = prompt_reader

    @property
    def num_running(self) -> int:
        return self._text.num_running

    def answer_room(self, prompt_tokens: int) -> int:
        return self._text.answer_room(prompt_tokens)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        return self._text.generate(request)
