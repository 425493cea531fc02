"""Who seems dead, as seen from here: SWIM's pings, direct and through others, with Lifeguard's patience.

Sans I/O: says whom to ping, is told what came of it. A suspicion is a local hint for routing; nobody else can
cause one, since a doubt heard from others only makes us look. SWIM: Das et al., DSN 2002; Lifeguard: Dadgar et
al., 2018.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from routing.types import NodeId

PERIOD_S = 1.0  # between two members in turn
PING_TIMEOUT_S = 1.0  # transport.md 5.5
NUM_HELPERS = 3
SUSPECT_PERIODS = 3.0  # x log2(members)
MAX_HEALTH = 8  # Lifeguard's local health multiplier is at most 1 + this
LATE_S = 1.0  # a tick that comes so late says that we are the slow one
RECHECK_S = 3.0  # a member that gave a sign of life is not looked at again before this
CHECK_GAP_S = 0.1  # between two checks of doubted members: what hints can cost us
MAX_DOUBTED = 256
FIRST_RECHECK_S = 2.0  # of a suspected member; each next wait is twice as long, until it is gone


@dataclass(frozen=True, slots=True)
class Ping:
    """See whether this member lives, at the address that its record tells."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class AskOthers:
    """Ask these peers to see whether it lives."""

    node_id: NodeId
    via: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Suspected:
    """We found it dead ourselves: it is not routed to, and others may want to look."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Refuted:
    """It lives after all."""

    node_id: NodeId


Action = Ping | AskOthers | Suspected | Refuted


class Suspicion:
    """Liveness of the members of a table, as far as this peer saw."""

    def __init__(self, own_id: NodeId, *, rng: random.Random, now: Callable[[], float]) -> None:
        self._own_id = own_id
        self._rng = rng
        self._now = now
        self._members: dict[NodeId, int] = {}  # -> sequence
        self._linked: set[NodeId] = set()
        self._turns: list[NodeId] = []  # of this round, the next one last
        self._checks: dict[NodeId, _Check] = {}
        self._doubted: dict[NodeId, float] = {}  # -> not before
        self._suspected: dict[NodeId, float] = {}  # -> since
        self._rechecks: dict[NodeId, float] = {}  # suspected ones -> when to ping next
        self._last_alive: dict[NodeId, float] = {}
        self._news: list[Action] = []
        self._next_turn = now() + rng.uniform(0, PERIOD_S)
        self._next_check = now()
        self.health = 0  # 0: well; more: we fail ourselves, and wait longer for others

    @property
    def suspected(self) -> frozenset[NodeId]:
        """Members that are not to be routed to."""
        return frozenset(self._suspected)

    @property
    def gone(self) -> frozenset[NodeId]:
        """Members suspected for so long that they are not pinged any more; only they can change that."""
        return frozenset(node_id for node_id in self._suspected if self._is_gone(node_id))

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do, if nothing else happens."""
        if self._news:
            return self._now()
        deadlines = [check.deadline for check in self._checks.values()]
        deadlines += self._rechecks.values()
        if self._doubted:
            deadlines.append(max(self._next_check, min(self._doubted.values())))
        return min((self._next_turn, *deadlines))

    def tick(self) -> list[Action]:
        """Return what to do now."""
        now = self._now()
        self._judge(now)
        self._ping_suspected(now)
        if now >= self._next_check:
            self._ping_doubted(now)
        if now >= self._next_turn:
            self.health = min(MAX_HEALTH, self.health + (now - self._next_turn > LATE_S))
            self._next_turn = now + PERIOD_S
            self._ping_next()
        actions, self._news = self._news, []
        return actions

    def doubt(self, node_id: NodeId) -> None:
        """Somebody says, or something hints, that a member is dead: have a look, soon if we did not just do so."""
        is_known = node_id in self._members and node_id not in self._linked
        is_settled = node_id in self._suspected or node_id in self._checks or node_id in self._doubted
        if is_known and not is_settled and len(self._doubted) < MAX_DOUBTED:
            self._doubted[node_id] = self._last_alive.get(node_id, -math.inf) + RECHECK_S

    def note_link(self, node_id: NodeId) -> None:
        """A link to it is up: while it is, its heartbeat says more than any ping."""
        self._linked.add(node_id)
        self.note_alive(node_id)

    def note_unlink(self, node_id: NodeId) -> None:
        """The last link to it is gone, for whatever reason."""
        self._linked.discard(node_id)

    def note_alive(self, node_id: NodeId) -> None:
        """It answered us, or a helper says that it answered: it proved its identity either way."""
        self._lift(node_id)
        self._doubted.pop(node_id, None)
        if self._checks.pop(node_id, None) is not None:
            self.health = max(0, self.health - 1)
        if node_id in self._members:
            self._last_alive[node_id] = self._now()

    def note_unanswered(self, node_id: NodeId) -> None:
        """A ping of ours failed before its time was over: refused, or nobody there."""
        check = self._checks.get(node_id)
        if check is not None and not check.num_asked:
            check.deadline = self._now()

    def note_report(self, node_id: NodeId, *, is_alive: bool) -> None:
        """A helper that was asked looked. That it saw nobody counts as no more than its silence would."""
        check = self._checks.get(node_id)
        if check is None or not check.num_asked:
            return
        if is_alive:
            self.note_alive(node_id)
            return
        check.num_denied += 1
        if check.num_denied == check.num_asked:
            check.deadline = self._now()

    def note_failed(self, node_id: NodeId, sequence: int | None = None) -> None:
        """Its link broke and a quick re-dial failed, or another answers in its place: suspected at once.

        With the `sequence` of the record that told the place, a failure at a place it has left since is no news.
        """
        known = self._members.get(node_id)
        if known is None or node_id in self._linked or (sequence is not None and sequence < known):
            return
        self._suspect(node_id)

    def note_record(self, node_id: NodeId, sequence: int) -> None:
        """It signed a record: a newer one refutes the suspicion, and is looked into, for it may have come late."""
        known = self._members.get(node_id)
        if node_id == self._own_id or (known is not None and sequence <= known):
            return
        self._members[node_id] = sequence
        if known is None:
            self._turns.insert(self._rng.randint(0, len(self._turns)), node_id)
            return
        self._checks.pop(node_id, None)  # it may be somewhere else now
        if self._lift(node_id):
            self._last_alive.pop(node_id, None)
            self.doubt(node_id)

    def _lift(self, node_id: NodeId) -> bool:
        self._rechecks.pop(node_id, None)
        if self._suspected.pop(node_id, None) is None:
            return False
        self._news.append(Refuted(node_id))
        return True

    def _ping_suspected(self, now: float) -> None:
        """Look again and again, ever more rarely: a suspicion may be wrong, or over."""
        for node_id in [node_id for node_id, due in self._rechecks.items() if due <= now]:
            if self._is_gone(node_id):
                del self._rechecks[node_id]
                continue
            self._rechecks[node_id] = now + max(FIRST_RECHECK_S, now - self._suspected[node_id])
            self._ping(node_id)

    def _ping_doubted(self, now: float) -> None:
        ready = next((node_id for node_id, not_before in self._doubted.items() if not_before <= now), None)
        if ready is not None:
            self._next_check = now + CHECK_GAP_S
            del self._doubted[ready]
            self._ping(ready)

    def forget(self, node_id: NodeId) -> None:
        """It has no live record any more."""
        self._members.pop(node_id, None)
        self._checks.pop(node_id, None)
        self._doubted.pop(node_id, None)
        self._lift(node_id)
        self._last_alive.pop(node_id, None)

    def _ping_next(self) -> None:
        """Ping the next member in turn; each has one turn in a round, in a random order (SWIM 4.3)."""
        if not self._turns:
            self._turns = sorted(self._members)
            self._rng.shuffle(self._turns)
        while self._turns:
            node_id = self._turns.pop()
            if not self._is_gone(node_id) and self._ping(node_id):
                return

    def _ping(self, node_id: NodeId) -> bool:
        if node_id not in self._members or node_id in self._linked or node_id in self._checks:
            return False
        self._checks[node_id] = _Check(self._now() + self._patience_s)
        self._news.append(Ping(node_id))
        return True

    def _judge(self, now: float) -> None:
        """Ask others about who did not answer; suspect whom nobody reached."""
        for node_id in [node_id for node_id, check in self._checks.items() if check.deadline <= now]:
            check = self._checks[node_id]
            helpers = sorted(self._linked - {node_id})
            if node_id in self._suspected:
                del self._checks[node_id]  # it was only looked at again
                continue
            if check.num_asked or not helpers:
                self._note_own_health(check)
                self._suspect(node_id)
                continue
            via = tuple(self._rng.sample(helpers, min(NUM_HELPERS, len(helpers))))
            # The helpers wait as long as we did, and they are some way off.
            self._checks[node_id] = _Check(now + 1.5 * self._patience_s, num_asked=len(via))
            self._news.append(AskOthers(node_id, via))

    def _note_own_health(self, check: _Check) -> None:
        """Helpers that do not even say no speak against us, not against who was to be pinged (Lifeguard)."""
        if check.num_denied < check.num_asked or not check.num_asked:
            self.health = min(MAX_HEALTH, self.health + 1)

    def _suspect(self, node_id: NodeId) -> None:
        self._checks.pop(node_id, None)
        self._doubted.pop(node_id, None)
        if node_id not in self._suspected:
            self._suspected[node_id] = self._now()
            self._rechecks[node_id] = self._now() + FIRST_RECHECK_S
            self._news.append(Suspected(node_id))

    @property
    def _patience_s(self) -> float:
        return PING_TIMEOUT_S * (1 + self.health)

    def _is_gone(self, node_id: NodeId) -> bool:
        since = self._suspected.get(node_id)
        periods = SUSPECT_PERIODS * math.log2(max(2, len(self._members)))
        return since is not None and self._now() - since > periods * PERIOD_S * (1 + self.health)


@dataclass(slots=True)
class _Check:
    """A ping that is under way."""

    deadline: float
    num_asked: int = 0  # helpers
    num_denied: int = 0  # helpers that saw nobody
