"""Spans of a request: one for the request, and beneath it its queue, prompt, prefill, decode, sessions and their hops.

Names and counts as OpenTelemetry's conventions for generative models have them, never what was said. Made only where
traces were asked for, see `routing.trace_export`. Nodes hang what they trace beneath the spans of sessions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace as otel
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import from_exception, is_client_gone
from app.api.scope import endpoint_of, request_id_of
from app.engine.hop_uses import hop_uses
from app.engine.request import Admitted, Finished, TextDelta
from app.request_notes import current_notes, name_in_log
from routing.hop_times import HopTimes
from routing.link import Link
from routing.session_trace import BEGIN
from routing.types import NodeId, TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from app.records import RequestRecord

PARENT = "traceparent"  # its companion `tracestate` is free text, and is not taken
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
OTHER_OPERATION = "generate_content"

Attributes = dict[str, str | int | float | bool]


class Traced:
    """Begins a trace for each request that may make something, as part of the caller's where it names one."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._parents = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        BEGIN.set(None)  # a connection's next request may begin in the task of the one before
        notes = current_notes()
        if scope["type"] != "http" or scope["method"] != "POST" or notes is None:
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).getlist(PARENT)
        parent = self._parents.extract({PARENT: told[0]} if len(told) == 1 else {})
        span = self._tracer.start_span("POST", parent, kind=SpanKind.SERVER, attributes=_asked(scope))
        if not span.is_recording():  # whoever calls us, or a sampler, wants none
            await self._app(scope, receive, send)
            return
        notes.trace = RequestTrace(self._tracer, span)
        BEGIN.set(notes.trace.begin_session)
        name_in_log(trace_id=f"{span.get_span_context().trace_id:032x}")

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            _note_error(span, error)
            raise
        finally:
            notes.trace.end_request(endpoint_of(scope))


@dataclass(slots=True)
class _Answer:
    """When things came of one answer, in Unix nanoseconds."""

    admitted: int
    first: int | None = None
    tokens: int = 0


class RequestTrace:
    """One request's spans."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = otel.set_span_in_context(span)
        self._answers: dict[int, _Answer] = {}  # that have begun and not ended

    def begin_session(self, name: str) -> SessionSpan:
        """A session of it was opened."""
        return SessionSpan(self._tracer, self._context, name)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A span for what is inside."""
        part = self._tracer.start_span(name, self._context)
        try:
            yield
        except BaseException:
            part.set_status(StatusCode.ERROR)
            raise
        finally:
            part.end()

    def note(self, index: int, event: object) -> None:
        """An engine's event, as it comes."""
        match event:
            case TextDelta():
                answer = self._answers[index]
                answer.first = answer.first or time.time_ns()
                answer.tokens += event.num_tokens
            case Admitted():
                self._answers[index] = _Answer(time.time_ns())
            case Finished():
                about: Attributes = {
                    "diffuse.drafted": event.drafted,
                    "diffuse.accepted": event.accepted,
                    "diffuse.forced": event.forced,
                    "diffuse.local_s": event.timings.local_s,
                    "diffuse.compute_s": event.timings.compute_s,
                    "diffuse.network_s": event.timings.network_s,
                    "diffuse.queue_s": event.timings.queue_s,
                }
                self._end_answer(index, {"diffuse.cached_tokens": event.cached_tokens}, about)
            case (int(own_index), inner):  # of an endpoint whose answers share lanes
                self.note(own_index, inner)

    def end(self, record: RequestRecord, outcome: str, counts: Mapping[str, int | float]) -> None:
        """How an accepted request ended."""
        for index in list(self._answers):
            self._end_answer(index, {}, {}, is_whole=False)
        operation = OPERATIONS.get(record.endpoint, OTHER_OPERATION)
        ended = record.answers.values()
        self._span.update_name(f"{operation} {record.model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "diffuse",
                "gen_ai.request.model": record.model,
                "gen_ai.response.model": record.model,
                "gen_ai.response.id": record.answer_id,
                "gen_ai.usage.input_tokens": int(counts.get("prompt_tokens", 0)),
                "gen_ai.usage.output_tokens": sum(answer.completion_tokens or 0 for answer in ended),
                "gen_ai.response.finish_reasons": [it.finish_reason for it in ended if it.finish_reason],
                "diffuse.outcome": outcome,
                "diffuse.replays": sum(answer.replays for answer in ended),
            }
        )
        if outcome != "finished":
            self._span.set_attribute("error.type", record.error or outcome)
            self._span.set_status(StatusCode.ERROR)

    def end_request(self, endpoint: str) -> None:
        """Its response is over, or was given up."""
        self._span.set_attribute("http.route", endpoint)
        self._span.end()

    def _end_answer(
        self, index: int, prefill: Attributes, decode: Attributes, *, is_whole: bool = True
    ) -> None:
        answer, now = self._answers.pop(index), time.time_ns()
        named: Attributes = {"diffuse.choice": index}
        parts = [("prefill", answer.admitted, answer.first or now, named | prefill)]
        if answer.first is not None:
            parts.append(("decode", answer.first, now, named | decode | {"diffuse.tokens": answer.tokens}))
        for name, began, ended, attributes in parts:
            part = self._tracer.start_span(name, self._context, attributes=attributes, start_time=began)
            if not is_whole and ended == now:
                part.set_status(StatusCode.ERROR)
            part.end(ended)


