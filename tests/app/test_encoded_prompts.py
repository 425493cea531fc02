"""Prompts that encoders at home made something of: what the ends feed, what travels with it, and how it is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.coverage import ModelFacts
from app.engine.drafts import Drafter, TripCosts
from app.engine.ends import Due, LocalEnds
from app.engine.ends_queue import EndsQueue
from app.engine.places import Places
from app.engine.prefix import PrefixCache
from app.engine.request import EncodedPrompt, GenerationRequest, RequestError
from app.engine.text import ChainTextEngine
from app.engine.tokenizer import ChatTokenizer
from routing.switchboard import Switchboard
from routing.types import SliceSpec
from slicing.kept_caches import BLOCK
from slicing.sampler import SamplingParams
from tests.app.test_ends_queue import FLOAT, answer, queue_of, rows
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, FakeRunner

PICTURE = (5, 5, 5, 5)  # the token that a picture's rows stand in place of
PROMPT = (3, 1, *PICTURE, 4)
PLACES = torch.tensor(
    [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
)  # a picture of 2 x 2 takes two places


def ends_of(queue: EndsQueue, encoded: EncodedPrompt | None = None, **options: Any) -> LocalEnds:
    drafter = Drafter("off", TripCosts(), PROMPT, 200)
    params = SamplingParams(temperature=0.0)
    return LocalEnds(queue, params, PROMPT, drafter, encoded=encoded, **options)


def floats(payload: Any, count: int) -> np.ndarray:
    return np.frombuffer(payload, "<f4", count * HIDDEN_SIZE).reshape(count, HIDDEN_SIZE)


def test_tokens_behind_a_picture_go_on_from_its_next_place() -> None:
    places = Places(PLACES, 5)
    assert places.of(5, 4).tolist() == [[2, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert places.of(9, 1).tolist() == [[7]] * 3
    assert places.of(0, 7).tolist() == PLACES.tolist()
    assert places.tail(6, 2) == np.array([4, 5] * 3, "<i4").tobytes()


@pytest.mark.parametrize("first", [0, 1])
async def test_embeddings_are_fed_in_place_of_ids(first: int) -> None:
    runner = FakeRunner(max_works=8)
    embeds = torch.from_numpy(rows(len(PROMPT)))
    whole = runner.run_opening(runner.new_cache(), embeds, 0, end=first)
    async with queue_of(runner, SliceSpec(first, NUM_LAYERS)) as queue:
        ends = ends_of(queue, EncodedPrompt(embeds=embeds))
        made = [await ends.open_rows(PROMPT[:3], 0, FLOAT), await ends.open_rows(PROMPT[3:], 3, FLOAT)]
    assert np.array_equal(floats(b"".join(made), len(PROMPT)), whole.numpy())


async def test_places_go_behind_the_rows_and_to_the_layers_at_home() -> None:
    runner = FakeRunner(max_works=8)
    encoded = EncodedPrompt(embeds=torch.from_numpy(rows(len(PROMPT))), places=PLACES, next_place=5)
    alone = runner.new_cache()
    whole = runner.run_opening(alone, encoded.embeds, 0, end=1, places=PLACES)  # type: ignore[arg-type]
    async with queue_of(runner, SliceSpec(1, NUM_LAYERS)) as queue:
        ends = ends_of(queue, encoded)
        payload = await ends.open_rows(PROMPT, 0, FLOAT)
        drawn = await ends.draw(answer(rows(1), 6), Due(7), FLOAT, FLOAT)
    size = len(PROMPT) * HIDDEN_SIZE * 4
    assert np.array_equal(floats(payload, len(PROMPT)), whole.numpy())
    assert bytes(payload)[size:] == PLACES.numpy().astype("<i4").tobytes()
    after = runner.run_opening(alone, torch.tensor(drawn.token_ids), 7, end=1, places=torch.full((3, 1), 5))
    assert np.array_equal(floats(drawn.payload, 1), after.numpy())
    assert bytes(drawn.payload)[HIDDEN_SIZE * 4 :] == np.full(3, 5, "<i4").tobytes()


async def test_memory_reaches_every_layer_at_home_once() -> None:
    runner = FakeRunner(max_works=8)
    states = torch.from_numpy(rows(6))
    async with queue_of(runner) as queue:  # the first and the last layer
        await ends_of(queue).add_memory(states)
        assert [cache.memory_rows for cache in runner.caches] == [6, 6]
    async with queue_of(runner, SliceSpec(0, NUM_LAYERS)) as queue:
        await ends_of(queue).add_memory(states)
        assert [cache.memory_rows for cache in runner.caches[2:]] == [0, 0]


async def test_probabilities_are_those_of_the_whole_distribution() -> None:
    runner = FakeRunner(max_works=8)
    async with queue_of(runner) as queue:
        ends = ends_of(queue, wants_logprobs=True, watched_ids=(2, 7))
        await ends.open_rows((3,), 0, FLOAT)
        values = rows(1)
        drawn = await ends.draw(answer(values, 0), Due(1), FLOAT, FLOAT)
        again = await ends.draw(answer(rows(1, 1), 1), Due(2), FLOAT, FLOAT)
    logits = runner.run_closing(runner.new_cache(), torch.from_numpy(values.copy()), 0, start=5)[0]
    expected = logits.double().log_softmax(-1)
    assert drawn.logprobs == pytest.approx([float(expected[drawn.token_ids[0]])])
    assert drawn.watched == pytest.approx([float(expected[2]), float(expected[7])])
    assert len(again.logprobs) == 1
    assert math.exp(again.logprobs[0]) <= 1
    assert again.watched == ()


# Names ---------------------------------------------------------------------------------------------------------

LONG = tuple(range(40)) + PICTURE * 20
CONTEXT = b"c" * 32


def links(digests: Sequence[tuple[int, bytes]]) -> list[bytes]:
    cache = PrefixCache(b"s" * 32, b"d" * 32, has_ends=True)
    return cache.begin(LONG, b"", lambda: None, digests=digests)._links  # type: ignore[arg-type,return-value]


def test_equal_text_with_another_picture_shares_only_what_is_before_it() -> None:
    one, other, none = links([(40, b"a" * 32)]), links([(40, b"b" * 32)]), links([])
    blocks = 40 // BLOCK
    assert one[:blocks] == other[:blocks] == none[:blocks]
    assert not set(one[blocks:]) & set(other[blocks:])
    assert not set(one[blocks:]) & set(none[blocks:])
    assert one == links([(40, b"a" * 32)])


async def test_an_answer_is_kept_under_the_names_of_its_pictures() -> None:
    cache = PrefixCache(b"s" * 32, b"d" * 32, has_ends=False)
    begun = cache.begin(LONG, b"", lambda: None, digests=[(40, b"a" * 32)])  # type: ignore[arg-type,return-value]
    again = cache.begin(LONG, b"", lambda: None, digests=[(40, b"b" * 32)])  # type: ignore[arg-type,return-value]
    assert begun.names(CONTEXT, len(LONG))[:2] == again.names(CONTEXT, len(LONG))[:2]
    assert begun.names(CONTEXT, len(LONG))[-1] != again.names(CONTEXT, len(LONG))[-1]


# Refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoded": EncodedPrompt(embeds=torch.zeros(2, HIDDEN_SIZE))}, "messages"),
        ({"encoded": EncodedPrompt(places=torch.zeros(3, 2), next_place=2)}, "messages"),
        ({"wants_logprobs": True}, "logprobs"),
        ({"watched_ids": (1,)}, "logprobs"),
    ],
)
async def test_the_thin_mode_refuses_what_needs_ends_at_home(
    tokenizer: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    facts = ModelFacts("tiny", b"d" * 32, NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE, 64)
    engine = ChainTextEngine(facts, tokenizer, Switchboard(), None, SliceSpec(0, NUM_LAYERS))
    request = GenerationRequest("r", "tiny", (1, 2), SamplingParams(temperature=0.0), 4, **fields)
    with pytest.raises(RequestError) as refused:
        await anext(engine.generate(request))
    assert (refused.value.code, refused.value.param) == ("unsupported_by_route", param)


def test_nothing_of_an_encoded_prompt_is_shown() -> None:
    encoded = EncodedPrompt(
        torch.full((2, 2), 0.125), torch.full((2, 2), 0.25), digests=((0, b"secret" * 5),)
    )
    shown = repr(GenerationRequest("r", "tiny", (1,), SamplingParams(), 1, encoded=encoded))
    assert not any(told in shown for told in ("0.125", "0.25", "secret"))
