"""Write the Grafana dashboards: `python -m tools.dashboards`. What a panel asks stands here; how it looks follows.

Each board is a list of rows of panels. tests/deploy asks a real Prometheus every query of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

FOLDER: Final = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboards"
WIDTH: Final = 24  # of Grafana's grid
HEIGHT: Final = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 7}
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
Kind = Literal["stat", "timeseries", "heatmap", "table"]


@dataclass(frozen=True)
class Panel:
    """One panel: a title, a unit in Grafana's words, and its queries with their legends."""

    title: str
    queries: dict[str, str]  # legend -> PromQL
    unit: str = "short"
    kind: Kind = "timeseries"
    text: str = ""  # what it means, in the panel's corner
    stacked: bool = False
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)


@dataclass(frozen=True)
class Board:
    """A dashboard; `choices` are variables: name -> the query of its values."""

    uid: str
    title: str
    choices: dict[str, str]
    rows: Sequence[tuple[str, Sequence[Panel]]]


def quantiles(metric: str, by: str, where: str) -> dict[str, str]:
    """Half, nineteen in twenty and ninety-nine in a hundred of a histogram."""
    rate = f"sum by ({by}, le) (rate({metric}_bucket{{{where}}}[$__rate_interval]))"
    return {f"{{{{{by}}}}} p{round(100 * q)}": f"histogram_quantile({q}, {rate})" for q in (0.5, 0.95, 0.99)}


