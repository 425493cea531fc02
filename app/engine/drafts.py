"""Drafts: what an answer's next tokens may be, guessed from what followed the same tokens before, and when to try.

A draft changes no text: its tokens ride along with the next step, and those that are not what is drawn are undone.
So all that is decided here is cost. Knows token ids and times; nothing of models, routes or steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

DraftMode = Literal["off", "lookup", "auto"]

# Prompt lookup as in performance.md, section 9: matches of 3 tokens, else of 2; of a single one where rows are nearly
# free, beside links of tens of milliseconds: the gate knows what they cost.
LONGEST = 3
MAX_DRAFT = 15  # with the last token 16 rows, what nodes still take for a decode step
MAX_INDEXED = 1 << 14  # tokens of a prompt that are looked up: 10 ms of indexing

# The bar is 2 % of an answer's time; what is left covers what was measured wrongly.
BUDGET_SHARE = 0.015
# Rows of a small model on a CPU: 2 rows take 1.08 times as long as 1, 5 rows 1.33 times (performance.md, section 9).
ASSUMED_SHARE = 0.08
MANY_ROWS = 8  # from here on a prompt's rows cost what a row may cost at most: none of them reads the weights
HEAD_START = 0.32  # trips that `lookup` may lose before it has gained any: one draft of 4 rows
MEASURED_TRIPS = 15  # a median of so many forgets a stall, and follows a route that changes

DECAY = 0.95  # what an older draft counts beside a newer one
PRIOR_WEIGHT = 3.0  # drafts that the first guess counts for
TRY_AGAIN_AFTER = 32  # trips: texts change, and a row among so many is within the budget
# How often a draft's next token is right, guessed before any was tried: by the tokens that matched, and behind a draft
# of which every token was right.
PRIORS = {(3, True): 0.9, (2, True): 0.6, (1, True): 0.3, (3, False): 0.5, (2, False): 0.3, (1, False): 0.1}


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and how many of the last ones stood before them the last time."""

    token_ids: tuple[int, ...] = field(repr=False)
    match: int = LONGEST


NO_DRAFT = Draft(())


class PromptLookup:
    """Prompt and answer so far, by the last place where each run of one to three tokens stood."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # run of tokens: where it ended last, before the very end
        self.extend(token_ids[-MAX_INDEXED:])

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take in the tokens that follow."""
        ids, ends = self._ids, self._ends
        for token_id in token_ids:
            end = len(ids)  # runs that end here have a token after them from now on
            if end >= LONGEST:
                ends[ids[-3], ids[-2], ids[-1]] = end
            if end >= 2:
                ends[ids[-2], ids[-1]] = end
            if end >= 1:
                ends[ids[-1],] = end
            ids.append(token_id)

    def propose(self, most: int) -> Draft:
        """Return up to `most` tokens that followed the last ones the last time, the longer match first."""
        for match in range(min(LONGEST, len(self._ids)), 0, -1):
            begin = self._ends.get(tuple(self._ids[-match:]))
            if begin is not None:
                return Draft(self._from(begin, most), match)
        return NO_DRAFT

    def _from(self, begin: int, count: int) -> tuple[int, ...]:
        """What stands from `begin` on; past the end it goes on with itself, as a loop would."""
        ids = self._ids[begin : begin + count]
        period = len(self._ids) - begin
        while len(ids) < count:
            ids.append(ids[-period])
        return tuple(ids)


class TripCosts:
    """What a trip of one row takes, and what each row more adds to it: measured over the answers of one engine.

    A trip is one token's way through the nodes and the ends, in seconds. Until trips with drafts were measured, a row
    costs what it does in a prompt, or as much as a whole step: dear, so that the first drafts are short.
    """

    def __init__(self) -> None:
        self._trips: deque[float] = deque(maxlen=MEASURED_TRIPS)
        self._single: deque[float] = deque(maxlen=MEASURED_TRIPS)  # computing, of one row
        self._more: deque[float] = deque(maxlen=MEASURED_TRIPS)  # computing, of each row more
        self._prompt: deque[float] = deque(maxlen=MEASURED_TRIPS)  # computing, of each row of a prompt
        self.row_share = math.inf  # what one more row costs, in trips of one row; nothing is known yet

    def note_chunk(self, rows: int, compute_s: float) -> None:
        """So many rows of a prompt took this long to compute."""
        if rows >= MANY_ROWS:
            self._prompt.append(compute_s / rows)

    def note(self, rows: int, trip_s: float, compute_s: float) -> None:
        """A trip of so many rows took this long, computing included, which is told apart."""
        if rows == 1:
            self._trips.append(trip_s)
            self._single.append(compute_s)
        elif self._single:
            more_s = (compute_s - statistics.median(self._single)) / (rows - 1)
            self._more.append(max(0.0, more_s))
        if self._single:
            row_s = statistics.median(self._more or self._prompt or self._single)
            self.row_share = row_s / max(statistics.median(self._trips), 1e-9)


