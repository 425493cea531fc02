"""The fast runner: one session's bits in any company, what it refuses, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from slicing.batch import Work
from slicing.block_slice import Cancelled
from slicing.ends import Parts
from slicing.fast.check import learn_checked
from slicing.fast.embedding import look_up
from slicing.fast.loading import ModelTensors, build_runner, load_fast
from slicing.fast.packed_layer import Packing
from slicing.fast.packing import Form
from slicing.fast.runner import FastRunner
from slicing.model_source import open_checkpoint
from slicing.runner import PlainRunner
from slicing.slab import MAX_STEP_ROWS
from tests.support.families import NUM_LAYERS, VOCAB_SIZE, tiny_config, tiny_model, token_ids

HIDDEN = 64
WHOLE = Parts.whole(NUM_LAYERS)


def fast_of(
    model: PreTrainedModel, parts: Parts = WHOLE, form: Form = "fp32", threads: int = 1
) -> FastRunner:
    recipe = learn_checked(model.config)
    return build_runner(ModelTensors(model), recipe, parts, Packing(form), threads=threads)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(tiny_config("llama", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def fast(model: PreTrainedModel) -> FastRunner:
    return fast_of(model)


def states_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def run_in_pieces(runner: FastRunner, states: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, made, position = runner.new_cache(), [], 0
    for size in sizes:
        made.append(runner.run_layers(cache, states[position : position + size], position, start=0, end=6))
        position += size
    return torch.cat(made)


def test_a_runner_tells_what_it_is(model: PreTrainedModel) -> None:
    runner = fast_of(model, Parts(((1, 4),)))
    assert (runner.num_layers, runner.hidden_size, runner.vocab_size) == (NUM_LAYERS, HIDDEN, VOCAB_SIZE)
    assert (runner.form, runner.dtype, runner.max_positions) == ("fast/fp32", torch.float32, 2048)
    assert runner.cache_bytes_per_position == 3 * 2 * 2 * 16 * 4
    assert runner.measure_layer_ms() > 0


def test_weights_take_what_the_form_says(model: PreTrainedModel) -> None:
    sizes = [fast_of(model, Parts(((1, 4),)), form).size_bytes for form in ("fp32", "bf16", "int8")]
    held = sum(p.nbytes for block in list(model.model.layers)[1:4] for p in block.parameters())
    assert sizes[0] == held
    assert held / 2 <= sizes[1] <= 0.52 * held
    assert held / 4 <= sizes[2] <= 0.30 * held


def test_a_tied_table_is_held_once() -> None:
    tied = tiny_model(tiny_config("llama", tie_word_embeddings=True))
    ends = fast_of(tied, Parts(opening=True, closing=True))
    assert ends.size_bytes == VOCAB_SIZE * HIDDEN * 4 + HIDDEN * 4
    plain = PlainRunner.from_model(tied, Parts(opening=True, closing=True))
    ids = token_ids(5)
    embedded = ends.run_opening(ends.new_cache(), ids, 0, end=0)
    assert torch.equal(embedded, plain.run_opening(plain.new_cache(), ids, 0, end=0))


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_bits_do_not_depend_on_how_rows_were_split(fast: FastRunner, sizes: list[int]) -> None:
    states = states_of(sum(sizes))
    assert torch.equal(run_in_pieces(fast, states, sizes), run_in_pieces(fast, states, [sum(sizes)]))


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 80), min_size=2, max_size=5), rows=st.integers(1, 4))
def test_bits_do_not_depend_on_the_company(fast: FastRunner, lengths: list[int], rows: int) -> None:
    works, alone = [], []
    for seed, length in enumerate(lengths):
        past, states = states_of(length, seed), states_of(rows, seed + 100)
        caches = [fast.new_cache(), fast.new_cache()]
        for cache in caches:
            fast.run_layers(cache, past, 0, start=0, end=6)
        works.append(Work(caches[0], states, length))
        alone.append(fast.run_layers(caches[1], states, length, start=0, end=6))
    together = fast.run_layers_batch(works, start=0, end=6)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(together, alone, strict=True))


def test_bits_do_not_depend_on_threads(model: PreTrainedModel, fast: FastRunner) -> None:
    states = states_of(70)
    two = fast_of(model, threads=2)
    assert torch.equal(run_in_pieces(two, states, [64, 5, 1]), run_in_pieces(fast, states, [70]))


def test_bfloat16_weights_give_the_bits_of_float32_ones() -> None:
    rounded = tiny_model(tiny_config("llama")).bfloat16().float()
    states = states_of(9)
    forms = [run_in_pieces(fast_of(rounded, form=form), states, [9]) for form in ("bf16", "fp32")]
    assert torch.equal(*forms)


def test_int8_weights_stay_near(model: PreTrainedModel, fast: FastRunner) -> None:
    states = states_of(9)
    exact, near = run_in_pieces(fast, states, [9]), run_in_pieces(fast_of(model, form="int8"), states, [9])
    assert 0 < (exact - near).norm() < 0.03 * exact.norm()


def test_a_neighbour_that_is_not_a_number_harms_nobody(fast: FastRunner) -> None:
    good, bad = states_of(3), torch.full((2, HIDDEN), float("nan"))
    works = [Work(fast.new_cache(), bad, 0), Work(fast.new_cache(), good, 0)]
    made = fast.run_layers_batch(works, start=0, end=6)
    assert torch.equal(made[1], run_in_pieces(fast, good, [3]))


def test_a_call_of_more_rows_than_a_step_takes_is_cut(fast: FastRunner) -> None:
    long, short = states_of(MAX_STEP_ROWS + 30), states_of(7, 1)
    works = [
        Work(fast.new_cache(), short, 0),
        Work(fast.new_cache(), long, 0),
        Work(fast.new_cache(), short, 0),
    ]
    made = fast.run_layers_batch(works, start=0, end=6)
    assert torch.equal(made[1], run_in_pieces(fast, long, [len(long)]))
    assert torch.equal(made[0], made[2])


def test_kept_rows_come_in_the_order_asked_for(fast: FastRunner) -> None:
    states = states_of(MAX_STEP_ROWS + 10)
    every = fast.run_closing(fast.new_cache(), states, 0, start=4, keep=range(len(states)))
    keep = [MAX_STEP_ROWS + 3, 2, 5]
    some = fast.run_closing(fast.new_cache(), states, 0, start=4, keep=keep)
    assert torch.equal(some, every[keep])
    assert fast.run_closing(fast.new_cache(), states, 0, start=4, keep=()).shape == (0, VOCAB_SIZE)


def test_the_tokens_of_a_call_are_looked_up_in_one_go(
    fast: FastRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counting(table: Any, token_ids: Any, factor: float) -> Any:
        calls.append(len(token_ids))
        return look_up(table, token_ids, factor)

    monkeypatch.setattr("slicing.fast.runner.look_up", counting)
    ids = [token_ids(rows, seed=rows) for rows in (1, 3, 1)]
    made = fast.run_opening_batch([Work(fast.new_cache(), own, 0) for own in ids], end=2)
    assert calls == [5]
    for own, rows in zip(ids, made, strict=True):
        assert torch.equal(rows, fast.run_opening(fast.new_cache(), own, 0, end=2))


def test_what_is_made_for_one_session_does_not_hold_the_rows_of_others(fast: FastRunner) -> None:
    works = [Work(fast.new_cache(), states_of(rows), 0) for rows in (1, 40)]
    states = fast.run_layers_batch(works, start=0, end=6)
    logits = fast.run_closing_batch(works, start=NUM_LAYERS)
    for made in (*states, *logits):
        assert made.untyped_storage().nbytes() == made.nbytes


def test_the_head_alone_reads_no_session(fast: FastRunner) -> None:
    logits = fast.run_closing(fast.new_cache(), states_of(3), 50, start=NUM_LAYERS)
    assert logits.shape == (1, VOCAB_SIZE)


def test_a_session_rolled_back_gives_the_same_bits(fast: FastRunner) -> None:
    states = states_of(80)
    cache = fast.new_cache()
    fast.run_layers(cache, states[:70], 0, start=0, end=6)
    fast.run_layers(cache, states_of(10, 9), 60, start=0, end=6)
    again = fast.run_layers(cache, states[60:80], 60, start=0, end=6)
    assert torch.equal(again, run_in_pieces(fast, states, [80])[60:])


def test_a_cancelled_prefill_can_be_taken_up_again(fast: FastRunner) -> None:
    states, looks = states_of(40), iter([False, True])
    cache = fast.new_cache()
    with pytest.raises(Cancelled):
        fast.run_layers(cache, states, 0, start=0, end=6, is_cancelled=lambda: next(looks))
    made = fast.run_layers(cache, states, 0, start=0, end=6)
    assert torch.equal(made, run_in_pieces(fast, states, [40]))


def test_positions_that_are_not_there_are_refused(fast: FastRunner) -> None:
    with pytest.raises(ValueError, match="leaves a gap"):
        fast.run_layers(fast.new_cache(), states_of(1), 4, start=0, end=6)
    with pytest.raises(ValueError, match="the model has 2048"):
        fast.run_layers(fast.new_cache(), states_of(2049), 0, start=0, end=6)
    with pytest.raises(IndexError, match="vocabulary"):
        fast.run_opening(fast.new_cache(), torch.tensor([VOCAB_SIZE]), 0, end=1)
    with pytest.raises(AssertionError, match="holds"):
        fast.run_layers(fast.new_cache(), states_of(1), 0, start=3, end=NUM_LAYERS + 1)


def test_a_runner_may_hold_two_ranges(model: PreTrainedModel, fast: FastRunner) -> None:
    ends = fast_of(model, Parts(((0, 1), (5, 6)), opening=True, closing=True))
    first, last = ends.new_cache(), ends.new_cache()
    ids, middle = token_ids(6), fast.new_cache()
    states = ends.run_opening(first, ids, 0, end=1)
    states = fast.run_layers(middle, states, 0, start=1, end=5)
    logits = ends.run_closing(last, states, 0, start=5)
    whole = fast.new_cache()
    expected = fast.run_closing(whole, fast.run_opening(whole, ids, 0, end=3), 0, start=3)
    assert torch.equal(logits, expected)


def test_a_checkpoint_is_loaded_layer_by_layer(
    model: PreTrainedModel, fast: FastRunner, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    told: list[tuple[int, int]] = []
    loaded = load_fast(checkpoint, WHOLE, progress=lambda _stage, done, total: told.append((done, total)))
    plain = PlainRunner.load(checkpoint, WHOLE, dtype=torch.float32)
    assert loaded.layer_hashes == plain.layer_hashes
    assert loaded.form == "fast/fp32"
    assert torch.equal(run_in_pieces(loaded, states_of(9), [9]), run_in_pieces(fast, states_of(9), [9]))
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert all(done <= total for done, total in told)


def test_a_bfloat16_checkpoint_keeps_its_own_bits(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("gemma2")).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = load_fast(open_checkpoint(str(tmp_path)), WHOLE)
    assert loaded.form == "fast/bf16"
    states = states_of(9)
    assert torch.equal(run_in_pieces(loaded, states, [9]), run_in_pieces(fast_of(model.float()), states, [9]))


def test_what_a_bfloat16_checkpoint_stores_in_float32_is_not_rounded(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("mixtral")).bfloat16()
    for block in model.model.layers:
        block.mlp.gate.weight.data = torch.randn_like(block.mlp.gate.weight, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_fast(open_checkpoint(str(tmp_path)), WHOLE)
    assert loaded.form == "fast/bf16"
    states = states_of(9)
    assert torch.equal(run_in_pieces(loaded, states, [9]), run_in_pieces(fast_of(model.float()), states, [9]))
