"""A client that leaves ends its answer at once, whole or streamed, at any point."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.app.conftest import Serve
from tests.support.api_server import PATH, QUESTION, Served, settles
from tests.support.local_engine import ScriptedEngine


async def connect(served: Served, **changes: Any) -> asyncio.StreamWriter:
    """Send a chat request on a bare socket."""
    return await served.begin(PATH, {**QUESTION, **changes})


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("waits_at", [-1, 0, 3])
async def test_leaving_frees_every_session_at_once(
    served: Served, scripted: ScriptedEngine, is_stream: bool, choices: int, waits_at: int
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == waits_at else None
    writer = await connect(served, stream=is_stream, n=choices)
    await settles(lambda: scripted.num_open == choices)
    writer.close()
    await settles(lambda: scripted.num_open == 0, within_s=1)
    await settles(lambda: served.gateway.num_running == 0)
    assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 1
    assert served.metric("diffuse_requests_running", model="scripted") == 0


async def test_leaving_is_no_error(served: Served, scripted: ScriptedEngine) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait()
    writer = await connect(served)
    await settles(lambda: scripted.num_open == 1)
    writer.close()
    await settles(lambda: served.gateway.num_running == 0)
    lines = (await served.http.get("/metrics")).text.splitlines()
    assert not [x for x in lines if x.startswith("diffuse_request_errors_total{") and not x.endswith(" 0.0")]


async def test_leaving_while_the_body_is_sent_is_no_error(served: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    assert (await served.ask()).status_code == 200
    assert served.metric("diffuse_request_errors_total", endpoint=PATH, code="internal_error") == 0


async def test_a_hundred_random_leavers_leave_nothing_behind(serve: Serve, scripted: ScriptedEngine) -> None:
    draw = random.Random(3)
    scripted.before_token = lambda number: asyncio.sleep(0.001)
    async with serve(max_requests=400) as served:

        async def leave_early() -> None:
            writer = await connect(served, stream=draw.random() < 0.5, n=draw.choice((1, 2)))
            await asyncio.sleep(draw.random() * 0.02)
            writer.close()

        await asyncio.gather(*(leave_early() for _ in range(100)))
        await settles(lambda: scripted.num_open == 0 and served.gateway.num_running == 0)
        assert served.metric("diffuse_requests_running", model="scripted") == 0
        assert (await served.ask()).status_code == 200
    assert not [task for task in asyncio.all_tasks() if "_next" in repr(task)]
