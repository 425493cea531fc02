"""Whisper's rule of what may be drawn: equal to transformers' processors, and nothing a peer sends breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from slicing.logits_rule import WhisperRule
from slicing.sampler import Sampler, SamplingParams

VOCAB = 120
END, NO_TIMESTAMPS, FIRST = 60, 79, 80  # text below 60, special tokens up to 79, then timestamps
RULE = WhisperRule(
    END, suppressed=(3, 7, 61, 62), suppressed_first=(5, END), first_timestamp=FIRST, first_limit=10
)
PROMPT = [65, 66]


def by_transformers(rule: WhisperRule, logits: torch.Tensor, drawn: Sequence[int]) -> torch.Tensor:
    """The stock processors, in the order in which the stock `generate` has them."""
    config = GenerationConfig(
        no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=END, max_initial_timestamp_index=rule.first_limit
    )
    processors = LogitsProcessorList(
        [
            SuppressTokensAtBeginLogitsProcessor(rule.suppressed_first, begin_index=len(PROMPT)),
            SuppressTokensLogitsProcessor(rule.suppressed),
        ]
    )
    if rule.first_timestamp is not None:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT)))
    return processors(torch.tensor([[*PROMPT, *drawn]]), logits[None])[0]


def by_rule(rule: WhisperRule, logits: torch.Tensor, drawn: Sequence[int]) -> torch.Tensor:
    judged = logits.clone()
    rule.apply(judged, drawn)
    return judged


tokens = st.one_of(st.integers(0, END - 1), st.integers(FIRST, VOCAB - 1))


@settings(max_examples=400)
@given(
    st.lists(tokens, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([0.5, 3.0, 10.0]),
    st.sampled_from([-8.0, 0.0, 8.0]),
    st.sampled_from([None, 0, 10]),
)
def test_the_rule_is_transformers_own(
    drawn: list[int], seed: int, spread: float, lean: float, limit: int | None
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    logits[FIRST:] += lean  # towards timestamps, or away from them
    rule = WhisperRule(END, RULE.suppressed, RULE.suppressed_first, FIRST, limit)
    assert torch.equal(by_rule(rule, logits, drawn), by_transformers(rule, logits, drawn))


@given(st.lists(tokens, max_size=3), st.integers(0, 2**32))
def test_without_timestamps_only_suppression_counts(drawn: list[int], seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    rule = WhisperRule(END, RULE.suppressed, RULE.suppressed_first)
    assert torch.equal(by_rule(rule, logits, drawn), by_transformers(rule, logits, drawn))


def test_a_sampler_judges_by_what_it_has_observed_and_forgets_what_is_undone() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[20] = 9.0, 5.0
    sampler = Sampler(SamplingParams(temperature=0, rule=RULE), VOCAB)
    assert sampler.sample(logits, 0) == FIRST
    sampler.observe(FIRST)
    assert sampler.sample(logits, 1) == 20  # 3 is suppressed
    sampler.observe(20)
    sampler.observe(FIRST + 9)
    assert sampler.sample(logits, 3) in (END, FIRST + 9)  # no text within a pair
    sampler.truncate(1)
    assert sampler.sample(logits, 1) == 20
    assert logits[3] == 9.0  # the caller's logits are as they were


def test_an_answer_begins_with_the_best_of_each_forced_range_at_any_temperature() -> None:
    logits = torch.zeros(VOCAB)
    logits[66], logits[20] = 1.0, 9.0
    rule = WhisperRule(END, (), (), FIRST, 10, forced=((61, 70), (70, 71)))
    for temperature in (0.0, 5.0):
        sampler = Sampler(SamplingParams(temperature=temperature, rule=rule), VOCAB)
        for position, expected in enumerate((66, 70)):
            assert sampler.sample(logits, position) == expected
            assert sampler.logprob(logits, expected) == 0.0
            sampler.observe(expected)
        assert FIRST <= sampler.sample(logits, 2) <= FIRST + 10


def test_what_is_forbidden_is_never_drawn_and_a_shortlist_stays_finite() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SamplingParams(temperature=2.0, seed=4, rule=RULE), VOCAB)
    drawn = {sampler.sample(logits, position) for position in range(300)}
    assert drawn <= set(range(FIRST, FIRST + RULE.first_limit + 1))
    ids, values = Sampler(SamplingParams(rule=WhisperRule(END, (), (), FIRST, 1)), VOCAB).shortlist(logits)
    assert values.isfinite().all()
    assert set(ids[:2].tolist()) == {FIRST, FIRST + 1}


def test_a_logprob_is_that_of_the_processed_logits() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(SamplingParams(temperature=0.4, rule=RULE), VOCAB)
    expected = by_rule(RULE, logits, ()).log_softmax(-1)
    assert sampler.logprob(logits, FIRST + 2) == float(expected[FIRST + 2])
    assert Sampler(SamplingParams(), VOCAB).logprob(logits, 9) == float(logits.log_softmax(-1)[9])


@pytest.mark.parametrize(
    "rule", [RULE, WhisperRule(END), WhisperRule(END, (1,), (), FIRST, None, ((61, 70), (70, 71)))]
)
def test_a_rule_travels(rule: WhisperRule) -> None:
    params = SamplingParams(seed=3, rule=rule)
    travelled = msgpack.unpackb(msgpack.packb(params.to_map()))
    assert SamplingParams.from_map(travelled) == params
    assert all(not isinstance(item, list | dict) for item in travelled["rule"])


GOOD = RULE.to_list()


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "whisper"},
        "whisper",
        [],
        ["grammar", *GOOD[1:]],
        GOOD[:-1],
        [*GOOD, 1],
        [*GOOD[:1], "60", *GOOD[2:]],
        [*GOOD[:1], True, *GOOD[2:]],
        [*GOOD[:1], -5, *GOOD[2:]],
        [*GOOD[:1], 2**40, *GOOD[2:]],
        [*GOOD[:2], 10, *GOOD[3:]],
        [*GOOD[:4], -1, 7, 0, *GOOD[7:]],
        [*GOOD[:6], -1, *GOOD[7:], 1, 2],
        [*GOOD[:6], 1, *GOOD[7:], 2, 2],
        [*GOOD[:6], 9, *GOOD[7:], *(1, 2) * 9],
        ["whisper", 60, 80, -1, 5000, 0, 0, *range(5000)],
    ],
)
def test_a_peers_nonsense_is_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"^rule "):
        SamplingParams.from_map(SamplingParams().to_map() | {"rule": values})


def test_a_rule_for_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="rule names token 80"):
        Sampler(SamplingParams(rule=RULE), FIRST)


def test_every_row_of_a_greedy_answer_has_a_choice() -> None:
    """However it goes on: text, pairs, the last timestamp of all."""
    noise = torch.Generator().manual_seed(2)
    sampler = Sampler(SamplingParams(temperature=0, rule=RULE), VOCAB)
    drawn: list[int] = []
    for position in range(200):
        drawn.append(sampler.sample(torch.randn(VOCAB, generator=noise) * 4, position))
        sampler.observe(drawn[-1])
    stamps = [token for token in drawn if token >= FIRST]
    assert stamps == sorted(stamps)
    assert not set(drawn) & set(chain(RULE.suppressed, (NO_TIMESTAMPS,)))
