"""What guidance branches, node groups and patches gain: a video of Wan's shape through real node processes.

Two stages of four blocks, each a process of one torch thread; the gateway's engine runs in this process. The ways take
turns within one run and are compared round by round. What is exact must make the same bytes.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from app.engine.diffusion.request import DiffusionRequest
from bench.local_pictures import LocalPictures, Run, local_pictures, pixels_of, request_id, run
from bench.report import Report, quartiles
from bench.wan_shaped import NUM_BLOCKS, SIZE, SMALL, WIDTH, Size, load_whole, write_wan_shaped

SECTION = "diffusion-speed"
NUM_STAGES = 2
STEPS = 10  # of the ways without patches
PATCHED_STEPS, WARMUP, PATCHES = 8, 4, 4
PROMPT, NEGATIVE, GUIDANCE = "a red fox in the snow", "grey noise", 5.0


@dataclass(frozen=True)
class Way:
    """How a video is made. `over_turn` is the bar of its whole time over that of the branches in turn."""

    name: str
    num_groups: int = 1
    prefetches: bool = True
    patches: int = 1
    over_turn: str = ""

    @property
    def steps(self) -> int:
        return STEPS if self.patches == 1 else PATCHED_STEPS

    @property
    def skipped(self) -> int:
        """Steps that are not counted: the first, whose branches cannot be known yet, or those before the patches."""
        return 1 if self.patches == 1 else WARMUP


IN_TURN = Way("branches in turn", prefetches=False)
PREFETCH = Way("prefetch", over_turn="<= 0.80")
TWO_GROUPS = Way("two groups of nodes", num_groups=2, over_turn="<= 0.60")
PATCHED = Way(f"{PATCHES} patches, branches in turn", prefetches=False, patches=PATCHES)
PATCHED_PREFETCH = Way(f"{PATCHES} patches, prefetch", patches=PATCHES)
EXACT = (IN_TURN, PREFETCH, TWO_GROUPS)
CUT = (PATCHED, PATCHED_PREFETCH)


async def measure_diffusion_speed(report: Report, *, rounds: int = 1, size: Size = SIZE) -> None:
    """Seconds a step of each way, their ratios, how busy the stages are and what crosses the gateway's links."""
    report.section(SECTION)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diffuse-bench-") as folder:
        model = await asyncio.to_thread(write_wan_shaped, Path(folder) / "wan-shaped")
        report.add(
            SECTION, "model", f"Wan, {NUM_BLOCKS} blocks of width {WIDTH}, {size.num_tokens} tokens, float32"
        )
        async with local_pictures(model, NUM_BLOCKS, num_nodes=NUM_STAGES, num_groups=2) as local:
            await _check_small(report, local, model)
            runs: dict[Way, list[Run]] = {}
            for number in range(rounds):
                ways = EXACT if number else EXACT + CUT
                for way in ways:
                    runs.setdefault(way, []).append(await _run(local, way, size))
                    _tell_progress(way, runs[way][-1])
    _report(report, runs, size)


async def _check_small(report: Report, local: LocalPictures, model: Path) -> None:
    """A small video: the same pixels as the uncut pipeline makes. It also warms everything up."""
    whole = await asyncio.to_thread(_whole_pixels, model)
    for way in EXACT:
        made = await _run(local, way, SMALL)
        is_same = made.pixels == whole
        report.add(SECTION, f"{way.name}: a small video as the uncut pipeline makes it", is_same, "", "True")


