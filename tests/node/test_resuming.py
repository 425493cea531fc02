"""What a node makes of a route that takes over: what it keeps, repeats, undoes, tells, and whom it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from node import openings
from routing import wire
from routing.errors import ErrorCode
from routing.types import (
    Answer,
    Cancel,
    Failure,
    Inquire,
    Message,
    Open,
    Resumed,
    Standing,
    Step,
    Want,
    WireDtype,
)
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_routes import another_gateway
from tests.node.test_steps import Whole, some_rows


async def three(rig: Rig) -> tuple[Node, Node, Node]:
    """Two halves, and another second half."""
    return await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6), await rig.add_fake_node(3, 6)


async def run_some(script: Script, count: int = 4) -> list[np.ndarray]:
    """The first steps of a session: one row each; what the whole model gives."""
    whole = Whole()
    for number in range(1, count + 1):
        await script.run(number, number - 1, some_rows(1, number))
    return [whole.run(number - 1, some_rows(1, number)) for number in range(1, count + 2)]


def sent_between(rig: Rig, one: Node, other: Node) -> list[Message]:
    links = [
        link for link in rig.network.links if link.own_id == one.node_id and link.peer_id == other.node_id
    ]
    return [message for link in links for message in link.sent]


async def test_a_survivor_repeats_what_a_new_next_hop_lacks(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    expected = await run_some(script)
    resumed = await script.reopen((a, 0, 3), (spare, 3, 6), answered=4)
    assert resumed.next_step == 5
    answer = await script.run(5, 4, some_rows(1, 5))
    assert np.array_equal(rows_of(wire.open_answer(script.answer_key, answer)), expected[-1])
    assert [node.stats.rows_run for node in (a, b, spare)] == [5, 4, 5]
    assert a.stats.steps_repeated == 4


async def test_answers_the_gateway_has_are_not_sent_again(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await run_some(script)
    await script.reopen((a, 0, 3), (spare, 3, 6), answered=2)
    again = [await rig.gateway.receive(Answer) for _ in range(2)]
    assert [answer.step for answer in again] == [3, 4]
    assert rig.gateway.inbox.empty()


async def test_a_last_hop_sends_the_answers_that_were_lost_without_computing(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    expected = await run_some(script)
    script.epoch, script.changes = 2, {"resumes": True, "answered": 2}
    await script.open()
    answers = [await rig.gateway.receive(Answer) for _ in range(2)]
    assert [(answer.step, answer.epoch) for answer in answers] == [(3, 2), (4, 2)]
    assert all(np.array_equal(rows_of(a), e) for a, e in zip(answers, expected[2:4], strict=True))
    assert (await rig.gateway.receive(Resumed)).next_step == 5
    assert node.stats.rows_run == 4


async def test_an_answer_that_is_not_kept_any_more_is_computed_again(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    expected = await run_some(script, 7)
    assert (await script.reopen(answered=1)).next_step == 2
    answer = await script.run(2, 1, some_rows(1, 2))
    assert np.array_equal(rows_of(answer), expected[1])
    assert node.stats.steps_undone == 6


async def test_a_new_first_hop_passes_on_only_what_the_survivor_lacks(rig: Rig) -> None:
    a, other, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    expected = await run_some(script)
    assert (await script.reopen((other, 0, 3), (b, 3, 6), answered=4)).next_step == 1
    for number in range(1, 5):
        await script.send(number, number - 1, some_rows(1, number), want=Want.NONE)
    answer = await script.run(5, 4, some_rows(1, 5))
    assert np.array_equal(rows_of(wire.open_answer(script.answer_key, answer)), expected[-1])
    assert [message.step for message in sent_between(rig, other, b) if isinstance(message, Step)] == [5]
    assert [node.stats.rows_run for node in (a, other, b)] == [4, 5, 5]


async def test_without_history_a_survivor_asks_for_the_steps_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings, "SESSION_BYTES", 3 * 32)  # three rows
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await run_some(script)
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=4)).next_step == 1
    assert a.stats.steps_undone == 4
    assert (await script.reopen((a, 0, 3), (b, 3, 6), answered=4)).next_step == 1


async def test_a_roll_back_that_the_next_hop_did_not_see_is_repeated_to_it(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(5))
    await script.run(2, 5, some_rows(3, 2))
    rig.network.drop = lambda link, message: isinstance(message, Step) and link.own_id == a.node_id
    await script.send(3, 2, some_rows(1, 3))  # undoes the second step and a part of the first
    await until(lambda: a.stats.steps_run == 3)
    rig.network.drop = None
    for last in (b, spare):  # one that has the first two steps, and one that has nothing
        assert (await script.reopen((a, 0, 3), (last, 3, 6), answered=2)).next_step == 4
        answer = await rig.gateway.receive(Answer)
        whole = Whole()
        whole.run(0, some_rows(5)[:2])
        expected = whole.run(2, some_rows(1, 3))
        assert np.array_equal(rows_of(wire.open_answer(script.answer_key, answer)), expected)


async def test_what_is_computed_while_the_route_changes_is_not_computed_again(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1, 1))
    a.runner.hold()
    for number in (2, 3):
        await script.send(number, number - 1, some_rows(1, number))
    await until(a.runner.entered.is_set)
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=1)).next_step == 4
    a.runner.release()
    assert [(await rig.gateway.receive(Answer)).step for _ in range(2)] == [2, 3]
    assert [node.stats.rows_run for node in (a, spare)] == [3, 3]


async def test_the_next_hop_that_is_left_is_told_and_those_behind_it_stay(rig: Rig) -> None:
    a, b, c = [await rig.add_fake_node(n, n + 2) for n in (0, 2, 4)]
    spare = await rig.add_fake_node(2, 4)
    script = rig.script((a, 0, 2), (b, 2, 4), (c, 4, 6))
    await script.open()
    await script.run(1, 0, some_rows(2))
    assert (await script.reopen((a, 0, 2), (spare, 2, 4), (c, 4, 6), answered=1)).next_step == 2
    await until(lambda: b.stats.num_sessions == 0)
    await script.run(2, 2, some_rows(1))
    assert c.stats.sessions_opened == 1
    assert [node.stats.rows_run for node in (a, b, c, spare)] == [3, 2, 3, 3]
    assert not [m for m in sent_between(rig, b, c) if isinstance(m, Cancel)]


async def test_a_computation_that_fails_leaves_the_nodes_behind_it_what_they_hold(rig: Rig) -> None:
    a, b, _ = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(2))
    a.runner.error = RuntimeError()
    await script.send(2, 2, some_rows(1))
    assert (await script.failure()).code == ErrorCode.COMPUTE
    assert [node.stats.num_sessions for node in (a, b)] == [0, 1]


async def test_history_is_counted_and_given_back(rig: Rig) -> None:
    a, b, _ = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await run_some(script)
    assert [node.stats.history_bytes for node in (a, b)] == [4 * 32, 4 * 32]
    await script.first.send(script.cancel())
    await until(lambda: a.stats.history_bytes == b.stats.history_bytes == 0)


async def test_a_next_hop_of_another_element_type_gets_the_same_rows_in_it(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(2))
    script.entry_changes = {0: {"wire_out": WireDtype.BFLOAT16}, 1: {"wire_in": WireDtype.BFLOAT16}}
    await script.reopen((a, 0, 3), (spare, 3, 6))
    assert (await rig.gateway.receive(Answer)).step == 1
    (repeated,) = (message for message in sent_between(rig, a, spare) if isinstance(message, Step))
    assert len(repeated.payload) == 2 * 8 * 2


async def test_a_node_dials_only_where_it_may(rig: Rig) -> None:
    a, b, _ = await three(rig)
    a.server._openings._may_dial = lambda address: address.node_id != b.node_id
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.HOP_LOST, 1)
    assert "NOT_ALLOWED" in failure.text
    assert b.stats.sessions_opened == 0


async def test_the_next_hop_is_reached_by_any_of_its_addresses(rig: Rig) -> None:
    a, b, c = await three(rig)
    wrong = type(b.address)(b.node_id, "127.0.0.1", 9)
    script = rig.script((a, 0, 3), (b, 3, 6))
    script.entry_changes = {0: {"next_hop": wrong, "next_alternatives": (b.address,)}}
    await script.open()
    await script.run(1, 0, some_rows(1))
    assert c.stats.sessions_opened == 0


async def test_a_gateway_may_ask_how_far_a_session_is_and_others_may_not(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    node.runner.hold()
    await script.send(2, 1, some_rows(1))
    await script.first.send(Inquire(script.session_id, 1))
    told = await rig.gateway.receive(Standing)
    assert (told.epoch, told.hop, told.last_done, told.next_step) == (1, 0, 1, 3)
    stranger = another_gateway(rig)
    link = await stranger.endpoint.dial(node.address)
    await link.send(Inquire(script.session_id, 1))
    assert await stranger.receive(Standing) == Standing(script.session_id, 0, 0, 0, 0)


async def test_only_the_next_hop_says_what_it_has(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await run_some(script)
    held: list[Any] = []

    def hold(link: Any, message: Message) -> bool:
        if isinstance(message, Resumed) and link.own_id == spare.node_id:
            held.append((link, message))
            return True
        return False

    rig.network.drop = hold
    reopening = asyncio.create_task(script.reopen((a, 0, 3), (spare, 3, 6), answered=4))
    await until(lambda: bool(held))
    liar = another_gateway(rig)
    link = await liar.endpoint.dial(a.address)
    await link.send(Resumed(script.session_id, 2, 1))
    await link.send(Open(script.session_id, 2, 0, (b"x",)))
    assert (await liar.receive(Failure)).code == ErrorCode.DECRYPT
    assert not [m for m in sent_between(rig, a, spare) if isinstance(m, Step)]
    rig.network.drop = None
    held[0][0].post(held[0][1])
    assert (await reopening).next_step == 5
