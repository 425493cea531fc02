"""Prompts with rows that no token stands for, over real node servers: what is fed, kept and found again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from app.engine.request import EncodedPrompt
from app.engine.tokenizer import ChatTokenizer
from routing import switchboard
from slicing.invariant import InvariantRunner
from slicing.runner import Parts, PlainRunner
from slicing.sampler import SamplingParams
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Chat, chat
from tests.support.tiny_models import small_llama
from tests.support.tiny_multimodal import stock_model, write_multimodal

SEEDED = SamplingParams(temperature=0.9, seed=4)
PICTURE_AT, PICTURE_ROWS = 40, 24
TEXT = tuple(3 + (7 * n) % 250 for n in range(90))
IDS = (*TEXT[:PICTURE_AT], *(5,) * PICTURE_ROWS, *TEXT[PICTURE_AT:])
CACHED: dict[str, Any] = {"runners": InvariantRunner, "chunk": 32, "secret": b"s" * 32}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(256, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of these tests say nothing of their speed: what they hold decides where a route goes."""
    monkeypatch.setattr(switchboard, "prefers_holders", lambda *_ms, num_held, **_others: num_held > 0)


def seen(model: LlamaForCausalLM, picture: int, ids: Sequence[int] = IDS) -> EncodedPrompt:
    """What a prompt becomes with this picture in it."""
    rows = torch.randn(PICTURE_ROWS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(picture))
    embeds = model.get_input_embeddings()(torch.tensor(ids)).detach().clone()
    embeds[PICTURE_AT : PICTURE_AT + PICTURE_ROWS] = rows
    return EncodedPrompt(embeds=embeds, digests=((PICTURE_AT, bytes([picture]) * 32),))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("local", [(0, 0), (1, 0), (2, 1)])
async def test_embeddings_of_the_same_tokens_say_the_same(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int], sampling: SamplingParams
) -> None:
    embeds = model.get_input_embeddings()(torch.tensor(IDS)).detach()
    async with chat(model, tokenizer, local, copies=1) as here:
        asked = {"prompt_ids": IDS, "sampling": sampling}
        plain, _ = await here.tokens(**asked)
        assert (await here.tokens(**asked, encoded=EncodedPrompt(embeds=embeds)))[0] == plain
        with_picture, _ = await here.tokens(**asked, encoded=seen(model, 1))
        assert with_picture != plain


async def tokens(here: Chat, encoded: EncodedPrompt, ids: Sequence[int] = IDS) -> tuple[list[int], int]:
    """The answer, and how much of the prompt was found."""
    made, finished = await here.tokens(prompt_ids=tuple(ids), encoded=encoded, max_tokens=9)
    return made, finished.cached_tokens


@pytest.mark.parametrize("local", [(0, 0), (2, 1)])
async def test_only_the_same_picture_finds_what_was_kept(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int]
) -> None:
    async with chat(model, tokenizer, local, copies=1, **CACHED | {"secret": b""}) as cold:
        expected = [(await tokens(cold, seen(model, picture)))[0] for picture in (1, 2)]
    async with chat(model, tokenizer, local, copies=1, **CACHED) as here:
        assert await tokens(here, seen(model, 1)) == (expected[0], 0)
        assert await tokens(here, seen(model, 1)) == (expected[0], (len(IDS) - 1) // 16 * 16)
        other, held = await tokens(here, seen(model, 2))
        assert (other, held) == (
            expected[1],
            0,
        )  # what is before the picture is less than is worth asking for
        await here.is_freed()
    assert expected[0] != expected[1]


async def test_a_node_lost_behind_a_kept_picture_changes_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    """What no node holds any more is made again from the embeddings, not from the ids in their place."""
    longer = (*IDS, *range(20, 50))
    encoded = seen(model, 1, longer)
    async with chat(model, tokenizer, (1, 0), **CACHED | {"secret": b""}) as cold:
        expected, _ = await tokens(cold, encoded, longer)
    async with chat(model, tokenizer, (1, 0), **CACHED) as here:
        await tokens(here, seen(model, 1))
        here.lose_at(3, here.nodes[:2])
        made, finished = await here.tokens(prompt_ids=longer, encoded=encoded, max_tokens=9)
        assert made == expected
        assert finished.cached_tokens > PICTURE_AT
        assert finished.replays == 1
        await here.is_freed()


# Places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [(0, 0), (1, 0), (1, 1)])
async def test_places_of_a_picture_reach_every_layer(
    tokenizer: ChatTokenizer, tmp_path: Path, local: tuple[int, int]
) -> None:
    stock = stock_model(write_multimodal(tmp_path, "qwen2_vl"))
    ids = torch.tensor([TEXT[:20]])
    planes = torch.arange(20).expand(3, 20).clone()
    planes[1, 5:9], planes[2, 5:9] = torch.tensor([5, 5, 6, 6]), torch.tensor([5, 6, 5, 6])
    planes[0, 5:9] = 5
    planes[:, 9:] -= 2
    embeds = stock.get_input_embeddings()(ids)[0].detach()
    encoded = EncodedPrompt(embeds=embeds, places=planes, next_place=18)
    async with chat(stock, tokenizer, local, copies=1) as here:
        made, _ = await here.tokens(prompt_ids=TEXT[:20], encoded=encoded, max_tokens=8)
        flat, _ = await here.tokens(prompt_ids=TEXT[:20], encoded=EncodedPrompt(embeds=embeds), max_tokens=8)
        await here.is_freed()
    assert made == uncut(stock, embeds, planes, 18, 8)
    assert flat == uncut(stock, embeds, torch.arange(20).expand(3, 20), 20, 8)


@torch.inference_mode()
def uncut(stock: Any, embeds: torch.Tensor, places: torch.Tensor, next_place: int, count: int) -> list[int]:
    """Greedy tokens of the stock model's own forward."""
    out = stock(inputs_embeds=embeds.unsqueeze(0), position_ids=places.unsqueeze(1), use_cache=True)
    made = [int(out.logits[0, -1].argmax())]
    for number in range(count - 1):
        position_ids = torch.full((3, 1, 1), next_place + number)
        cache = getattr(out, "cache", None) or out.past_key_values
        told = {"cache": cache} if hasattr(out, "cache") else {"past_key_values": cache}
        out = stock(input_ids=torch.tensor([made[-1:]]), position_ids=position_ids, use_cache=True, **told)
        made.append(int(out.logits[0, -1].argmax()))
    return made


# Probabilities -------------------------------------------------------------------------------------------------


async def test_probabilities_come_with_each_token(model: LlamaForCausalLM, tokenizer: ChatTokenizer) -> None:
    runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        deltas, _ = await here.deltas(sampling=SEEDED, wants_logprobs=True, watched_ids=(4, 9))
    ids = [7, 90, 31, 200, 5, 64, 12, 8, 44, 101, 3]
    with torch.inference_mode():
        first = runner.run_whole(runner.new_cache(), torch.tensor(ids), 0)[-1].log_softmax(-1)
        drawn = [token_id for delta in deltas for token_id in delta.token_ids]
        rows = runner.run_whole(
            runner.new_cache(), torch.tensor([*ids, *drawn]), 0, keep=range(len(ids) - 1, len(ids) + 7)
        )
    expected = rows.log_softmax(-1)[range(8), drawn]
    told = [value for delta in deltas for value in delta.logprobs]
    assert np.allclose(told, expected.numpy(), atol=1e-4)
    assert deltas[0].watched == pytest.approx([float(first[4]), float(first[9])], abs=1e-4)
    assert not any(delta.watched for delta in deltas[1:])
