"""Songs, transcriptions and pictures' prompts in one call: nobody's bits depend on who shares it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLConfig

from slicing.batch import Work
from slicing.branches import BranchedCache
from slicing.ends import Parts
from slicing.invariant import InvariantRunner, NotInvariant
from slicing.load_runner import load_runner
from slicing.model_source import open_checkpoint
from slicing.runner import Cancelled, PlainRunner
from slicing.stacks import new_model
from tests.support.tiny_kinds import CODEBOOK, NUM_LAYERS, WIDTH, tiny_model
from tests.support.tiny_sound import save_music, tiny_music

LENGTH = 38  # positions: two blocks of attention, and within every table
WITH_MEMORY = ("musicgen", "whisper", "bart", "t5")


@cache
def invariant(family: str) -> InvariantRunner:
    return InvariantRunner.from_model(tiny_model(family), Parts.whole(NUM_LAYERS))


@cache
def plain(family: str) -> PlainRunner:
    return PlainRunner.from_model(tiny_model(family), Parts.whole(NUM_LAYERS))


@dataclass(frozen=True)
class Script:
    """What a session is fed: of a music model frames for two branches, with a prompt of so many rows each."""

    seed: int
    family: str
    memory_rows: int = 7

    @property
    def branches(self) -> int:
        return 2 if self.family == "musicgen" else 1

    def inputs(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.family == "musicgen":
            frames = torch.randint(CODEBOOK, (LENGTH, 4), generator=generator)
            return frames.repeat_interleave(2, dim=0)
        return torch.randint(4, 100, (LENGTH,), generator=generator)

    def memory(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + self.seed)
        return torch.randn(self.memory_rows * self.branches, WIDTH, generator=generator)

    def new_cache(self, runner: PlainRunner, memory: torch.Tensor | None = None) -> Any:
        caches = [runner.new_cache() for _ in range(self.branches)]
        cache = BranchedCache(caches) if self.branches > 1 else caches[0]
        cache.add_memory(self.memory() if memory is None else memory)
        return cache

    def work(self, cache: Any, begin: int, end: int) -> Work:
        rows = self.inputs()[begin * self.branches : end * self.branches]
        return Work(cache, rows, begin, range(len(rows)))

    def rows(self, made: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return made[begin * self.branches : end * self.branches]


def logits_of(runner: PlainRunner, works: Sequence[Work]) -> list[torch.Tensor]:
    """What the closing end makes of all rows of each work."""
    states = runner.run_opening_batch(works, end=NUM_LAYERS)
    closing = [
        Work(work.cache, rows, work.position, range(work.rows), work.places)
        for work, rows in zip(works, states, strict=True)
    ]
    return runner.run_closing_batch(closing, start=NUM_LAYERS)


@cache
def alone(script: Script) -> torch.Tensor:
    """What a session gets by itself, at once."""
    runner = invariant(script.family)
    return logits_of(runner, [script.work(script.new_cache(runner), 0, LENGTH)])[0]


@pytest.mark.parametrize("family", WITH_MEMORY)
def test_a_session_gives_what_the_plain_runner_gives(family: str) -> None:
    script, runner = Script(0, family), plain(family)
    expected = logits_of(runner, [script.work(script.new_cache(runner), 0, LENGTH)])[0]
    difference = (alone(script) - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-4


def test_a_model_whose_rows_see_what_follows_is_run_text_by_text() -> None:
    with pytest.raises(NotInvariant, match="one by one"):
        InvariantRunner.from_model(tiny_model("bert"), Parts.whole(NUM_LAYERS))


@dataclass
class Session:
    """A session on its way through a schedule."""

    script: Script
    cache: Any = field(repr=False)
    position: int = 0


CALL = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["run", "run", "run", "back", "begin again"]),
        st.sampled_from([1, 1, 1, 2, 5, 13, LENGTH]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda step: step[0],
)


@pytest.mark.parametrize("family", WITH_MEMORY)
@settings(max_examples=6, deadline=None)
@given(schedule=st.lists(CALL, min_size=2, max_size=8))
def test_no_company_changes_a_bit(family: str, schedule: list[list[tuple[int, str, int]]]) -> None:
    runner = invariant(family)
    scripts = [Script(number, family, rows) for number, rows in enumerate((7, 1, 33, 64))]
    sessions = [Session(script, script.new_cache(runner)) for script in scripts]
    for call in schedule:
        running: list[tuple[Session, int, int]] = []
        for number, action, amount in call:
            session = sessions[number]
            if action == "back":
                session.position = max(session.position - amount, 0)
                session.cache.truncate(session.position)
            elif action == "begin again":
                session.cache, session.position = session.script.new_cache(runner), 0
            begin, session.position = session.position, min(session.position + amount, LENGTH)
            if begin < session.position:
                running.append((session, begin, session.position))
        works = [session.script.work(session.cache, begin, end) for session, begin, end in running]
        for (session, begin, end), made in zip(
            running, logits_of(runner, works) if works else [], strict=True
        ):
            assert torch.equal(made, session.script.rows(alone(session.script), begin, end))


def test_eight_songs_are_one_call() -> None:
    runner = invariant("musicgen")
    scripts = [Script(seed, "musicgen", 3 + seed) for seed in range(8)]
    works = [script.work(script.new_cache(runner), 0, 1) for script in scripts]
    before = runner.num_attention_calls
    logits_of(runner, works)
    assert runner.num_attention_calls - before == NUM_LAYERS


def test_a_music_model_is_loaded_so_that_songs_share_calls(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_music(tiny_music(), tmp_path)))
    runner = load_runner(checkpoint, Parts(((0, 2),)))
    assert runner.form.startswith("invariant/")
    assert runner.is_invariant
    assert runner.max_works > 8


def test_slices_of_songs_give_the_bits_of_the_whole() -> None:
    model, script = tiny_model("musicgen"), Script(0, "musicgen")
    first = InvariantRunner.from_model(model, Parts(((0, 1),), opening=True))
    second = InvariantRunner.from_model(model, Parts(((1, NUM_LAYERS),), closing=True))
    caches = [script.new_cache(runner) for runner in (first, second)]
    work = script.work(caches[0], 0, LENGTH)
    states = first.run_opening_batch([work], end=1)[0]
    closing = Work(caches[1], states, 0, range(len(states)))
    assert torch.equal(second.run_closing_batch([closing], start=1)[0], alone(script))


def test_each_session_looks_at_its_own_states() -> None:
    runner = invariant("whisper")
    scripts = [Script(0, "whisper"), Script(0, "whisper")]
    other = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(3))
    caches = [scripts[0].new_cache(runner), scripts[1].new_cache(runner, other)]
    made = logits_of(runner, [s.work(c, 0, 4) for s, c in zip(scripts, caches, strict=True)])
    assert not torch.allclose(made[0], made[1], atol=1e-3)


def test_states_that_are_not_numbers_harm_their_own_session_alone() -> None:
    runner, script = invariant("bart"), Script(0, "bart")
    poisoned = script.new_cache(runner, script.memory() * float("nan"))
    works = [script.work(poisoned, 0, 5), script.work(script.new_cache(runner), 0, 5)]
    made = logits_of(runner, works)
    assert made[0].isnan().all()
    assert torch.equal(made[1], script.rows(alone(script), 0, 5))


def test_a_session_whose_states_did_not_come_is_refused_before_any_other_is_touched() -> None:
    runner, script = invariant("whisper"), Script(0, "whisper")
    whole = script.new_cache(runner)
    before = whole.size_bytes
    with pytest.raises(ValueError, match="did not come"):
        runner.run_opening_batch(
            [script.work(whole, 0, 2), script.work(runner.new_cache(), 0, 2)], end=NUM_LAYERS
        )
    assert whole.size_bytes == before


def test_a_cancelled_call_can_be_made_again_by_each_alone() -> None:
    runner = invariant("musicgen")
    scripts = [Script(seed, "musicgen", 5 + seed) for seed in range(2)]
    caches = [script.new_cache(runner) for script in scripts]
    looks: Iterator[bool] = iter([False, False, True])
    with pytest.raises(Cancelled):
        runner.run_opening_batch(
            [s.work(c, 0, 5) for s, c in zip(scripts, caches, strict=True)],
            end=NUM_LAYERS,
            is_cancelled=lambda: next(looks),
        )
    assert [cache.length for cache in caches] == [0, 0]
    for script, cache_ in reversed(list(zip(scripts, caches, strict=True))):
        made = logits_of(runner, [script.work(cache_, 0, 5)])[0]
        assert torch.equal(made, script.rows(alone(script), 0, 5))


@pytest.mark.parametrize("family", WITH_MEMORY)
@pytest.mark.parametrize("rows", [1, 7, 32, 33])
def test_encoder_states_take_no_more_than_was_foretold(family: str, rows: int) -> None:
    runner, script = invariant(family), Script(0, family, rows)
    cache = script.new_cache(runner)
    logits_of(runner, [script.work(cache, 0, 1)])
    foretold = script.branches * runner.cache_bytes(1) + runner.memory_bytes(rows * script.branches)
    assert cache.size_bytes <= foretold


def test_slices_of_a_model_that_biases_distances_give_the_bits_of_the_whole() -> None:
    model, script = tiny_model("t5"), Script(0, "t5")
    whole = plain("t5")
    cuts = (Parts(((0, 1),), opening=True), Parts(((1, NUM_LAYERS),), closing=True))
    first, second = [InvariantRunner.from_model(model, parts) for parts in cuts]
    caches = [script.new_cache(runner) for runner in (first, second, whole)]
    for begin, end in ((0, 3), (3, 4), (4, LENGTH)):
        states = first.run_opening_batch([script.work(caches[0], begin, end)], end=1)[0]
        closing = Work(caches[1], states, begin, range(len(states)))
        made = second.run_closing_batch([closing], start=1)[0]
        assert torch.equal(made, script.rows(alone(script), begin, end))
        expected = logits_of(whole, [script.work(caches[2], begin, end)])[0]
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


def test_more_rows_than_a_table_of_positions_has_come_in_one_batch() -> None:
    runner = invariant("bart")  # whose forward counts the rows of a call, in a table of 64
    scripts = [Script(seed, "bart") for seed in range(4)]
    works = [script.work(script.new_cache(runner), 0, LENGTH) for script in scripts]
    for script, made in zip(scripts, logits_of(runner, works), strict=True):
        assert torch.equal(made, alone(script))


def test_headless_models_share_calls() -> None:
    runner, stock = invariant("qwen3"), plain("qwen3")
    token_ids = [torch.arange(length) + 5 for length in (9, 3, 20)]
    together = logits_of(runner, [Work(runner.new_cache(), ids, 0) for ids in token_ids])
    for ids, made in zip(token_ids, together, strict=True):
        assert torch.equal(made, logits_of(runner, [Work(runner.new_cache(), ids, 0)])[0])
        expected = logits_of(stock, [Work(stock.new_cache(), ids, 0)])[0]
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


@cache
def seeing() -> tuple[InvariantRunner, PlainRunner]:
    text = {
        "vocab_size": 320,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": WIDTH, "mlp_ratio": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = new_model(Qwen2VLConfig(text_config=text, vision_config=vision), torch.float32).eval()
    parts = Parts.whole(NUM_LAYERS)
    return InvariantRunner.from_model(model, parts), PlainRunner.from_model(model, parts)


def seen(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [rows, width] and places [3, rows] of a prompt with a picture in it."""
    embeds = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(LENGTH).expand(3, -1).clone()
    places[0, 5:17] = 5
    places[1, 5:17] = 5 + torch.arange(12) // 4
    places[2, 5:17] = 5 + torch.arange(12) % 4
    places[:, 17:] -= 8 - seed
    return embeds, places


