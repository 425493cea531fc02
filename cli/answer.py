"""A question and the pieces of its answer, the same whether a gateway or our own engine answers.

Light on purpose: `query --url` must not import torch to print a few words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

ChatMessage = dict[str, Any]  # {"role": ..., "content": ...}, as the chat API has it


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask. None leaves a choice to the model's own defaults."""

    messages: tuple[ChatMessage, ...] = field(repr=False)
    raw_prompt: str | None = field(default=None, repr=False)  # continue this text, without the chat template
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False  # measure a fixed number of tokens
    draft: str | None = None  # off, lookup or auto: guess tokens ahead


@dataclass(frozen=True, slots=True)
class Timings:
    """Where an answer's time went, in seconds over the whole answer; None where that is not told."""

    total_s: float
    prefill_s: float
    tokens: int
    decode_s: float = 0.0
    compute_s: float | None = None  # on the nodes
    local_s: float | None = None  # the ends and the sampler, in the gateway
    network_s: float | None = None
    crypto_s: float | None = None
    queue_s: float | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first, which prefill paid for."""
        return self.decode_s / (self.tokens - 1) if self.tokens > 1 and self.decode_s > 0 else None

    def shares(self) -> Iterator[tuple[str, float]]:
        """Seconds of computing (nodes and ends), on the network, and sealing, as far as they are known."""
        if self.compute_s is not None:
            yield "compute", self.compute_s + (self.local_s or 0.0)
        if self.network_s is not None:
            yield "network", self.network_s
        if self.crypto_s is not None:
            yield "crypto", self.crypto_s

    def shares_per_token(self, before: Timings) -> Iterator[tuple[str, float]]:
        """The same per token, over the tokens that came after `before`."""
        earlier = dict(before.shares())
        if num_tokens := self.tokens - before.tokens:
            for name, value in self.shares():
                yield name, (value - earlier.get(name, 0.0)) / num_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more text of the answer; `timings` are those so far, where known."""

    text: str = field(repr=False)
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete."""

    finish_reason: str
    timings: Timings
    prompt_tokens: int
    completion_tokens: int
    replays: int = 0
    fingerprint: str = ""
    drafted: int = 0  # tokens guessed ahead
    accepted: int = 0  # of them part of the answer

    def usage(self) -> dict[str, Any]:
        """Token counts under the names the chat API uses."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


class Answerer(Protocol):
    """Whoever answers: a gateway over HTTP, or the engine in this process."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""

    def answer(self, question: Question) -> AsyncGenerator[Piece | End, None]:
        """Yield pieces, then exactly one `End`; raise otherwise. Closing the generator cancels the answer."""
