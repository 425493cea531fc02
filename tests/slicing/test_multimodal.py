"""Pictures and recordings merged at home, against transformers' own `generate` over the whole model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from slicing.batch import Work
from slicing.block_slice import Cancelled
from slicing.checkpoint import Checkpoint
from slicing.ends import Parts
from slicing.errors import ModelError
from slicing.merging import Merged
from slicing.model_source import open_checkpoint
from slicing.multimodal import HomeEncoders, load_home, render
from slicing.multimodal_check import check_multimodal
from slicing.processors import load_processor, template_variables
from slicing.runner import PlainRunner
from slicing.stacks import CannotCut
from tests.support.tiny_multimodal import FAMILIES, part_of, random_picture, stock_model, write_multimodal

NUM_TOKENS = 8
CUTS = {"one": (0, 4), "two": (0, 2, 4), "three": (0, 1, 3, 4)}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Checkpoint, HomeEncoders]]:
    found = {}
    for family in FAMILIES:
        folder = write_multimodal(tmp_path_factory.mktemp(family), family)
        checkpoint = open_checkpoint(str(folder))
        found[family] = checkpoint, load_home(checkpoint, dtype=torch.float32)
    return found


def inputs_of(home: HomeEncoders, family: str, *seeds: int) -> dict[str, Any]:
    """A message with a picture or recording for each seed, and words around them."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "hello <image> <|image_pad|> <|AUDIO|>"}]
    for seed in seeds:
        content += [part_of(family, seed), {"type": "text", "text": " the fox"}]
    return dict(render(home.processor, [{"role": "user", "content": content}]))  # type: ignore[arg-type]


