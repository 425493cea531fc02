"""The two ends of a model for one session, at home or on the first and last node.

`LocalEnds` runs embedding, first and last layers, norm, head and sampler in the gateway; `RemoteEnds` sends token
ids and takes shortlists or drawn ids. Both turn tokens into a step's payload and an answer into the next token.
Knows nothing of links or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Buffer, SliceSpec, Want, WireDtype
from slicing.buffers import DTYPES, from_buffer, to_buffer
from slicing.runner import PlainRunner
from slicing.sampler import Sampler, SamplingParams

CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])


@dataclass(frozen=True, slots=True)
class NextToken:
    """A drawn token and the payload of the step that would follow it."""

    token_id: int
    payload: Buffer = field(repr=False)


class Ends(Protocol):
    """One session's ends. All methods compute: they run in the gateway's compute thread."""

    def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        """The payload of a step that feeds `token_ids` at `position`."""

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        """Which rows of a prefill chunk this end needs back."""

    def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        """Rows of a prefill chunk that is not the last: feed the last layers that are here."""

    def next_token(
        self, answer: Answer, position: int, wire_back: WireDtype, wire_out: WireDtype
    ) -> NextToken:
        """The token at `position`, drawn from the answer to the step before it."""

    def close(self) -> None:
        """Free keys and values."""


class LocalEnds:
    """Embedding and first K layers, last J layers, norm, head and sampler, in this process."""

    def __init__(
        self, runner: PlainRunner, middle: SliceSpec, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        self._runner = runner
        self._middle = middle
        self._opening = runner.new_cache()
        self._closing = runner.new_cache()  # its own: the opening end runs one step ahead of the closing one
        self._has_last_layers = middle.end < runner.num_layers
        self._sampler = Sampler(params, runner.vocab_size, prompt_ids)
        self._is_closed = False

    def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        rows = torch.tensor(list(token_ids), dtype=torch.int64)
        hidden_states = self._runner.run_opening(self._opening, rows, position, end=self._middle.start)
        return to_buffer(hidden_states, DTYPES[wire.name.lower()])

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        if self._has_last_layers:
            return Want.ALL, ()
        return (Want.LAST, ()) if is_last_chunk else (Want.LIST, ())

    def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        if self._has_last_layers:
            self._close_rows(answer, wire, keep=())

    def next_token(
        self, answer: Answer, position: int, wire_back: WireDtype, wire_out: WireDtype
    ) -> NextToken:
        logits = self._close_rows(answer, wire_back, keep=None)
        token_id = self._sampler.sample(logits[-1], position)
        self._sampler.observe(token_id)
        if position >= self._runner.max_positions:
            return NextToken(token_id, b"")
        return NextToken(token_id, self.open_rows((token_id,), position, wire_out))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._opening.close()
        self._closing.close()

    def _close_rows(self, answer: Answer, wire: WireDtype, keep: Sequence[int] | None) -> torch.Tensor:
        runner = self._runner
        rows = from_buffer(answer.payload, DTYPES[wire.name.lower()], runner.hidden_size, dtype=runner.dtype)
        if not bool(torch.isfinite(rows).all()):
            raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
        position = answer.position if self._has_last_layers else answer.position + answer.rows - rows.shape[0]
        return runner.run_closing(self._closing, rows, position, start=self._middle.end, keep=keep)


class RemoteEnds:
    """Thin mode: the first node embeds token ids, the last one draws; no weights here."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        return np.asarray(token_ids, dtype="<i4").tobytes()

    def wanted(self, *, is_last_chunk: bool) -> tuple[Want, tuple[int, ...]]:
        return (Want.LAST, ()) if is_last_chunk else (Want.LIST, ())

    def take_chunk(self, answer: Answer, wire: WireDtype) -> None:
        """Nothing is run here."""

    def next_token(
        self, answer: Answer, position: int, wire_back: WireDtype, wire_out: WireDtype
    ) -> NextToken:
        if answer.kind is AnswerKind.CANDIDATES:
            best = np.frombuffer(answer.payload, dtype=CANDIDATE)[0]
            token_id = int(best["id"])
            if not np.isfinite(best["logit"]):
                raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
        else:
            token_id = int(np.frombuffer(answer.payload, dtype="<u4")[-1])
        if token_id >= self._vocab_size:
            raise ProtocolError(ErrorCode.MALFORMED, "the last node drew a token outside the vocabulary")
        return NextToken(token_id, self.open_rows((token_id,), position, wire_out))

    def close(self) -> None:
        """Nothing is held here."""


def remote_sampling(params: SamplingParams, prompt_ids: Sequence[int]) -> dict[str, object]:
    """What the last node needs to draw: the parameters, and which ids the prompt holds if it must know them."""
    seen = sorted(set(prompt_ids)) if params.repetition_penalty != 1.0 else []
    return {"params": params.to_map(), "prompt_ids": seen}
