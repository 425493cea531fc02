"""The encoder of an encoder-decoder model, alone: the stock one's bits, its own weights and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BertConfig, EncoderDecoderConfig

from slicing import encoder
from slicing.encoder import find_encoder, load_home
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.progress import no_progress
from slicing.stacks import CannotCut
from tests.support.tiny_encoder_decoders import HIDDEN_SIZE, TinyPair, tiny_pair
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module", params=["t5", "bart", "whisper"])
def pair(request: pytest.FixtureRequest) -> TinyPair:
    return tiny_pair(request.param)


def test_it_makes_what_the_whole_model_makes(pair: TinyPair, tmp_path: Path) -> None:
    pair.model.save_pretrained(tmp_path)
    made = load_home(open_checkpoint(str(tmp_path)), dtype=torch.float32).run(**pair.inputs)
    assert torch.equal(made, pair.memory())
    assert made.shape[1] == HIDDEN_SIZE


def test_nothing_of_the_decoder_is_read(pair: TinyPair, tmp_path: Path) -> None:
    pair.model.save_pretrained(tmp_path)
    told: list[int] = []
    progress = lambda _phase, done, _total: told.append(done)  # noqa: E731
    loaded = load_home(open_checkpoint(str(tmp_path)), dtype=torch.float32, progress=progress)
    own = sum({id(one): one.nbytes for one in pair.model.get_encoder().parameters()}.values())
    assert loaded.size_bytes == max(told) == own
    assert not any(parameter.is_meta for parameter in loaded.module.parameters())


def test_a_model_without_an_encoder_is_refused() -> None:
    with pytest.raises(CannotCut, match="has no encoder of its own"):
        find_encoder(tiny_model("llama"))


def test_a_model_that_changes_what_its_encoder_makes_is_refused(tmp_path: Path) -> None:
    """Its decoder is wider than its encoder: between them is a projection, which belongs to neither."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 40,
    }
    narrow, wide = BertConfig(hidden_size=16, **sizes), BertConfig(hidden_size=32, **sizes)
    wide.is_decoder = wide.add_cross_attention = True
    config = EncoderDecoderConfig.from_encoder_decoder_configs(narrow, wide)
    config.save_pretrained(tmp_path)
    with pytest.raises(CannotCut, match="changes what its encoder makes"):
        encoder._check_handed_on(AutoConfig.from_pretrained(tmp_path))


def test_states_that_are_not_finite_are_told(tmp_path: Path) -> None:
    pair = tiny_pair("t5")
    with torch.no_grad():
        next(pair.model.get_input_embeddings().parameters())[5] = torch.inf
    pair.model.save_pretrained(tmp_path)
    loaded = load_home(open_checkpoint(str(tmp_path)), dtype=torch.float32, progress=no_progress)
    with pytest.raises(ModelError, match="not finite"):
        loaded.run(input_ids=torch.tensor([[3, 5]]))
