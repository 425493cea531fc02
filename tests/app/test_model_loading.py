"""Requests for models whose ends are not here yet, whose route comes and goes, or that cannot be opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import openai
import pytest

from app.engine.request import KnownModel, ModelStatus, ModelUnavailableError, TextEngine
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import ANSWER
from tests.support.api_server import QUESTION, Served, serve_library, settles
from tests.support.local_engine import ScriptedEngine, saying

GONE = ModelStatus("partial", 30, ((10, 20),))


@dataclass
class SlowLibrary:
    """One model, `scripted`, whose engine comes when `opened` is set."""

    made: ScriptedEngine
    status: ModelStatus = field(default_factory=lambda: ModelStatus("available", 30))
    is_listed: bool = True
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    others: dict[str, str] = field(default_factory=dict)
    num_asked: int = 0
    num_waiting: int = 0

    def models(self) -> tuple[KnownModel, ...]:
        return (KnownModel("scripted", self.status, 1_700_000_000, 256, self.is_listed),)

    def find(self, name: str) -> KnownModel | None:
        return self.models()[0] if name == "scripted" else None

    def unserved(self) -> dict[str, str]:
        return self.others

    async def engine(self, name: str) -> TextEngine:
        self.num_asked += 1
        self.num_waiting += 1
        try:
            await self.opened.wait()
        finally:
            self.num_waiting -= 1
        if self.failure is not None:
            raise self.failure
        return self.made


@pytest.fixture
def slow(tokenizer: ChatTokenizer) -> SlowLibrary:
    return SlowLibrary(ScriptedEngine(tokenizer, saying(tokenizer, ANSWER)))


@asynccontextmanager
async def served_by(library: SlowLibrary, **settings: Any) -> AsyncIterator[Served]:
    async with serve_library(library, **settings) as served:
        yield served


def error_of(response: Any) -> tuple[int, str, str]:
    return response.status_code, response.json()["error"]["code"], response.json()["error"]["message"]


async def test_a_request_waits_for_the_ends(slow: SlowLibrary) -> None:
    async with served_by(slow) as served:
        asking = asyncio.create_task(served.ask())
        await settles(lambda: slow.num_waiting == 1)
        slow.opened.set()
        answer = (await asking).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER


async def test_a_load_that_takes_too_long_is_told_in_time(slow: SlowLibrary) -> None:
    async with served_by(slow, load_wait_s=0.02) as served:
        for stream in (False, True):
            response = await served.ask(stream=stream)
            status, code, message = error_of(response)
            assert (status, code, message) == (503, "model_loading", "the model `scripted` is still loading")
            assert response.headers["retry-after"] == "5"
        assert slow.num_waiting == 0


async def test_a_client_that_leaves_while_it_waits_is_forgotten(slow: SlowLibrary) -> None:
    async with served_by(slow) as served:
        asking = asyncio.create_task(served.ask())
        await settles(lambda: slow.num_waiting == 1)
        asking.cancel()
        await settles(lambda: slow.num_waiting == 0)
        assert served.gateway.num_waiting == 0


async def test_only_so_many_wait(slow: SlowLibrary) -> None:
    async with served_by(slow, max_requests=2) as served:
        waiting = [asyncio.create_task(served.ask()) for _ in range(2)]
        await settles(lambda: slow.num_waiting == 2)
        assert error_of(await served.ask())[:2] == (503, "overloaded")
        slow.opened.set()
        assert [(await one).status_code for one in waiting] == [200, 200]


async def test_a_model_without_a_route_is_not_loaded(slow: SlowLibrary) -> None:
    slow.status = replace(GONE, reason="nodes serve another model under this name (09090909)")
    async with served_by(slow) as served:
        response = await served.ask()
        status, code, message = error_of(response)
        assert (status, code) == (503, "no_route")
        assert "no node serves layers 10:20 of scripted" in message
        assert message.endswith("nodes serve another model under this name (09090909)")
        assert response.headers["retry-after"] == "5"
        assert slow.num_asked == 0


async def test_a_route_lost_a_moment_ago_is_waited_for(slow: SlowLibrary) -> None:
    slow.status = replace(GONE, may_return=True)
    slow.opened.set()
    async with served_by(slow) as served:
        asking = asyncio.create_task(served.ask())
        await settles(lambda: served.gateway.num_waiting == 1)
        slow.status = ModelStatus("available", 30)
        assert (await asking).status_code == 200
        slow.status = replace(GONE, may_return=True)
        asking = asyncio.create_task(served.ask())
        await settles(lambda: served.gateway.num_waiting == 1)
        slow.status = GONE
        assert error_of(await asking)[:2] == (503, "no_route")


async def test_nodes_that_leave_while_it_loads_are_missed_at_once(slow: SlowLibrary) -> None:
    async with served_by(slow) as served:
        asking = asyncio.create_task(served.ask())
        await settles(lambda: slow.num_waiting == 1)
        slow.made.status = GONE
        slow.opened.set()
        assert error_of(await asking)[:2] == (503, "no_route")
        assert slow.made.num_opened == 0


async def test_a_load_that_fails_says_so(slow: SlowLibrary) -> None:
    slow.opened.set()
    slow.failure = ModelUnavailableError("model_failed", "the model `scripted`: it cannot be opened here", 60)
    async with served_by(slow) as served:
        response = await served.ask()
        assert error_of(response) == (503, "model_failed", slow.failure.message)
        assert response.headers["retry-after"] == "30"
        slow.status = ModelStatus("failed", 30, reason="it cannot be opened here")
        assert error_of(await served.ask()) == (503, "model_failed", slow.failure.message)
        assert slow.num_asked == 1, "what is known to fail is not tried"


async def test_a_gateway_that_leaves_loads_nothing_more(slow: SlowLibrary) -> None:
    async with served_by(slow) as served:
        served.gateway.is_draining = True
        assert error_of(await served.ask())[:2] == (503, "shutting_down")
        assert slow.num_asked == 0


async def test_a_model_flips_between_listed_and_not_as_its_route_does(slow: SlowLibrary) -> None:
    async with (
        served_by(slow) as served,
        served.openai() as client,
    ):
        for _ in range(2):
            assert [model.id async for model in client.models.list()] == ["scripted"]
            assert (await client.models.retrieve("scripted")).model_extra["status"] == "available"  # type: ignore[index]
            assert (await served.http.get("/ready")).status_code == 200
            slow.status, slow.is_listed = GONE, False
            assert [model.id async for model in client.models.list()] == []
            with pytest.raises(openai.NotFoundError, match="no node serves layers 10:20"):
                await client.models.retrieve("scripted")
            assert (await served.http.get("/ready")).status_code == 503
            with pytest.raises(openai.InternalServerError, match="no node serves layers 10:20") as refused:
                await client.chat.completions.create(**QUESTION)
            assert refused.value.code == "no_route"
            slow.status, slow.is_listed = ModelStatus("available", 30), True


async def test_why_an_announced_model_is_not_served_is_told(slow: SlowLibrary) -> None:
    slow.others = {"big": "it is not on this machine"}
    async with served_by(slow, model_aliases="gpt-4=big") as served:
        assert (await served.http.get("/v1/models")).json()["unserved"] == [
            {"id": "big", "reason": "it is not on this machine"}
        ]
        for name in ("big", "gpt-4"):
            status, code, message = error_of(await served.ask(model=name))
            assert (status, code) == (404, "model_not_found")
            assert message == (
                f"The model `{name}` is not served here: it is not on this machine. Available models: `scripted`"
            )


async def test_models_with_a_route_are_counted(slow: SlowLibrary) -> None:
    async with served_by(slow) as served:
        assert served.metric("diffuse_models_covered") == 1
        assert served.metric("diffuse_model_ready", model="scripted") == 0
        slow.status = GONE
        assert served.metric("diffuse_models_covered") == 0
        assert served.metric("diffuse_model_layers_covered", model="scripted") == 20
