"""A node lost at any token, for any cause: the answer goes on, and only what was lost is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from node import openings
from routing import inquiry, live_route, route_watch, switchboard
from routing.errors import ErrorCode, RemoteError
from routing.types import Answer, Message, Open, Resumed, Step, Want
from tests.integration.home import Home, home, rows
from tests.integration.streams import (
    NUM_TOKENS,
    PROMPT_ROWS,
    ROWS,
    STAGES,
    THIN,
    draw,
    freeze,
    nodes_of,
    nothing,
    say,
    staged,
    unbroken_draws,
    unbroken_text,
)
from tests.node.fake_runner import NUM_LAYERS
from tests.node.rig import Node, rows_of, until

Lose = Callable[[Home, Node], None]


def cut(here: Home, node: Node) -> None:
    here.rig.network.cut_off(node.node_id)


def fail(here: Home, node: Node) -> None:
    node.runner.error = RuntimeError("a broken adder")


def stop(here: Home, node: Node) -> None:
    freeze(here, node)


def wedge(here: Home, node: Node) -> None:
    """Its event loop lives, its compute thread does not get anywhere."""
    node.runner.hold()


CAUSES: dict[str, Lose] = {"cut": cut, "failing": fail, "frozen": stop}


@pytest.fixture(autouse=True)
def _timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence shows sooner, for these tests lose two hundred nodes; slowness never, on machines that do much else."""
    monkeypatch.setattr(route_watch, "SUSPECT_AFTER_S", 0.3)
    monkeypatch.setattr(live_route, "SUSPECT_POLL_S", 0.05)
    monkeypatch.setattr(route_watch, "SLACK_S", 60.0)
    monkeypatch.setattr(live_route, "REDIAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(openings, "REDIAL_TIMEOUT_S", 60.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowness shows sooner too."""
    monkeypatch.setattr(route_watch, "SLACK_S", 0.5)
    monkeypatch.setattr(inquiry, "SLACK_S", 0.5)


@pytest_asyncio.fixture
async def text() -> list[bytes]:
    return await unbroken_text()


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Home]:
    async with home() as made:
        yield made


def redone(nodes: list[Node], spared: Node) -> list[int]:
    """Rows that the nodes of a route computed more than once for one answer, without one of them."""
    return [node.stats.rows_run - ROWS for node in nodes if node is not spared]


async def lose_at(index: int, stage: int, lose: Lose, text: list[bytes]) -> None:
    async with home() as here:
        await staged(here)
        chain = await here.open()
        route = nodes_of(here, chain)

        async def event(number: int) -> None:
            if number == index:
                lose(here, route[stage])

        assert await say(chain, event) == text
        assert chain.replays == 1
        assert redone(route, route[stage]) == [0, 0]
        replacement = nodes_of(here, chain)[stage]
        assert replacement is not route[stage]
        assert replacement.stats.rows_run == ROWS
        assert len(chain.pauses) == 1
        held = 0 if stage else PROMPT_ROWS + index - 1
        assert held <= chain.rows_repeated <= held + 1  # the step on its way may not have left
        await chain.close()


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("cause", CAUSES)
async def test_any_stage_lost_at_any_token_is_rebuilt_alone(
    cause: str, stage: int, text: list[bytes]
) -> None:
    losses = [lose_at(index, stage, CAUSES[cause], text) for index in range(1, NUM_TOKENS + 1)]
    await asyncio.gather(*losses)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_a_stage_whose_computing_hangs_is_rebuilt_elsewhere(stage: int, text: list[bytes]) -> None:
    await lose_at(7, stage, wedge, text)


@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_a_lost_stage_draws_what_it_drew_before(stage: int) -> None:
    expected = await unbroken_draws()
    for index in (1, 7, NUM_TOKENS):
        async with home() as here:
            await staged(here)
            chain = await here.open(**THIN)
            route = nodes_of(here, chain)

            async def event(
                number: int, index: int = index, here: Home = here, lost: Node = route[stage]
            ) -> None:
                if number == index:
                    cut(here, lost)

            assert await draw(chain, event) == expected
            assert redone(route, route[stage]) == [0, 0]
            await chain.close()


async def test_eight_streams_go_on_when_a_node_dies_under_all_of_them(here: Home) -> None:
    texts = [await unbroken_text(seed) for seed in range(8)]
    stages = await staged(here)
    chains = [await here.open() for _ in range(8)]
    lost = stages[1][0]

    async def event(number: int) -> None:
        if number == 9:
            cut(here, lost)

    said = [say(chain, event if seed == 0 else nothing, seed) for seed, chain in enumerate(chains)]
    assert await asyncio.gather(*said) == texts
    for stage in (0, 2):
        assert sum(node.stats.rows_run for node in stages[stage]) == 8 * ROWS
    assert all(node.stats.failures_sent < 50 for node in here.rig.nodes)
    for chain in chains:
        await chain.close()
    await until(lambda: all(n.stats.num_sessions == 0 for n in here.rig.nodes if n is not lost))
    await until(lambda: all(n.stats.history_bytes == 0 for n in here.rig.nodes if n is not lost))


