"""A music model without its decoder: what it reads of a checkpoint, and that it computes what the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MusicgenMelodyConfig,
    MusicgenMelodyForConditionalGeneration,
)

from slicing.checkpoint import open_folder
from slicing.music import MusicHome, load_home
from slicing.stacks import CannotCut
from tests.support.tiny_sound import (
    DEPTH,
    FRAME_RATE,
    FRAME_SAMPLES,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    RATE,
    TEXT_TOKENS,
    VOCAB_SIZE,
    save_music,
    tiny_music,
)

TEXT = "rain, softly"


@pytest.fixture(params=[1, 2], ids=["mono", "stereo"])
def whole(request: pytest.FixtureRequest) -> Any:
    return tiny_music(channels=request.param)


@pytest.fixture
def home(whole: Any, tmp_path: Path) -> MusicHome:
    return load_home(open_folder(save_music(whole, tmp_path)), dtype=torch.float32)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_blocks_are_given_what_stock_generate_gives_them(
    whole: Any,
    home: MusicHome,
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[torch.Tensor] = []
    forward = whole.decoder.forward

    def watch(*, encoder_hidden_states: torch.Tensor, **others: Any) -> Any:
        given.append(encoder_hidden_states)
        return forward(encoder_hidden_states=encoder_hidden_states, **others)

    monkeypatch.setattr(whole.decoder, "forward", watch)
    ids = torch.tensor([home.token_ids(TEXT)])
    told = {"attention_mask": torch.ones_like(ids), "guidance_scale": scale}
    whole.generate(input_ids=ids, do_sample=False, max_new_tokens=2, **told)
    branches = 2 if scale > 1 else 1
    states = home.encode(home.token_ids(TEXT), branches=branches)
    assert torch.equal(states.view(-1, branches, HIDDEN_SIZE).transpose(0, 1), given[0])


def test_the_codec_makes_the_same_samples(whole: Any, home: MusicHome) -> None:
    channels = home.form.channels
    codes = np.random.default_rng(0).integers(0, VOCAB_SIZE, (DEPTH * channels, 11))
    batch = torch.from_numpy(codes)[None, None]
    with torch.inference_mode():
        sides = [
            whole.audio_encoder.decode(batch[:, :, side::channels], audio_scales=[None]).audio_values
            for side in range(channels)
        ]
    samples = home.decode(codes)
    assert samples.shape == (channels, 11 * FRAME_SAMPLES)
    np.testing.assert_array_equal(samples, torch.cat(sides, dim=1)[0].numpy())


def test_neither_the_decoder_nor_the_sound_encoder_is_read(whole: Any, tmp_path: Path) -> None:
    checkpoint = open_folder(save_music(whole, tmp_path))
    load_home(checkpoint, dtype=torch.float32)
    parts = (whole.text_encoder, whole.audio_encoder.decoder, whole.enc_to_dec_proj)
    sizes = [parameter.nbytes for part in parts for parameter in part.parameters()]
    codebooks = DEPTH * VOCAB_SIZE * 8 * 4
    assert checkpoint.bytes_requested == sum(sizes) + codebooks


def test_the_sizes_of_songs_are_the_models_own(home: MusicHome) -> None:
    form = home.form
    assert (form.rate, form.frame_rate, form.pad_id, form.eos_ids) == (
        RATE,
        FRAME_RATE,
        VOCAB_SIZE,
        frozenset(),
    )
    assert (form.num_streams, form.max_text) == (DEPTH * form.channels, TEXT_TOKENS)
    assert form.default_frames == 24 - DEPTH  # of what generation_config.json says
    assert form.max_frames_in(1 << 20) == MAX_POSITIONS - DEPTH
    assert form.places_in(1504) == 1508


def test_no_song_is_longer_than_those_the_models_know(tmp_path: Path) -> None:
    model = tiny_music(max_position_embeddings=8192)
    home = load_home(open_folder(save_music(model, tmp_path)), dtype=torch.float32)
    assert home.form.max_frames_in(1 << 20) == 30 * FRAME_RATE


def test_a_model_that_puts_its_conditions_before_the_song_is_refused_by_name(tmp_path: Path) -> None:
    config: Any = tiny_music().config
    melody = MusicgenMelodyConfig(
        text_encoder=config.text_encoder.to_dict(),
        audio_encoder=config.audio_encoder.to_dict(),
        decoder={key: value for key, value in config.decoder.to_dict().items() if key != "model_type"},
    )
    folder = save_music(tiny_music(), tmp_path)
    MusicgenMelodyForConditionalGeneration(melody).save_pretrained(folder)
    with pytest.raises(CannotCut, match="musicgen_melody"):
        load_home(open_folder(folder), dtype=torch.float32)
