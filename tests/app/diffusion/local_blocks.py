"""Sessions that run passes in this process, with the production interface: block ranges stand for nodes.

They count what is opened and closed, can be slow, can lose what they keep, and can be out of room.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.engine.diffusion.passes import CallSession, NoRoomError, PassMade, PassOrder, SessionCounts
from app.engine.diffusion.request import DiffusionRequest
from app.engine.request import ModelStatus, RouteHop
from routing.errors import NoRouteError
from routing.types import NodeId
from slicing.diffusion.block_range import BlockRange, load_block_range
from slicing.diffusion.calls import Pass
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Mode
from slicing.diffusion.source import PipelineSource
from slicing.diffusion.stacks import Stack


@dataclass
class LocalBackend:
    """A backend whose nodes are block ranges: `cuts` of the blocks between them."""

    source: PipelineSource
    cuts: Sequence[int] = ()
    delay_s: float = 0.0
    room_kib: int = 1 << 20
    groups: int = 1  # sets of nodes that hold everything
    opened: list[LocalSession] = field(default_factory=list)
    hook: Callable[[LocalSession, int], None] | None = None  # before each pass: its session and number

    def __post_init__(self) -> None:
        bounds = [0, *self.cuts, self.source.num_layers]
        self.ranges = [load_block_range(self.source, *span) for span in itertools.pairwise(bounds)]

    @property
    def num_open(self) -> int:
        return sum(not session.is_closed for session in self.opened)

    def coverage(self) -> ModelStatus:
        return ModelStatus("ready", self.source.num_layers)

    def num_stages(self) -> int:
        return len(self.ranges)

    def sessions(self, request: DiffusionRequest, until: float | None) -> LocalBackend:
        return self

    def blamed(self, error: NoRouteError, request: DiffusionRequest) -> Exception:
        return error

    async def open(
        self, stack: Stack, *, room_kib: int, avoided: frozenset[NodeId] = frozenset()
    ) -> CallSession:
        if room_kib > self.room_kib:
            raise NoRoomError(room_kib, self.room_kib)
        group = next((group for group in range(self.groups) if _node(group) not in avoided), None)
        if group is None:
            raise NoRouteError([(stack.offset, stack.end)])
        session = LocalSession(self, stack, group)
        self.opened.append(session)
        return session


@dataclass(eq=False)
class LocalSession:
    """One session: a patch state for every range that has blocks of the stack."""

    backend: LocalBackend
    stack: Stack
    group: int
    epoch: int = 1
    replays: int = 0
    is_closed: bool = False
    counts: SessionCounts = field(default_factory=SessionCounts)
    modes: list[Mode] = field(default_factory=list)
    states: dict[int, PatchState] = field(default_factory=dict)

    @property
    def hops(self) -> tuple[RouteHop, ...]:
        return tuple(RouteHop(f"{start:08x}", start, end) for start, end, _ in self._spans())

    @property
    def nodes(self) -> frozenset[NodeId]:
        return frozenset({_node(self.group)})

    def forget(self) -> None:
        """Another route took over: nothing is kept any more."""
        self.states.clear()
        self.epoch += 1
        self.replays += 1

    async def run(
        self, parts: Sequence[tuple[Pass, PassOrder]], whole: Pass, on_sent: Callable[[], None]
    ) -> list[PassMade]:
        assert not self.is_closed
        if self.backend.hook is not None:
            self.backend.hook(self, len(self.modes))
        if parts[0][1].mode is Mode.PATCH and not self.states:  # lost meanwhile: the whole pass goes in
            order = parts[0][1]
            parts = [(whole, PassOrder(Mode.WHOLE_KEEP, order.cut, order.extrapolate))]
        self.modes.append(parts[0][1].mode)
        on_sent()
        results = []
        for made, order in parts:
            results.append(await asyncio.to_thread(self._run, made, order))
            await asyncio.sleep(self.backend.delay_s)
        return results

    async def close(self) -> None:
        self.is_closed = True
        self.states.clear()

    def _run(self, made: Pass, order: PassOrder) -> PassMade:
        streams, verdicts = made.streams, []
        for start, end, blocks in self._spans():
            state = self.states.setdefault(start, PatchState())
            here = Pass(made.plan, streams, made.slots)
            streams, verdict = state.run(
                blocks, here, start, end, mode=order.mode, cut=order.cut, extrapolate=order.extrapolate
            )
            verdicts += [verdict] if verdict is not None else []
        return PassMade(streams, verdicts, was_whole=order.mode is not Mode.PATCH)

    def _spans(self) -> list[tuple[int, int, BlockRange]]:
        spans = [
            (max(blocks.start, self.stack.offset), min(blocks.end, self.stack.end), blocks)
            for blocks in self.backend.ranges
        ]
        return [span for span in spans if span[0] < span[1]]


def _node(group: int) -> NodeId:
    return NodeId(bytes([group + 1]) * 32)
