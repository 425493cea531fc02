"""Turns logits into the next token: bias, penalties, temperature, truncation, one draw.

A draw depends on (seed, position, stream) and the logits alone: not on earlier draws, retries, neighbours or
the place where it is made. Knows nothing of sessions or of who asked; one row at a time, on the CPU.

The order, which is vLLM's and transformers' for the same fields: logit bias, rule, repetition penalty, presence and
frequency penalties, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slicing.buffers import float_array
from slicing.errors import LogitsError
from slicing.logits_rule import WhisperRule

PREFIX_TOKENS = 256  # how far to sort at first: real distributions are decided well within it
# The best of a row are looked for among the bests of its blocks. With three blocks for each wanted token, 1.2 times as
# many tokens as are wanted reach the floor that is found.
BLOCKS_PER_TOKEN = 3
LEAST_BLOCK = 8  # numbers; with shorter ones the bests are most of the row
MAX_BIASED_TOKENS = 1024
SEED_BITS = 64

Row = npt.NDArray[np.float32]  # logits [vocab]
MAX_GUIDANCE = 100.0
LOWEST = np.finfo(np.float32).min  # what is forbidden, in a shortlist: infinities do not travel
MIN_TEMPERATURE = 1e-5  # below, one token has all the probability anyway, and the exponentials overflow
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0  # of repetition; beyond, logits divided or multiplied by it overflow
Weights = npt.NDArray[np.float64]  # probabilities times a constant, best first


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are a plain draw from the model's distribution."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = field(
        default=(), repr=False
    )  # (token id, added to its logit)
    seed: int = 0
    stream: int = 0
    guidance_scale: float = 1.0  # of classifier-free guidance, where a session has two branches
    rule: WhisperRule | None = None  # what may follow what was drawn

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken and nothing is drawn."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def cuts_by_mass(self) -> bool:
        """Whether top_p or min_p cut the distribution off."""
        return self.top_p < 1 or self.min_p > 0

    def validate(self) -> None:
        """Raise `ValueError`, its text starting with the field's name, when a value makes no sense."""
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_integer("top_k", self.top_k, 0, 2**31)
        _check_number("top_p", self.top_p, 0, 1, above_low=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, MIN_PENALTY, MAX_PENALTY)
        _check_number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check_number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _check_number("guidance_scale", self.guidance_scale, 0, MAX_GUIDANCE)
        _check_integer("seed", self.seed, -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
        _check_integer("stream", self.stream, 0, 2**32 - 1)
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias names more than {MAX_BIASED_TOKENS} tokens")
        for token_id, bias in self.logit_bias:
            _check_integer("logit_bias", token_id, 0, 2**31)
            _check_number("logit_bias", bias, -math.inf, math.inf)
        if self.rule is not None:
            self.rule.validate()

    def to_map(self) -> dict[str, Any]:
        """Return plain numbers, strings and flat lists, ready for msgpack: what travels is not nested deeply."""
        bias = [number for pair in self.logit_bias for number in pair]
        return asdict(self) | {"logit_bias": bias, "rule": self.rule and self.rule.to_list()}

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Read what `to_map` wrote, maybe by a peer. Raises `ValueError` naming the field."""
        if not isinstance(values, Mapping):
            raise ValueError("sampling parameters are a map")  # noqa: TRY004  # what a peer sent, not our own bug
        known = {item.name for item in fields(cls)}
        if unknown := sorted(str(name) for name in values if name not in known):
            raise ValueError(f"{unknown[0]} is not a sampling parameter")
        flat = values.get("logit_bias", ())
        if not isinstance(flat, list | tuple) or len(flat) % 2:
            raise ValueError("logit_bias is not a list of token ids and what is added")
        stated = values.get("rule")
        rule = None if stated is None else WhisperRule.from_list(stated)
        bias = tuple(zip(flat[::2], flat[1::2], strict=True))
        params = cls(**dict(values) | {"logit_bias": bias, "rule": rule})
        params.validate()
        return params


class Sampler:
    """Chooses the tokens of one session, and remembers which it chose for the penalties.

    The repetition penalty looks at the prompt and at what was generated, the presence and frequency penalties
    at what was generated. Raises `ValueError` when an id of `logit_bias` or `rule` lies outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int] = ()) -> None:
        params.validate()
        if outside := [token_id for token_id, _ in params.logit_bias if token_id >= vocab_size]:
            raise ValueError(
                f"logit_bias names token {outside[0]}, but the vocabulary ends at {vocab_size - 1}"
            )
        if params.rule is not None:
            params.rule.validate(vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self._generated: list[int] = []
        self._counts: Counter[int] = Counter()
        is_repeating = params.repetition_penalty != 1
        self._prompt = {token for token in prompt_ids if token < vocab_size} if is_repeating else set()
        self._bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        is_penalising = is_repeating or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._is_penalising = is_penalising
        self._takes_as_is = not (params.logit_bias or is_penalising or params.rule)

    @property
    def num_generated(self) -> int:
        """How many generated tokens have been observed."""
        return len(self._generated)

    def sample(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token for `position` from its `logits` [vocab]; greedy takes the first of the best.

        Does not observe it. Raises `LogitsError` when the logits hold no choice.
        """
        row = self._process(logits)
        best = int(row.argmax())
        top = _check_top(float(row[best]))  # argmax gives a NaN's place if there is one
        if self.params.is_greedy:
            return best
        return _draw(row, top, self.params, uniform(self.params.seed, position, self.params.stream))

    def logprob(self, logits: torch.Tensor, token_id: int) -> float:
        """Return the natural logarithm of a token's probability at temperature 1, nothing truncated.

        What bias, rule and penalties forbid or change is taken into account, as in Whisper's own thresholds.
        """
        return raw_logprobs(torch.from_numpy(self._process(logits)), (token_id,))[0]

    def observe(self, token_id: int) -> None:
        """Add a generated token to the history."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"a token id lies outside the vocabulary of {self.vocab_size}")
        self._generated.append(token_id)
        self._counts[token_id] += 1

    def truncate(self, num_generated: int) -> None:
        """Forget all but the first `num_generated` generated tokens."""
        for token_id in self._generated[num_generated:]:
            self._counts[token_id] -= 1
        del self._generated[num_generated:]
        self._counts += Counter()  # drops the zeros

    def shortlist(self, logits: torch.Tensor, num: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `num` best ids [num] (int64) and their processed logits [num] (float32), best first.

        Ties go to the lower id, so the first is what greedy takes. Raises `LogitsError` like `sample`.
        """
        row = self._process(logits)
        _check_top(float(row.max()))  # a NaN anywhere is the maximum
        ids = _best(row, num)
        values = row[ids] if self.params.rule is None else np.maximum(row[ids], LOWEST)
        return torch.from_numpy(ids), torch.from_numpy(values)

    def _process(self, logits: torch.Tensor) -> Row:
        """Apply bias, rule and penalties to a copy; returns the logits' own memory when there are none."""
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, not ({self.vocab_size},)")
        row: Row = float_array(logits)
        if self._takes_as_is:
            return row
        row = row.copy()
        is_penalised = self._prompt or (self._counts and self._is_penalising)
        rule = self.params.rule
        np.add.at(row, self._bias_ids, self._bias)
        if rule is not None:
            rule.apply(torch.from_numpy(row), self._generated)
        if is_penalised:
            self._penalise(row)
        return row

    def _penalise(self, row: Row) -> None:
        """Lower what was there before, in place.

        Repetition as in Keskar et al. 2019 (CTRL), presence and frequency as in OpenAI's API reference.
        """
        params = self.params
        if params.repetition_penalty != 1:
            seen = np.array(sorted(self._prompt | self._counts.keys()))
            values, penalty = row[seen], np.float32(params.repetition_penalty)
            row[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = np.array(list(self._counts.values()), dtype=np.float32)
            row[list(self._counts)] -= params.frequency_penalty * counts + np.float32(params.presence_penalty)


def raw_logprobs(logits: torch.Tensor, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the natural logarithms of the tokens' probabilities by `logits` [vocab] as they are, in float32."""
    values = logits.detach().to(device="cpu", dtype=torch.float32).log_softmax(dim=-1)
    return tuple(values[list(token_ids)].tolist())


def uniform(seed: int, position: int, stream: int) -> float:
    """Return the number in [0, 1) that belongs to this key: 53 bits of SHA-256 over it."""
    digest = hashlib.sha256(f"diffuse-draw-1:{seed}:{position}:{stream}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def _draw(row: Row, top: float, params: SamplingParams, point: float) -> int:
    """Invert the cumulative distribution, best token first, at `point` in [0, 1).

    Every truncation keeps a prefix of that order, so no more of it is sorted than the draw needs. Weights are
    relative to the best token's and in float64. top_p keeps the tokens that have less than top_p before them
    (Holtzman et al. 2020), min_p those of at least min_p times the best one's (Nguyen et al. 2024).
    """
    limit = min(params.top_k or len(row), len(row))
    total = float(_weights(row, top, params.temperature).sum()) if limit == len(row) else None
    length = limit if total is None else min(PREFIX_TOKENS, limit)
    while True:
        ids = _best(row, length)
        weights = _weights(row[ids], top, params.temperature)
        cumulative = weights.cumsum()
        total = float(cumulative[-1]) if total is None else total
        kept = _num_kept(weights, cumulative, total, params)
        mass = float(cumulative[kept - 1]) if kept < length else total
        index = int(cumulative.searchsorted(point * mass, side="right"))
        if kept < length or length == limit or (index < length and not params.cuts_by_mass):
            return int(ids[min(index, kept - 1)])
        length = length * 16 if length * 64 < limit else limit


def _num_kept(weights: Weights, cumulative: Weights, total: float, params: SamplingParams) -> int:
    """Count the tokens at the front that top_p and min_p keep; never none."""
    kept = (weights >= params.min_p) & (weights > 0)
    if params.top_p < 1:
        kept[1:] &= cumulative[:-1] < params.top_p * total
    return int(kept.sum())


def _weights(row: Row, top: float, temperature: float) -> Weights:
    return np.exp((row.astype(np.float64) - top) / temperature)


def _best(row: Row, num: int) -> npt.NDArray[np.int64]:
    """Return the `num` best ids, best first, ties by lower id (a `topk` alone leaves ties open)."""
    ids = np.flatnonzero(row >= _floor(row, num)) if num < len(row) else np.arange(len(row))  # ascending
    order = torch.from_numpy(row[ids]).sort(descending=True, stable=True).indices
    return ids[order.numpy()[:num]]


def _floor(row: Row, num: int) -> float:
    """Return what at least `num` numbers of a row reach, and not many more: that takes no sorting of all of them."""
    width = len(row) // (BLOCKS_PER_TOKEN * num)
    if width < LEAST_BLOCK:
        return torch.from_numpy(row).topk(num).values[-1].item()
    bests = row[: len(row) // width * width].reshape(-1, width).max(axis=1)
    return float(np.partition(bests, -num)[-num])


def _check_top(top: float) -> float:
    if not math.isfinite(top):
        raise LogitsError(f"the model's best logit is {top}; its weights are damaged or its dtype overflows")
    return top


def _check_number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
        raise ValueError(
            f"{name} is {value!r}, not a number {'above' if above_low else 'from'} {low} to {high}"
        )


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, not an integer from {low} to {high}")
