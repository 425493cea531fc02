"""What patches and shorter bytes cost: pictures of a trained model beside the same model's whole ones.

`python -m bench.diffusion_quality --model FOLDER` (or DIFFUSE_PICTURE_MODEL, else the packaged picture model). Two
stages in this process run the very code of two nodes, and what travels between them goes through the wire's own forms.
Differences are in levels of 255, of each picture its mean absolute one. A few pictures flip to another composition and
make most of a mean, so median and worst stand beside it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise, product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from bench.report import Report
from slicing.diffusion.block_range import BlockRange, fill_block, load_block_range
from slicing.diffusion.calls import Pass
from slicing.diffusion.outside import load_pipeline
from slicing.diffusion.packaged import PACKAGED_PIPELINES, packaged_pipeline
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Cut, Mode, find_grid, join_patches
from slicing.diffusion.source import open_pipeline
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink, replace_blocks
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender, WireForm

MODEL_VARIABLE = "DIFFUSE_PICTURE_MODEL"
SECTION = "diffusion-quality"
NUM_CAPTIONS, STEPS, STAGES = 24, 20, 2
GUIDANCE = (3.0, 5.0)
LEVELS = 255.0
OTHER_SEED = 1000
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("on the left", "on the right", "at the top", "at the bottom", "in the middle")
Streams = list[torch.Tensor]


class Fault(Enum):
    """What a mix-up of sessions would do. Not in any production code: it shows that the comparison can fail."""

    EACH_OTHERS = "each branch finds the other's keys"
    ONE_BUFFER = "both branches write into one buffer"


@dataclass(frozen=True)
class Way:
    """How one set of pictures is made. `bars` hold at guidance 3: of mean, worst and tone."""

    name: str
    patches: int = 1
    warmup: int = 4
    extrapolate: float = 0.0
    form: WireForm = WireForm.RAW
    fault: Fault | None = None
    bars: dict[str, str] = field(default_factory=dict)


WAYS = (
    *(
        Way(f"{patches} patches, warm-up {warmup}{told}", patches, warmup, extrapolate, bars=bars)
        for patches, warmup, (extrapolate, told) in product(
            (2, 4), (1, 4), ((0.0, ""), (0.5, ", half extrapolation"))
        )
        for bars in [
            {"mean": "<= 1.0" if patches == 2 else "<= 1.5", "worst": "<= 3", "tone": "<= 0.5"}
            if warmup == 4
            else {}
        ]
    ),
    *(
        Way(f"planted fault: {fault.value}, {patches} patches, warm-up 1", patches, 1, fault=fault, bars=bars)
        for fault, patches, bars in (
            (Fault.EACH_OTHERS, 2, {}),
            (Fault.EACH_OTHERS, 4, {"mean": "> 20 with tiny-pixart-shapes"}),
            (Fault.ONE_BUFFER, 4, {}),
        )
    ),
    Way("wire bf16", form=WireForm.BF16),
    Way("wire int8-delta", form=WireForm.INT8_DELTA, bars={"mean": "<= 0.5"}),
    Way("wire int8-delta, 4 patches, warm-up 4", 4, form=WireForm.INT8_DELTA),
)
WITH_BARS = tuple(way for way in WAYS if way.bars)


def captions() -> list[str]:
    """Captions in the words that the picture models know, every one with two colours."""
    made = []
    for number in range(NUM_CAPTIONS):
        ink, ground = COLOURS[number % 8], COLOURS[(number + 1 + number // 8 * 2) % 8]
        size = ("large", "small")[number // 3 % 2]
        made.append(f"a {size} {ink} {SHAPES[number % 4]} {PLACES[number % 5]} on a {ground} background")
    return made


class Pictures:
    """A pipeline whose blocks run in two stages of this process."""

    def __init__(self, model: str) -> None:
        source = open_pipeline(model)
        self.name = source.public_name
        self._pipeline = load_pipeline(source)
        self._sink_of: ContextVar[PassSink] = ContextVar("sink_of")
        stacks = [stack for stack in source.remote if stack.component == "transformer"]
        transformer = self._pipeline.transformer
        replace_blocks(
            transformer,
            stacks,
            self._sink_of,
            lambda stack, number: fill_block(stack, number, source.read_block(stack, number)),
        )
        ends = [source.num_layers * stage // STAGES for stage in range(STAGES + 1)]
        self._stages = [load_block_range(source, start, end) for start, end in pairwise(ends)]
        self._side = transformer.config.sample_size
        self._patch_size = transformer.config.patch_size

    def make(self, way: Way, guidance: float, seed: int = 0) -> torch.Tensor:
        """All captions' pictures, in levels [captions, 3, height, width]; picture n has seed `seed` + n."""
        texts = captions()
        stages = Stages(self._stages, way, (len(texts), 1, self._side, self._side), self._patch_size)
        token = self._sink_of.set(stages)
        try:
            made = self._pipeline(
                texts,
                num_inference_steps=STEPS,
                guidance_scale=guidance,
                generator=[torch.Generator().manual_seed(seed + number) for number in range(len(texts))],
                use_resolution_binning=False,
                clean_caption=False,
                output_type="pt",
            )
        finally:
            self._sink_of.reset(token)
        images: torch.Tensor = made.images
        return images.float() * LEVELS


