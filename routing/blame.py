"""Who failed a session, who is left out because of it, and how long to go on trying.

Pure but for the times passed in. Knows nodes and errors; nothing of links, messages or what was computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from routing.errors import ErrorCode, RemoteError
from routing.types import NodeId, Route

MAX_ATTEMPTS = 8  # routes tried without one new answer: a swarm that loses more at once will not finish it
FORGIVE_AFTER_S = 60.0  # a node that was lost is back by then, or the directory does not offer it
FIRST_PAUSE_S = 0.1  # before a node is asked a third time; doubles
LAST_PAUSE_S = 1.0
MAX_RETRY_S = 2.0  # of what a node may ask for: longer than its sessions' own answers take is not believed

# A node that says so is asked again at once; it lost only this session.
SAME_NODE_MAY_RETRY = {ErrorCode.NO_SESSION, ErrorCode.STEP}
# What a node may say, about itself or the next one, that another route or another try can mend.
REPLAY_MENDS = SAME_NODE_MAY_RETRY | {
    ErrorCode.TIMEOUT,
    ErrorCode.LINK_LOST,
    ErrorCode.KEEPALIVE,
    ErrorCode.HANDSHAKE,
    ErrorCode.ID_MISMATCH,
    ErrorCode.CERTIFICATE_EXPIRED,
    ErrorCode.NETWORK,
    ErrorCode.HOP_LOST,
    ErrorCode.NO_SLICE,
    ErrorCode.BUSY,
    ErrorCode.COMPUTE,
    ErrorCode.CANCELLED,
    ErrorCode.NO_ROOM,
}
# Its links work and asking again would not help: the same input fails the same way, or it breaks the rules.
_NEVER_AGAIN = {
    ErrorCode.COMPUTE,
    ErrorCode.MALFORMED,
    ErrorCode.DECRYPT,
    ErrorCode.TOO_BIG,
    ErrorCode.NO_ROOM,
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a route cannot go on. `is_seen`: we noticed it ourselves; otherwise a node says so.

    `node_id` is the node to blame; `before` the one before it in the chain, when that, or their link, may be the cause.
    `suspects`: any of these may have made what all after it passed on.
    """

    error: RemoteError
    is_seen: bool
    node_id: NodeId | None = None
    before: NodeId | None = None
    is_node_up: bool = False  # another link to the node works: only this one was lost
    is_told_by_itself: bool = False  # the node says so of itself
    suspects: frozenset[NodeId] = frozenset()

    @property
    def concerns_others(self) -> bool:
        """Whether other sessions should do without the node for a moment: by what we saw, or it says of itself."""
        is_full = self.is_told_by_itself and self.error.code in (ErrorCode.BUSY, ErrorCode.NO_SLICE)
        is_gone = self.is_seen and not self.is_node_up and self.error.code not in _NEVER_AGAIN
        return is_full or is_gone

    @property
    def is_mendable(self) -> bool:
        """Whether another try makes sense."""
        return self.node_id is not None and (self.is_seen or self.error.code in REPLAY_MENDS)


class Blame:
    """What one session holds against which nodes. Whoever it lost is avoided, not banned."""

    def __init__(self) -> None:
        self.attempts = 0  # since the last new answer
        self.barred: dict[NodeId, RemoteError] = {}
        self._avoided_at: dict[NodeId, float] = {}
        self._edges: set[tuple[NodeId, NodeId]] = set()
        self._retry_at: dict[NodeId, float] = {}
        self._suspects: frozenset[NodeId] = frozenset()  # on every route that gave a wrong answer lately
        self._num_wrong = 0

    def note(self, trouble: Trouble, now: float, *, is_begun: bool = True) -> None:
        """Count one more failed attempt. Raises the error when trying on makes no sense.

        A session that has not begun does not wait for a node that is full for long.
        """
        self.attempts += 1
        node_id, code = trouble.node_id, trouble.error.code
        if not trouble.is_mendable or self.attempts > MAX_ATTEMPTS:
            raise trouble.error
        assert node_id is not None
        if trouble.suspects:
            self._num_wrong += 1
            common = self._suspects & trouble.suspects
            self._suspects = common or trouble.suspects  # nothing in common: there are several liars
        self._retry_at[node_id] = now + self._pause_s(trouble.error)
        is_full = code is ErrorCode.BUSY and trouble.error.retry_ms > MAX_RETRY_S * 1000
        before = trouble.before
        if (code in _NEVER_AGAIN and before is None) or (is_full and not is_begun):
            self.barred[node_id] = trouble.error
        elif before or self.attempts > 1 or not (trouble.is_node_up or code in SAME_NODE_MAY_RETRY):
            self._avoided_at[node_id] = now
            if before is not None:
                self._edges.add((before, node_id))

    def note_progress(self, nodes: frozenset[NodeId], now: float) -> None:
        """A new answer came over these nodes: what fails next is another incident."""
        self.attempts = 0
        if self._num_wrong > 1:
            self._avoided_at |= dict.fromkeys(self._suspects - nodes, now)
        self._suspects, self._num_wrong = frozenset(), 0

    def avoided(self, now: float) -> frozenset[NodeId]:
        """Nodes that a route should do without."""
        lately = {node for node, at in self._avoided_at.items() if now - at < FORGIVE_AFTER_S}
        return frozenset(lately | self.barred.keys())

    def exclusions(self, now: float) -> Iterator[frozenset[NodeId]]:
        """Whom to leave out, the wanted choice first; then the other side of lost links; then only the barred."""
        avoided, barred = self.avoided(now), frozenset(self.barred)
        if self._num_wrong > 1:  # it was not the last hop, or not that alone
            yield avoided | self._suspects
            yield barred | self._suspects
            for suspect in sorted(self._suspects):
                yield barred | {suspect}
        yield avoided
        if self._edges:
            befores, afters = ({edge[side] for edge in self._edges} for side in (0, 1))
            yield (avoided - afters) | befores | barred
        yield barred

    def pause_s(self, route: Route, now: float) -> float:
        """How long to wait before this route is asked: a node that just failed gets a moment."""
        waits = [self._retry_at.get(hop.address.node_id, now) - now for hop in route.hops]
        return max([0.0, *waits])

    def _pause_s(self, error: RemoteError) -> float:
        if error.code is ErrorCode.BUSY:
            return min(max(error.retry_ms / 1000, FIRST_PAUSE_S), MAX_RETRY_S)
        return 0.0 if self.attempts == 1 else min(FIRST_PAUSE_S * 2 ** (self.attempts - 2), LAST_PAUSE_S)
