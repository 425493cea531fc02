"""One trace over a gateway and its nodes, as an OpenTelemetry collector gets it: whose child is whose; no content."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from transformers import LlamaForCausalLM

from app.engine.tokenizer import ChatTokenizer
from app.request_notes import begin_notes
from app.tracing import Traced
from node.tracing import NodeTraces
from routing.session_trace import BEGIN
from routing.trace_export import open_traces
from tests.integration.chats import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Chat, chat
from tests.support.api_server import Served, serve_engines
from tests.support.collector import Collector, collecting
from tests.support.tiny_models import small_llama

CALLER_TRACE, CALLER_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROOT = Path(__file__).parents[2]
OUR_CODE = tuple(str(ROOT / package) + "/" for package in ("app", "node", "routing"))
SECRET = "hush quick brown"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 6,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(160, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("http_proxy", "HTTP_PROXY", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    with collecting() as opened:
        yield opened


@dataclass
class Swarm:
    """A gateway over two nodes; what they export is at the collector once it is left."""

    served: Served
    here: Chat

    async def ask(self, headers: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
        response = await self.served.http.post(
            "/v1/chat/completions", json=ASKED | changes, headers=headers or {}
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@asynccontextmanager
async def traced(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, url: str | None, **chosen: Any
) -> AsyncIterator[Swarm]:
    exports = [export for name in ("gateway", "node") if (export := open_traces(url, f"diffuse-{name}"))]
    traces = NodeTraces(exports[1].tracer) if exports else None
    copies = chosen.pop("copies", 1)
    async with chat(model, tokenizer, (1, 0), copies=copies, chunk=16, traces=traces) as here:
        tracer = exports[0].tracer if exports else None
        async with serve_engines(here.engine, tracer=tracer, **chosen) as served:
            yield Swarm(served, here)
        await here.is_freed()
        for export in exports:
            await export.close()


async def test_a_request_is_one_trace_over_gateway_and_nodes(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        answer = await swarm.ask(
            {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01", "tracestate": "a=hush"}
        )
    (request,) = collector.named("chat tiny")
    assert {span.trace_id for span in collector.spans} == {CALLER_TRACE}
    assert request.parent_id == CALLER_SPAN
    children = sorted(span.name for span in collector.spans if span.parent_id == request.span_id)
    assert children == ["decode", "prefill", "queue", "render prompt", "session"]
    (session,) = collector.named("session", "gateway")
    beneath = [span for span in collector.spans if span.parent_id == session.span_id]
    assert sorted((span.name, span.service) for span in beneath) == [
        ("hop", "diffuse-gateway"),
        ("hop", "diffuse-gateway"),
        ("session", "diffuse-node"),
        ("session", "diffuse-node"),
    ]
    for own in collector.named("session", "node"):
        assert own.attributes["diffuse.session"] == session.attributes["diffuse.session"]
        parts = [span.name for span in collector.spans if span.parent_id == own.span_id]
        assert parts.count("decode") == 1
        assert parts.count("prefill") >= 1
    assert request.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert request.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert request.attributes["gen_ai.response.id"] == answer["id"]
    assert request.attributes["http.response.status_code"] == 200


async def test_a_trace_says_where_the_time_went(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        answer = await swarm.ask()
    hops = collector.named("hop")
    assert sorted(hop.attributes["diffuse.layers"] for hop in hops) == ["1:3", "3:6"]
    for part in ("compute_s", "network_s", "queue_s"):
        total = sum(hop.attributes[f"diffuse.{part}"] for hop in hops)
        assert total == pytest.approx(answer["timings"][part], abs=2e-3)
    (decode,) = collector.named("decode", "gateway")
    (prefill,) = collector.named("prefill", "gateway")
    assert prefill.began < prefill.ended == decode.began < decode.ended
    assert decode.attributes["diffuse.tokens"] == answer["usage"]["completion_tokens"]
    for own in collector.named("decode", "node"):
        assert own.attributes["diffuse.steps"] >= answer["usage"]["completion_tokens"] - 1
        assert own.attributes["diffuse.compute_s"] > 0


async def test_no_word_of_a_chat_is_exported(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        answer = await swarm.ask(
            {"tracestate": "a=hush", "baggage": "a=hush", "authorization": "Bearer hush"}
        )
        refused = await swarm.served.ask(model="hush")
        broken = await swarm.served.http.post("/v1/chat/completions?hush=1", content=b'{"hush')
    assert (refused.status_code, broken.status_code) == (404, 400)
    assert len(collector.named("POST")) == 2
    assert {span.attributes["error.type"] for span in collector.named("POST")} == {
        "model_not_found",
        broken.json()["error"]["code"],
    }
    told = b"".join(collector.bodies)
    text = answer["choices"][0]["message"]["content"]
    assert text
    for secret in ("hush", "brown", text):
        assert secret.encode() not in told


async def test_a_caller_that_samples_nothing_is_followed(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        await swarm.ask({"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-00"})
    assert not collector.bodies


@pytest.mark.parametrize(
    "parent", ["hush", "00-0-0-01", f"ff-{CALLER_TRACE}-{CALLER_SPAN}-01", "é", "0" * 9000]
)
async def test_a_parent_that_is_none_begins_a_trace(
    parent: str, model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        await swarm.served.http.post(
            "/v1/chat/completions", json=ASKED, headers=[(b"traceparent", parent.encode())]
        )
    (request,) = collector.named("chat tiny")
    assert not request.parent_id


async def test_a_request_that_is_not_sampled_is_no_part_of_the_one_before_it(collector: Collector) -> None:
    """Requests of one connection may be answered in one task."""
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(BEGIN.get())

    export = open_traces(collector.url, "diffuse-gateway")
    assert export is not None
    traced = Traced(app, export.tracer)
    for sampled in ("01", "00"):
        begin_notes("req_1")
        parent = f"00-{CALLER_TRACE}-{CALLER_SPAN}-{sampled}".encode()
        scope = {"type": "http", "method": "POST", "headers": [(b"traceparent", parent)]}
        await traced(scope, no_message, no_message)
    await export.close()
    assert seen[0] is not None
    assert seen[1] is None
    assert len(collector.spans) == 1


async def no_message(*_: Any) -> Any:
    """A client that says and hears nothing."""


async def test_a_failover_is_told(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url, copies=2) as swarm:
        here = swarm.here
        here.lose_at(8, here.nodes[:2])
        await swarm.ask(max_tokens=10)
    (session,) = collector.named("session", "gateway")
    (lost,) = here.lost
    names = [name for name, _ in session.events]
    assert names == ["failover", "resumed"]
    assert session.events[0][1]["diffuse.node"] == lost.hex()[:8]
    assert len(collector.named("hop")) == 3
    assert collector.named("chat tiny")[0].attributes["diffuse.replays"] == 1


async def test_an_answer_that_is_cut_off_ends_its_spans(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector
) -> None:
    async with traced(model, tokenizer, collector.url) as swarm:
        asked = ASKED | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        async with swarm.served.http.stream("POST", "/v1/chat/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:  # the role comes with none
                    break
    (request,) = collector.named("chat tiny")
    assert request.attributes["diffuse.outcome"] == "aborted"
    assert request.attributes["error.type"] == "client_gone"
    assert {span.name for span in collector.spans} >= {"prefill", "decode", "session", "hop"}


async def test_a_collector_that_hangs_or_refuses_slows_no_answer(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    collector.answers.clear()
    async with traced(model, tokenizer, collector.url) as swarm:
        for _ in range(3):
            await swarm.ask()
        collector.answers.set()
    told = [record for record in caplog.records if "takes none" in record.getMessage()]
    assert len(told) == 2  # of two exporters, once
    assert "127.0.0.1" in told[0].getMessage()


async def test_without_traces_nothing_is_called(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename if frame.f_back else ""
        is_own = "/opentelemetry/" in name and caller.startswith(OUR_CODE)  # FastAPI has calls of its own
        if event == "call" and (is_own or name.endswith("/tracing.py")):
            calls.append(f"{name}:{frame.f_code.co_name}")

    async with traced(model, tokenizer, None) as swarm:
        sys.setprofile(note)
        try:
            await swarm.ask()
        finally:
            sys.setprofile(None)
    assert not calls
