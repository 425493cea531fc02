"""The replay check: which families may be cut into patches, which may not, and that a wrong cut is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slicing.diffusion import replay
from slicing.diffusion.arguments import SliceMode
from slicing.diffusion.calls import Pass
from slicing.diffusion.patch_state import PatchState
from slicing.diffusion.patches import Cut, PatchesRefused
from slicing.diffusion.replay import MAX_REASON, Verdict
from tests.slicing.diffusion.passes import Caught, catch_family, largest_share
from tests.slicing.diffusion.plain_patches import PlainPatches

ONE_STREAM = [
    ("WanTransformer3D", 0, (2, 4, 4)),
    ("ChronoEditTransformer3D", 0, (2, 4, 4)),
    ("SkyReelsV2Transformer3D", 0, (2, 4, 4)),
    ("AnyFlowTransformer3D", 0, (2, 4, 4)),
    ("PixArtTransformer2D", 0, (1, 4, 4)),
    ("DiTTransformer2D", 0, (1, 4, 4)),
    ("LTXVideoTransformer3D", 0, (2, 4, 4)),
    ("AllegroTransformer3D", 0, (2, 4, 4)),
    ("LuminaNextDiT2D", 0, (1, 4, 4)),
    ("Lumina2Transformer2D", 1, (1, 4, 4)),
    ("ZImageTransformer2D", 0, (1, 32, 1)),
    ("AuraFlowTransformer2D", 1, (1, 29, 1)),  # text and picture in one stream: any rows make patches
    ("Flux2Transformer2D", 1, (1, 21, 1)),
    ("StableAudioDiT", 0, (1, 13, 1)),
    ("MiniMaxMusic3Transformer1D", 0, (1, 13, 1)),
    ("LongCatAudioDiTTransformer", 0, (1, 12, 1)),
]
TWO_STREAMS = [
    ("FluxTransformer2D", 0, (1, 4, 4)),
    ("FluxTransformer2D", 1, (1, 4, 4)),
    ("SD3Transformer2D", 0, (1, 4, 4)),
    ("QwenImageTransformer2D", 0, (1, 4, 4)),
    ("CogVideoXTransformer3D", 0, (2, 4, 4)),
    ("MochiTransformer3D", 0, (2, 4, 4)),
    ("HunyuanVideoTransformer3D", -1, (2, 4, 4)),
]
REFUSED = [
    ("SanaTransformer2D", "no attention over all tokens"),  # linear
    ("SanaVideoTransformer3D", "no attention over all tokens"),
    ("PRXTransformer2D", "no attention over all tokens"),  # keys are text and picture, queries the picture
    ("NucleusMoEImageTransformer2D", "no attention over all tokens"),
    ("ErnieImageTransformer2D", "does not multiply"),  # tokens first
    ("HeliosTransformer3D", "does not equal the whole pass"),  # tokens of earlier frames among them
    ("StableAudio3DiT", "does not equal the whole pass"),
    ("LTX2VideoTransformer3D", "does not equal the whole pass"),  # picture and sound attend to each other
]


def two_steps(caught: Caught, state: PatchState, cut: Cut) -> Verdict:
    """Two whole steps, as every warm-up has; the verdict of the first."""
    verdict: Verdict = caught.keep(state, cut)[1]
    caught.keep(state, cut, caught.next_step(1))
    return verdict


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(("name", "stack", "grid"), ONE_STREAM + TWO_STREAMS)
def test_patches_of_an_accepted_family_equal_plain_ones(
    name: str, stack: int, grid: tuple[int, int, int], of: int
) -> None:
    caught = catch_family(name, stack)
    state, plain, cut = PatchState(), PlainPatches(caught, grid), Cut(grid, 0, of)
    assert two_steps(caught, state, cut).allowed
    if name in ("SD3Transformer2D", "MochiTransformer3D", "HunyuanVideoTransformer3D"):
        plain.text_behind()
    for made in (caught.made, caught.next_step(1)):
        plain.whole(made)
    for seed in (2, 3):
        made = caught.next_step(seed)
        quick, wanted, whole = caught.patched(state, cut, made), plain.patched(made, of), caught.whole(made)
        for number, stream in enumerate(wanted):
            assert largest_share(quick[number], stream) <= 1e-4
        assert (
            largest_share(quick[0], whole[0]) > 1e-5
        )  # stale keys are not the whole pass: the oracle is one


@pytest.mark.parametrize(("name", "told"), REFUSED)
def test_a_family_that_is_not_understood_runs_whole(name: str, told: str) -> None:
    caught, state = catch_family(name), PatchState()
    tokens = max(stream.shape[1] for stream in caught.made.streams)
    grid = (1, 21, 1) if "Ernie" in name else (1, tokens, 1)
    streams, verdict = caught.keep(state, Cut(grid, 0, 2))
    assert not verdict.allowed
    assert told in verdict.reason
    assert all(map(torch.equal, streams, caught.whole()))
    assert state.size_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_cut_of_positions_is_refused(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    caught, right = catch_family("AllegroTransformer3D").in_dtype(dtype), replay.slice_arguments
    assert caught.keep(PatchState(), Cut((2, 4, 4), 0, 2))[1].allowed

    def upside_down(made: Pass, *others: Any) -> list[torch.Tensor]:
        return [
            new if new is old else new.flip([d for d in range(new.dim()) if new.shape[d] != old.shape[d]])
            for new, old in zip(right(made, *others), made.slots, strict=True)
        ]

    monkeypatch.setattr(replay, "slice_arguments", upside_down)
    verdict = caught.keep(PatchState(), Cut((2, 4, 4), 0, 2))[1]
    assert not verdict.allowed
    assert "keys or values are not those of the whole pass" in verdict.reason


def test_each_token_may_have_a_time_of_its_own() -> None:
    caught = catch_family("WanTransformer3D", timestep=torch.arange(32.0)[None] * 20)
    state, cut = PatchState(), Cut((2, 4, 4), 0, 2)
    assert caught.keep(state, cut)[1].allowed
    assert largest_share(caught.patched(state, cut)[0], caught.whole()[0]) <= 1e-4


@pytest.mark.parametrize("family", ["WanTransformer3D", "PixArtTransformer2D", "LuminaNextDiT2D"])
def test_text_as_long_as_the_picture_is_not_kept(family: str) -> None:
    tokens, grid = (32, (2, 4, 4)) if family.startswith("Wan") else (16, (1, 4, 4))
    batch = 1 if family.startswith("Wan") else 2
    text = torch.randn(batch, tokens, 24, generator=torch.Generator().manual_seed(3))
    mask = {
        "PixArtTransformer2D": {"encoder_attention_mask": (torch.arange(tokens) < 11).float().repeat(2, 1)},
        "LuminaNextDiT2D": {"encoder_mask": torch.ones(2, tokens)},
    }.get(family, {})
    caught, short = catch_family(family, encoder_hidden_states=text, **mask), catch_family(family)
    state, other, cut = PatchState(), PatchState(), Cut(grid, 0, 2)
    assert two_steps(caught, state, cut).allowed
    two_steps(short, other, cut)
    assert state.size_bytes == other.size_bytes
    made = caught.next_step(1)
    assert largest_share(caught.patched(state, cut, made)[0], caught.whole(made)[0]) <= 1e-4


def test_what_is_no_number_is_refused() -> None:
    caught = catch_family("PixArtTransformer2D")
    streams = [stream.clone() for stream in caught.made.streams]
    streams[0][1, 3] = float("nan")
    verdict = caught.keep(
        PatchState(), Cut((1, 4, 4), 0, 2), Pass(caught.made.plan, streams, caught.made.slots)
    )[1]
    assert not verdict.allowed
    assert "no numbers" in verdict.reason


@pytest.mark.parametrize(
    "verdict",
    [Verdict(True, "a replayed patch equals", SliceMode.KEEP_MASKS), Verdict(False, "linear", None)],
)
def test_a_verdict_survives_json(verdict: Verdict) -> None:
    assert Verdict.from_json(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"allowed": 1, "reason": "", "mode": None},
        {"allowed": True, "reason": "", "mode": "slice more"},
        {"allowed": True, "reason": "x" * (MAX_REASON + 1), "mode": None},
        {"allowed": True, "reason": ""},
        {"allowed": True, "reason": "", "mode": []},
    ],
)
def test_a_verdict_from_a_stranger_is_checked(value: Any) -> None:
    with pytest.raises(PatchesRefused):
        Verdict.from_json(value)
