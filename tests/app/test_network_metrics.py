"""The swarm in numbers: what a scrape tells, and what it does not."""

from __future__ import annotations

from typing import Any

from app.metrics import GatewayMetrics
from routing.network_status import NetworkStatus, NodeStatus
from routing.types import NodeRecord
from tests.app.fake_network import node
from tests.support.swarm_status import network_status, node_status


def member(number: int, **fields: Any) -> NodeStatus:
    return node_status(number.to_bytes(4, "big") + bytes(28), **fields)


def status(*nodes: NodeStatus, **fields: Any) -> NetworkStatus:
    return network_status(*nodes, **{"num_links": 3, "num_suspected": 1} | fields)


def scrape(seen: NetworkStatus, *records: NodeRecord) -> tuple[GatewayMetrics, str]:
    metrics = GatewayMetrics()
    metrics.watch_network(lambda: seen, lambda: records)
    return metrics, metrics.render().decode()


def test_nodes_are_counted_by_how_they_are_linked() -> None:
    seen = status(member(1), member(2, path="relayed"), member(3, path="none"), member(4))
    metrics, _ = scrape(seen)
    value = metrics.registry.get_sample_value
    assert value("diffuse_network_nodes") == 4
    assert value("diffuse_network_nodes_linked", {"path": "direct"}) == 2
    assert value("diffuse_network_nodes_linked", {"path": "relayed"}) == 1
    assert value("diffuse_network_nodes_suspected") == 1
    assert value("diffuse_network_links") == 3


def test_nodes_of_a_list_count_though_nobody_announces_them() -> None:
    metrics, _ = scrape(status(member(1)), node(1), node(7))
    assert metrics.registry.get_sample_value("diffuse_network_nodes") == 2
    assert metrics.registry.get_sample_value("diffuse_network_nodes_linked", {"path": "direct"}) == 2


def test_faults_are_counted_by_reason_and_ages_told() -> None:
    seen = status(member(1, age_s=4.0), member(2, age_s=61.0), faults={"expired": 2, "signature": 1})
    metrics, _ = scrape(seen)
    value = metrics.registry.get_sample_value
    assert value("diffuse_network_gossip_faults_total", {"reason": "expired"}) == 2
    assert value("diffuse_network_directory_age_seconds") == 61.0


def test_no_id_is_in_a_scrape() -> None:
    _, text = scrape(status(member(0xDEADBEEF, owner="feedface" * 8)), node(0xCAFEBABE))
    assert not any(secret in text for secret in ("deadbeef", "cafebabe", "feedface"))


def test_pauses_of_failovers_are_measured() -> None:
    metrics = GatewayMetrics()
    for pause_s in (0.4, 2.2):
        metrics.failover.observe(pause_s)
    value = metrics.registry.get_sample_value
    assert value("diffuse_failover_pause_seconds_count") == 2
    assert value("diffuse_failover_pause_seconds_bucket", {"le": "0.5"}) == 1
