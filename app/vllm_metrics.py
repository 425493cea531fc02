"""The gateway's metrics once more, under the names that vLLM's dashboards and the autoscalers made for them ask for.

Read off our own at every scrape, so the two never disagree. Labels are vLLM's: `model_name` and `finished_reason`.
What counts for the whole gateway here (its one queue, the places on nodes) is told of each model of text alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.engine.request import Library

if TYPE_CHECKING:
    from app.metrics import GatewayMetrics

LABELS: Final[Mapping[str, str]] = {"model": "model_name", "finish_reason": "finished_reason", "le": "le"}
KINDS: Final = frozenset({"text", "multimodal", "seq2seq"})  # of models that answer chats


class VllmMetrics(Collector):
    """Of every model that answers chats. `fullest` is the share of places taken on the fullest node, if known."""

    def __init__(self, metrics: GatewayMetrics, library: Library, fullest: Callable[[], float]) -> None:
        self._library = library
        self._fullest = fullest
        self._metrics = metrics
        self._renamed: Mapping[str, MetricWrapperBase] = {
            "vllm:num_requests_running": metrics.running,
            "vllm:prompt_tokens": metrics.prompt_tokens,
            "vllm:generation_tokens": metrics.generated_tokens,
            "vllm:request_success": metrics.answers,
            "vllm:time_to_first_token_seconds": metrics.first_token,
            "vllm:inter_token_latency_seconds": metrics.inter_token,
            "vllm:e2e_request_latency_seconds": metrics.request_seconds,
            "vllm:request_prefill_time_seconds": metrics.prefill_seconds,
            "vllm:request_decode_time_seconds": metrics.decode_seconds,
            "vllm:request_prompt_tokens": metrics.request_prompt_tokens,
            "vllm:request_generation_tokens": metrics.request_generated_tokens,
        }

    def collect(self) -> Iterable[Metric]:
        names = [known.name for known in self._library.models() if known.kind in KINDS]
        for name, ours in self._renamed.items():
            yield _renamed(name, ours, names)
        yield _shared("vllm:request_queue_time_seconds", self._metrics.admission.queue_seconds, names)
        yield _shared("vllm:num_requests_waiting", self._metrics.admission.queued, names)
        places = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of places for sessions that are taken on the fullest node known; 1 means all",
            labels=["model_name"],
        )
        for name in names:
            places.add_metric([name], self._fullest())
        yield places


def _renamed(name: str, ours: MetricWrapperBase, models: Iterable[str]) -> Metric:
    """One of ours with other labels, summed over those that vLLM has not."""
    family = next(iter(ours.collect()))
    made = Metric(name, family.documentation, family.type)
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    wanted = frozenset(models)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix == "_created" or sample.labels["model"] not in wanted:
            continue
        labels = tuple((LABELS[label], value) for label, value in sample.labels.items() if label in LABELS)
        totals[suffix, labels] = totals.get((suffix, labels), 0.0) + sample.value
    for (suffix, labels), value in totals.items():
        made.add_sample(name + suffix, dict(labels), value)
    return made


def _shared(name: str, ours: MetricWrapperBase, models: Iterable[str]) -> Metric:
    """One of ours that names no model, for each of them."""
    family = next(iter(ours.collect()))
    made = Metric(name, family.documentation, family.type)
    for model in models:
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix != "_created":
                made.add_sample(name + suffix, {"model_name": model} | sample.labels, sample.value)
    return made
