"""What a gateway knows of its swarm, as Prometheus metrics read at every scrape.

Counts and ages only: no id of a node, a client or an owner is a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from routing.network_status import LinkPath, NetworkStatus
from routing.types import NodeId, NodeRecord

PATHS: tuple[LinkPath, ...] = ("direct", "relayed")


class NetworkMetrics(Collector):
    """Asks for the network's status, and for the directory's records, when Prometheus asks us."""

    def __init__(
        self, status: Callable[[], NetworkStatus], records: Callable[[], Iterable[NodeRecord]]
    ) -> None:
        self._status = status
        self._records = records

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        paths = self._paths(status)
        yield _gauge("network_nodes", "Live nodes that this gateway knows", len(paths))
        yield _gauge("network_nodes_suspected", "Nodes that seem to be gone", status.num_suspected)
        links = GaugeMetricFamily(
            "diffuse_network_nodes_linked", "Nodes with a link of ours, by its kind", labels=["path"]
        )
        counts = Counter(paths.values())
        for path in PATHS:
            links.add_metric([path], counts[path])
        yield links
        yield _gauge("network_links", "Live links, those to sentinels among them", status.num_links)
        oldest_s = max((node.age_s for node in status.nodes), default=0.0)
        yield _gauge("network_directory_age_seconds", "Age of the oldest live announcement", oldest_s)
        faults = CounterMetricFamily(
            "diffuse_network_gossip_faults", "Announcements and messages refused", labels=["reason"]
        )
        for reason, count in sorted(status.faults.items()):
            faults.add_metric([reason], count)
        yield faults

    def _paths(self, status: NetworkStatus) -> dict[NodeId, LinkPath]:
        """How each known node is linked: those that gossip names, and those of a list."""
        paths: dict[NodeId, LinkPath] = {
            record.address.node_id: "relayed" if record.address.is_relayed else "direct"
            for record in self._records()
            if record.is_verified
        }
        return paths | {node.node_id: node.path for node in status.nodes}


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"diffuse_{name}", text, value=value)
