"""What a swarm looks like from one member, made up: for whatever shows or counts it."""

from __future__ import annotations

from typing import Any

from routing.network_status import NetworkStatus, NodeStatus
from routing.reach import Verdict
from routing.types import NodeId


def node_status(node_id: bytes, **fields: Any) -> NodeStatus:
    """A node that is linked directly, idle, and serves nothing; `fields` change it."""
    told: dict[str, Any] = {
        "node_id": NodeId(node_id),
        "roles": ("node",),
        "contacts": (),
        "offers": (),
        "load": 0,
        "max_sessions": 1,
        "rtt_ms": None,
        "path": "direct",
        "is_suspected": False,
        "owner": "",
        "age_s": 10.0,
    }
    return NodeStatus(**told | fields)


def network_status(*nodes: NodeStatus, **fields: Any) -> NetworkStatus:
    """A swarm of these nodes, and nothing else to tell; `fields` change it."""
    told: dict[str, Any] = {
        "node_id": NodeId(bytes(32)),
        "bound": None,
        "observed": (),
        "reachability": Verdict.UNKNOWN,
        "contacts": (),
        "probes": (),
        "reservations": (),
        "clock_skew_ms": None,
        "nodes": nodes,
        "models": (),
        "num_links": 1,
        "num_suspected": 0,
        "table_size": len(nodes),
    }
    return NetworkStatus(**told | fields)
