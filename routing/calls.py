"""The calls of blocks of one session: numbered, made for each route, and their answers looked at.

What makes and checks them knows what is in them; here they are bytes. Knows nothing of links or plans.
"""

from __future__ import annotations

import asyncio

from routing.errors import TooLargeError
from routing.live_route import SMALL_BYTES, LiveRoute
from routing.parts import MAX_CALL_BYTES, call_rows
from routing.recorded import CannotRemake, CheckAnswer, MakeCall, RecordedStep
from routing.types import WIDTHS, Answer, Want, WireDtype


class Calls:
    """Which route has what calls build on. One task at a time makes and checks."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._epoch = 0  # of the route that the last call was made for
        self._last_number = 0  # of that call

    def new(self, make: MakeCall, check: CheckAnswer | None, until: float | None) -> RecordedStep:
        """The next call, whose answer is due."""
        recorded = RecordedStep(
            self._num_calls, 1, b"", WireDtype.FLOAT32, Want.LAST, until=until, make=make, check=check
        )
        self._num_calls += 1
        make_due(recorded)
        return recorded

    async def make(self, recorded: RecordedStep, live: LiveRoute) -> bool:
        """Make the payload of a call for this route; false where that cannot be: its answer tells, none is due then.

        Raises TooLargeError for a pass that is too large for any node.
        """
        assert recorded.make is not None
        is_fresh = self._epoch != live.epoch
        try:
            recorded.payload = await asyncio.to_thread(recorded.make, is_fresh)
        except CannotRemake as error:
            live.forget(recorded)
            if recorded.answer is not None and not recorded.answer.done():
                recorded.answer.set_exception(error)
                recorded.answer.exception()  # nobody need look
            return False
        if (size_bytes := len(recorded.payload)) > MAX_CALL_BYTES:
            raise TooLargeError(
                f"a pass of {size_bytes} B is larger than {MAX_CALL_BYTES} B: use a shorter wire form"
            )
        offer = live.route.hops[0].offer
        recorded.call_rows = call_rows(size_bytes, offer.hidden_size * WIDTHS[offer.dtype])
        recorded.leaves_out = recorded.number != (0 if is_fresh else self._last_number) + 1
        self._epoch, self._last_number = live.epoch, recorded.number
        return True


def make_due(recorded: RecordedStep) -> None:
    """An answer to this call is due, whatever came before."""
    recorded.answer = asyncio.get_running_loop().create_future()


async def wrong_with(answer: Answer, recorded: RecordedStep) -> str | None:
    """What is wrong with a call's answer; a large one is looked at beside the event loop."""
    if recorded.check is None:
        return None
    if len(answer.payload) <= SMALL_BYTES:
        return recorded.check(answer)
    return await asyncio.to_thread(recorded.check, answer)
