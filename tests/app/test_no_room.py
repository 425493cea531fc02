"""What a caller is told where nodes can never hold so much."""

from __future__ import annotations

import torch

from app.engine.no_room import no_room
from app.engine.request import EncodedPrompt, GenerationRequest
from slicing.sampler import SamplingParams


def request(encoded: EncodedPrompt | None = None) -> GenerationRequest:
    return GenerationRequest("r", "m", (1, 2, 3), SamplingParams(), max_tokens=90, encoded=encoded)


def test_a_prompt_and_its_answer_are_counted_together() -> None:
    told = no_room(64, request(), 93)
    assert told.param == "messages"
    assert "maximum context length is 64 tokens" in told.message
    assert "the messages have 3 tokens and 93 are needed" in told.message


def test_what_an_encoder_made_of_a_prompt_lies_beside_the_answer() -> None:
    told = no_room(64, request(EncodedPrompt(memory=torch.zeros(700, 8))), 91)
    assert told.param == "max_tokens"
    assert "64 tokens of an answer" in told.message
    assert "beside the 700 rows" in told.message
    assert "the messages have 3 tokens" not in told.message
