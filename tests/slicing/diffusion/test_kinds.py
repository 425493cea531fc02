"""What a pipeline makes is read off its own parts."""

from __future__ import annotations

from typing import Any

import pytest

from slicing.diffusion.kinds import Kind, kind_of
from slicing.diffusion.source import open_pipeline
from slicing.errors import ModelError
from tests.support.tiny_pipelines import TinyPipelines


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pixart", Kind.PICTURE),
        ("sd3", Kind.PICTURE),
        ("flux", Kind.PICTURE),
        ("wan", Kind.VIDEO),
        ("wan-two", Kind.VIDEO),
        ("cogvideox", Kind.VIDEO),
        ("stable-audio", Kind.AUDIO),
    ],
)
def test_the_kind_of_each_tiny_pipeline(name: str, kind: Kind, tiny_pipelines: TinyPipelines) -> None:
    assert open_pipeline(str(tiny_pipelines.folder(name))).kind is kind


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda self, prompt, image: None, "needs 'image'"),
        (lambda self, class_labels: None, "takes no prompt"),
    ],
)
def test_a_pipeline_that_needs_more_than_a_prompt_is_refused(call: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        kind_of(type("Needy", (), {"__call__": call}), {})


def test_a_pipeline_with_optional_extras_is_asked_with_a_prompt() -> None:
    asked = type("Rich", (), {"__call__": lambda self, prompt, *rest, image=None, **more: None})
    assert kind_of(asked, {}) is Kind.PICTURE
