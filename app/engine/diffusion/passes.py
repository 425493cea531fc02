"""What one branch's session over one stack is asked for, and what it gives back: the seam to the network.

A session runs whole passes and patches in the order they are sent. Knows nothing of how: chains over nodes do it
(`call_session.py`), tests do it in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from app.engine.request import RouteHop
from routing.types import NodeId
from slicing.diffusion.calls import Pass
from slicing.diffusion.stacks import Stack

if TYPE_CHECKING:
    from slicing.diffusion.patches import Cut, Mode
    from slicing.diffusion.replay import Verdict


@dataclass(frozen=True)
class PassOrder:
    """How one pass, or one patch of it, is to be run."""

    mode: Mode
    cut: Cut | None = None
    extrapolate: float = 0.0


@dataclass(frozen=True)
class PassMade:
    """The streams after the last block, what every hop that had to judge said, and the numbers of it."""

    streams: list[torch.Tensor] = field(repr=False)
    verdicts: Sequence[Verdict] = ()
    was_whole: bool = (
        True  # False: the rows of a patch. A patch that was lost on the way is made again as a whole
    )


@dataclass
class SessionCounts:
    """Where the time of a session's passes went, in seconds, and what crossed the links to it."""

    compute_s: float = 0.0
    network_s: float = 0.0
    crypto_s: float = 0.0
    queue_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    node_s: dict[NodeId, float] = field(default_factory=dict)  # computed by each node


class NoRoomError(Exception):
    """The nodes have no room for kept keys and values; `possible_kib` is what a block may have there."""

    def __init__(self, asked_kib: int, possible_kib: int) -> None:
        super().__init__(f"{asked_kib} KiB a block are needed, {possible_kib} KiB are free")
        self.asked_kib = asked_kib
        self.possible_kib = possible_kib


class CallSession(Protocol):
    """One session: one picture, one stack, one guidance branch. For one task at a time, but for `close`."""

    @property
    def epoch(self) -> int:
        """Counts the routes; another number than before the last pass: what nodes kept is gone."""
        ...

    @property
    def hops(self) -> tuple[RouteHop, ...]:
        """The present route."""
        ...

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Whom the present route uses."""
        ...

    @property
    def replays(self) -> int:
        """Routes that took over."""
        ...

    @property
    def counts(self) -> SessionCounts: ...

    async def run(
        self, parts: Sequence[tuple[Pass, PassOrder]], whole: Pass, on_sent: Callable[[], None]
    ) -> list[PassMade]:
        """Run one pass: itself, or its patches, all on their way at once.

        `whole` is what a route that takes over gets instead of lost patches. `on_sent` is called when the first part
        has left. Raises `routing.errors.NoRouteError` or `RemoteError`.
        """
        ...

    async def close(self) -> None:
        """Free the session on every node; never waits long."""
        ...


class Sessions(Protocol):
    """Opens sessions."""

    async def open(
        self, stack: Stack, *, room_kib: int, avoided: frozenset[NodeId] = frozenset()
    ) -> CallSession:
        """Open one over a stack's blocks, with so much memory a block set aside for keys and values.

        Nodes in `avoided` are left out while there are others. Raises `NoRoomError`, `routing.errors.NoRouteError`
        or `RemoteError`.
        """
        ...
