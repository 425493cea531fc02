"""The delay pattern against transformers' own methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slicing.delay_pattern import apply_pattern, build_pattern, frames_of, places_of, undo_pattern
from tests.support.tiny_sound import VOCAB_SIZE, tiny_music

PAD = VOCAB_SIZE
LENGTHS = range(1, 15)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 4, 5])
def test_patterns_are_those_of_the_stock_model(depth: int, channels: int) -> None:
    num_streams = depth * channels
    stock: Any = tiny_music(channels=channels, num_codebooks=num_streams).decoder
    first = torch.full((num_streams, 1), PAD)
    for length in LENGTHS:
        begun, expected = stock.build_delay_pattern_mask(first, PAD, length)
        pattern = build_pattern(num_streams, length, pad_id=PAD, channels=channels)
        assert begun.shape[1] == 1  # one place is given
        np.testing.assert_array_equal(pattern, expected.numpy())
        drawn = np.random.default_rng(length).integers(0, VOCAB_SIZE, pattern.shape)
        drawn[:, 0] = PAD
        applied = stock.apply_delay_pattern_mask(torch.from_numpy(drawn), expected)
        np.testing.assert_array_equal(apply_pattern(drawn, pattern), applied.numpy())
        codes = applied[applied != PAD].reshape(num_streams, -1)
        np.testing.assert_array_equal(undo_pattern(drawn, pattern, PAD), codes.numpy())
        assert codes.shape[1] == frames_of(length, num_streams, channels)


@pytest.mark.parametrize("channels", [1, 2])
def test_frames_take_the_places_that_they_come_out_of(channels: int) -> None:
    for num_frames in range(4, 20):
        assert frames_of(places_of(num_frames, 4 * channels, channels), 4 * channels, channels) == num_frames


def test_a_song_that_is_cut_short_keeps_its_whole_frames() -> None:
    pattern = build_pattern(4, 12, pad_id=PAD)
    drawn = np.arange(48).reshape(4, 12) % VOCAB_SIZE
    whole = undo_pattern(drawn, pattern, PAD)
    part = undo_pattern(drawn[:, :8], pattern, PAD)
    np.testing.assert_array_equal(part, whole[:, : part.shape[1]])
    assert part.shape[1] == 4  # the last codebook begins three places later
