"""Which tokens a Whisper may draw next, from what it has drawn so far: suppressed tokens, and timestamps in pairs.

Before them an answer may begin with tokens of given ranges: language and task, which the model would be told in its
prompt if the language were known. The rules of Radford et al. 2022 ("Robust Speech Recognition via Large-Scale Weak
Supervision"), as transformers' `SuppressTokens`, `SuppressTokensAtBegin` and `WhisperTimeStamp` processors have them,
in that order. A pure function of logits and drawn tokens: a step that is repeated or rolled back is judged the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch

KIND: Final = "whisper"
MAX_SUPPRESSED: Final = 1024
MAX_ID: Final = 2**31
MAX_FORCED: Final = 8
NUM_FIXED: Final = 7  # of the flat list: kind, end, first timestamp, first limit, and three counts
NONE: Final = -1  # in the flat list, for what is not there


@dataclass(frozen=True, slots=True)
class WhisperRule:
    """What may not be drawn, as token ids.

    Timestamps are the ids from `first_timestamp` on; without one the answer has none, and only `suppressed` counts. The
    first token drawn is a timestamp of at most `first_limit` steps, if there is a limit. `end_id` ends an answer; the
    ids below it are text. The answer begins with the most probable id of each of the half-open ranges `forced`, at any
    temperature; the rules count from there on.
    """

    end_id: int
    suppressed: tuple[int, ...] = field(default=(), repr=False)
    suppressed_first: tuple[int, ...] = field(default=(), repr=False)
    first_timestamp: int | None = None
    first_limit: int | None = None
    forced: tuple[tuple[int, int], ...] = ()

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `ValueError` when a value makes no sense, or, where it is known, none for this vocabulary."""
        numbers = [self.end_id, *self.suppressed, *self.suppressed_first]
        numbers += [number for number in (self.first_timestamp, self.first_limit) if number is not None]
        numbers += [number for pair in self.forced for number in pair]
        if any(type(number) is not int or not 0 <= number < MAX_ID for number in numbers):
            raise ValueError("rule names something that is no token id")
        if max(len(self.suppressed), len(self.suppressed_first)) > MAX_SUPPRESSED:
            raise ValueError(f"rule suppresses more than {MAX_SUPPRESSED} tokens")
        if len(self.forced) > MAX_FORCED or any(low >= high for low, high in self.forced):
            raise ValueError("rule forces tokens of no range")
        if self.first_timestamp is not None and self.first_timestamp <= self.end_id:
            raise ValueError("rule has timestamps below the end of an answer")
        if vocab_size is not None and (last := self._last_id()) >= vocab_size:
            raise ValueError(f"rule names token {last}, but the vocabulary ends at {vocab_size - 1}")

    def to_list(self) -> list[Any]:
        """Return one flat list, ready for msgpack: what travels is not nested deeply."""
        fixed = [KIND, self.end_id, _number(self.first_timestamp), _number(self.first_limit)]
        counts = [len(self.suppressed), len(self.suppressed_first), len(self.forced)]
        ranges = [number for pair in self.forced for number in pair]
        return [*fixed, *counts, *self.suppressed, *self.suppressed_first, *ranges]

    @classmethod
    def from_list(cls, values: object) -> Self:
        """Read what `to_list` wrote, maybe by a peer. Raises `ValueError`."""
        if not isinstance(values, list | tuple) or len(values) < NUM_FIXED or values[0] != KIND:
            raise ValueError("rule is not one that is known here")
        if any(type(number) is not int for number in values[1:]):
            raise ValueError("rule holds something that is no number")
        end_id, first_timestamp, first_limit, *counts = values[1:NUM_FIXED]
        ids = tuple(values[NUM_FIXED:])
        if min(counts) < 0 or counts[0] + counts[1] + 2 * counts[2] != len(ids):
            raise ValueError("rule is not whole")
        first, ranges = counts[0], ids[counts[0] + counts[1] :]
        made = cls(
            end_id,
            ids[:first],
            ids[first : first + counts[1]],
            _optional(first_timestamp),
            _optional(first_limit),
            tuple(zip(ranges[::2], ranges[1::2], strict=True)),
        )
        made.validate()
        return made

    def apply(self, logits: torch.Tensor, drawn: Sequence[int]) -> None:
        """Set what may not follow the tokens `drawn` to minus infinity, in place; `logits` are float32 [vocab]."""
        if len(drawn) < len(self.forced):
            _force(logits, *self.forced[len(drawn)])
            return
        drawn = drawn[len(self.forced) :]
        if not drawn:
            logits[list(self.suppressed_first)] = -torch.inf
        logits[list(self.suppressed)] = -torch.inf
        if self.first_timestamp is not None:
            self._apply_pairs(logits, drawn, self.first_timestamp)
            _prefer_timestamps(logits, self.first_timestamp)

    def _last_id(self) -> int:
        ids = [self.end_id, self.first_timestamp or 0, *self.suppressed, *self.suppressed_first]
        return max(ids + [high - 1 for _, high in self.forced])

    def _apply_pairs(self, logits: torch.Tensor, drawn: Sequence[int], first: int) -> None:
        """Timestamps come in pairs (one ends a segment, one begins the next) and never go back."""
        logits[first - 1] = -torch.inf  # "no timestamps": there are some
        is_last = bool(drawn) and drawn[-1] >= first
        is_last_but_one = len(drawn) < 2 or drawn[-2] >= first
        if is_last and is_last_but_one:
            logits[first:] = -torch.inf
        elif is_last:
            logits[: self.end_id] = -torch.inf
        if latest := next((token_id for token_id in reversed(drawn) if token_id >= first), 0):
            may_repeat = is_last and not is_last_but_one
            logits[first : latest + (not may_repeat)] = -torch.inf
        if not drawn:
            logits[:first] = -torch.inf
            if self.first_limit is not None:
                logits[first + self.first_limit + 1 :] = -torch.inf


def _force(logits: torch.Tensor, low: int, high: int) -> None:
    """Leave the best of a range alone."""
    best = low + int(logits[low:high].argmax())
    value = logits[best].clone()
    logits.fill_(-torch.inf)
    logits[best] = value


def _prefer_timestamps(logits: torch.Tensor, first: int) -> None:
    """Where timestamps are together more probable than any one text token, only they are left."""
    logprobs = logits.log_softmax(dim=-1)
    if logprobs[first:].logsumexp(dim=-1) > logprobs[:first].max():
        logits[:first] = -torch.inf


def _number(value: int | None) -> int:
    return NONE if value is None else value


def _optional(number: int) -> int | None:
    return None if number == NONE else number
