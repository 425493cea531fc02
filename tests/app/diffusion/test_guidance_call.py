"""Calls of a transformer are compared bit for bit, and copies of them lie in memory as the originals do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.engine.diffusion.guidance_call import GuidanceCall, same_bits

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        (torch.ones(2, 3), torch.ones(3, 2).T, False),
        (torch.empty(0), torch.empty(0), True),
        (torch.ones(()), torch.ones(()), True),
        (torch.ones(1).expand(4), torch.ones(1).expand(4), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
    ],
)
def test_tensors_are_the_same_when_every_bit_is(
    one: torch.Tensor, other: torch.Tensor, is_same: bool
) -> None:
    assert same_bits(one, other) is is_same


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(13.0)[1:],
        torch.arange(4.0).expand(3, 4),
        torch.arange(24.0).reshape(4, 6)[::2, 1:4],
        torch.tensor(3),
    ],
)
def test_a_copy_has_the_strides_and_the_alignment_of_the_original(tensor: torch.Tensor) -> None:
    copy = GuidanceCall.copied((tensor,), {}).args[0]
    assert copy is not tensor
    assert same_bits(copy, tensor)
    assert copy.data_ptr() % 64 == tensor.data_ptr() % 64


def test_a_change_of_the_original_does_not_reach_the_copy() -> None:
    latents = torch.zeros(2, 2)
    call = GuidanceCall.copied((), {"hidden_states": latents, "more": [{"text": latents}]})
    latents += 1
    assert not call.equals(GuidanceCall.copied((), {"hidden_states": latents, "more": [{"text": latents}]}))
    assert float(call.kwargs["hidden_states"].sum()) == 0


def test_what_is_known_already_is_not_copied_again() -> None:
    text = torch.ones(3, 4)
    before = GuidanceCall.copied((), {"text": text})
    assert GuidanceCall.copied((), {"text": text}, [before]).kwargs["text"] is before.kwargs["text"]


def test_a_guess_takes_over_what_differed_between_the_branches() -> None:
    def call(latents: float, time: int, text: float, **more: Any) -> GuidanceCall:
        return GuidanceCall.copied(
            (torch.full((2,), latents),),
            {"time": torch.tensor([time]), "text": torch.full((2, 2), text), **more},
        )

    guess = call(5.0, 7, 1.0).as_guessed_from(call(3.0, 9, 1.0), call(3.0, 9, -1.0, scale=2.0))
    assert guess.equals(call(5.0, 7, -1.0, scale=2.0))
    assert not guess.equals(call(5.0, 7, -1.0))


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.5, NAN, "x", (1, [2]), {"a": (torch.ones(1),)}, torch.float32]
)
def test_every_kind_of_argument_equals_itself_and_nothing_else(value: Any) -> None:
    call = GuidanceCall.copied((value,), {})
    assert call.equals(GuidanceCall.copied((value,), {}))
    assert not call.equals(GuidanceCall.copied(("other",), {}))
    assert not call.equals(GuidanceCall.copied((value, value), {}))
