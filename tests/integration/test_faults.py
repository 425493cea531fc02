"""Nodes that are killed or stopped, clients that leave: the answer goes on, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest
from openai import APIError

from tests.integration.conftest import MODEL, ServedModel, WholeModel
from tests.support.nursery import Nursery
from tests.support.processes import Process, Processes, client_of, describe, until

pytestmark = [pytest.mark.real, pytest.mark.processes]
QUESTION = "Tell me about the sea."
USER = [{"role": "user", "content": QUESTION}]
NUM_TOKENS = 20
NUM_ABORTS = 200


def answer_with(gateway: Process, after: int, event: Callable[[], None]) -> str:
    """Stream a greedy answer; something happens once `after` pieces of it have come."""
    text, pieces = "", 0
    stream = client_of(gateway).chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=NUM_TOKENS, stream=True
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            pieces += 1
            if pieces == after:
                event()
    return text


def busy_node(nodes: list[Process]) -> Process:
    """The node of these replicas that holds a session now."""
    loads = [told.load for told in asyncio.run(describe(nodes))]
    return nodes[loads.index(1)]


@pytest.fixture(scope="module")
def fragile(nursery: Nursery) -> Iterator[ServedModel]:
    with Processes(nursery) as processes:
        slices = ["1:16"] * 2 + ["16:30"] * 3
        nodes = processes.hosts(MODEL, *slices, flags=("--dtype", "float32"))
        yield ServedModel(processes, nodes, processes.serve(MODEL, nodes))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_and_stopped_nodes_are_replaced_until_none_is_left(
    fragile: ServedModel, whole: WholeModel
) -> None:
    expected = whole.greedy(QUESTION, NUM_TOKENS)
    first, last = fragile.nodes[:2], fragile.nodes[2:]
    gateway = fragile.gateway

    def lose(nodes: list[Process], number: signal.Signals) -> None:
        node = busy_node(nodes)
        nodes.remove(node)
        node.kill(number)

    assert answer_with(gateway, 1, lambda: lose(last, signal.SIGKILL)) == expected
    assert answer_with(gateway, 12, lambda: lose(first, signal.SIGKILL)) == expected
    assert answer_with(gateway, 5, lambda: lose(last, signal.SIGSTOP)) == expected

    with pytest.raises(APIError, match="16:30"):
        answer_with(gateway, 3, lambda: lose(last, signal.SIGKILL))
    root = gateway.ready["url"].removesuffix("/v1")
    until(lambda: httpx.get(f"{root}/ready").status_code == 503)
    listed = httpx.get(f"{root}/v1/models").json()["data"][0]
    assert listed["missing_layers"] == [[16, 30]]
    refused = httpx.post(f"{root}/v1/chat/completions", json={"model": MODEL, "messages": USER})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_route"
    assert "16:30" in refused.json()["error"]["message"]

    stopped = next(node for node in fragile.nodes if node.popen.poll() is None and node not in first)
    stopped.kill(signal.SIGCONT)
    until(lambda: httpx.get(f"{root}/ready").status_code == 200)
    assert answer_with(gateway, 99, lambda: None) == expected


async def sessions_and_free_bytes(nodes: list[Process]) -> list[tuple[int, int]]:
    return [(told.load, told.free_bytes) for told in await describe(nodes)]


@pytest.mark.timeout(300)
async def test_two_hundred_clients_that_leave_at_random_points_leave_nothing(served: ServedModel) -> None:
    url = served.gateway.ready["url"] + "/chat/completions"
    draws = random.Random(3)
    before = await sessions_and_free_bytes(served.nodes)
    assert [sessions for sessions, _ in before] == [0] * 4

    async def leave(client: httpx.AsyncClient, patience_s: float, stream: bool) -> None:
        body = {"model": MODEL, "messages": USER, "max_tokens": 200, "stream": stream}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(patience_s):
                await client.post(url, json=body)

    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        for start in range(0, NUM_ABORTS, 10):
            stays = [draws.uniform(0.0, 0.4) for _ in range(10)]
            await asyncio.gather(*(leave(client, s, bool((start + i) % 2)) for i, s in enumerate(stays)))

    async with asyncio.timeout(20):
        while await sessions_and_free_bytes(served.nodes) != before:
            await asyncio.sleep(0.1)
    metrics = httpx.get(served.gateway.ready["url"].removesuffix("/v1") + "/metrics").text
    assert "diffuse" in metrics


async def test_every_node_has_freed_the_session_when_the_client_is_gone(served: ServedModel) -> None:
    url = served.gateway.ready["url"] + "/chat/completions"
    body = {"model": MODEL, "messages": USER, "max_tokens": 400, "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream("POST", url, json=body) as answer:
            lines = answer.aiter_lines()  # kept: the stream is closed with its iterator
            async for line in lines:
                if '"content":' in line and '"role"' not in line:
                    break
            held = [sessions for sessions, _ in await sessions_and_free_bytes(served.nodes)]
            assert sum(held) == 2, "one session on each node of the route"
        async with asyncio.timeout(5):
            while any(sessions for sessions, _ in await sessions_and_free_bytes(served.nodes)):
                await asyncio.sleep(0.02)
