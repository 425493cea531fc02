"""What a node or a sentinel tells Prometheus, read from what they count anyway whenever it asks.

Names begin with `diffuse_node_` or `diffuse_sentinel_`; times are seconds, sizes bytes. Labels are our own short id and
models, and reasons and codes from closed sets: never another member, a session or a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.exporter import SERVING
from routing.errors import ErrorCode
from routing.gossip import GossipFault
from routing.reach import Verdict

if TYPE_CHECKING:
    from routing.network import Network
    from routing.relay import RelayServer

Role = Literal["node", "sentinel"]
SHORT_ID: Final = 8  # hex digits, as logs and `diffuse status` show them
LOADING: Final = "loading"
NO_LINK: Final = (  # why a link does not come about, mostly
    ErrorCode.TIMEOUT,
    ErrorCode.LINK_LOST,
    ErrorCode.HANDSHAKE,
    ErrorCode.ID_MISMATCH,
    ErrorCode.NETWORK,
    ErrorCode.NOT_ALLOWED,
    ErrorCode.TLS,
)
REFUSALS: Final = (  # of a relay
    ErrorCode.GOING_AWAY,
    ErrorCode.NOT_ALLOWED,
    ErrorCode.NO_RESERVATION,
    ErrorCode.QUOTA,
    ErrorCode.RELAY_FULL,
    ErrorCode.TIMEOUT,
)


class MemberMetrics:
    """The metrics of one member, `Exported`. It is there before the member is, and learns of its parts as they come."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.registry = CollectorRegistry()
        self._state: Callable[[], str] = lambda: LOADING
        ProcessCollector(registry=self.registry)
        self.registry.register(_State(self))

    def watch_network(self, network: Network) -> None:
        """Tell what the member sees of its swarm, and what it relays if it is a sentinel."""
        self.registry.register(_Membership(network, self.role))
        self.registry.register(_Relaying(network))

    def watch(self, part: Collector) -> None:
        """Tell something more."""
        self.registry.register(part)

    def know_state(self, state: Callable[[], str]) -> None:
        """From now on `state` says what the member does."""
        self._state = state

    def state(self) -> str:
        """One word: "serving", or what it does instead."""
        return self._state()

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self.registry)


class _State(Collector):
    """There from the first second: whether the member serves, and which version it is."""

    def __init__(self, metrics: MemberMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        role = self._metrics.role
        is_serving = self._metrics.state() == SERVING
        yield gauge(
            f"{role}_ready", "1 while it does its work, 0 while it loads, waits or leaves", is_serving
        )
        build = GaugeMetricFamily(f"diffuse_{role}_build_info", "This software", labels=["version"])
        build.add_metric([_version()], 1)
        yield build


class _Membership(Collector):
    """How a member stands in its swarm."""

    def __init__(self, network: Network, role: Role) -> None:
        self._network = network
        self._role = role

    def collect(self) -> Iterator[Metric]:
        network, role = self._network, self._role
        info = GaugeMetricFamily(f"diffuse_{role}_info", "Who this is", labels=["node"])
        info.add_metric([network.node_id.hex()[:SHORT_ID]], 1)
        yield info
        if network.bound is None:  # not started: there is nothing else yet
            return
        status = network.status()
        yield gauge(f"{role}_members", "Live members of the swarm that are known here", len(status.nodes))
        yield gauge(f"{role}_members_suspected", "Of them such as seem to be gone", status.num_suspected)
        yield gauge(f"{role}_records", "Announcements kept, farewells among them", status.table_size)
        yield gauge(f"{role}_addresses", "Addresses of ours that others are told", len(status.contacts))
        yield gauge(f"{role}_reservations_held", "Places at sentinels for us", len(status.reservations))
        yield gauge(f"{role}_key_rival", "1 when another process uses our key", status.rival)
        if status.clock_skew_ms is not None:
            skew_s = status.clock_skew_ms / 1000
            yield gauge(f"{role}_clock_skew_seconds", "Our clock less those of others, median", skew_s)
        reach = GaugeMetricFamily(
            f"diffuse_{role}_reachability", "1 at what others found when they dialled us", labels=["verdict"]
        )
        for verdict in Verdict:
            reach.add_metric([verdict.value], verdict is status.reachability)
        yield reach
        faults = dict.fromkeys(map(str, GossipFault), 0) | status.faults  # from 0: what is new is an increase
        yield by_label(
            f"{role}_gossip_faults", "Announcements and messages refused", "reason", faults.items()
        )
        yield from self._links()

    def _links(self) -> Iterator[Metric]:
        role, endpoint = self._role, self._network.endpoint
        links, counters = endpoint.links, endpoint.counters
        num_relayed = sum(link.is_relayed for link in links)
        live = GaugeMetricFamily(f"diffuse_{role}_links", "Live links", labels=["path"])
        live.add_metric(["direct"], len(links) - num_relayed)
        live.add_metric(["relayed"], num_relayed)
        yield live
        sizes = {"sent": counters.payload_bytes_sent, "received": counters.payload_bytes_received}
        yield by_label(f"{role}_link_bytes", "What went over all links", "direction", sizes.items())
        yield counter(f"{role}_handshakes", "Links that came about", counters.handshakes_done)
        failed = dict.fromkeys((code.name for code in NO_LINK), 0) | counters.handshakes_failed
        yield by_label(f"{role}_handshakes_failed", "Links that did not", "code", failed.items())
        refused = counters.connections_refused
        yield counter(
            f"{role}_connections_refused", "Before their first byte, for there were too many", refused
        )


class _Relaying(Collector):
    """What a sentinel passes on; nothing for other members."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def collect(self) -> Iterator[Metric]:
        relay = self._network.relay
        if relay is not None:
            yield from self._collect(relay)

    def _collect(self, relay: RelayServer) -> Iterator[Metric]:
        limits = relay.limits
        yield gauge(
            "sentinel_reservations", "Links of nodes that are reached through us", relay.num_reservations
        )
        yield gauge("sentinel_reservations_limit", "The most there can be", limits.max_reservations)
        yield gauge("sentinel_circuits", "Circuits that are passed on now", relay.num_circuits)
        yield gauge("sentinel_circuits_limit", "The most there can be", limits.max_circuits)
        yield gauge("sentinel_relay_queued_bytes", "What waits to be passed on", relay.queued_bytes)
        yield counter("sentinel_circuits_opened", "Circuits so far", relay.circuits_opened)
        yield counter("sentinel_relayed_bytes", "Sealed bytes taken to be passed on", relay.bytes_passed)
        yield counter("sentinel_reservations_superseded", "Replaced by a newer link", relay.superseded)
        refused = dict.fromkeys((code.name for code in REFUSALS), 0) | relay.refused
        yield by_label("sentinel_relay_refused", "Reservations and circuits refused", "code", refused.items())


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A number that goes up and down."""
    return GaugeMetricFamily(f"diffuse_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A number that only grows; `_total` is added to its name."""
    return CounterMetricFamily(f"diffuse_{name}", text, value=value)


def by_label(name: str, text: str, label: str, counts: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    """Numbers that only grow, by one label from a closed set."""
    family = CounterMetricFamily(f"diffuse_{name}", text, labels=[label])
    for value, count in sorted(counts):
        family.add_metric([str(value)], count)
    return family


def _version() -> str:
    try:
        return version("diffuse")
    except PackageNotFoundError:
        return "unknown"
