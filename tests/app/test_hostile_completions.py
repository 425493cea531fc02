"""Whatever is sent to the endpoints of prompts and tokens, it is answered, or refused by an envelope that names it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.completion_protocol import NOT_HERE, CompletionRequest, parse_completion
from app.api.completions import PATH
from app.api.errors import ApiError
from app.stream_shapes import CompletionChunk
from tests.app.conftest import patient
from tests.app.test_completions import PROMPT, complete, stream
from tests.app.test_hostile_bodies import HOSTILE
from tests.support.api_server import Served

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*CompletionRequest.model_fields, *NOT_HERE])
PATHS = [PATH, "/tokenize", "/detokenize", "/v1/chat/completions/input_tokens"]


@patient
@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_whatever_a_field_holds_it_is_accepted_or_refused(fields: dict[str, Any]) -> None:
    try:
        parse_completion({"model": "scripted", "prompt": PROMPT} | fields)
    except ApiError as refused:
        assert refused.status == 400
        assert refused.param


def test_refusals_never_quote_values() -> None:
    for fields in ({"prompt": ["secret", 5]}, {"suffix": "secret"}, {"echo": "secret"}):
        with pytest.raises(ApiError) as caught:
            parse_completion({"model": "scripted", "prompt": PROMPT} | fields)
        assert "secret" not in caught.value.message


def test_prompts_do_not_show_in_a_requests_repr() -> None:
    asked, _ = parse_completion({"model": "scripted", "prompt": "secret"})
    assert "secret" not in repr(asked)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in HOSTILE[:20]])
async def test_a_hostile_body_gets_a_short_clear_refusal(served: Served, path: str, body: bytes) -> None:
    response = await served.http.post(path, content=body)
    assert 400 <= response.status_code < 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 16, 2**31, 2**64, 1.5, -0.0, 1e308, "", "a", "é\U0001f98a", "<|im_end|>", [], {},
    [0], [1, 2, 399], [400], [[1], [2]], [["a"]], ["", "a"], ["a"] * 40, [None], {"a": 1}, [[]], [[[1]]], "\u0000",
    [{"role": "user", "content": "hello"}], {"include_usage": True}, {"7": 5}, {"type": "text"},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
async def test_random_bodies_are_answered_or_refused(served: Served, seed: int) -> None:
    chance = random.Random(seed)
    names = [
        *CompletionRequest.model_fields,
        "tokens",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "suffix",
    ]
    for _ in range(80):
        path = chance.choice(PATHS)
        body: dict[str, Any] = {"model": "scripted", "prompt": PROMPT, "tokens": [5], "max_tokens": 2}
        for name in chance.sample(names, chance.randint(0, 4)):
            body[name] = chance.choice(VALUES)
        response = await served.http.post(path, content=json.dumps(body).encode())
        assert response.status_code < 500, (path, response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text
    assert served.gateway.num_running == 0


async def test_very_many_prompts_or_ids_are_refused_quickly(served: Served) -> None:
    for prompt in (["a"] * 100_000, [5] * 100_000, [[5]] * 100_000, [[5] * 100_000]):
        assert (await complete(served, prompt=prompt)).status_code == 400


async def test_every_chunk_is_as_described(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in await stream(
        served, prompt=["a", "b"], echo=True, logprobs=2, stream_options=options, timings_per_token=True
    ):
        assert CompletionChunk.model_validate(chunk).model_dump(exclude_unset=True) == chunk
