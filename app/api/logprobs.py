"""Log-probabilities of an answer's tokens in OpenAI's shape for chats. Pure; knows no HTTP.

They are of the model's own distribution: as it left the head, before bias, penalties, temperature, grammar and
truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.api.messages import Lenient
from app.api.token_alignment import TokenAligner, ToldToken
from app.engine.request import GenerationRequest, TextDelta
from app.engine.tokenizer import ChatTokenizer

LOWEST = -9999.0  # what is impossible: JSON knows no infinities


class TopLogprob(Lenient):
    """One of the likeliest tokens of a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer. `bytes` is what the text holds of it, `[]` for a special token."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Lenient):
    """The tokens of a choice, or of a chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class LogprobsWriter:
    """Writes the tokens of one choice as its text comes."""

    def __init__(self, tokenizer: ChatTokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        continued_ids = request.prompt_ids if request.continues_text else ()
        thoughts = request.thoughts
        if thoughts is not None and thoughts.is_raw:
            thoughts = None  # then they are part of the text
        shown = {token_id: tokenizer.name_of(token_id) for token_id in request.shown_ids}
        pieces = tokenizer.pieces(continued_ids)
        self._aligner = TokenAligner(pieces, request.stop_token_ids, thoughts, shown)

    def take(self, delta: TextDelta) -> list[TokenLogprob]:
        """Return the tokens that can be told with a delta's text."""
        return [self._entry(told) for told in self._aligner.take(delta.text, delta.scores)]

    def finish(self) -> list[TokenLogprob]:
        """Return those that are left at the end; the end token is not among them."""
        return [self._entry(told) for told in self._aligner.finish()]

    def _entry(self, told: ToldToken) -> TokenLogprob:
        shown = shown_as(self._tokenizer, told.score.token_id, told.data)
        return TokenLogprob(
            token=shown,
            logprob=finite(told.score.logprob),
            bytes=list(told.data),
            top_logprobs=[self._top(token_id, logprob) for token_id, logprob in told.score.top],
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.bytes_of(token_id)
        shown = shown_as(self._tokenizer, token_id, data)
        return TopLogprob(token=shown, logprob=finite(logprob), bytes=list(data))


def writers_of(
    tokenizer: ChatTokenizer, requests: Sequence[GenerationRequest]
) -> list[LogprobsWriter | None]:
    """One writer for each choice that asks for probabilities."""
    return [
        None if request.num_logprobs is None else LogprobsWriter(tokenizer, request) for request in requests
    ]


def shown_as(tokenizer: ChatTokenizer, token_id: int, data: bytes) -> str:
    r"""A token as text: a special one by its name, bytes that are no whole characters as `\xe4\xbd`."""
    if not data and tokenizer.is_special(token_id):
        return tokenizer.name_of(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST
