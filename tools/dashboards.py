"""Write the Grafana dashboards: `python -m tools.dashboards`. What they ask is in `tools.boards`, how they look here.

tests/deploy asks a real Prometheus every query of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tools.boards.board import Board, Kind, Panel
from tools.boards.gateway import GATEWAY
from tools.boards.network import NETWORK
from tools.boards.nodes import NODES

FOLDER: Final = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboards"
WIDTH: Final = 24  # of Grafana's grid
HEIGHT: Final = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 7}
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
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
