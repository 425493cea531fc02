"""The sampler: what each parameter does, and that a draw depends on its key and the logits alone."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slicing.errors import LogitsError
from slicing.sampler import Sampler, SamplingParams, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])


def sampled(logits: torch.Tensor, num: int, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(**params), len(logits))
    return [sampler.sample(logits, position) for position in range(num)]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(1000)
    logits[[700, 300, 999]] = 5.0
    assert sampled(logits, 3, temperature=0.0) == [300, 300, 300]


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50))
def test_greedy_and_shortlist_agree_with_argmax(values: list[float]) -> None:
    logits = torch.tensor(values)
    sampler = Sampler(SamplingParams(temperature=0), len(values))
    ids, best = sampler.shortlist(logits)
    assert int(ids[0]) == sampler.sample(logits, 0) == int(logits.argmax())
    assert ids.dtype == torch.int64
    assert best.dtype == torch.float32
    assert torch.equal(best, logits[ids])


def test_shortlist_breaks_ties_by_lower_id() -> None:
    logits = torch.zeros(100)
    logits[[50, 20, 80]] = 1.0
    ids, values = Sampler(SamplingParams(), 100).shortlist(logits, num=5)
    assert ids.tolist() == [20, 50, 80, 0, 1]
    assert values.tolist() == [1, 1, 1, 0, 0]


@given(
    seed=st.integers(0, 1000),
    num=st.sampled_from([1, 8, 60, 256, 2000]),
    step=st.sampled_from([0.0, 0.25, 4.0]),
    num_forbidden=st.sampled_from([0, 2000, 2990]),
    is_sorted=st.booleans(),
)
def test_the_best_of_a_long_row_are_found_however_they_lie(
    seed: int, num: int, step: float, num_forbidden: int, is_sorted: bool
) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    logits = (logits / step).round() * step if step else logits  # ties
    logits[torch.randperm(3000, generator=torch.Generator().manual_seed(seed))[:num_forbidden]] = -torch.inf
    logits = logits.sort(descending=True).values if is_sorted else logits
    ids, values = Sampler(SamplingParams(), 3000).shortlist(logits, num)
    expected = sorted(range(3000), key=lambda token_id: (-float(logits[token_id]), token_id))[:num]
    assert ids.tolist() == expected
    assert torch.equal(values, logits[expected])


def test_shortlist_of_a_small_vocabulary_is_all_of_it() -> None:
    assert Sampler(SamplingParams(), 5).shortlist(LOGITS)[0].tolist() == [1, 2, 0, 4, 3]


def test_shortlist_holds_processed_logits() -> None:
    sampler = Sampler(SamplingParams(logit_bias=((3, 10.0),), presence_penalty=1.0), 5)
    sampler.observe(1)
    ids, values = sampler.shortlist(LOGITS, num=2)
    assert ids.tolist() == [3, 1]
    assert values.tolist() == [9.0, 2.0]


@given(st.integers(0, 2**63), st.integers(0, 10_000), st.integers(0, 8))
def test_uniform_depends_on_its_key_alone(seed: int, position: int, stream: int) -> None:
    value = uniform(seed, position, stream)
    assert 0 <= value < 1
    assert value == uniform(seed, position, stream)
    assert value != uniform(seed, position + 1, stream) != uniform(seed, position, stream + 1)


def test_uniform_is_the_same_in_every_version() -> None:
    assert uniform(7, 3, 0) == 0.9779648430783257


def test_draws_do_not_depend_on_order_or_retries() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(SamplingParams(seed=5), 500)
    forward = [sampler.sample(logits, position) for position in range(50)]
    backward = [sampler.sample(logits, position) for position in reversed(range(50)) for _ in range(2)]
    assert backward[::-2] == forward


def test_seeds_and_streams_give_other_draws() -> None:
    logits = torch.zeros(1000)
    texts = [sampled(logits, 20, seed=seed, stream=stream) for seed in (0, 1) for stream in (0, 1)]
    assert len({tuple(text) for text in texts}) == 4


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws: 4 degrees of freedom, 18.5 is the 99.9th percentile."""
    draws = torch.tensor(sampled(LOGITS, 20_000, temperature=0.8, seed=3))
    expected = torch.softmax(LOGITS.double() / 0.8, 0) * 20_000
    counts = draws.bincount(minlength=5)
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.6}, {1}),  # the best has 0.61
        ({"top_p": 0.7}, {1, 2}),
        ({"min_p": 0.3}, {1, 2}),  # e^-1 = 0.37, e^-2 = 0.14
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, {1, 2}),
        ({"top_k": 4, "top_p": 0.9999}, {0, 1, 2, 4}),
        ({"temperature": 1e-6}, {1}),
    ],
)
def test_truncation_keeps_exactly(params: dict[str, float], kept: set[int]) -> None:
    assert set(sampled(LOGITS, 2000, **params)) == kept


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    assert set(sampled(torch.zeros(600), 500, top_k=3)) == {0, 1, 2}


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert sampled(LOGITS, 200, top_k=5) == sampled(LOGITS, 200, top_k=500) == sampled(LOGITS, 200)


