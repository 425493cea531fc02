"""What only several gateways and a server of their own can show: deaths, failures, passwords, certificates, names."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from app.jobs.job import Job
from app.state import redis_state as module
from app.state.opening import open_state
from app.state.redis_state import RedisState, redis_state
from app.state.state import Bound, JobBounds, JobRow, State, StateError
from app.state.trouble import Trouble
from tests.support.redis_server import RedisProcess, redis_process

BOUNDS = JobBounds(100, 1 << 20, 60.0)
SECRET = "pass-wörd/1"
QUOTED = "pass-w%C3%B6rd%2F1"

DYING = """
import asyncio, sys
from app.jobs.job import Job
from app.state.redis_state import redis_state
from app.state.state import JobBounds, JobRow

async def main():
    async with redis_state(sys.argv[1], lease_s=1.5) as state:
        assert await state.hold("key", 2, 2)
        job = Job("video_1", "me", "filmer", "waves", "64x48", "1")
        await state.jobs.add(JobRow(job, state.gateway_id, 5), JobBounds(10, 1000, 60.0))
        print(state.gateway_id, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
async def two(redis: RedisProcess) -> AsyncIterator[tuple[State, State]]:
    async with open_state(redis.url) as one, open_state(redis.url) as other:
        yield one, other


async def test_a_keys_limits_hold_across_gateways(two: tuple[State, State]) -> None:
    one, other = two
    told = [await state.take("key", 3) for state in (one, other, one, other)]
    assert [allowance.is_granted for allowance in told] == [True, True, True, False]
    lease = await one.hold("key", 2)
    assert lease is not None
    assert await other.hold("key", 2) is not None
    assert await other.hold("key", 2) is None
    await one.release(lease)
    assert await other.hold("key", 2) is not None


async def test_a_minute_is_one_for_gateways_whose_clocks_differ(
    two: tuple[State, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    true_time = time.time
    for skew_s in (-300.0, 300.0):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: true_time() + skew_s)
        assert (await one.take(f"key{skew_s}", 2)).is_granted
        monkeypatch.setattr(time, "time", true_time)
        second = await other.take(f"key{skew_s}", 2)
        assert second.is_granted
        assert (second.remaining, 50 < second.reset_s <= 60) == (0, True)
        refused = await other.take(f"key{skew_s}", 2)
        assert 50 < refused.wait_s <= 60


async def test_what_a_gateway_holds_counts_though_the_server_forgot_that_it_lives(
    two: tuple[State, State], redis: RedisProcess
) -> None:
    one, other = two
    async with Redis.from_url(redis.url) as client:
        await client.flushall()
    assert await one.hold("key", 1) is not None
    assert await other.hold("key", 1) is None


async def test_a_shelf_whose_index_was_evicted_takes_values_again(
    two: tuple[State, State], redis: RedisProcess
) -> None:
    shelf = two[0].shelf("records", Bound(3, 60.0))
    for number in range(3):
        await shelf.put(f"n{number}", b"x")
    async with Redis.from_url(redis.url) as client:
        assert await client.delete("diffuse:records:until") == 1
    for number in range(3, 6):
        await shelf.put(f"n{number}", b"x")
        assert await shelf.get(f"n{number}") is not None


async def test_gateways_see_each_other(two: tuple[State, State]) -> None:
    one, other = two
    ids = {one.gateway_id, other.gateway_id}
    assert await one.living([*ids, "a third"]) == ids


async def test_what_a_gateway_held_is_free_once_it_leaves(redis: RedisProcess) -> None:
    async with open_state(redis.url) as left:
        async with open_state(redis.url) as leaving:
            assert await leaving.hold("key", 1) is not None
            assert await left.hold("key", 1) is None
        assert await left.hold("key", 1) is not None


async def test_what_a_killed_gateway_held_ends_by_itself(redis: RedisProcess) -> None:
    died = subprocess.Popen([sys.executable, "-c", DYING, redis.url], stdout=subprocess.PIPE)
    try:
        async with open_state(redis.url) as state:
            assert died.stdout is not None
            name = (await asyncio.to_thread(died.stdout.readline)).decode().strip()
            await asyncio.sleep(2.0)  # longer than its lease: it says that it lives
            assert await state.living([name])
            assert await state.hold("key", 2) is None
            died.send_signal(signal.SIGKILL)
            async with asyncio.timeout(5):
                while await state.hold("key", 2) is None:
                    await asyncio.sleep(0.05)
            assert not await state.living([name])
    finally:
        died.kill()
        died.communicate()


async def test_a_release_that_did_not_arrive_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with redis_process("--maxclients", "100") as server:
        async with redis_state(server.url, lease_s=0.3) as state:
            lease = await state.hold("key", 1)
            assert lease is not None
            server.pause()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await state.release(lease)
            server.go_on()
            async with asyncio.timeout(3):
                while await state.hold("key", 1) is None:
                    await asyncio.sleep(0.02)


async def test_a_server_that_goes_and_comes_back_is_told_of_and_used_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    counted: list[str] = []
    with redis_process() as server:
        async with redis_state(server.url, lease_s=0.3) as state:
            state.on_error = Trouble(counted.append).note
            server.stop()
            for work in (state.take("k", 1), state.hold("k", 1), state.living(["g"]), state.jobs.rows()):
                with pytest.raises(StateError):
                    await work
            assert {"limits", "presence", "jobs"} <= set(counted)
            assert caplog.text.count("the state store fails") == 1
            assert str(server.folder) not in caplog.text
            server.start()
            assert (await state.take("k", 1)).is_granted
            async with redis_state(server.url, lease_s=0.3) as other, asyncio.timeout(3):
                while not await other.living([state.gateway_id]):
                    await asyncio.sleep(0.02)


async def test_a_gateway_starts_while_the_server_is_away() -> None:
    with redis_process() as server:
        server.stop()
        async with redis_state(server.url, lease_s=0.3) as state:
            with pytest.raises(StateError):
                await state.take("key", 1)
            server.start()
            assert (await state.take("key", 1)).is_granted


async def test_every_name_is_ours_and_ends_by_itself(redis: RedisProcess) -> None:
    async with redis_state(redis.url) as state:
        await fill(state)
        client = state._server.client
        names = sorted(name.decode() for name in await client.keys("*"))
        assert len(names) > 12
        assert not [name for name in names if not name.startswith("diffuse:")]
        assert not [name for name in names if await client.ttl(name) < 0]


async def test_a_user_who_may_use_our_names_only_is_enough(redis: RedisProcess) -> None:
    with redis_process(
        "--user", "diffuse", "on", f">{SECRET}", "~diffuse:*", "+@all", "-@dangerous"
    ) as server:
        async with redis_state(f"unix://diffuse:{QUOTED}@{server.socket}", lease_s=0.3) as state:
            await fill(state)


async def fill(state: RedisState) -> None:
    """Use everything once."""
    await state.take("key", 5)
    await state.hold("key", 5)
    for name in ("records", "pictures"):
        shelf = state.shelf(name, Bound(10, 60.0))  # type: ignore[arg-type]
        await shelf.put("one", b"value")
        await shelf.put("two", b"value")
        await shelf.remove("two")
    job = Job("video_1", "", "filmer", "waves", "64x48", "1")
    await state.jobs.add(JobRow(job, state.gateway_id, 5), BOUNDS)
    await state.jobs.note("video_1", b"half", 60.0)
    await state.jobs.change(job.done("1", 60.0), BOUNDS)
    await state.files.put("video_1", {"film": bytes(3 << 20)}, 60.0)
    await state.beat()


async def test_a_wrong_or_missing_password_ends_the_start_without_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_process("--requirepass", SECRET) as server:
        for name in (f"unix://:wrong-{QUOTED}@{server.socket}", server.url):
            with pytest.raises(StateError, match="Redis refuses") as raised:
                async with open_state(name):
                    pass
            assert "wrong" not in repr(raised.value)
            assert raised.value.__cause__ is None
        async with open_state(f"unix://:{QUOTED}@{server.socket}") as state:
            assert (await state.take("key", 1)).is_granted
            assert "pass-w" not in repr(vars(state))
    assert "pass-w" not in caplog.text


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secured(authority: trustme.CA, tmp_path: Path) -> Iterator[str]:
    """Where a server listens that speaks TLS only and asks for a password."""
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    options = [
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(tmp_path / "cert.pem"),
        "--tls-auth-clients",
        "no",
    ]
    options += ["--tls-key-file", str(tmp_path / "key.pem"), "--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    with redis_process(*options, "--requirepass", SECRET):
        yield f"localhost:{port}"


async def test_tls_with_a_password(secured: str, tmp_path: Path) -> None:
    async with open_state(f"rediss://:{QUOTED}@{secured}/3?ssl_ca_certs={tmp_path}/ca.pem") as state:
        assert (await state.take("key", 1)).is_granted
        assert not (await state.take("key", 1)).is_granted


async def test_a_certificate_that_nobody_vouches_for_ends_the_start(secured: str) -> None:
    with pytest.raises(StateError, match="certificate"):
        async with open_state(f"rediss://:{QUOTED}@{secured}"):
            pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