async def test_without_history_everything_before_the_lost_stage_is_done_again(
    here: Home, text: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings, "SESSION_BYTES", 0)
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)

    async def event(number: int) -> None:
        if number == 10:
            cut(here, route[1])

    assert await say(chain, event) == text
    # The loss is seen before the tenth step leaves: twelve rows were done by then.
    assert [node.stats.rows_run - ROWS for node in (route[0], route[2])] == [PROMPT_ROWS + 9, 0]
    assert chain.rows_repeated == PROMPT_ROWS + 10
    await chain.close()


@pytest.mark.parametrize("stages", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
async def test_several_stages_lost_at_once(here: Home, stages: tuple[int, ...], text: list[bytes]) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)

    async def event(number: int) -> None:
        if number == 6:
            for stage in stages:
                cut(here, route[stage])

    assert await say(chain, event) == text
    assert [route[n].stats.rows_run - ROWS for n in range(3) if n not in stages] == [0] * (3 - len(stages))
    await chain.close()


async def test_the_replacement_dies_while_it_is_rebuilt(here: Home, text: list[bytes]) -> None:
    await staged(here, 3)
    chain = await here.open()
    route, lost = nodes_of(here, chain), []

    def lose_again(link: Any, message: Message) -> bool:
        if isinstance(message, Step) and message.epoch == 2 and message.step == 4 and len(lost) == 1:
            lost.append(nodes_of(here, chain)[1])
            cut(here, lost[-1])
        return False

    here.rig.network.drop = lose_again

    async def event(number: int) -> None:
        if number == 8:
            lost.append(route[1])
            cut(here, route[1])

    assert await say(chain, event) == text
    assert len(lost) == 2
    assert chain.epoch == 3
    assert redone(route, route[1]) == [0, 0]
    await chain.close()


@pytest.mark.parametrize("spans", [[(2, 3), (3, 4)], [(2, NUM_LAYERS)], [(0, 4)], [(0, NUM_LAYERS)]], ids=str)
async def test_a_stage_may_be_replaced_by_two_or_several_by_one(
    here: Home, spans: list[tuple[int, int]], text: list[bytes]
) -> None:
    stages = await staged(here, 1)
    chain = await here.open()
    others = [await here.rig.add_fake_node(*span) for span in spans]
    await here.know(*(nodes[0] for nodes in stages), *others)

    async def event(number: int) -> None:
        if number == 5:
            cut(here, stages[1][0])

    assert await say(chain, event) == text
    kept = [nodes[0] for nodes in stages if nodes[0] in nodes_of(here, chain)]
    assert all(node.stats.rows_run == ROWS for node in kept)
    await chain.close()
    await until(lambda: all(n.stats.num_sessions == 0 for n in here.rig.nodes if n is not stages[1][0]))


@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_chunks_on_their_way_are_computed_once_where_nothing_was_lost(here: Home, stage: int) -> None:
    values = rows(24)

    async def chunks(at_home: Home, event: Callable[[], None]) -> list[bytes]:
        chain = await at_home.open()
        sent = [
            await chain.send(values[at : at + 3].tobytes(), position=at, rows=3, want=Want.ALL)
            for at in range(0, 12, 3)
        ]
        answers = [await chain.answer(sent[0])]
        event()
        for at in range(12, 24, 3):
            sent.append(await chain.send(values[at : at + 3].tobytes(), position=at, rows=3, want=Want.ALL))
        answers += [await chain.answer(step) for step in sent[1:]]
        await chain.close()
        return [rows_of(answer).tobytes() for answer in answers]

    async with home() as whole:
        await staged(whole, 1)
        expected = await chunks(whole, lambda: None)
    stages = await staged(here)
    assert (
        await chunks(here, lambda: cut(here, max(stages[stage], key=lambda n: n.stats.rows_run))) == expected
    )
    for other in range(len(STAGES)):
        if other != stage:
            assert sum(node.stats.rows_run for node in stages[other]) == 24, other


async def test_what_a_survivor_computes_at_the_moment_of_the_loss_is_not_lost(
    here: Home, text: list[bytes]
) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    tasks: list[asyncio.Task[None]] = []

    async def event(number: int) -> None:
        if number != 5:
            return
        route[2].runner.hold()

        async def lose() -> None:
            await asyncio.to_thread(route[2].runner.entered.wait)
            cut(here, route[1])
            await until(lambda: chain.epoch == 2 and len(nodes_of(here, chain)) == 3)
            route[2].runner.release()

        tasks.append(asyncio.create_task(lose()))

    assert await say(chain, event) == text
    assert redone(route, route[1]) == [0, 0]
    assert nodes_of(here, chain)[1].stats.rows_run == ROWS
    await asyncio.gather(*tasks)
    await chain.close()


