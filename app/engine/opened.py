"""One model as it was opened, and the engine that is made of it: what the kinds of models differ in.

An engine is imported with the first model of its kind. Knows nothing of loading or of how long a model stays open.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.engine.ends_queue import EndsQueue
from app.engine.model import EndsSettings, LookedUp
from app.engine.prefix import PrefixCache
from app.engine.request import ModelStatus
from app.engine.text import ChainTextEngine
from app.engine.tokenizer import ChatTokenizer
from routing.switchboard import Switchboard
from routing.types import NodeId
from slicing.model_kind import ModelKind


class OpenEngine(Protocol):
    """An engine of whatever kind, as far as a library looks at it."""

    @property
    def num_running(self) -> int:
        """How many answers it is making."""

    @property
    def model_name(self) -> str: ...

    def coverage(self) -> ModelStatus:
        """See `app.engine.request.AnyEngine`."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine is made of. `home` are the parts that `app.engine.home_parts` loaded for its kind.

    `encoding` is one thread, for what is computed at home around an answer: encoders before it, a codec behind it.
    """

    found: LookedUp
    settings: EndsSettings
    switchboard: Switchboard
    tokenizer: ChatTokenizer | None  # None: a music model's belongs to `home`
    ends: EndsQueue | None  # None: thin
    encoding: Executor
    home: Any = None
    excluded: frozenset[NodeId] = field(default_factory=frozenset)
    prefixes: PrefixCache | None = None

    def new_text_engine(self) -> ChainTextEngine:
        """The engine that makes text of prompts, encoded or not."""
        assert self.tokenizer is not None
        return ChainTextEngine(
            self.found.facts,
            self.tokenizer,
            self.switchboard,
            self.ends,
            self.found.middle,
            wire=self.settings.wire_dtype,
            prefill_chunk=self.settings.prefill_chunk,
            excluded=self.excluded,
            prefixes=self.prefixes,
        )


def new_engine(opened: Opened) -> OpenEngine:
    """The engine of an opened model."""
    match opened.found.kind:
        case ModelKind.TEXT:
            return opened.new_text_engine()
        case ModelKind.SEQ2SEQ:
            from app.engine import seq2seq

            return seq2seq.new_engine(opened)
        case ModelKind.MULTIMODAL:
            from app.engine import multimodal

            return multimodal.new_engine(opened)
        case ModelKind.SPEECH:
            from app.engine import transcription

            return transcription.new_engine(opened)
        case ModelKind.MUSIC:
            from app.engine import music

            return music.new_engine(opened)
        case ModelKind.ENCODER | ModelKind.EMBEDDING:
            from app.engine import embedding

            return embedding.new_engine(opened)
