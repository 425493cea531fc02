"""Rows side by side, several streams, rotary positions with axes, headless models and encoders at a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from routing import wire
from routing.errors import ErrorCode
from routing.sealing import decode_entry, encode_entry
from routing.types import Answer, AnswerKind, HopEntry, NodeId, Prefix, Step, StepFlag, Want, WireDtype
from slicing.batch import Work
from slicing.branches import BranchedCache
from slicing.logits_rule import WhisperRule
from slicing.sampler import SamplingParams
from slicing.streams import StreamSampler
from tests.node.fake_runner import (
    CACHE_BYTES_PER_POSITION,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    NUM_LAYERS,
    VOCAB_SIZE,
    FakeRunner,
)
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_resuming import sent_between, three
from tests.node.test_steps import some_rows

CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])
GUIDED = SamplingParams(temperature=0.8, top_k=12, seed=5, guidance_scale=3.0)
GREEDY = replace(GUIDED, temperature=0.0)


class WholeBranches:
    """The uncut model over a session of so many branches."""

    def __init__(self, branches: int = 2, memory: np.ndarray | None = None, **options: Any) -> None:
        self.runner = FakeRunner(**options)
        caches = [self.runner.new_cache() for _ in range(branches)]
        self.cache: Any = BranchedCache(caches) if branches > 1 else caches[0]
        self.branches = branches
        if memory is not None:
            self.cache.add_memory(torch.from_numpy(memory.copy()))

    def run(self, position: int, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        self.cache.truncate(position)
        at = None if places is None else torch.from_numpy(places.astype(np.int64))
        work = Work(self.cache, torch.from_numpy(rows.copy()), position, None, at)
        return self.runner.run_layers_batch([work], start=0, end=NUM_LAYERS)[0].numpy()

    def logits(self, position: int, ids: np.ndarray, keep: list[int]) -> torch.Tensor:
        """Of every kept row, from ids."""
        self.cache.truncate(position)
        work = Work(self.cache, torch.from_numpy(ids.astype(np.int64)), position, keep)
        states = self.runner.run_opening_batch([work], end=NUM_LAYERS)[0]
        return self.runner.run_closing_batch([replace(work, inputs=states)], start=NUM_LAYERS)[0]


def values(script: Script, answer: Answer) -> np.ndarray:
    is_sealed = StepFlag.SEALED in answer.flags
    return rows_of(wire.open_answer(script.answer_key, answer) if is_sealed else answer)


async def halves(rig: Rig, **options: Any) -> tuple[tuple[Node, int, int], tuple[Node, int, int]]:
    nodes = [
        await rig.add_fake_node(start, end, runner=FakeRunner(**options)) for start, end in ((0, 3), (3, 6))
    ]
    return (nodes[0], 0, 3), (nodes[1], 3, 6)


# Branches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [2, 3, 8])
async def test_branches_run_side_by_side_and_see_nothing_of_each_other(rig: Rig, branches: int) -> None:
    memory = some_rows(3 * branches, 50)
    changes = {"branches": branches, "memory_rows": len(memory)}
    script = rig.script(*await halves(rig, takes_memory=True), changes=changes)
    whole = WholeBranches(branches, memory)
    await script.open()
    await script.remember(1, memory)
    prompt = some_rows(4 * branches)
    answer = await script.run(2, 0, prompt, want=Want.ALL)
    assert (answer.rows, answer.position) == (4 * branches, 0)
    assert np.array_equal(values(script, answer), whole.run(0, prompt))
    for frame in range(4, 7):
        rows = some_rows(branches, frame)
        answer = await script.run(frame - 1, frame, rows)
        assert (answer.rows, answer.position) == (branches, frame)
        assert np.array_equal(values(script, answer), whole.run(frame, rows))


async def test_wanted_positions_bring_the_rows_of_all_branches(rig: Rig) -> None:
    script = rig.script(*await halves(rig), changes={"branches": 2})
    await script.open()
    rows = some_rows(10)
    answer = await script.run(1, 0, rows, want=Want.LIST, want_rows=(1, 4))
    assert (answer.rows, answer.position) == (4, 1)
    assert np.array_equal(values(script, answer), WholeBranches().run(0, rows)[[2, 3, 8, 9]])


async def test_a_prefill_in_pieces_is_cut_between_positions(rig: Rig) -> None:
    """With more works in a call, long steps are cut; three branches fit no piece by chance."""
    runners = [FakeRunner(max_works=4) for _ in range(2)]
    hops = [
        (await rig.add_fake_node(start, end, runner=runner), start, end)
        for runner, (start, end) in zip(runners, ((0, 3), (3, 6)), strict=True)
    ]
    script = rig.script(*hops, changes={"branches": 3})
    await script.open()
    rows = some_rows(3 * 60)
    answer = await script.run(1, 0, rows, want=Want.ALL)
    pieces = [rows for call in runners[0].calls for rows in call]
    assert len(pieces) > 1
    assert all(rows % 3 == 0 for rows in pieces)
    assert np.allclose(values(script, answer), WholeBranches(3).run(0, rows), rtol=1e-4)


async def test_rows_of_some_branches_only_are_refused(rig: Rig) -> None:
    hops = await halves(rig, takes_memory=True)
    script = rig.script(*hops, changes={"branches": 2, "memory_rows": 8})
    await script.open()
    await script.remember(1, some_rows(3))
    assert (await script.failure()).code == ErrorCode.MALFORMED
    await script.remember(1, some_rows(4))
    await script.send(2, 0, some_rows(5))
    assert (await script.failure()).code == ErrorCode.MALFORMED
    await script.run(2, 0, some_rows(6))


async def test_positions_are_counted_once_for_all_branches(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6), changes={"branches": 4, "max_positions": 5, "room": 5})
    await script.open()
    await script.run(1, 0, some_rows(16))
    assert node.stats.kv_bytes == 4 * 64 * CACHE_BYTES_PER_POSITION
    await script.send(2, 4, some_rows(8))
    assert (await script.failure()).code == ErrorCode.TOO_BIG
    await script.send(2, 5, some_rows(4))
    assert (await script.failure()).code == ErrorCode.TOO_BIG
    await script.run(2, 4, some_rows(4))
    await script.first.send(script.cancel())
    await until(lambda: node.stats.kv_bytes == 0)
    assert not any(cache.is_open for cache in node.runner.caches)


async def test_a_roll_back_into_a_step_is_repeated_to_a_new_next_hop(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6), changes={"branches": 2})
    await script.open()
    await script.run(1, 0, some_rows(10))
    await script.run(2, 2, some_rows(2, 3))  # undoes three of five positions
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=2)).next_step == 3
    answer = await script.run(3, 3, some_rows(2, 4))
    whole = WholeBranches()
    whole.run(0, some_rows(10)[:4])
    whole.run(2, some_rows(2, 3))
    assert np.array_equal(values(script, answer), whole.run(3, some_rows(2, 4)))
    repeated = [m for m in sent_between(rig, a, spare) if isinstance(m, Step)]
    assert [(step.step, step.rows) for step in repeated] == [(1, 4), (2, 2), (3, 2)]


async def test_more_branches_than_a_runner_has_are_refused_when_they_open(rig: Rig) -> None:
    node = await rig.add_fake_node()
    node.runner.max_branches = 1
    script = rig.script((node, 0, 6), changes={"branches": 2})
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED
    assert node.stats.kv_bytes == 0


async def test_branches_and_a_held_prefix_are_never_combined(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    changes = {"branches": 2, "confirms": True, "prefixes": (Prefix(16, bytes(16)),)}
    script = rig.script((node, 0, 6), changes=changes)
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED


# Streams --------------------------------------------------------------------------------------------------


async def thin(
    rig: Rig, params: SamplingParams, *, streams: int, branches: int, num_nodes: int = 2, **changes: Any
) -> Script:
    cuts = np.linspace(0, NUM_LAYERS, num_nodes + 1).astype(int).tolist()
    takes_memory = "memory_rows" in changes
    runners = [FakeRunner(num_streams=streams, takes_memory=takes_memory) for _ in range(num_nodes)]
    hops = [
        (await rig.add_fake_node(start, end, runner=runner), start, end)
        for runner, (start, end) in zip(runners, pairwise(cuts), strict=True)
    ]
    await rig.gateway.endpoint.dial(hops[-1][0].address)
    script = rig.script(
        *hops,
        opens=True,
        closes=True,
        sampling={"params": params.to_map()},
        changes={"streams": streams, "branches": branches} | changes,
    )
    await script.open()
    return script


def repeated(ids: np.ndarray, branches: int) -> np.ndarray:
    return np.repeat(ids, branches, axis=0)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("streams", [1, 4])
async def test_drawn_streams_are_those_of_the_whole_model(
    rig: Rig, streams: int, branches: int, num_nodes: int
) -> None:
    memory = some_rows(2 * branches, 8)
    script = await thin(
        rig, GUIDED, streams=streams, branches=branches, num_nodes=num_nodes, memory_rows=len(memory)
    )
    whole = WholeBranches(branches, memory, num_streams=streams)
    sampler = StreamSampler(GUIDED, VOCAB_SIZE, num_streams=streams, branches=branches)
    await script.remember(1, memory)
    ids, position = np.arange(3 * streams).reshape(3, streams) % VOCAB_SIZE, 0
    for number in range(2, 10):
        rows = repeated(ids, branches)
        fed = rows if streams > 1 else rows[:, 0]
        answer = await script.run(number, position, fed)
        last = list(range(len(rows) - branches, len(rows)))
        logits = whole.logits(position, fed, last).reshape(branches, streams, VOCAB_SIZE)
        position += len(ids)
        expected = sampler.sample(logits, position)
        sampler.observe(expected)
        assert (answer.kind, answer.rows, answer.position) == (AnswerKind.TOKEN_IDS, 1, position - 1)
        drawn = np.frombuffer(answer.payload, "<u2" if streams > 1 else "<u4")
        assert drawn.tolist() == expected
        ids = np.array([expected])


async def test_greedy_answers_hold_a_shortlist_for_each_stream(rig: Rig) -> None:
    script = await thin(rig, GREEDY, streams=4, branches=2)
    ids = repeated(np.arange(8).reshape(2, 4), 2)
    answer = await script.run(1, 0, ids, want=Want.ALL)
    assert (answer.kind, answer.rows, len(answer.payload)) == (AnswerKind.CANDIDATES, 2, 2 * 4 * 8 * 8)
    shortlists = np.frombuffer(answer.payload, CANDIDATE).reshape(2, 4, 8)
    whole = WholeBranches(2, num_streams=4)
    sampler = StreamSampler(GREEDY, VOCAB_SIZE, num_streams=4, branches=2)
    logits = whole.logits(0, ids, [0, 1, 2, 3]).reshape(2, 2, 4, VOCAB_SIZE)
    for frame in range(2):
        expected_ids, expected_logits = sampler.shortlist(logits[frame], 8)
        assert np.array_equal(shortlists[frame]["id"], expected_ids.numpy())
        assert np.array_equal(shortlists[frame]["logit"], expected_logits.numpy())


async def test_going_back_takes_the_draws_of_all_streams_back(rig: Rig) -> None:
    penalised = replace(GUIDED, frequency_penalty=1.5)
    script = await thin(rig, penalised, streams=4, branches=2)
    fed = [repeated(np.full((1, 4), number), 2) for number in range(6)]
    answers = [bytes((await script.run(n + 1, n, fed[n])).payload) for n in range(6)]
    again = [bytes((await script.run(n + 5, n, fed[n])).payload) for n in range(2, 6)]
    assert again == answers[2:]


async def test_the_id_after_the_last_is_fed_to_streams_that_have_not_begun(rig: Rig) -> None:
    script = await thin(rig, GUIDED, streams=4, branches=1)
    await script.run(1, 0, [[1, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE]])
    for wrong in ([[1, 2, 3, VOCAB_SIZE + 1]], [[1, -1, 2, 3]]):
        await script.send(2, 1, wrong)
        assert (await script.failure()).code == ErrorCode.MALFORMED
    await script.run(2, 1, [[1, 2, VOCAB_SIZE, VOCAB_SIZE]])


@pytest.mark.parametrize("changes", [{"streams": 1}, {"streams": 3}, {"branches": 3}])
async def test_ends_that_the_model_does_not_have_are_refused(rig: Rig, changes: dict[str, int]) -> None:
    asked = {"streams": 4, "branches": 1} | changes
    hop = (await rig.add_fake_node(runner=FakeRunner(num_streams=4)), 0, 6)
    script = rig.script(
        hop, opens=True, closes=True, sampling={"params": GUIDED.to_map()}, changes=dict(asked)
    )
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED


async def test_ids_of_too_few_streams_are_refused(rig: Rig) -> None:
    script = await thin(rig, GUIDED, streams=4, branches=1)
    await script.send(1, 0, [[1, 2, 3]])
    assert (await script.failure()).code == ErrorCode.MALFORMED
    await script.run(1, 0, [[1, 2, 3, 4]])


def test_everything_that_says_how_to_draw_fits_an_entry() -> None:
    rule = WhisperRule(
        50, tuple(range(90)), (220, 50), first_timestamp=364, first_limit=50, forced=((259, 358),)
    )
    params = replace(GUIDED, rule=rule, logit_bias=((3, 1.5), (4, -2.0)))
    zeros, wires = bytes(32), (WireDtype.FLOAT32, WireDtype.FLOAT32)
    entry = HopEntry(
        zeros, 0, 1, NodeId(zeros), zeros, 0, 6, *wires, 448, 60, sampling={"params": params.to_map()}
    )
    read = decode_entry(encode_entry(entry)).sampling
    assert read is not None
    assert SamplingParams.from_map(read["params"]) == params


# Axes -----------------------------------------------------------------------------------------------------


def some_places(count: int, axes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MAX_POSITIONS, (axes, count))


async def test_rotary_positions_reach_every_hop(rig: Rig) -> None:
    hops = await halves(rig)
    script, whole = rig.script(*hops, changes={"axes": 3}), WholeBranches(1)
    await script.open()
    rows, places = some_rows(5), some_places(5)
    answer = await script.run(1, 0, rows, places=places, want=Want.ALL)
    assert np.array_equal(values(script, answer), whole.run(0, rows, places))
    row, place = some_rows(1, 4), some_places(1, seed=4)
    assert np.array_equal(values(script, await script.run(2, 5, row, places=place)), whole.run(5, row, place))
    steps = [m for m in sent_between(rig, hops[0][0], hops[1][0]) if isinstance(m, Step)]
    tails = [bytes(step.payload)[step.rows * HIDDEN_SIZE * 4 :] for step in steps]
    assert tails == [places.astype("<i4").tobytes(), place.astype("<i4").tobytes()]


async def test_positions_of_branches_come_row_by_row(rig: Rig) -> None:
    script, whole = rig.script(*await halves(rig), changes={"axes": 2, "branches": 2}), WholeBranches(2)
    await script.open()
    rows, places = some_rows(8), some_places(8, 2)
    answer = await script.run(1, 0, rows, places=places, want=Want.ALL)
    assert np.array_equal(values(script, answer), whole.run(0, rows, places))


async def test_pieces_have_the_positions_of_their_rows(rig: Rig) -> None:
    node = await rig.add_fake_node(runner=FakeRunner(max_works=4))
    script, whole = rig.script((node, 0, 6), changes={"axes": 3}), WholeBranches(1)
    await script.open()
    rows, places = some_rows(90), some_places(90)
    answer = await script.run(1, 0, rows, places=places, want=Want.ALL)
    assert len(node.runner.calls) > 1
    assert np.allclose(values(script, answer), whole.run(0, rows, places), rtol=1e-4)


@pytest.mark.parametrize("wire_dtype", [WireDtype.FLOAT32, WireDtype.BFLOAT16])
async def test_a_new_next_hop_gets_the_positions_with_the_rows_that_are_left(
    rig: Rig, wire_dtype: WireDtype
) -> None:
    """Of another element type, too: positions are no floats."""
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6), changes={"axes": 3})
    await script.open()
    await script.run(1, 0, some_rows(5), places=some_places(5))
    await script.run(2, 2, some_rows(1, 6), places=some_places(1, seed=6))
    script.entry_changes = {0: {"wire_out": wire_dtype}, 1: {"wire_in": wire_dtype}}
    await script.reopen((a, 0, 3), (spare, 3, 6), answered=2)
    steps = [m for m in sent_between(rig, a, spare) if isinstance(m, Step)]
    assert [(step.step, step.rows) for step in steps] == [(1, 2), (2, 1)]
    tails = [bytes(step.payload)[-step.rows * 3 * 4 :] for step in steps]
    assert tails == [
        some_places(5)[:, :2].astype("<i4").tobytes(),
        some_places(1, seed=6).astype("<i4").tobytes(),
    ]
    if wire_dtype is WireDtype.FLOAT32:
        whole = WholeBranches(1)
        whole.run(0, some_rows(5)[:2], some_places(5)[:, :2])
        whole.run(2, some_rows(1, 6), some_places(1, seed=6))
        row, place = some_rows(1, 7), some_places(1, seed=7)
        answer = await script.run(3, 3, row, places=place)
        assert np.array_equal(values(script, answer), whole.run(3, row, place))


@pytest.mark.parametrize(
    "wrong", [[[-1], [0], [0]], [[0], [0], [-(2**31)]], [[0], [MAX_POSITIONS], [0]], [[2**31 - 1], [0], [0]]]
)
async def test_positions_that_the_model_does_not_have_are_refused(rig: Rig, wrong: list[list[int]]) -> None:
    script = rig.script(*await halves(rig), changes={"axes": 3})
    await script.open()
    await script.send(1, 0, some_rows(1), places=wrong)
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.MALFORMED, 0)
    await script.run(1, 0, some_rows(1), places=some_places(1))


@pytest.mark.parametrize("axes", [0, 2, 4])
async def test_rows_without_their_positions_are_refused(rig: Rig, axes: int) -> None:
    script = rig.script(*await halves(rig), changes={"axes": 3})
    await script.open()
    await script.send(1, 0, some_rows(2), places=some_places(2, axes))
    assert (await script.failure()).code == ErrorCode.MALFORMED
    await script.run(1, 0, some_rows(2), places=some_places(2))


async def test_positions_that_the_model_counts_itself_are_refused(rig: Rig) -> None:
    hops = await halves(rig)
    hops[0][0].runner.max_axes = 0
    script = rig.script(*hops, changes={"axes": 3})
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED


async def test_sessions_that_share_calls_have_the_axes_of_the_model(rig: Rig) -> None:
    """Calls have positions of one number of axes: a session of another would have everybody's computed again."""
    node = await rig.add_fake_node(runner=FakeRunner(max_works=4))
    for axes in (1, 2):
        script = rig.script((node, 0, 6), changes={"axes": axes})
        await script.open()
        assert (await script.failure()).code == ErrorCode.MALFORMED
    for axes in (0, 3):
        script = rig.script((node, 0, 6), changes={"axes": axes})
        await script.open()
        await script.run(1, 0, some_rows(1), places=some_places(1, axes))