async def test_an_answer_that_was_lost_on_its_way_is_sent_again_and_not_computed_again(
    here: Home, text: list[bytes]
) -> None:
    stages = await staged(here, 1)
    chain = await here.open()
    last = stages[2][0]
    swallowed: list[Answer] = []

    def swallow(link: Any, message: Message) -> bool:
        if isinstance(message, Answer) and message.step == 7 and not swallowed:
            swallowed.append(message)
            here.rig.network.cut(here.endpoint.node_id, last.node_id)
            return True
        return False

    here.rig.network.drop = swallow
    assert await say(chain) == text
    assert swallowed
    assert [nodes[0].stats.rows_run for nodes in stages] == [ROWS] * 3
    assert chain.rows_repeated == 0
    await chain.close()


@pytest.mark.usefixtures("hasty")
async def test_an_answer_that_never_comes_is_asked_for_again(here: Home, text: list[bytes]) -> None:
    stages = await staged(here, 1)
    chain = await here.open()
    swallowed: list[Answer] = []

    def swallow(link: Any, message: Message) -> bool:
        if isinstance(message, Answer) and message.step == 7 and not swallowed:
            swallowed.append(message)
            return True
        return False

    here.rig.network.drop = swallow
    assert await say(chain) == text
    assert [nodes[0].stats.rows_run for nodes in stages] == [ROWS] * 3
    await chain.close()


@pytest.mark.usefixtures("hasty")
async def test_a_step_that_gets_stuck_between_two_nodes_goes_another_way(
    here: Home, text: list[bytes]
) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    stuck: list[Message] = []

    def lose(link: Any, message: Message) -> bool:
        is_between = {link.own_id, link.peer_id} == {route[0].node_id, route[1].node_id}
        if is_between and isinstance(message, Step) and (message.step == 5 or stuck):
            stuck.append(message)
            return True
        return False

    here.rig.network.drop = lose
    assert await say(chain) == text
    assert stuck
    assert nodes_of(here, chain)[1] is not route[1]
    assert redone(route, route[1]) == [0, 0]
    await chain.close()


async def test_a_frozen_node_that_wakes_up_changes_nothing(here: Home, text: list[bytes]) -> None:
    stages = await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    wakes: list[Callable[[], None]] = []

    async def event(number: int) -> None:
        if number == 4:
            wakes.append(freeze(here, route[1]))
        if number == 9:
            wakes[0]()

    assert await say(chain, event) == text
    assert redone(route, route[1]) == [0, 0]
    await until(lambda: route[1].stats.num_sessions == 0)
    await chain.close()
    await until(lambda: all(node.stats.num_sessions == 0 for nodes in stages for node in nodes))