class Stages:
    """Runs passes as a gateway and two nodes would: a session for each guidance branch, patches in turn."""

    def __init__(self, stages: list[BlockRange], way: Way, latents: tuple[int, ...], patch_size: int) -> None:
        self._way = way
        self._latents, self._patch_size = latents, patch_size
        self._steps = 0
        self._branches = [Session(stages, way.form) for _ in range(2)]

    def __call__(self, stack: Stack, made: Pass) -> Streams:
        """Both branches are in one call, as two halves of its batch: each is a session of its own."""
        self._steps += 1
        num_rows = made.streams[0].shape[0]
        grid = find_grid(self._latents, self._patch_size, made.streams[0].shape[1])
        cut = Cut(grid, 0, self._way.patches)
        halves = [_half(made, branch, num_rows) for branch in range(2)]
        if self._way.patches == 1 or self._steps <= self._way.warmup:
            answers = [
                branch.whole(half, self._way, cut, self._steps)
                for branch, half in zip(self._branches, halves, strict=True)
            ]
        else:
            answers = self._patched(halves, cut)
        return [torch.cat(parts) for parts in zip(*answers, strict=True)]

    def _patched(self, halves: list[Pass], cut: Cut) -> list[Streams]:
        first, second = self._branches
        if self._way.fault and self._steps == self._way.warmup + 1:
            first.swap_rows(second, torch.arange(cut.num_tokens))
            if self._way.fault is Fault.ONE_BUFFER:
                second.share_buffers_of(first)
        parts: list[list[Streams]] = [[], []]
        for one in cut.all():
            for branch, half, done in zip(self._branches, halves, parts, strict=True):
                done.append(branch.patch(half, self._way, one, self._steps))
            if self._way.fault is Fault.EACH_OTHERS:
                first.swap_rows(second, one.rows())
        return [[join_patches(patches, cut) for patches in zip(*done, strict=True)] for done in parts]


