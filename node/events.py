"""What a node tells whoever started it: plain mappings with an `event` name, ready for JSON.

In the order in which they come: "progress" (often), "measured", "ready", "stopped".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from routing.types import NodeAddress, SliceOffer

NodeEvent = Mapping[str, object]
OnEvent = Callable[[NodeEvent], None]


def progress(stage: str, done_bytes: int, total_bytes: int) -> NodeEvent:
    """Weights, or what comes before them ("download", "convert"), are on their way."""
    return {"event": "progress", "stage": stage, "done_bytes": done_bytes, "total_bytes": total_bytes}


def measured(dtype: str, threads: int, layer_ms: float, *, is_remembered: bool) -> NodeEvent:
    """The form computed in, and how long one decode row takes in one layer.

    `is_remembered`: the choice was made at an earlier start.
    """
    return {
        "event": "measured",
        "dtype": dtype,
        "threads": threads,
        "layer_ms": round(layer_ms, 4),
        "is_remembered": is_remembered,
    }


def ready(
    address: NodeAddress,
    bound: tuple[str, int],
    offer: SliceOffer,
    *,
    threads: int,
    load_s: float,
    weights_bytes: int,
    bytes_read: int,
    peak_memory_bytes: int,
) -> NodeEvent:
    """The node serves. `address` is what others are told; `bytes_read` what the loader asked of the checkpoint."""
    return {
        "event": "ready",
        "address": str(address),
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


def stopped() -> NodeEvent:
    """Sessions are freed, links closed, the compute thread ended."""
    return {"event": "stopped"}
