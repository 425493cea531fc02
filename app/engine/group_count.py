"""How many groups the answers of a route go in: the number with which they moved on fastest, tried now and then.

As many groups as stages keep every machine of a chain busy; fewer and larger ones read the weights less often, which
wins where stages share a machine's cores or its memory. No rule tells which it is here, so it is measured. Knows
numbers and times, nothing of turns or routes.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

# A measurement spans so many rounds of all answers, after those that a new number takes to settle in.
MEASURED_ROUNDS, SETTLING_ROUNDS = 8, 2
KEPT = 3  # measurements of a number: the median bears one that something else disturbed
# Measurements before another number is tried; the pause grows each time that it was no better.
FIRST_TRIAL, LONGER, LONGEST_PAUSE = 2, 4, 128
TRIED = 2  # measurements in a trial, unless it turns out to be worse before
HOPELESS_ROUNDS = 2  # after which a trial that takes much longer is over
HOPELESS, WORSE, BETTER = 1.2, 1.1, 0.97


@dataclass(slots=True)
class _Known:
    """What was measured with some number of answers."""

    number: int  # of groups, for now
    pause: int = FIRST_TRIAL
    until_trial: int = FIRST_TRIAL
    trial: int = 0  # the number that is tried now; 0: none
    last_trial: int = 0
    turn_s: dict[int, deque[float]] = field(default_factory=dict)  # by number of groups, the newest last

    def usual_s(self, number: int) -> float:
        """Seconds a turn with so many groups."""
        return statistics.median(self.turn_s[number])

    def is_hopeless(self, turn_s: float) -> bool:
        """Whether the number that is tried is so much worse that the rest of it can be spared."""
        return bool(self.trial) and turn_s > HOPELESS * self.usual_s(self.number)

    def note(self, turn_s: float, most: int) -> None:
        """One more measurement of the present number; decide what comes next."""
        number = self.trial or self.number
        self.turn_s.setdefault(number, deque(maxlen=KEPT)).append(turn_s)
        if self.trial:
            self._judge(turn_s)
            return
        self.until_trial -= 1
        if self.until_trial <= 0:
            self._begin_trial(most)

    def _begin_trial(self, most: int) -> None:
        """Try a neighbour: by turns the smaller and the larger number."""
        others = [other for other in (self.number - 1, self.number + 1) if 1 <= other <= most]
        others.sort(key=lambda other: other == self.last_trial)
        if others:
            self.trial = others[0]
            self.turn_s.pop(self.trial, None)  # what was measured then may hold no longer

    def _judge(self, turn_s: float) -> None:
        tried, usual_s = self.trial, self.usual_s(self.number)
        if len(self.turn_s[tried]) < TRIED and turn_s < WORSE * usual_s:
            return
        self.trial, self.last_trial = 0, tried
        if self.usual_s(tried) < BETTER * usual_s:
            self.number, self.pause = tried, 2 * FIRST_TRIAL
        else:
            self.pause = min(LONGER * self.pause, LONGEST_PAUSE)
        self.until_trial = self.pause


class GroupCount:
    """The number of groups for one route, by how many answers it has."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # Bucket of answers, and number of groups, that are measured now.
        self._measured: tuple[int, int] = 0, 0
        self._span = 0  # turns that are measured; 0: the number settles in
        self._left = 0  # turns until they are over
        self._began = 0.0

    def number(self, answers: int, stages: int) -> int:
        """How many groups are to be out, at least 1: as many as stages until fewer were seen to be faster."""
        most = min(answers, stages)
        if most < 2:
            return 1
        known = self._of(answers, stages)
        return min(known.trial or known.number, most)

    def note_turn(self, answers: int, stages: int, now: float) -> None:
        """A turn came back to the gateway, at `now` seconds of a clock, while there were so many answers."""
        if min(answers, stages) < 2:
            self._measured = 0, 0
            return
        measured = _bucket(answers), self.number(answers, stages)
        if measured != self._measured:
            self._measured, self._span, self._left = measured, 0, SETTLING_ROUNDS * answers
        self._left -= 1
        known, turns = self._of(answers, stages), self._span - self._left
        if (
            self._span
            and turns == HOPELESS_ROUNDS * answers
            and known.is_hopeless((now - self._began) / turns)
        ):
            self._left = 0
        if self._left > 0:
            return
        if self._span:
            known.note((now - self._began) / turns, min(answers, stages))
        self._span = self._left = MEASURED_ROUNDS * answers
        self._began = now

    def _of(self, answers: int, stages: int) -> _Known:
        """The record for about so many answers."""
        bucket = _bucket(answers)
        if bucket not in self._known:
            self._known[bucket] = _Known(min(answers, stages))
        return self._known[bucket]


def _bucket(answers: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: what is about as many answers behaves alike."""
    low = max(0, answers.bit_length() - 2)
    return answers >> low << low
