"""What a model cannot make is refused before anything runs, with the field and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.request import Started
from app.engine.request import RequestError
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend
from tests.support.opened_pictures import drawn, request_for

LONG = "word " * 200  # 1000 bytes, of which the tiny tokenizers make a token each

WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("pixart", {"width": 33}, "size", "width is 33; this model makes multiples of 8"),
    (
        "pixart",
        {"height": 36},
        "size",
        "multiples of 8",
    ),  # two tokens of 4 pixels more, which its pipeline refuses
    ("wan", {"height": 40}, "size", "multiples of 16"),
    ("pixart", {"width": 1 << 20}, "size", "up to 8192"),
    ("pixart", {"steps": 0}, "steps", "between 1 and 1000"),
    ("pixart", {"guidance_scale": math.nan}, "guidance_scale", "nan"),
    ("pixart", {"guidance_scale": math.inf}, "guidance_scale", "inf"),
    ("pixart", {"seed": -1}, "seed", "-1"),
    ("pixart", {"prompt": " "}, "prompt", "empty"),
    ("pixart", {"prompt": LONG}, "prompt", "1001 tokens, this model's text encoder reads 120"),
    ("pixart", {"negative_prompt": LONG}, "negative_prompt", "the negative prompt has 1001 tokens"),
    ("flux", {"prompt": LONG}, "prompt", "reads 77"),
    ("pixart", {"num_frames": 9}, "num_frames", "picture"),
    ("wan", {"num_frames": 10}, "num_frames", "in steps of 4 from 1 on"),
    ("wan", {"num_frames": None, "seconds": math.nan}, "seconds", "nan"),
    ("wan", {"seconds": 1.0}, "seconds", "not both"),
    ("stable-audio", {"seconds": 40.0}, "seconds", "up to 1.024"),
    ("stable-audio", {"width": 32}, "size", "sound"),
    ("stable-audio", {"temperature": 0.5}, "temperature", "draws no tokens"),
    ("pixart", {"patches": 0}, "patches", "at least 1"),
    ("pixart", {"patches": 2, "steps": 7}, "patches", "too few for patches"),
    ("pixart", {"patches": 2, "steps": 9, "warmup": 0}, "warmup", "at least 1"),
    ("pixart", {"scheduler": {"wings": 2}}, "scheduler.wings", "has no option wings"),
    ("pixart", {"scheduler": {"solver_order": "two"}}, "scheduler.solver_order", "takes no str"),
    (
        "pixart",
        {"scheduler": {"num_train_timesteps": 900_000_000}},
        "scheduler.num_train_timesteps",
        "100000",
    ),
    ("pixart", {"scheduler": {"algorithm_type": "magic"}}, "scheduler.algorithm_type", "refuses it"),
]


@pytest.mark.parametrize(("name", "changes", "param", "words"), WRONG)
def test_what_cannot_be_made_is_refused_by_its_field(
    opened: Open, name: str, changes: dict[str, Any], param: str, words: str
) -> None:
    pipeline = opened(name)
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    with pytest.raises(RequestError) as caught:
        engine.check(request_for(name, **changes))
    assert caught.value.param == param
    assert words in caught.value.message
    assert "word word" not in caught.value.message, "nothing of a prompt stands in an error"


async def test_a_text_that_one_of_two_encoders_cuts_is_made_and_told(opened: Open) -> None:
    pipeline = opened("sd3")
    pipeline.pipeline.tokenizer_3.model_max_length, before = (
        300,
        pipeline.pipeline.tokenizer_3.model_max_length,
    )
    try:
        from app.engine.diffusion.texts import TextLimits

        pipeline.texts = TextLimits(pipeline.pipeline)
        request = request_for("sd3", prompt="a" * 100, steps=1)
        events = await drawn(PipelineEngine(pipeline, LocalBackend(pipeline.source)), request)
    finally:
        pipeline.pipeline.tokenizer_3.model_max_length = before
        pipeline.texts = TextLimits(pipeline.pipeline)
    (started,) = [event for event in events if isinstance(event, Started)]
    assert started.notes == (
        "tokenizer reads 77 of the prompt's 101 tokens",
        "tokenizer_2 reads 77 of the prompt's 101 tokens",
    )


async def test_a_template_around_the_prompt_counts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipeline itself puts around a text is seen where its tokenizer cuts it."""
    pipeline = opened("pixart")
    kind: Any = type(pipeline.pipeline)
    really = kind._text_preprocessing
    monkeypatch.setattr(
        kind,
        "_text_preprocessing",
        lambda self, text, **options: really(self, LONG + "".join(text), **options),
    )
    backend = LocalBackend(pipeline.source)
    with pytest.raises(RequestError, match="reads 120"):
        await drawn(PipelineEngine(pipeline, backend), request_for("pixart"))
    assert backend.opened == []


async def test_what_the_pipeline_itself_breaks_at_is_the_requests_fault_not_ours(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock pipeline cannot make one step with this scheduler."""
    pipeline = opened("pixart")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    with pytest.raises(RequestError, match="raises IndexError after it; ask for 2 steps or more") as caught:
        await drawn(engine, request_for("pixart", steps=1))
    assert caught.value.param == "steps"
    monkeypatch.setattr("app.engine.diffusion.picture.call_arguments", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await drawn(engine, request_for("pixart"))


async def test_numbers_that_were_lost_here_are_never_sent_to_a_node(opened: Open) -> None:
    """A shift of 0 makes the noise levels 0 / 0."""
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source)
    with pytest.raises(RequestError, match="numbers that are none") as caught:
        await drawn(PipelineEngine(pipeline, backend), request_for("wan", scheduler={"shift": 0.0}))
    assert caught.value.param == "scheduler"
    assert backend.opened == []


def test_a_video_is_as_long_as_it_was_asked_for(opened: Open) -> None:
    from app.engine.diffusion.pipeline_call import num_frames

    defaults = opened("wan").defaults
    asked = request_for("wan", num_frames=None, seconds=1.0)
    assert (defaults.fps, num_frames(defaults, asked)) == (16.0, 17)