def plain_draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Make the same choice, spelled out over the whole vocabulary."""
    ids = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    weights = torch.softmax(logits[ids].double() / params.temperature, 0).tolist()
    if params.top_k:
        weights = [value if rank < params.top_k else 0.0 for rank, value in enumerate(weights)]
    before = [sum(weights[:rank]) for rank in range(len(ids))]
    enough = params.top_p * sum(weights)
    kept = [
        value if (params.top_p == 1 or mass < enough) and value >= params.min_p * weights[0] else 0.0
        for value, mass in zip(weights, before, strict=True)
    ]
    point = uniform(params.seed, position, params.stream) * sum(kept)
    masses = accumulate(kept)
    return next(token for token, mass in zip(ids, masses, strict=True) if mass > point)


@given(
    st.integers(0, 10**6),
    st.integers(1, 400),
    st.floats(0.1, 3.0),
    st.sampled_from([0, 1, 5, 50]),
    st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_draws_are_those_of_the_definition(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    sampler = Sampler(params, vocab_size)
    assert all(sampler.sample(logits, at) == plain_draw(logits, params, at) for at in range(3))


def test_seeded_draws_are_the_same_in_every_version() -> None:
    assert sampled(LOGITS, 12, seed=11) == [1, 1, 1, 2, 2, 1, 1, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.99}, {"min_p": 1e-4}, {"top_k": 4000}, {"temperature": 3.0}]
)
def test_sorting_only_a_prefix_changes_no_draw(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(2)).round(decimals=2)
    drawn = sampled(logits, 60, **params)
    monkeypatch.setattr("slicing.sampler.PREFIX_TOKENS", 20_000)
    assert sampled(logits, 60, **params) == drawn


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((300,), -math.inf)
    logits[[7, 200]] = 0.0
    assert set(sampled(logits, 200)) == set(sampled(logits, 200, top_k=50)) == {7, 200}


def test_repetition_penalty_looks_at_prompt_and_answer() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 5, prompt_ids=[1, 3, 900])
    sampler.observe(2)
    ids, values = sampler.shortlist(LOGITS)
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {0: 1.0, 1: 1.5, 2: 1.0, 3: -2.0, 4: 0.5}
    assert sampler.sample(LOGITS, 0) == 1


def test_presence_and_frequency_look_at_the_answer_alone() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), 5, prompt_ids=[0, 0])
    for token in (1, 1, 2):
        sampler.observe(token)
    ids, values = sampler.shortlist(LOGITS)
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {0: 1.0, 1: 2.0, 2: 1.25, 3: -1.0, 4: 0.5}


def test_truncate_forgets_the_tail() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    sampler, fresh = Sampler(params, 5), Sampler(params, 5)
    for token in (1, 2, 2, 3):
        sampler.observe(token)
    sampler.truncate(1)
    fresh.observe(1)
    assert sampler.num_generated == 1
    assert torch.equal(sampler.shortlist(LOGITS)[1], fresh.shortlist(LOGITS)[1])


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.clone()
    sampler = Sampler(SamplingParams(logit_bias=((0, 5.0),), frequency_penalty=1.0), 5)
    sampler.observe(1)
    sampler.sample(logits, 0)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_best_are_refused(value: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[4] = value
    sampler = Sampler(SamplingParams(temperature=temperature), 5)
    with pytest.raises(LogitsError):
        sampler.sample(logits, 0)
    with pytest.raises(LogitsError):
        sampler.shortlist(logits)
    with pytest.raises(LogitsError):
        sampler.sample(torch.full((5,), -math.inf), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", None),
        ("seed", 2**64),
        ("stream", True),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.inf),)),
        ("logit_bias", ((0, 0.0),) * 1025),
    ],
)
def test_a_senseless_value_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} "):
        SamplingParams(**{field: value}).validate()


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^logit_bias "):
        Sampler(SamplingParams(logit_bias=((5, 1.0),)), 5)


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(0.7, 40, 0.9, 0.05, 1.1, 0.2, 0.3, ((5, -100.0), (7, 2.5)), seed=-3, stream=2)
    assert SamplingParams.from_map(msgpack.unpackb(msgpack.packb(params.to_map()))) == params


@pytest.mark.parametrize(
    "values", [{"top_q": 1}, {1: 2}, {"logit_bias": [[1]]}, {"logit_bias": 3}, {"top_k": "a"}]
)
def test_what_a_peer_sends_is_checked(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"top_q|1|logit_bias|top_k"):
        SamplingParams.from_map(values)


@pytest.mark.parametrize("values", [[], "", 3, None])
def test_parameters_that_are_no_map_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="map"):
        SamplingParams.from_map(values)


def test_logit_bias_stays_out_of_the_repr() -> None:
    assert "12345" not in repr(SamplingParams(logit_bias=((12345, 1.0),)))
