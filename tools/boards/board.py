"""What a dashboard is made of: panels with their queries, and the queries that several of them ask.

Knows nothing of how Grafana writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