class Session:
    """One branch's state on every stage, and its wires between them."""

    def __init__(self, stages: list[BlockRange], form: WireForm) -> None:
        self._stages = [(stage, PatchState()) for stage in stages]
        self._wires = [(CallSender(form), CallReceiver()) for _ in range(len(stages) + 1)]
        self._is_raw = form is WireForm.RAW

    def whole(self, made: Pass, way: Way, cut: Cut, number: int) -> Streams:
        """A whole step; keys are kept where patches will follow."""
        if way.patches == 1:
            return self._run(made, CallHeader(Mode.WHOLE, number))
        return self._run(made, CallHeader(Mode.WHOLE_KEEP, number, cut, way.extrapolate))

    def patch(self, made: Pass, way: Way, cut: Cut, number: int) -> Streams:
        """One patch of a step."""
        part = Pass(made.plan, [cut.take(stream) for stream in made.streams], made.slots)
        return self._run(part, CallHeader(Mode.PATCH, number, cut, way.extrapolate))

    def share_buffers_of(self, other: Session) -> None:
        """A planted fault: keys and values belong to both branches, and whoever wrote last is attended to."""
        for (_, mine), (_, theirs) in zip(self._stages, other._stages, strict=True):
            assert mine._held is not None
            assert theirs._held is not None
            mine._held.kept = theirs._held.kept

    def swap_rows(self, other: Session, rows: torch.Tensor) -> None:
        """A planted fault: each branch finds the other's keys and values of these tokens."""
        for (_, mine), (_, theirs) in zip(self._stages, other._stages, strict=True):
            assert mine._held is not None
            assert theirs._held is not None
            for site in mine._held.kept.sites:
                a, b = mine._held.kept.kept_at(site), theirs._held.kept.kept_at(site)
                assert a is not None
                assert b is not None
                for x, y in ((a.key, b.key), (a.value, b.value)):
                    x[..., rows, :], y[..., rows, :] = y[..., rows, :], x[..., rows, :]

    def _run(self, made: Pass, header: CallHeader) -> Streams:
        for (stage, state), wire in zip(self._stages, self._wires, strict=False):
            streams, verdict = state.run(
                stage,
                self._sent(made, header, wire),
                stage.start,
                stage.end,
                mode=Mode(header.mode),
                cut=header.cut,
                extrapolate=header.extrapolate,
            )
            if verdict is not None and not verdict.allowed:
                raise RuntimeError(f"patches were refused: {verdict.reason}")
            made = replace(made, streams=streams)
        return self._sent(made, header, self._wires[-1]).streams

    def _sent(self, made: Pass, header: CallHeader, wire: tuple[CallSender, CallReceiver]) -> Pass:
        if self._is_raw:
            return made
        sender, receiver = wire
        return receiver.unpack(sender.pack(replace(header), made))[1]


def _half(made: Pass, branch: int, num_rows: int) -> Pass:
    def of(part: torch.Tensor) -> torch.Tensor:
        return part.chunk(2)[branch] if part.dim() and part.shape[0] == num_rows else part

    return Pass(made.plan, list(map(of, made.streams)), list(map(of, made.slots)))


def compare(pictures: torch.Tensor, whole: torch.Tensor) -> dict[str, float]:
    """Mean, median and worst of the pictures' mean differences, and of their tone: how far colour means move."""
    away = (pictures - whole).abs().flatten(1).mean(1)
    tone = (pictures.flatten(2).mean(2) - whole.flatten(2).mean(2)).abs().mean()
    return {
        "mean": float(away.mean()),
        "median": float(away.median()),
        "worst": float(away.max()),
        "tone": float(tone),
    }


def measure_diffusion_quality(report: Report, model: str, ways: Sequence[Way] = WAYS) -> None:
    """The table of differences for every way and guidance."""
    report.section(SECTION)
    pictures = Pictures(model)
    report.add(SECTION, "model", pictures.name)
    report.add(SECTION, "captions", NUM_CAPTIONS, "pictures")
    report.add(SECTION, "steps", STEPS)
    for guidance in GUIDANCE:
        whole = pictures.make(Way("whole"), guidance)
        report.add(SECTION, f"guidance {guidance:g}: picture", "x".join(map(str, whole.shape[1:])))
        other = pictures.make(Way("another seed"), guidance, seed=OTHER_SEED)
        report.add(SECTION, f"guidance {guidance:g}: another seed", compare(other, whole), "of 255")
        for way in ways:
            if way.fault and guidance != GUIDANCE[0]:
                continue
            began = time.perf_counter()
            found = compare(pictures.make(way, guidance), whole)
            bars = (
                ", ".join(f"{name} {bar}" for name, bar in way.bars.items())
                if guidance == GUIDANCE[0]
                else ""
            )
            report.add(SECTION, f"guidance {guidance:g}: {way.name}", found, "of 255", bars)
            report.add(SECTION, f"guidance {guidance:g}: {way.name}: time", time.perf_counter() - began, "s")


def find_model(named: str | None) -> str:
    """The pipeline that was named, else the environment's, else the packaged one. Exits where there is none."""
    packaged = packaged_pipeline(PACKAGED_PIPELINES[0])
    model = named or os.environ.get(MODEL_VARIABLE) or packaged or ""
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        raise SystemExit(f"no picture model in {folder}: name a pipeline's folder, or set {MODEL_VARIABLE}")
    return str(folder)


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(prog="bench.diffusion_quality", description=__doc__)
    parser.add_argument("--model", help="a pipeline folder of text to pictures")
    model: Any = find_model(parser.parse_args().model)
    report = Report()
    measure_diffusion_quality(report, model)
    report.write()


if __name__ == "__main__":
    main()
