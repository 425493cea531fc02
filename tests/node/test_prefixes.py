"""What a node keeps of sessions that ended, and what a session that begins in the same way makes of it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node import prefix_store
from routing import sealing, wire
from routing.errors import ErrorCode
from routing.types import Answer, Failure, Keep, Opened, Prefix, StepFlag
from tests.node.fake_runner import CACHE_BYTES_PER_POSITION
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_steps import Whole, some_rows

NAMES = tuple(bytes([number]) * 16 for number in range(4))
FIRST = {"flags": StepFlag.REPLAY}  # of a session that begins with a prefix: numbers before it were left out


def keep(script: Script, names: tuple[bytes, ...], **changes: Any) -> Keep:
    proof = wire.proof(script.route_key, sealing.KEEP, script.session_id, script.epoch)
    return replace(Keep(script.session_id, script.epoch, proof, names), **changes)


async def kept_rows(
    script: Script, *nodes: Node, rows: int = 40, names: tuple[bytes, ...] = NAMES[:2]
) -> None:
    """A session of so many rows that ends, and is kept on these nodes."""
    await script.open()
    await script.run(1, 0, some_rows(rows))
    await script.first.send(keep(script, names))
    await until(lambda: all(not node.stats.num_sessions for node in nodes))


async def begin(script: Script, *prefixes: tuple[int, bytes]) -> int:
    """Open a session that may go on from these; how much of it is held all the way."""
    named = tuple(Prefix(length, end) for length, end in prefixes)
    script.changes |= {"confirms": True, "prefixes": named}
    await script.open()
    return (await script.gateway.receive(Opened)).held


def values(script: Script, answer: Answer) -> np.ndarray:
    """Rows of an answer that may have come up the chain."""
    is_sealed = StepFlag.SEALED in answer.flags
    return rows_of(wire.open_answer(script.answer_key, answer) if is_sealed else answer)


async def test_a_session_goes_on_from_what_another_left_with_the_same_bits(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    first, second = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await kept_rows(first, node)
    assert await begin(second, (48, NAMES[3]), (32, NAMES[1]), (16, NAMES[0])) == 32
    answer = await second.run(2, 32, some_rows(9, 7), **FIRST)
    whole = Whole()
    whole.run(0, some_rows(40))
    assert np.array_equal(values(second, answer), whole.run(32, some_rows(9, 7))[-1:])
    assert node.stats.rows_run == 40 + 9
    assert (node.stats.prefix_hits, node.stats.prefix_tokens, node.stats.prefix_misses) == (1, 32, 0)


async def test_a_kept_prefix_serves_many_and_is_not_changed_by_them(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 6)), node)
    for seed in (1, 2, 3):
        script = rig.script((node, 0, 6))
        assert await begin(script, (16, NAMES[0])) == 16
        whole = Whole()
        whole.run(0, some_rows(40))
        answer = await script.run(1, 16, some_rows(3, seed), **FIRST)
        assert np.array_equal(values(script, answer), whole.run(16, some_rows(3, seed))[-1:])
    assert node.stats.num_prefixes == 1


async def test_a_chain_holds_what_all_its_hops_hold(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3, keeps=True), await rig.add_fake_node(3, 6, keeps=True)
    await kept_rows(rig.script((a, 0, 3), (b, 3, 6)), a, b, rows=50, names=NAMES[:3])
    await kept_rows(rig.script((a, 0, 3)), a, rows=70, names=NAMES)
    script = rig.script((a, 0, 3), (b, 3, 6))
    assert await begin(script, (64, NAMES[3]), (48, NAMES[2])) == 48
    answer = await script.run(1, 48, some_rows(2, 5), **FIRST)
    whole = Whole()
    whole.run(0, some_rows(50))
    assert np.array_equal(values(script, answer), whole.run(48, some_rows(2, 5))[-1:])
    assert (a.stats.prefix_tokens, b.stats.prefix_tokens) == (64, 48)


async def test_a_hop_that_holds_nothing_makes_the_chain_hold_nothing(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3, keeps=True), await rig.add_fake_node(3, 6, keeps=True)
    await kept_rows(rig.script((a, 0, 3)), a)
    script = rig.script((a, 0, 3), (b, 3, 6))
    assert await begin(script, (32, NAMES[1])) == 0
    answer = await script.run(1, 0, some_rows(3))
    assert np.array_equal(values(script, answer), Whole().run(0, some_rows(3))[-1:])
    assert (a.stats.prefix_hits, b.stats.prefix_misses) == (1, 1)


async def test_nobody_finds_a_prefix_without_its_name(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 6)), node)
    for asked in ((32, secrets.token_bytes(16)), (16, NAMES[1]), (32, NAMES[0]), (31, NAMES[1])):
        assert await begin(rig.script((node, 0, 6)), asked) == 0


async def test_other_layers_of_the_same_slice_are_another_prefix(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 3)), node)
    assert await begin(rig.script((node, 3, 6)), (32, NAMES[1])) == 0


async def test_a_keep_without_proof_changes_nothing(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(40))
    await script.first.send(keep(script, NAMES[:2], proof=bytes(32)))
    cancel = script.cancel()
    await script.first.send(keep(script, NAMES[:2], proof=cancel.proof))  # a proof for something else
    await script.run(2, 40, some_rows(1))
    assert (node.stats.num_sessions, node.stats.num_prefixes) == (1, 0)


@pytest.mark.parametrize(
    ("rows", "names"),
    [(40, NAMES[:3]), (3, NAMES[:1]), (40, NAMES[:1] * 200)],
    ids=["long", "short", "flood"],
)
async def test_more_than_was_computed_is_not_kept_and_the_session_ends(
    rig: Rig, rows: int, names: tuple[bytes, ...]
) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 6)), node, rows=rows, names=names)
    assert (node.stats.num_prefixes, node.stats.kv_bytes) == (0, 0)
    assert not node.runner.caches[0].is_open


async def test_a_runner_whose_bits_depend_on_row_groups_keeps_nothing(rig: Rig) -> None:
    node = await rig.add_fake_node()
    await kept_rows(rig.script((node, 0, 6)), node)
    assert (node.stats.num_prefixes, node.stats.kv_bytes) == (0, 0)


async def test_a_session_that_is_computing_ends_without_being_kept(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(40))
    node.runner.hold()
    await script.send(2, 40, some_rows(1))
    await until(node.runner.entered.is_set)
    await script.first.send(keep(script, NAMES[:2]))
    await until(lambda: node.stats.num_sessions == 0)
    node.runner.release()
    await until(lambda: node.stats.kv_bytes == 0)
    assert node.stats.num_prefixes == 0


async def test_kept_prefixes_make_way_for_sessions_the_least_used_first(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True, kv_budget_bytes=190 * CACHE_BYTES_PER_POSITION)
    for number in range(2):
        script = rig.script((node, 0, 6))
        await kept_rows(script, node, rows=17, names=NAMES[number : number + 1])
    assert await begin(rig.script((node, 0, 6)), (16, NAMES[0])) == 16  # used now: the other one goes first
    assert node.stats.num_prefixes == 2
    script = rig.script((node, 0, 6), changes={"room": 64})
    await script.open()
    await script.run(1, 0, some_rows(64))
    assert (node.stats.num_prefixes, node.stats.prefixes_evicted) == (1, 1)
    assert await begin(rig.script((node, 0, 6)), (16, NAMES[1])) == 0
    assert await begin(rig.script((node, 0, 6)), (16, NAMES[0])) == 16


async def test_a_prefix_that_a_session_is_about_to_take_over_stays(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True, kv_budget_bytes=130 * CACHE_BYTES_PER_POSITION)
    await kept_rows(rig.script((node, 0, 6)), node, rows=17, names=NAMES[:1])
    script = rig.script((node, 0, 6))
    assert await begin(script, (16, NAMES[0])) == 16
    other = rig.script((node, 0, 6), changes={"room": 128})
    await other.open()
    assert (await other.failure()).code == ErrorCode.BUSY
    await script.run(1, 16, some_rows(1), **FIRST)
    assert node.stats.num_prefixes == 1


async def test_where_there_is_no_room_for_both_a_session_takes_the_kept_one(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True, kv_budget_bytes=100 * CACHE_BYTES_PER_POSITION)
    await kept_rows(rig.script((node, 0, 6)), node)
    script = rig.script((node, 0, 6), changes={"room": 60})
    assert await begin(script, (32, NAMES[1])) == 32
    assert (node.stats.num_prefixes, node.stats.kv_bytes) == (0, 64 * CACHE_BYTES_PER_POSITION)
    answer = await script.run(1, 32, some_rows(2, 3), **FIRST)
    whole = Whole()
    whole.run(0, some_rows(40))
    assert np.array_equal(values(script, answer), whole.run(32, some_rows(2, 3))[-1:])
    node.server.sweep()
    assert node.runner.caches[0].is_open  # the session's now
    await script.first.send(keep(script, NAMES[:2]))
    await until(lambda: node.stats.num_prefixes == 1)
    node.server.close()
    assert not any(cache.is_open for cache in node.runner.caches)


async def test_a_session_that_ends_before_its_first_step_frees_what_it_was_to_take(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True, kv_budget_bytes=100 * CACHE_BYTES_PER_POSITION)
    await kept_rows(rig.script((node, 0, 6)), node)
    script = rig.script((node, 0, 6), changes={"room": 60})
    await begin(script, (32, NAMES[1]))
    await script.first.send(script.cancel())
    await until(lambda: node.stats.num_sessions == 0)
    node.server.sweep()
    assert node.stats.kv_bytes == 0
    assert not any(cache.is_open for cache in node.runner.caches)


async def test_what_nobody_uses_is_let_go(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 6)), node)
    node.now[0] += prefix_store.TTL_S + 1
    node.server.sweep()
    assert (node.stats.num_prefixes, node.stats.prefix_bytes, node.stats.kv_bytes) == (0, 0, 0)
    assert not node.runner.caches[0].is_open


async def test_one_gateway_keeps_only_so_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "MAX_KEPT_OF_GATEWAY", 2)
    node = await rig.add_fake_node(keeps=True)
    for number in range(4):
        await kept_rows(rig.script((node, 0, 6)), node, rows=17, names=NAMES[number : number + 1])
    assert (node.stats.num_prefixes, node.stats.prefixes_evicted) == (2, 2)


async def test_a_slice_that_goes_takes_its_prefixes_along(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    await kept_rows(rig.script((node, 0, 6)), node)
    (held,) = node.slices.held
    node.slices.remove(held)
    assert (node.stats.num_prefixes, node.stats.kv_bytes) == (0, 0)


async def test_a_survivor_that_began_with_a_prefix_is_rebuilt_where_its_next_hop_is_new(rig: Rig) -> None:
    a, b, spare = [await rig.add_fake_node(*span, keeps=True) for span in ((0, 3), (3, 6), (3, 6))]
    await kept_rows(rig.script((a, 0, 3), (b, 3, 6)), a, b)
    script = rig.script((a, 0, 3), (b, 3, 6))
    assert await begin(script, (32, NAMES[1])) == 32
    await script.run(2, 32, some_rows(1, 1), **FIRST)
    script.changes = {}
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=2)).next_step == 1
    await script.send(1, 0, some_rows(40)[:32], want=0, **FIRST)
    await script.send(2, 32, some_rows(1, 1), want=0, **FIRST)
    answer = await script.run(3, 33, some_rows(1, 2))
    whole = Whole()
    whole.run(0, some_rows(40))
    whole.run(32, some_rows(1, 1))
    assert np.array_equal(values(script, answer), whole.run(33, some_rows(1, 2))[-1:])


async def test_a_new_first_hop_feeds_only_itself_where_the_next_one_held_the_prefix(rig: Rig) -> None:
    a, other, b = [await rig.add_fake_node(*span, keeps=True) for span in ((0, 3), (0, 3), (3, 6))]
    await kept_rows(rig.script((a, 0, 3), (b, 3, 6)), a, b)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await begin(script, (32, NAMES[1]))
    await script.run(2, 32, some_rows(1, 1), **FIRST)
    before, script.changes = b.stats.rows_run, {}
    assert (await script.reopen((other, 0, 3), (b, 3, 6), answered=2)).next_step == 1
    await script.send(1, 0, some_rows(40)[:32], want=0, **FIRST)
    await script.send(2, 32, some_rows(1, 1), want=0, **FIRST)
    await script.run(3, 33, some_rows(1, 2))
    assert b.stats.rows_run - before == 1


async def test_too_many_or_disordered_prefixes_are_refused(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    for named in ([(16, NAMES[0]), (32, NAMES[1])], [(16 * n, NAMES[0]) for n in range(9, 0, -1)]):
        prefixes = tuple(Prefix(*each) for each in named)
        script = rig.script((node, 0, 6), changes={"confirms": True, "prefixes": prefixes})
        await script.open()
        failure = await rig.gateway.receive(Failure)
        assert failure.code == ErrorCode.MALFORMED
    assert node.stats.num_sessions == 0


async def test_only_the_next_hop_says_what_those_behind_hold(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3, keeps=True), await rig.add_fake_node(3, 6, keeps=True)
    await kept_rows(rig.script((a, 0, 3), (b, 3, 6)), a, b)
    rig.network.drop = lambda link, message: isinstance(message, Opened) and link.own_id == b.node_id
    script = rig.script((a, 0, 3), (b, 3, 6))
    script.changes |= {"confirms": True, "prefixes": (Prefix(32, NAMES[1]),)}
    await script.open()
    await until(lambda: b.stats.num_sessions == 1)
    await script.first.send(Opened(script.session_id, 1, 32))
    await script.first.send(keep(script, NAMES[:1]))  # nothing was computed: it ends
    await until(lambda: a.stats.num_sessions == 0)
    assert rig.gateway.inbox.empty()
