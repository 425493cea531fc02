"""How fast nodes were for this gateway: moving averages over the traces of answered steps.

Bounded and forgetful; nothing is read from a clock but `now`. Knows nothing of routes, links or what was computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from routing.types import Hop, HopTrace, NodeId

FORGET_AFTER_S = 600.0  # machines get other work; what they did ten minutes ago says little
MAX_MEASURED = 2048  # nodes and models: more than any gateway keeps links to (network.py)
NEW_SHARE = 0.2  # of the newest sample: a node that slows down shows within ten steps, a hiccup fades as fast
MAX_JUMP = 8.0  # one sample counts at most this many times the average: a stopped process is not a slow one
MAX_DECODE_ROWS = 4  # up to here a pass reads the weights once whatever the rows; above, rows cost


@dataclass(frozen=True, slots=True)
class Measured:
    """What a node took. None: no such step was seen.

    `layer_ms`: one decode step through one layer. `queue_ms`: what every decode step waits at the hop, its
    encryption and what nobody explains included. `prefill_ms`: one layer, one row of a prefill.
    """

    layer_ms: float | None
    queue_ms: float = 0.0
    prefill_ms: float | None = None


class Measurements:
    """Moving averages per node and model. `now` tells monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kept: dict[tuple[NodeId, bytes], _Averages] = {}  # the longest unheard first

    def note(
        self, node_id: NodeId, num_layers: int, rows: int, trace: HopTrace, *, model: bytes = b""
    ) -> None:
        """Count what one hop says of one step. The caller has clamped it: see `believable`."""
        self._forget_old()
        self._add(node_id, model, num_layers, rows, trace.compute_us, trace.queue_us + trace.crypto_us)

    def _add(
        self, node_id: NodeId, model: bytes, num_layers: int, rows: int, compute_us: int, waited_us: int
    ) -> None:
        if num_layers < 1 or rows < 1:
            return
        kept = self._of(node_id, model)
        layer_ms = compute_us / 1000 / num_layers
        if rows <= MAX_DECODE_ROWS:
            kept.layer_ms.add(layer_ms)
            kept.queue_ms.add(waited_us / 1000)
        else:
            kept.prefill_ms.add(layer_ms / rows)

    def note_step(
        self,
        hops: Sequence[Hop],
        rows: int,
        traces: Sequence[HopTrace],
        *,
        waited_ms: float,
        network_ms: float = 0.0,
    ) -> None:
        """Count an answer. What the hops and the network (`network_ms`, as planned) leave of a decode step's
        waiting is laid on all of its hops: who claims too little gains nothing by it."""
        if not hops or len(traces) != len(hops):
            return
        self._forget_old()
        traces = believable(traces, waited_ms)
        claimed_us = _total_us(traces)
        unexplained_us = int(max(0.0, waited_ms - network_ms - claimed_us / 1000) * 1000 / len(hops))
        for hop, trace in zip(hops, traces, strict=True):
            num_layers, waited_us = hop.spec.end - hop.spec.start, trace.queue_us + trace.crypto_us
            self._add(
                hop.address.node_id,
                hop.offer.model_digest,
                num_layers,
                rows,
                trace.compute_us,
                waited_us + unexplained_us,
            )

    def of(self, model: bytes = b"") -> Mapping[NodeId, Measured]:
        """What is known now, of one model or (b"") of each node's latest."""
        self._forget_old()
        return {node_id: kept.told() for (node_id, of), kept in self._kept.items() if model in (b"", of)}

    def get(self, node_id: NodeId, model: bytes = b"") -> Measured | None:
        """What is known now of one node."""
        return self.of(model).get(node_id)

    def forget(self, node_id: NodeId) -> None:
        """Drop a node: it came back as another process, or holds other layers."""
        for key in [key for key in self._kept if key[0] == node_id]:
            del self._kept[key]

    def __len__(self) -> int:
        return len(self._kept)

    def _of(self, node_id: NodeId, model: bytes) -> _Averages:
        kept = self._kept.pop((node_id, model), None) or _Averages()
        kept.noted_at = self._now()
        self._kept[node_id, model] = kept
        if len(self._kept) > MAX_MEASURED:
            del self._kept[next(iter(self._kept))]
        return kept

    def _forget_old(self) -> None:
        since = self._now() - FORGET_AFTER_S
        while self._kept and self._kept[oldest := next(iter(self._kept))].noted_at < since:
            del self._kept[oldest]


def believable(traces: Sequence[HopTrace], waited_ms: float) -> tuple[HopTrace, ...]:
    """The traces, scaled down together until they sum up to no more than was waited."""
    claimed_us = _total_us(traces)
    if claimed_us <= waited_ms * 1000:
        return tuple(traces)
    share = max(0.0, waited_ms) * 1000 / claimed_us
    return tuple(
        HopTrace(int(t.compute_us * share), int(t.queue_us * share), int(t.crypto_us * share)) for t in traces
    )


class _Averages:
    """The moving averages of one node and model."""

    def __init__(self) -> None:
        self.noted_at = 0.0
        self.layer_ms, self.queue_ms, self.prefill_ms = _Average(), _Average(), _Average()

    def told(self) -> Measured:
        return Measured(self.layer_ms.value, self.queue_ms.value or 0.0, self.prefill_ms.value)


class _Average:
    """A plain mean of the first samples, then an exponentially weighted one."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._num_samples = 0

    def add(self, sample: float) -> None:
        self._num_samples += 1
        if self.value is None:
            self.value = sample
            return
        share = max(NEW_SHARE, 1 / self._num_samples)
        if self._num_samples > 1 / NEW_SHARE:  # by now the average is worth something
            sample = min(sample, max(self.value, 0.001) * MAX_JUMP)
        self.value += share * (sample - self.value)


def _total_us(traces: Sequence[HopTrace]) -> int:
    total_us = 0
    for trace in traces:
        total_us += trace.compute_us + trace.queue_us + trace.crypto_us
    return total_us
