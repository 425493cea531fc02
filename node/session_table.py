"""The live sessions of a node, how many of them whom may have, and the cancels that came before their session.

Knows nothing of links' traffic, threads or memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from node.session import Session
from routing import wire
from routing.sealing import CANCEL, LEAVE
from routing.types import Cancel, NodeId, SessionId

MAX_REMEMBERED_CANCELS = 1024  # a cancel may overtake its open; both are on their way for seconds at most


@dataclass(frozen=True, slots=True)
class Full:
    """Why there is no place for one more session."""

    text: str
    is_of_all: bool  # any session less would help; else only one of the same peer


class SessionTable:
    """Sessions by id. Iterating is safe while sessions are removed.

    `limit_of` may allow a peer less than the others: a guest has a quota.
    """

    def __init__(
        self,
        max_sessions: int,
        max_per_peer: int,
        limit_of: Callable[[NodeId], int | None] = lambda _: None,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_per_peer = max_per_peer
        self._limit_of = limit_of
        self._sessions: dict[SessionId, Session] = {}
        self._cancels: deque[Cancel] = deque(maxlen=MAX_REMEMBERED_CANCELS)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def get(self, session_id: SessionId) -> Session | None:
        """The live session with this id."""
        return self._sessions.get(session_id)

    def add(self, session: Session) -> None:
        """Take in a session that there is a place for."""
        self._sessions[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget a session."""
        del self._sessions[session.session_id]

    def full_for(self, peer_id: NodeId) -> Full | None:
        """Why a peer cannot have one more session; None: it can."""
        if len(self._sessions) >= self._max_sessions:
            return Full(f"{len(self._sessions)} sessions are open", is_of_all=True)
        num_of_peer = sum(session.peer_id == peer_id for session in self._sessions.values())
        limit = self._limit_of(peer_id)
        if num_of_peer >= (self._max_per_peer if limit is None else min(limit, self._max_per_peer)):
            return Full(f"{num_of_peer} sessions of this peer are open", is_of_all=False)
        return None

    def remember(self, cancel: Cancel) -> None:
        """Keep a cancel whose session is not here (yet)."""
        self._cancels.append(cancel)

    def was_cancelled(self, session_id: SessionId, epoch: int, route_key: bytes) -> bool:
        """Whether a proven cancel for this route, or a later one of its session, came before."""
        return any(
            cancel.session_id == session_id and cancel.epoch >= epoch and is_proven(cancel, route_key)
            for cancel in self._cancels
        )


def is_proven(cancel: Cancel, route_key: bytes) -> bool:
    """Whether whoever made the cancel held the route's key."""
    return ends_session(cancel, route_key) or wire.is_proof(
        cancel.proof, route_key, LEAVE, cancel.session_id, cancel.epoch
    )


def ends_session(cancel: Cancel, route_key: bytes) -> bool:
    """Whether the cancel is for every node down the chain; else only for one that a later route does without."""
    return wire.is_proof(cancel.proof, route_key, CANCEL, cancel.session_id, cancel.epoch)
