"""Cuts by height over all frames, what is refused and why, and which arguments of a call a patch gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slicing.diffusion.arguments import (
    Layout,
    SliceMode,
    SliceRule,
    find_layouts,
    slice_arguments,
    sliced_slots,
)
from slicing.diffusion.calls import BlockCall, Pass, Plan
from slicing.diffusion.patches import Cut, PatchesRefused, check_patches, find_grid, join_patches

TOKENS = 12  # a grid of 1 x 4 x 3


def a_pass(slots: list[torch.Tensor], **kwargs: Any) -> Pass:
    """A pass of one block over 12 tokens; `kwargs` says under which names the slots go."""
    shape = {"args": [{"stream": 0}], "kwargs": kwargs}
    plan = Plan("transformer.blocks", (BlockCall(0, tuple(range(len(slots)))),), (shape,), None, 1)
    return Pass(plan, [torch.zeros(1, TOKENS, 8)], slots)


def sliced(slots: list[torch.Tensor], mode: SliceMode = SliceMode.ALL, **kwargs: Any) -> list[list[int]]:
    """The shapes of the slots that the second of two patches gets."""
    cut = Cut((1, 4, 3), 1, 2)
    rows = Layout(0, TOKENS).rows(cut)
    return [list(slot.shape) for slot in slice_arguments(a_pass(slots, **kwargs), rows, SliceRule(mode))]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.data())
def test_patches_share_all_tokens_among_them(
    frames: int, height: int, width: int, data: st.DataObject
) -> None:
    of = data.draw(st.integers(1, height))
    cuts = list(Cut((frames, height, width), 0, of).all())
    rows = torch.cat([cut.rows() for cut in cuts])
    assert sorted(rows.tolist()) == list(range(frames * height * width))
    sizes = [len(cut.rows()) // (frames * width) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1


def test_a_patch_holds_the_same_rows_of_every_frame() -> None:
    places = Cut((3, 4, 2), 1, 2).rows()
    assert {int(place) // 8 for place in places} == {0, 1, 2}
    assert {int(place) % 8 // 2 for place in places} == {2, 3}


def test_patches_join_to_the_tokens_they_were_cut_from() -> None:
    cut = Cut((2, 5, 3), 0, 3)
    tokens = torch.randn(2, 30, 4)
    assert torch.equal(join_patches([one.take(tokens) for one in cut.all()], cut), tokens)


@pytest.mark.parametrize(
    ("grid", "index", "of", "told"),
    [
        ((1, 4, 3), 0, 5, "5 patches cannot be cut from a picture of 4 rows"),
        ((1, 4, 3), 2, 2, "patch 2 of 2"),
        ((1, 4, 3), -1, 2, "patch -1"),
        ((1, 4, 3), 0, 0, "0 patches"),
        ((1, 0, 3), 0, 1, "grid of 1x0x3"),
        ((1 << 20, 1 << 20, 1), 0, 1, "is not between"),
        ((1, 4.0, 3), 0, 1, "whole numbers"),
        ((True, 4, 3), 0, 1, "whole numbers"),
        ((4, 3), 0, 1, "three"),
    ],
)
def test_a_cut_that_makes_no_patch_is_refused(grid: Any, index: int, of: int, told: str) -> None:
    with pytest.raises(PatchesRefused, match=told):
        Cut(grid, index, of)


def test_a_cut_survives_json() -> None:
    cut = Cut((3, 4, 2), 1, 2)
    assert Cut.from_json(json.loads(json.dumps(cut.to_json()))) == cut


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"grid": [1, 4, 3], "index": 0},
        {"grid": [1, 4], "index": 0, "of": 2},
        {"grid": [1, 4, "3"], "index": 0, "of": 2},
        {"grid": [1, 4, 3], "index": 0, "of": 2, "more": 1},
        {"grid": [1, 4, 3], "index": None, "of": 2},
    ],
)
def test_a_cut_from_a_stranger_is_checked(value: Any) -> None:
    with pytest.raises(PatchesRefused):
        Cut.from_json(value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"patches": 0}, "at least 1"),
        ({"steps": 7}, "7 steps are too few for patches: below 8"),
        ({"warmup": 0}, "first step is always whole"),
        ({"patches": 9}, "9 patches are too many for 2 stages: at most 4"),
        ({"patches": 6, "grid": (1, 4, 4)}, "6 patches cannot be cut from a picture of 4 rows"),
    ],
)
def test_patches_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    asked = {"patches": 4, "warmup": 4, "steps": 20, "stages": 2} | changes
    check_patches(4, warmup=4, steps=20, stages=2, grid=(1, 8, 8))
    with pytest.raises(PatchesRefused, match=told) as refused:
        check_patches(**asked)
    assert refused.value.param == ("warmup" if "warmup" in changes else "patches")


def test_one_patch_is_never_refused() -> None:
    check_patches(1, warmup=0, steps=1, stages=1, grid=(1, 1, 1))


@pytest.mark.parametrize(
    ("latents", "patch_size", "tokens", "grid"),
    [
        ((2, 3, 32, 32), 4, 64, (1, 8, 8)),
        ((1, 16, 21, 60, 104), (1, 2, 2), 32760, (21, 30, 52)),
        ((1, 16, 3, 16, 24), [2, 2, 2], 192, (2, 8, 12)),
        ((1, 16, 3, 16, 24), 2, 288, (3, 8, 12)),
    ],
)
def test_the_grid_comes_from_the_latents(latents: Any, patch_size: Any, tokens: int, grid: Any) -> None:
    assert find_grid(latents, patch_size, tokens) == grid


@pytest.mark.parametrize(
    ("latents", "tokens", "told"),
    [((1, 4, 8, 8), 20, "does not multiply"), ((1, 16, 64), 16, "no known grid")],
)
def test_a_grid_that_is_not_known_is_refused(latents: Any, tokens: int, told: str) -> None:
    with pytest.raises(PatchesRefused, match=told):
        find_grid(latents, 2, tokens)


def test_every_argument_with_a_dimension_of_tokens_is_cut() -> None:
    rotary, text, per_token, modulation = (
        torch.randn(1, TOKENS, 1, 6),
        torch.randn(1, 5, 8),
        torch.randn(1, TOKENS, 6, 8),  # a time embedding of its own for each token
        torch.randn(1, 6, 8),
    )
    assert sliced([rotary, text, per_token, modulation]) == [[1, 6, 1, 6], [1, 5, 8], [1, 6, 6, 8], [1, 6, 8]]


def test_a_mask_of_queries_by_keys_is_cut_by_queries_only() -> None:
    assert sliced([torch.zeros(1, 1, TOKENS, TOKENS)]) == [[1, 1, 6, TOKENS]]


@pytest.mark.parametrize(
    ("mask", "kwargs"),
    [
        (torch.ones(1, TOKENS, dtype=torch.bool), {}),
        (torch.zeros(1, 1, 1, TOKENS), {}),
        (torch.zeros(1, TOKENS, 1), {"attention_mask": {"slot": 0}}),
        (
            torch.zeros(1, TOKENS, 1),
            {"options": {"dict": {"a": 1, "b": {"slot": 0}}}, "key_mask": [{"slot": 0}]},
        ),
    ],
)
def test_masks_of_keys_can_stay_whole(mask: torch.Tensor, kwargs: dict[str, Any]) -> None:
    assert sliced([mask], SliceMode.ALL, **kwargs)[0] != list(mask.shape)
    assert sliced([mask], SliceMode.KEEP_MASKS, **kwargs) == [list(mask.shape)]
    assert sliced([mask], SliceMode.HIDDEN_ONLY, **kwargs) == [list(mask.shape)]


def test_a_slot_named_whole_is_not_cut() -> None:
    made = a_pass([torch.zeros(1, TOKENS, 8), torch.zeros(1, TOKENS, 8)])
    rows = Layout(0, TOKENS).rows(Cut((1, 4, 3), 0, 2))
    assert sliced_slots(made, rows, SliceRule(SliceMode.ALL, frozenset({1}))) == {0: 1}


@pytest.mark.parametrize(
    ("streams", "told"),
    [
        ([torch.zeros(1, 11, 8)], "a grid of 1x4x3 tokens does not multiply to the model's 11"),
        ([torch.zeros(TOKENS, 8)], "one stream of tokens"),
        ([torch.zeros(1, TOKENS, 8, dtype=torch.int64)], "one stream of tokens"),
        ([torch.zeros(1, TOKENS, 8), torch.zeros(1, TOKENS, 8)], "cannot be told apart"),
        ([torch.zeros(1, TOKENS, 8)] * 3, "one stream of tokens"),
    ],
)
def test_streams_without_a_known_layout_are_refused(streams: list[torch.Tensor], told: str) -> None:
    with pytest.raises(PatchesRefused, match=told):
        find_layouts(streams, Cut((1, 4, 3), 0, 2))


def test_text_lies_before_or_behind_the_picture() -> None:
    before, behind = find_layouts([torch.zeros(1, TOKENS, 8), torch.zeros(1, 2, 8)], Cut((1, 4, 3), 0, 2))
    last = Cut((1, 4, 3), 3, 4)
    assert before.rows(last).rows.tolist() == [0, 1, 11, 12, 13]
    assert behind.rows(last, keeps_text=True).rows.tolist() == [9, 10, 11, 12, 13]
    written = behind.rows(last, keeps_text=True).written
    assert written is not None
    assert written.tolist() == [0, 1, 2]
