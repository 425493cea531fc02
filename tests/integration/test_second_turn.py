"""A chat's second turn through real processes: nodes and gateway go on from the first, and say what a cold one says."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.integration.conftest import MODEL, ServedModel

FACTS = " ".join(f"Item {n} costs {n * 7 % 91} coins and weighs {n * 13 % 57} stones." for n in range(20))


def ask(url: str, messages: list[ChatCompletionMessageParam]) -> ChatCompletion:
    client = OpenAI(base_url=url, api_key="any", max_retries=0, timeout=120)
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0.8, seed=11
    )


def cached(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def hits(url: str) -> float:
    """Answers so far that went on from what an earlier one left."""
    named = f'diffuse_prefix_hits_total{{model="{MODEL}"}} '
    lines = httpx.get(url.replace("/v1", "/metrics")).text.splitlines()
    return sum(float(line.removeprefix(named)) for line in lines if line.startswith(named))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_second_turn_is_cheap_and_says_the_same(served: ServedModel) -> None:
    warm = served.gateway.ready["url"]
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": FACTS}]
    before = hits(warm)
    first = ask(warm, turns)
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And what does item 3 weigh?"},
    ]
    second = ask(warm, turns)
    cold = served.processes.serve(MODEL, served.nodes).ready["url"]  # it knows of nothing
    third = ask(cold, turns)
    assert second.choices[0].message.content == third.choices[0].message.content
    assert first.usage is not None
    assert cached(second) >= first.usage.prompt_tokens // 16 * 16
    assert (cached(first), cached(third)) == (0, 0)
    assert hits(warm) == before + 1
