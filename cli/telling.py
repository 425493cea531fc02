"""How a service tells what it is doing: lines for people, or one JSON object a line for a supervisor.

Events are plain mappings with an `event` name; this file knows only how to print them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import typer

from cli import show
from cli.options import Events


class Teller:
    """Prints events in the form that was asked for."""

    def __init__(self, form: Events, public_addr: str | None = None) -> None:
        self._form = form
        self._public_addr = public_addr  # what to tell instead of the bound address
        self._told: dict[str, int] = {}  # stage -> tenths of it that were told

    def tell(self, event: Mapping[str, Any]) -> None:
        """Print one event on standard output, flushed: a supervisor waits for it."""
        if self._form is Events.JSON:
            url = {"url": self._public_url(str(event["url"]))} if "url" in event else {}
            show.print_json({**event, **url})
        elif line := self._line(event):
            typer.echo(line)

    def _line(self, event: Mapping[str, Any]) -> str:
        match event:
            case {"event": "progress", "stage": str(stage), "done_bytes": done, "total_bytes": total}:
                return self._progress_line(stage, done, total)
            case {"event": "measured", "form": form, "threads": threads, "layer_ms": layer_ms}:
                plural = "" if threads == 1 else "s"
                return f"computes {form} on {threads} thread{plural}, {layer_ms:.2f} ms a layer"
            case {"event": "metrics", "url": url}:
                return f"metrics are at {url}"
            case {"event": "ready", "role": "sentinel", "address": address}:
                return str(address)
            case {"event": "ready", "address": "", "layers": layers}:
                return f"serves layers {layers}; no way in is proved yet"
            case {"event": "ready", "address": address, "layers": layers}:
                return f"serves layers {layers}; gateways reach it with\n--node {address}"
            case {"event": "reachable", "address": address}:
                return f"others reach it at {address}"
            case {"event": "placing", "slices": [*slices]}:
                return f"loads {_slices(slices)}, where it helps most"
            case {"event": "moving", "slices": [*slices], "from": [*held]}:
                return f"loads {_slices(slices)} beside {_slices(held)}"
            case {"event": "moved", "slices": [*slices]}:
                return f"serves {_slices(slices)} now"
            case {"event": "load_failed", "model": model, "layers": layers, "text": text}:
                return f"layers {layers} of {model} could not be loaded: {text}"
            case {"event": "draining", "num_sessions": 0}:
                return "leaves the swarm"
            case {"event": "draining", "num_sessions": num_sessions, "limit_s": limit_s}:
                plural = "" if num_sessions == 1 else "s"
                return f"leaves: {num_sessions} session{plural} may end within {limit_s:g} s; Ctrl+C again ends at once"
            case {"event": "models", "models": [*models]}:
                return f"models: {', '.join(map(show.printable, models)) or 'none has a whole route now'}"
            case {"event": "ready", "url": url}:
                missing = [(start, end) for start, end in event.get("missing_layers", ())]
                warning = f", but no node serves layers {show.ranges(missing)} yet" if missing else ""
                if ends := event.get("missing_ends"):
                    warning += f", but no node holds the {' and '.join(ends)} end (--hold-ends)"
                return f"serves {self._public_url(str(url))}{warning}"
            case {"event": "prepared", "model": model, "num_layers": num_layers}:
                return f"{model} is here: {num_layers} layers"
            case {"event": "stopped"}:
                return ""
            case {"event": str(name), **rest}:
                return f"{name} " + " ".join(f"{key}={value}" for key, value in rest.items())
        return ""

    def _public_url(self, url: str) -> str:
        """The bound address replaced by what clients should use."""
        bound = urlsplit(url)
        return urlunsplit(bound._replace(netloc=self._public_addr or bound.netloc))

    def _progress_line(self, stage: str, done: int, total: int) -> str:
        """A line for each tenth, and none twice."""
        tenth = 10 * done // total if total else 10
        if self._told.get(stage) == tenth:
            return ""
        self._told[stage] = tenth
        return f"{stage} {show.size(done)} of {show.size(total)}"


def _slices(slices: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"layers {one['layers']} of {one['model']}" for one in slices) or "nothing"
