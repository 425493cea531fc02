"""What the dashboard of the network asks."""

from __future__ import annotations

from typing import Final

from tools.boards.board import LAYERS, RED_BELOW_ONE, RED_FROM_ONE, Board, Panel, members, rate

NETWORK: Final = Board(
    "diffuse-network",
    "Diffuse network",
    {},
    (
        (
            "Now",
            (
                Panel(
                    "Nodes known to gateways",
                    {"": "max(diffuse_network_nodes)"},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
                Panel(
                    "Sentinels up",
                    {"": 'sum(up{job="diffuse-sentinel"})'},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
                Panel("Nodes up", {"": 'sum(up{job="diffuse-node"})'}, kind="stat", thresholds=RED_BELOW_ONE),
                Panel(
                    "Suspected",
                    {"": "max(diffuse_network_nodes_suspected)"},
                    kind="stat",
                    thresholds=RED_FROM_ONE,
                ),
                Panel(
                    "Relayed nodes",
                    {
                        "": 'sum(diffuse_network_nodes_linked{path="relayed"})'
                        " / clamp_min(sum(diffuse_network_nodes_linked), 1)"
                    },
                    unit="percentunit",
                    kind="stat",
                    text="Share of nodes that gateways reach through a sentinel only.",
                ),
                Panel(
                    "Models with a whole route",
                    {"": "max(diffuse_models_covered)"},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
            ),
        ),
        (
            "Coverage",
            (
                Panel(
                    "Layers served",
                    {"{{model}}": f"max by (model) (diffuse_model_layers_covered) / {LAYERS}"},
                    unit="percentunit",
                    text="Of each model, those that at least one live node or a gateway's end holds.",
                ),
                Panel(
                    "Copies of a layer, mean",
                    {"{{model}}": f"sum by (model) (diffuse_node_slice_layers) / on (model) {LAYERS}"},
                    text="Layers that scraped nodes hold, by the layers of the model.",
                ),
                Panel(
                    "Who holds what",
                    {"": "max by (instance, model, layers, form) (diffuse_node_slice_layers)"},
                    kind="table",
                ),
                Panel(
                    "A decode row in one layer",
                    {"{{instance}} {{model}}": "diffuse_node_layer_seconds"},
                    unit="s",
                ),
            ),
        ),
        (
            "Members",
            (
                Panel(
                    "Nodes linked to gateways",
                    {"{{path}}": "sum by (path) (diffuse_network_nodes_linked)"},
                    stacked=True,
                ),
                Panel(
                    "Members that each knows",
                    {
                        "{{instance}}": members("members"),
                    },
                    text="Lines that stay apart are members that do not hear of each other.",
                ),
                Panel("Suspected", {"{{instance}}": members("members_suspected")}),
                Panel(
                    "Oldest announcement", {"{{instance}}": "diffuse_network_directory_age_seconds"}, unit="s"
                ),
                Panel("Table of records", {"{{instance}}": members("records")}),
                Panel(
                    "Announcements refused",
                    {
                        "{{reason}}": f"sum by (reason) (rate({members('gossip_faults_total')}[$__rate_interval]))"
                    },
                    unit="cps",
                ),
                Panel(
                    "Clock, against others",
                    {"{{instance}}": members("clock_skew_seconds")},
                    unit="s",
                ),
                Panel(
                    "Links that failed",
                    {
                        "{{code}}": f"sum by (code) (rate({members('handshakes_failed_total')}[$__rate_interval]))"
                    },
                    unit="cps",
                ),
            ),
        ),
        (
            "Sentinels",
            (
                Panel(
                    "Places and circuits",
                    {
                        "{{instance}} places": "diffuse_sentinel_reservations",
                        "{{instance}} circuits": "diffuse_sentinel_circuits",
                    },
                ),
                Panel(
                    "Bytes passed on",
                    {"{{instance}}": rate("diffuse_sentinel_relayed_bytes_total", "instance", "")},
                    unit="Bps",
                ),
                Panel(
                    "Bytes that wait", {"{{instance}}": "diffuse_sentinel_relay_queued_bytes"}, unit="bytes"
                ),
                Panel(
                    "Refused",
                    {"{{code}}": rate("diffuse_sentinel_relay_refused_total", "code", "")},
                    unit="cps",
                ),
            ),
        ),
    ),
)
