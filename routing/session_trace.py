"""How a session's chain tells a trace what becomes of it, without knowing what a trace is made of.

Whoever traces a request sets `BEGIN` in its task; chains that the request opens find it there. Where nobody does,
nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Protocol

from routing.hop_times import HopTimes
from routing.link import Link
from routing.types import NodeId, TraceContext


class SessionTrace(Protocol):
    """Follows one session from its first route to its end."""

    @property
    def context(self) -> TraceContext:
        """What nodes are told, so that what they trace belongs to it."""

    def note_trouble(self, hop: int | None, node: str, code: str) -> None:
        """A route cannot go on."""

    def note_route(self, epoch: int, pause_s: float) -> None:
        """Another route has taken over, so long after the trouble was noticed."""

    def end(self, times: HopTimes, network_s: float, links: Mapping[NodeId, Link | None]) -> None:
        """The session is over; what its nodes did, as they tell, and our links to them."""


BEGIN: ContextVar[Callable[[str], SessionTrace] | None] = ContextVar("begin_session_trace", default=None)


def begin_trace(session_name: str) -> SessionTrace | None:
    """The trace of a session that the present task opens, if anybody wants one."""
    begin = BEGIN.get()
    return None if begin is None else begin(session_name)
