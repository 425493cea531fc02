"""What patches and the wire's forms cost, as measured, in the words of the help. One table, and texts made of it.

Measured on the small trained picture model `tiny-pixart-shapes`: 24 captions, 20 steps, as mean and worst difference
of a picture to the whole one, in levels of 255. `make bench-diffusion` measures it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Drift:
    """How far pictures move: mean and worst over the captions, in levels of 255."""

    patches: int
    warmup: int
    guidance: int
    mean: float
    worst: float
    extrapolates: bool = False


DRIFTS: Final = (
    Drift(2, 4, 3, 0.79, 1.4),
    Drift(4, 4, 3, 1.12, 1.7),
    Drift(4, 4, 3, 0.77, 1.5, extrapolates=True),
    Drift(2, 4, 5, 1.02, 1.7),
    Drift(4, 4, 5, 1.57, 3.3),
    Drift(2, 1, 5, 3.4, 45),
)
WIRE_DRIFTS: Final = {"bf16": 0.15, "int8-delta": 0.3}  # mean levels of 255, patches 1
INT8_DELTA_SHARE: Final = 0.52  # of bf16's bytes, at most


def patches_help() -> str:
    """For --patches."""
    measured = "; ".join(_shown(drift) for drift in DRIFTS if drift.warmup == 4 and not drift.extrapolates)
    return (
        "Parts of a step that go through the nodes one behind another. 1: exact. More is faster over several nodes and "
        f"moves the picture. Measured, mean (worst) levels of 255 with --warmup 4: {measured}."
    )


def warmup_help() -> str:
    """For --warmup."""
    short = next(drift for drift in DRIFTS if drift.warmup == 1)
    return (
        "Whole steps before the first patches. Left out: 4. Fewer can flip a picture: "
        f"with {short.warmup}, {_shown(short)}."
    )


def extrapolate_help() -> str:
    """For --extrapolate."""
    with_it = next(drift for drift in DRIFTS if drift.extrapolates)
    without = next(
        drift
        for drift in DRIFTS
        if not drift.extrapolates
        and (drift.patches, drift.warmup, drift.guidance)
        == (with_it.patches, with_it.warmup, with_it.guidance)
    )
    return (
        f"Carry what patches borrow half a step on: nearer to the whole picture ({with_it.mean:g} instead of "
        f"{without.mean:g} levels with {with_it.patches} patches) for one more buffer on the nodes."
    )


def two_streams_help() -> str:
    """For --two-streams."""
    return (
        "Patches also where text goes through the blocks beside the picture (Flux, SD3); the text goes on with the "
        "first patch only. Experimental."
    )


def per_block_help() -> str:
    """For --per-block."""
    return (
        "Of models that make no text: send every block by itself, at one round trip over the route's nodes for each "
        "(28 blocks and 20 steps take 560 of them, instead of 20). For those that say they need it; exact, and "
        "without patches."
    )


def wire_help() -> str:
    """For --wire."""
    return (
        "auto: what each slice computes in, nothing is lost. bf16: half of float32's bytes, at a loss. int8-delta, for "
        f"models that make no text: differences to the step before, {INT8_DELTA_SHARE:.0%} of bf16's bytes at most. "
        f"Measured on pictures, mean levels of 255: bf16 {WIRE_DRIFTS['bf16']:g}, "
        f"int8-delta {WIRE_DRIFTS['int8-delta']:g}."
    )


def _shown(drift: Drift) -> str:
    return f"{drift.patches} patches at guidance {drift.guidance} {drift.mean:g} ({drift.worst:g})"
