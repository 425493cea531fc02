"""One song's tokens, and what may be asked of songs, without nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.diffusion.request import DiffusionRequest
from app.engine.request import RequestError
from app.engine.song import Song
from app.engine.song_plan import plan_song
from routing.errors import WorkError
from slicing.checkpoint import open_folder
from slicing.music import MusicHome, SongForm, load_home
from tests.support.tiny_sound import DEPTH, FRAME_RATE, MAX_POSITIONS, TEXT_TOKENS, save_music, tiny_music

PAD = 32
FORM = SongForm(
    num_streams=DEPTH,
    channels=1,
    vocab_size=32,
    pad_id=PAD,
    eos_ids=frozenset(),
    max_places=64,
    default_places=24,
    max_text=16,
    frame_rate=50.0,
    rate=4000,
)
ENDING = replace(FORM, eos_ids=frozenset({7}))


def fed(song: Song, draw: Any) -> list[tuple[int, ...]]:
    """What is fed at each place while place p's tokens are `draw(p)`."""
    steps = [song.first]
    while (ids := song.feed(song.num_drawn + 1, draw(song.num_drawn + 1))) is not None:
        steps.append(ids)
    return steps


def test_every_codebook_is_fed_one_place_behind_the_one_before() -> None:
    song = Song(FORM, 6)
    steps = fed(song, lambda place: [place] * DEPTH)
    assert steps[0] == (PAD,) * DEPTH
    assert steps[1] == (1, PAD, PAD, PAD)
    assert steps[3] == (3, 3, 3, PAD)
    assert steps[7] == (PAD, 7, 7, 7)
    assert len(steps) == song.num_places - 1 == 6 + DEPTH - 1


def test_codes_stand_side_by_side_again() -> None:
    song = Song(FORM, 6)
    fed(song, lambda place: [place] * DEPTH)
    np.testing.assert_array_equal(song.codes(), [[k + frame + 1 for frame in range(6)] for k in range(DEPTH)])


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_short_songs_are_as_long_as_asked(num_frames: int) -> None:
    song = Song(FORM, num_frames)
    fed(song, lambda place: [place] * DEPTH)
    assert song.codes().shape == (DEPTH, num_frames)


def test_a_stream_that_ended_is_padded_and_the_last_one_ends_the_song() -> None:
    song = Song(ENDING, 20)
    steps = fed(song, lambda place: [7 if place >= 6 + k else 1 for k in range(DEPTH)])
    assert steps[7] == (PAD, 7, 1, 1)
    assert song.num_drawn == 9
    np.testing.assert_array_equal(song.codes(), np.array([[1] * 5 + [7]] * DEPTH))


def test_a_song_that_ends_before_its_first_frame_is_a_failure() -> None:
    song = Song(ENDING, 20)
    fed(song, lambda _: [7] * DEPTH)
    with pytest.raises(WorkError, match="before its first frame"):
        song.codes()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> MusicHome:
    folder = save_music(tiny_music(), tmp_path_factory.mktemp("music"))
    return load_home(open_folder(folder), dtype=torch.float32)


def plan(home: MusicHome, max_places: int = 1 << 20, **fields: Any) -> Any:
    told = {"prompt": "rain"} | fields
    return plan_song(home, DiffusionRequest("r", "m", **told), max_places=max_places)


def test_what_is_left_open_is_the_models_own(home: MusicHome) -> None:
    planned = plan(home)
    assert planned.num_frames == 24 - DEPTH
    assert (planned.branches, planned.memory_rows) == (2, 2 * len("rain_"))
    sampling = planned.sampling
    assert (sampling.guidance_scale, sampling.temperature, sampling.top_k, sampling.top_p) == (
        3.0,
        1.0,
        50,
        1.0,
    )


def test_a_length_in_seconds_is_one_in_frames(home: MusicHome) -> None:
    assert plan(home, seconds=0.5).num_frames == FRAME_RATE // 2
    assert plan(home, seconds=(MAX_POSITIONS - DEPTH) / FRAME_RATE).num_frames == MAX_POSITIONS - DEPTH
    assert plan(home, max_places=10).num_frames == 10 - DEPTH


def test_without_guidance_there_is_one_branch(home: MusicHome) -> None:
    for scale in (0, 0.5, 1):
        planned = plan(home, guidance_scale=scale)
        assert (planned.branches, planned.sampling.guidance_scale) == (1, 1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": " "}, "prompt"),
        ({"prompt": "x" * TEXT_TOKENS}, "prompt"),
        ({"seconds": (MAX_POSITIONS - DEPTH + 1) / FRAME_RATE}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": 0.0}, "seconds"),
        ({"guidance_scale": 101.0}, "guidance_scale"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"steps": 5}, "steps"),
        ({"negative_prompt": "noise"}, "negative_prompt"),
        ({"patches": 2}, "patches"),
        ({"width": 8}, "size"),
        ({"scheduler": {"shift": 1}}, "scheduler"),
        ({"wire": "bf16"}, "wire"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(home: MusicHome, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(home, **fields)
    assert caught.value.param == param
    assert "xxxx" not in caught.value.message