def _report(report: Report, runs: dict[Way, list[Run]], size: Size) -> None:
    pixels = {made.pixels for way in EXACT for made in runs[way]}
    report.add(SECTION, "the exact ways make the same bytes", len(pixels) == 1, "", "True")
    for way, made in runs.items():
        counted = [seconds for one in made for seconds in one.step_s[way.skipped :]]
        after = "the first" if way.patches == 1 else "warm-up"
        report.add(SECTION, f"{way.name}: a step after {after}", quartiles(counted), "s")
        report.add(
            SECTION, f"{way.name}: {way.steps} steps", _median(one.timings.steps_s for one in made), "s"
        )
        busy = zip(*(one.timings.busy for one in made), strict=True)
        report.add(
            SECTION, f"{way.name}: share of all steps' time computed", _shown(map(statistics.mean, busy))
        )
        timings = made[-1].timings
        spent = {"computed": timings.compute_s, "queued": timings.queue_s, "network": timings.network_s}
        report.add(SECTION, f"{way.name}: passes", spent, "s, summed over them")
        if way.prefetches:
            report.add(SECTION, f"{way.name}: guesses right", f"{timings.hits} of {timings.prefetched}")
        if way.patches > 1:
            report.add(SECTION, f"{way.name}: passes in patches", f"{timings.patched} of {timings.passes}")
        sent, received = timings.bytes_sent / way.steps, timings.bytes_received / way.steps
        report.add(SECTION, f"{way.name}: to the first stage", sent / 1e6, "MB a step")
        report.add(SECTION, f"{way.name}: from the last stage", received / 1e6, "MB a step")
    stream = 2 * size.num_tokens * WIDTH * 4
    report.add(SECTION, "one stream of each branch", stream / 1e6, "MB a step and link")
    for way in EXACT[1:]:
        pairs = list(zip(runs[way], runs[IN_TURN], strict=True))
        whole = _median(one.timings.steps_s / other.timings.steps_s for one, other in pairs)
        step = _median(_step_s(way, one) / _step_s(IN_TURN, other) for one, other in pairs)
        report.add(SECTION, f"{way.name} over in turn: {STEPS} steps", whole, "", way.over_turn)
        report.add(SECTION, f"{way.name} over in turn: a step after the first", step)
    keeping = [one.step_s[1:WARMUP] for one in runs[PATCHED]]
    kept = _median(seconds for steps in keeping for seconds in steps) / _step_s(IN_TURN, *runs[IN_TURN])
    report.add(SECTION, "whole steps that keep keys and values over those that do not", kept)
    for way, base in ((PATCHED, IN_TURN), (PATCHED_PREFETCH, IN_TURN), (PATCHED_PREFETCH, PREFETCH)):
        gain = _step_s(base, *runs[base]) / _step_s(way, *runs[way])
        bar = ">= 1.2" if way is PATCHED else ""
        report.add(SECTION, f"{way.name} over {base.name}: steps after warm-up", gain, "x as fast", bar)


async def _run(local: LocalPictures, way: Way, size: Size) -> Run:
    engine = local.engine(num_groups=way.num_groups, prefetches=way.prefetches)
    request = DiffusionRequest(
        request_id(),
        engine.model_name,
        PROMPT,
        NEGATIVE,
        width=size.width,
        height=size.height,
        num_frames=size.num_frames,
        steps=way.steps,
        guidance_scale=GUIDANCE,
        patches=way.patches,
        warmup=WARMUP,
    )
    return await run(engine, request)


def _whole_pixels(model: Path) -> str:
    """What stands for the pixels of the small video that the uncut stock pipeline makes."""
    torch.set_num_threads(1)
    made = load_whole(model)(
        PROMPT,
        NEGATIVE,
        height=SMALL.height,
        width=SMALL.width,
        num_frames=SMALL.num_frames,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
        output_type="pil",
    )
    return pixels_of(made.frames[0])


def _step_s(way: Way, *made: Run) -> float:
    """The median of the steps that count."""
    return statistics.median(seconds for one in made for seconds in one.step_s[way.skipped :])


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _shown(shares: Iterable[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _tell_progress(way: Way, made: Run) -> None:
    steps = " ".join(f"{seconds:.2f}" for seconds in made.step_s)
    print(f"  ({way.name}: {steps} s)", flush=True)
