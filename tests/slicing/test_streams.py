"""One token of each stream, with guidance before anything is drawn."""

from __future__ import annotations

import pytest
import torch

from slicing.sampler import Sampler, SamplingParams
from slicing.streams import StreamSampler

VOCAB = 40


def _logits(branches: int, streams: int) -> torch.Tensor:
    return torch.randn(branches, streams, VOCAB, generator=torch.Generator().manual_seed(2))


def test_every_stream_draws_for_itself() -> None:
    params, logits = SamplingParams(seed=3), _logits(1, 4)
    streams = StreamSampler(params, VOCAB, num_streams=4)
    alone = [
        Sampler(SamplingParams(seed=3, stream=number), VOCAB).sample(logits[0, number], 9)
        for number in range(4)
    ]
    assert streams.sample(logits, 9) == alone
    assert len(set(alone)) > 1


def test_branches_are_combined_before_the_best_is_taken() -> None:
    logits = _logits(2, 3)
    params = SamplingParams(temperature=0.0, guidance_scale=3.0)
    streams = StreamSampler(params, VOCAB, num_streams=3, branches=2)
    combined = logits[1] + 3.0 * (logits[0] - logits[1])
    assert streams.sample(logits, 1) == combined.argmax(-1).tolist()
    ids, values = streams.shortlist(logits, 5)
    assert torch.equal(ids, combined.topk(5).indices)
    assert torch.equal(values, combined.topk(5).values)
    assert streams.sample(logits, 1) != logits[0].argmax(-1).tolist()


def test_a_scale_of_one_is_the_conditional_branch() -> None:
    logits = _logits(2, 2)
    params = SamplingParams(temperature=0.0, guidance_scale=1.0)
    streams = StreamSampler(params, VOCAB, num_streams=2, branches=2)
    assert streams.sample(logits, 1) == logits[0].argmax(-1).tolist()


def test_what_was_drawn_is_forgotten_with_a_roll_back() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    streams = StreamSampler(params, VOCAB, num_streams=2)
    logits = _logits(1, 2)
    first = streams.sample(logits, 1)
    streams.observe(first)
    logits_after = streams.sample(logits * 0.01, 2)
    assert logits_after != first
    streams.truncate(0)
    assert streams.sample(logits * 0.01, 1) == first
    assert streams.num_generated == 0


def test_logits_of_other_sizes_are_refused() -> None:
    streams = StreamSampler(SamplingParams(), VOCAB, num_streams=2, branches=2)
    with pytest.raises(ValueError, match="shape"):
        streams.sample(_logits(1, 2), 1)
    with pytest.raises(ValueError, match="two branches"):
        StreamSampler(SamplingParams(), VOCAB, branches=3)
    with pytest.raises(ValueError, match="guidance_scale"):
        StreamSampler(SamplingParams(guidance_scale=-1.0), VOCAB)