# Models without a head, and encoders ----------------------------------------------------------------------


async def test_a_headless_model_gives_hidden_states_and_draws_nothing(rig: Rig) -> None:
    hops = await halves(rig, is_headless=True)
    script = rig.script(*hops, opens=True, closes=True)
    await script.open()
    answer = await script.run(1, 0, [3, 1, 4], want=Want.ALL)
    answer = wire.open_answer(script.answer_key, answer)
    assert (answer.kind, answer.rows) == (AnswerKind.HIDDEN_STATES, 3)
    whole = WholeBranches(1, is_headless=True)
    expected = whole.logits(0, np.array([3, 1, 4]), [0, 1, 2])
    assert np.array_equal(rows_of(answer), expected.numpy())


async def test_an_encoder_takes_one_text_after_the_other(rig: Rig) -> None:
    hops = await halves(rig, is_causal=False, is_headless=True)
    script = rig.script(*hops, opens=True, closes=True)
    await script.open()
    for number, text in enumerate(([3, 1, 4], [5, 9, 2, 6], [1]), start=1):
        answer = wire.open_answer(script.answer_key, await script.run(number, 0, text, want=Want.ALL))
        whole = WholeBranches(1, is_causal=False, is_headless=True)
        expected = whole.logits(0, np.array(text), list(range(len(text))))
        assert np.array_equal(rows_of(answer), expected.numpy())


async def test_an_encoder_takes_no_part_of_a_text(rig: Rig) -> None:
    hops = await halves(rig, is_causal=False, is_headless=True)
    script = rig.script(*hops, opens=True, closes=True)
    await script.open()
    await script.run(1, 0, [3, 1, 4])
    await script.send(2, 3, [1])
    failure = await script.failure()
    assert (failure.code, failure.step) == (ErrorCode.MALFORMED, 2)
    await script.run(2, 0, [1, 5])


async def test_an_encoders_text_is_never_cut_in_pieces(rig: Rig) -> None:
    runner = FakeRunner(max_works=4, is_causal=False, is_headless=True)
    node = await rig.add_fake_node(runner=runner)
    script = rig.script((node, 0, 6), opens=True, closes=True)
    await script.open()
    await script.run(1, 0, [1] * 150)
    assert all(call == [150] for call in runner.calls)
