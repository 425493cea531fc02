"""What a node exports of the sessions that a gateway traces, and how little a hostile one can make it export."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from node import tracing
from node.tracing import NodeTraces
from routing.types import NodeId, TraceContext
from tests.node.rig import Node, Rig, Script, fake_rig, until
from tests.node.test_steps import some_rows

CONTEXT = TraceContext(b"t" * 16, b"s" * 8)


class Traced:
    """A node that exports into memory, with a clock that stands still until it is moved."""

    def __init__(self, rig: Rig) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.now = 0.0
        self.rig = rig
        rig.traces = NodeTraces(provider.get_tracer("test"), lambda: self.now)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    async def ended(self, script: Script, node: Node) -> list[ReadableSpan]:
        """Cancel a session; its spans."""
        await script.first.send(script.cancel())
        await until(lambda: not node.stats.num_sessions)
        return self.spans


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    async with fake_rig() as rig:
        yield Traced(rig)


def asked(traced: Traced, node: Node, **changes: Any) -> Script:
    script = traced.rig.script((node, 0, 6))
    script.changes |= {"trace": CONTEXT} | changes
    return script


async def test_a_session_is_a_child_of_the_gateways_span(traced: Traced) -> None:
    node = await traced.rig.add_fake_node()
    script = asked(traced, node)
    await script.open()
    await script.run(1, 0, some_rows(5))
    for number in range(2, 6):
        await script.run(number, 3 + number, some_rows(1))
    spans = {span.name: span for span in await traced.ended(script, node)}
    own, prefill, decode = spans["session"], spans["prefill"], spans["decode"]
    assert own.context.trace_id.to_bytes(16) == CONTEXT.trace_id
    assert own.parent is not None
    assert own.parent.span_id.to_bytes(8) == CONTEXT.span_id
    assert own.attributes is not None
    assert own.attributes["diffuse.session"] == script.session_id[:4].hex()
    assert own.attributes["diffuse.layers"] == "0:6"
    for part in (prefill, decode):
        assert part.parent is not None
        assert part.parent.span_id == own.context.span_id
    assert prefill.attributes is not None
    assert prefill.attributes["diffuse.rows"] == 5
    assert decode.attributes is not None
    assert decode.attributes["diffuse.steps"] == decode.attributes["diffuse.rows"] == 4


async def test_a_session_that_nobody_traces_exports_nothing(traced: Traced) -> None:
    node = await traced.rig.add_fake_node()
    script = asked(traced, node, trace=None)
    await script.open()
    await script.run(1, 0, some_rows(5))
    assert not await traced.ended(script, node)


async def test_a_step_that_fails_is_an_event(traced: Traced) -> None:
    node = await traced.rig.add_fake_node()
    script = asked(traced, node)
    await script.open()
    node.runner.error = ValueError("hush")
    await script.send(1, 0, some_rows(1))
    await script.failure()
    await until(lambda: not node.stats.num_sessions)
    (own,) = traced.spans
    assert [(event.name, dict(event.attributes or {})) for event in own.events] == [
        ("failed", {"diffuse.code": "COMPUTE"})
    ]
    assert "hush" not in own.to_json()


async def test_a_long_prompt_in_small_pieces_exports_few_spans(traced: Traced) -> None:
    node = await traced.rig.add_fake_node()
    script = asked(traced, node)
    await script.open()
    num_pieces = tracing.MAX_PREFILL_SPANS + 10
    for number in range(num_pieces):
        await script.run(number + 1, 2 * number, some_rows(2))
    await traced.ended(script, node)
    assert traced.names.count("prefill") == tracing.MAX_PREFILL_SPANS
    (rest,) = [span for span in traced.spans if span.name == "decode"]
    assert rest.attributes is not None
    assert rest.attributes["diffuse.steps"] == 10


async def test_failures_without_end_are_few_events(traced: Traced) -> None:
    node = await traced.rig.add_fake_node()
    script = asked(traced, node)
    await script.open()
    for number in range(50):
        await script.send(number + 7, 0, some_rows(1))
        await script.failure()
    await traced.ended(script, node)
    (own,) = traced.spans
    assert len(own.events) == tracing.MAX_TROUBLES


def test_a_gateway_that_opens_sessions_without_end_gets_its_share_and_no_more(traced: Traced) -> None:
    traces = traced.rig.traces
    assert traces is not None
    hostile, other = NodeId(b"h" * 32), NodeId(b"o" * 32)
    granted = sum(traces.may_export(hostile) for _ in range(10_000))
    assert granted == tracing.ONE_BURST
    assert traces.may_export(other)
    traced.now += 10.0
    assert sum(traces.may_export(hostile) for _ in range(10_000)) == 10 * tracing.ONE_PER_S


def test_a_gateway_of_many_names_gets_no_more_than_all_may(traced: Traced) -> None:
    traces = traced.rig.traces
    assert traces is not None
    names = [NodeId(number.to_bytes(32)) for number in range(5000)]
    assert sum(traces.may_export(name) for name in names) == tracing.ALL_BURST
    assert len(traces._each) == tracing.MAX_GATEWAYS


async def test_beyond_its_share_sessions_go_on_untraced(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "ONE_BURST", 2.0)
    node = await traced.rig.add_fake_node()
    for _ in range(4):
        script = asked(traced, node)
        await script.open()
        await script.run(1, 0, some_rows(1))
        await traced.ended(script, node)
    assert traced.names == ["decode", "session"]
