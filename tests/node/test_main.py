"""A node from start to stop, as `diffuse host` runs it, on a tiny model in a folder."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node.loading import LoadReport, read_slice
from node.main import load_identity, run_node
from node.placing import PlacingTimes
from node.settings import NodeSettings
from routing.addresses import parse_address
from routing.endpoint import Endpoint
from routing.errors import RemoteError, SettingsError
from routing.types import Capabilities, Describe, Description, NodeAddress, SliceSpec
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.runner import PlainRunner
from tests.node.rig import NETWORK_ID, TIMEOUT_S, Gateway, node_settings, until


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))


class Running:
    """A node that runs, and what it has told."""

    def __init__(self, settings: NodeSettings, *, times: PlacingTimes | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.task = asyncio.create_task(
            run_node(settings, on_event=lambda event: self.events.append(dict(event)), times=times)
        )

    def event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == name), None)

    async def ready(self) -> dict[str, Any]:
        await until(lambda: self.task.done() or self.event("ready") is not None)
        if self.task.done():
            self.task.result()
        event = self.event("ready")
        assert event is not None
        return event

    async def stop(self) -> None:
        self.task.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait({self.task})
        assert self.task.cancelled()


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Running]:
    node = Running(node_settings(**changes))
    try:
        yield node
    finally:
        if not node.task.done():
            await node.stop()


@asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    made.endpoint = Endpoint(made.identity, NETWORK_ID, Capabilities, made)
    try:
        yield made
    finally:
        await made.endpoint.close()


async def described(client: Gateway, address: NodeAddress) -> Description:
    """What a node says that it serves; what else it says to whoever dials it is not looked at."""
    link = await client.endpoint.dial(address)
    await link.send(Describe())
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            _, message = await client.inbox.get()
            if isinstance(message, Description):
                return message


async def test_a_node_loads_its_layers_measures_and_serves(folder: Path, tmp_path: Path) -> None:
    settings = {"model": str(folder), "layers": "1:3", "cache_dir": tmp_path, "key_path": tmp_path / "key"}
    async with running(**settings) as node, gateway() as client:
        ready = await node.ready()
        assert (ready["layers"], ready["dtype"], ready["has_opening"]) == ("1:3", "float32", False)
        assert 0 < ready["weights_bytes"] <= ready["bytes_read"] < 1.05 * ready["weights_bytes"]
        assert [event["event"] for event in node.events if event["event"] != "progress"] == [
            "measured",
            "ready",
        ]
        address = parse_address(ready["address"])
        assert address.node_id == load_identity(tmp_path / "key").node_id
        (offer,) = (await described(client, address)).slices
        assert (str(offer.spec), offer.num_layers, len(offer.layer_hashes)) == ("1:3", 4, 2)
        assert offer.layer_ms > 0
        await node.stop()
        assert node.events[-1] == {"event": "stopped"}
        async with asyncio.timeout(TIMEOUT_S):
            assert await client.losses.get() is None  # a proper close


async def test_what_was_measured_is_used_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    for is_remembered in (False, True):
        async with running(model=str(folder), cache_dir=tmp_path) as node:
            await node.ready()
            measured = node.event("measured")
            assert measured is not None
            assert measured["is_remembered"] is is_remembered


async def test_ends_are_held_where_the_slice_touches_them_and_they_are_asked_for(folder: Path) -> None:
    for layers, hold_ends, expected in (
        ("0:2", True, (True, False)),
        ("2:4", True, (False, True)),
        ("0:4", False, (False, False)),
    ):
        async with running(model=str(folder), layers=layers, hold_ends=hold_ends, threads=1) as node:
            ready = await node.ready()
            assert (ready["has_opening"], ready["has_closing"]) == expected


def test_the_head_is_shared_among_threads_where_the_slice_holds_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainRunner, "widen_head", lambda self: asked.append(self.parts.closing))
    asked: list[bool] = []
    report = LoadReport(lambda event: None)
    settings = node_settings(model=str(folder), hold_ends=True, threads=1)
    for layers in (SliceSpec(0, 2), SliceSpec(2, 4)):
        read_slice(settings, open_checkpoint(str(folder)), layers, report)
    assert asked == [False, True]


async def test_what_is_bound_and_what_is_told_are_two_things(folder: Path) -> None:
    async with running(model=str(folder), threads=1, public_addr="node.example:0") as node:
        ready = await node.ready()
        told, port = parse_address(ready["address"]), int(ready["bound"].rpartition(":")[2])
        assert (told.host, told.port) == ("node.example", port)
        assert ready["bound"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"layers": "2:5"}, SettingsError, "the model has layers 0:4"),
        ({"model": "/nowhere/at/all"}, ModelError, "nowhere"),
    ],
)
async def test_what_cannot_be_served_is_said_at_once(
    folder: Path, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await run_node(
            node_settings(**{"model": str(folder), "threads": 1} | changes), on_event=lambda _: None
        )


async def test_a_port_in_use_is_named(folder: Path) -> None:
    async with running(model=str(folder), threads=1) as node:
        bound = (await node.ready())["bound"]
        with pytest.raises(SettingsError, match=bound):
            await run_node(node_settings(model=str(folder), threads=1, listen=bound), on_event=lambda _: None)


async def test_a_node_can_be_stopped_while_it_loads(folder: Path) -> None:
    node = Running(node_settings(model=str(folder)))
    await asyncio.sleep(0)
    await node.stop()
    assert node.events[-1] == {"event": "stopped"}
    assert node.event("ready") is None


async def test_a_node_of_another_swarm_does_not_answer(folder: Path) -> None:
    async with running(model=str(folder), threads=1, psk=b"s" * 32) as node, gateway() as client:
        address = parse_address((await node.ready())["address"])
        with pytest.raises(RemoteError):
            await client.endpoint.dial(address)


def test_a_key_is_made_once_and_only_for_us(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.key"
    identity = load_identity(path)
    assert load_identity(path).node_id == identity.node_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_identity(path)
    assert load_identity(None).node_id != identity.node_id
