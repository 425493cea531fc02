"""Requests drawn from the edges of every field: each is answered or refused, and a stream says what the whole does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import Serve
from tests.support.api_server import Served, chunks_of, events_of, text_of
from tests.support.local_engine import LocalEngine

NUMBERS = [0, -0.0, 1, 1e-300, 5e-324, 1e-5, 0.01, 0.7, 0.999999, 1.9999, 2, -2, 10, 100, None]
EDGES: dict[str, list[Any]] = {
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "top_k": [-1, 0, 1, 399, 400, 2**31 - 1, None],
    "logit_bias": [None, {}, {"0": -100, "399": 100}, {"7": 1e-300}],
    "n": [None, 1, 3],
    "max_completion_tokens": [None, 1, 4, 10**8],
    "stop": [None, "", "e", ["\n", "\U0001f600"], [" "] * 4, "x" * 1000],
    "ignore_eos": [None, True],
    "reasoning_effort": [None, "none", "max"],
    "chat_template_kwargs": [None, {"x": "<|im_end|>"}],
    "continue_final_message": [None, False],
    "tools": [None, []],
}
TEXTS = [
    "hi",
    "",
    "\x00",
    "<|im_end|>",
    "\u202e\ufeff",
    "\U0001f469\u200d\U0001f469",
    "{{ 7*7 }}",
    " \n\t",
    '"}\\',
]


def drawn(draw: random.Random) -> dict[str, Any]:
    """A request with some fields at an edge and a seed, so that it can be asked twice."""
    roles = ["system", "developer", *draw.choices(["user", "assistant"], k=2), "user"]
    messages = [{"role": role, "content": draw.choice(TEXTS)} for role in roles]
    fields = {name: draw.choice(EDGES[name]) for name in draw.sample(sorted(EDGES), 6)}
    return {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 6,
        "seed": draw.choice([0, -(2**63), 2**63 - 1]),
    } | {name: value for name, value in fields.items() if value is not None}


@pytest.fixture
def tiny(tokenizer: ChatTokenizer) -> LocalEngine:
    return LocalEngine(tokenizer)


@pytest.mark.parametrize("seed", range(6))
async def test_any_request_is_answered_or_refused(serve: Serve, tiny: LocalEngine, seed: int) -> None:
    draw = random.Random(seed)
    async with serve(tiny) as served:
        for _ in range(12):
            await _check(served, drawn(draw))
    assert tiny.num_open == 0


async def _check(served: Served, request: dict[str, Any]) -> None:
    whole = await served.ask(**request)
    stream = await served.ask(**request, stream=True)
    assert whole.status_code == stream.status_code, request
    if whole.status_code != 200:
        assert (whole.status_code, set(whole.json()["error"])) == (400, {"message", "type", "param", "code"})
        assert whole.json()["error"]["param"] in EDGES, request
        return
    events = events_of(stream.text)
    assert events[-1] == "[DONE]"
    for index, choice in enumerate(whole.json()["choices"]):
        assert text_of(events, index) == choice["message"]["content"], request
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks_of(events)]
    assert len([reason for reason in reasons if reason]) == len(whole.json()["choices"])
