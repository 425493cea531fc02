"""Answers of many tokens over a home's nodes, each token made from the one before: one wrong row shows in all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from routing.chain import Chain
from slicing.sampler import SamplingParams
from tests.integration.home import Home, home, rows, run
from tests.node.fake_runner import NUM_LAYERS
from tests.node.rig import Node

NUM_TOKENS = 20
PROMPT_ROWS = 3
ROWS = PROMPT_ROWS + NUM_TOKENS  # that each stage computes for one answer
STAGES = ((0, 2), (2, 4), (4, NUM_LAYERS))
SAMPLED = {
    "params": SamplingParams(temperature=1.0, seed=7, frequency_penalty=0.7).to_map(),
    "prompt_ids": [],
}
THIN: dict[str, Any] = {"takes_token_ids": True, "runs_closing": True, "sampling": SAMPLED}
Event = Callable[[int], Awaitable[None]]


async def staged(here: Home, replicas: int = 2) -> list[list[Node]]:
    """By stage, its replicas; the gateway knows all of them."""
    stages = [[await here.rig.add_fake_node(*span) for _ in range(replicas)] for span in STAGES]
    await here.know(*(node for nodes in stages for node in nodes))
    return stages


async def nothing(index: int) -> None:
    pass


async def say(chain: Chain, before: Event = nothing, seed: int = 0) -> list[bytes]:
    """One answer: `before` is called before each token's step, with its number from 1 on."""
    values = await run(chain, 0, rows(PROMPT_ROWS, seed))
    said = [values.tobytes()]
    for index in range(1, NUM_TOKENS + 1):
        await before(index)
        values = await run(chain, PROMPT_ROWS + index - 1, np.tanh(values) + np.float32(index))
        said.append(values.tobytes())
    return said


async def draw(chain: Chain, before: Event = nothing) -> list[int]:
    """One answer of the thin mode, tokens drawn at the last hop."""
    ids, position, drawn = [3, 1, 4], 0, []
    for index in range(NUM_TOKENS + 1):
        await before(index)
        payload = np.asarray(ids, "<i4").tobytes()
        answer = await chain.step(payload, position=position, rows=len(ids))
        position += len(ids)
        ids = [int(np.frombuffer(answer.payload, "<u4")[-1])]
        drawn += ids
    return drawn


async def unbroken_text(seed: int = 0) -> list[bytes]:
    """What `say` gives when nothing goes wrong."""
    async with home() as here:
        await staged(here, 1)
        chain = await here.open()
        said = await say(chain, seed=seed)
        await chain.close()
        return said


async def unbroken_draws() -> list[int]:
    """What `draw` gives when nothing goes wrong."""
    async with home() as here:
        await staged(here, 1)
        chain = await here.open(**THIN)
        drawn = await draw(chain)
        await chain.close()
        return drawn


def nodes_of(here: Home, chain: Chain) -> list[Node]:
    """The nodes of its route, in order."""
    assert chain.route is not None
    by_id = {node.node_id: node for node in here.rig.nodes}
    return [by_id[hop.address.node_id] for hop in chain.route.hops]


def freeze(here: Home, node: Node) -> Callable[[], None]:
    """As SIGSTOP: its links stay open and nothing comes back on them. Returns what wakes it up."""
    sides = [side for link in here.rig.network.links for side in (link, link.other_side)]
    own = [side for side in sides if side.own_id == node.node_id and not side.is_closed]
    for side in own:
        side.stall()

    def wake() -> None:
        for side in own:
            side.resume()

    return wake
