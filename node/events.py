"""What a node tells whoever started it: plain mappings with an `event` name, ready for JSON.

A node that serves what it was told to: "metrics" where it tells them, "progress" (often), "measured", "ready",
"draining" where sessions are left at the end, "stopped". One that finds its place itself tells "placing" before its
first slice, "moving" and "moved" around each later change, "waiting" where there is nothing for it to do yet,
"load_failed" where a slice could not be loaded, and "reachable" once others have a way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from routing.types import NodeAddress, SliceOffer, SliceSpec
from slicing.batching import BatchCounts

NodeEvent = Mapping[str, object]
OnEvent = Callable[[NodeEvent], None]


def metrics(bound: tuple[str, int]) -> NodeEvent:
    """Prometheus can ask, from now on."""
    host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    return {"event": "metrics", "url": f"http://{host}:{bound[1]}/metrics"}


def progress(stage: str, done_bytes: int, total_bytes: int) -> NodeEvent:
    """Weights, or what comes before them ("download", "convert"), are on their way."""
    return {"event": "progress", "stage": stage, "done_bytes": done_bytes, "total_bytes": total_bytes}


def measured(dtype: str, form: str, threads: int, layer_ms: float, *, is_remembered: bool) -> NodeEvent:
    """The form computed in, and how long one decode row takes in one layer.

    `is_remembered`: the choice was made at an earlier start.
    """
    return {
        "event": "measured",
        "dtype": dtype,
        "form": form,
        "threads": threads,
        "layer_ms": round(layer_ms, 4),
        "is_remembered": is_remembered,
    }


def placing(wanted: Sequence[tuple[str, SliceSpec]]) -> NodeEvent:
    """Layers were found that are worth serving: they are loaded now."""
    return {"event": "placing", **_slices(wanted)}


def waiting(text: str) -> NodeEvent:
    """No layers were found that this node could serve to any use; it goes on looking."""
    return {"event": "waiting", "text": text}


def moving(wanted: Sequence[tuple[str, SliceSpec]], held: Sequence[tuple[str, SliceSpec]]) -> NodeEvent:
    """Other layers help more than those held: the change begins. What is held serves on."""
    return {"event": "moving", **_slices(wanted), "from": _slices(held)["slices"]}


def moved(held: Sequence[tuple[str, SliceSpec]]) -> NodeEvent:
    """What is held has changed; nothing drains any more."""
    return {"event": "moved", **_slices(held)}


def load_failed(model: str, layers: SliceSpec, code: str, text: str) -> NodeEvent:
    """A slice could not be loaded; what was held before serves on."""
    return {"event": "load_failed", "model": model, "layers": str(layers), "code": code, "text": text}


def reachable(address: NodeAddress) -> NodeEvent:
    """Others have a way to this node, told to everybody."""
    return {"event": "reachable", "address": str(address)}


def draining(num_sessions: int, limit_s: float) -> NodeEvent:
    """The node leaves: it takes no new session, and waits for these, at most so long."""
    return {"event": "draining", "num_sessions": num_sessions, "limit_s": round(limit_s, 1)}


def _slices(slices: Sequence[tuple[str, SliceSpec]]) -> dict[str, object]:
    """The first slice under "model" and "layers", and all of them."""
    listed = [{"model": model, "layers": str(spec)} for model, spec in slices]
    first = listed[0] if listed else {"model": "", "layers": ""}
    return {**first, "slices": listed}


def ready(
    address: NodeAddress | None,
    bound: tuple[str, int],
    offer: SliceOffer,
    *,
    threads: int,
    load_s: float,
    weights_bytes: int,
    bytes_read: int,
    peak_memory_bytes: int,
) -> NodeEvent:
    """The node serves. `address` is what others are told, None where there is none yet.

    `bytes_read`: what the loader asked of the checkpoint.
    """
    return {
        "event": "ready",
        "address": "" if address is None else str(address),
        "bound": f"{bound[0]}:{bound[1]}",
        "model": offer.model_name,
        "layers": str(offer.spec),
        "form": offer.form,
        "dtype": offer.dtype.name.lower(),
        "threads": threads,
        "has_opening": offer.has_opening,
        "has_closing": offer.has_closing,
        "load_s": round(load_s, 3),
        "weights_bytes": weights_bytes,
        "bytes_read": bytes_read,
        "peak_memory_bytes": peak_memory_bytes,
    }


def stopped(counts: BatchCounts) -> NodeEvent:
    """Sessions are freed, links closed, the compute thread ended; what that computed, if anything."""
    done = {**asdict(counts), "idle_s": round(counts.idle_s, 3)}
    return {"event": "stopped", **({"computed": done} if counts.batches else {})}
