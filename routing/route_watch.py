"""Looks after the hops of a live route while somebody waits: who is silent, and who holds up a step that is overdue.

Suspicion is a reason to go another way, nothing more: a silent or slow node that nobody can replace is waited for.
Knows links and standings; nothing of what a step holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from routing.blame import Trouble
from routing.endpoint import STALE_AFTER_S
from routing.errors import ErrorCode, LinkError
from routing.inquiry import FIRST_SLACK_S, SLACK_S, Behind, first_behind, is_stuck, patience_s
from routing.link import Link
from routing.measurements import Measured
from routing.opening import RouteKeys
from routing.recorded import RecordedStep
from routing.types import Inquire, NodeId, Route, Standing

# A watched link whose PING waits for so long is a reason to re-route, nothing more. With a PING after half a second of
# silence and ten looks a second, that is found within two seconds of the peer's last word (transport.md, 5.6).
SUSPECT_AFTER_S = 1.4
REACH_EVERY_S = 2.0  # another way to a silent node may work now: a sentinel is back, a reservation made anew
INQUIRY_S = 1.0  # who has not said by then how far it is won't be waited for


@dataclass(frozen=True, slots=True)
class Due:
    """What is waited for: `step`, or (0) that the route opens; `steps` are computed until then."""

    step: int
    steps: Sequence[RecordedStep]
    is_first: bool = False  # no step of the session was answered yet: nodes may be loading
    is_anything: bool = True


class RouteWatch:
    """`links` are the route's own, hop by hop, and change with it. What is found goes to `note`."""

    def __init__(
        self,
        route: Route,
        keys: RouteKeys,
        links: Sequence[Link | None],
        *,
        measured: Callable[[], Mapping[NodeId, Measured]],
        may_do_without: Callable[[NodeId], bool],
        note: Callable[[Trouble], None],
        reach_again: Callable[[int], None],
    ) -> None:
        self._route = route
        self._keys = keys
        self._links = links
        self._measured = measured
        self._may_do_without = may_do_without
        self._note = note
        self._reach_again = reach_again
        self._looked_at: dict[Link, float] = {}  # silent ones beside which another was looked for, and when
        self._standings: dict[int, Standing] = {}
        self._asked: set[int] = set()  # hops that have not said yet how far they are
        self._asked_at: float | None = None  # because of an overdue step
        self._progress_at = time.monotonic()

    def note_progress(self) -> None:
        """Something came, or was sent: what is due has its full time from now on."""
        self._progress_at = time.monotonic()
        self._asked_at = None

    def look(self, due: Callable[[], Due]) -> None:
        """Look at every hop once; call it a few times a second."""
        self._suspect_the_silent()
        now = time.monotonic()
        if self._asked_at is None:
            if self._is_overdue(due(), now):
                self.ask()
                self._asked_at = now
        elif not self._asked or now - self._asked_at > INQUIRY_S:
            self._asked_at = None
            self._progress_at = now  # ask again after as long
            self._judge(due())

    def ask(self) -> None:
        """Ask every hop that we have a link to how far it is."""
        self._standings.clear()
        self._asked.clear()
        for hop, link in enumerate(self._links):
            if link is not None and not link.is_closed:
                self._asked.add(hop)
                link.post(Inquire(self._keys.session_id, self._keys.epoch))

    def take(self, hop: int, standing: Standing) -> None:
        """A hop says how far it is."""
        if standing.epoch <= self._keys.epoch:
            self._standings[hop] = standing
            self._asked.discard(hop)

    @property
    def is_told(self) -> bool:
        """Whether everybody that was asked has said how far it is."""
        return not self._asked

    def have_done(self, number: int) -> bool:
        """Whether all hops that said so have done a step."""
        return all(told.last_done >= number for told in self._standings.values())

    def _suspect_the_silent(self) -> None:
        """Leave a silent node if another route exists; without one, look for another way to it.

        Its path may be what is silent: the sentinel in between, or a NAT box that forgot.
        """
        now = time.monotonic()
        for hop, link in enumerate(self._links):
            if link is None or link.is_closed or link.silent_for_s < SUSPECT_AFTER_S:
                continue
            if self._may_do_without(link.peer_id):
                silent = LinkError(ErrorCode.TIMEOUT, "the node is silent", hop=hop)
                self._note(Trouble(silent, is_seen=True, node_id=link.peer_id))
                return
            is_due = now - self._looked_at.get(link, -REACH_EVERY_S) >= REACH_EVERY_S
            if link.silent_for_s >= STALE_AFTER_S and is_due:
                self._looked_at[link] = now
                self._reach_again(hop)

    def _is_overdue(self, due: Due, now: float) -> bool:
        slack_s = FIRST_SLACK_S if due.is_first else SLACK_S
        waited_s = now - self._progress_at
        if not due.is_anything or waited_s <= slack_s:
            return False
        steps = [(step.work_rows, len(step.payload)) for step in due.steps]
        return waited_s > slack_s + patience_s(self._route.hops, steps, self._measured())

    def _judge(self, due: Due) -> None:
        """Blame whoever holds up what is due."""
        if not due.is_anything:
            return
        behind = first_behind(self._standings, len(self._links), self._keys.epoch, due.step)
        if behind is None:
            last = len(self._links) - 1 if due.step else 0
            lost = LinkError(ErrorCode.TIMEOUT, "what the node says does not arrive", hop=last)
            self._note(Trouble(lost, is_seen=True, node_id=self._node_at(last), is_node_up=True))
        elif not behind.has_it or (
            self._is_stuck(behind) and self._may_do_without(self._node_at(behind.hop))
        ):
            self._note(self._overdue(behind))

    def _is_stuck(self, behind: Behind) -> bool:
        hop = self._route.hops[behind.hop]
        return behind.told is None or is_stuck(hop, behind.told, self._measured().get(hop.address.node_id))

    def _overdue(self, behind: Behind) -> Trouble:
        text = "computes for too long" if behind.has_it else "did not get the step"
        error = LinkError(ErrorCode.TIMEOUT, f"hop {behind.hop} {text}", hop=behind.hop)
        before = None if behind.has_it or not behind.hop else self._node_at(behind.hop - 1)
        return Trouble(error, is_seen=True, node_id=self._node_at(behind.hop), before=before)

    def _node_at(self, hop: int) -> NodeId:
        return self._route.hops[hop].address.node_id
