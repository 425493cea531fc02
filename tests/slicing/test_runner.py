"""The plain runner: what it computes, what it refuses, and what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slicing.batch import Work
from slicing.kv_cache import MIN_CAPACITY
from slicing.runner import Cancelled, CannotRollBack, Parts, PlainRunner
from slicing.weights import open_checkpoint
from tests.support.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, tiny_config, tiny_model, token_ids
from tests.support.ledger import ModelInParts

HIDDEN = 64


@pytest.fixture(scope="module")
def llama() -> ModelInParts:
    return ModelInParts(tiny_model(tiny_config("llama")))


def states_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))


def test_a_runner_tells_what_it_is(llama: ModelInParts) -> None:
    runner = llama.runner(Parts(((1, 4),)))
    assert (runner.num_layers, runner.hidden_size, runner.vocab_size) == (NUM_LAYERS, HIDDEN, VOCAB_SIZE)
    assert (runner.dtype, runner.max_positions) == (torch.float32, 256)
    assert runner.form.startswith("plain/fp32/cpu-")
    assert runner.cache_bytes_per_position == 3 * 2 * 2 * 16 * 4
    assert runner.measure_layer_ms() > 0


def test_a_runner_holds_its_own_layers_only(llama: ModelInParts) -> None:
    blocks = list(llama.model.model.layers)
    expected = sum(p.nbytes for block in blocks[1:4] for p in block.parameters())
    assert llama.runner(Parts(((1, 4),))).size_bytes == expected
    whole = sum(p.nbytes for p in llama.model.parameters())
    assert llama.whole.size_bytes == whole


def test_any_part_of_the_held_range_may_be_asked_for(llama: ModelInParts) -> None:
    runner, states = llama.runner(Parts(((0, NUM_LAYERS),))), states_of(5)
    at_once = runner.run_layers(runner.new_cache(), states, 0, start=1, end=5)
    cache = runner.new_cache()
    for layer in range(1, 5):
        states = runner.run_layers(cache, states, 0, start=layer, end=layer + 1)
    assert torch.equal(states, at_once)


def test_layers_that_are_not_held_are_a_bug_of_the_caller(llama: ModelInParts) -> None:
    runner = llama.runner(Parts(((1, 4),)))
    with pytest.raises(AssertionError, match="holds 1:4"):
        runner.run_layers(runner.new_cache(), states_of(1), 0, start=3, end=5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bloom"])
def test_a_step_at_a_lower_position_overwrites_what_follows(family: str) -> None:
    runner = ModelInParts(tiny_model(tiny_config(family))).whole
    prompt, other = token_ids(40), token_ids(3, seed=9)
    fresh, used = runner.new_cache(), runner.new_cache()
    runner.run_whole(fresh, prompt[:30], 0)
    runner.run_whole(used, prompt[:30], 0)
    runner.run_whole(used, prompt[30:], 30)
    for token_id in range(MIN_CAPACITY):  # the storage grows: its size must not change a bit
        runner.run_whole(used, torch.tensor([token_id]), 40 + token_id)
    expected = runner.run_whole(fresh, other, 30)
    assert torch.equal(runner.run_whole(used, other, 30), expected)
    assert used.length == 33


def test_a_gap_is_refused(llama: ModelInParts) -> None:
    cache = llama.whole.new_cache()
    with pytest.raises(ValueError, match="holds 0"):
        llama.whole.run_whole(cache, token_ids(2), 1)


def test_a_recurrent_family_refuses_to_roll_back_and_starts_again_at_0() -> None:
    runner = ModelInParts(tiny_model(tiny_config("qwen3_next"))).whole
    cache, prompt = runner.new_cache(), token_ids(8)
    expected = runner.run_whole(cache, prompt, 0)
    with pytest.raises(CannotRollBack):
        runner.run_whole(cache, prompt[:2], 6)
    assert torch.equal(runner.run_whole(cache, prompt, 0), expected)


def test_a_call_is_cancelled_between_two_layers_and_the_session_goes_on(llama: ModelInParts) -> None:
    runner, states = llama.runner(Parts(((0, NUM_LAYERS),))), states_of(4)
    cache, looks = runner.new_cache(), iter([False, False, True])
    with pytest.raises(Cancelled):
        runner.run_layers(cache, states, 0, start=0, end=NUM_LAYERS, is_cancelled=lambda: next(looks))
    assert next(looks, None) is None
    assert cache.length == 0
    expected = runner.run_layers(runner.new_cache(), states, 0, start=0, end=NUM_LAYERS)
    assert torch.equal(runner.run_layers(cache, states, 0, start=0, end=NUM_LAYERS), expected)


def test_sessions_do_not_see_each_other(llama: ModelInParts) -> None:
    runner = llama.whole
    alone, first, second = runner.new_cache(), runner.new_cache(), runner.new_cache()
    expected = [runner.run_whole(alone, rows, 2 * n) for n, rows in enumerate(token_ids(8).split(2))]
    for n, rows in enumerate(token_ids(8).split(2)):
        runner.run_whole(second, token_ids(3, seed=n), 3 * n)
        assert torch.equal(runner.run_whole(first, rows, 2 * n), expected[n])


def test_a_batch_is_one_session_after_the_other(llama: ModelInParts) -> None:
    runner = llama.whole
    prompts = [token_ids(length, seed=length) for length in (3, 1, 7)]
    works = [Work(runner.new_cache(), rows, 0) for rows in prompts]
    states = runner.run_opening_batch(works, end=NUM_LAYERS)
    closing = [
        Work(work.cache, rows, 0, [0, work.rows - 1]) for work, rows in zip(works, states, strict=True)
    ]
    for rows, logits in zip(prompts, runner.run_closing_batch(closing, start=NUM_LAYERS), strict=True):
        expected = runner.run_whole(runner.new_cache(), rows, 0, keep=[0, len(rows) - 1])
        assert torch.equal(logits, expected)
    assert (runner.max_works, runner.is_invariant) == (1, False)


def test_a_gap_in_one_session_of_a_batch_is_refused_before_any_other_is_touched(llama: ModelInParts) -> None:
    runner = llama.runner(Parts(((1, 4),)))
    works = [Work(runner.new_cache(), states_of(2), position) for position in (0, 1)]
    with pytest.raises(ValueError, match="holds 0"):
        runner.run_layers_batch(works, start=1, end=4)
    assert [work.cache.size_bytes for work in works] == [0, 0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize("length", [1, 2, 64, 65])
def test_what_a_session_takes_is_known_before_it_runs(family: str, length: int) -> None:
    runner = ModelInParts(tiny_model(tiny_config(family))).runner(Parts(((0, 4),)))
    cache = runner.new_cache()
    runner.run_layers(cache, states_of(length), 0, start=0, end=4)
    assert cache.size_bytes == runner.cache_bytes(length)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_next"])
def test_a_forked_session_gives_the_bits_of_its_origin(family: str) -> None:
    runner = ModelInParts(tiny_model(tiny_config(family))).whole
    cache, prompt = runner.new_cache(), token_ids(20)
    runner.run_whole(cache, prompt[:15], 0)
    other = cache.fork(15)
    expected = runner.run_whole(cache, prompt[15:], 15)
    assert torch.equal(runner.run_whole(other, prompt[15:], 15), expected)


@pytest.mark.parametrize("start", [NUM_LAYERS - 1, NUM_LAYERS])
@pytest.mark.parametrize(("keep", "rows"), [(None, [4]), (2, [2]), ([0, 3], [0, 3]), (range(5), range(5))])
def test_the_closing_end_yields_the_rows_that_are_wanted(
    llama: ModelInParts, start: int, keep: int | list[int] | None, rows: list[int]
) -> None:
    runner = llama.runner(Parts(((NUM_LAYERS - 1, NUM_LAYERS),), closing=True))
    states = states_of(5)
    every = runner.run_closing(runner.new_cache(), states, 0, start=start, keep=range(5))
    logits = runner.run_closing(runner.new_cache(), states, 0, start=start, keep=keep)
    torch.testing.assert_close(logits, every[list(rows)], rtol=0, atol=1e-5)
    assert logits.dtype == torch.float32


def test_the_closing_end_without_layers_leaves_the_session_alone(llama: ModelInParts) -> None:
    runner = llama.runner(Parts(closing=True))
    cache = runner.new_cache()
    runner.run_closing(cache, states_of(1), 7, start=NUM_LAYERS)
    assert (cache.length, cache.size_bytes) == (0, 0)


def test_the_address_of_what_arrives_does_not_change_a_bit(llama: ModelInParts) -> None:
    runner, states = llama.runner(Parts(((0, 3),))), states_of(6)
    expected = runner.run_layers(runner.new_cache(), states, 0, start=0, end=3)
    for offset in (1, 3, 7):
        odd = torch.empty(states.numel() + offset)[offset:].view(states.shape).copy_(states)
        assert torch.equal(runner.run_layers(runner.new_cache(), odd, 0, start=0, end=3), expected)


def test_bfloat16_is_cut_exactly_as_well() -> None:
    parts = ModelInParts(tiny_model(tiny_config("llama")).to(torch.bfloat16))
    prompt = token_ids(9)
    expected = parts.whole.run_whole(parts.whole.new_cache(), prompt, 0)
    opening, closing = (
        parts.runner(Parts(((0, 2),), opening=True)),
        parts.runner(Parts(((2, 6),), closing=True)),
    )
    states = opening.run_opening(opening.new_cache(), prompt, 0, end=2)
    assert states.dtype == torch.bfloat16
    assert torch.equal(closing.run_closing(closing.new_cache(), states, 0, start=2), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_slice_reads_its_own_tensors_and_computes_what_the_model_in_memory_does(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(tiny_config(family))
    model.save_pretrained(tmp_path)
    checkpoint, parts = open_checkpoint(str(tmp_path)), Parts(((2, 4),))
    loaded = PlainRunner.load(checkpoint, parts, dtype=torch.float32)
    shared = PlainRunner.from_model(model, parts)
    states = states_of(4)
    mine = loaded.run_layers(loaded.new_cache(), states, 0, start=2, end=4)
    assert torch.equal(mine, shared.run_layers(shared.new_cache(), states, 0, start=2, end=4))
    assert loaded.size_bytes == shared.size_bytes == checkpoint.bytes_requested
    assert list(loaded.layer_hashes) == [2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_ends_compute_what_the_model_in_memory_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family))
    model.save_pretrained(tmp_path)
    parts = Parts(opening=True, closing=True)
    loaded = PlainRunner.load(open_checkpoint(str(tmp_path)), parts, dtype=torch.float32)
    shared = PlainRunner.from_model(model, parts)
    states = [runner.run_opening(runner.new_cache(), token_ids(5), 0, end=0) for runner in (loaded, shared)]
    assert torch.equal(*states)
    logits = [
        runner.run_closing(runner.new_cache(), states[0], 0, start=NUM_LAYERS) for runner in (loaded, shared)
    ]
    assert torch.equal(*logits)


def test_a_closing_end_with_a_tied_head_holds_the_table_once(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("gemma2"))
    model.save_pretrained(tmp_path)
    closing = PlainRunner.load(open_checkpoint(str(tmp_path)), Parts(closing=True), dtype=torch.float32)
    assert closing.size_bytes == model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    shared = PlainRunner.from_model(model, Parts(closing=True))
    states = states_of(1)
    logits = closing.run_closing(closing.new_cache(), states, 0, start=NUM_LAYERS)
    assert torch.equal(logits, shared.run_closing(shared.new_cache(), states, 0, start=NUM_LAYERS))