class SessionSpan:
    """A `routing.session_trace.SessionTrace`: a span for a session, and one for each of its nodes at the end."""

    def __init__(self, tracer: Tracer, parent: Context, name: str) -> None:
        self._tracer = tracer
        self._began = time.time_ns()
        self._span = tracer.start_span(
            "session", parent, kind=SpanKind.CLIENT, attributes={"diffuse.session": name}
        )
        self._context = otel.set_span_in_context(self._span)

    @property
    def context(self) -> TraceContext:
        """What nodes are told."""
        own = self._span.get_span_context()
        return TraceContext(own.trace_id.to_bytes(16), own.span_id.to_bytes(8))

    def note_trouble(self, hop: int | None, node: str, code: str) -> None:
        """A route cannot go on."""
        at_hop: Attributes = {} if hop is None else {"diffuse.hop": hop}
        self._span.add_event("failover", {**at_hop, "diffuse.node": node, "diffuse.code": code})

    def note_route(self, epoch: int, pause_s: float) -> None:
        """Another route has taken over."""
        self._span.add_event("resumed", {"diffuse.epoch": epoch, "diffuse.pause_s": pause_s})

    def end(self, times: HopTimes, network_s: float, links: Mapping[NodeId, Link | None]) -> None:
        """The session is over."""
        now = time.time_ns()
        for use in hop_uses(times, network_s, links):
            about: Attributes = {
                "diffuse.node": use.hop.node,
                "diffuse.layers": f"{use.hop.start}:{use.hop.end}",
                "diffuse.relayed": use.hop.is_relayed,
                "diffuse.steps": use.steps,
                "diffuse.compute_s": use.compute_s,
                "diffuse.network_s": use.network_s,
                "diffuse.queue_s": use.queue_s,
                "diffuse.crypto_s": use.crypto_s,
            }
            hop = self._tracer.start_span("hop", self._context, attributes=about, start_time=self._began)
            hop.end(now)
        self._span.end(now)


def _asked(scope: Scope) -> Attributes:
    return {"http.request.method": scope["method"], "diffuse.request_id": request_id_of(scope)}


def _note_error(span: Span, error: Exception) -> None:
    """Its code; its text may quote what was said."""
    span.set_status(StatusCode.ERROR)
    if is_client_gone(error):
        span.set_attribute("error.type", "client_gone")
        return
    failure = from_exception(error)
    span.set_attribute("http.response.status_code", failure.status)
    span.set_attribute("error.type", failure.code or str(failure.status))
