"""Real nodes over real encrypted links and a real, tiny model: bit for bit the whole model, whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from routing import wire
from routing.errors import ErrorCode
from routing.identity import Identity
from routing.types import AnswerKind, NodeAddress, StepFlag, Want
from slicing.runner import Parts, PlainRunner
from slicing.sampler import Sampler, SamplingParams
from tests.node.rig import Rig, add_real_node, loopback_rig, rows_of, until
from tests.node.test_thin_mode import drawn
from tests.support.tiny_models import small_llama

NUM_LAYERS = 4
HIDDEN_SIZE = 32
VOCAB_SIZE = 64
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.4, seed=3)
PROMPT = [5, 9, 2, 44, 17, 3, 9]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(1024, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    async with loopback_rig() as made:
        yield made


class Whole:
    """The same model uncut, called with the same chunks by the same runner."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
        self.cache = self.runner.new_cache()

    def states(self, position: int, rows: np.ndarray) -> np.ndarray:
        self.cache.truncate(min(position, self.cache.length))
        made = self.runner.run_layers(
            self.cache, torch.from_numpy(rows.copy()), position, start=0, end=NUM_LAYERS
        )
        return made.numpy()

    def logits(self, position: int, token_ids: list[int]) -> torch.Tensor:
        states = self.runner.run_opening(self.cache, torch.tensor(token_ids), position, end=NUM_LAYERS)
        return self.runner.run_closing(self.cache, states, position, start=NUM_LAYERS)[0]


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, HIDDEN_SIZE), dtype=np.float32)


async def test_hidden_states_over_two_nodes_equal_the_whole_model(rig: Rig, model: LlamaForCausalLM) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    await rig.gateway.endpoint.dial(b.address)
    script, whole = rig.script((a, 0, 2), (b, 2, 4)), Whole(model)
    await script.open()
    for number, (position, rows) in enumerate([(0, 7), (7, 64), (71, 1), (72, 1), (30, 3), (33, 1)], start=1):
        answer = await script.run(number, position, some_rows(rows, number), want=Want.ALL)
        assert StepFlag.SEALED not in answer.flags
        expected = whole.states(position, some_rows(rows, number))
        assert np.array_equal(rows_of(answer, HIDDEN_SIZE), expected)


async def test_answers_up_the_chain_are_sealed_and_equal(rig: Rig, model: LlamaForCausalLM) -> None:
    a, b = await add_real_node(rig, model, 0, 1), await add_real_node(rig, model, 1, 4)
    script, whole = rig.script((a, 0, 1), (b, 1, 4)), Whole(model)
    await script.open()
    answer = await script.run(1, 0, some_rows(5), want=Want.ALL)
    assert StepFlag.SEALED in answer.flags
    opened = wire.open_answer(script.answer_key, answer)
    assert np.array_equal(rows_of(opened, HIDDEN_SIZE), whole.states(0, some_rows(5)))


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
async def test_thin_mode_draws_what_the_whole_model_draws(
    rig: Rig, model: LlamaForCausalLM, cut: int
) -> None:
    spans = [(0, 4)] if cut == 0 else [(0, cut), (cut, 4)]
    hops = [(await add_real_node(rig, model, *span), *span) for span in spans]
    script = rig.script(
        *hops, opens=True, closes=True, sampling={"params": SEEDED.to_map(), "prompt_ids": []}
    )
    await rig.gateway.endpoint.dial(hops[-1][0].address)
    await script.open()
    whole, sampler = Whole(model), Sampler(SEEDED, VOCAB_SIZE)
    position, tokens = 0, PROMPT
    for number in range(1, 10):
        logits = whole.logits(position, tokens)
        expected = sampler.sample(logits, position + len(tokens))
        sampler.observe(expected)
        assert drawn(await script.run(number, position, tokens)) == [expected]
        position, tokens = position + len(tokens), [expected]


async def test_greedy_candidates_are_the_whole_models_best_logits(rig: Rig, model: LlamaForCausalLM) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    script = rig.script((a, 0, 2), (b, 2, 4), opens=True, closes=True)
    link = await rig.gateway.endpoint.dial(b.address)
    await script.open()
    answer = await script.run(1, 0, PROMPT)
    assert answer.kind is AnswerKind.CANDIDATES
    shortlist = np.frombuffer(answer.payload, [("id", "<u4"), ("logit", "<f4")])
    best = Whole(model).logits(0, PROMPT).sort(descending=True)
    assert shortlist["id"].tolist() == best.indices[:8].tolist()
    assert np.array_equal(shortlist["logit"], best.values[:8].numpy())
    before = link.counters.payload_bytes_received
    await script.run(2, len(PROMPT), [int(shortlist["id"][0])])
    assert link.counters.payload_bytes_received - before <= 130


