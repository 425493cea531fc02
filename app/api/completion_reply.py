"""The answer to a completion request in OpenAI's shapes: the whole of it, or chunk by chunk. Pure; knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from app.api.chat_reply import (
    AnswerTimings,
    CompletionTokensDetails,
    DraftsField,
    PromptTokensDetails,
    RouteHopField,
    Usage,
    drafts_of,
    route_of,
    total_timings,
    usage,
)
from app.api.echo import Echo, legacy_shown
from app.api.logprobs import finite
from app.api.messages import Lenient
from app.api.token_alignment import TokenAligner, ToldToken
from app.engine.request import Finished, GenerationRequest, TextDelta
from app.engine.tokenizer import ChatTokenizer
from slicing.token_scores import TokenScore


class CompletionLogprobs(Lenient):
    """The tokens of a choice or a chunk, all lists of one length; null of the very first token of a prompt.

    `text_offset` counts characters of the choice's text.
    """

    tokens: list[str] = []  # noqa: RUF012 - pydantic copies it
    token_logprobs: list[float | None] = []  # noqa: RUF012
    top_logprobs: list[dict[str, float] | None] = []  # noqa: RUF012
    text_offset: list[int] = []  # noqa: RUF012


class CompletionChoice(Lenient):
    """One answer: of prompt p and n answers each, those from p * n on."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class Completion(Lenient):
    """The whole answer of a request without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    timings: AnswerTimings
    replays: int = 0
    drafts: DraftsField
    route: list[RouteHopField]


class LegacyLogprobs:
    """Writes the tokens of one choice in the shape of completions, as its text comes."""

    def __init__(self, tokenizer: ChatTokenizer, request: GenerationRequest, echo: Echo | None) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._prompt_ids = request.prompt_ids
        self._shift = len(echo.text) if echo is not None else 0
        self._num_told = 0  # characters
        pieces = tokenizer.pieces(request.prompt_ids)
        self._aligner = TokenAligner(pieces, request.stop_token_ids)

    def prompt(self, scores: Sequence[TokenScore]) -> CompletionLogprobs:
        """The tokens of the prompt, of which the first has no score."""
        assert self._echo is not None
        shown = self._echo.shown
        rest = zip(shown[1:], scores, strict=True)
        return CompletionLogprobs(
            tokens=list(shown),
            token_logprobs=[None, *(finite(score.logprob) for score in scores)],
            top_logprobs=[None, *(self._top(name, score) for name, score in rest)],
            text_offset=list(self._echo.offsets),
        )

    def take(self, delta: TextDelta) -> CompletionLogprobs:
        """The tokens that can be told with a delta's text."""
        self._num_told += len(delta.text)
        return self._written(self._aligner.take(delta.text, delta.scores))

    def finish(self) -> CompletionLogprobs:
        """Those that are left, and the token that ended the answer, if one did."""
        written = self._written(self._aligner.finish())
        end = self._aligner.end
        if end is None:
            return written
        name = self._tokenizer.name_of(end.token_id)
        last = CompletionLogprobs(
            tokens=[name],
            token_logprobs=[finite(end.logprob)],
            top_logprobs=[self._top(name, end)],
            text_offset=[self._shift + self._num_told],
        )
        return joined([written, last])

    def _written(self, told: Iterable[ToldToken]) -> CompletionLogprobs:
        made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in told:
            name = legacy_shown(self._tokenizer, one.score.token_id, one.data)
            made.tokens.append(name)
            made.token_logprobs.append(finite(one.score.logprob))
            made.top_logprobs.append(self._top(name, one.score))
            made.text_offset.append(self._shift + one.begin)
        return made

    def _top(self, name: str, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens by their text, and the one that stands there. Of two alike the likelier is told."""
        top: dict[str, float] = {}
        for token_id, logprob in score.top:
            shown = legacy_shown(self._tokenizer, token_id, self._tokenizer.bytes_of(token_id))
            top.setdefault(shown, finite(logprob))
        own = finite(score.logprob)
        top[name] = max(own, top.get(name, own))
        return top


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        tokens=[one for part in parts for one in part.tokens],
        token_logprobs=[one for part in parts for one in part.token_logprobs],
        top_logprobs=[one for part in parts for one in part.top_logprobs],
        text_offset=[one for part in parts for one in part.text_offset],
    )


class CompletionReply:
    """Builds the parts of one answer; `id`, `created` and `model` are the same in all of them."""

    def __init__(
        self, completion_id: str, created: int, model: str, *, num_choices: int, counts_usage: bool = False
    ) -> None:
        """`num_choices` are those of each prompt."""
        self.id = completion_id
        self.created = created
        self.model = model
        self.fingerprint = ""
        self._num_choices = num_choices
        self._counts_usage = counts_usage  # then chunks before the usage chunk carry `usage: null`

    def completion(
        self,
        texts: Sequence[str],
        logprobs: Sequence[CompletionLogprobs | None],
        ends: Sequence[Finished],
    ) -> Completion:
        """Return the whole answer, choice by choice."""
        choices = [
            CompletionChoice(index=index, text=text, logprobs=told, finish_reason=end.reason)
            for index, (text, told, end) in enumerate(zip(texts, logprobs, ends, strict=True))
        ]
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._usage_of(ends),
            system_fingerprint=self._fingerprint_of(ends),
            timings=AnswerTimings(**asdict(total_timings([end.timings for end in ends]))),
            replays=sum(end.replays for end in ends),
            drafts=drafts_of(ends),
            route=route_of(ends[0]),
        )

    def text_chunk(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        told = None if logprobs is None else logprobs.model_dump()
        choice = {"index": index, "text": text, "logprobs": told, "finish_reason": reason}
        chunk = self._envelope() | {"choices": [choice]}
        return chunk | {"usage": None} if self._counts_usage else chunk

    def finish_chunk(self, index: int, logprobs: CompletionLogprobs | None, end: Finished) -> dict[str, Any]:
        self.fingerprint = end.fingerprint or self.fingerprint
        return self.text_chunk(index, "", logprobs, end.reason) | self._told([end])

    def usage_chunk(self, ends: Sequence[Finished]) -> dict[str, Any]:
        counted = {"choices": [], "usage": self._usage_of(ends).model_dump()}
        return self._envelope() | counted | self._told(ends)

    def _told(self, ends: Sequence[Finished]) -> dict[str, Any]:
        replays = sum(end.replays for end in ends)
        timings = asdict(total_timings([end.timings for end in ends])) | {"replays": replays}
        route = [hop.model_dump(mode="json") for hop in route_of(ends[0])]
        return {
            "timings": timings,
            "replays": replays,
            "drafts": drafts_of(ends).model_dump(),
            "route": route,
        }

    def _usage_of(self, ends: Sequence[Finished]) -> Usage:
        """Each prompt counts once, however many answers it has."""
        by_prompt = [
            ends[first : first + self._num_choices] for first in range(0, len(ends), self._num_choices)
        ]
        counted = usage(
            sum(of_one[0].prompt_tokens for of_one in by_prompt), sum(end.completion_tokens for end in ends)
        )
        drafts = drafts_of(ends)
        details = CompletionTokensDetails(
            accepted_prediction_tokens=drafts.accepted,
            rejected_prediction_tokens=drafts.drafted - drafts.accepted,
        )
        cached = sum(min(end.cached_tokens for end in of_one) for of_one in by_prompt)
        return counted.model_copy(
            update={
                "completion_tokens_details": details,
                "prompt_tokens_details": PromptTokensDetails(cached_tokens=cached),
            }
        )

    def _fingerprint_of(self, ends: Sequence[Finished]) -> str:
        return next((end.fingerprint for end in ends if end.fingerprint), self.fingerprint)

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
