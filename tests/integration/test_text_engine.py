"""The production text engine over real node servers and a tiny real model, in one process: text and failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from app.engine import coverage
from app.engine.request import RequestError
from app.engine.tokenizer import ChatTokenizer
from routing import chain
from routing.errors import ErrorCode, NoRouteError, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Message
from slicing.errors import LogitsError
from slicing.sampler import SamplingParams
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, SEEDED, VOCAB_SIZE, chat, request
from tests.node.rig import until
from tests.support.tiny_models import small_llama

MAX_POSITIONS = 48


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(
        MAX_POSITIONS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS
    ) as llama:
        yield llama


PLACES = [(0, 0), (1, 0), (3, 1), (0, 2), None]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("local", PLACES)
@pytest.mark.parametrize("after", [2, 5, 9, 14])
async def test_a_node_lost_at_any_step_changes_nothing(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
    after: int,
) -> None:
    async with chat(model, tokenizer, local) as unbroken:
        expected, finished = await unbroken.text(sampling=sampling, max_tokens=12)
        assert finished.replays == 0
    async with chat(model, tokenizer, local) as broken:
        broken.lose_at(after // 2, broken.nodes[2 * (after % 2) :][:2])
        text, finished = await broken.text(sampling=sampling, max_tokens=12)
        assert text == expected
        assert finished.replays >= 1
        timings = finished.timings
        assert min(timings.network_s, timings.compute_s, timings.local_s, timings.queue_s) >= 0
        assert timings.local_s + timings.network_s <= timings.total_s
        await broken.is_freed()


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_prompts_of_every_length_end_where_they_must(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None
) -> None:
    async with chat(model, tokenizer, local, copies=1) as here:
        _, finished = await here.text(prompt_ids=(9,), max_tokens=1)
        assert (finished.reason, finished.completion_tokens) == ("length", 1)
        full = tuple(range(3, 3 + MAX_POSITIONS))
        for length, tokens in ((MAX_POSITIONS, 1), (MAX_POSITIONS - 1, 1), (MAX_POSITIONS - 4, 4)):
            _, finished = await here.text(prompt_ids=full[:length], max_tokens=30)
            assert (finished.reason, finished.completion_tokens) == ("length", tokens)
        _, finished = await here.text(prompt_ids=(9,), stop_token_ids=frozenset(range(VOCAB_SIZE)))
        assert (finished.reason, finished.completion_tokens) == ("stop", 1)
        await here.is_freed()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_ids": ()}, "messages"),
        ({"prompt_ids": (3,) * (MAX_POSITIONS + 1)}, "messages"),
        ({"prompt_ids": (VOCAB_SIZE,)}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        with pytest.raises(RequestError) as caught:
            await here.text(**fields)
        assert caught.value.param == param
        await here.is_freed()


def poisoned(answer: Answer) -> Answer:
    """Not a number everywhere; an id outside the vocabulary in a drawn one."""
    if answer.kind is AnswerKind.TOKEN_IDS:
        return replace(answer, payload=(VOCAB_SIZE).to_bytes(4, "little"))
    if answer.kind is AnswerKind.CANDIDATES:
        pairs = np.frombuffer(answer.payload, np.dtype([("id", "<u4"), ("logit", "<f4")])).copy()
        pairs["logit"] = np.nan
        return replace(answer, payload=pairs.tobytes())
    return replace(answer, payload=np.full(len(answer.payload) // 4, np.nan, "<f4").tobytes())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("local", [(1, 0), (1, 1), None])
async def test_poison_from_a_node_fails_that_answer_only(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
) -> None:
    async with chat(model, tokenizer, local, copies=1) as here:
        expected, _ = await here.text(sampling=sampling)
        victims: set[bytes] = set()

        def poison(link: Any, message: Message) -> bool:
            if not isinstance(message, Answer) or not message.rows:
                return False
            if not victims:
                victims.add(message.session_id)
            if message.session_id in victims:
                here.here.switchboard.on_message(link.other_side, poisoned(message))
                return True
            return False

        here.here.rig.network.drop = poison
        bad = asyncio.create_task(here.text(sampling=sampling))
        await until(lambda: bool(victims))
        assert (await here.text(sampling=sampling))[0] == expected
        with pytest.raises((WorkError, ProtocolError, LogitsError)) as caught:
            await bad
        if isinstance(caught.value, WorkError | ProtocolError):
            assert caught.value.code in (ErrorCode.COMPUTE, ErrorCode.MALFORMED)
        await here.is_freed()


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_a_caller_that_leaves_at_any_moment_leaves_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None
) -> None:
    async with chat(model, tokenizer, local, copies=1) as here:
        for tenth_ms in range(0, 200, 7):
            task = asyncio.create_task(here.text(max_tokens=30))
            await asyncio.sleep(tenth_ms / 10_000)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert here.here.switchboard.num_chains == 0
        await here.is_freed()
        before = len(asyncio.all_tasks())
        await here.text()
        assert len(asyncio.all_tasks()) <= before


@pytest.mark.parametrize("after", [0, 1, 3, 6])
async def test_an_answer_that_another_task_closes_leaves_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, after: int
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        events = here.engine.generate(request(max_tokens=30))
        for _ in range(after):
            await anext(events)
        await asyncio.create_task(events.aclose())  # type: ignore[arg-type]
        await here.is_freed()


async def test_a_deadline_holds_from_the_first_dial_on(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        here.here.rig.network.delay_s = 0.2
        with pytest.raises(WorkError) as caught:
            await here.text(deadline_s=0.1)
        assert caught.value.code is ErrorCode.DEADLINE
        here.here.rig.network.delay_s = 0.0
        await here.is_freed()


async def test_coverage_follows_the_nodes(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (coverage, chain):
        monkeypatch.setattr(module, "RETURN_GRACE_S", 0.3)
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        assert here.engine.coverage().is_ready
        here.here.rig.network.cut_off(here.nodes[1].node_id)
        await until(lambda: not here.engine.coverage().is_ready)
        assert here.engine.coverage().missing == ((3, 6),)
        with pytest.raises(NoRouteError, match="3:6"):
            await here.text()
