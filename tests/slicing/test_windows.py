"""Sessions of models with windows, past where their slabs let go: the bits of both runners stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from slicing import slab
from slicing.batch import Work
from slicing.forward_form import ForwardForm
from slicing.invariant import InvariantRunner
from slicing.kv_cache import CannotRollBack, KVCache
from slicing.runner import Parts, PlainRunner
from tests.support.families import NUM_LAYERS, tiny_config, tiny_model, token_ids

WINDOW = 16
FAMILIES = ("gemma3_text", "gpt_oss", "mistral")  # the last has windows in every layer
OTHERS = ("gemma2", "gemma4_text", "cohere2", "phi3", "olmo3", "starcoder2", "exaone4", "qwen2")
PLAIN_ONLY = ("vaultgemma", "llama4_text")  # the last sees chunks
KINDS: dict[str, type[PlainRunner]] = {"plain": PlainRunner, "invariant": InvariantRunner}
ROLLBACK, STEP = 24, 40  # instead of hundreds, so that slabs let go often
MOST = 192  # positions that a slab holds then
LENGTH = 600
CHUNKS = (100, 1, 1, 33, 1, 300, 1, 7, 1, 40, 40, 1)


@pytest.fixture(scope="module", autouse=True)
def _small_slabs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab, "ROLLBACK_ROWS", ROLLBACK)
        patch.setattr(slab, "MAX_STEP_ROWS", STEP)
        assert slab.most_held(WINDOW) == MOST
        yield


@cache
def runner_of(family: str, kind: str) -> PlainRunner:
    model = tiny_model(tiny_config(family, max_position_embeddings=4096))
    return KINDS[kind].from_model(model, Parts.whole(NUM_LAYERS))


def logits_of(runner: PlainRunner, works: Sequence[Work]) -> list[torch.Tensor]:
    """Logits [rows, vocab] of all rows of each work."""
    states = runner.run_opening_batch(works, end=NUM_LAYERS)
    closing = [
        Work(work.cache, rows, work.position, range(work.rows))
        for work, rows in zip(works, states, strict=True)
    ]
    return runner.run_closing_batch(closing, start=NUM_LAYERS)


@cache
def undropped(family: str, seed: int) -> torch.Tensor:
    """Logits [LENGTH, vocab] of the invariant runner at once, of slabs that never let go of anything."""
    runner = runner_of(family, "invariant")
    session = runner.new_cache()
    for layer in windowed(session):
        layer.window, layer._most = None, None
    assert not windowed(session)
    return logits_of(runner, [Work(session, token_ids(LENGTH, seed), 0)])[0]


def windowed(session: KVCache) -> list[slab.SlabLayer]:
    return [
        layer for layer in session.layers if isinstance(layer, slab.SlabLayer) and layer.window is not None
    ]


def bases(session: KVCache) -> list[int]:
    return [layer.base for layer in windowed(session)]


def chunks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for rows in cycle(sizes):
        yield begin, min(begin + rows, LENGTH)
        begin += rows
        if begin >= LENGTH:
            return


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in (*FAMILIES, *OTHERS, *PLAIN_ONLY)]
    + [(family, torch.bfloat16) for family in FAMILIES],
)
def test_the_plain_runner_has_the_bits_of_transformers_in_calls_of_the_same_rows(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(tiny_config(family, max_position_embeddings=4096))
    for (
        parameter
    ) in model.parameters():  # not buffers: a model that is loaded keeps its frequencies in float32
        parameter.data = parameter.data.to(dtype)
    runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
    mine, stock, prompt = runner.new_cache(), DynamicCache(config=model.config), token_ids(LENGTH)
    stock_cache: dict[Any, Any] = {ForwardForm.of(model).cache_argument: stock, "use_cache": True}
    for begin, end in chunks(CHUNKS):
        with torch.inference_mode():
            expected = model(prompt[None, begin:end], **stock_cache).logits[0].float()
        assert torch.equal(
            runner.run_whole(mine, prompt[begin:end], begin, keep=range(end - begin)), expected
        )
    assert min(bases(mine)) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_takes_no_more_than_is_foretold_however_long_it_is(family: str, kind: str) -> None:
    runner = runner_of(family, kind)
    session, prompt = runner.new_cache(), token_ids(LENGTH)
    for begin in range(0, LENGTH, 30):
        runner.run_opening(session, prompt[begin : begin + 30], begin, end=NUM_LAYERS)
        assert session.size_bytes <= runner.cache_bytes(begin + 30)
    assert session.size_bytes == runner.cache_bytes(LENGTH)
    layers = windowed(session)
    each = 2 * 2 * 16 * 4  # a key and a value of two heads of 16 numbers
    assert sum(layer.size_bytes for layer in layers) == len(layers) * MOST * each
    growth = runner.cache_bytes(1 << 14) - runner.cache_bytes(1 << 13)
    assert growth == (NUM_LAYERS - len(layers)) * each << 13


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(family, sizes) for family in FAMILIES for sizes in ((1,), (40,), (LENGTH,), (1, 150), (31, 1, 1))]
    + [(family, CHUNKS) for family in (*FAMILIES, *OTHERS)],
)
def test_the_invariant_runner_gives_the_bits_of_slabs_that_keep_everything(
    family: str, sizes: tuple[int, ...]
) -> None:
    runner = runner_of(family, "invariant")
    session, prompt = runner.new_cache(), token_ids(LENGTH)
    for begin, end in chunks(sizes):
        made = logits_of(runner, [Work(session, prompt[begin:end], begin)])[0]
        assert torch.equal(made, undropped(family, 0)[begin:end])
    assert min(bases(session)) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_goes_back_within_the_allowance_and_is_rebuilt_beyond_it(family: str, kind: str) -> None:
    runner, prompt, other = runner_of(family, kind), token_ids(LENGTH), token_ids(ROLLBACK, seed=7)
    session, fresh = runner.new_cache(), runner.new_cache()
    for begin in range(0, 480, 16):
        runner.run_whole(session, prompt[begin : begin + 16], begin)
        if begin < 448:
            runner.run_whole(fresh, prompt[begin : begin + 16], begin)
    runner.run_whole(fresh, prompt[448:456], 448)
    runner.run_whole(session, prompt[448:456], 448)  # at a lower position: it overwrites
    expected = runner.run_whole(fresh, other, 456)
    assert torch.equal(runner.run_whole(session, other, 456), expected)
    session.truncate(456)
    assert torch.equal(runner.run_whole(session, other, 456), expected)
    for position in (300, 16):
        with pytest.raises(CannotRollBack):
            session.truncate(position)
        with pytest.raises(CannotRollBack):
            runner.run_whole(session, other, position)
    assert session.length == 456 + ROLLBACK
    for begin in range(0, 448, 16):
        runner.run_whole(session, prompt[begin : begin + 16], begin)  # begins anew at 0
    runner.run_whole(session, prompt[448:456], 448)
    assert torch.equal(runner.run_whole(session, other, 456), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [20, 400, 480])
def test_a_fork_gives_the_bits_of_its_origin(family: str, kind: str, length: int) -> None:
    runner, prompt = runner_of(family, kind), token_ids(LENGTH)
    session = runner.new_cache()
    for begin in range(0, length, 20):
        runner.run_whole(session, prompt[begin : begin + 20], begin)
    early = session.fork(length)
    expected = [runner.run_whole(session, prompt[at : at + 1], at) for at in range(length, length + 20)]
    late = session.fork(length)
    for fork in (early, late):
        made = [runner.run_whole(fork, prompt[at : at + 1], at) for at in range(length, length + 20)]
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_a_neighbour_that_cannot_go_back_is_refused_before_anything_is_computed() -> None:
    runner = runner_of("gemma3_text", "invariant")
    session, fresh, prompt = runner.new_cache(), runner.new_cache(), token_ids(LENGTH)
    logits_of(runner, [Work(session, prompt, 0)])
    with pytest.raises(CannotRollBack):
        logits_of(runner, [Work(fresh, prompt[:9], 0), Work(session, prompt[:9], 100)])
    assert (fresh.size_bytes, session.length) == (0, LENGTH)


STEPS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["run", "run", "run", "run", "fork", "truncate", "replay"]),
            st.integers(0, 3),  # of the sessions that are there
            st.sampled_from([1, 1, 2, 17, 24, 40, 70, 250]),  # rows, or positions to go back
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=10,
    max_size=30,
)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=STEPS)
def test_no_schedule_changes_a_bit(family: str, schedule: list[list[tuple[str, int, int]]]) -> None:
    runner = runner_of(family, "invariant")
    sessions: list[KVCache] = [runner.new_cache(), runner.new_cache()]
    for step in schedule:
        running: dict[int, int] = {}
        for action, number, amount in step:
            place = number % 2
            if action == "run":
                running[place] = amount
            else:
                sessions[place] = gone_back(runner, sessions[place], action, amount)
        works = [
            Work(sessions[place], token_ids(LENGTH, place)[at : at + amount], at)
            for place, amount in running.items()
            if (at := sessions[place].length) < LENGTH
        ]
        seeds = [sessions.index(work.cache) for work in works]
        for seed, work, made in zip(seeds, works, logits_of(runner, works) if works else [], strict=True):
            assert torch.equal(made, undropped(family, seed)[work.position : work.position + work.rows])


def gone_back(runner: PlainRunner, session: KVCache, action: str, amount: int) -> KVCache:
    """Take a session back, as far as it goes; what does not go is a new one."""
    at = max(session.length - amount, 0)
    if action == "replay" or not session.can_fork(at):
        fresh: KVCache = runner.new_cache()
        return fresh
    if action == "fork":
        return session.fork(at)
    session.truncate(at)
    return session
