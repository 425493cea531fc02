"""Where an answer's time went, node by node, over real node servers: the parts sum up to the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM

from app.engine.tokenizer import ChatTokenizer
from tests.integration.chats import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, chat
from tests.support.tiny_models import small_llama


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(48, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


async def test_every_hop_tells_its_part(model: LlamaForCausalLM, tokenizer: ChatTokenizer) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        _, finished = await here.text(max_tokens=8)
    timings = finished.timings
    assert [(use.hop.start, use.hop.end) for use in finished.hops] == [(1, 3), (3, 6)]
    assert [use.hop.node for use in finished.hops] == [hop.node for hop in finished.route]
    for part in ("compute_s", "queue_s", "crypto_s", "network_s"):
        parts = sum(getattr(use, part) for use in finished.hops)
        assert parts == pytest.approx(getattr(timings, part), abs=1e-4)
    assert all(use.steps >= 8 and use.compute_s > 0 for use in finished.hops)


async def test_a_node_that_was_lost_is_told_with_what_it_did(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0)) as here:
        here.lose_at(8, here.nodes[:2])
        _, finished = await here.text(max_tokens=8)
    assert finished.replays == 1
    assert len(finished.route) == 2
    assert len(finished.hops) == 3
    (lost,) = here.lost
    assert lost.hex()[:8] in {use.hop.node for use in finished.hops}
