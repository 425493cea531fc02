"""Nodes that answer nonsense: a typed error that names the hop, and nobody else is harmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routing import blame
from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.types import Answer, AnswerKind, Failure, HopTrace, Message, StepFlag, Want
from tests.integration.home import Home, home, loser, rows, run, unbroken
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS
from tests.node.rig import Node, until

Change = Callable[[Answer], Message]


def pervert(here: Home, node: Node, change: Change, *, once: bool = False) -> list[Message]:
    """What the node answers us arrives changed."""
    told: list[Message] = []

    def drop(link: Any, message: Message) -> bool:
        if not isinstance(message, Answer) or link.own_id != node.node_id or (once and told):
            return False
        told.append(change(message))
        here.switchboard.on_message(link.other_side, told[-1])
        return True

    here.rig.network.drop = drop
    return told


CHANGES: dict[str, Change] = {
    "a row more": lambda a: replace(a, rows=2, payload=bytes(a.payload) * 2),
    "half a row": lambda a: replace(a, payload=bytes(a.payload)[: HIDDEN_SIZE * 2]),
    "an odd byte": lambda a: replace(a, payload=bytes(a.payload) + b"x"),
    "nothing": lambda a: replace(a, rows=0, payload=b""),
    "tokens": lambda a: replace(a, kind=AnswerKind.TOKEN_IDS, payload=bytes(4)),
    "another position": lambda a: replace(a, position=a.position + 1),
    "a false seal": lambda a: replace(a, flags=a.flags | StepFlag.SEALED, payload=bytes(48)),
    "a seal of nothing": lambda a: replace(a, flags=a.flags | StepFlag.SEALED, payload=b""),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_malformed_answer_is_a_typed_error_that_names_the_hop(name: str) -> None:
    async with home() as here:
        nodes = await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS)
        whole = await unbroken(here, *nodes)
        other, chain = await here.open(), await here.open()
        await run(other, 0, rows(3))
        pervert(here, nodes[1], CHANGES[name])
        with pytest.raises(RemoteError) as caught:
            await run(chain, 0, rows(3))
        assert caught.value.code in (ErrorCode.MALFORMED, ErrorCode.DECRYPT)
        assert caught.value.hop == 1
        here.rig.network.drop = None
        np.testing.assert_array_equal(await run(other, 3, rows(1, 1)), whole[1])
        assert not here.endpoint.receiver_errors
        await chain.close()
        await other.close()
        await until(lambda: all(node.stats.num_sessions == 0 for node in nodes))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: replace(a, kind=AnswerKind.HIDDEN_STATES),
        lambda a: replace(a, payload=b"", rows=1),
        lambda a: replace(a, payload=bytes(a.payload) + bytes(3)),
    ],
)
async def test_a_malformed_shortlist_is_one_too(change: Change) -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open(takes_token_ids=True, runs_closing=True, hidden_size=HIDDEN_SIZE)
        pervert(here, node, change)
        with pytest.raises(ProtocolError) as caught:
            await chain.step(np.array([3, 1], "<i4").tobytes(), position=0, rows=2)
        assert caught.value.hop == 0
        await chain.close()


async def test_a_replica_takes_over_from_a_node_that_answers_nonsense() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        await here.know(*nodes)
        chain = await here.open()
        pervert(here, loser(here, chain, 1), CHANGES["half a row"])
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        await chain.close()


async def test_an_answer_from_anybody_but_the_last_hop_is_ignored() -> None:
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        whole = await unbroken(here, *nodes)
        chain = await here.open()
        last = loser(here, chain, 1)
        stranger = next(node for node in nodes[1:] if node is not last)
        false: list[Message] = []

        def spoof(link: Any, message: Message) -> bool:
            if isinstance(message, Answer) and link.own_id == last.node_id:
                for node in (nodes[0], stranger):
                    (spoofing,) = here.endpoint.links_to(node.node_id)
                    false.append(replace(message, payload=bytes(len(message.payload))))
                    here.switchboard.on_message(spoofing, false[-1])
                (spoofing,) = here.endpoint.links_to(stranger.node_id)
                bad = Failure(chain.session_id, chain.epoch, message.step, ErrorCode.COMPUTE, 0, 0, "no")
                here.switchboard.on_message(spoofing, bad)
            return False

        here.rig.network.drop = spoof
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        assert false
        assert chain.replays == 0
        await chain.close()


def failing(**fields: Any) -> Change:
    def change(answer: Answer) -> Failure:
        told = {"code": int(ErrorCode.COMPUTE), "hop": 1, "retry_ms": 0, "text": ""} | fields
        return Failure(answer.session_id, answer.epoch, answer.step, **told)

    return change


@pytest.mark.parametrize("hop", [0, 128])
async def test_a_last_hop_can_blame_only_itself(hop: int) -> None:
    async with home() as here:
        nodes = await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS)
        await here.know(*nodes)
        chain = await here.open()
        pervert(here, nodes[1], failing(hop=hop))
        with pytest.raises(WorkError) as caught:
            await run(chain, 0, rows(3))
        assert caught.value.hop == 1
        await chain.close()


async def test_an_unknown_code_and_a_text_for_a_terminal_come_out_tame() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        pervert(here, node, failing(hop=0, code=999))
        with pytest.raises(ProtocolError, match="unknown error code"):
            await run(chain, 0, rows(1))
        await chain.close()
        chain = await here.open()
        pervert(here, node, failing(hop=0, text="\x1b[2J\nnode: all is well" + "x" * 900))
        with pytest.raises(WorkError) as caught:
            await run(chain, 0, rows(1))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300
        await chain.close()


async def test_a_node_cannot_make_us_wait_for_weeks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "MAX_RETRY_S", 0.01)
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        await run(chain, 0, rows(1))
        told = pervert(here, node, failing(hop=0, code=int(ErrorCode.BUSY), retry_ms=(1 << 32) - 1))
        with pytest.raises(WorkError) as caught:
            await run(chain, 1, rows(1))
        assert caught.value.code is ErrorCode.BUSY
        assert len(told) == blame.MAX_ATTEMPTS + 1
        await chain.close()


async def test_claimed_times_never_exceed_what_passed() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        lie = HopTrace((1 << 32) - 1, (1 << 32) - 1, 7)
        pervert(here, node, lambda a: replace(a, traces=(lie,) * 100))
        for position in range(3):
            await run(chain, position, rows(1))
        times = chain.times
        assert times.steps == 3
        assert times.compute_s + times.queue_s + times.crypto_s <= times.elapsed_s * 1.001
        assert min(times.network_s, times.compute_s, times.queue_s, times.crypto_s) >= 0
        await chain.close()


async def test_chunks_that_travel_together_count_their_time_once() -> None:
    async with home() as here:
        await here.know(await here.rig.add_fake_node())
        here.rig.network.delay_s = 0.03
        chain = await here.open()
        sent = [
            await chain.send(rows(2).tobytes(), position=at, rows=2, want=Want.LIST) for at in range(0, 8, 2)
        ]
        for step in sent:
            await chain.answer(step)
        assert 0.05 < chain.times.network_s <= chain.times.elapsed_s < 0.2
        await chain.close()


async def test_what_a_node_says_of_another_costs_that_one_nothing_elsewhere() -> None:
    async with home() as here:
        nodes = await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS)
        await here.know(*nodes)
        chain = await here.open()
        told: list[Message] = []

        def lie(link: Any, message: Message) -> bool:
            if isinstance(message, Answer) and not told:
                told.append(message)
                bad = Failure(chain.session_id, chain.epoch, 1, ErrorCode.HOP_LOST, 1, 0, "")
                (spoofing,) = here.endpoint.links_to(nodes[0].node_id)
                here.switchboard.on_message(spoofing, bad)
                assert len(here.switchboard.directory.records()) == 2
                return True
            return False

        here.rig.network.drop = lie
        await run(chain, 0, rows(3))
        assert told
        await chain.close()
