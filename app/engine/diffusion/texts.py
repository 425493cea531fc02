"""Whether a text fits its encoders: pipelines cut what is too long without a word, so their tokenizers are watched.

Knows nothing of encoders, and keeps numbers only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.engine.diffusion.defaults import text_limits, tokenizers_of
from app.engine.request import RequestError

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class TextRead:
    """What one tokenizer was given: how many tokens the text has, and how many its encoder reads."""

    tokenizer: str
    param: str  # "prompt" or "negative_prompt"
    num_tokens: int
    limit: int | None  # None: it reads all


class TextLimits:
    """Counts a text before anything is computed; its tokenizers are copies, which no pipeline uses."""

    def __init__(self, pipeline: Any) -> None:
        self._limits = text_limits(pipeline)
        self._tokenizers = {
            name: copy.deepcopy(tokenizer)
            for name, tokenizer in tokenizers_of(pipeline).items()
            if name in self._limits
        }
        self._lock = threading.Lock()

    def check(self, texts: Mapping[str, str | None]) -> None:
        """Raise `RequestError` for a text (by the field it came in) of which every encoder would read a part only."""
        for param, text in texts.items():
            if not text or not self._tokenizers:
                continue
            with self._lock:
                reads = [
                    TextRead(name, param, _count(tokenizer, text, {}), self._limits[name])
                    for name, tokenizer in self._tokenizers.items()
                ]
            refuse_cut(reads)


class TextWatch:
    """Sees what one picture's tokenizers are given and cut."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.reads: list[TextRead] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the negative prompt, as the tokenizer with the most has them."""
        counts: dict[str, int] = {}
        for read in self.reads:
            counts[read.param] = max(counts.get(read.param, 0), read.num_tokens)
        return sum(counts.values())

    def watched(self, name: str, tokenizer: Any) -> Any:
        """A copy of a tokenizer, of the class it had, that tells this watch of every text."""
        kind = type(tokenizer)
        watch = self

        def call(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
            watch._note(name, tokenizer, text, kwargs)
            return kind.__call__(self, text, *args, **kwargs)

        watched = copy.copy(tokenizer)
        watched.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        return watched

    def check(self) -> tuple[str, ...]:
        """What to say of texts that one encoder cut and another did not; raises `RequestError` as `refuse_cut`."""
        refuse_cut(self.reads)
        return tuple(
            f"{read.tokenizer} reads {read.limit} of the {_name(read.param)}'s {read.num_tokens} tokens"
            for read in self.reads
            if _is_cut(read)
        )

    def _note(self, name: str, tokenizer: Any, text: Any, options: Mapping[str, Any]) -> None:
        texts = [text] if isinstance(text, str) else list(text or ())
        if not all(isinstance(one, str) for one in texts):
            return
        limit = None
        if options.get("truncation"):
            limit = options.get("max_length") or tokenizer.model_max_length
        for one in texts:
            param = "prompt" if not one or one.strip() == self._prompt.strip() else "negative_prompt"
            param = "prompt" if self._prompt.strip() in one else param  # within a template
            self.reads.append(TextRead(name, param, _count(tokenizer, one, options), limit))


def refuse_cut(reads: list[TextRead]) -> None:
    """Raise `RequestError` for a text of which no encoder reads all."""
    for param in ("prompt", "negative_prompt"):
        mine = [read for read in reads if read.param == param]
        if mine and all(_is_cut(read) for read in mine):
            longest = max(mine, key=lambda read: read.limit or 0)
            message = (
                f"the {_name(param)} has {longest.num_tokens} tokens, this model's text encoder reads "
                f"{longest.limit}: please shorten it"
            )
            raise RequestError(param, TOO_LONG, message)


def _is_cut(read: TextRead) -> bool:
    return read.limit is not None and read.num_tokens > read.limit


def _name(param: str) -> str:
    return param.replace("_", " ")


def _count(tokenizer: Any, text: str, options: Mapping[str, Any]) -> int:
    """Tokens of a text that is not cut, with what the encoder wants around it."""
    kept = {key: options[key] for key in ("add_special_tokens",) if key in options}
    encoded = type(tokenizer).__call__(
        tokenizer, [text], truncation=False, padding=False, verbose=False, **kept
    )
    return len(encoded["input_ids"][0])
