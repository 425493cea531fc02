"""Where the blocks of one diffusion model run: its routes over nodes, stack by stack.

Plans nothing itself; knows neither pipelines nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from app.engine.coverage import Coverage, ModelFacts, route_request
from app.engine.diffusion.call_session import ChainSessions, named_blocks
from app.engine.diffusion.passes import Sessions
from app.engine.diffusion.request import DiffusionRequest, WireName
from app.engine.request import ModelStatus
from app.engine.routes import Routes
from routing.errors import NoRouteError
from routing.planner import RouteRequest, plan_route
from routing.switchboard import Switchboard
from routing.types import NodeId, NodeRecord, SliceSpec
from slicing.diffusion.stacks import Stack
from slicing.diffusion.wire import WireForm

FORMS: dict[WireName, WireForm] = {
    "compute": WireForm.RAW,
    "bf16": WireForm.BF16,
    "int8-delta": WireForm.INT8_DELTA,
}


class Backend(Protocol):
    """What runs the passes of an engine's pictures."""

    def coverage(self) -> ModelStatus:
        """Say whether every stack can be run now; cheap."""
        ...

    def num_stages(self) -> int:
        """How many nodes run a pass one behind another, as far as that is known."""
        ...

    def sessions(self, request: DiffusionRequest, until: float | None) -> Sessions:
        """What opens the sessions of one picture. Raises `RequestError` or `ModelUnavailableError` for its options."""
        ...

    def blamed(self, error: NoRouteError, request: DiffusionRequest) -> Exception:
        """Name the request's options, where those leave no route."""
        ...


class StackCoverage:
    """Whether each stack of a model has a route: a pass goes over one stack at a time."""

    def __init__(self, facts: ModelFacts, stacks: Sequence[Stack], excluded: frozenset[NodeId]) -> None:
        self._num_layers = facts.num_layers
        self._parts = [
            (stack, Coverage(route_request(facts, spec_of(stack), is_thin=False, excluded=excluded)))
            for stack in stacks
        ]

    @property
    def requests(self) -> list[tuple[str, RouteRequest]]:
        """What the routes of each stack must do, by its name."""
        return [(stack.name, coverage.request) for stack, coverage in self._parts]

    def status(self, records: tuple[NodeRecord, ...]) -> ModelStatus:
        """See `coverage.Coverage.status`; the reason names the blocks that are missing as the model numbers them."""
        found = [(stack, coverage.status(records)) for stack, coverage in self._parts]
        lost = [(stack, status) for stack, status in found if not status.is_ready]
        if not lost:
            return ModelStatus("ready", self._num_layers)
        missing = tuple(span for _, status in lost for span in status.missing)
        reasons = [named_blocks(stack, status.missing) for stack, status in lost if status.missing]
        reasons += dict.fromkeys(status.reason for _, status in lost if status.reason)
        may_return = all(status.may_return for _, status in lost)
        return ModelStatus(
            "partial", self._num_layers, missing, reason="; ".join(reasons), may_return=may_return
        )


class ChainBackend:
    """A `Backend` over chains of nodes."""

    def __init__(
        self,
        facts: ModelFacts,
        stacks: Sequence[Stack],
        switchboard: Switchboard,
        *,
        wire: WireName = "compute",
        excluded: frozenset[NodeId] = frozenset(),
    ) -> None:
        """`wire` is how hidden states travel where a request does not say."""
        self._stacks = stacks
        self._switchboard = switchboard
        self._wire = wire
        self._request = route_request(facts, SliceSpec(0, facts.num_layers), is_thin=False, excluded=excluded)
        self._routes = Routes(switchboard, self._request)
        self._coverage = StackCoverage(facts, stacks, excluded)

    def coverage(self) -> ModelStatus:
        return self._coverage.status(self._switchboard.directory.records())

    def num_stages(self) -> int:
        records = self._switchboard.directory.records()
        try:
            routes = [
                plan_route(records, replace(self._request, spec=spec_of(stack))) for stack in self._stacks
            ]
        except NoRouteError:
            return 1
        return max(len(route.hops) for route in routes)

    def sessions(self, request: DiffusionRequest, until: float | None) -> Sessions:
        wire = self._wire if request.wire == "compute" else request.wire
        return ChainSessions(
            self._switchboard,
            self._routes,
            self._routes.asked(request.route),
            form=FORMS[wire],
            tenant=request.tenant[:8],
            until=until,
        )

    def blamed(self, error: NoRouteError, request: DiffusionRequest) -> Exception:
        return self._routes.blamed(error, request.route)


def spec_of(stack: Stack) -> SliceSpec:
    """The blocks of a stack in the model's own numbers."""
    return SliceSpec(stack.offset, stack.end)
