"""Real nodes that find each other, find their places, serve a gateway that knows one of them, and leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.placing import PlacingTimes
from node.pool import ROOM_POSITIONS
from routing.addresses import parse_address
from routing.chain import Chain
from routing.errors import NoRouteError, RemoteError, SettingsError
from routing.identity import Identity
from routing.network import Network, NetworkSettings
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import Answer, Failure, Resumed, SliceSpec, Standing
from slicing.model_source import open_checkpoint
from slicing.runner import Parts, PlainRunner
from tests.node.rig import NETWORK_ID, node_settings, rows_of, until
from tests.node.test_main import Running
from tests.support.tiny_models import small_llama

NUM_LAYERS, HIDDEN_SIZE = 4, 32
QUICK = PlacingTimes(
    first_look=5.0, settle=0.3, confirm=0.3, delay=0.2, debounce=0.1, every=1.0, stay=2.0, retry=0.2
)
TWO_LAYERS = int(2.5 * ROOM_POSITIONS * 2 * 16 * 4)  # bytes: room for sessions outweighs such weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tiny")
    with small_llama(256, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        llama.save_pretrained(path)
        yield path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))


@asynccontextmanager
async def member(folder: Path, **changes: Any) -> AsyncIterator[Running]:
    """A node that finds its place, with memory for two layers."""
    settings = node_settings(
        **{"model": str(folder), "threads": 1, "dtype": "float32", "memory_bytes": TWO_LAYERS, "drain_s": 5}
        | changes
    )
    node = Running(settings, times=QUICK)
    try:
        yield node
    finally:
        if not node.task.done():
            await node.stop()


@dataclass
class Client:
    """A gateway that was told of one node."""

    network: Network
    switchboard: Switchboard
    digest: bytes

    async def open(self) -> Chain:
        request = RouteRequest("tiny", self.digest, SliceSpec(0, NUM_LAYERS))
        return await self.switchboard.open_chain(request, ChainOptions(max_positions=64))

    async def open_soon(self) -> Chain:
        """As soon as there is a route."""
        async with asyncio.timeout(20):
            while True:
                try:
                    return await self.open()
                except (NoRouteError, RemoteError):
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def client(folder: Path, bootstrap: str) -> AsyncIterator[Client]:
    switchboard = Switchboard()
    network = Network(
        Identity.generate(), NetworkSettings(NETWORK_ID, bootstraps=(parse_address(bootstrap),))
    )
    switchboard.connect(network.endpoint, network.directory)
    network.dispatcher.add(switchboard, (Answer, Failure, Resumed, Standing))
    async with network.running():
        await network.first_look(5.0)
        yield Client(network, switchboard, open_checkpoint(str(folder)).digest)


async def step(chain: Chain, position: int, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rows_of(await chain.step(row.tobytes(), position=position, rows=1), HIDDEN_SIZE)


class Whole:
    """The same model uncut."""

    def __init__(self, folder: Path) -> None:
        parts = Parts(((0, NUM_LAYERS),))
        self.runner = PlainRunner.load(open_checkpoint(str(folder)), parts, dtype=torch.float32)
        self.cache = self.runner.new_cache()

    def step(self, position: int, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            rows = torch.from_numpy(row.copy())
            return self.runner.run_layers(self.cache, rows, position, start=0, end=NUM_LAYERS).numpy()


def row(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((1, HIDDEN_SIZE)).astype("<f4")


async def step_both(chain: Chain, whole: Whole, position: int) -> None:
    """One step through the chain, which must give what the uncut model gives."""
    got = await step(chain, position, row(position))
    np.testing.assert_array_equal(got, whole.step(position, row(position)))


async def test_nodes_that_start_together_serve_the_whole_model_and_leave_without_a_failure(
    folder: Path,
) -> None:
    async with member(folder, is_sentinel=True, public_addr="127.0.0.1:0") as first:
        bootstrap = (await first.ready())["address"]
        async with (
            member(folder, bootstraps=[bootstrap]) as second,
            member(folder, bootstraps=[bootstrap]) as third,
        ):
            layers = [
                SliceSpec(*map(int, (await node.ready())["layers"].split(":")))
                for node in (first, second, third)
            ]
            assert {layer for spec in layers for layer in range(spec.start, spec.end)} == set(
                range(NUM_LAYERS)
            ), layers
            async with client(folder, bootstrap) as gateway:
                chain, whole = await gateway.open_soon(), Whole(folder)
                for position in range(4):
                    await step_both(chain, whole, position)
                used = {hop.address.node_id for hop in chain.route.hops} if chain.route else set()
                ids = {
                    node: parse_address((await node.ready())["address"]).node_id for node in (second, third)
                }
                leaver = next(node for node, node_id in ids.items() if node_id in used)
                leaver.task.cancel()
                await until(lambda: leaver.event("draining") is not None)
                for position in range(4, 8):
                    await step_both(chain, whole, position)
                await chain.close()
                await until(leaver.task.done)  # long before the limit
                assert leaver.events[-1]["event"] == "stopped"
                assert leaver.events[-1]["computed"]["rows"] >= 4  # it had its part in the steps


async def test_sessions_that_outlast_a_leaving_node_go_on_elsewhere(folder: Path) -> None:
    async with member(folder, is_sentinel=True, public_addr="127.0.0.1:0", memory_bytes=1 << 30) as first:
        bootstrap = (await first.ready())["address"]
        async with member(folder, bootstraps=[bootstrap], memory_bytes=1 << 30, drain_s=0.2) as second:
            assert (await second.ready())["layers"] == "0:4"
            async with client(folder, bootstrap) as gateway:
                whole, chain = Whole(folder), await gateway.open_soon()
                await step_both(chain, whole, 0)
                assert chain.route is not None
                is_second = chain.route.hops[0].address == parse_address((await second.ready())["address"])
                leaver = second if is_second else first
                leaver.task.cancel()
                await until(leaver.task.done)
                await step_both(chain, whole, 1)
                await chain.close()


async def test_a_second_cancel_ends_a_node_at_once(folder: Path) -> None:
    async with member(
        folder, is_sentinel=True, public_addr="127.0.0.1:0", memory_bytes=1 << 30, drain_s=600
    ) as node:
        bootstrap = (await node.ready())["address"]
        async with client(folder, bootstrap) as gateway:
            chain = await gateway.open_soon()
            await step(chain, 0, row(0))
            node.task.cancel()
            await until(lambda: node.event("draining") is not None)
            await until(lambda: not gateway.network.directory.records())
            node.task.cancel()
            await until(node.task.done)
            await chain.close()


async def test_one_node_serves_several_models_and_ranges(folder: Path, tmp_path: Path) -> None:
    with small_llama(128, hidden_size=HIDDEN_SIZE, num_layers=6) as other:
        other.save_pretrained(tmp_path / "other")
    models = [f"{folder}=0:1", f"{folder}=3:4", str(tmp_path / "other")]
    async with member(
        folder, model="", models=models, is_sentinel=True, public_addr="127.0.0.1:0", memory_bytes=1 << 30
    ) as node:
        bootstrap = (await node.ready())["address"]
        async with client(folder, bootstrap) as gateway:
            await until(lambda: sorted(offered(gateway)) == [(4, "0:1"), (4, "3:4"), (6, "0:6")])


async def test_a_model_is_placed_or_named_not_both(folder: Path) -> None:
    async with member(folder, models=[f"{folder}=0:1"], is_sentinel=True, public_addr="127.0.0.1:0") as node:
        with pytest.raises(SettingsError, match="with layers and without"):
            await node.ready()


def offered(gateway: Client) -> list[tuple[int, str]]:
    return [
        (offer.num_layers, str(offer.spec))
        for told in gateway.network.directory.announced()
        for offer in told.offers
    ]