def rate(metric: str, by: str, where: str) -> str:
    """A counter a second."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def mean(metric: str, by: str, where: str) -> str:
    """Of what a histogram observed."""
    return f"{rate(metric + '_sum', by, where)} / {rate(metric + '_count', by, where)}"


def per_step(metric: str) -> str:
    """A counter of nodes for each step that they computed."""
    return f"{rate(metric, 'instance', NODE)} / {rate('diffuse_node_steps_total', 'instance', NODE)}"


def increase(metric: str, where: str, time: str = "$__rate_interval") -> str:
    """By how much a counter grew."""
    return f"increase({metric}{{{where}}}[{time}])"


def quantile(q: float, metric: str, where: str) -> str:
    """One quantile of a histogram, over everything."""
    return f"histogram_quantile({q}, {rate(metric + '_bucket', 'le', where)})"


def members(metric: str) -> str:
    """A metric that nodes and sentinels have."""
    return f'{{__name__=~"diffuse_(node|sentinel)_{metric}"}}'


GATE: Final = 'job="diffuse-gateway", instance=~"$instance"'
MODEL: Final = f'{GATE}, model=~"$model"'
NODE: Final = 'job="diffuse-node", instance=~"$instance"'
BATCHES: Final = rate("diffuse_node_batch_rows_count", "instance", NODE)
LAYERS: Final = "max by (model) (diffuse_model_layers)"
RED_BELOW_ONE: Final = ((None, "red"), (1.0, "green"))
RED_FROM_ONE: Final = ((None, "green"), (1.0, "red"))

GATEWAY = Board(
    "diffuse-gateway",
    "Diffuse gateway",
    {
        "instance": 'label_values(up{job="diffuse-gateway"}, instance)',
        "model": 'label_values(diffuse_model_ready{job="diffuse-gateway"}, model)',
    },
    (
        (
            "Now",
            (
                Panel(
                    "Gateways up",
                    {"": 'sum(up{job="diffuse-gateway"})'},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
                Panel(
                    "Models that can answer",
                    {"": "sum(max by (model) (diffuse_model_ready))"},
                    kind="stat",
                    thresholds=RED_BELOW_ONE,
                ),
                Panel("Answers running", {"": f"sum(diffuse_requests_running{{{GATE}}})"}, kind="stat"),
                Panel(
                    "Tokens a second",
                    {"": f"sum(rate(diffuse_generated_tokens_total{{{MODEL}}}[$__rate_interval]))"},
                    kind="stat",
                ),
                Panel(
                    "First token, p95",
                    {"": quantile(0.95, "diffuse_time_to_first_token_seconds", MODEL)},
                    unit="s",
                    kind="stat",
                ),
                Panel(
                    "Failovers in an hour",
                    {"": f"sum({increase('diffuse_replays_total', MODEL, '1h')})"},
                    kind="stat",
                ),
            ),
        ),
        (
            "Requests",
            (
                Panel(
                    "Answers by finish reason",
                    {
                        "{{model}} {{finish_reason}}": rate(
                            "diffuse_answers_total", "model, finish_reason", MODEL
                        )
                    },
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Refused and failed, by code",
                    {"{{code}}": rate("diffuse_request_errors_total", "code", GATE)},
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Clients that left",
                    {"{{endpoint}}": rate("diffuse_requests_aborted_total", "endpoint", GATE)},
                    unit="reqps",
                ),
                Panel(
                    "Answers running", {"{{model}}": f"sum by (model) (diffuse_requests_running{{{MODEL}}})"}
                ),
                Panel("Request time", quantiles("diffuse_request_seconds", "model", MODEL), unit="s"),
                Panel(
                    "Time to first token, of streams",
                    quantiles("diffuse_time_to_first_token_seconds", "model", MODEL),
                    unit="s",
                ),
            ),
        ),
        (
            "Queue and limits",
            (
                Panel(
                    "Requests that wait",
                    {"{{instance}}": f"sum by (instance) (diffuse_requests_queued{{{GATE}}})"},
                ),
                Panel(
                    "Wait for a place",
                    {
                        f"p{round(100 * q)}": quantile(q, "diffuse_queue_seconds", GATE)
                        for q in (0.5, 0.95, 0.99)
                    },
                    unit="s",
                    text="Of requests that got one.",
                ),
                Panel(
                    "Sent away by a limit",
                    {"{{reason}}": rate("diffuse_requests_limited_total", "reason", GATE)},
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Failures of the store of limits, jobs and records",
                    {"{{part}}": rate("diffuse_state_errors_total", "part", GATE)},
                    unit="cps",
                ),
            ),
        ),
        (
            "Tokens",
            (
                Panel(
                    "Tokens a second",
                    {
                        "{{model}} generated": rate("diffuse_generated_tokens_total", "model", MODEL),
                        "{{model}} prompt": rate("diffuse_prompt_tokens_total", "model", MODEL),
                        "{{model}} prompt, held already": rate(
                            "diffuse_prompt_tokens_cached_total", "model", MODEL
                        ),
                    },
                ),
                Panel("Between tokens", quantiles("diffuse_inter_token_seconds", "model", MODEL), unit="s"),
                Panel(
                    "Where a token's time goes",
                    {"{{part}}": mean("diffuse_token_seconds", "part", MODEL)},
                    unit="s",
                    stacked=True,
                    text="Mean of answers. compute: in nodes; local: in this gateway; the others lie between.",
                ),
                Panel(
                    "A step at each place of the route",
                    {
                        "{{model}} {{stage}} {{part}}": rate(
                            "diffuse_hop_seconds_total", "model, stage, part", MODEL
                        )
                        + " / on (model, stage) group_left "
                        + rate("diffuse_hop_steps_total", "model, stage", MODEL)
                    },
                    unit="s",
                    stacked=True,
                    text="Mean of answers: network is the way to the hop, and from the last one back.",
                ),
                Panel(
                    "Guessed tokens, and those that came true",
                    {
                        "{{model}} guessed": rate("diffuse_drafted_tokens_total", "model", MODEL),
                        "{{model}} true": rate("diffuse_accepted_draft_tokens_total", "model", MODEL),
                    },
                ),
                Panel(
                    "Rows of a batch of the ends, mean",
                    {"{{model}}": mean("diffuse_ends_batch_rows", "model", MODEL)},
                ),
                Panel(
                    "Kept answers",
                    {
                        "{{model}} kept": f"sum by (model) (diffuse_prefixes{{{MODEL}}})",
                        "{{model}} used a second": rate("diffuse_prefix_hits_total", "model", MODEL),
                    },
                ),
            ),
        ),
        (
            "Gateway processes",
            (
                Panel(
                    "Processor, in cores",
                    {"{{instance}}": rate("process_cpu_seconds_total", "instance", GATE)},
                ),
                Panel("Memory", {"{{instance}}": f"process_resident_memory_bytes{{{GATE}}}"}, unit="bytes"),
                Panel(
                    "Open files and sockets, of those allowed",
                    {"{{instance}}": f"process_open_fds{{{GATE}}} / process_max_fds{{{GATE}}}"},
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Failover",
            (
                Panel(
                    "Routes rebuilt in the middle of an answer",
                    {"{{model}}": f"sum by (model) ({increase('diffuse_replays_total', MODEL)})"},
                ),
                Panel(
                    "How long an answer stood still",
                    {
                        f"p{round(100 * q)}": quantile(q, "diffuse_failover_pause_seconds", GATE)
                        for q in (0.5, 0.95)
                    },
                    unit="s",
                ),
            ),
        ),
        (
            "Pictures, videos, sounds",
            (
                Panel(
                    "Denoising steps a second",
                    {"{{model}}": rate("diffuse_denoising_steps_total", "model", MODEL)},
                ),
                Panel("A denoising step", quantiles("diffuse_step_seconds", "model", MODEL), unit="s"),
                Panel(
                    "Share of a step that a stage computes",
                    {"{{model}} stage {{stage}}": mean("diffuse_stage_busy_share", "model, stage", MODEL)},
                    unit="percentunit",
                ),
                Panel(
                    "Bytes of passes a second",
                    {"{{model}} {{direction}}": rate("diffuse_pass_bytes_total", "model, direction", MODEL)},
                    unit="Bps",
                ),
            ),
        ),
    ),
)

NETWORK = Board(
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

NODES = Board(
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

BOARDS: Final = {"gateway": GATEWAY, "network": NETWORK, "node": NODES}


def rendered(board: Board) -> dict[str, Any]:
    """A board as Grafana imports it."""
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["diffuse"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["diffuse"], "title": "Diffuse", "asDropdown": True}],
        "templating": {"list": [_datasource(), *(_choice(*item) for item in board.choices.items())]},
        "panels": _panels(board),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(board: Board) -> list[dict[str, Any]]:
    """Panels from left to right, rows below each other: six numbers, or two graphs, beside each other."""
    made: list[dict[str, Any]] = []
    top = 0
    for title, panels in board.rows:
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": _place(0, top, WIDTH, 1)})
        top, left = top + 1, 0
        for panel in panels:
            width = 4 if panel.kind == "stat" else 12
            if left + width > WIDTH:
                left, top = 0, top + HEIGHT[panel.kind]
            place = _place(left, top, width, HEIGHT[panel.kind])
            made.append({"id": len(made) + 1, "gridPos": place, **_panel(panel)})
            left += width
        top += HEIGHT[panels[-1].kind]
    return made


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    is_now = panel.kind in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
            "instant": is_now,
            "range": not is_now,
            "format": {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series"),
        }
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    steps = [{"value": value, "color": color} for value, color in panel.thresholds]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults |= {"min": 0} if panel.title != "Clock, against others" else {}
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 5,
            "stacking": stacking,
            "showPoints": "never",
        }
    about = {"description": panel.text} if panel.text else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        **about,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
    }


def _options(kind: Kind) -> dict[str, Any]:
    match kind:
        case "stat":
            return {"colorMode": "value", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"axisPlacement": "left"},
                "color": {"mode": "scheme", "scheme": "Blues"},
            }
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}


def main() -> None:
    """Write all three files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(rendered(board), indent=1) + "\n")


if __name__ == "__main__":
    main()
