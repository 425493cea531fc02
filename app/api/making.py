"""One accepted request for pictures, videos or sounds while it is made: events from the engine, counted and bounded.

Every request ends in exactly one way, counted once: finished, failed, or aborted because the client left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from app.api.accounting import accounted_events
from app.api.messages import Lenient
from app.diffusion_metrics import DiffusionMeter
from app.engine.diffusion.request import (
    DiffusionEngine,
    DiffusionEvent,
    DiffusionRequest,
    DiffusionTimings,
    Made,
)
from app.engine.request import RouteHop
from app.gateway import Gateway
from app.keys import Caller

Item = tuple[int, DiffusionEvent] | None


@dataclass(slots=True)
class Making:
    """The answers of one request, from admission to their end."""

    gateway: Gateway
    engine: DiffusionEngine
    requests: Sequence[DiffusionRequest] = field(repr=False)
    meter: DiffusionMeter
    request_id: str
    caller: Caller

    def events(self, *, silence_s: float = float("inf")) -> AsyncGenerator[Item, None]:
        """Yield (index of the answer, event), and None whenever nothing came for `silence_s`."""
        return accounted_events(
            self.gateway,
            self.meter,
            (self.engine.generate(request) for request in self.requests),
            caller=self.caller,
            num_answers=len(self.requests),
            silence_s=silence_s,
            count=lambda _, event: self.meter.count(event),
            counts={"answers": len(self.requests), "steps": self.requests[0].steps or 0},
            record=self.gateway.records.begin(
                self.request_id,
                answer_id=self.requests[0].request_id,
                tenant=self.requests[0].tenant,
                model=self.engine.model_name,
                endpoint=self.meter.endpoint,
            ),
        )

    async def made(self) -> AsyncGenerator[tuple[int, Made], None]:
        """Yield each answer once it is there, with its index."""
        async with aclosing(self.events()) as events:
            async for item in events:
                match item:
                    case (index, Made() as made):
                        yield index, made


class HopField(Lenient):
    """One hop of a route: the first digits of the node's id, and its blocks (half-open)."""

    node: str
    layers: tuple[int, int]
    path: str


class MadeTimings(Lenient):
    """Where an answer's time went, in seconds, as `app.engine.diffusion.request.DiffusionTimings` has it."""

    total_s: float
    encode_s: float
    steps_s: float
    decode_s: float
    steps: int
    compute_s: float
    network_s: float
    crypto_s: float
    queue_s: float
    passes: int
    patched: int
    prefetched: int
    hits: int
    bytes_sent: int
    bytes_received: int
    busy: tuple[float, ...]


def timings_of(timings: DiffusionTimings) -> MadeTimings:
    return MadeTimings(**{name: getattr(timings, name) for name in MadeTimings.model_fields})


def route_of(hops: Sequence[RouteHop]) -> list[HopField]:
    """The route that an answer ended on."""
    return [
        HopField(node=hop.node, layers=(hop.start, hop.end), path="relayed" if hop.is_relayed else "direct")
        for hop in hops
    ]


def timing_headers(timings: DiffusionTimings) -> dict[str, str]:
    """Say where the time went: `Server-Timing` (W3C, in milliseconds) and OpenAI's own header."""
    parts: dict[str, Any] = {
        "total": timings.total_s,
        "encode": timings.encode_s,
        "steps": timings.steps_s,
        "decode": timings.decode_s,
        "compute": timings.compute_s,
        "network": timings.network_s,
        "crypto": timings.crypto_s,
        "queue": timings.queue_s,
    }
    entries = [f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items()]
    return {
        "server-timing": ", ".join(entries),
        "openai-processing-ms": str(round(timings.total_s * 1000)),
    }