@dataclass(slots=True)
class _Chance:
    """How often a next token of a draft was right, the newer drafts counting more."""

    prior: float
    right: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        return (self.right + PRIOR_WEIGHT * self.prior) / (self.tried + PRIOR_WEIGHT)

    def note(self, right: int, tried: int) -> None:
        self.right = DECAY * self.right + right
        self.tried = DECAY * self.tried + tried


class DraftGate:
    """How many tokens of a draft are worth their rows, for one answer.

    Keeps an account in trips of one row: every row more is paid, every token that was right is earned. The balance
    never falls below what `BUDGET_SHARE` of the trips made comes to, so that an answer is never slower by more; and
    no draft is sent whose rows are dearer than what may be expected of them, but for a try now and then.
    """

    def __init__(self, mode: DraftMode, costs: TripCosts) -> None:
        self._mode = mode
        self._costs = costs
        self._balance = HEAD_START if mode == "lookup" else 0.0
        self._chances = {key: _Chance(prior) for key, prior in PRIORS.items()}
        self._follows_right = False
        self._num_idle = 0  # trips without a draft, although there was one
        self._sent: tuple[int, _Chance] | None = None  # tokens under way, and what they count for

    def begin(self, draft: Draft, *, most: int = MAX_DRAFT, sharing: int = 1) -> Draft:
        """Cut what is proposed for the next trip to what is worth sending, and book it.

        `most` is the room that the answer has left. `sharing` counts the answers that wait for each other's rows.
        """
        self._balance += BUDGET_SHARE
        self._sent = None
        chance = self._chances[draft.match, self._follows_right]
        price = self._price(sharing)
        length = min(self._worth(chance.rate, price), len(draft.token_ids), most)
        if length <= 0:
            self._num_idle += bool(draft.token_ids)
            return NO_DRAFT
        self._num_idle = 0
        self._balance -= price * length
        self._sent = length, chance
        return Draft(draft.token_ids[:length], draft.match)

    def end(self, num_right: int) -> None:
        """The trip is over: so many of the draft's tokens were right."""
        if self._sent is None:
            self._follows_right = False
            return
        (length, chance), self._sent = self._sent, None
        self._follows_right = num_right == length
        chance.note(num_right, min(num_right + 1, length))
        self._balance += num_right

    def _worth(self, rate: float, price: float) -> int:
        """Tokens whose rows are worth it and can be paid."""
        length, expected = 0, rate
        while length < MAX_DRAFT and expected > price:
            length, expected = length + 1, expected * rate
        if length == 0 and self._num_idle >= TRY_AGAIN_AFTER:
            length = 1
        return length if price == 0.0 else min(length, int(self._balance / price))

    def _price(self, sharing: int) -> float:
        """What a row costs, in trips; without end while nothing is known."""
        if self._mode == "off":
            return math.inf
        if self._mode == "lookup":
            return ASSUMED_SHARE
        return self._costs.row_share * max(1, sharing)


class Drafter:
    """The drafts of one answer. Used by one thread at a time."""

    def __init__(
        self, mode: DraftMode, costs: TripCosts, prompt_ids: Sequence[int], end_position: int
    ) -> None:
        """`end_position` is where the answer ends at the latest: its last token stands before it."""
        self._gate = DraftGate(mode, costs)
        self._is_off = mode == "off"
        self._prompt_ids = prompt_ids
        self._position = len(prompt_ids)
        self._end_position = end_position
        self._lookup: PromptLookup | None = None

    @property
    def room(self) -> int:
        """Tokens that the next step may carry behind the last one: it draws one more than it carries."""
        return max(0, self._end_position - 1 - self._position)

    def next(
        self, token_ids: Sequence[int], num_right: int, *, is_allowed: bool = True, sharing: int = 1
    ) -> tuple[int, ...]:
        """Take in what was drawn, `num_right` of it as drafted; return the tokens to send behind the last of it."""
        self._position += len(token_ids)
        if self._is_off:
            return ()
        if self._lookup is None:
            self._lookup, self._prompt_ids = PromptLookup(self._prompt_ids), ()
        self._gate.end(num_right)
        self._lookup.extend(token_ids)
        if not is_allowed or self.room < 1:
            return ()
        return self._gate.begin(self._lookup.propose(MAX_DRAFT), most=self.room, sharing=sharing).token_ids


def kept_of(
    drawn: Iterable[int], drafts: Sequence[int], stop_token_ids: frozenset[int] = frozenset()
) -> tuple[list[int], int]:
    """Take drawn tokens while each equals its draft, the first that does not included, and none behind a stop token.

    Returns them and how many were drafts; takes no more of `drawn` than that.
    """
    kept: list[int] = []
    num_right = 0
    for number, token_id in enumerate(drawn):
        kept.append(token_id)
        is_right = number < len(drafts) and token_id == drafts[number]
        num_right += is_right
        if not is_right or token_id in stop_token_ids:
            break
    return kept, num_right
