"""The picture model inside the package: it opens with stock diffusers, is small, and draws what it is told."""

import warnings
from typing import Any

import pytest
import torch

from slicing.diffusion.packaged import PACKAGED_PIPELINES, packaged_pipeline

LARGEST_BYTES = 8_000_000
COLOURS = {"red": (215, 40, 40), "green": (40, 160, 60), "blue": (45, 80, 220), "yellow": (240, 215, 50)}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """The stock pipeline of the packaged folder, in float32."""
    from diffusers import DiffusionPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = DiffusionPipeline.from_pretrained(packaged_pipeline("tiny-pictures"))
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("name", PACKAGED_PIPELINES)
def test_a_packaged_pipeline_is_small_and_says_what_it_can_draw(name: str) -> None:
    folder = packaged_pipeline(name)
    assert folder is not None
    assert (folder / "model_index.json").is_file()
    assert "Apache-2.0" in (folder / "README.md").read_text()
    assert sum(file.stat().st_size for file in folder.rglob("*")) <= LARGEST_BYTES


def test_an_unknown_name_is_no_packaged_pipeline() -> None:
    assert packaged_pipeline("../diffusion") is None


@pytest.mark.parametrize(("ink", "ground"), [("red", "blue"), ("blue", "red"), ("yellow", "green")])
def test_object_and_background_have_the_captions_colours(pipeline: Any, ink: str, ground: str) -> None:
    for seed in range(2):
        picture = draw(pipeline, f"a large {ink} square in the middle on a {ground} background", seed)
        top, middle = (
            picture[:, :4].median(dim=2).values.median(dim=1).values,
            picture[:, 28:36, 28:36].mean((1, 2)),
        )
        assert nearest(top) == ground
        assert nearest(middle) == ink


def test_another_wording_draws_the_same_roles(pipeline: Any) -> None:
    picture = draw(pipeline, "The background is green; a big yellow box, centre", seed=0)
    assert nearest(picture[:, :4].mean((1, 2))) == "green"
    assert nearest(picture[:, 28:36, 28:36].mean((1, 2))) == "yellow"


def draw(pipeline: Any, caption: str, seed: int) -> torch.Tensor:
    """A picture [3, 64, 64], 0 to 255."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = pipeline(
            caption,
            num_inference_steps=12,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(seed),
            use_resolution_binning=False,
            clean_caption=False,
            output_type="np",
        )
    return torch.from_numpy(made.images[0]).permute(2, 0, 1) * 255


def nearest(colour: torch.Tensor) -> str:
    return min(COLOURS, key=lambda name: float((torch.tensor(COLOURS[name]) - colour).norm()))
