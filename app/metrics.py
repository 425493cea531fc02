"""Prometheus metrics of the gateway, in a registry of their own that is passed down.

Labels are the model, the endpoint, the finish reason and the error code; never a request id, a key, a prompt
or a path that a client made up. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.admission_metrics import AdmissionMetrics
from app.diffusion_metrics import DiffusionMetrics
from app.ends_metrics import EndsMetrics
from app.engine.request import Library
from app.hop_metrics import HopMetrics
from app.known_series import begin_endpoints, begin_model
from app.network_metrics import NetworkMetrics
from app.prefix_metrics import PrefixMetrics
from app.state.trouble import Part
from app.vllm_metrics import VllmMetrics
from routing.network_status import NetworkStatus
from routing.types import NodeRecord

# A prompt on a slow chain takes minutes, so the tails are long (openai.md, section 2.2).
ANSWER_BUCKETS = (0.1, 0.3, 0.8, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 7680)
FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BUCKETS = (
    0.0003,
    0.001,
    0.003,
    0.006,
    0.01,
    0.02,
    0.03,
    0.05,
    0.08,
    0.15,
    0.3,
    0.6,
    1.2,
    2.5,
    5,
    10,
    40,
)
SIZE_BUCKETS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
)  # tokens
# A second where a connection closed, 2 s until silence is suspected, then the replay (transport.md, section 5.6).
PAUSE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 5, 10, 20, 60)


class GatewayMetrics:
    """All metrics of one gateway."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._library: Library | None = None
        self._status: Callable[[], NetworkStatus] | None = None
        ProcessCollector(registry=self.registry)
        self.hops = HopMetrics(self.registry)
        self.diffusion = DiffusionMetrics(self.registry)
        self.admission = AdmissionMetrics(self.registry)
        self.answers = self._counter("answers", "Choices finished", ["model", "endpoint", "finish_reason"])
        self.errors = self._counter("request_errors", "Requests refused or failed", ["endpoint", "code"])
        self.aborts = self._counter("requests_aborted", "Requests whose client left", ["endpoint"])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken in", ["model"])
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens held from earlier answers, not computed again", ["model"]
        )
        self.prefix_hits = self._counter("prefix_hits", "Choices that began with such tokens", ["model"])
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated", ["model"])
        self.embedded = self._counter("embedded_texts", "Texts that vectors were made of", ["model"])
        self.drafted = self._counter("drafted_tokens", "Tokens guessed ahead of an answer", ["model"])
        self.accepted = self._counter("accepted_draft_tokens", "Of them part of the answer", ["model"])
        self.forced = self._counter(
            "forced_tokens", "Tokens of answers that their grammar left no choice of", ["model"]
        )
        self.replays = self._counter("replays", "Routes rebuilt in the middle of an answer", ["model"])
        self.state_errors = self._counter(
            "state_errors", "Failures of the store of limits, jobs and records", ["part"]
        )
        self.failover = self._histogram(
            "failover_pause_seconds",
            "How long an answer stood still while another route took over",
            [],
            PAUSE_BUCKETS,
        )
        self.running = Gauge(
            "diffuse_requests_running", "Requests being answered", ["model"], registry=self.registry
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Arrival to first text, streams only",
            ["model"],
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "Between tokens of a choice", ["model"], TOKEN_BUCKETS
        )
        self.request_seconds = self._histogram(
            "request_seconds", "Arrival to the end of the answer", ["model", "endpoint"], ANSWER_BUCKETS
        )
        self.token_seconds = self._histogram(
            "token_seconds",
            "Share of a token's time, averaged over an answer",
            ["model", "part"],
            TOKEN_BUCKETS,
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "First pass of a choice, over its prompt", ["model"], ANSWER_BUCKETS
        )
        self.decode_seconds = self._histogram(
            "decode_seconds", "Of a choice, from its first token to its last", ["model"], ANSWER_BUCKETS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice", ["model"], SIZE_BUCKETS
        )
        self.request_generated_tokens = self._histogram(
            "request_generated_tokens", "Tokens generated for a choice", ["model"], SIZE_BUCKETS
        )
        begin_endpoints(self)

    def watch_models(self, library: Library) -> None:
        """Let the series of each model begin when it is first seen at a scrape."""
        self._library = library

    def speak_vllm(self, library: Library) -> None:
        """Tell everything under vLLM's names too."""
        self.registry.register(VllmMetrics(self, library, self.fullest))

    def watch_coverage(self, library: Library) -> None:
        """Report at every scrape how many layers of each model live nodes serve."""
        self.registry.register(_LayerCoverage(library))

    def watch_ends(self, library: Library) -> None:
        """Report at every scrape what the ends of the open models computed, and how much of it together."""
        self.registry.register(EndsMetrics(library))

    def watch_prefixes(self, library: Library) -> None:
        """Report at every scrape what is kept of answers."""
        self.registry.register(PrefixMetrics(library))

    def watch_network(
        self, status: Callable[[], NetworkStatus], records: Callable[[], Iterable[NodeRecord]]
    ) -> None:
        """Report at every scrape what the swarm looks like from here."""
        self.registry.register(NetworkMetrics(status, records))
        self._status = status

    def fullest(self) -> float:
        """The share of places for sessions that are taken on the fullest node known; 0 where none is."""
        nodes = self._status().nodes if self._status is not None else ()
        return max((node.load / node.max_sessions for node in nodes if node.max_sessions), default=0.0)

    def count_error(self, endpoint: str, code: str) -> None:
        self.errors.labels(endpoint, code).inc()

    def count_state_error(self, part: Part) -> None:
        self.state_errors.labels(part).inc()

    def render(self) -> bytes:
        """Return the text exposition format."""
        for known in self._library.models() if self._library is not None else ():
            begin_model(self, known)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"diffuse_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"diffuse_{name}", text, labels, buckets=buckets, registry=self.registry)


class _LayerCoverage(Collector):
    """Asks the engines when Prometheus asks us, so the numbers are never stale."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def collect(self) -> Iterable[Metric]:
        layers = GaugeMetricFamily("diffuse_model_layers", "Layers of the model", labels=["model"])
        covered = GaugeMetricFamily(
            "diffuse_model_layers_covered", "Layers that are served", labels=["model"]
        )
        ready = GaugeMetricFamily(
            "diffuse_model_ready", "1 when a whole route exists and the ends are here", labels=["model"]
        )
        num_covered = 0
        for known in self._library.models():
            name, status = known.name, known.status
            num_covered += status.state != "partial"
            layers.add_metric([name], status.num_layers)
            covered.add_metric([name], status.layers_covered)
            ready.add_metric([name], float(status.is_ready))
        models = GaugeMetricFamily(
            "diffuse_models_covered", "Models that have a whole route", value=num_covered
        )
        return [layers, covered, ready, models]
