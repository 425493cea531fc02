"""Spans on their way to an OpenTelemetry collector: a bounded queue, a thread of its own, and no complaint but one.

The only file that imports the SDK, and only once somebody asked for traces. Knows nothing of what spans are about.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from routing.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
TRACES_PATH = "/v1/traces"
MAX_QUEUED = 2048  # spans; more of them push the oldest out
EXPORT_EVERY_S = 2.0
EXPORT_TIMEOUT_S = 5.0
MAX_ATTRIBUTE = 200  # characters
MAX_EVENTS = 32  # of one span
COMPLAIN_EVERY_S = 60.0
CLOSE_S = 3.0  # what is left in the queue may take so long at the end


def wanted_endpoint(url: str | None) -> str | None:
    """Where traces go: what was named, else what OpenTelemetry's variables say; None: nowhere.

    Raises SettingsError for what is no URL.
    """
    if os.environ.get(DISABLED_VARIABLE, "").strip().lower() == "true":
        return None
    named = url or next((value for name in ENDPOINT_VARIABLES if (value := os.environ.get(name))), None)
    if not named:
        return None
    try:
        parts = urlsplit(named)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_url = False
    if not is_url:
        raise SettingsError("--traces takes the http:// or https:// URL of an OTLP collector")
    is_whole = url is None and bool(os.environ.get(ENDPOINT_VARIABLES[0]))
    if is_whole or parts.path.rstrip("/").endswith(TRACES_PATH):
        return named
    return parts._replace(path=parts.path.rstrip("/") + TRACES_PATH).geturl()


def open_traces(url: str | None, service: str, instance: str = "") -> TraceExport | None:
    """Begin to export, where that was asked for by `url` or a variable. `instance` tells processes apart.

    Raises SettingsError for what is no URL, and where the extra is not installed.
    """
    endpoint = wanted_endpoint(url)
    if endpoint is None:
        return None
    try:
        return TraceExport(_provider(endpoint, service, instance))
    except ImportError:
        raise SettingsError("traces need the extra: pip install 'diffuse[traces]'") from None


class TraceExport:
    """Spans of one process, from `tracer` to the collector."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer("diffuse", version("diffuse"))

    async def close(self) -> None:
        """Export what is left, for a bounded time: a collector that hangs holds nobody up."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="end of traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await done.wait()
        except TimeoutError:
            logger.warning("traces: what was left could not be exported")


def _provider(endpoint: str, service: str, instance: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)  # `_quiet` says it, once a minute
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    about = {**named, "service.version": version("diffuse"), "service.instance.id": instance}
    provider = TracerProvider(
        resource=Resource.create({key: value for key, value in about.items() if value}),
        span_limits=SpanLimits(max_attribute_length=MAX_ATTRIBUTE, max_events=MAX_EVENTS, max_links=1),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
    place = urlsplit(endpoint).hostname or "?"
    provider.add_span_processor(
        BatchSpanProcessor(
            _quiet(exporter, place),
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=EXPORT_EVERY_S * 1000,
            max_export_batch_size=MAX_QUEUED // 4,
        )
    )
    return provider


def _quiet(inner: SpanExporter, place: str) -> SpanExporter:
    """An exporter that says once a minute that nobody takes spans, and drops them."""
    from opentelemetry.sdk.trace import export

    class QuietExporter(export.SpanExporter):
        def __init__(self) -> None:
            self._complained_at = float("-inf")
            self._lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = inner.export(spans)
            except Exception:
                result = export.SpanExportResult.FAILURE
            if result is not export.SpanExportResult.SUCCESS:
                self._complain(len(spans))
            return result

        def _complain(self, num_lost: int) -> None:
            self._lost += num_lost
            now = time.monotonic()
            if now - self._complained_at >= COMPLAIN_EVERY_S:
                logger.warning("traces: %s takes none, %d spans were dropped", place, self._lost)
                self._complained_at, self._lost = now, 0

        def shutdown(self) -> None:
            inner.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return inner.force_flush(timeout_millis)

    return QuietExporter()