async def test_a_cut_between_the_only_nodes_there_are_costs_no_row(here: Home, text: list[bytes]) -> None:
    stages = await staged(here, 1)
    chain = await here.open()
    ids = [nodes[0].node_id for nodes in stages]
    pairs = [
        (here.endpoint.node_id, ids[0]),
        (ids[0], ids[1]),
        (ids[1], ids[2]),
        (here.endpoint.node_id, ids[2]),
    ]

    async def event(number: int) -> None:
        if number % 4 == 2:
            here.rig.network.cut(*pairs[number // 4 % len(pairs)])

    assert await say(chain, event) == text
    assert [nodes[0].stats.rows_run for nodes in stages] == [ROWS] * 3
    assert chain.replays >= 3
    await chain.close()


async def test_every_session_of_a_slice_that_is_taken_away_goes_on_elsewhere(
    here: Home, text: list[bytes]
) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)

    async def event(number: int) -> None:
        if number == 4:
            slices.drain(slices.held[0])
        if number == 8:
            slices.remove(slices.held[0])

    slices = route[1].slices
    assert await say(chain, event) == text
    assert chain.replays == 1
    assert redone(route, route[1]) == [0, 0]
    await chain.close()


@pytest.mark.usefixtures("hasty")
async def test_a_node_that_failed_one_session_is_avoided_by_the_next_at_once(here: Home) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    await say(chain)
    route[1].runner.hold()
    await chain.step(rows(1).tobytes(), position=ROWS, rows=1)
    assert route[1] not in nodes_of(here, chain)
    for _ in range(4):
        other = await here.open()
        assert route[1] not in nodes_of(here, other)
        await other.close()
    await chain.close()
    route[1].runner.release()


async def test_a_node_that_failed_is_used_again_when_it_is_the_only_one(
    here: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = await staged(here, 1)
    here.switchboard.note_doubt(stages[1][0].node_id)
    chain = await here.open()
    await chain.close()
    monkeypatch.setattr(switchboard, "DOUBT_S", 0.0)
    assert here.switchboard._doubted() == frozenset()


@pytest.mark.usefixtures("hasty")
async def test_a_slow_node_is_not_left_when_there_is_no_other(here: Home) -> None:
    stages = await staged(here, 1)
    chain = await here.open()
    await chain.step(rows(1).tobytes(), position=0, rows=1)
    stages[1][0].runner.hold()
    waiting = asyncio.create_task(chain.step(rows(1).tobytes(), position=1, rows=1))
    await until(lambda: here.messages_received()["Standing"] >= 6)  # asked twice, and left in peace
    stages[1][0].runner.release()
    await waiting
    assert chain.replays == 0
    await chain.close()


@pytest.mark.usefixtures("hasty")
async def test_a_step_that_waits_behind_a_long_prompt_of_another_is_waited_for(
    here: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        route_watch, "patience_s", lambda *_: 0.0
    )  # of our step; the prompt's is another matter
    monkeypatch.setattr(inquiry, "_costs", lambda *_: (1000.0, 1000.0, 0.0))
    stages = await staged(here, 1)
    chain, other = await here.open(), await here.open()
    await chain.step(rows(1).tobytes(), position=0, rows=1)
    await here.know(*(nodes[0] for nodes in stages), await here.rig.add_fake_node(*STAGES[1]))
    busy = stages[1][0]
    busy.runner.hold()
    prompt = await other.send(rows(40).tobytes(), position=0, rows=40)
    await asyncio.to_thread(busy.runner.entered.wait)
    waiting = asyncio.create_task(chain.step(rows(1).tobytes(), position=1, rows=1))
    await until(lambda: here.messages_received()["Standing"] >= 6)
    busy.runner.release()
    await waiting
    assert chain.replays == 0
    await other.answer(prompt)
    await chain.close()
    await other.close()


async def test_a_session_moves_to_a_direct_link_when_nothing_is_on_its_way(
    here: Home, text: list[bytes]
) -> None:
    stages = await staged(here, 1)
    (relayed,) = here.endpoint.links_to(stages[0][0].node_id)
    relayed.is_relayed = True
    chain = await here.open()

    async def event(number: int) -> None:
        if number == 5:
            direct = await here.endpoint._dial_new(stages[0][0].address)
            assert not here.switchboard.is_in_use(direct)
        if number == 7:
            assert not here.switchboard.is_in_use(relayed)
            await relayed.close()

    assert await say(chain, event) == text
    assert chain.replays == 0
    assert here.messages_sent()["Attach"] == 1
    await chain.close()


async def test_a_first_hop_that_claims_steps_nobody_sent_is_left(here: Home, text: list[bytes]) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    lies: list[Message] = []

    def lie(link: Any, message: Message) -> bool:
        if isinstance(message, Resumed) and link.own_id == route[0].node_id:
            lies.append(Resumed(message.session_id, message.epoch, 99))
            here.switchboard.on_message(link.other_side, lies[-1])
            return True
        return False

    async def event(number: int) -> None:
        if number == 3:
            here.rig.network.drop = lie
            cut(here, route[2])

    assert await say(chain, event) == text
    assert len(lies) == 1
    assert nodes_of(here, chain)[0] is not route[0]
    await chain.close()


@pytest.mark.usefixtures("hasty")
async def test_a_next_hop_that_never_gets_the_route_is_found(here: Home, text: list[bytes]) -> None:
    await staged(here)
    chain = await here.open()
    route = nodes_of(here, chain)
    lost: list[Message] = []

    def lose(link: Any, message: Message) -> bool:
        if isinstance(message, Open) and message.hop == 2 and message.epoch == 2:
            lost.append(message)
            return True
        return False

    here.rig.network.drop = lose

    async def event(number: int) -> None:
        if number == 3:
            cut(here, route[0])

    assert await say(chain, event) == text
    assert lost
    await chain.close()


async def test_a_route_that_cannot_roll_back_begins_anew(here: Home, text: list[bytes]) -> None:
    """As models with a running state, which go only forward, or back to the start."""
    stages = await staged(here, 1)
    chain = await here.open()

    async def event(number: int) -> None:
        if number == 6:
            for link in here.rig.network.links_between(here.endpoint.node_id, stages[0][0].node_id):
                if link.own_id == stages[0][0].node_id:
                    told = RemoteError(ErrorCode.STEP, "goes only forward")
                    session = next(iter(stages[0][0].server._sessions))
                    stages[0][0].server._returns.report(session, 6, told)

    assert await say(chain, event) == text
    assert chain.replays == 1
    assert chain.rows_repeated in (PROMPT_ROWS + 5, PROMPT_ROWS + 6)
    await chain.close()
