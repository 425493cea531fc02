"""How the closing hop chooses: ids that are drawn, or the best few with their logits where nothing is left to chance.

On the compute thread. Knows samplers and bytes; nothing of sessions, or of how logits came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from routing.errors import ErrorCode, ProtocolError
from routing.types import NO_TOKEN, AnswerKind, HopEntry
from slicing.batch import Runner
from slicing.sampler import Sampler, SamplingParams
from slicing.streams import StreamSampler
from slicing.token_scores import likeliest

NUM_CANDIDATES = 8  # DESIGN decision 1
CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])  # payloads are little endian, like the hidden states
GREEDY = {"params": {"temperature": 0.0}}
SHORT_VOCABULARY = 1 << 16  # ids of several streams are two bytes each up to here
MAX_LOGPROBS = 20  # likely tokens that are told beside a drawn one


class ScoringSampler(Sampler):
    """Of a session that also wants to know how likely drawn tokens are, and `num_logprobs` others beside each."""

    num_logprobs: int = 0


AnySampler = Sampler | StreamSampler


def new_sampler(runner: Runner, entry: HopEntry) -> AnySampler | None:
    """The sampler that a closing hop draws with, greedy where the entry does not say; None where nothing is drawn.

    Raises ProtocolError for sampling that is impossible.
    """
    if not entry.run_closing or runner.is_headless:
        return None
    try:
        asked: Mapping[str, Any] = entry.sampling or GREEDY
        params = SamplingParams.from_map(asked["params"])
        if asked.get("num_logprobs") is not None:
            return _scoring_sampler(params, runner.vocab_size, asked, entry)
        if entry.branches == entry.streams == 1:
            return Sampler(params, runner.vocab_size, tuple(asked.get("prompt_ids", ())))
        return StreamSampler(params, runner.vocab_size, num_streams=entry.streams, branches=entry.branches)
    except (KeyError, ValueError, TypeError):
        raise ProtocolError(ErrorCode.MALFORMED, "the sampling parameters are impossible") from None


def kind_of_answer(sampler: AnySampler) -> AnswerKind:
    """What `draw` makes."""
    is_listed = sampler.params.is_greedy or isinstance(sampler, ScoringSampler)
    return AnswerKind.CANDIDATES if is_listed else AnswerKind.TOKEN_IDS


def draw(sampler: AnySampler, logits: torch.Tensor, position: int) -> bytes:
    """Choose and observe the token of each stream for `position`, from logits [branches * streams * vocab].

    Returns an answer's row. Raises `LogitsError` when the logits hold no choice.
    """
    if isinstance(sampler, Sampler):
        return _draw_one(sampler, logits.reshape(-1), position)
    return _draw_streams(
        sampler, logits.reshape(sampler.branches, sampler.num_streams, sampler.vocab_size), position
    )


def _draw_one(sampler: Sampler, logits: torch.Tensor, position: int) -> bytes:
    if isinstance(sampler, ScoringSampler):
        return _draw_scored(sampler, logits, position)
    if sampler.params.is_greedy:
        ids, values = sampler.shortlist(logits, NUM_CANDIDATES)
        sampler.observe(int(ids[0]))
        return pack_candidates(ids, values)
    token_id = sampler.sample(logits, position)
    sampler.observe(token_id)
    return pack_ids([token_id], sampler.vocab_size)


def _draw_scored(sampler: ScoringSampler, logits: torch.Tensor, position: int) -> bytes:
    """The drawn id with its logit, the log-sum-exp of all, and the likeliest: all of the model's own logits."""
    token_id = sampler.sample(logits, position)
    sampler.observe(token_id)
    best, values, total = likeliest(logits, sampler.num_logprobs)
    return pack_candidates(
        torch.tensor([token_id, NO_TOKEN, *best]), torch.tensor([float(logits[token_id]), total, *values])
    )


def _scoring_sampler(
    params: SamplingParams, vocab_size: int, asked: Mapping[str, Any], entry: HopEntry
) -> ScoringSampler:
    """Raises ValueError for a number that is none, or a session of several streams."""
    number = asked["num_logprobs"]
    if type(number) is not int or not 0 <= number <= MAX_LOGPROBS or entry.branches * entry.streams > 1:
        raise ValueError("num_logprobs")
    sampler = ScoringSampler(params, vocab_size, tuple(asked.get("prompt_ids", ())))
    sampler.num_logprobs = number
    return sampler


def _draw_streams(sampler: StreamSampler, logits: torch.Tensor, position: int) -> bytes:
    if sampler.params.is_greedy:
        ids, values = sampler.shortlist(logits, NUM_CANDIDATES)
        sampler.observe(ids[:, 0].tolist())
        return pack_candidates(ids.reshape(-1), values.reshape(-1))
    token_ids = sampler.sample(logits, position)
    sampler.observe(token_ids)
    return pack_ids(token_ids, sampler.vocab_size)


def pack_candidates(token_ids: torch.Tensor, logits: torch.Tensor) -> bytes:
    """Bytes of [n] ids and [n] logits as n x (u32 id, f32 logit)."""
    packed = np.empty(len(token_ids), CANDIDATE)
    packed["id"], packed["logit"] = token_ids.numpy(), logits.numpy()
    return packed.tobytes()


def pack_ids(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Bytes of the ids of a row: u32, or u16 where there are several and the vocabulary allows it."""
    is_short = len(token_ids) > 1 and vocab_size <= SHORT_VOCABULARY
    return np.array(token_ids, dtype="<u2" if is_short else "<u4").tobytes()
