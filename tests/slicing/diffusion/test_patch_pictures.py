"""Real pictures with patches: how far they may move, and that mixed-up branches would show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench import diffusion_quality as quality
from bench.diffusion_quality import MODEL_VARIABLE, Fault, Pictures, Way, compare
from slicing.diffusion.packaged import PACKAGED_PIPELINES, packaged_pipeline
from tests.support.tiny_pipelines import quiet

NUM_CAPTIONS = 6  # the bench makes 24
GUIDANCE = 3.0


def model() -> Path | None:
    """The picture model that the environment names, else the packaged one."""
    named = os.environ.get(MODEL_VARIABLE)
    folder = Path(named).expanduser() if named else packaged_pipeline(PACKAGED_PIPELINES[0])
    return folder if folder is not None and (folder / "model_index.json").is_file() else None


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    """A trained picture model in two stages."""
    folder = model()
    if folder is None:
        pytest.skip(f"no trained picture model here: {MODEL_VARIABLE} can name one")
    with quiet():
        return Pictures(str(folder))


@pytest.fixture(autouse=True)
def few_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "NUM_CAPTIONS", NUM_CAPTIONS)


@pytest.fixture(scope="module")
def whole(pictures: Pictures) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(quality, "NUM_CAPTIONS", NUM_CAPTIONS)
        return pictures.make(Way("whole"), GUIDANCE)


@pytest.mark.long
@pytest.mark.real
def test_patches_move_a_picture_by_a_level_or_so(pictures: Pictures, whole: torch.Tensor) -> None:
    with quiet():
        found = compare(pictures.make(Way("patches", 4), GUIDANCE), whole)
    assert found["mean"] <= 1.5
    assert found["worst"] <= 3
    assert found["tone"] <= 0.5


@pytest.mark.long
@pytest.mark.real
def test_branches_that_share_their_buffers_change_the_picture(
    pictures: Pictures, whole: torch.Tensor
) -> None:
    """Several times more than the same patches without the fault: by 42 levels of 255 on one model, 7 on another."""
    honest = Way("patches", 4, warmup=1)
    fault = Way("fault", 4, warmup=1, fault=Fault.EACH_OTHERS)
    with quiet():
        moved = compare(pictures.make(honest, GUIDANCE), whole)
        mixed_up = compare(pictures.make(fault, GUIDANCE), whole)
    assert mixed_up["mean"] > 5 * moved["mean"]
