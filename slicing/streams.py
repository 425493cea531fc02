"""Draws one token for each of several streams of a position, where guidance branches come together.

The branches' logits are combined before anything is drawn or shortened (Ho & Salimans 2022, as transformers does it
for MusicGen: unconditional + scale * (conditional - unconditional)). Every stream has a sampler of its own, keyed by
its number. Knows nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slicing.sampler import Sampler, SamplingParams


class StreamSampler:
    """Chooses the tokens of all streams of one session."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, *, num_streams: int = 1, branches: int = 1
    ) -> None:
        """Stream k draws with number `params.stream` + k. Raises `ValueError` as `Sampler` does."""
        if branches not in (1, 2):
            raise ValueError(f"guidance combines two branches, not {branches}")
        self.params = params
        self.vocab_size = vocab_size
        self.branches = branches
        self._samplers = [
            Sampler(replace(params, stream=params.stream + number), vocab_size)
            for number in range(num_streams)
        ]

    @property
    def num_streams(self) -> int:
        """Tokens of a position."""
        return len(self._samplers)

    @property
    def num_generated(self) -> int:
        """Positions that have been observed."""
        return self._samplers[0].num_generated

    def sample(self, logits: torch.Tensor, position: int) -> list[int]:
        """Choose a token of each stream for `position` from [branches, streams, vocab]. Does not observe them.

        Raises `LogitsError` when the logits hold no choice.
        """
        combined = self.combined(logits)
        return [sampler.sample(row, position) for sampler, row in zip(self._samplers, combined, strict=True)]

    def shortlist(self, logits: torch.Tensor, num: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `num` best ids and their logits of each stream [streams, num], best first."""
        made = [
            sampler.shortlist(row, num)
            for sampler, row in zip(self._samplers, self.combined(logits), strict=True)
        ]
        return torch.stack([ids for ids, _ in made]), torch.stack([values for _, values in made])

    def observe(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of one position to the history."""
        for sampler, token_id in zip(self._samplers, token_ids, strict=True):
            sampler.observe(token_id)

    def truncate(self, num_generated: int) -> None:
        """Forget all but the first `num_generated` positions."""
        for sampler in self._samplers:
            sampler.truncate(num_generated)

    def combined(self, logits: torch.Tensor) -> torch.Tensor:
        """Bring branches [branches, streams, vocab], the conditional one first, together: [streams, vocab]."""
        if logits.shape != (self.branches, self.num_streams, self.vocab_size):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}, not "
                f"({self.branches}, {self.num_streams}, {self.vocab_size})"
            )
        if self.branches == 1:
            return logits[0].float()
        conditional, unconditional = logits.float()
        return unconditional + (conditional - unconditional) * self.params.guidance_scale
