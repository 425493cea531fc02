"""Spans of the sessions that a gateway traces: one for the session, one for each piece of a prompt, one for the rest.

Children of the gateway's own span, whose ids came sealed in the Open. What a gateway can make us export is bounded:
spans by allowances, attributes by what is written here. Made only where traces were asked for, see `trace_export`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry import trace as otel
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags

from routing.admission import TokenBucket
from routing.types import NodeId, StepFlag, TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from node.call_job import CallJob
    from node.session import Session
    from node.step_job import StepJob

MAX_PREFILL_SPANS = 32  # of one session; later pieces are counted with the last
MAX_TROUBLES = 8  # events of one session
# Spans that all gateways, and each of them, can make us export: in a burst, and per second after it.
ALL_BURST, ALL_PER_S = 2000.0, 200.0
ONE_BURST, ONE_PER_S = 400.0, 40.0
MAX_GATEWAYS = 256  # whose allowances are remembered


class NodeTraces:
    """Begins the traces of sessions, as far as allowances go."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, clock())
        self._each: OrderedDict[NodeId, TokenBucket] = OrderedDict()

    def begin(self, session: Session) -> SessionSpans | None:
        """The spans of a session that its gateway traces; None for any other, or when that gateway had its share."""
        context, gateway_id = session.entry.trace, session.entry.gateway_id
        if context is None or not self.may_export(gateway_id):
            return None
        return SessionSpans(self._tracer, session, context, lambda: self.may_export(gateway_id))

    def may_export(self, gateway_id: NodeId) -> bool:
        """Take one span from both allowances."""
        now = self._clock()
        each = self._each.setdefault(gateway_id, TokenBucket(ONE_PER_S, ONE_BURST, now))
        self._each.move_to_end(gateway_id)
        if len(self._each) > MAX_GATEWAYS:
            self._each.popitem(last=False)
        return each.take(now) and self._all.take(now)


class SessionSpans:
    """Of one session on this node."""

    def __init__(
        self, tracer: Tracer, session: Session, context: TraceContext, may_export: Callable[[], bool]
    ) -> None:
        self._tracer = tracer
        self._may_export = may_export
        self._branches = session.entry.branches
        self._is_calls = session.entry.calls
        self._num_prefills = self._num_troubles = 0
        self._rest: _Rest | None = None
        self._span = tracer.start_span(
            "session", _remote(context), kind=SpanKind.SERVER, attributes=_about(session)
        )
        self._context = otel.set_span_in_context(self._span)

    def note(self, job: StepJob | CallJob) -> None:
        """A step was computed: a piece of a prompt by itself, all others together."""
        if not self._span.is_recording():
            return  # it was on its way when the session ended
        rows = job.step.rows // self._branches
        is_prompt = rows > 1 and self._rest is None and not self._is_calls
        if is_prompt and self._num_prefills < MAX_PREFILL_SPANS and self._may_export():
            self._num_prefills += 1
            self._end_child("prefill", _began(job), {**_times(job), "diffuse.steps": 1})
            return
        if self._rest is None:
            self._rest = _Rest(_began(job))
        self._rest.add(job)

    def note_route(self, epoch: int) -> None:
        """The session goes on, on another route."""
        self._event("rerouted", {"diffuse.epoch": epoch})

    def note_trouble(self, code: str) -> None:
        """A step failed here, or the next hop was lost."""
        self._event("failed", {"diffuse.code": code})

    def end(self, how: str) -> None:
        """Nothing more comes."""
        if self._rest is not None and self._may_export():
            name = "calls" if self._is_calls else "decode"
            self._end_child(name, self._rest.began, self._rest.attributes, self._rest.ended)
        self._span.set_attribute("diffuse.outcome", how)
        if how != "ended":
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _event(self, name: str, attributes: dict[str, int | str]) -> None:
        if self._num_troubles < MAX_TROUBLES:
            self._num_troubles += 1
            self._span.add_event(name, attributes)

    def _end_child(
        self, name: str, began: int, attributes: dict[str, int | float], ended: int | None = None
    ) -> None:
        child: Span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=began)
        child.end(ended)


class _Rest:
    """Steps that have no span of their own, added up."""

    def __init__(self, began: int) -> None:
        self.began = self.ended = began
        self._steps = self._rows = self._replayed = 0
        self._compute_s = self._queue_s = 0.0

    def add(self, job: StepJob | CallJob) -> None:
        self._steps += 1
        self._rows += job.step.rows
        self._replayed += StepFlag.REPLAY in job.step.flags
        self._compute_s += job.compute_s
        self._queue_s += job.queue_s
        self.ended = time.time_ns()

    @property
    def attributes(self) -> dict[str, int | float]:
        return {
            "diffuse.steps": self._steps,
            "diffuse.rows": self._rows,
            "diffuse.steps_replayed": self._replayed,
            "diffuse.compute_s": self._compute_s,
            "diffuse.queue_s": self._queue_s,
        }


def _remote(context: TraceContext) -> Context:
    """The gateway's span as a parent. It is sampled: of others no context is sent."""
    remote = SpanContext(
        int.from_bytes(context.trace_id),
        int.from_bytes(context.span_id),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return otel.set_span_in_context(NonRecordingSpan(remote))


def _about(session: Session) -> dict[str, str | int]:
    entry = session.entry
    return {
        "diffuse.session": session.name,
        "diffuse.hop": entry.hop,
        "diffuse.hops": entry.num_hops,
        "diffuse.layers": f"{entry.start}:{entry.end}",
        "diffuse.peer": session.peer_id.hex()[:8],
        "diffuse.model": session.held.offer.model_name,
        "diffuse.form": session.held.offer.form,
    }


def _began(job: StepJob | CallJob) -> int:
    """When it arrived, in Unix nanoseconds."""
    return time.time_ns() - int((time.perf_counter() - job.arrived) * 1e9)


def _times(job: StepJob | CallJob) -> dict[str, int | float]:
    return {
        "diffuse.rows": job.step.rows,
        "diffuse.position": job.step.position,
        "diffuse.compute_s": job.compute_s,
        "diffuse.queue_s": job.queue_s,
    }
