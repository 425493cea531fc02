"""Where traces go, how that is asked for, and that what a peer of another version says of them is taken."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest

from routing import trace_export
from routing.errors import ProtocolError, SettingsError
from routing.maps import pack_map, unpack_map
from routing.sealing import MAX_ENTRY_SIZE, decode_entry, encode_entry
from routing.trace_export import open_traces, wanted_endpoint
from routing.types import HopEntry, NodeId, TraceContext, WireDtype
from tests.support.collector import Collector, collecting

PLAIN = HopEntry(
    b"k" * 32, 0, 1, NodeId(b"g" * 32), b"d" * 32, 0, 4, WireDtype.FLOAT32, WireDtype.FLOAT32, 64, 60
)
CONTEXT = TraceContext(b"t" * 16, b"s" * 8)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*trace_export.ENDPOINT_VARIABLES, trace_export.DISABLED_VARIABLE):
        monkeypatch.delenv(name, raising=False)


# Asking for them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "variables", "endpoint"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp", {}, "https://c/otlp/v1/traces"),
        ("http://c/v1/traces", {}, "http://c/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e"}, "http://e/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e/in"}, "http://e/in"),
        ("http://c", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e"}, "http://c/v1/traces"),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_traces_go_where_they_were_asked_to(
    url: str | None, variables: dict[str, str], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted_endpoint(url) == endpoint


@pytest.mark.parametrize(
    "url", ["c:4318", "ftp://c", "http://", "http://c:port", "http://[c", "grpc://c:4317"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--traces takes the http"):
        wanted_endpoint(url)


def test_without_the_extra_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'diffuse\[traces\]'"):
        open_traces("http://127.0.0.1:1", "diffuse-node")


def test_nothing_of_it_is_imported_unless_asked_for() -> None:
    program = """
import sys
import app.request_notes, node.session, routing.chain
from routing.trace_export import open_traces
assert open_traces(None, "diffuse-node") is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
assert "app.tracing" not in sys.modules and "node.tracing" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Exporting ----------------------------------------------------------------------------------------------------


async def test_spans_are_exported_by_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "EXPORT_EVERY_S", 0.01)
    with collecting() as collector:
        collector.answers.clear()  # the collector hangs
        export = open_traces(collector.url, "diffuse-node", "here")
        assert export is not None
        began = time.perf_counter()
        for _ in range(3 * trace_export.MAX_QUEUED):
            export.tracer.start_span("a").end()
        assert time.perf_counter() - began < 5  # and none of them waited for it
        collector.answers.set()
        await export.close()
        assert 0 < len(collector.spans) <= 2 * trace_export.MAX_QUEUED
        assert {(span.service, span.instance) for span in collector.spans} == {("diffuse-node", "here")}


async def test_a_collector_that_is_gone_is_told_of_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting() as collector:
        url = collector.url
    monkeypatch.setattr(trace_export, "EXPORT_EVERY_S", 0.01)
    monkeypatch.setattr(trace_export, "EXPORT_TIMEOUT_S", 0.1)
    with caplog.at_level(logging.DEBUG):
        export = open_traces(url.replace("://", "://user:hush@"), "diffuse-node")
        assert export is not None
        for _ in range(4):
            export.tracer.start_span("a").end()
            time.sleep(0.15)
        await export.close()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in told] == ["routing.trace_export"]
    assert "hush" not in caplog.text


async def test_a_collector_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "CLOSE_S", 0.1)
    with collecting() as collector:
        collector.answers.clear()
        export = open_traces(collector.url, "diffuse-node")
        assert export is not None
        export.tracer.start_span("a").end()
        began = time.perf_counter()
        await export.close()
        assert time.perf_counter() - began < 2
        _end_threads(collector)


def _end_threads(collector: Collector) -> None:
    collector.answers.set()
    for thread in threading.enumerate():
        if thread.name == "end of traces":
            thread.join(5)


# Between versions ---------------------------------------------------------------------------------------------


def test_an_entry_carries_the_span_it_belongs_to() -> None:
    traced = HopEntry(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | {"trace": CONTEXT})
    assert decode_entry(encode_entry(traced)) == traced


def test_an_entry_of_an_older_gateway_belongs_to_none() -> None:
    assert b"\xa2tc" not in encode_entry(PLAIN)
    assert decode_entry(encode_entry(PLAIN)).trace is None


def test_an_older_node_does_not_mind_what_it_does_not_know() -> None:
    fields = unpack_map(encode_entry(PLAIN), MAX_ENTRY_SIZE) | {"zz": b"of a later version"}
    assert decode_entry(pack_map(fields, MAX_ENTRY_SIZE)) == PLAIN


@pytest.mark.parametrize("ids", [bytes(24), bytes(16) + b"s" * 8, b"t" * 16 + bytes(8)])
def test_ids_of_zeros_name_no_trace(ids: bytes) -> None:
    fields = unpack_map(encode_entry(PLAIN), MAX_ENTRY_SIZE) | {"tc": ids}
    assert decode_entry(pack_map(fields, MAX_ENTRY_SIZE)).trace is None


@pytest.mark.parametrize("ids", [b"t" * 23, b"t" * 25, "t" * 24, 7, [b"t" * 24]])
def test_what_is_no_trace_is_malformed(ids: object) -> None:
    fields = unpack_map(encode_entry(PLAIN), MAX_ENTRY_SIZE) | {"tc": ids}
    with pytest.raises(ProtocolError):
        decode_entry(pack_map(fields, MAX_ENTRY_SIZE))
