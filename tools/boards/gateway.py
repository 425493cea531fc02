"""What the gateway's dashboard asks."""

from __future__ import annotations

from typing import Final

from tools.boards.board import (
    GATE,
    MODEL,
    RED_BELOW_ONE,
    Board,
    Panel,
    increase,
    mean,
    quantile,
    quantiles,
    rate,
)

GATEWAY: Final = Board(
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
