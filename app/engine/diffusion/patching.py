"""Which passes of a picture run as patches: whole ones first, patches where every hop found them right.

A decision from numbers: no nodes, no tensors but their shapes. Belongs to one picture; its stacks are judged apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.engine.diffusion.passes import PassOrder
from app.engine.diffusion.request import WARMUP_STEPS, PatchVerdict
from slicing.diffusion.arguments import Layout, find_layouts
from slicing.diffusion.calls import Pass
from slicing.diffusion.kept import kept_bytes
from slicing.diffusion.patches import (
    MAX_PATCHES_PER_STAGE,
    Cut,
    Mode,
    PatchesRefused,
    find_grid,
    join_patches,
)
from slicing.diffusion.replay import Verdict

EXTRAPOLATE = 0.5  # of the last change: measured to halve the drift; the whole of it helps less
KIB = 1024


@dataclass(frozen=True)
class PatchWish:
    """What a request asks for, and what is known of the model's tokens."""

    patches: int = 1
    warmup: int = WARMUP_STEPS
    extrapolate: bool = False
    two_streams: bool = False  # also where text goes along with the picture: experimental
    patch_size: int | Sequence[int] = 1
    height_tokens: int = 0  # of models whose latents come packed; 0: no picture
    width_tokens: int = 0

    @property
    def share(self) -> float:
        return EXTRAPOLATE if self.extrapolate else 0.0


class Patching:
    """The patches of one picture. `step` is the number of the present step, from 0."""

    def __init__(self, wish: PatchWish) -> None:
        self.wish = wish
        self.step = 0
        self._allowed: dict[str, bool] = {}  # by stack: what its hops said
        self._reasons: dict[str, str] = {}
        self._told: bool | None = None  # whether patches were allowed when it was last told

    def needs_room(self, stack: str, made: Pass, latents: Sequence[int]) -> int:
        """KiB that a block keeps of this branch for patches; 0 where there will be none."""
        cut = self._cut(stack, made, latents)
        if cut is None:
            return 0
        layout = find_layouts(made.streams, cut)[0]
        picture = made.streams[layout.picture]
        size = kept_bytes(
            layout.total,
            picture.shape[2],
            itemsize=picture.element_size(),
            batch=picture.shape[0],
            extrapolate=self.wish.extrapolate,
        )
        return math.ceil(size / KIB)

    def order(self, stack: str, made: Pass, latents: Sequence[int], *, is_fresh: bool) -> PassOrder:
        """How the next pass runs. `is_fresh`: its nodes keep nothing of use, so it must be whole."""
        cut = self._cut(stack, made, latents)
        if cut is None:
            return PassOrder(Mode.WHOLE)
        is_whole = is_fresh or self.step < self.wish.warmup or not self._allowed.get(stack, False)
        return PassOrder(Mode.WHOLE_KEEP if is_whole else Mode.PATCH, cut, self.wish.share)

    def note(self, stack: str, verdicts: Sequence[Verdict]) -> None:
        """What the hops of one session said: all of a stack's must agree, or it runs whole from here on."""
        for verdict in verdicts:
            if not verdict.allowed:
                self.refuse(stack, verdict.reason)
            elif stack not in self._reasons:
                self._allowed[stack] = True

    def note_stages(self, stack: str, stages: int) -> None:
        """How many nodes run this stack one behind another: too few of them gain nothing from so many patches."""
        most = MAX_PATCHES_PER_STAGE * max(1, stages)
        if self.wish.patches > most:
            self.refuse(
                stack, f"{self.wish.patches} patches are too many for {stages} stages: at most {most}"
            )

    def refuse(self, stack: str, reason: str) -> None:
        """Whole steps only, for this reason."""
        self._allowed[stack] = False
        self._reasons.setdefault(stack, reason)

    def verdict(self) -> PatchVerdict | None:
        """What there is to tell after a step: once, and again if patches end later. None: nothing new."""
        is_allowed = any(self._allowed.values())
        if self.wish.patches == 1 or not (self._allowed or self._reasons):
            return None
        if is_allowed == self._told:
            return None
        self._told = is_allowed
        reasons = "; ".join(f"{stack}: {reason}" for stack, reason in self._reasons.items())
        return PatchVerdict(is_allowed, reasons and f"whole steps ({reasons})")

    def _cut(self, stack: str, made: Pass, latents: Sequence[int]) -> Cut | None:
        """How this stack's passes are cut; None where they are not."""
        if self.wish.patches == 1 or stack in self._reasons:
            return None
        try:
            return _cut_of(self.wish, made, latents)
        except PatchesRefused as error:
            self.refuse(stack, str(error))
            return None


def _cut_of(wish: PatchWish, made: Pass, latents: Sequence[int]) -> Cut:
    if made.plan.num_streams > 1 and not wish.two_streams:
        raise PatchesRefused("text goes through its blocks beside the picture: whole steps, unless asked for")
    cut = Cut(_grid(wish, made, latents), 0, wish.patches)
    find_layouts(made.streams, cut)
    return cut


def _grid(wish: PatchWish, made: Pass, latents: Sequence[int]) -> tuple[int, int, int]:
    """(frames, height, width) in tokens: of the latents, or of the size asked for where they come packed."""
    lengths = [stream.shape[1] for stream in made.streams if stream.dim() == 3]
    refused: PatchesRefused | None = None
    ways = [list(latents)]
    if len(latents) == 5:  # or [B, F, C, H, W]
        ways.append([latents[0], latents[2], latents[1], *latents[3:]])
    for num_tokens in lengths:
        for way in ways:
            try:
                return find_grid(way, wish.patch_size, num_tokens)
            except PatchesRefused as error:
                refused = refused or error
    area = wish.height_tokens * wish.width_tokens
    for num_tokens in lengths:
        if len(latents) == 3 and area and num_tokens % area == 0:
            return num_tokens // area, wish.height_tokens, wish.width_tokens
        if len(latents) == 3 and not area:  # a sound: one token behind another
            return 1, num_tokens, 1
    raise refused or PatchesRefused("its streams are no tokens")


def parts_of(made: Pass, order: PassOrder) -> list[tuple[Pass, PassOrder]]:
    """A pass as it is sent: itself, or one part for each patch. Only the first brings the text."""
    if order.mode is not Mode.PATCH:
        return [(made, order)]
    assert order.cut is not None
    layout = find_layouts(made.streams, order.cut)[0]
    return [
        (
            Pass(made.plan, _patch_streams(made.streams, layout, cut), made.slots),
            PassOrder(Mode.PATCH, cut, order.extrapolate),
        )
        for cut in order.cut.all()
    ]


def joined(made: Pass, cut: Cut, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The streams of a pass from what its patches gave."""
    layout = find_layouts(made.streams, cut)[0]
    return [
        join_patches([part[number] for part in parts], cut) if number == layout.picture else parts[0][number]
        for number in range(len(made.streams))
    ]


def _patch_streams(streams: list[torch.Tensor], layout: Layout, cut: Cut) -> list[torch.Tensor]:
    taken = layout.take(streams, cut)
    if layout.text is not None and cut.index > 0:
        taken[layout.text] = taken[layout.text][:, :0]
    return taken
