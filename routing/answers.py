"""Whether an answer is what its step asked for, and where its time went.

Nodes are not trusted: sizes, kinds, positions and times are checked against what was sent. Knows no links.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.errors import ErrorCode, ProtocolError
from routing.recorded import RecordedStep
from routing.types import WIDTHS, Answer, AnswerKind, WireDtype

CANDIDATE_BYTES = 8  # u32 id, f32 logit
TOKEN_BYTES = 4
SHORT_TOKEN_BYTES = 2  # where several streams are drawn from a vocabulary that this does for


@dataclass(slots=True)
class ChainTimes:
    """Where the time of a chain's answered steps went, in seconds.

    `elapsed_s` is time that passed while answers were due, counted once; the others are sums over hops, as the
    hops tell them. `network_s` is what they leave of it: links, loops and wake-ups.
    """

    elapsed_s: float = 0.0
    compute_s: float = 0.0
    queue_s: float = 0.0
    crypto_s: float = 0.0
    network_s: float = 0.0
    steps: int = 0
    counted_until: float = 0.0

    def add(self, answer: Answer, sent: SentStep, now: float) -> None:
        """Count an answer that came at `now` (time.perf_counter())."""
        took_s = max(0.0, now - sent.sent_at)
        waited_s = max(0.0, now - max(sent.sent_at, self.counted_until))  # chunks travel together
        compute_us = queue_us = crypto_us = 0
        for trace in answer.traces[: sent.num_hops]:
            compute_us += trace.compute_us
            queue_us += trace.queue_us
            crypto_us += trace.crypto_us
        compute_s, queue_s, crypto_s = compute_us / 1e6, queue_us / 1e6, crypto_us / 1e6
        claimed_s = compute_s + queue_s + crypto_s
        share = min(1.0, took_s / claimed_s) if claimed_s else 1.0  # nobody worked longer than we waited
        self.compute_s += compute_s * share
        self.queue_s += queue_s * share
        self.crypto_s += crypto_s * share
        self.network_s += max(0.0, waited_s - claimed_s * share)
        self.elapsed_s += waited_s
        self.counted_until = now
        self.steps += 1


@dataclass(slots=True, eq=False)
class SentStep:
    """One sending of a recorded step, on one route."""

    recorded: RecordedStep
    wanted: tuple[int, ...]  # positions, counted from the step's own
    draws: bool  # the last hop chooses tokens
    wire_back: WireDtype
    hidden_size: int
    num_hops: int
    sent_at: float
    is_repeat: bool = False  # nodes of an older route may have computed it, and their times come with it
    streams: int = 1  # tokens of each row that is drawn for


def check_answer(answer: Answer, sent: SentStep) -> None:
    """Raise `ProtocolError` MALFORMED, with the last hop's number, for an answer to another question."""
    wanted, size = sent.wanted, len(answer.payload)
    first = sent.recorded.position + (wanted[0] if wanted else 0)
    num_rows = len(wanted) * (1 if sent.draws else sent.recorded.branches)
    if (answer.rows, answer.position) != (num_rows, first):
        raise _malformed(sent, "answers other rows than it was asked for")
    if sent.recorded.is_call:  # who made the call looks at what is in the answer
        if answer.kind is not AnswerKind.CALL:
            raise _malformed(sent, "returns something else than a call's streams")
        return
    if sent.draws and wanted:
        if size % (num_rows * sent.streams) or not _holds_tokens(
            answer, size // num_rows // sent.streams, sent
        ):
            raise _malformed(sent, "returns no tokens")
    elif answer.kind is not AnswerKind.HIDDEN_STATES:
        raise _malformed(sent, "returns tokens where hidden states are due")
    elif size != (due := num_rows * sent.hidden_size * WIDTHS[sent.wire_back]):
        raise _malformed(sent, f"returns {size} bytes where {due} are due")


def _holds_tokens(answer: Answer, size: int, sent: SentStep) -> bool:
    """Whether an answer that has so many bytes for each token of a row can be what was drawn."""
    if answer.kind is AnswerKind.CANDIDATES:
        return size > 0 and size % CANDIDATE_BYTES == 0
    is_short = size == SHORT_TOKEN_BYTES and sent.streams > 1
    return answer.kind is AnswerKind.TOKEN_IDS and (size == TOKEN_BYTES or is_short)


def _malformed(sent: SentStep, text: str) -> ProtocolError:
    hop = sent.num_hops - 1
    return ProtocolError(ErrorCode.MALFORMED, f"hop {hop} {text}", hop=hop)