async def test_failover_to_a_replica_goes_on_as_if_nothing_had_happened(
    rig: Rig, model: LlamaForCausalLM
) -> None:
    a, b, spare = [await add_real_node(rig, model, *span) for span in ((0, 2), (2, 4), (2, 4))]
    script = rig.script((a, 0, 2), (b, 2, 4))
    await script.open()
    chunks = [(0, some_rows(6)), (6, some_rows(1, 1)), (7, some_rows(1, 2)), (8, some_rows(1, 3))]
    whole = Whole(model)
    expected = [whole.states(position, rows)[-1:] for position, rows in chunks]
    for number, (position, rows) in enumerate(chunks[:3], start=1):
        await script.run(number, position, rows)
    await b.endpoint.close()
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.HOP_LOST, 1)
    script.hops, script.epoch = ((a, 0, 2), (spare, 2, 4)), 2
    await script.first.send(script.opening())
    for number, (position, rows) in enumerate(chunks[:3], start=1):
        await script.send(number, position, rows, want=Want.NONE)
    answer = await script.run(4, *chunks[3])
    opened = wire.open_answer(script.answer_key, answer)
    assert np.array_equal(rows_of(opened, HIDDEN_SIZE), expected[3])


async def test_repeats_and_cancels_over_real_links(rig: Rig, model: LlamaForCausalLM) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    script = rig.script((a, 0, 2), (b, 2, 4))
    await script.open()
    first = await script.run(1, 0, some_rows(3))
    for _ in range(3):
        assert bytes((await script.run(1, 0, some_rows(3))).payload) == bytes(first.payload)
    assert [node.stats.steps_run for node in (a, b)] == [1, 1]
    assert a.stats.kv_bytes > 0
    await script.send(2, 3, some_rows(100))
    await script.first.send(script.cancel())
    await until(lambda: all(node.stats.num_sessions == 0 and node.stats.kv_bytes == 0 for node in (a, b)))


async def test_a_large_prefill_is_cut_into_records_and_put_together_again(
    rig: Rig, model: LlamaForCausalLM
) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    script, whole = rig.script((a, 0, 2), (b, 2, 4)), Whole(model)
    script.changes = {"max_positions": 1024}
    await script.open()
    rows = some_rows(700)  # 89,600 B: two records
    answer = await script.run(1, 0, rows)
    opened = wire.open_answer(script.answer_key, answer)
    assert np.array_equal(rows_of(opened, HIDDEN_SIZE), whole.states(0, rows)[-1:])


@pytest.mark.parametrize("host", ["a" * 200, "a..b", "127.0.0.1"])
async def test_an_impossible_address_for_the_next_hop_harms_nobody(
    rig: Rig, model: LlamaForCausalLM, host: str
) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    healthy = rig.script((a, 0, 2), (b, 2, 4))
    await healthy.open()
    await healthy.run(1, 0, some_rows(1))
    b.address = NodeAddress(Identity.generate().node_id, host, 1)
    script = rig.script((a, 0, 2), (b, 2, 4))
    await script.open()
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.HOP_LOST, 1)
    await healthy.run(2, 1, some_rows(1))


async def test_a_token_costs_one_frame_out_and_one_frame_in(rig: Rig, model: LlamaForCausalLM) -> None:
    a, b = await add_real_node(rig, model, 0, 2), await add_real_node(rig, model, 2, 4)
    back = await rig.gateway.endpoint.dial(b.address)
    script = rig.script((a, 0, 2), (b, 2, 4))
    await script.open()
    await script.run(1, 0, some_rows(3))
    before = [
        link.counters.frames_sent["DATA"] + link.counters.frames_received["DATA"]
        for link in (script.first, back)
    ]
    bytes_before = script.first.counters.payload_bytes_sent
    for number in range(2, 12):
        await script.run(number, number + 1, some_rows(1, number))
    after = [
        link.counters.frames_sent["DATA"] + link.counters.frames_received["DATA"]
        for link in (script.first, back)
    ]
    assert [now - then for now, then in zip(after, before, strict=True)] == [10, 10]
    assert script.first.counters.payload_bytes_sent - bytes_before <= 10 * (HIDDEN_SIZE * 4 + 64)
