"""The replay check: whether one patch, run over keys kept of a whole pass, gives that pass's rows.

It tries every way of cutting a call's arguments and takes the first that is right, so no family is known by name: a
rotary table, a mask or a time embedding that was cut wrongly shows, and so does attention that is none (linear
attention, keys from elsewhere). What is not understood is refused and runs whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from slicing.diffusion.arguments import (
    Layout,
    Rows,
    SliceMode,
    SliceRule,
    slice_arguments,
    sliced_slots,
)
from slicing.diffusion.attention_watch import Site, Watch
from slicing.diffusion.calls import Pass
from slicing.diffusion.kept import KeptKeys, KeysDiffer, difference, tolerance_of
from slicing.diffusion.patches import Cut, PatchesRefused
from slicing.errors import ModelError

MAX_TRIES = 16  # a family that was accepted took 3 at most; a peer may send any number of tensors
MAX_REASON = 200  # characters: a node says it, and it stands in the gateway's events
RunPass = Callable[[Pass, Watch], list[torch.Tensor]]


@dataclass(frozen=True)
class Verdict:
    """Whether patches may be used over these blocks, why not, and which arguments are cut where they may."""

    allowed: bool
    reason: str
    mode: SliceMode | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in an answer's header."""
        return {
            "allowed": self.allowed,
            "reason": self.reason[:MAX_REASON],
            "mode": self.mode.value if self.mode else None,
        }

    @classmethod
    def from_json(cls, value: Any) -> Verdict:
        """The inverse; raises `PatchesRefused` for anything else."""
        modes: dict[str | None, SliceMode | None] = {mode.value: mode for mode in SliceMode}
        modes[None] = None
        match value:
            case {
                "allowed": bool() as allowed,
                "reason": str() as reason,
                "mode": (str() | None) as mode,
            } if len(value) == 3 and len(reason) <= MAX_REASON and mode in modes:
                return cls(allowed, reason, modes[mode])
        raise PatchesRefused("a verdict is an object of allowed, reason and mode")


@dataclass(frozen=True)
class Agreed:
    """What the check found to be right: how the streams lie in attention, and what is cut."""

    layout: Layout
    rule: SliceRule

    def slots(self, made: Pass, rows: Rows) -> list[torch.Tensor]:
        """The arguments of a patch."""
        return slice_arguments(made, rows, self.rule)


def replay_check(
    run: RunPass,
    patch: Pass,
    answer: Sequence[torch.Tensor],
    kept: KeptKeys,
    cut: Cut,
    layouts: Sequence[Layout],
) -> tuple[Verdict, Agreed | None]:
    """Run `patch` in each way that could be right and compare it with the rows of `answer`.

    `patch` has the streams of patch `cut` as the first block took them, and whole slots; `kept` holds the keys of the
    whole pass that gave `answer`, and stays as it is. Costs one patch for each way that is tried.
    """
    if not kept.sites:
        return Verdict(
            False, "no attention over all tokens was seen: it is linear, or takes keys from elsewhere"
        ), None
    if not all(bool(stream.isfinite().all()) for stream in answer):
        return Verdict(False, "the whole pass gave values that are no numbers"), None
    reasons: dict[str, str] = {}
    for agreed in islice(_ways(patch, cut, layouts), MAX_TRIES):
        mode = agreed.rule.mode
        try:
            text_sites = try_patch(run, patch, answer, kept, cut, agreed)
        except ModelError as error:
            reasons.setdefault(mode.value, str(error))
            continue
        kept.drop_sites(text_sites)
        if kept.sites:
            return Verdict(True, f"a replayed patch equals the whole pass ({mode.value})", mode), agreed
        return Verdict(False, "no attention of the picture's tokens to each other was seen"), None
    told = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
    return Verdict(False, f"a replayed patch does not equal the whole pass ({told})"[:MAX_REASON]), None


def drop_text_sites(
    run: RunPass, patch: Pass, answer: Sequence[torch.Tensor], kept: KeptKeys, cut: Cut, agreed: Agreed
) -> Agreed:
    """Stop keeping sites whose keys come from text, where one way of cutting leaves it whole. What is right then.

    Text as long as the picture makes a cross-attention look like a site, and cutting it changes no result while it is
    the same in every step. With it whole, such a site sees all its keys in every patch and nothing need be kept.
    """
    for without in islice(_ways(patch, cut, [agreed.layout]), MAX_TRIES):
        try:
            text_sites = try_patch(run, patch, answer, kept, cut, without)
        except ModelError:
            continue
        if text_sites:
            kept.drop_sites(text_sites)
            return without
    return agreed


def try_patch(
    run: RunPass, patch: Pass, answer: Sequence[torch.Tensor], kept: KeptKeys, cut: Cut, agreed: Agreed
) -> frozenset[Site]:
    """Run a patch in one way; the sites whose keys are found to be none of the picture's.

    Raises `ModelError`, in words without any values, where it does not give the rows of `answer`.
    """
    rows = agreed.layout.rows(cut)
    watch = kept.check(rows)
    streams = [stream.clone() for stream in patch.streams]
    streams = run(Pass(patch.plan, streams, agreed.slots(patch, rows)), watch)
    if watch.seen != kept.sites:
        raise KeysDiffer("its attention is not called as in the whole pass")
    for number, (new, whole) in enumerate(zip(streams, answer, strict=True)):
        wanted = cut.take(whole) if number == agreed.layout.picture else whole
        if new.shape != wanted.shape or new.dtype != wanted.dtype:
            raise KeysDiffer("its answer has another shape")
        if not (share := difference(new, wanted)) <= tolerance_of(whole.dtype):
            raise KeysDiffer(f"its rows differ by {share:.1e} of the largest")
    return frozenset(watch.text_sites)


def _ways(patch: Pass, cut: Cut, layouts: Sequence[Layout]) -> Iterator[Agreed]:
    """What could be right, most likely first, each once: a mode as it is, then with one slot (text) left whole."""
    for layout in layouts:
        tried: list[dict[int, int]] = []
        for rule in _rules(patch, layout.rows(cut)):
            slots = sliced_slots(patch, layout.rows(cut), rule)
            if slots not in tried:
                tried.append(slots)
                yield Agreed(layout, rule)


def _rules(patch: Pass, rows: Rows) -> Iterator[SliceRule]:
    yield from map(SliceRule, SliceMode)
    for mode in SliceMode:
        for slot in sliced_slots(patch, rows, SliceRule(mode)):
            yield SliceRule(mode, frozenset({slot}))
