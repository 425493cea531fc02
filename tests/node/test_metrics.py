"""What a node and a sentinel tell Prometheus and probes, over HTTP, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from node import exporter
from node.exporter import SERVING, exporting
from node.metrics import MemberMetrics
from node.settings import HostPort
from routing.errors import SettingsError
from routing.identity import Identity
from routing.network import Network, NetworkSettings
from tests.node.rig import NETWORK_ID, node_settings, until
from tests.node.test_main import described, gateway, running

FREE = HostPort(host="127.0.0.1", port=0)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(url, headers=headers)


async def test_a_node_is_well_once_it_serves_and_tells_what_it_holds(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    async with running(model=str(folder), layers="1:3", metrics="127.0.0.1:0", key_path=key) as node:
        await node.ready()
        told = node.event("metrics")
        assert told is not None
        url = str(told["url"])
        health = await get(url.replace("/metrics", "/health"))
        assert (health.status_code, health.text) == (200, "serving\n")
        page = await get(url)
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(page.text)
        own = Identity.load(key).node_id.hex()[:8]
        assert found["diffuse_node_info", (("node", own),)] == 1
        assert found["diffuse_node_slices", (("state", "serving"),)] == 1
        assert found["diffuse_node_kv_limit_bytes", ()] > 0
        layers = [value for (name, _), value in found.items() if name == "diffuse_node_slice_layers"]
        assert layers == [2]


async def test_metrics_name_no_other_member(folder: Path) -> None:
    async with running(model=str(folder), layers="1:3", metrics="127.0.0.1:0") as node, gateway() as client:
        address = (await node.ready())["address"]
        from routing.addresses import parse_address

        await described(client, parse_address(str(address)))
        told = node.event("metrics")
        assert told is not None
        page = (await get(str(told["url"]))).text
        assert samples(page)["diffuse_node_links", (("path", "direct"),)] == 1
        assert client.identity.node_id.hex()[:8] not in page


async def test_a_member_that_loads_is_alive_and_not_well() -> None:
    async with exporting(FREE, MemberMetrics("node")) as (host, port):
        health = await get(f"http://{host}:{port}/health")
        assert (health.status_code, health.text) == (503, "loading\n")
        assert (await get(f"http://{host}:{port}/live")).status_code == 200
        assert samples((await get(f"http://{host}:{port}/metrics")).text)["diffuse_node_ready", ()] == 0


async def test_a_node_without_layers_waits_and_one_that_goes_leaves(folder: Path) -> None:
    """Both are told by /health, which others may take it out of their lists by."""
    changes = {"model": str(folder), "metrics": "127.0.0.1:0", "is_sentinel": True, "memory_bytes": 1}
    async with running(**changes) as node:
        await until(lambda: node.event("metrics") is not None)
        url = str((node.event("metrics") or {})["url"]).replace("/metrics", "/health")
        async with asyncio.timeout(20):
            while (health := await get(url)).text != "waiting\n":
                await asyncio.sleep(0.05)
        assert health.status_code == 503


async def test_a_sentinel_tells_its_places_and_circuits() -> None:
    network = Network(
        Identity.generate(), NetworkSettings(NETWORK_ID, listen=("127.0.0.1", 0), is_sentinel=True)
    )
    metrics = MemberMetrics("sentinel")
    metrics.watch_network(network)
    metrics.know_state(lambda: SERVING)
    assert "diffuse_sentinel_circuits" not in metrics.render().decode()  # not started
    async with network.running():
        found = samples(metrics.render().decode())
    assert found["diffuse_sentinel_reservations", ()] == found["diffuse_sentinel_circuits", ()] == 0
    assert found["diffuse_sentinel_circuits_limit", ()] > 0
    assert found["diffuse_sentinel_relay_refused_total", (("code", "RELAY_FULL"),)] == 0
    assert not [name for name, _ in found if name.startswith("diffuse_node_")]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", ""])
async def test_a_page_of_another_name_reads_nothing_on_loopback(host: str) -> None:
    async with exporting(FREE, MemberMetrics("node")) as (address, port):
        assert (await get(f"http://{address}:{port}/metrics", host=host)).status_code in (400, 403)
        assert (await get(f"http://{address}:{port}/metrics", host="localhost:1")).status_code == 200


async def test_what_is_not_there_is_refused_in_a_word() -> None:
    async with (
        exporting(FREE, MemberMetrics("node")) as (host, port),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        base = f"http://{host}:{port}"
        assert (await client.get(f"{base}/metrics/../etc")).status_code == 404
        assert (await client.post(f"{base}/metrics")).status_code == 405
        head = await client.head(f"{base}/metrics")
        assert (head.status_code, head.content) == (200, b"")


async def test_bytes_that_are_no_http_end_their_own_connection_only() -> None:
    async with exporting(FREE, MemberMetrics("node")) as (host, port):
        for garbage in (b"\x00\xff" * 4096, b"GET / HTTP/1.1\r\nX: " + b"a" * 65536):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(5):
                    await reader.read()
            writer.close()
        assert (await get(f"http://{host}:{port}/live")).status_code == 200


async def test_who_only_holds_a_connection_keeps_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "HEAD_TIMEOUT_S", 0.5)
    async with exporting(FREE, MemberMetrics("node")) as (host, port):
        held = [await asyncio.open_connection(host, port) for _ in range(exporter.MAX_CONNECTIONS + 8)]
        for _, writer in held:
            writer.write(b"GET /live HTT")
        assert (await get(f"http://{host}:{port}/live")).status_code == 503
        async with asyncio.timeout(10):
            for reader, writer in held:
                assert await reader.read() == b""
                writer.close()
        assert (await get(f"http://{host}:{port}/live")).status_code == 200


async def test_a_place_that_is_taken_is_told() -> None:
    async with exporting(FREE, MemberMetrics("node")) as (host, port):
        with pytest.raises(SettingsError, match="cannot serve metrics"):
            async with exporting(HostPort(host=host, port=port), MemberMetrics("node")):
                pass


def test_metrics_that_others_could_read_want_a_word() -> None:
    with pytest.raises(ValidationError, match="--metrics-open"):
        node_settings(metrics="0.0.0.0:9464")
    assert str(node_settings(metrics="0.0.0.0:9464", metrics_open=True).metrics) == "0.0.0.0:9464"
    assert node_settings(metrics="localhost:9464").metrics is not None
    assert node_settings(metrics="[::1]:9464").metrics is not None
