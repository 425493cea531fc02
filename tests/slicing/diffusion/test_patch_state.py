"""What a session keeps for patches: in order, nobody else's, the same wherever the stack is cut, and let go."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from slicing.block_slice import Cancelled
from slicing.diffusion.calls import Pass
from slicing.diffusion.kept import StaleKeys, kept_bytes
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Cut, Mode, PatchesRefused
from tests.slicing.diffusion.passes import Caught, Streams, catch_family, largest_share

CUT = Cut((1, 4, 4), 0, 2)


def pixart() -> Caught:
    """Four blocks of width 32 over a batch of two pictures of 16 tokens."""
    return catch_family("PixArtTransformer2D")


def kept(caught: Caught, cut: Cut = CUT, **options: Any) -> PatchState:
    """A session after its first whole step."""
    state = PatchState()
    assert caught.keep(state, cut, **options)[1].allowed
    return state


class CountingBlocks:
    """Blocks that count their runs, and fail in one of them."""

    def __init__(self, caught: Caught, fails_at: int | None = None) -> None:
        self.runs = 0
        self._caught, self._fails_at = caught, fails_at

    def run(self, made: Pass, **options: Any) -> Streams:
        """Run blocks, or be told to stop."""
        self.runs += 1
        if self.runs == self._fails_at:
            raise Cancelled
        return self._caught.blocks.run(made, **options)


def test_warm_up_is_the_whole_pass_bit_for_bit() -> None:
    caught, state = pixart(), PatchState()
    for seed in range(4):
        made = caught.next_step(seed)
        assert torch.equal(caught.keep(state, CUT, made)[0][0], caught.whole(made)[0])
    assert torch.equal(state.run(caught.blocks, caught.made, 0, 4, mode=Mode.WHOLE)[0][0], caught.whole()[0])


def test_the_first_whole_pass_brings_the_only_verdict() -> None:
    caught, state = pixart(), PatchState()
    verdicts = [caught.keep(state, CUT, caught.next_step(seed))[1] for seed in range(3)]
    assert verdicts[0].allowed
    assert verdicts[1:] == [None, None]


@pytest.mark.parametrize("name", ["PixArtTransformer2D", "FluxTransformer2D"])
@pytest.mark.parametrize("places", [[1], [2], [3], [1, 2, 3]])
def test_patches_do_not_depend_on_where_the_stack_is_cut(name: str, places: list[int]) -> None:
    caught = catch_family(name)
    first = caught.stack.offset
    ends = [first, *(first + place for place in places), caught.stack.end]
    spans = list(pairwise(ends))
    one, several = kept(caught, CUT), [PatchState() for _ in spans]
    made = caught.made
    for state, span in zip(several, spans, strict=True):
        streams, verdict = state.run(caught.blocks, made, *span, mode=Mode.WHOLE_KEEP, cut=CUT)
        assert verdict is not None
        assert verdict.allowed
        made = Pass(made.plan, streams, made.slots)
    for cut in CUT.all():
        wanted = caught.patch(one, cut, caught.next_step())
        streams = [
            cut.take(stream) if stream.shape[1] == 16 else stream[:, : 0 if cut.index else None]
            for stream in caught.next_step().streams
        ]
        for state, span in zip(several, spans, strict=True):
            part = Pass(made.plan, streams, made.slots)
            streams, _ = state.run(caught.blocks, part, *span, mode=Mode.PATCH, cut=cut)
        assert all(map(torch.equal, streams, wanted))


def test_both_rows_of_guidance_in_one_call_are_kept() -> None:
    caught = pixart()
    both = caught.patched(kept(caught), CUT, caught.next_step())
    assert both[0].shape[0] == 2
    for row in (0, 1):

        def alone(made: Pass, row: int = row) -> Pass:
            def one(part: torch.Tensor) -> torch.Tensor:
                return part[row : row + 1].clone() if part.shape[0] == 2 else part

            return Pass(made.plan, [one(part) for part in made.streams], [one(part) for part in made.slots])

        state = PatchState()
        caught.keep(state, CUT, alone(caught.made))
        got = caught.patched(state, CUT, alone(caught.next_step()))
        assert largest_share(got[0], both[0][row : row + 1]) <= 1e-5


def test_interleaved_branches_equal_each_alone_and_a_shared_buffer_does_not() -> None:
    caught = pixart()
    branches = [
        caught.next_step(seed, share=1.0) for seed in (10, 20)
    ]  # two texts make two thoughts of a picture

    def steps(states: list[PatchState], which: tuple[int, ...]) -> list[torch.Tensor]:
        for branch in which:
            caught.keep(states[branch], CUT, branches[branch])
        for cut in CUT.all():
            answers = {branch: caught.patch(states[branch], cut, branches[branch]) for branch in which}
            got.setdefault(cut.index, answers)
        return [torch.cat([got[index][branch][0] for index in (0, 1)], 1) for branch in which]

    got: dict[int, dict[int, Streams]] = {}
    alone = []
    for branch in (0, 1):
        got = {}
        alone += steps([PatchState(), PatchState()], (branch,))
    got = {}
    together = steps([PatchState(), PatchState()], (0, 1))
    assert all(map(torch.equal, together, alone))
    shared = PatchState()
    for branch in (0, 1):
        caught.keep(
            shared, CUT, branches[branch]
        )  # the planted fault: one buffer, and the other branch wrote last
    mixed = caught.patched(shared, CUT, branches[0])[0]
    assert largest_share(mixed, caught.whole(branches[0])[0]) > 0.01


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2]])
def test_patches_never_overtake_each_other(order: list[int]) -> None:
    caught, cut = pixart(), Cut((1, 4, 4), 0, 4)
    state = kept(caught, cut)
    *before, last = [cut.at(index) for index in order]
    for one in before:
        caught.patch(state, one)
    with pytest.raises(StaleKeys, match="was due: this pass must be whole"):
        caught.patch(state, last)
    with pytest.raises(StaleKeys, match="no keys and values"):
        caught.patch(state, cut)
    caught.keep(state, cut)
    caught.patched(state, cut)


def test_a_session_that_keeps_nothing_asks_for_a_whole_pass() -> None:
    caught = pixart()
    with pytest.raises(StaleKeys, match="must be whole"):
        caught.patch(PatchState(), CUT)
    state = kept(caught)
    state.run(
        caught.blocks, caught.made, 0, 4, mode=Mode.WHOLE
    )  # its keys were not kept: those held are too old
    with pytest.raises(StaleKeys, match="must be whole"):
        caught.patch(state, CUT)


@pytest.mark.parametrize(
    "changed",
    [
        {"cut": Cut((1, 4, 4), 0, 4)},
        {"cut": Cut((2, 2, 4), 0, 2)},
        {"span": (0, 3)},
        {"extrapolate": 0.5},
    ],
)
def test_a_patch_of_another_kind_of_pass_asks_for_a_whole_one(changed: dict[str, Any]) -> None:
    caught = pixart()
    state = kept(caught)
    with pytest.raises(StaleKeys, match="must be whole"):
        caught.patch(state, changed.pop("cut", CUT), **changed)


@pytest.mark.parametrize(
    "spoil",
    [lambda s: s[:, :5], lambda s: s[:1], lambda s: s.double(), lambda s: s[..., :8]],
    ids=["rows", "batch", "type", "width"],
)
def test_a_patch_of_the_wrong_shape_is_refused(spoil: Any) -> None:
    caught = pixart()
    state = kept(caught)
    part = Pass(caught.made.plan, [spoil(CUT.take(caught.made.streams[0]))], caught.made.slots)
    with pytest.raises(PatchesRefused, match="another shape or type"):
        state.run(caught.blocks, part, 0, 4, mode=Mode.PATCH, cut=CUT)


@pytest.mark.parametrize("extrapolate", [float("nan"), float("inf"), -0.1, 1.5])
def test_extrapolation_is_a_share(extrapolate: float) -> None:
    with pytest.raises(PatchesRefused, match="between 0 and"):
        pixart().keep(PatchState(), CUT, extrapolate=extrapolate)


def test_extrapolation_starts_from_the_last_two_steps() -> None:
    """Streams on a straight line: where stale keys are moved on by the whole last change, patches come nearer."""
    caught = pixart()
    steps = [
        Pass(caught.made.plan, [caught.made.streams[0] * (1 + 0.05 * step)], caught.made.slots)
        for step in range(3)
    ]
    away = {}
    for share in (0.0, 0.5, 1.0):
        state = PatchState()
        for made in steps[:2]:
            caught.keep(state, CUT, made, extrapolate=share)
        got = caught.patched(state, CUT, steps[2], extrapolate=share)
        away[share] = largest_share(got[0], caught.whole(steps[2])[0])
    assert away[1.0] < away[0.5] < away[0.0]


def test_half_a_patch_is_not_believed() -> None:
    caught = pixart()
    state, blocks = PatchState(), CountingBlocks(caught, fails_at=3)  # a whole pass, its replay, then a patch
    state.run(blocks, caught.made, 0, 4, mode=Mode.WHOLE_KEEP, cut=CUT)
    part = Pass(caught.made.plan, [CUT.take(caught.made.streams[0])], caught.made.slots)
    with pytest.raises(Cancelled):
        state.run(blocks, part, 0, 4, mode=Mode.PATCH, cut=CUT)
    assert state.size_bytes == 0
    with pytest.raises(StaleKeys):
        state.run(blocks, part, 0, 4, mode=Mode.PATCH, cut=CUT)


def test_a_cancelled_replay_stops() -> None:
    caught = pixart()
    state, blocks = PatchState(), CountingBlocks(caught, fails_at=2)
    with pytest.raises(Cancelled):
        state.run(blocks, caught.made, 0, 4, mode=Mode.WHOLE_KEEP, cut=CUT)
    assert state.size_bytes == 0


def test_a_refused_family_is_checked_once() -> None:
    caught = catch_family("SanaTransformer2D")
    state, blocks, cut = PatchState(), CountingBlocks(caught), Cut((1, 8, 8), 0, 2)
    verdicts = [
        state.run(blocks, caught.made, 0, caught.stack.end, mode=Mode.WHOLE_KEEP, cut=cut)[1]
        for _ in range(3)
    ]
    assert blocks.runs == 3
    assert verdicts[0] is not None
    assert verdicts == verdicts[:1] * 3


def test_a_replay_costs_one_patch() -> None:
    caught = pixart()
    blocks = CountingBlocks(caught)
    for _ in range(3):
        PatchState().run(blocks, caught.made, 0, 4, mode=Mode.WHOLE_KEEP, cut=CUT)
    assert blocks.runs == 6


def test_memory_beyond_what_was_set_aside_is_refused_with_the_numbers() -> None:
    caught = pixart()
    needed = kept_bytes(16, 32, itemsize=4, num_blocks=4, batch=2)
    enough, short = PatchState(limit_bytes=needed), PatchState(limit_bytes=needed - 1)
    assert caught.keep(enough, CUT)[1].allowed
    assert enough.size_bytes == needed
    streams, verdict = caught.keep(short, CUT)
    assert torch.equal(streams[0], caught.whole()[0])
    assert not verdict.allowed
    assert str(needed) in verdict.reason
    assert str(needed - 1) in verdict.reason
    assert short.size_bytes == 0


def test_what_a_closed_session_held_is_freed() -> None:
    caught = pixart()
    state = kept(caught)
    assert state._held is not None
    sites = state._held.kept._sites
    keys = [weakref.ref(site.key) for site in sites.values()]
    del sites
    state.close()
    gc.collect()
    assert len(keys) == 4
    assert all(key() is None for key in keys)


def test_a_text_mask_that_changes_between_steps_asks_for_a_whole_pass() -> None:
    caught = catch_family("QwenImageTransformer2D")
    state = kept(caught)
    mask = caught.made.slots[0].clone()
    mask[:, -2:] = ~mask[:, -2:] if mask.dtype is torch.bool else 1 - mask[:, -2:]
    changed = Pass(caught.made.plan, caught.made.streams, [mask, *caught.made.slots[1:]])
    with pytest.raises(StaleKeys, match="mask"):
        caught.patch(state, CUT, changed)


def test_later_patches_get_their_text_back_empty() -> None:
    caught = catch_family("FluxTransformer2D")
    state = kept(caught)
    first, second = (caught.patch(state, cut) for cut in CUT.all())
    assert [stream.shape[1] for stream in first] == [8, 5]
    assert [stream.shape[1] for stream in second] == [8, 0]
