"""How fast a layer is of late, and when that is worth telling others.

Knows nothing of slices or sessions: it is fed milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WEIGHT = 0.1  # of each new step: about the last twenty count, half a second of one decode stream
FEWEST_STEPS = 5  # a single step that the system disturbed says nothing
WORTH_TELLING = 0.2  # relative change; machine noise alone moves by a tenth
TELL_EVERY_S = 10.0  # a record is signed and spread to everyone: not for every flutter


class LayerSpeed:
    """A running mean of decode steps (EWMA), beginning with what was measured at the load."""

    def __init__(self, measured_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.layer_ms = measured_ms
        self.told_ms = measured_ms
        self._clock = clock
        self._num_steps = 0
        self._told_at = clock()

    def note(self, layer_ms: float) -> None:
        """One decode step took so long in each layer."""
        self._num_steps += 1
        self.layer_ms += WEIGHT * (layer_ms - self.layer_ms)

    def tell(self) -> bool:
        """Whether the speed has changed enough to be told again, not too soon; from then on it counts as told."""
        now = self._clock()
        change = abs(self.layer_ms - self.told_ms)
        if self._num_steps < FEWEST_STEPS or change <= WORTH_TELLING * self.told_ms:
            return False
        if now - self._told_at < TELL_EVERY_S:
            return False
        self.told_ms, self._told_at = self.layer_ms, now
        return True
