"""What crosses each link of a video of Wan's shape, in every form of the wire, counted in the very containers.

Two stages, so three links, and a session for each guidance branch. The blocks themselves are left out: how many bytes
their streams take does not depend on what is in them.
"""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.report import Report
from bench.wan_shaped import NUM_BLOCKS, SIZE, Size, quieten, write_wan_shaped
from slicing.diffusion.calls import Pass
from slicing.diffusion.outside import load_pipeline
from slicing.diffusion.source import open_pipeline
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink, replace_blocks
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender, WireForm
from slicing.diffusion.wire_header import decode_header

SECTION = "diffusion-bytes"
STEPS = 20
LINKS = ("to the first stage", "from stage to stage", "from the last stage")
BRANCHES = 2


@dataclass
class Session:
    """One guidance branch in one form: both ends of its three links, and what crossed them."""

    form: WireForm
    step_bytes: list[list[int]] = field(default_factory=list)  # by step, of each link
    streams: list[list[int]] = field(default_factory=list)  # of them the streams'
    used: Counter[tuple[str, bytes]] = field(
        default_factory=Counter
    )  # passes that a slot's value was part of
    crossed: Counter[tuple[str, bytes]] = field(default_factory=Counter)  # how often its bytes were sent
    size_of: dict[tuple[str, bytes], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ends = [(CallSender(self.form), CallReceiver()) for _ in LINKS]

    def run(self, made: Pass) -> None:
        """Send a pass through both stages and back."""
        header = CallHeader(pass_number=len(self.step_bytes))
        self.step_bytes.append([])
        self.streams.append([])
        (first, at_first), (second, at_second), (last, at_last) = self._ends
        payload = first.pack(header, made)
        self._count(LINKS[0], payload)
        header, made = at_first.unpack(payload)
        payload = second.pack(header, made, first_block=NUM_BLOCKS // 2, digests=at_first.digests)
        self._count(LINKS[1], payload)
        header, made = at_second.unpack(payload)
        payload = last.pack_streams(header, made.streams)
        self._count(LINKS[2], payload)
        at_last.unpack_streams(payload, made.streams)

    def _count(self, link: str, payload: bytes) -> None:
        self.step_bytes[-1].append(len(payload))
        (length,) = struct.unpack_from(">I", payload)
        _, contents = decode_header(payload[4 : 4 + length])
        self.streams[-1].append(sum(entry.size_bytes for entry in contents.streams))
        for slot in contents.slots:
            if slot is None or slot.digest is None:
                continue
            key = (link, slot.digest)
            self.used[key] += 1
            if slot.entry is not None:
                self.crossed[key] += 1
                self.size_of[key] = slot.entry.size_bytes

    @property
    def constants(self) -> list[tuple[str, bytes]]:
        """What more than one pass used, by link."""
        return [key for key, times in self.used.items() if times > 1]


def measure_diffusion_bytes(report: Report, *, size: Size = SIZE) -> None:
    """Bytes a step and link of each form, and how often what stays the same is sent."""
    report.section(SECTION)
    sessions = _sessions(size)
    report.add(SECTION, "tokens, steps, guidance branches", f"{size.num_tokens}, {STEPS}, {BRANCHES}")
    for form in WireForm:
        of_form = [session for session in sessions if session.form is form]
        for number, link in enumerate(LINKS):
            told = {
                name: sum(session.step_bytes[step][number] for session in of_form) / 1e6
                for name, step in (("first step", 0), ("later", -1))
            }
            report.add(SECTION, f"{form}: {link}", told, "MB a step")
    for shorter, longer, bar in (
        (WireForm.BF16, WireForm.RAW, ""),
        (WireForm.INT8_DELTA, WireForm.RAW, ""),
        (WireForm.INT8_DELTA, WireForm.BF16, "<= 0.52"),
    ):
        later = _total(sessions, shorter, 1) / _total(sessions, longer, 1)
        whole = _total(sessions, shorter, 0) / _total(sessions, longer, 0)
        report.add(SECTION, f"{shorter} over {longer}: steps after the first", later, "", bar)
        report.add(SECTION, f"{shorter} over {longer}: all {STEPS} steps, constants too", whole)
        streams = _total(sessions, shorter, 0, of_streams=True) / _total(sessions, longer, 0, of_streams=True)
        report.add(SECTION, f"{shorter} over {longer}: all {STEPS} steps, streams alone", streams)
    kept = sum(sessions[0].size_of[key] for key in sessions[0].constants if key[0] == LINKS[0])
    report.add(SECTION, "constants of a session on each of two links", kept / 1e6, "MB")
    most = max(session.crossed[key] for session in sessions for key in session.constants)
    report.add(SECTION, f"a constant crosses a link in {STEPS} steps", most, "times", "1")


def _total(sessions: list[Session], form: WireForm, first_step: int, *, of_streams: bool = False) -> int:
    counted = [
        session.streams if of_streams else session.step_bytes for session in sessions if session.form is form
    ]
    return sum(sum(map(sum, steps[first_step:])) for steps in counted)


def _sessions(size: Size) -> list[Session]:
    """The sessions of every form after one video."""
    sessions = [[Session(form) for _ in range(BRANCHES)] for form in WireForm]
    num_passes = 0

    def sink(stack: Stack, made: Pass) -> list[torch.Tensor]:
        nonlocal num_passes
        for of_form in sessions:
            of_form[num_passes % BRANCHES].run(made)
        num_passes += 1
        return [stream * 1.01 for stream in made.streams]

    quieten()
    with tempfile.TemporaryDirectory(prefix="diffuse-bench-") as folder:
        source = open_pipeline(str(write_wan_shaped(Path(folder) / "wan-shaped")))
        pipeline = load_pipeline(source)
        pipeline.set_progress_bar_config(disable=True)
        sink_of: ContextVar[PassSink] = ContextVar("sink_of")
        replace_blocks(pipeline.transformer, list(source.remote), sink_of, _no_block)
        token = sink_of.set(sink)
        try:
            pipeline(
                "a red fox in the snow",
                "grey noise",
                height=size.height,
                width=size.width,
                num_frames=size.num_frames,
                num_inference_steps=STEPS,
                guidance_scale=5.0,
                output_type="latent",
            )
        finally:
            sink_of.reset(token)
            source.close()
    return [session for of_form in sessions for session in of_form]


def _no_block(stack: Stack, number: int) -> torch.nn.Module:
    raise NotImplementedError("this model asks no block for anything")
