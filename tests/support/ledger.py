"""Plays one prompt through a model, whole or cut into ends and slices, in one process: the exactness ledger's player.

Used by tests and bench. It stands for gateway and nodes without a network: it passes on exactly what would travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from slicing.runner import KVCache, Parts, PlainRunner
from slicing.sampler import Sampler, SamplingParams

Step = Callable[[torch.Tensor, int], torch.Tensor]  # token ids [rows], position -> logits [1, vocab]

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1234)


@dataclass(frozen=True)
class Cut:
    """How a model is spread: the gateway's first and last layers, and where the rest is cut into slices."""

    cuts: tuple[int, ...] = ()  # global layer numbers between first_local and N - last_local
    first_local: int = 1
    last_local: int = 0
    has_remote_ends: bool = False  # the first slice embeds and the last one has the head; no layers at home

    def __str__(self) -> str:
        ends = "remote" if self.has_remote_ends else f"{self.first_local}:{self.last_local}"
        return f"ends={ends},cuts={'+'.join(map(str, self.cuts)) or 'none'}"


@dataclass
class Played:
    """What came out: the logits of the last row of every step, and the tokens drawn from them."""

    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] each
    token_ids: list[int] = field(default_factory=list)


class ModelInParts:
    """One whole model in memory, from which runners of any parts are made (and kept)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.num_layers = self.whole.num_layers
        self._runners: dict[Parts, PlainRunner] = {}

    @cached_property
    def whole(self) -> PlainRunner:
        """The uncut model, on the same runner."""
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return PlainRunner.from_model(self.model, Parts.whole(num_layers))

    def runner(self, parts: Parts) -> PlainRunner:
        """Return the runner of some parts."""
        if parts not in self._runners:
            self._runners[parts] = PlainRunner.from_model(self.model, parts)
        return self._runners[parts]

    def start_whole(self) -> Step:
        """Begin a session of the uncut model."""
        cache = self.whole.new_cache()
        return lambda token_ids, position: self.whole.run_whole(cache, token_ids, position)

    def start(self, cut: Cut) -> Step:
        """Begin a session of the cut model."""
        start, end = cut.first_local, self.num_layers - cut.last_local
        borders = [start, *cut.cuts, end]
        ranges = list(pairwise(borders))
        if cut.has_remote_ends:
            return self._start_remote(ranges)
        gateway = self.runner(Parts(((0, start), (end, self.num_layers)), opening=True, closing=True))
        nodes = [self.runner(Parts((layers,))) for layers in ranges]
        home, caches = gateway.new_cache(), [node.new_cache() for node in nodes]

        def step(token_ids: torch.Tensor, position: int) -> torch.Tensor:
            states = gateway.run_opening(home, token_ids, position, end=start)
            for node, cache, (first, last) in zip(nodes, caches, ranges, strict=True):
                states = node.run_layers(cache, over_the_wire(states), position, start=first, end=last)
            if cut.last_local == 0:  # only the last row is answered
                states, position = states[-1:], position + len(token_ids) - 1
            return gateway.run_closing(home, over_the_wire(states), position, start=end)

        return step

    def _start_remote(self, ranges: Sequence[tuple[int, int]]) -> Step:
        last = len(ranges) - 1
        nodes = [
            self.runner(Parts((layers,), opening=place == 0, closing=place == last))
            for place, layers in enumerate(ranges)
        ]
        caches: list[KVCache] = [node.new_cache() for node in nodes]

        def step(token_ids: torch.Tensor, position: int) -> torch.Tensor:
            states = nodes[0].run_opening(caches[0], token_ids, position, end=ranges[0][1])
            for place in range(1, last):
                start, end = ranges[place]
                states = nodes[place].run_layers(
                    caches[place], over_the_wire(states), position, start=start, end=end
                )
            start = ranges[last][0] if last else ranges[0][1]
            return nodes[last].run_closing(caches[last], over_the_wire(states), position, start=start)

        return step


def play(
    step: Step, prompt: torch.Tensor, chunk: int, sampling: SamplingParams, vocab_size: int, num: int
) -> Played:
    """Prefill `prompt` [rows] in chunks (0: at once), then draw `num` tokens, one step each."""
    sampler = Sampler(sampling, vocab_size, prompt.tolist())
    played = Played()
    position = 0
    for rows in prompt.split(chunk or len(prompt)):
        played.logits.append(step(rows, position)[-1])
        position += len(rows)
    for _ in range(num):
        token_id = sampler.sample(played.logits[-1], position)
        sampler.observe(token_id)
        played.token_ids.append(token_id)
        played.logits.append(step(torch.tensor([token_id]), position)[-1])
        position += 1
    return played


def over_the_wire(states: torch.Tensor) -> torch.Tensor:
    """Return what a peer would see: the same numbers in other memory, here at an odd address."""
    shifted = torch.empty(states.numel() + 1, dtype=states.dtype)[1:].view(states.shape)
    return shifted.copy_(states)