def test_a_picture_beside_plain_text_changes_no_bit_of_either() -> None:
    runner, stock = seeing()
    assert runner.max_axes == 3
    token_ids = torch.arange(LENGTH) + 4
    embeds, places = seen(1)
    text = logits_of(runner, [Work(runner.new_cache(), token_ids, 0)])[0]
    picture = logits_of(runner, [Work(runner.new_cache(), embeds, 0, places=places)])[0]
    reference = logits_of(stock, [Work(stock.new_cache(), embeds, 0, places=places)])[0]
    torch.testing.assert_close(picture, reference, rtol=1e-3, atol=1e-4)
    caches = [runner.new_cache() for _ in range(3)]
    for begin, end in ((0, 1), (1, 20), (20, 22), (22, LENGTH)):
        others = seen(2)
        works = [
            Work(caches[0], token_ids[begin:end], begin),
            Work(caches[1], embeds[begin:end], begin, places=places[:, begin:end]),
            Work(caches[2], others[0][begin:end], begin, places=others[1][:, begin:end]),
        ]
        made = logits_of(runner, works)
        assert torch.equal(made[0], text[begin:end])
        assert torch.equal(made[1], picture[begin:end])


def test_tokens_after_a_picture_stand_at_its_places() -> None:
    runner, stock = seeing()
    embeds, places = seen(3)
    caches = [runner.new_cache(), stock.new_cache()]
    for made_by, cache_ in zip((runner, stock), caches, strict=True):
        logits_of(made_by, [Work(cache_, embeds[:30], 0, places=places[:, :30])])
    after = Work(caches[0], torch.tensor([7]), 30, places=torch.full((3, 1), 25))
    made = logits_of(runner, [after])[0]
    expected = logits_of(stock, [Work(caches[1], torch.tensor([7]), 30, places=after.places)])[0]
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


def test_places_that_the_model_does_not_have_are_refused_before_anything_is_computed() -> None:
    runner = seeing()[0]
    caches = [runner.new_cache(), runner.new_cache()]
    works = [Work(caches[0], torch.arange(4) + 4, 0)]
    works.append(Work(caches[1], torch.arange(4) + 4, 0, places=torch.zeros(4, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="axes"):
        runner.run_opening_batch(works, end=NUM_LAYERS)
    assert [cache_.size_bytes for cache_ in caches] == [0, 0]
