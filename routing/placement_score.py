"""What a placement is worth: models covered first, then demand x the tokens/s of each one's slowest layer.

A node that holds k layers of s ms each, to which a row takes r ms on its line (0 where nobody knows), passes
1000 / (k * s + r) tokens/s; one with several slices shares its time among them in proportion, so that each passes
1000 / (the ms of all it holds). Replicas of a layer add up. Pure arithmetic over a snapshot: knows nothing of how
slices are chosen or loaded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routing.types import NodeId, SliceSpec

MAX_SPEED_UP = 16.0  # over the pool's median: a faster claim is not believed, or one liar would empty a slice
LEAST_RATE = 1e-3  # tokens/s that a layer without a holder counts as when rates are compared
UNKNOWN_MS = 1.0  # per layer, where nobody tells anything
MAX_LINE_MS = 1000.0  # of one row on a line: a slower one leaves a node out just as well

Profile = npt.NDArray[np.float64]  # tokens/s of each layer of one model
Slices = Mapping[bytes, SliceSpec]  # what one node holds, by model digest


@dataclass(frozen=True, slots=True)
class Placed:
    """Layers of one model on some node."""

    digest: bytes
    spec: SliceSpec


@dataclass(frozen=True, slots=True)
class PoolNode:
    """One node, as far as placement is concerned; all by model digest.

    `layer_ms`: one decode row through one layer. `max_layers`: what would fit if it held nothing else (none where
    absent); several slices share that room in proportion. `held`: one slice per model at most. `room`: layers that
    fit beside what it holds; None: as many as `max_layers` again. `line_ms`: one row on its way here, where known.
    """

    node_id: NodeId
    layer_ms: Mapping[bytes, float]
    max_layers: Mapping[bytes, int]
    held: tuple[Placed, ...] = ()
    room: Mapping[bytes, int] | None = None
    line_ms: Mapping[bytes, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model that the swarm should serve, and how much it is asked for (any unit)."""

    digest: bytes
    num_layers: int
    demand: float = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Models that have every layer, then the sum over models of demand x tokens/s of the slowest layer."""

    models: int
    rate: float


def score(pool: Iterable[PoolNode], models: Sequence[ModelDemand]) -> Score:
    """What the slices that a pool holds are worth."""
    board = Board(models)
    for node in pool:
        board.put(node, held_by(node))
    return board.score()


def held_by(node: PoolNode) -> dict[bytes, SliceSpec]:
    """What a node holds, by model."""
    return {placed.digest: placed.spec for placed in node.held}


def pass_ms(node: PoolNode, slices: Slices) -> float:
    """What one row takes through all that a node would hold, in ms, its way there included."""
    total_ms = sum(node.layer_ms[digest] * (spec.end - spec.start) for digest, spec in slices.items())
    if node.line_ms:
        total_ms += sum(node.line_ms.get(digest, 0.0) for digest in slices)
    return total_ms


def share_used(slices: Slices, room: Mapping[bytes, int]) -> float:
    """The part of a node's room that slices take; infinite where a model does not fit at all."""
    used = 0.0
    for digest, spec in slices.items():
        used += (spec.end - spec.start) / room[digest] if room.get(digest, 0) > 0 else math.inf
    return used


def believed(pool: Sequence[PoolNode], models: Sequence[ModelDemand]) -> list[PoolNode]:
    """The pool with every speed filled in, and none beyond MAX_SPEED_UP times the model's median."""
    medians = {}
    for model in models:
        told = [node.layer_ms.get(model.digest, 0.0) for node in pool]
        told = [ms for ms in told if 0 < ms < math.inf]
        medians[model.digest] = statistics.median(told) if told else UNKNOWN_MS
    return [
        replace(node, layer_ms=_believed(node.layer_ms, medians), line_ms=_believed_lines(node.line_ms))
        for node in pool
    ]


def _believed(told: Mapping[bytes, float], medians: Mapping[bytes, float]) -> dict[bytes, float]:
    speeds = {}
    for digest, median in medians.items():
        ms = told.get(digest, median)
        speeds[digest] = max(ms, median / MAX_SPEED_UP) if 0 < ms < math.inf else median
    return speeds


def _believed_lines(told: Mapping[bytes, float]) -> dict[bytes, float]:
    return {digest: min(ms, MAX_LINE_MS) for digest, ms in told.items() if ms > 0}


class Standing(NamedTuple):
    """How one model stands: tokens/s of its slowest layer, layers without a holder, and, to tell placements of one
    score apart, how well its slow layers are off."""

    slowest: float
    missing: int
    evenness: float


class Board:
    """What every layer of every model gets from the slices put on it."""

    def __init__(self, models: Sequence[ModelDemand]) -> None:
        self.models = models
        self.profiles: dict[bytes, Profile] = {model.digest: np.zeros(model.num_layers) for model in models}
        self.holders = {model.digest: np.zeros(model.num_layers, np.int64) for model in models}
        self._standings: dict[bytes, Standing] = {}

    def put(self, node: PoolNode, slices: Slices, times: int = 1) -> None:
        """Count a node's slices; with times = -1, no more. Those of unknown models do not count."""
        rate = self._rate(node, slices)
        for digest, spec in slices.items():
            if digest in self.profiles:
                profile, holders = self.profiles[digest], self.holders[digest]
                holders[spec.start : spec.end] += times
                profile[spec.start : spec.end] += times * rate
                if times < 0:  # what the others leave is nothing, not what rounding leaves
                    profile[holders == 0] = 0.0
                self._standings.pop(digest, None)

    def score(self) -> Score:
        """What is on the board now."""
        standings = [self.standing(model.digest) for model in self.models]
        total = sum(m.demand * standing.slowest for m, standing in zip(self.models, standings, strict=True))
        return Score(sum(standing.slowest > 0 for standing in standings), total)

    def standing(self, digest: bytes) -> Standing:
        """How a model stands now."""
        if (known := self._standings.get(digest)) is None:
            known = self._standings[digest] = _standing(self.profiles[digest])
        return known

    def standings_with(self, node: PoolNode, slices: Slices) -> list[Standing]:
        """How the models would stand with a node's slices on the board, too."""
        rate = self._rate(node, slices)
        standings = []
        for model in self.models:
            if (spec := slices.get(model.digest)) is None:
                standings.append(self.standing(model.digest))
                continue
            profile = self.profiles[model.digest].copy()
            profile[spec.start : spec.end] += rate
            standings.append(_standing(profile))
        return standings

    def _rate(self, node: PoolNode, slices: Slices) -> float:
        known = {digest: spec for digest, spec in slices.items() if digest in self.profiles}
        return 1000 / ms if (ms := pass_ms(node, known)) else 0.0


def _standing(profile: Profile) -> Standing:
    lifted = profile + LEAST_RATE
    missing = len(profile) - int(np.count_nonzero(profile))
    return Standing(float(profile.min()), missing, -float((1 / (lifted * lifted)).sum()))
