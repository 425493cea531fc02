"""What the dashboard of nodes asks."""

from __future__ import annotations

from typing import Final

from tools.boards.board import BATCHES, NODE, RED_BELOW_ONE, Board, Panel, increase, per_step, rate

NODES: Final = Board(
    "diffuse-node",
    "Diffuse nodes",
    {"instance": 'label_values(up{job="diffuse-node"}, instance)'},
    (
        (
            "Now",
            (
                Panel(
                    "Serving",
                    {"": f"sum(diffuse_node_ready{{{NODE}}})"},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
                Panel("Sessions", {"": f"sum(diffuse_node_sessions{{{NODE}}})"}, kind="stat"),
                Panel(
                    "Rows a second",
                    {"": f"sum(rate(diffuse_node_rows_total{{{NODE}}}[$__rate_interval]))"},
                    kind="stat",
                ),
                Panel(
                    "Busy, the busiest",
                    {"": f"max(rate(diffuse_node_compute_seconds_total{{{NODE}}}[$__rate_interval]))"},
                    unit="percentunit",
                    kind="stat",
                ),
                Panel(
                    "Session memory in use, the fullest",
                    {"": f"max(diffuse_node_kv_bytes{{{NODE}}} / diffuse_node_kv_limit_bytes{{{NODE}}})"},
                    unit="percentunit",
                    kind="stat",
                    thresholds=((None, "green"), (0.8, "orange"), (0.95, "red")),
                ),
                Panel(
                    "Errors an hour",
                    {"": f"sum({increase('diffuse_node_failures_sent_total', NODE, '1h')})"},
                    kind="stat",
                ),
            ),
        ),
        (
            "Computing",
            (
                Panel(
                    "Share of time that it computes",
                    {"{{instance}}": rate("diffuse_node_compute_seconds_total", "instance", NODE)},
                    unit="percentunit",
                ),
                Panel(
                    "A step's wait and work, mean",
                    {
                        f"{{{{instance}}}} {word}": per_step(f"diffuse_node_{word}_seconds_total")
                        for word in ("queue", "compute")
                    },
                    unit="s",
                    text="By steps computed. Steps of one batch share its compute time.",
                ),
                Panel(
                    "Steps a second",
                    {"{{instance}} {{outcome}}": rate("diffuse_node_steps_total", "instance, outcome", NODE)},
                    unit="ops",
                ),
                Panel("Rows a second", {"{{instance}}": rate("diffuse_node_rows_total", "instance", NODE)}),
                Panel(
                    "Rows of a batch",
                    {"{{le}}": rate("diffuse_node_batch_rows_bucket", "le", NODE)},
                    kind="heatmap",
                ),
                Panel(
                    "Steps that share a batch, mean",
                    {
                        "{{instance}}": f"{rate('diffuse_node_batch_steps_total', 'instance', NODE)} / {BATCHES}"
                    },
                ),
                Panel("Steps that wait", {"{{instance}}": f"diffuse_node_steps_queued{{{NODE}}}"}),
                Panel(
                    "Age of the present batch",
                    {"{{instance}}": f"diffuse_node_batch_age_seconds{{{NODE}}}"},
                    unit="s",
                ),
                Panel(
                    "Idle while sessions are open",
                    {"{{instance}}": rate("diffuse_node_idle_seconds_total", "instance", NODE)},
                    unit="percentunit",
                    text="High on every node of a route: answers wait for lines or for gateways, not for computing.",
                ),
                Panel(
                    "Bytes of calls a second",
                    {"{{instance}}": rate("diffuse_node_call_bytes_total", "instance", NODE)},
                    unit="Bps",
                ),
            ),
        ),
        (
            "Sessions and memory",
            (
                Panel("Sessions", {"{{instance}}": f"diffuse_node_sessions{{{NODE}}}"}),
                Panel(
                    "What becomes of sessions",
                    {"{{event}}": rate("diffuse_node_session_events_total", "event", NODE)},
                    unit="cps",
                ),
                Panel(
                    "Memory",
                    {
                        "{{instance}} resident": f"process_resident_memory_bytes{{{NODE}}}",
                        "{{instance}} weights": f"diffuse_node_weights_bytes{{{NODE}}}",
                        "{{instance}} sessions": f"diffuse_node_kv_bytes{{{NODE}}}",
                        "{{instance}} sessions, limit": f"diffuse_node_kv_limit_bytes{{{NODE}}}",
                        "{{instance}} history": f"diffuse_node_history_bytes{{{NODE}}}",
                    },
                    unit="bytes",
                ),
                Panel(
                    "Prefixes kept",
                    {
                        "{{instance}} kept": f"diffuse_node_prefixes{{{NODE}}}",
                        "{{instance}} {{outcome}} a second": rate(
                            "diffuse_node_prefix_lookups_total", "instance, outcome", NODE
                        ),
                    },
                ),
                Panel(
                    "Errors sent",
                    {"{{instance}}": rate("diffuse_node_failures_sent_total", "instance", NODE)},
                    unit="cps",
                ),
                Panel(
                    "Processor",
                    {"{{instance}}": rate("process_cpu_seconds_total", "instance", NODE)},
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Slices and links",
            (
                Panel("Slices", {"{{instance}} {{state}}": f"diffuse_node_slices{{{NODE}}}"}),
                Panel(
                    "Loads and moves",
                    {
                        "{{instance}} {{outcome}}": increase("diffuse_node_slice_loads_total", NODE),
                        "{{instance}} moved": increase("diffuse_node_slices_moved_total", NODE),
                    },
                ),
                Panel("Links", {"{{instance}} {{path}}": f"diffuse_node_links{{{NODE}}}"}),
                Panel(
                    "Bytes on links",
                    {
                        "{{instance}} {{direction}}": rate(
                            "diffuse_node_link_bytes_total", "instance, direction", NODE
                        )
                    },
                    unit="Bps",
                ),
            ),
        ),
    ),
)
