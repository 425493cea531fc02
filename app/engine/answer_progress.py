"""One answer under way: where it stands, what came back for it, and where its time went.

Knows tokens and times; leaves what is sent and drawn to the engine (`text`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.engine.ends import Ends
from app.engine.request import GenerationRequest, Timings
from app.engine.tokenizer import AnswerText
from routing.chain import Chain
from routing.recorded import RecordedStep
from routing.types import Answer
from slicing.token_scores import TokenScore


@dataclass(slots=True)
class AnswerProgress:
    """One answer under way: where it stands and where its time went."""

    request: GenerationRequest
    ends: Ends = field(repr=False)
    chain: Chain = field(repr=False)
    text: AnswerText = field(repr=False)
    started: float
    first_position: int = 0  # of the prompt, before which everything is held from an earlier answer
    first_token_at: float = 0.0
    num_generated: int = 0
    generated: list[int] = field(default_factory=list, repr=False)
    drafted: int = 0  # tokens sent as drafts
    accepted: int = 0  # of them part of the answer
    forced: int = 0  # tokens of the answer that its grammar left no choice of
    trip_from: float = 0.0  # when the step under way went out
    local_before_s: float = 0.0  # `ends.local_s` at that moment
    replays_before: int = 0
    may_draft: bool = False  # on the route of this epoch
    drafts_epoch: int = 0

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.request.prompt_ids) + self.num_generated

    def trip(self, answer: Answer) -> tuple[float, float]:
        """How long the trip took that this answer and its turn end, and how long of it somebody computed."""
        local_s = self.ends.local_s - self.local_before_s
        return time.perf_counter() - self.trip_from, nodes_s(answer) + local_s

    @property
    def time_left_s(self) -> float | None:
        """Of the request's deadline."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - (time.perf_counter() - self.started))

    @property
    def timings(self) -> Timings:
        """Of the answer so far."""
        now = time.perf_counter()
        times = self.chain.times
        first = self.first_token_at or now
        return Timings(
            total_s=now - self.started,
            prefill_s=first - self.started,
            decode_s=now - first,
            tokens=self.num_generated,
            compute_s=times.compute_s,
            network_s=times.network_s,
            crypto_s=times.crypto_s,
            queue_s=times.queue_s,
            local_s=self.ends.local_s,
        )


@dataclass(frozen=True, slots=True)
class Returned:
    """A step, the drafts it carried, and what came back for it."""

    sent: RecordedStep
    answer: Answer = field(repr=False)
    drafts: tuple[int, ...] = field(default=(), repr=False)
    scores: tuple[TokenScore, ...] = field(default=(), repr=False)  # of the prompt's tokens behind its rows


def nodes_s(answer: Answer) -> float:
    """What the nodes computed for it, by what they tell."""
    return sum([trace.compute_us for trace in answer.traces]) / 1e6