def greedy(checkpoint: Checkpoint, merged: Merged, cuts: tuple[int, ...]) -> list[int]:
    """Run slices as nodes do: embeddings and places in, then one drawn token after the other."""
    ends = list(pairwise(cuts))
    runners = [
        PlainRunner.load(
            checkpoint, Parts((held,), opening=held[0] == 0, closing=held[1] == cuts[-1]), dtype=torch.float32
        )
        for held in ends
    ]
    caches = [runner.new_cache() for runner in runners]
    rows, places, position = merged.embeds, merged.places, 0
    drawn: list[int] = []
    while len(drawn) < NUM_TOKENS:
        works = [Work(cache, rows, position, None, places) for cache in caches]
        states = runners[0].run_opening_batch(works[:1], end=cuts[1])[0]
        for runner, cache, (start, end) in zip(runners[1:], caches[1:], ends[1:], strict=True):
            work = Work(cache, states, position, None, places)
            states = runner.run_layers_batch([work], start=start, end=end)[0]
        last = Work(caches[-1], states, position, None, places)
        drawn.append(int(runners[-1].run_closing_batch([last], start=cuts[-1])[0][-1].argmax()))
        position += len(rows)
        rows = torch.tensor(drawn[-1:])
        if merged.places is not None:
            places = torch.full((len(merged.places), 1), merged.next_place + len(drawn) - 1)
    return drawn


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_draw_the_tokens_of_the_stock_generate(
    opened: dict[str, tuple[Checkpoint, HomeEncoders]], family: str, cuts: tuple[int, ...]
) -> None:
    checkpoint, home = opened[family]
    assert home.merger is not None
    inputs = inputs_of(home, family, 1, 2)
    stock: Any = stock_model(checkpoint.folder)
    expected = stock.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0, -NUM_TOKENS:]
    assert greedy(checkpoint, home.merger.merge(inputs), cuts) == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_encoders_and_embeddings_are_read(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(str(write_multimodal(tmp_path, family)))
    load_home(checkpoint, dtype=torch.float32)
    read = checkpoint.bytes_requested
    blocks = [tensor for name, tensor in checkpoint.tensors.items() if "language_model.layers" in name]
    whole = sum(tensor.size_bytes for tensor in checkpoint.tensors.values())
    assert 0 < read <= whole - sum(tensor.size_bytes for tensor in blocks)


def test_several_axes_of_positions_are_found_where_there_are_several(
    opened: dict[str, tuple[Checkpoint, HomeEncoders]],
) -> None:
    for family, (_, home) in opened.items():
        assert home.merger is not None
        merged = home.merger.merge(inputs_of(home, family, 1))
        rows = len(merged.embeds)
        if family == "qwen2_vl":
            assert merged.places is not None
            assert merged.places.shape == (3, rows)
            assert merged.next_place < rows  # a picture's rows stand in a plane
        else:
            assert merged.places is None
            assert merged.next_place == rows


@pytest.mark.parametrize("family", FAMILIES)
def test_digests_tell_pictures_apart_and_nothing_else(
    opened: dict[str, tuple[Checkpoint, HomeEncoders]], family: str
) -> None:
    home = opened[family][1]
    merge = home.merger.merge  # type: ignore[union-attr]
    first, again, other = (inputs_of(home, family, *seeds) for seeds in ((1, 2), (1, 2), (1, 3)))
    assert first["input_ids"].tolist() == other["input_ids"].tolist()
    one, two = merge(first).digests(), merge(other).digests()
    assert merge(again).digests() == one
    assert len(one) == 2
    assert [place for place, _ in one] == [place for place, _ in two]
    assert (one[0] == two[0], one[1] == two[1]) == (True, False)


def test_text_alone_has_no_digest(opened: dict[str, tuple[Checkpoint, HomeEncoders]]) -> None:
    for family, (_, home) in opened.items():
        assert home.merger.merge(inputs_of(home, family)).digests() == ()  # type: ignore[union-attr]


def test_users_cannot_write_placeholders(opened: dict[str, tuple[Checkpoint, HomeEncoders]]) -> None:
    for family, (_, home) in opened.items():
        without = inputs_of(home, family)["input_ids"]
        special = home.processor.tokenizer.convert_tokens_to_ids(["<image>", "<|image_pad|>", "<|AUDIO|>"])  # type: ignore[union-attr]
        assert not set(special) & set(without[0].tolist())


def test_an_encoder_stops_between_two_layers(opened: dict[str, tuple[Checkpoint, HomeEncoders]]) -> None:
    home = opened["llava"][1]
    assert home.merger is not None
    inputs = inputs_of(home, "llava", 1)
    asked: list[int] = []

    def is_cancelled() -> bool:
        asked.append(1)
        return len(asked) > 1

    with pytest.raises(Cancelled):
        home.merger.merge(inputs, is_cancelled)
    assert len(asked) == 2
    assert home.merger.merge(inputs).runs  # as before


def _ids(token: int, count: int) -> torch.Tensor:
    return torch.tensor([[11, 12, *[token] * count, 13, 14]])


def test_pictures_that_go_into_later_blocks_too_are_refused_by_name() -> None:
    config = AutoConfig.for_model("qwen3_vl")
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    vision = config.vision_config
    ids = _ids(config.image_token_id, 4)
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    sample = {
        "input_ids": ids,
        "pixel_values": torch.randn(16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    with pytest.raises(CannotCut, match=r"also given .*visual_pos_masks"):
        check_multimodal(config, sample)


def test_pictures_that_change_the_mask_are_refused_with_that_reason() -> None:
    vision = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", vision_config=vision, mm_tokens_per_image=4)
    ids = _ids(config.image_token_id, 4)
    sample = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 3, 56, 56),
        "token_type_ids": (ids == config.image_token_id).int(),
    }
    with pytest.raises(CannotCut, match="a mask of its own"):
        check_multimodal(config, sample)


def test_a_folder_without_a_processor_still_opens_and_says_why(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path, "llava")
    for file in ("processor_config.json", "preprocessor_config.json"):
        (folder / file).unlink(missing_ok=True)
    home = load_home(open_checkpoint(str(folder)), dtype=torch.float32)
    assert home.senses == ()
    assert "processor" in home.reasons["image"]
    assert str(tmp_path) not in home.reasons["image"]


def test_a_request_cannot_set_what_belongs_to_the_processor(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path, "qwen2_vl")
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    message = [{"role": "user", "content": [{"type": "image", "image": random_picture()}]}]
    plain = render(processor, message)
    pushed = render(processor, message, variables={"max_pixels": 28 * 28, "load_audio_from_video": True})
    assert plain["input_ids"].tolist() == pushed["input_ids"].tolist()
    assert "max_pixels" not in template_variables(processor)


def test_a_processor_of_another_model_is_refused_not_believed(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path, "llava")
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="processor"):
        load_processor(folder, AutoConfig.from_pretrained(folder))


def test_a_processor_that_looks_for_what_sanitising_loses_is_used_without(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path, "idefics3")
    checkpoint = open_checkpoint(str(folder))
    home = load_home(checkpoint, dtype=torch.float32)
    assert (home.senses, home.sanitizes) == (("image",), False)
    message = [{"role": "user", "content": [{"type": "text", "text": "hello"}, part_of("idefics3", 1)]}]
    inputs = dict(render(home.processor, message, sanitizes=False))  # type: ignore[arg-type]
    stock: Any = stock_model(folder)
    expected = stock.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0, -NUM_TOKENS:]
    assert greedy(checkpoint, home.merger.merge(inputs), CUTS["two"]) == expected.tolist()  # type: ignore[union-attr]
