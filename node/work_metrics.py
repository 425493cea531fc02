"""What a node computes and keeps, for Prometheus: from the same counts that tests read.

Reads on the event loop what the compute thread counts: a number may be a batch old, and is never half of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.budget import MemoryBudget
from node.metrics import by_label, counter, gauge
from node.scheduler import Scheduler
from node.slice_table import SliceTable
from node.stats import NodeStats
from slicing.batching import BatchCounts


@dataclass(frozen=True, slots=True, eq=False)
class WorkMetrics(Collector):
    """Sessions, memory, slices, steps and batches of one node."""

    stats: NodeStats
    budget: MemoryBudget
    slices: SliceTable
    scheduler: Scheduler
    max_sessions: int

    def collect(self) -> Iterable[Metric]:
        yield from self._sessions()
        yield from self._memory()
        yield from self._slices()
        yield from self._steps()
        yield from self._batches()
        yield from self._prefixes()

    def _sessions(self) -> Iterator[Metric]:
        stats = self.stats
        yield gauge("node_sessions", "Live sessions", stats.num_sessions)
        yield gauge("node_sessions_limit", "The most it holds at once", self.max_sessions)
        yield by_label(
            "node_session_events",
            "What became of sessions",
            "event",
            (
                ("opened", stats.sessions_opened),
                ("rerouted", stats.sessions_rerouted),
                ("cancelled", stats.sessions_cancelled),
                ("expired", stats.sessions_expired),
                ("evicted", stats.sessions_evicted),
                ("refused", stats.sessions_refused),
                ("cut", stats.sessions_cut),
            ),
        )
        yield counter("node_failures_sent", "Steps and sessions that ended in an error", stats.failures_sent)

    def _memory(self) -> Iterator[Metric]:
        stats = self.stats
        yield gauge("node_weights_bytes", "Weights of all slices held", stats.weights_bytes)
        yield gauge("node_kv_bytes", "Reserved for sessions' keys and values", stats.kv_bytes)
        yield gauge("node_kv_limit_bytes", "The most that may be", self.budget.limit_bytes)
        yield gauge("node_history_bytes", "Outputs kept to rebuild neighbours with", stats.history_bytes)

    def _slices(self) -> Iterator[Metric]:
        stats = self.stats
        slices = GaugeMetricFamily("diffuse_node_slices", "Slices held", labels=["state"])
        slices.add_metric(["serving"], stats.num_slices - stats.num_draining)
        slices.add_metric(["draining"], stats.num_draining)
        yield slices
        info = GaugeMetricFamily(
            "diffuse_node_slice_layers", "Layers of each slice offered", labels=["model", "layers", "form"]
        )
        layer = GaugeMetricFamily(
            "diffuse_node_layer_seconds", "What a decode row takes in one layer of late", labels=["model"]
        )
        told = set()
        for held in self.slices.serving:
            offer = held.offer
            named = [offer.model_name, str(offer.spec), offer.form]
            if tuple(named) not in told:  # one slice may be held twice for a moment, while it is moved
                told.add(tuple(named))
                info.add_metric(named, offer.spec.end - offer.spec.start)
        for name, seconds in self._layer_seconds().items():
            layer.add_metric([name], seconds)
        yield info
        yield layer
        loads = (("loaded", stats.slices_loaded), ("failed", stats.loads_failed))
        yield by_label("node_slice_loads", "Slices that placement had loaded", "outcome", loads)
        yield counter("node_slices_moved", "Changes of what is held that were completed", stats.slices_moved)
        yield counter("node_slices_drained", "Slices taken away", stats.slices_drained)

    def _layer_seconds(self) -> dict[str, float]:
        serving = self.slices.serving
        return {held.offer.model_name: self.slices.layer_ms(held) / 1000 for held in serving}

    def _steps(self) -> Iterator[Metric]:
        stats = self.stats
        outcomes = (
            ("run", stats.steps_run),
            ("repeated", stats.steps_repeated),
            ("undone", stats.steps_undone),
        )
        yield by_label(
            "node_steps", "Steps computed, sent again from history, and rolled back", "outcome", outcomes
        )
        yield counter("node_rows", "Rows computed", stats.rows_run)
        yield counter("node_calls", "Of the steps, calls of diffusion blocks", stats.calls_run)
        yield counter("node_call_bytes", "What arrived for calls", stats.call_bytes)
        yield counter("node_compute_seconds", "In which steps were computed", stats.compute_s)
        yield counter("node_queue_seconds", "In which steps waited for their turn, summed up", stats.queue_s)

    def _batches(self) -> Iterator[Metric]:
        counts, (_, busy_s) = self.scheduler.counts, self.scheduler.busy
        yield gauge("node_steps_queued", "Steps that wait for the compute thread", self.scheduler.num_queued)
        yield gauge("node_batch_age_seconds", "For how long the thread computes the present batch", busy_s)
        rows = HistogramMetricFamily("diffuse_node_batch_rows", "Rows of a batch")
        rows.add_metric([], _buckets(counts), counts.rows)
        yield rows
        yield counter("node_batch_steps", "Steps in all batches", counts.works)
        yield counter("node_batch_pieces", "Batches with a piece of a prefill in them", counts.pieces)
        yield counter(
            "node_batch_repeats", "Batches that failed, and were computed one by one", counts.repeats
        )
        yield counter("node_idle_seconds", "Without work while sessions were open", counts.idle_s)

    def _prefixes(self) -> Iterator[Metric]:
        stats = self.stats
        yield gauge("node_prefixes", "Ended sessions kept for others to begin with", stats.num_prefixes)
        yield gauge("node_prefix_bytes", "What of the reserved memory is theirs", stats.prefix_bytes)
        lookups = (("hit", stats.prefix_hits), ("miss", stats.prefix_misses))
        yield by_label("node_prefix_lookups", "Sessions that might begin with one", "outcome", lookups)
        yield counter("node_prefix_tokens", "Positions that needed no step", stats.prefix_tokens)
        yield counter("node_prefixes_evicted", "Let go for room or age", stats.prefixes_evicted)


def _buckets(counts: BatchCounts) -> list[tuple[str, float]]:
    """Batches of 1, 2-3, 4-7, ... rows, summed up to each bound."""
    total, buckets = 0, []
    for power, batches in enumerate(tuple(counts.by_rows)):
        total += batches
        is_last = power + 1 == len(counts.by_rows)
        buckets.append(("+Inf" if is_last else str(float(2 ** (power + 1) - 1)), float(total)))
    return buckets
