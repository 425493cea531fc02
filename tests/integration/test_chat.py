"""Chat through real processes with the official client: the answers are the whole model's."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.integration.conftest import MODEL, ServedModel, WholeModel
from tests.support.nursery import Nursery
from tests.support.processes import Processes, client_of

pytestmark = [pytest.mark.real, pytest.mark.processes]
QUESTION = "Name three rivers of Europe."
USER = [{"role": "user", "content": QUESTION}]


def test_a_greedy_answer_is_the_one_of_stock_generate(served: ServedModel, whole: WholeModel) -> None:
    answer = client_of(served.gateway).chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content == whole.greedy(QUESTION, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_a_stream_carries_the_same_text_and_ends_as_clients_expect(
    served: ServedModel, whole: WholeModel
) -> None:
    stream = client_of(served.gateway).chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.greedy(QUESTION, 24)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_a_long_prompt_goes_through_in_chunks(served: ServedModel, whole: WholeModel) -> None:
    text = "The river flows past the mill. " * 90  # more than one chunk of 512 rows
    answer = client_of(served.gateway).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=6
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 512
    assert answer.choices[0].message.content == whole.greedy(text, 6)


def test_ten_questions_at_once_all_get_the_answer_of_one_alone(
    served: ServedModel, whole: WholeModel
) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=served.gateway.ready["url"], api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=8)  # type: ignore[call-overload]
                    for _ in range(10)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    assert set(asyncio.run(ask_all())) == {whole.greedy(QUESTION, 8)}


def test_thin_and_local_ends_draw_the_same_tokens(
    served: ServedModel, whole: WholeModel, nursery: Nursery
) -> None:
    ask = {"model": MODEL, "messages": USER, "temperature": 1.0, "top_p": 0.95, "seed": 5, "max_tokens": 12}
    at_home = client_of(served.gateway).chat.completions.create(**ask)
    greedy = {**ask, "temperature": 0}
    with Processes(nursery) as processes:
        nodes = processes.hosts(MODEL, "0:12", "12:30", flags=("--dtype", "float32", "--hold-ends"))
        gateway = processes.serve(MODEL, nodes, "--ends", "remote")
        thin = client_of(gateway).chat.completions.create(**ask)
        thin_greedy = client_of(gateway).chat.completions.create(**greedy)
    assert thin.choices[0].message.content == at_home.choices[0].message.content
    assert thin_greedy.choices[0].message.content == whole.greedy(QUESTION, 12)


def test_an_unknown_model_and_a_prompt_that_is_too_long_are_refused_by_name(served: ServedModel) -> None:
    client = client_of(served.gateway)
    with pytest.raises(NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(BadRequestError, match="maximum context length is 8192"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])


def test_an_answer_says_where_its_time_went(served: ServedModel) -> None:
    url = served.gateway.ready["url"] + "/chat/completions"
    body = {"model": MODEL, "messages": USER, "max_tokens": 4}
    answer = httpx.post(url, json=body, timeout=60)
    timings = answer.json()["timings"]
    assert timings["tokens"] == 4
    assert timings["compute_s"] > 0
    assert "server-timing" in answer.headers


def test_two_clients_do_not_wait_for_each_others_whole_answers(served: ServedModel) -> None:
    client = client_of(served.gateway)
    order: list[str] = []

    def long_one() -> None:
        for _ in client.chat.completions.create(model=MODEL, messages=USER, max_tokens=64, stream=True):
            order.append("long")

    thread = threading.Thread(target=long_one)
    thread.start()
    while not order:
        pass
    client.chat.completions.create(model=MODEL, messages=USER, max_tokens=2)
    order.append("short")
    thread.join()
    assert order[-1] == "long", "the short answer was done before the long one"
