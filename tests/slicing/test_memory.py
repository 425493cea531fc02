"""Decoders with an encoder before them, several streams and branches: cut as exactly as text models are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from slicing.branches import BranchedCache
from slicing.ends import Parts
from slicing.invariant import InvariantRunner
from slicing.runner import PlainRunner
from tests.support.tiny_kinds import CODEBOOK, NUM_LAYERS, WIDTH, tiny_model

CUTS = ((), (1,), (2, 3))
MEMORY_ROWS = 7


class Cut:
    """A model as ends at home and slices elsewhere, and whole, with one session on all of it."""

    def __init__(
        self, model: Any, cuts: Sequence[int], memory: torch.Tensor | None, branches: int = 0
    ) -> None:
        bounds = (0, *cuts, NUM_LAYERS)
        self.home = PlainRunner.from_model(model, Parts(opening=True, closing=True))
        self.whole = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
        self.slices = [PlainRunner.from_model(model, Parts((held,))) for held in pairwise(bounds)]
        runners = [self.home, self.whole, *self.slices]
        caches = [_cache(runner, branches) for runner in runners]
        for cache in caches if memory is not None else ():
            cache.add_memory(memory)
        self.own, self.uncut, *self.caches = caches
        self.position = 0

    def step(self, inputs: torch.Tensor, frames: int) -> torch.Tensor:
        """Run a step cut and uncut; returns what the closing end made, which is the same."""
        states = self.home.run_opening(self.own, inputs, self.position, end=0)
        for runner, cache in zip(self.slices, self.caches, strict=True):
            start, end = runner.parts.layers[0]
            states = runner.run_layers(cache, states, self.position, start=start, end=end)
        made = self.home.run_closing(self.own, states, self.position, start=NUM_LAYERS)
        assert torch.equal(made, self.whole.run_whole(self.uncut, inputs, self.position))
        self.position += frames
        return made


def _cache(runner: PlainRunner, branches: int) -> Any:
    return BranchedCache([runner.new_cache() for _ in range(branches)]) if branches else runner.new_cache()


def _memory(rows: int = MEMORY_ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_a_cut_decoder_draws_what_the_stock_model_draws(family: str, cuts: Sequence[int]) -> None:
    model, memory = tiny_model(family), _memory()
    expected = [3, 5]
    with torch.no_grad():
        for _ in range(8):
            encoded = BaseModelOutput(last_hidden_state=memory.unsqueeze(0))
            ids = torch.tensor([expected])
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    cut, drawn, ids = Cut(model, cuts, memory), [3, 5], torch.tensor([3, 5])
    for _ in range(8):
        ids = cut.step(ids, len(ids)).argmax(-1)
        drawn.append(int(ids))
    assert drawn == expected


@pytest.mark.parametrize("cuts", CUTS)
def test_branches_of_a_music_model_are_cut_as_it_is_whole(cuts: Sequence[int]) -> None:
    cut = Cut(tiny_model("musicgen"), cuts, _memory(2 * MEMORY_ROWS), branches=2)
    ids = torch.full((2, 4), CODEBOOK)
    for _ in range(5):
        logits = cut.step(ids, 1)
        assert logits.shape == (2, 4, CODEBOOK)
        assert not torch.equal(logits[0], logits[1])  # each branch has its own memory
        ids = logits[0].argmax(-1).expand(2, 4)


def test_encoder_states_come_in_pieces() -> None:
    model, memory = tiny_model("bart"), _memory()
    runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
    at_once, in_pieces = runner.new_cache(), runner.new_cache()
    at_once.add_memory(memory)
    for piece in memory.split(3):
        in_pieces.add_memory(piece)
    ids = torch.tensor([3, 5, 9])
    assert torch.equal(runner.run_whole(at_once, ids, 0), runner.run_whole(in_pieces, ids, 0))


@pytest.mark.parametrize("runners", [PlainRunner, InvariantRunner])
def test_keys_and_values_of_encoder_states_are_made_once(runners: type[PlainRunner]) -> None:
    runner = runners.from_model(tiny_model("whisper"), Parts.whole(NUM_LAYERS))
    rows: list[int] = []
    for name, module in runner._slice.model.named_modules():
        if "decoder" in name and name.endswith("encoder_attn.k_proj"):
            module.register_forward_hook(lambda _module, args, _made: rows.append(args[0].shape[-2]))
    cache = runner.new_cache()
    cache.add_memory(_memory())
    for position in range(4):
        runner.run_whole(cache, torch.tensor([3 + position]), position)
    assert len(rows) == NUM_LAYERS


def test_a_roll_back_keeps_encoder_states() -> None:
    model = tiny_model("whisper")
    runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
    cache = runner.new_cache()
    cache.add_memory(_memory())
    first = runner.run_whole(cache, torch.tensor([3, 5, 9]), 0)
    runner.run_whole(cache, torch.tensor([4]), 3)
    cache.truncate(0)
    assert torch.equal(runner.run_whole(cache, torch.tensor([3, 5, 9]), 0), first)
    assert cache.memory_rows == MEMORY_ROWS


def test_encoder_states_are_missed_and_come_too_late() -> None:
    runner = PlainRunner.from_model(tiny_model("whisper"), Parts.whole(NUM_LAYERS))
    cache = runner.new_cache()
    with pytest.raises(ValueError, match="did not come"):
        runner.run_whole(cache, torch.tensor([3]), 0)
    cache.add_memory(_memory())
    runner.run_whole(cache, torch.tensor([3]), 0)
    with pytest.raises(ValueError, match="after they were used"):
        cache.add_memory(_memory())


def test_encoder_states_are_computed_with_where_the_model_is() -> None:
    cache = PlainRunner.from_model(tiny_model("whisper"), Parts.whole(NUM_LAYERS)).new_cache()
    cache.add_memory(_memory())
    elsewhere = torch.device("meta")
    assert cache.memory_states(elsewhere).device == elsewhere
    assert cache.memory_rows == MEMORY_ROWS


def test_a_closed_session_holds_no_encoder_states_wherever_they_are_looked_at() -> None:
    runner = PlainRunner.from_model(tiny_model("whisper"), Parts.whole(NUM_LAYERS))
    cache = runner.new_cache()
    cache.add_memory(_memory())
    runner.run_whole(cache, torch.tensor([3]), 0)
    seen = cache.memory  # as a packed call keeps it until the next one
    cache.close()
    assert (seen.size_bytes, seen.rows, cache.memory_rows) == (0, 0, 0)


@pytest.mark.parametrize("family", ["whisper", "t5", "musicgen"])
def test_what_encoder_states_take_is_what_was_foretold(family: str) -> None:
    runner = PlainRunner.from_model(tiny_model(family), Parts(((1, 3),)))
    cache = runner.new_cache()
    cache.add_memory(_memory())
    runner.run_layers(cache, _memory(1), 0, start=1, end=3)
    assert cache.size_bytes == runner.cache_bytes(1) + runner.memory_bytes(MEMORY_ROWS)


@pytest.mark.parametrize("cuts", CUTS)
def test_an_encoder_of_texts_is_cut_exactly(cuts: Sequence[int]) -> None:
    model = tiny_model("bert")
    cut = Cut(model, cuts, None)
    for length in (5, 9, 2):
        ids = torch.arange(length) + 7
        cut.position = 0
        with torch.no_grad():
            expected = model(input_ids=ids.unsqueeze(0)).last_hidden_state[0, -1:]
        assert torch.allclose(cut.step(ids, length), expected, atol=1e-6)


def test_a_headless_text_model_makes_hidden_states_step_by_step() -> None:
    model = tiny_model("qwen3")
    ids = torch.arange(9) + 7
    with torch.no_grad():
        expected = model(input_ids=ids.unsqueeze(0)).last_hidden_state[0, -1:]
    cut = Cut(model, (2,), None)
    cut.step(ids[:4], 4)
    assert torch.allclose(cut.step(ids[4:], 5), expected, atol=1e-5)


def test_a_text_that_goes_on_is_refused_by_an_encoder_of_texts() -> None:
    runner = PlainRunner.from_model(tiny_model("bert"), Parts.whole(NUM_LAYERS))
    cache = runner.new_cache()
    runner.run_whole(cache, torch.tensor([3, 4]), 0)
    with pytest.raises(ValueError, match="one step"):
        runner.run_whole(cache, torch.tensor([5]), 2)
